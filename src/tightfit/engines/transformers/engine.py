"""The transformers engine: any family and format that transformers loads, on CPU or GPUs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tightfit.core.errors import UsageError
from tightfit.engines.context import check_request, choose_context
from tightfit.engines.open import EngineRequest, open_prompter
from tightfit.engines.protocol import Engine, EngineInfo, Listener, Request, Ticket
from tightfit.engines.transformers.answer import RunningAnswer
from tightfit.engines.transformers.batch import RowBatcher, closed_fault, free_memory
from tightfit.engines.transformers.measure import (
    choose_slots,
    count_bytes,
    count_params,
    find_context,
    kv_bytes_per_token,
)
from tightfit.engines.transformers.rows import open_rows
from tightfit.engines.transformers.scores import score_tokens
from tightfit.engines.transformers.sizes import PREFILL_TOKENS
from tightfit.runtime.load_for_answers import LoadedModel, load_for_answers

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tightfit.data.prompter import Prompter


def open_transformers(request: EngineRequest, *, why: str) -> Engine:
    """Load the artefact and start to take requests."""
    prompter = open_prompter(request)
    loaded = load_for_answers(request.artefact, weights=request.weights, device=request.device)
    return TransformersEngine(loaded, prompter, request, why=why)


class TransformersEngine:
    """A loaded model, and the batch that computes its answers."""

    def __init__(
        self, loaded: LoadedModel, prompter: Prompter, request: EngineRequest, *, why: str
    ) -> None:
        import transformers

        model = loaded.model
        self._model: Any = model
        self._prompter = prompter
        self._lock = threading.Lock()
        self._is_closed = False
        self._num_vocabulary = int(model.get_input_embeddings().weight.shape[0])
        max_context = choose_context(request.context, find_context(model.config))
        num_slots = choose_slots(model, request.slots, max_context=max_context)
        self._batcher = _open_batcher(model, num_slots=num_slots)
        self._info = EngineInfo(
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

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def prompter(self) -> Prompter:
        return self._prompter

    def submit(self, request: Request, listener: Listener) -> Ticket:
        self._check_open()
        check_request(
            request, max_context=self._info.max_context, num_vocabulary=self._num_vocabulary
        )
        answer = RunningAnswer(
            request, listener, self._prompter, max_context=self._info.max_context
        )
        self._batcher.add(answer)
        return answer

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        self._check_open()
        if self._model.config.is_encoder_decoder:
            raise UsageError(
                "An encoder-decoder has no scores of a plain text: it reads and writes apart.",
                remedy="compare its answers instead: tightfit eval",
            )
        wanted = list(tokens)
        return self._batcher.call(lambda: score_tokens(self._model, wanted))

    def tokenize(self, text: str) -> list[int]:
        return self._prompter.tokenizer.encode(text)

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._batcher.close()
        self._model = None
        del self._batcher
        free_memory()

    def _check_open(self) -> None:
        if self._is_closed:
            raise closed_fault()


def _open_batcher(model: Any, *, num_slots: int) -> RowBatcher:
    return RowBatcher(
        open_rows(model, most_rows=num_slots),
        num_slots=num_slots,
        prefill_tokens=PREFILL_TOKENS["cuda" if model.device.type == "cuda" else "cpu"],
    )
