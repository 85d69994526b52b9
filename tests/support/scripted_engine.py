"""An engine without a model: it repeats its prompt at a given pace and keeps what was asked."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tightfit.core.errors import InvalidInputError
from tightfit.data.call_syntax import CallSyntax
from tightfit.data.formats import Message
from tightfit.data.templates import TemplateRenderError
from tightfit.data.tools import Tool
from tightfit.engines.protocol import (
    Delta,
    Done,
    Engine,
    EngineInfo,
    Event,
    Failed,
    FinishReason,
    Listener,
    Request,
)


class ScriptedPrompter:
    """A token for every character."""

    call_syntax: CallSyntax | None = None
    call_control: tuple[int, ...] = ()
    template: Any = None

    def ask(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> tuple[int, ...]:
        del tools
        if messages[-1].content == "refuse me":
            raise InvalidInputError(
                "The chat template refuses these messages: no.", remedy="other messages"
            ) from TemplateRenderError("no")
        return tuple(ord(char) for char in messages[-1].content)

    def continue_text(self, text: str, *, begins: bool = True) -> tuple[int, ...]:
        del begins
        return tuple(map(ord, text))


class ScriptedTicket:
    """One answer on its way."""

    def __init__(self, request: Request, listener: Listener) -> None:
        self.request = request
        self.listener = listener
        self.is_cancelled = threading.Event()
        self.num_computed = 0
        self.is_over = threading.Event()

    def cancel(self) -> None:
        self.is_cancelled.set()


class ScriptedEngine:
    """Answers `abc` with `abcabcabc...` up to `max_new_tokens`, one character a token.

    The prompt `!` fails; the prompt `?` fails with an error that a user can mend.
    """

    def __init__(
        self, *, num_slots: int = 2, token_seconds: float = 0.0, max_context: int = 1000
    ) -> None:
        self.info = EngineInfo(
            engine="scripted",
            version="0",
            why="It was asked for.",
            model="scripted",
            format="none",
            device="cpu",
            max_context=max_context,
            num_slots=num_slots,
            num_params=0,
            weight_bytes=0,
            kv_bytes_per_token=0,
        )
        self.num_vocabulary = 0x110000
        self.prompter: Any = ScriptedPrompter()
        self.token_seconds = token_seconds
        self.tickets: list[ScriptedTicket] = []
        self.is_closed = False
        self._queue: queue.SimpleQueue[ScriptedTicket | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(num_slots)]
        for thread in self._threads:
            thread.start()

    def submit(self, request: Request, listener: Listener) -> ScriptedTicket:
        if max(request.prompt) > 0x10FFFF:
            raise InvalidInputError("A token is beyond the vocabulary.", remedy="another token")
        ticket = ScriptedTicket(request, listener)
        self.tickets.append(ticket)
        self._queue.put(ticket)
        return ticket

    def logits(self, tokens: Sequence[int]) -> Any:
        raise NotImplementedError

    def embed(self, tokens: Sequence[int]) -> Any:
        raise NotImplementedError

    def add_adapters(self, paths: Sequence[Path]) -> list[Engine]:
        raise NotImplementedError

    def tokenize(self, text: str) -> list[int]:
        return list(map(ord, text))

    def close(self) -> None:
        self.is_closed = True
        for ticket in self.tickets:
            ticket.cancel()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (ticket := self._queue.get()) is not None:
            ticket.listener(self._answer(ticket, time.monotonic()))
            ticket.is_over.set()

    def _answer(self, ticket: ScriptedTicket, began_s: float) -> Event:
        prompt = "".join(map(chr, ticket.request.prompt))
        if prompt == "!":
            return Failed(error=RuntimeError("the script says so"))
        if prompt == "?":
            return Failed(error=InvalidInputError("The script says so.", remedy="mend it"))
        sampling, text, reason = ticket.request.sampling, "", FinishReason.LENGTH
        first_s = None
        while ticket.num_computed < sampling.max_new_tokens:
            if ticket.is_cancelled.wait(self.token_seconds):
                reason = FinishReason.CANCELLED
                break
            first_s = first_s or time.monotonic()
            char = prompt[ticket.num_computed % len(prompt)]
            ticket.num_computed += 1
            if char in sampling.stop:
                reason = FinishReason.STOP
                break
            text += char
            ticket.listener(Delta(text=char, tokens=(ord(char),)))
        now_s = time.monotonic()
        return Done(
            reason=reason,
            text=text,
            num_prompt_tokens=len(prompt),
            num_new_tokens=ticket.num_computed,
            num_cached_tokens=len(prompt) // 2,
            submitted_s=began_s,
            first_token_s=first_s or now_s,
            finished_s=now_s,
        )
