"""Log-probabilities as OpenAI's clients read them: of a chat, and of completions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tightfit.engines.protocol import Engine, TokenLogprob

if TYPE_CHECKING:
    from tightfit.data.tokenizer import ChatTokenizer

LEAST_LOGPROB = -9999.0
"""What OpenAI writes for a token that cannot come; JSON has no infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoedPrompt:
    """A prompt that is sent back before its answer."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of its tokens, where they were asked for; nothing comes before the first one."""


def score_prompt(engine: Engine, tokens: Sequence[int], *, count: int) -> tuple[TokenLogprob, ...]:
    """Every token's log-probability after those before it, and the `count` likeliest there."""
    found = [TokenLogprob(token=tokens[0], logprob=0.0)]
    logits = engine.logits(tokens)
    for place, token in enumerate(tokens[1:]):
        row = logits[place].astype(np.float64)
        row -= row.max()
        row -= np.log(np.exp(row).sum())
        # The likeliest few: to sort a whole vocabulary takes ten times as long.
        least = np.partition(row, -count)[-count] if 0 < count < len(row) else -np.inf
        likely = np.flatnonzero(row >= least)
        ranked = likely[np.argsort(-row[likely], kind="stable")][:count]
        top = tuple((int(one), float(row[one])) for one in ranked)
        found.append(TokenLogprob(token=token, logprob=float(row[token]), top=top))
    return tuple(found)


class LogprobWriter:
    """The entries of one answer, piece by piece."""

    def __init__(self, tokenizer: ChatTokenizer, *, is_chat: bool) -> None:
        self._tokenizer = tokenizer
        self._is_chat = is_chat
        self._control = frozenset(tokenizer.control.ids.values())
        self._offset = 0
        """Characters of the tokens that were written."""

    def write(
        self, entries: Sequence[TokenLogprob], *, begins_prompt: bool = False
    ) -> dict[str, Any]:
        """`logprobs` of a choice. `begins_prompt`: the first token has nothing before it."""
        if self._is_chat:
            return {"content": [self._chat_entry(entry) for entry in entries], "refusal": None}
        written: dict[str, Any] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for number, entry in enumerate(entries):
            text = self._read(entry.token)[0]
            is_first = begins_prompt and number == 0
            # Two tokens of one text: the likelier one, which is the first, is kept.
            likeliest = {self._read(one)[0]: _bounded(value) for one, value in reversed(entry.top)}
            written["tokens"].append(text)
            written["token_logprobs"].append(None if is_first else _bounded(entry.logprob))
            own = {text: _bounded(entry.logprob)}
            written["top_logprobs"].append(None if is_first else own | likeliest)
            written["text_offset"].append(self._offset)
            self._offset += 0 if entry.token in self._control else len(text)
        return written

    def _chat_entry(self, entry: TokenLogprob) -> dict[str, Any]:
        top = [self._entry(token, logprob) for token, logprob in entry.top]
        return {**self._entry(entry.token, entry.logprob), "top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, data = self._read(token)
        return {"token": text, "logprob": _bounded(logprob), "bytes": list(data)}

    def _read(self, token: int) -> tuple[str, bytes]:
        data = self._tokenizer.token_bytes(token)
        return data.decode(errors="replace"), data


def _bounded(logprob: float) -> float:
    return LEAST_LOGPROB if math.isnan(logprob) else max(logprob, LEAST_LOGPROB)
