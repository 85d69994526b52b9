"""From measures to findings: what is beyond its limit, beyond doubt, and what that looks like."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tightfit.export.verify.limits import (
    FP32_LOGIT_LIMIT,
    FP32_SCORE,
    LIMITS,
    NONSENSE_ENTROPY,
    NONSENSE_PERPLEXITY,
    Limits,
)
from tightfit.export.verify.scores import ScoreComparison
from tightfit.export.verify.statistics import Summary
from tightfit.export.verify.verdict import Finding, Level, StepKind

WORST_FACTOR = 3.0
"""The worst of some hundred million scores, against what rounding does to most."""
MAKE_AGAIN = "make this one again from the reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What was done, and the noise that comes with it."""

    kind: StepKind
    stored: str
    """Dtype of the artefact's own values, where they are plain."""
    noise: float


def judge(found: ScoreComparison, summary: Summary, step: Step) -> list[Finding]:
    """Nothing is failed that could be chance: the whole 99% interval has to be beyond."""
    nonsense = list(_find_nonsense(summary))
    if nonsense:
        return [*nonsense, *_explain(summary, step)]
    findings = [*_judge_vocabulary(found), *_judge_limits(summary, LIMITS[step.kind], step)]
    if step.kind is StepKind.EXACT:
        findings += _judge_exact(found, summary, step)
    if any(finding.level is Level.FAIL for finding in findings):
        findings += _explain(summary, step)
    return findings


def _find_nonsense(summary: Summary) -> Iterator[Finding]:
    if not summary.is_finite:
        yield _fail("Its scores are not finite numbers.")
    elif summary.entropy_fraction > NONSENSE_ENTROPY:
        yield _fail("Every token is as likely as any other: the weights say nothing.")
    elif summary.perplexity_change.low > NONSENSE_PERPLEXITY - 1:
        times = summary.perplexity / summary.reference_perplexity
        yield _fail(
            f"Perplexity is {times:,.0f} times the reference's: {summary.perplexity:,.0f} instead "
            f"of {summary.reference_perplexity:.2f}."
        )


def _judge_vocabulary(found: ScoreComparison) -> Iterator[Finding]:
    difference = found.num_vocabulary - found.reference_vocabulary
    if difference:
        yield Finding(
            level=Level.NOTE,
            text=f"It has {abs(difference):,} rows {'more' if difference > 0 else 'less'} in its "
            f"vocabulary; the {found.num_common:,} common ones were compared.",
        )


def _judge_limits(summary: Summary, limits: Limits, step: Step) -> Iterator[Finding]:
    top1 = summary.settled_top1 if step.kind in (StepKind.EXACT, StepKind.FORMAT) else summary.top1
    kind = step.kind.value
    of = f" of {'an' if kind[0] in '8aeio' else 'a'} {kind} step"
    if limits.top1 is not None and top1.high < limits.top1:
        yield _fail(
            f"Only {top1.value:.1%} of places have the same most likely token; {limits.top1:.1%} "
            f"is the least{of}."
        )
    if limits.kl is not None and summary.kl.low > limits.kl:
        yield _fail(
            f"The distributions are {summary.kl.value:.2g} nats apart; {limits.kl:g} is the most"
            f"{of}."
        )
    change = summary.perplexity_change
    told = f"Perplexity rose by {change.value:.1%} ({change.low:.1%} to {change.high:.1%})"
    if limits.perplexity is not None and change.low > limits.perplexity:
        yield _fail(f"{told}; {limits.perplexity:.1%} is the most{of}.")
    elif limits.usual_perplexity is not None and change.value > limits.usual_perplexity:
        yield Finding(
            level=Level.WARNING,
            text=f"{told}, more than such a step usually costs ({limits.usual_perplexity:.0%}).",
            remedy="calibrate on data like your own, or keep more bits",
        )


def _judge_exact(found: ScoreComparison, summary: Summary, step: Step) -> Iterator[Finding]:
    limit = (
        FP32_LOGIT_LIMIT * max(1.0, found.score / FP32_SCORE)
        if step.stored == "fp32"
        else WORST_FACTOR * step.noise
    )
    if summary.max_diff > limit:
        yield _fail(
            f"Scores differ by up to {summary.max_diff:.2g}; rounding to {step.stored} explains "
            f"{limit:.2g}."
        )


def _explain(summary: Summary, step: Step) -> Iterator[Finding]:
    """A token that sees itself alone has no use for positions, queries or keys."""
    is_first_right = summary.first_max_diff <= 2 * step.noise
    if is_first_right and summary.max_diff > 10 * max(summary.first_max_diff, step.noise):
        yield Finding(
            level=Level.NOTE,
            text="The first place of each text is right and the later ones are not: positions are "
            "read otherwise (rope settings), or the rows of q and k are in another order.",
            remedy="compare rope settings in config.json, or convert it again",
        )


def _fail(text: str) -> Finding:
    return Finding(level=Level.FAIL, text=text, remedy=MAKE_AGAIN)
