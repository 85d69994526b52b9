"""DataReport: what a dataset holds, what encoding made of it, and which rows have issues."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from tightfit.core.errors import InvalidInputError, UserError
from tightfit.core.frozen import Frozen
from tightfit.core.profiles import LengthCut
from tightfit.data.formats import Message
from tightfit.data.packing import describe_lengths

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


# What is wrong or odd in a dataset, gathered over all rows: how often, and where first.

NUM_SHOWN = 20
"""Places that a message lists."""
MAX_KEPT = 10_000
"""Places that are kept of each kind; the rest is counted."""


class DataIssue(Frozen):
    """One kind of issue and the rows that have it."""

    kind: str
    """`unreadable`, `empty-answer`, `duplicate`, `truncated`, ...: stable, for programs."""
    says: str
    """What it means and what was done about it."""
    num_rows: PositiveInt
    shown: tuple[str, ...]
    """The first places, each with its detail."""


ISSUE_TEXTS = {
    "unreadable": "cannot be read or understood; left out",
    "refused": "the chat template refuses these messages; left out",
    "empty-answer": "no answer to learn; left out",
    "answer-cut-off": "the prompt alone fills seq_len, so the whole answer is cut off; left out",
    "truncated": "longer than seq_len; the end is cut off, stop token included",
    "cut-alike": "chosen and rejected are the same once cut to seq_len; left out",
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


class DataIssues:
    """Counts by kind; only the first places of each are kept."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._shown: dict[str, list[str]] = defaultdict(list)
        self._remedy = ""

    def add(self, kind: str, place: str, detail: str = "") -> None:
        self._counts[kind] += 1
        if self._counts[kind] <= MAX_KEPT:
            self._shown[kind].append(f"{place}: {detail}" if detail else place)

    def add_error(self, error: UserError) -> None:
        """A row that cannot be read; the message names its place."""
        self._remedy = self._remedy or error.remedy
        self.add("unreadable", error.problem)

    def count(self, kind: str) -> int:
        return self._counts[kind]

    def listed(self) -> tuple[DataIssue, ...]:
        """In the order of `ISSUE_TEXTS`: what stops training first."""
        return tuple(
            DataIssue(
                kind=kind, says=says, num_rows=self._counts[kind], shown=tuple(self._shown[kind])
            )
            for kind, says in ISSUE_TEXTS.items()
            if self._counts[kind]
        )

    def refuse(self) -> None:
        """Raise one error over all rows that cannot be trained on, if there are any."""
        num_bad = sum(self.count(kind) for kind in _FATAL)
        if not num_bad:
            return
        shown = [line for kind in _FATAL for line in self._shown[kind]]
        more = num_bad - len(shown[:NUM_SHOWN])
        rows = "1 row" if num_bad == 1 else f"{num_bad:,} rows"
        lines = [f"{rows} cannot be trained on:", *(f"  {line}" for line in shown[:NUM_SHOWN])]
        if more:
            lines.append(f"  and {more:,} more")
        raise InvalidInputError(
            "\n".join(lines),
            remedy=self._remedy or "correct these rows, or leave them out of the file",
        )


def check_text(messages: list[Message], place: str, findings: DataIssues) -> list[Message]:
    """Note what a wrong decoding left behind; returns messages that can be encoded."""
    text = "\n".join(message.text for message in messages)
    if "\0" in text:
        findings.add("nul", place)
    if text.isascii():
        return messages
    if "\ufffd" in text:
        findings.add("replacement-character", place)
    if found := _MOJIBAKE.search(text):
        start = max(found.start() - 12, 0)
        findings.add("mojibake", place, " ".join(text[start : found.end() + 12].split()))
    if _SURROGATE.search(text):
        findings.add("surrogate", place)
        return [
            m._replace(
                content=_SURROGATE.sub("\ufffd", m.content),
                reasoning=_SURROGATE.sub("\ufffd", m.reasoning),
            )
            for m in messages
        ]
    return messages


class SourceReport(Frozen):
    """One source as the recipe names it."""

    name: str
    split: Literal["train", "eval"]
    weight: float
    files: tuple[str, ...]
    format: str
    """`alpaca`, `chat`, ...; several joined by `+`; empty where no row was understood."""
    num_rows: NonNegativeInt
    """Examples read, before any was left out, cut into pieces or split into turns."""
    num_encoded_rows: NonNegativeInt
    num_tokens: NonNegativeInt
    num_trained_tokens: NonNegativeInt


class SplitReport(Frozen):
    """Rows that are trained on, or rows that are evaluated on. A pair is two rows; percentiles,
    histogram and packing are of pairs, each as long as its longer row."""

    num_rows: PositiveInt
    num_tokens: PositiveInt
    num_trained_tokens: NonNegativeInt
    mean_tokens: float
    max_tokens: PositiveInt
    percentiles: dict[str, int]
    histogram: tuple[tuple[int, int], ...]
    """(upper length, rows) pairs, ascending."""
    num_packed_rows: PositiveInt
    packing_efficiency_fraction: float
    """Share of slots that hold tokens after best-fit packing at `seq_len`."""
    num_rows_with_stop: NonNegativeInt


class DataReport(Frozen):
    """Everything that is worth knowing before training; `report.json` beside the stores."""

    key: str
    seq_len: PositiveInt
    train_on: str
    template: str
    """`tokenizer`, a name, or a file; `none` where none was used."""
    template_text: str = ""
    """The Jinja text itself, to be saved beside the tuned weights."""
    tokenizer: str
    pad_token: str
    pad_token_id: NonNegativeInt
    stop_tokens: tuple[str, ...]
    """That end answers here, and are trained."""
    sources: tuple[SourceReport, ...]
    train: SplitReport
    eval: SplitReport | None = None
    num_read: NonNegativeInt
    """Examples read from all sources."""
    longest_row_tokens: NonNegativeInt
    """Before truncation: the `seq_len` that would cut nothing."""
    num_truncated: NonNegativeInt
    num_lost_tokens: NonNegativeInt
    num_dropped: NonNegativeInt
    num_duplicates: NonNegativeInt
    num_empty_answers: NonNegativeInt
    whole_percentiles: dict[str, int] = Field(default_factory=dict)
    """Of rows before truncation."""
    cuts: tuple[LengthCut, ...] = ()
    """What other lengths would cut, of all that was read; none of plain text, which becomes
    several rows instead."""
    findings: tuple[DataIssue, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def formats(self) -> str:
        """All formats, in order of appearance."""
        return "+".join(dict.fromkeys(s.format for s in self.sources if s.format))


def describe_split(
    lengths: NDArray[np.int64],
    num_trained: NDArray[np.int64],
    num_with_stop: int,
    seq_len: int,
    *,
    size: int = 1,
) -> SplitReport:
    """Numbers over the rows of one side. `size`: rows of an example, which is as long as its
    longest."""
    import numpy as np

    longest = np.minimum(lengths, seq_len).reshape(-1, size).max(axis=1)
    values, counts = np.unique(longest, return_counts=True)
    by_length = dict(zip(values.tolist(), counts.tolist(), strict=True))
    described = describe_lengths(by_length, seq_len)
    num_slots = described["num_packed_rows"] * seq_len
    num_tokens = int(lengths.sum())
    return SplitReport(
        num_rows=len(lengths),
        num_tokens=num_tokens,
        num_trained_tokens=int(num_trained.sum()),
        mean_tokens=num_tokens / len(lengths),
        max_tokens=int(lengths.max()),
        packing_efficiency_fraction=int(np.minimum(lengths, seq_len).sum()) / (size * num_slots),
        **described,
        num_rows_with_stop=num_with_stop,
    )
