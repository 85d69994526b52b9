"""One request on its way: its tokens to text and events, and when it is over."""

from __future__ import annotations

import random
import time

from tightfit.data.prompter import Prompter, TextStream
from tightfit.engines.protocol import (
    Delta,
    Done,
    Event,
    Failed,
    FinishReason,
    Listener,
    Request,
    Sampling,
)


class RunningAnswer:
    """What is known of an answer that is being computed. Changed by the engine's thread alone."""

    def __init__(
        self, request: Request, listener: Listener, prompter: Prompter, *, max_context: int
    ) -> None:
        self.prompt = request.prompt
        self.sampling: Sampling = request.sampling
        self.tokens: list[int] = []
        """All new tokens so far, the stop token included."""
        self.seed = random.getrandbits(63) if self.sampling.seed is None else self.sampling.seed
        """Draws are numbered by the tokens before them, so an interrupted answer goes on alike."""
        self.is_cancelled = False
        self.is_over = False
        self._listener = listener
        self._stops = (
            frozenset() if self.sampling.ignores_stop_tokens else frozenset(prompter.stop_ids)
        )
        self._stream = TextStream(prompter, self.sampling.stop)
        self._pending: list[int] = []
        self.most_tokens = self.sampling.max_new_tokens
        if not prompter.tokenizer.is_encoder_decoder:
            self.most_tokens = min(self.most_tokens, max_context - len(self.prompt))
        self._submitted_s = time.monotonic()
        self._first_token_s = 0.0

    @property
    def so_far(self) -> list[int]:
        """Prompt and answer: what an answer that had to make room goes on from."""
        return [*self.prompt, *self.tokens]

    @property
    def num_left(self) -> int:
        """Tokens that may still come."""
        return self.most_tokens - len(self.tokens)

    def cancel(self) -> None:
        """From any thread; the engine sees it before its next step."""
        self.is_cancelled = True

    def take(self, token: int) -> bool:
        """Hand on the next token. True when the answer has ended with it."""
        if not self.tokens:
            self._first_token_s = time.monotonic()
        self.tokens.append(token)
        if token in self._stops:
            return self._end(FinishReason.STOP)
        self._pending.append(token)
        piece = self._stream.push([token])
        if piece:
            self._tell(Delta(text=piece, tokens=self._hand_over()))
        if self._stream.is_stopped:
            return self._end(FinishReason.STOP)
        return self._end(FinishReason.LENGTH) if self.num_left <= 0 else False

    def end_cancelled(self) -> None:
        self._end(FinishReason.CANCELLED)

    def fail(self, fault: Exception) -> None:
        if not self.is_over:
            self.is_over = True
            self._tell(Failed(fault=fault))

    def _end(self, reason: FinishReason) -> bool:
        if self.is_over:
            return True
        self.is_over = True
        rest = "" if self._stream.is_stopped else self._stream.finish()
        if rest or self._pending:
            self._tell(Delta(text=rest, tokens=self._hand_over()))
        now = time.monotonic()
        self._tell(
            Done(
                reason=reason,
                text=self._stream.text,
                num_prompt_tokens=len(self.prompt),
                num_new_tokens=len(self.tokens),
                submitted_s=self._submitted_s,
                first_token_s=self._first_token_s or now,
                finished_s=now,
            )
        )
        return True

    def _hand_over(self) -> tuple[int, ...]:
        tokens = tuple(self._pending)
        self._pending.clear()
        return tokens

    def _tell(self, event: Event) -> None:
        try:
            self._listener(event)
        except Exception:  # whoever listens has gone; other answers must not suffer
            self.is_cancelled = True
