"""The transformers engine: any family and format that transformers loads, on CPU or GPUs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from tightfit.core.errors import UsageError
from tightfit.engines.open import EngineRequest, open_prompter
from tightfit.engines.protocol import (
    BaseEngine,
    EngineInfo,
    Listener,
    Request,
    Ticket,
    check_tokens,
    choose_context,
)
from tightfit.engines.transformers.batch import ContinuousBatcher, RunningAnswer, free_memory
from tightfit.engines.transformers.constraint import ConstraintMaker
from tightfit.engines.transformers.rows import (
    CPU_SLOTS,
    PREFILL_TOKENS,
    BatchRows,
    DecoderRows,
    EncoderDecoderRows,
    SingleRow,
    count_gpu_slots,
    has_plain_cache,
)
from tightfit.estimation.inference import kv_row_bytes
from tightfit.models.families.registry import find_family
from tightfit.runtime.attention import read_loaded_config
from tightfit.runtime.inference import LoadedModel, load_for_inference

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tightfit.data.templates import Prompter

_Result = TypeVar("_Result")


def open_rows(model: Any, *, most_rows: int) -> BatchRows:
    """The kind of rows that the family needs."""
    if model.config.is_encoder_decoder:
        return EncoderDecoderRows(model)
    if not has_plain_cache(model.config):
        return SingleRow(model)
    from tightfit.engines.transformers.cuda_graphs import SlotRows, supports_slots

    if model.device.type == "cuda" and supports_slots(model):
        return SlotRows(model, most_rows=most_rows)
    return DecoderRows(model, most_rows=most_rows)


# Sizes of a loaded model: parameters, bytes, slots.


def count_params(model: Any) -> int:
    """Parameters of the architecture, also where they are quantized."""
    from tightfit.runtime.gptq import GptqLinear

    packed = [module for module in model.modules() if isinstance(module, GptqLinear)]
    total = sum(module.in_features * module.out_features for module in packed)
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        total += parameter.numel() if state is None else state.shape.numel()
    return int(total)


def count_bytes(model: Any) -> int:
    """Weights in memory, with scales of quantized ones; shared tensors count once."""
    found: dict[int, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        for part in (tensor, *_scales(tensor)):
            found[part.data_ptr()] = part.numel() * part.element_size()
    return sum(found.values())


def _scales(tensor: Any) -> list[Any]:
    """bitsandbytes keeps scales as attributes of the parameter."""
    import torch

    state = getattr(tensor, "quant_state", None)
    nested = getattr(state, "state2", None)
    held = [getattr(state, "absmax", None), getattr(nested, "absmax", None)]
    held.append(getattr(tensor, "SCB", None))
    return [part for part in held if isinstance(part, torch.Tensor)]


def kv_bytes_per_token(model: Any) -> int:
    """Keys and values of one token, over all layers, as this engine keeps them."""
    config = model.config.get_text_config(decoder=True)
    itemsize = int(model.dtype.itemsize)
    if find_family(config.model_type).read is not None:
        return kv_row_bytes(read_loaded_config(config), 1, itemsize)
    heads = int(config.num_attention_heads)
    key_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    width = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    layers = int(getattr(config, "num_decoder_layers", None) or config.num_hidden_layers)
    return 2 * layers * key_heads * width * itemsize


def find_context(config: Any) -> int | None:
    """The model's context length; None where its positions are unlimited."""
    if config.is_encoder_decoder:
        return None
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(found) if found else None


def choose_slots(model: Any, asked: int | None, *, max_context: int) -> int:
    """Requests at once: as many as memory holds when each fills half of its context."""
    import torch

    if not model.config.is_encoder_decoder and not has_plain_cache(model.config):
        return 1
    if asked is not None:
        return max(1, asked)
    if model.device.type != "cuda":
        return CPU_SLOTS
    gpus = {p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"}
    free = sum(torch.cuda.mem_get_info(index)[0] for index in gpus)
    each = kv_bytes_per_token(model) * max(1, max_context // 2)
    return count_gpu_slots(free, each)


# Logits of a whole text, computed piece by piece so that they never fill the device.

_MAX_LOGITS = 1 << 26
"""Of one piece: 256 MiB in fp32."""


def compute_logits(model: Any, tokens: list[int]) -> NDArray[np.float32]:
    """(tokens, vocabulary) in fp32. Must not run beside a step."""
    import numpy as np
    import torch

    device = model.get_input_embeddings().weight.device
    # The head may be quantized, and then has no weight of that shape.
    num_vocabulary = int(model.config.get_text_config().vocab_size)
    scores = np.empty((len(tokens), num_vocabulary), dtype=np.float32)
    is_plain = has_plain_cache(model.config)
    size = max(16, _MAX_LOGITS // num_vocabulary) if is_plain else len(tokens)
    cache = _open_cache(model)
    names = inspect.signature(model.forward).parameters
    for start in range(0, len(tokens), size):
        end = min(start + size, len(tokens))
        extra = {}
        if "position_ids" in names:
            extra["position_ids"] = torch.arange(start, end, device=device)[None]
        with torch.inference_mode():
            output = model(
                input_ids=torch.tensor([tokens[start:end]], device=device),
                attention_mask=torch.ones((1, end), dtype=torch.long, device=device),
                past_key_values=cache,
                use_cache=True,
                **extra,
            )
        if is_plain:
            cache.advance(end - start)
        scores[start:end] = output.logits[0].float().cpu().numpy()
        del output
    return scores


def _open_cache(model: Any) -> Any:
    from transformers import DynamicCache

    from tightfit.engines.transformers.cache import RowCache

    if not has_plain_cache(model.config):
        return DynamicCache(config=model.config)
    cache = RowCache(most_rows=1)
    cache.begin(1, 0)
    return cache


def open_transformers(request: EngineRequest, *, why: str) -> TransformersEngine:
    """Load the artefact and start to take requests."""
    prompter = open_prompter(request)
    loaded = load_for_inference(request.artefact, weights=request.weights, device=request.device)
    return TransformersEngine(loaded, prompter, request, why=why)


class TransformersEngine(BaseEngine):
    """A loaded model, and the batch that computes its answers."""

    def __init__(
        self, loaded: LoadedModel, prompter: Prompter, request: EngineRequest, *, why: str
    ) -> None:
        import transformers

        model: Any = loaded.model
        max_context = choose_context(request.context, find_context(model.config))
        num_slots = choose_slots(model, request.slots, max_context=max_context)
        info = EngineInfo(
            engine="transformers",
            version=str(transformers.__version__),
            why=f"{why} {loaded.note}".strip(),
            model=request.artefact.name,
            format=loaded.format,
            device=loaded.device,
            max_context=max_context,
            num_slots=num_slots,
            num_params=count_params(model),
            weight_bytes=count_bytes(model),
            kv_bytes_per_token=kv_bytes_per_token(model),
        )
        num_vocabulary = int(model.get_input_embeddings().weight.shape[0])
        super().__init__(info, prompter, num_vocabulary=num_vocabulary)
        self._model = model
        self._constraints = ConstraintMaker(prompter, num_vocabulary=num_vocabulary)
        rows = open_rows(model, most_rows=num_slots)
        kind = "cuda" if model.device.type == "cuda" else "cpu"
        self._batcher = ContinuousBatcher(
            rows,
            num_slots=num_slots,
            prefill_tokens=PREFILL_TOKENS[kind],
            overlaps=kind == "cuda",
        )
        self._batcher.call_later(rows.warm_up)

    def submit(self, request: Request, listener: Listener) -> Ticket:
        self._check_open()
        self._check_request(request)
        grammar = request.sampling.grammar
        answer = RunningAnswer(
            request,
            listener,
            self.prompter,
            max_context=self.info.max_context,
            constraint=None if grammar is None else self._constraints.make(grammar),
        )
        self._batcher.add(answer)
        return answer

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        self._check_open()
        if self._model.config.is_encoder_decoder:
            raise UsageError(
                "An encoder-decoder has no logits of a plain text: its input and output differ.",
                remedy="compare its answers instead: tightfit eval",
            )
        wanted = list(tokens)
        check_tokens(wanted, self.num_vocabulary)
        return self.call(lambda model: compute_logits(model, wanted))

    def call(self, function: Callable[[Any], _Result]) -> _Result:
        """The function's result on the model, between two steps of the batch."""
        self._check_open()
        model = self._model
        return self._batcher.call(lambda: function(model))

    def close(self) -> None:
        if not self._set_closed():
            return
        self._batcher.close()
        self._model = None
        del self._batcher
        free_memory()
