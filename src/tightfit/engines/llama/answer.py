"""One request on its way through llama.cpp: its stream of chunks to deltas and an end."""

from __future__ import annotations

import threading
import time
from typing import Any

from tightfit.core.errors import InvalidInputError
from tightfit.data.prompter import Prompter
from tightfit.engines.llama.sampling import make_body
from tightfit.engines.llama.stop_texts import StopTexts
from tightfit.engines.protocol import Delta, Done, Event, Failed, FinishReason, Listener, Request


class LlamaAnswer:
    """A ticket, and all that is known of its answer so far.

    llama.cpp sends nothing for a token that ends inside a character, and names only the token
    that completes it. So the text is llama.cpp's own, tokens are counted by its count, and the
    tokens in between are those that our tokenizer makes of the same text, where it fits.
    """

    def __init__(
        self,
        request: Request,
        listener: Listener,
        *,
        prompter: Prompter,
        stop_ids: frozenset[int],
        num_new_tokens: int,
    ) -> None:
        self._request = request
        self._listener = listener
        self._stops_at = frozenset() if request.sampling.ignores_stop_tokens else stop_ids
        self._num_allowed = num_new_tokens
        self._prompter = prompter
        self._text = StopTexts(request.sampling.stop)
        self._cancelled = threading.Event()
        self._submitted_s = time.monotonic()
        self._first_token_s: float | None = None
        self._num_new = 0
        self._num_cached = 0
        self._unseen: list[int] = []
        """Tokens whose text could not be shown yet."""
        self._reason: FinishReason | None = None
        self._fault: Exception | None = None

    def cancel(self) -> None:
        self._cancelled.set()

    def run(self, server: Any) -> None:
        """Block until the answer has ended and the listener knows how."""
        body = make_body(
            self._request.prompt, self._request.sampling, num_new_tokens=self._num_allowed
        )
        try:
            if not self._cancelled.is_set():
                server.handle_completions(body, self._take)
        except Exception as fault:  # whatever the binding raises is this answer's
            self._fault = self._fault or fault
        self._tell(self._end())

    def _take(self, chunk: dict[str, Any]) -> bool:
        """One chunk of the stream. True ends it; an exception would be lost in the binding."""
        try:
            return self._read(chunk)
        except Exception as fault:
            self._fault = fault
            return True

    def _read(self, chunk: dict[str, Any]) -> bool:
        if "error" in chunk:
            self._fault = _as_fault(chunk["error"])
            return True
        if self._cancelled.is_set():
            return True
        progress = chunk.get("prompt_progress")
        if progress is not None:  # its token is no token
            self._num_cached = int(progress.get("cache", 0))
            return False
        choice, state = chunk["choices"][0], chunk["__verbose"]
        num_hidden = int(state["tokens_predicted"]) - self._num_new - len(state["tokens"])
        self._num_new = int(state["tokens_predicted"])
        if choice["finish_reason"] is not None:
            is_stop = choice["finish_reason"] == "stop"
            self._reason = FinishReason.STOP if is_stop else FinishReason.LENGTH
            return False
        return self._add(state["tokens"], choice["text"], num_hidden)

    def _add(self, tokens: list[int], text: str, num_hidden: int) -> bool:
        if self._first_token_s is None:
            self._first_token_s = time.monotonic()
            text = self._begin(tokens, text)
        is_end = any(token in self._stops_at for token in tokens)
        if not is_end:
            self._unseen += self._name_tokens(tokens, text, num_hidden)
            self._show(self._text.push(text))
        if is_end or self._text.is_stopped:
            self._reason = FinishReason.STOP
        return self._reason is not None

    def _begin(self, tokens: list[int], text: str) -> str:
        """Without the space that SentencePiece puts before a first word, as tokenizers decode."""
        has_space = text.startswith(" ") and not self._prompter.decode(tokens).startswith(" ")
        return text[1:] if has_space else text

    def _name_tokens(self, tokens: list[int], text: str, num_hidden: int) -> list[int]:
        if num_hidden <= 0:
            return tokens
        guess = self._prompter.tokenizer.encode(text)
        fits = len(guess) == num_hidden + len(tokens) and guess[-1:] == tokens[-1:]
        return guess if fits else tokens

    def _show(self, text: str) -> None:
        if text:
            tokens, self._unseen = tuple(self._unseen), []
            self._tell(Delta(text=text, tokens=tokens))

    def _end(self) -> Event:
        if self._fault is not None:
            return Failed(fault=self._fault)
        reason = self._reason
        if reason is None and self._cancelled.is_set():
            reason = FinishReason.CANCELLED
        if reason is None:
            return Failed(fault=RuntimeError("llama.cpp ended an answer without saying why"))
        self._show(self._text.finish())
        now = time.monotonic()
        return Done(
            reason=reason,
            text=self._text.text,
            num_prompt_tokens=len(self._request.prompt),
            num_new_tokens=self._num_new,
            num_cached_tokens=self._num_cached,
            submitted_s=self._submitted_s,
            first_token_s=now if self._first_token_s is None else self._first_token_s,
            finished_s=now,
        )

    def _tell(self, event: Event) -> None:
        """A listener that fails harms no other request: its own is over."""
        try:
            self._listener(event)
        except Exception as fault:
            self._fault = fault
            self._cancelled.set()


def _as_fault(error: dict[str, Any]) -> Exception:
    said = str(error.get("message", "no reason given")).strip().rstrip(".")
    if int(error.get("code", 500)) < 500:
        return InvalidInputError(
            f"llama.cpp refuses the request: {said}.", remedy="change the prompt or its settings"
        )
    return RuntimeError(f"llama.cpp: {said}")
