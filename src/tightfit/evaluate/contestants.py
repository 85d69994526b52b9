"""The models that an evaluation compares, one after another: torch modules, or loaded engines."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tightfit.core.dtypes import Dtype
from tightfit.data.formats import Message
from tightfit.data.prompter import Prompter
from tightfit.data.token_store import TokenStore
from tightfit.engines.answers import answer_all
from tightfit.engines.open import EngineRequest, open_engine
from tightfit.engines.protocol import Engine, Failed, Request, Sampling
from tightfit.evaluate.generate import GenerateRequest, Watch, generate_answers
from tightfit.evaluate.loss import RowLosses, measure_loss, measure_loss_by_logits
from tightfit.evaluate.scores import BASE, MODEL, TUNED
from tightfit.evaluate.target import Target, is_engines
from tightfit.runtime.adapters import load_adapter
from tightfit.runtime.artefacts import Artefact, ArtefactKind
from tightfit.runtime.devices import local_device
from tightfit.runtime.load import LoadRequest, load_base
from tightfit.runtime.load_for_answers import choose_dtype

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One question, as messages and as the tokens that training would show."""

    messages: Sequence[Message]
    tokens: Sequence[int]


class Contestant(Protocol):
    """One model in memory."""

    def measure_loss(self, store: TokenStore, watch: Watch | None) -> RowLosses | None:
        """Losses by row; None where the engine cannot give them for this kind of model."""
        ...

    def answer(
        self, asked: Sequence[Asked], request: GenerateRequest, watch: Watch | None
    ) -> list[str]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchContestant:
    """A model as training has it."""

    model: Any
    prompter: Prompter

    def measure_loss(self, store: TokenStore, watch: Watch | None) -> RowLosses | None:
        return measure_loss(self.model, store, watch)

    def answer(
        self, asked: Sequence[Asked], request: GenerateRequest, watch: Watch | None
    ) -> list[str]:
        tokens = generate_answers(self.model, [item.tokens for item in asked], request, watch)
        return [self.prompter.decode(answer).strip() for answer in tokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContestant:
    """An artefact as its users will meet it: its own tokenizer, template and stop tokens."""

    engine: Engine

    def measure_loss(self, store: TokenStore, watch: Watch | None) -> RowLosses | None:
        if store.description.is_encoder_decoder:
            return None
        return measure_loss_by_logits(self.engine.logits, store, watch)

    def answer(
        self, asked: Sequence[Asked], request: GenerateRequest, watch: Watch | None
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
                raise done.fault
            texts[place] = done.text.strip()
            if watch is not None:
                watch(count, len(asked))
        return texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestants:
    """The target's columns, and one for each artefact beside it."""

    target: Target
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

    def __iter__(self) -> Iterator[tuple[str, Contestant]]:
        """Column name and model. A model is valid until the next one is asked for."""
        if is_engines(self.target.artefact):
            with self._opened(self.target.artefact) as contestant:
                yield MODEL, contestant
        else:
            for column, model in self._modules():
                yield column, TorchContestant(model=model, prompter=self.prompter)
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
            gc.collect()  # the first is gone before the second comes
        yield MODEL if base is None else TUNED, self._load(artefact.path)

    def _load(self, folder: Path) -> Any:
        model: Any = load_base(folder, self.request, self.device)
        return model.eval()

    @contextlib.contextmanager
    def _opened(self, artefact: Artefact) -> Iterator[EngineContestant]:
        engine = open_engine(EngineRequest(artefact=artefact, slots=self.batch))
        try:
            yield EngineContestant(engine=engine)
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


def gather_contestants(
    target: Target, prompter: Prompter, *, with_base: bool, beside: Sequence[Artefact], batch: int
) -> Contestants:
    """The models of a target, to be loaded on this machine's first device."""
    device = local_device(0)
    return Contestants(
        target=target,
        with_base=with_base,
        beside=tuple(beside),
        device=device,
        request=choose_load(target.artefact, device),
        prompter=prompter,
        batch=batch,
    )


def choose_load(artefact: Artefact, device: torch.device) -> LoadRequest:
    """As the run had it; on a CPU unpacked weights are fp32, which is fast and exact there.

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
