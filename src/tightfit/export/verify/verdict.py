"""Verdict: the saved result of comparing artefacts with their reference."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from tightfit.core.errors import CheckFailedError
from tightfit.core.frozen import Frozen
from tightfit.export.formats import StepKind


class Level(str, Enum):
    """How bad a finding is."""

    FAIL = "fail"
    WARNING = "warning"
    NOTE = "note"


class Finding(Frozen):
    """One thing that differs."""

    level: Level
    text: str
    remedy: str | None = None
    """What to do about it. None: nothing needs doing."""


class AnswerComparison(Frozen):
    """One prompt's greedy answers."""

    prompt: str
    reference: str
    other: str
    first_difference: int | None = None
    """Number of the first token that differs, from 0. None: they are the same."""
    reference_stopped: bool
    other_stopped: bool


class Comparison(Frozen):
    """One artefact compared with the reference. None: could not be measured."""

    name: str
    format: str = ""
    """Of the weights: `bf16`, `Q4_K_M`, ..."""
    engine: str = ""
    size_bytes: NonNegativeInt = 0
    """Of the weights on disk."""
    kind: StepKind | None = None
    num_positions: NonNegativeInt = 0
    """Positions of the text at which logits were compared."""
    top1_fraction: float | None = None
    """Share of positions with the same most likely token."""
    top1_low: float | None = None
    top1_high: float | None = None
    """99% interval of it."""
    mean_kl: float | None = None
    """KL(reference || artefact) in nats per token."""
    max_kl: float | None = None
    max_abs_logit_diff: float | None = None
    perplexity: float | None = None
    reference_perplexity: float | None = None
    perplexity_change_fraction: float | None = None
    """0.01: 1% worse than the reference."""
    perplexity_change_low: float | None = None
    perplexity_change_high: float | None = None
    """99% interval of it, paired by position."""
    num_same_answers: NonNegativeInt = 0
    num_prompts: NonNegativeInt = 0
    answers: tuple[AnswerComparison, ...] = ()
    template_same: bool | None = None
    tokenizer_same: bool | None = None
    specials_same: bool | None = None
    stops_like_reference: bool | None = None
    findings: tuple[Finding, ...] = ()
    seconds: NonNegativeFloat = 0.0

    @property
    def is_good(self) -> bool:
        return not any(finding.level is Level.FAIL for finding in self.findings)


class Verdict(Frozen):
    """The whole check."""

    schema_version: int = 1
    reference: str
    reference_format: str
    reference_size_bytes: NonNegativeInt
    reference_perplexity: float | None = None
    text: str
    """What the scores were taken on."""
    num_tokens: NonNegativeInt
    window: PositiveInt
    dtype: str
    """Arithmetic of unquantized artefacts."""
    device: str
    rows: tuple[Comparison, ...]
    is_good: bool
    checked_at: str
    """UTC, ISO 8601."""
    tightfit: str
    saved_to: str | None = None
    """RUN/checks/NAME.json, where the reference belongs to a run."""

    def raise_if_broken(self, *, remedy: str | None = None) -> None:
        """`CheckFailedError` for the first artefact that did not pass."""
        for row in self.rows:
            failures = [finding for finding in row.findings if finding.level is Level.FAIL]
            if failures:
                more = f" (and {len(failures) - 1} more findings)" if len(failures) > 1 else ""
                raise CheckFailedError(
                    f"{row.name} is not {Path(self.reference).name}: {failures[0].text}{more}",
                    remedy=remedy
                    or failures[0].remedy
                    or f"tightfit verify {self.reference} {row.name} --html report.html",
                )
