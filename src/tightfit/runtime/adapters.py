"""LoRA adapters: add new ones to a base model as the plan says, load and save trained ones."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import (
    InvalidInputError,
    NotFoundError,
    SetupError,
    UsageError,
    first_line,
)
from tightfit.core.reading import read_json_file
from tightfit.core.settings import ALL_LINEAR, EMBEDDINGS, EXPERTS
from tightfit.core.strategy import Strategy, Training
from tightfit.core.text import did_you_mean, printable
from tightfit.models.families.parts import MAX_VOCAB
from tightfit.models.families.registry import check_takes_adapter, find_family
from tightfit.runtime.libraries import silence_libraries, torch_dtype
from tightfit.runtime.load import plain_dtype
from tightfit.runtime.vocabulary import (
    count_adapter_rows,
    count_model_rows,
    grow_rows,
    list_new_tokens,
)

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel


def add_adapters(model: PreTrainedModel, strategy: Strategy, training: Training) -> PeftModel:
    """Add adapters, the only trained parameters, in `strategy.adapter_dtype`.

    B is zero, so the model computes what the base model does until the first step.
    """
    silence_libraries()  # before the import that prints
    from peft import LoraConfig, TaskType, get_peft_model
    from transformers.pytorch_utils import Conv1D

    from tightfit.runtime.embedding_adapters import share_adapter
    from tightfit.runtime.kernels.experts import group_adapters
    from tightfit.runtime.packed_experts import as_values

    targets = strategy.lora_targets
    if ALL_LINEAR not in targets:
        _check_targets(model, tuple(name for name in targets if name != EMBEDDINGS))
    is_seq2seq = bool(model.config.is_encoder_decoder)
    has_embeddings = strategy.train_embeddings or strategy.adapts_embeddings
    tying = _tie_copies(model, strategy) if has_embeddings else {}
    rows = _list_new_rows(model, strategy)
    make_config: Any = LoraConfig  # annotated too narrowly: alpha may be a fraction
    config = make_config(
        task_type=TaskType.SEQ_2_SEQ_LM if is_seq2seq else TaskType.CAUSAL_LM,
        r=strategy.lora_rank,
        lora_alpha=training.scale_alpha(strategy.lora_rank),
        lora_dropout=strategy.lora_dropout,
        target_modules=_list_targets(model, targets),
        target_parameters=_list_expert_targets(model, targets) or None,
        exclude_modules=_find_excluded(model, targets),
        use_rslora=training.rslora,
        use_dora=strategy.dora,
        modules_to_save=embedding_names(model) if strategy.train_embeddings else None,
        trainable_token_indices=rows or None,
        bias="none",
        # GPT-2's Conv1D stores its matrix transposed, unless it was quantized.
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        **tying,
    )
    # By default peft casts 16-bit adapters to fp32, which the plan does not count.
    with as_values(model, plain_dtype(strategy)), _without_peft_warnings():
        adapted: PeftModel = get_peft_model(model, config, autocast_adapter_dtype=False)
    group_adapters(adapted)
    if strategy.adapts_embeddings and tying:
        share_adapter(adapted)
    _cast_trained(adapted, strategy)
    return adapted


def load_adapter(model: Any, folder: Path, *, name: str = "default") -> PeftModel:
    """The model with the adapter of `folder`, in the dtype it was saved in.

    A model that has adapters gets one more, of another name.
    """
    silence_libraries()  # before the import that prints
    from peft import PeftModel

    from tightfit.runtime.kernels.experts import group_adapters
    from tightfit.runtime.packed_experts import as_values

    check_adapter_files(folder)
    num_rows = find_adapter_rows(model, folder)
    if num_rows is not None:
        grow_rows(model, num_rows)
    try:
        with as_values(model, model.dtype), _without_peft_warnings():
            options: dict[str, Any] = {
                "adapter_name": name, "autocast_adapter_dtype": False, "local_files_only": True
            }  # fmt: skip
            if isinstance(model, PeftModel):
                model.load_adapter(str(folder), **options)
                adapted = model
            else:
                adapted = PeftModel.from_pretrained(model, str(folder), **options)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, Warning) as error:
        raise InvalidInputError(
            f"The adapter in {folder} does not fit this model: {first_line(error)}.",
            remedy="load it on the base model it was trained on: see its adapter_config.json",
        ) from error
    group_adapters(adapted)
    return adapted


def save_adapter(model: PeftModel, folder: Path, state: dict[str, Any] | None = None) -> None:
    """Write peft's files. `state` replaces the values of sharded parameters.

    Trained embeddings are among them as any module that was trained whole. By default peft asks the
    hub whether the vocabulary has grown, and then writes embeddings a second time.
    """
    from tightfit.runtime.embedding_adapters import find_shared_head, list_shared_values

    if find_shared_head(model) is not None:
        # peft stores the adapter of a tied head beside that of the embeddings.
        values = model.state_dict() if state is None else state
        state = values | list_shared_values(model, values)
    if state is not None:
        # Each tied value under all its names, as peft looks them up.
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        every = model.named_parameters(remove_duplicate=False)
        named = {name: first[id(parameter)] for name, parameter in every}
        state = state | {name: state[known] for name, known in named.items() if known in state}
    config: Any
    for config in model.peft_config.values():
        if isinstance(config.target_modules, set):  # in an order of each process's own
            config.target_modules = sorted(config.target_modules)
    model.save_pretrained(
        str(folder),
        state_dict=state,
        save_embedding_layers=False,
        safe_serialization=True,
    )


@contextmanager
def _without_peft_warnings() -> Iterator[None]:
    """Suppress those about what is right here."""
    with warnings.catch_warnings():
        # GPT-2's Conv1D was a plain matrix where it was quantized in training: peft adapts to it.
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to")
        # peft looks for stacked experts among the modules, and they are parameters.
        warnings.filterwarnings("ignore", r"The following \w+_pattern keys did not match")
        # An adapter of another model, which would stay as it was initialised.
        warnings.filterwarnings("error", "Found missing adapter keys")
        yield


def embedding_names(model: Any) -> list[str]:
    """Last name parts of the embeddings and, unless tied, the head."""
    wanted = {id(model.get_input_embeddings())}
    head = model.get_output_embeddings()
    if head is not None and not _is_tied(model):
        wanted.add(id(head))
    names = [name for name, module in model.named_modules() if id(module) in wanted]
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


NEW_ROWS = "trainable_tokens_"
"""In the names of the trained rows of new tokens, as peft has them."""


def _list_new_rows(model: Any, strategy: Strategy) -> dict[str, list[int]]:
    """The numbers of the tokens whose rows alone are trained, by the name of their matrix."""
    if not strategy.num_new_rows:
        return {}
    head = model.get_output_embeddings()
    if not _is_tied(model) and getattr(head, "bias", None) is not None:
        raise UsageError(
            f"The head of {model.config.model_type} has a bias, which peft leaves out where it "
            "trains single rows.",
            remedy="--set train_embeddings=true, or --method full",
        )
    return dict.fromkeys(embedding_names(model), list_new_tokens(model))


def find_adapter_rows(model: Any, folder: Path) -> int | None:
    """Rows that the base had when the adapter was trained; None: as it has."""
    from tightfit.runtime.tensor_files import list_safetensors

    ends = tuple(f"{name}.weight" for name in embedding_names(model))
    for tensor in list_safetensors(folder / "adapter_model.safetensors"):
        if tensor.name.replace(".base_layer", "").endswith(ends) and "lora_" not in tensor.name:
            return int(tensor.shape[0])
    return find_new_rows(model, folder)


def find_new_rows(model: Any, folder: Path) -> int | None:
    """The same of an adapter with rows for new tokens alone; None: it has none."""
    indices = read_json_file(folder / "adapter_config.json").get("trainable_token_indices")
    listed = indices.values() if isinstance(indices, dict) else [indices or []]
    highest = [max(numbers) for numbers in listed if numbers]
    return count_adapter_rows(folder, highest, count_model_rows(model)) if highest else None


def _is_tied(model: Any) -> bool:
    head = model.get_output_embeddings()
    return bool(head is not None and head.weight is model.get_input_embeddings().weight)


def _tie_copies(model: PreTrainedModel, strategy: Strategy) -> dict[str, Any]:
    """peft's option to train one copy, or one adapter, for tied embeddings and head."""
    from peft import LoraConfig
    from peft.utils.constants import EMBEDDING_LAYER_NAMES

    is_known = set(embedding_names(model)) <= set(EMBEDDING_LAYER_NAMES)
    if model.config.is_encoder_decoder or (_is_tied(model) and not is_known):
        raise UsageError(
            f"{model.config.model_type} uses one matrix in several places, and peft would train "
            f"{'an adapter' if strategy.adapts_embeddings else 'a copy'} of one of them alone.",
            remedy=f"--set lora_targets={ALL_LINEAR}"
            if strategy.adapts_embeddings
            else "--set train_embeddings=false, or --method full",
        )
    if not _is_tied(model):
        return {}
    if "ensure_weight_tying" not in LoraConfig.__dataclass_fields__:
        raise SetupError(
            "The model has one matrix for embeddings and head, and this peft would train two.",
            remedy="pip install -U peft",
        )
    return {"ensure_weight_tying": True}


def _cast_trained(model: nn.Module, strategy: Strategy) -> None:
    """Cast adapters to the plan's dtype. Trained embeddings keep the base's dtype, except fp16,
    whose gradients GradScaler refuses."""
    adapter = torch_dtype(strategy.adapter_dtype)
    embedding = torch_dtype(Dtype.FP32) if strategy.compute is Dtype.FP16 else None
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_adapter = "lora_" in name or NEW_ROWS in name
            dtype = adapter if is_adapter else embedding
            parameter.data = parameter.data.to(dtype or parameter.dtype)


def _list_targets(model: Any, targets: tuple[str, ...]) -> str | list[str]:
    """What peft is told to adapt.

    For some mixtures it takes `all-linear`, and the names that the parts of an expert had before
    transformers 5, for their experts as well.
    """
    embeddings = embedding_names(model) if EMBEDDINGS in targets else []
    if ALL_LINEAR not in targets:
        return [*(name for name in targets if name != EMBEDDINGS), *embeddings]
    experts = set() if EXPERTS in targets else _names_for_experts(model.config.model_type)
    if not experts and not embeddings:
        return ALL_LINEAR
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    linears = [
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    ]
    return [*(name for name in dict.fromkeys(linears) if name not in experts), *embeddings]


def _list_expert_targets(model: Any, targets: tuple[str, ...]) -> list[str]:
    """The parameters of experts that peft must be told of: `all-linear` is enough for some."""
    from tightfit.runtime.packed_experts import list_packable

    if EXPERTS not in targets or _names_for_experts(model.config.model_type):
        return []
    paths = [path.split(".") for path, _, _ in list_packable(model)]
    return list(dict.fromkeys(".".join(parts[-2:]) for parts in paths))


def _names_for_experts(model_type: str) -> set[str]:
    """Names that peft takes for experts of this family: none before version 0.19."""
    try:
        from peft.utils import transformers_weight_conversion as conversion
    except ImportError:
        return set()
    library: Any = conversion
    kind = library._MODEL_TO_CONVERSION_PATTERN.get(model_type)
    return set(library._MOE_TARGET_MODULE_MAPPING.get(kind, {}))


def _find_excluded(model: PreTrainedModel, targets: tuple[str, ...]) -> str | None:
    """A regex of the modules of this model that take no adapter, whatever their name."""
    from tightfit.runtime.layers import list_other_parts

    parts = [rf"{re.escape(name)}\..*" for name in list_other_parts(model)]
    if ALL_LINEAR in targets:
        family = find_family(model.config.get_text_config().model_type)
        there = {name.rpartition(".")[2] for name, _ in model.named_modules()}
        parts += [rf"(.*\.)?{name}" for name in family.lora_excludes if name in there]
    return "|".join(parts) or None


def _check_targets(model: PreTrainedModel, targets: tuple[str, ...]) -> None:
    """Every target must name a module that takes one; peft accepts it if one of them does."""
    for target in targets:
        check_takes_adapter(model.config.get_text_config().model_type, target)
    names = [name for name, _ in model.named_modules() if name]
    known = sorted({name.rpartition(".")[2] for name in names if not name[-1].isdigit()})
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise UsageError(
                f"The model has no module `{target}`.{did_you_mean(target, known)}",
                remedy=f"--set lora_targets={ALL_LINEAR}",
            )


_TEXTS, _NUMBERS = (str, list, NoneType), (dict, NoneType)
_CONFIG_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("peft_type", "bias"), (str,)),
    **dict.fromkeys(("base_model_name_or_path", "task_type", "revision"), (str, NoneType)),
    **dict.fromkeys(("target_modules", "exclude_modules", "layers_pattern"), _TEXTS),
    **dict.fromkeys(("modules_to_save", "target_parameters"), (list, NoneType)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), _NUMBERS),
    "trainable_token_indices": (list, dict, NoneType),
    **dict.fromkeys(("lora_alpha", "lora_dropout"), (int, float)),
    **dict.fromkeys(("use_rslora", "use_dora", "fan_in_fan_out", "lora_bias"), (bool,)),
    "r": (int,),
}
"""The types of those settings of an adapter_config.json that peft uses unseen."""
_MAX_RANK = 65_536


def check_adapter_config(folder: Path) -> None:
    """Raise where adapter_config.json is missing, or has values that peft would trip over."""
    path = folder / "adapter_config.json"
    try:
        values = read_json_file(path)
    except FileNotFoundError as error:
        raise NotFoundError(
            f"{folder} holds no adapter: it has no adapter_config.json.",
            remedy="name a folder that a run has left: RUN/adapter",
        ) from error
    found = values if isinstance(values, dict) else {"It": values}
    wrong = [name for name, value in found.items() if not _is_setting(name, value)]
    if wrong or "peft_type" not in found:
        name = wrong[0] if wrong else "peft_type"
        value = printable(repr(found.get(name, "nothing")), most=40)
        raise InvalidInputError(
            f"{path}: `{name}` is {value}, which no adapter has.", remedy="copy the adapter again"
        )
    for name, value in found.items():
        for regex in _list_regexes(name, value):
            if not _is_quick(regex):
                raise InvalidInputError(
                    f"{path}: `{name}` has {printable(repr(regex), most=60)}, which could take for "
                    "ever to match.",
                    remedy="name the modules one by one: a list in its place",
                )


_REGEXES = ("target_modules", "exclude_modules", "layers_pattern", "rank_pattern", "alpha_pattern")
"""Settings whose texts, items or keys peft matches with the names of modules."""
_MAX_REGEX_CHARS = 10_000
_MAX_REPEATS = 4
"""Of parts without a limit in one alternative: the time grows as this power of a name's length."""


def _list_regexes(name: str, value: object) -> list[str]:
    if name not in _REGEXES or value is None:
        return []
    return [value] if isinstance(value, str) else [str(item) for item in value]  # type: ignore[attr-defined]


def _is_quick(regex: str) -> bool:
    """Whether matching is quick on any name: no repeat inside a repeat."""
    try:
        from re import _parser as parser
    except ImportError:  # Python 3.10
        import sre_parse as parser
    if len(regex) > _MAX_REGEX_CHARS:
        return False
    try:
        return _count_repeats(parser.parse(regex), parser) <= _MAX_REPEATS
    except (re.error, RecursionError, OverflowError):
        return False


def _count_repeats(parts: Any, parser: Any) -> int:
    """The most in one alternative; too many where a repeat holds a repeat or a choice."""
    count = 0
    for kind, value in parts:
        if str(kind) in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            _, most, inner = value
            within = _count_repeats(inner, parser)
            # What can match the same text in two ways doubles the time with each repeat.
            is_ambiguous = within or "BRANCH" in repr(inner)
            count += within if most == 1 else _MAX_REPEATS + 1 if is_ambiguous else 1
        elif str(kind) == "BRANCH":
            count += max(_count_repeats(branch, parser) for branch in value[1])
        elif isinstance(value, tuple | list):
            count += sum(
                _count_repeats(inner, parser)
                for inner in value
                if isinstance(inner, parser.SubPattern)
            )
    return count


def _is_setting(name: str, value: object) -> bool:
    kinds = _CONFIG_KINDS.get(name, (object,) if name != "It" else ())
    if not isinstance(value, kinds) or (isinstance(value, bool) and int in kinds):
        return False
    if name == "r":
        return isinstance(value, int) and 0 < value <= _MAX_RANK
    if name == "trainable_token_indices":
        listed = value.values() if isinstance(value, dict) else [value or []]
        return all(isinstance(each, list) and all(map(_is_row, each)) for each in listed)
    if isinstance(value, list) and name in _CONFIG_KINDS:
        return all(isinstance(item, str) for item in value)
    if isinstance(value, dict) and name in _CONFIG_KINDS:
        return all(type(item) in (int, float) and item > 0 for item in value.values())
    return True


def _is_row(value: object) -> bool:
    """Whether a model can have a row of this number."""
    return type(value) is int and 0 <= value < MAX_VOCAB


def check_adapter_files(folder: Path) -> None:
    """Raise where the settings or the weights are missing or damaged."""
    from tightfit.runtime.tensor_files import find_weights_error

    check_adapter_config(folder)
    weights = folder / "adapter_model.safetensors"
    problem = find_weights_error(weights)
    if problem is not None:
        raise InvalidInputError(f"{weights} {problem}.", remedy="copy the adapter again")
