"""The models that an evaluation scores: what to load, and one interface to torch and engines."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tightfit.core.dtypes import Dtype
from tightfit.core.progress import CountProgress
from tightfit.core.sampling import Sampling
from tightfit.core.training import TrainOn
from tightfit.data.formats import Message
from tightfit.data.prompter import Prompter
from tightfit.data.token_store import TokenStore
from tightfit.engines.open import EngineRequest, open_engine
from tightfit.engines.protocol import Engine, Failed, Request, answer_all
from tightfit.evaluation.model_outputs import (
    GenerateRequest,
    RowLosses,
    generate_answers,
    measure_loss,
    measure_loss_by_logits,
)
from tightfit.evaluation.scores import BASE, MODEL, TUNED
from tightfit.runs.run_folder import RunFolder
from tightfit.runtime.adapters import load_adapter
from tightfit.runtime.artefacts import Artefact, ArtefactKind, find_artefact
from tightfit.runtime.devices import local_device
from tightfit.runtime.load import LoadRequest, load_base
from tightfit.runtime.load_for_inference import choose_dtype
from tightfit.runtime.model_files import locate_model

if TYPE_CHECKING:
    import torch


DEFAULT_SEQ_LEN = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalTarget:
    """An artefact, and how its data is encoded."""

    artefact: Artefact
    base: Path | None = None
    """The model it was tuned from; None where nothing was tuned."""
    tokenizer: Path
    template: str | None = None
    train_on: TrainOn = TrainOn.ANSWERS
    seq_len: int = DEFAULT_SEQ_LEN
    max_positions: int | None = None
    """Longest sequence the model can read; None where its positions are relative or unknown."""

    @property
    def name(self) -> str:
        return self.artefact.name

    @property
    def run(self) -> RunFolder | None:
        return self.artefact.run


def find_eval_target(name: str) -> EvalTarget:
    """The run folder, adapter folder or model that `name` means."""
    artefact = find_artefact(name)
    target = EvalTarget(
        artefact=artefact,
        base=artefact.base,
        tokenizer=artefact.tokenizer,
        template=artefact.template,
    )
    if artefact.run is not None:
        target = _as_trained(target, artefact.run)
    most = _read_max_positions(artefact.base or artefact.path)
    seq_len = target.seq_len if most is None else min(target.seq_len, most)
    return replace(target, max_positions=most, seq_len=seq_len)


def _as_trained(target: EvalTarget, run: RunFolder) -> EvalTarget:
    """With the run's own base model, template and reading of the data."""
    plan = run.read_plan()
    assert plan.training is not None  # find_artefact has checked it
    base = target.base or locate_model(plan.training.model_path)
    # The plan's length is that of its longest training row; rows to score may be longer.
    longest = max(plan.strategy.seq_len, plan.data.seq_len if plan.data else 0)
    return replace(
        target,
        base=base,
        tokenizer=base,
        template=plan.training.template,
        train_on=plan.training.train_on,
        seq_len=max(longest, DEFAULT_SEQ_LEN),
    )


def needs_engine(artefact: Artefact) -> bool:
    """Whether only an engine can run it; the others are scored as plain torch modules."""
    return artefact.kind not in (ArtefactKind.MODEL, ArtefactKind.ADAPTER)


def _read_max_positions(folder: Path) -> int | None:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None  # loading the model reports the problem
    if config.get("model_type") == "t5":  # its `n_positions` is no limit
        return None
    stated = config.get("max_position_embeddings", config.get("n_positions"))
    return stated if isinstance(stated, int) and stated > 0 else None


# The models, loaded one after another.


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPrompt:
    """One question, as messages and as tokens of the training template."""

    messages: Sequence[Message]
    tokens: Sequence[int]


class ScoredModel(Protocol):
    """One model in memory."""

    def measure_loss(self, store: TokenStore, watch: CountProgress | None) -> RowLosses | None:
        """Losses by row; None where the engine cannot compute them for this kind of model."""
        ...

    def answer(
        self, asked: Sequence[EvalPrompt], request: GenerateRequest, watch: CountProgress | None
    ) -> list[str]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTorchModel:
    """A torch module, run as in training."""

    model: Any
    prompter: Prompter

    def measure_loss(self, store: TokenStore, watch: CountProgress | None) -> RowLosses | None:
        return measure_loss(self.model, store, watch)

    def answer(
        self, asked: Sequence[EvalPrompt], request: GenerateRequest, watch: CountProgress | None
    ) -> list[str]:
        tokens = generate_answers(self.model, [item.tokens for item in asked], request, watch)
        return [self.prompter.decode(answer).strip() for answer in tokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredEngine:
    """An artefact run by an engine, with its own tokenizer, template and stop tokens."""

    engine: Engine

    def measure_loss(self, store: TokenStore, watch: CountProgress | None) -> RowLosses | None:
        if store.description.is_encoder_decoder:
            return None
        return measure_loss_by_logits(self.engine.logits, store, watch)

    def answer(
        self, asked: Sequence[EvalPrompt], request: GenerateRequest, watch: CountProgress | None
    ) -> list[str]:
        engine = self.engine
        room = max(engine.info.max_context - request.max_new_tokens, 1)
        sampling = Sampling(max_new_tokens=request.max_new_tokens)
        requests = (
            Request(prompt=engine.prompter.ask(item.messages)[-room:], sampling=sampling)
            for item in asked
        )
        texts = [""] * len(asked)
        for count, (place, done) in enumerate(answer_all(engine, requests), start=1):
            if isinstance(done, Failed):
                raise done.error
            texts[place] = done.text.strip()
            if watch is not None:
                watch(count, len(asked))
        return texts


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredModels:
    """The target's columns, and one for each artefact of `--beside`."""

    target: EvalTarget
    with_base: bool
    beside: tuple[Artefact, ...]
    device: torch.device
    request: LoadRequest
    prompter: Prompter
    batch: int

    @property
    def device_name(self) -> str:
        return str(self.device)

    @property
    def dtype_name(self) -> str:
        return self.request.weights.value

    def __iter__(self) -> Iterator[tuple[str, ScoredModel]]:
        """Column name and model. A model is valid until the next iteration."""
        if needs_engine(self.target.artefact):
            with self._opened(self.target.artefact) as contestant:
                yield MODEL, contestant
        else:
            for column, model in self._modules():
                yield column, ScoredTorchModel(model=model, prompter=self.prompter)
            gc.collect()
        for column, artefact in zip(name_columns(self.beside), self.beside, strict=True):
            with self._opened(artefact) as contestant:
                yield column, contestant

    def _modules(self) -> Iterator[tuple[str, Any]]:
        artefact, base = self.target.artefact, self.target.base
        if artefact.kind is ArtefactKind.ADAPTER and base is not None:
            adapted = load_adapter(self._load(base), artefact.path)
            if self.with_base:
                with adapted.disable_adapter():
                    yield BASE, adapted
            yield TUNED, adapted
            return
        if base is not None and self.with_base:
            yield BASE, self._load(base)
            gc.collect()  # free the first before the second is loaded
        yield MODEL if base is None else TUNED, self._load(artefact.path)

    def _load(self, folder: Path) -> Any:
        model: Any = load_base(folder, self.request, self.device)
        return model.eval()

    @contextlib.contextmanager
    def _opened(self, artefact: Artefact) -> Iterator[ScoredEngine]:
        engine = open_engine(EngineRequest(artefact=artefact, slots=self.batch))
        try:
            yield ScoredEngine(engine=engine)
        finally:
            engine.close()
            gc.collect()


def name_columns(beside: Sequence[Artefact]) -> list[str]:
    """The file's or folder's own name, longer where two would be the same."""
    short = [artefact.path.name.removesuffix(".gguf") for artefact in beside]
    taken = [BASE, TUNED, MODEL]
    return [
        name if short.count(name) == 1 and name not in taken else artefact.name
        for name, artefact in zip(short, beside, strict=True)
    ]


def open_scored_models(
    target: EvalTarget,
    prompter: Prompter,
    *,
    with_base: bool,
    beside: Sequence[Artefact],
    batch: int,
) -> ScoredModels:
    """The models of a target, to be loaded on this machine's first device."""
    device = local_device(0)
    return ScoredModels(
        target=target,
        with_base=with_base,
        beside=tuple(beside),
        device=device,
        request=choose_load(target.artefact, device),
        prompter=prompter,
        batch=batch,
    )


def choose_load(artefact: Artefact, device: torch.device) -> LoadRequest:
    """As in the run; on a CPU unquantized weights are fp32, which is fast and exact there.

    Attention is torch's own: the attention of packed training keeps no key-value cache.
    """
    strategy = artefact.strategy
    is_cpu = device.type == "cpu"
    weights = strategy.weights if strategy else choose_dtype(device)
    if is_cpu and not weights.is_quantized:
        weights = Dtype.FP32
    compute = strategy.compute if strategy and weights.is_quantized else weights
    return LoadRequest(
        weights=weights,
        compute=compute,
        double_quant=strategy.double_quant if strategy else True,
    )
