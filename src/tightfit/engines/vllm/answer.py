"""One request on its way through vLLM: its outputs to deltas and an end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from tightfit.data.prompter import Prompter, TextStream
from tightfit.engines.protocol import Delta, Done, Event, Failed, FinishReason, Listener, Request


class VllmAnswer:
    """A ticket, and all that is known of its answer so far."""

    def __init__(self, request: Request, listener: Listener, prompter: Prompter) -> None:
        self.request = request
        self._listener = listener
        self._text = TextStream(prompter, request.sampling.stop)
        self._stop_ids = frozenset(
            () if request.sampling.ignores_stop_tokens else prompter.stop_ids
        )
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._is_told = False
        self._end: Callable[[], object] | None = None
        self._submitted_s = time.monotonic()
        self._first_token_s: float | None = None
        self._num_new = self._num_cached = 0
        self._unseen: list[int] = []

    def bind(self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
        with self._lock:
            self._end = lambda: loop.call_soon_threadsafe(task.cancel)
            if self._is_cancelled:
                task.cancel()

    def cancel(self) -> None:
        with self._lock, contextlib.suppress(RuntimeError):  # the loop may be gone
            self._is_cancelled = True
            if self._end is not None:
                self._end()

    async def run(self, stream: Any) -> None:
        reason = FinishReason.CANCELLED
        try:
            async with contextlib.aclosing(stream) as outputs:  # leaving early aborts in vLLM
                async for output in outputs:
                    found = self._take(output)
                    if found is not None:
                        reason = found
                        break
        except asyncio.CancelledError:
            pass
        except Exception as fault:
            self._tell(Failed(fault=fault))
            return
        self._finish(reason)

    def end(self) -> None:
        """Called when the task is over: one that was cancelled before it began said nothing."""
        if not self._is_told:
            self._finish(FinishReason.CANCELLED)

    def _finish(self, reason: FinishReason) -> None:
        self._show(self._text.finish())
        self._tell(self._done(reason))

    def _tell(self, event: Event) -> None:
        """A listener that fails harms no other request."""
        self._is_told = self._is_told or not isinstance(event, Delta)
        with contextlib.suppress(Exception):
            self._listener(event)

    def _take(self, output: Any) -> FinishReason | None:
        part = output.outputs[0]
        tokens = [int(token) for token in part.token_ids]
        self._num_cached = int(getattr(output, "num_cached_tokens", None) or 0)
        if tokens and self._first_token_s is None:
            self._first_token_s = time.monotonic()
        self._num_new += len(tokens)
        said = [token for token in tokens if token not in self._stop_ids]
        self._unseen += said
        self._show(self._text.push(said))
        if self._text.is_stopped or part.finish_reason == "stop":
            return FinishReason.STOP
        return FinishReason.LENGTH if part.finish_reason == "length" else None

    def _show(self, text: str) -> None:
        if text:
            tokens, self._unseen = tuple(self._unseen), []
            self._tell(Delta(text=text, tokens=tokens))

    def _done(self, reason: FinishReason) -> Done:
        now = time.monotonic()
        return Done(
            reason=reason,
            text=self._text.text,
            num_prompt_tokens=len(self.request.prompt),
            num_new_tokens=self._num_new,
            num_cached_tokens=self._num_cached,
            submitted_s=self._submitted_s,
            first_token_s=now if self._first_token_s is None else self._first_token_s,
            finished_s=now,
        )
