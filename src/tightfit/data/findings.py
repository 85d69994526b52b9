"""What is wrong or odd in a dataset, gathered over all rows: how often, and where first."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict, PositiveInt

from tightfit.core.errors import InvalidInputError, UserError
from tightfit.data.formats import Message

NUM_SHOWN = 20
"""Places that a message lists."""
MAX_KEPT = 10_000
"""Places that are kept of each kind; the rest is counted."""


class Finding(BaseModel):
    """One kind of fault and the rows that have it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    """`unreadable`, `empty-answer`, `duplicate`, `truncated`, ...: stable, for programs."""
    says: str
    """What it means and what was done about it."""
    num_rows: PositiveInt
    shown: tuple[str, ...]
    """The first places, each with its detail."""


SAYS = {
    "unreadable": "cannot be read or understood; left out",
    "refused": "the chat template refuses these messages; left out",
    "empty-answer": "no answer to learn; left out",
    "answer-cut-off": "the prompt alone fills seq_len, so the whole answer is cut off; left out",
    "truncated": "longer than seq_len; the end is cut off, stop token included",
    "duplicate": "the same text as an earlier row; kept",
    "in-both": "training rows that are also among the evaluation rows; kept",
    "control-token": "a message spells a control token of the tokenizer; encoded as plain text, "
    "so that it cannot open or close a turn",
    "replacement-character": "holds U+FFFD, left by a wrong decoding; kept",
    "mojibake": "UTF-8 read as Latin-1 (like Ã©); kept",
    "surrogate": "half a surrogate pair, which is no text; replaced by U+FFFD",
    "nul": "holds NUL characters; kept",
}
_MOJIBAKE = re.compile(
    "[ÃÂ][\u00a1-\u00bf]|Ã[\u0080-\u009f]|â€[\u0080-\u009f\u0153\u2122\u0161\u02dc\u00a6\u00a2]|ï»¿"
)
_SURROGATE = re.compile("[\ud800-\udfff]")
_FATAL = ("unreadable", "refused")


@dataclass(slots=True)
class _Kind:
    num_rows: int = 0
    shown: list[str] = field(default_factory=list)


class Findings:
    """Counts by kind; only the first places of each are kept."""

    def __init__(self) -> None:
        self._kinds: dict[str, _Kind] = {}
        self._remedy = ""

    def add(self, kind: str, place: str, detail: str = "") -> None:
        held = self._kinds.setdefault(kind, _Kind())
        held.num_rows += 1
        if len(held.shown) < MAX_KEPT:
            held.shown.append(f"{place}: {detail}" if detail else place)

    def add_error(self, error: UserError) -> None:
        """A row that cannot be read; the message names its place."""
        self._remedy = self._remedy or error.remedy
        held = self._kinds.setdefault("unreadable", _Kind())
        held.num_rows += 1
        if len(held.shown) < MAX_KEPT:
            held.shown.append(error.problem)

    def count(self, kind: str) -> int:
        return self._kinds[kind].num_rows if kind in self._kinds else 0

    def listed(self) -> tuple[Finding, ...]:
        """In the order of `SAYS`: what stops training first."""
        return tuple(
            Finding(kind=kind, says=says, num_rows=held.num_rows, shown=tuple(held.shown))
            for kind, says in SAYS.items()
            if (held := self._kinds.get(kind)) is not None
        )

    def refuse(self) -> None:
        """Raise one error over all rows that cannot be trained on, if there are any."""
        num_bad = sum(self.count(kind) for kind in _FATAL)
        if not num_bad:
            return
        shown = [line for kind in _FATAL if kind in self._kinds for line in self._kinds[kind].shown]
        more = num_bad - len(shown[:NUM_SHOWN])
        rows = "1 row" if num_bad == 1 else f"{num_bad:,} rows"
        lines = [f"{rows} cannot be trained on:", *(f"  {line}" for line in shown[:NUM_SHOWN])]
        if more:
            lines.append(f"  and {more:,} more")
        raise InvalidInputError(
            "\n".join(lines),
            remedy=self._remedy or "correct these rows, or leave them out of the file",
        )


def check_text(messages: list[Message], place: str, findings: Findings) -> list[Message]:
    """Note what a wrong decoding left behind; returns messages that can be encoded."""
    text = "\n".join(message.content for message in messages)
    if text.isascii():
        if "\0" in text:
            findings.add("nul", place)
        return messages
    if "\0" in text:
        findings.add("nul", place)
    if "\ufffd" in text:
        findings.add("replacement-character", place)
    if found := _MOJIBAKE.search(text):
        start = max(found.start() - 12, 0)
        findings.add("mojibake", place, " ".join(text[start : found.end() + 12].split()))
    if _SURROGATE.search(text):
        findings.add("surrogate", place)
        return [Message(m.role, _SURROGATE.sub("\ufffd", m.content)) for m in messages]
    return messages
