"""An engine seen through one of its LoRA adapters: an engine like any other, of shared weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tightfit.engines.protocol import Engine, EngineInfo, Listener, Request, Ticket

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tightfit.data.templates import Prompter


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """An adapter that an engine has loaded."""

    key: str
    """What the engine calls it."""
    path: Path
    num_bytes: int
    """In memory."""
    prompter: Prompter
    """The adapter's own tokenizer and template where it has them."""


class AdaptableEngine(Engine, Protocol):
    """What an engine with adapters does for their views. `None` is the base itself."""

    def submit_with(
        self, request: Request, listener: Listener, adapter: Adapter | None
    ) -> Ticket: ...

    def logits_with(
        self, tokens: Sequence[int], adapter: Adapter | None
    ) -> NDArray[np.float32]: ...

    def embed_with(self, tokens: Sequence[int], adapter: Adapter | None) -> NDArray[np.float32]: ...

    def drop_adapter(self, adapter: Adapter) -> None: ...


class AdapterEngine:
    """One adapter over a base. `close` drops the adapter, once nothing uses it any more."""

    def __init__(self, base: AdaptableEngine, adapter: Adapter, name: str) -> None:
        self.base = base
        self.adapter = adapter
        self._name = name

    @property
    def info(self) -> EngineInfo:
        why = f"An adapter over {self.base.info.model}, whose weights it shares."
        return replace(
            self.base.info, model=self._name, why=why, weight_bytes=self.adapter.num_bytes
        )

    @property
    def prompter(self) -> Prompter:
        return self.adapter.prompter

    @property
    def num_vocabulary(self) -> int:
        return self.base.num_vocabulary

    def submit(self, request: Request, listener: Listener) -> Ticket:
        return self.base.submit_with(request, listener, self.adapter)

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        return self.base.logits_with(tokens, self.adapter)

    def embed(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        return self.base.embed_with(tokens, self.adapter)

    def tokenize(self, text: str) -> list[int]:
        return self.prompter.tokenizer.encode(text)

    def add_adapters(self, paths: Sequence[Path]) -> list[Engine]:
        return self.base.add_adapters(paths)

    def close(self) -> None:
        self.base.drop_adapter(self.adapter)
