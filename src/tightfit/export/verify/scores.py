"""The reference's logits kept on disk, artefacts compared with them, and the judgement."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import exp, inf, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.dtypes import Dtype, find_plain_dtype
from tightfit.core.errors import SetupError, UsageError
from tightfit.core.files import cache_folder, describe_write_error, temporary_folder
from tightfit.core.findings import Z99, Finding, Interval, Status, estimate_share
from tightfit.core.text import did_you_mean
from tightfit.engines.protocol import Engine
from tightfit.export.formats import LIMITS, StepKind, list_formats
from tightfit.export.verify.verdict import fail
from tightfit.runtime.output_folder import check_room

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


_IN_MEMORY_BYTES = 256 << 20
_ROWS_AT_ONCE = 64
WindowCallback = Callable[[int], None]
"""Called after each window with its number of positions."""
Window = tuple[int, ...]
AREA = "scores"


class ScoreStore:
    """The reference's logits in fp32: in memory while they are few, else in a cache file."""

    def __init__(self, windows: Sequence[Window], num_vocabulary: int) -> None:
        import numpy as np

        self.windows = windows
        self._files = ExitStack()
        shape = (sum(map(len, windows)), num_vocabulary)
        num_bytes = 4 * shape[0] * shape[1]
        if num_bytes <= _IN_MEMORY_BYTES:
            self.scores: NDArray[np.float32] = np.empty(shape, np.float32)
            return
        folder = self._files.enter_context(_make_folder(num_bytes))
        self.scores = np.memmap(folder / "scores.f32", np.float32, "w+", shape=shape)

    def close(self) -> None:
        """Free disk and memory."""
        del self.scores
        self._files.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreComparison:
    """By position of the text, artefact compared with reference."""

    kl: NDArray[np.float64]
    """KL(reference || artefact)."""
    is_same: NDArray[np.bool_]
    """Both have the same most likely token."""
    gap: NDArray[np.float64]
    """Between the reference's two largest logits."""
    max_diff: NDArray[np.float64]
    """Largest |difference| of logits at this position."""
    entropy_fraction: NDArray[np.float64]
    """Of the artefact's distribution, as a share of the largest possible."""
    is_first: NDArray[np.bool_]
    """First position of a window, where a token attends only to itself."""
    reference_loss: NDArray[np.float64]
    """-log p of the token that follows, where one does."""
    loss: NDArray[np.float64]
    score: float
    """Typical size of the reference's largest logits."""
    num_common: int
    """Tokens that both have logits for."""
    num_vocabulary: int
    reference_vocabulary: int


def record_scores(engine: Engine, windows: Sequence[Window], report: WindowCallback) -> ScoreStore:
    """Compute the reference's logits of every window."""
    first = engine.logits(windows[0])
    store = ScoreStore(windows, first.shape[1])
    start = 0
    for number, window in enumerate(windows):
        rows = first if number == 0 else engine.logits(window)
        store.scores[start : start + len(window)] = rows
        start += len(window)
        report(len(window))
    return store


def compare_scores(engine: Engine, store: ScoreStore, report: WindowCallback) -> ScoreComparison:
    """Compare the artefact's logits of the same windows, one window in memory at a time."""
    import numpy as np

    parts: list[dict[str, Any]] = []
    start = 0
    num_vocabulary = 0
    for window in store.windows:
        rows = engine.logits(window)
        num_vocabulary = rows.shape[1]
        held = store.scores[start : start + len(window)]
        for low in range(0, len(window), _ROWS_AT_ONCE):
            high = min(low + _ROWS_AT_ONCE, len(window))
            targets = np.array(window[low + 1 : high + 1], dtype=np.int64)
            parts.append(_compare(held[low:high], rows[low:high], targets, is_start=low == 0))
        start += len(window)
        report(len(window))
    joined = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    score = float(joined.pop("top").mean())
    reference_vocabulary = store.scores.shape[1]
    return ScoreComparison(
        **joined,
        score=score,
        num_common=min(reference_vocabulary, num_vocabulary),
        num_vocabulary=num_vocabulary,
        reference_vocabulary=reference_vocabulary,
    )


def _compare(
    reference: NDArray[np.float32],
    other: NDArray[np.float32],
    targets: NDArray[np.int64],
    *,
    is_start: bool,
) -> dict[str, Any]:
    """Vocabularies may be padded differently: only common tokens are compared."""
    import numpy as np

    width = min(reference.shape[1], other.shape[1])
    one, two = (np.asarray(rows[:, :width], np.float64) for rows in (reference, other))
    best = np.partition(one, -2, axis=1)[:, -2:]
    log_one, log_two = _log_softmax(one), _log_softmax(two)
    share = np.exp(log_one)
    with np.errstate(invalid="ignore"):  # scores of a broken model are compared as they are
        kl = (share * (log_one - log_two)).sum(axis=1)
        diff = np.abs(one - two)
        entropy = -(np.exp(log_two) * log_two).sum(axis=1) / np.log(width)
    known = np.arange(len(targets))
    inside = np.minimum(targets, width - 1)
    is_first = np.zeros(len(one), np.bool_)
    is_first[0] = is_start
    return {
        "kl": kl,
        "is_same": one.argmax(1) == two.argmax(1),
        "gap": best[:, 1] - best[:, 0],
        "max_diff": diff.max(axis=1),
        "entropy_fraction": entropy,
        "is_first": is_first,
        "reference_loss": -log_one[known, inside],
        "loss": -log_two[known, inside],
        "top": np.abs(best[:, 1]),
    }


def _log_softmax(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    import numpy as np

    with np.errstate(invalid="ignore"):
        shifted = rows - rows.max(axis=1, keepdims=True)
        made: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return made


@contextmanager
def _make_folder(num_bytes: int) -> Iterator[Path]:
    home = cache_folder()
    remedy = "--tokens with a smaller number, or TIGHTFIT_CACHE=/a/larger/disk"
    check_room(home, num_bytes, remedy=remedy)
    try:
        home.mkdir(parents=True, exist_ok=True)
        with temporary_folder(home, name="verify") as folder:
            yield folder
    except OSError as error:
        why = describe_write_error(error, home / "verify", num_bytes=num_bytes)
        raise SetupError(f"Cannot write in {home}: {why}.", remedy=remedy) from error


# Means with 99% intervals, so that a small sample decides nothing by chance.

BLOCK = 16
"""Neighbouring positions are correlated: the spread is taken over blocks of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The measurements behind a verdict."""

    num_positions: int
    top1: Interval
    settled_top1: Interval
    """Without disagreements at near-ties of the reference."""
    kl: Interval
    max_kl: float
    max_diff: float
    first_max_diff: float
    """At the first position of each window."""
    perplexity: float
    reference_perplexity: float
    perplexity_change: Interval
    entropy_fraction: float
    is_finite: bool


def summarise(found: ScoreComparison, *, noise: float) -> Summary:
    """`noise`: differences of logits below it are rounding."""
    import numpy as np

    is_settled = found.is_same | (found.gap <= 2 * noise)
    change = estimate_mean(found.loss - found.reference_loss)
    return Summary(
        num_positions=len(found.kl),
        top1=_estimate_share(found.is_same),
        settled_top1=_estimate_share(is_settled),
        kl=estimate_mean(found.kl),
        max_kl=_largest(found.kl),
        max_diff=_largest(found.max_diff),
        first_max_diff=_largest(found.max_diff[found.is_first]),
        perplexity=_exp(float(found.loss.mean())),
        reference_perplexity=_exp(float(found.reference_loss.mean())),
        perplexity_change=Interval(
            value=_exp(change.value) - 1, low=_exp(change.low) - 1, high=_exp(change.high) - 1
        ),
        entropy_fraction=float(found.entropy_fraction.mean()),
        is_finite=bool(np.isfinite(found.kl).all()),
    )


def estimate_mean(values: NDArray[np.float64]) -> Interval:
    """From the spread of blocks of neighbouring positions."""
    import numpy as np

    value = float(values.mean())
    num_blocks = len(values) // BLOCK
    if num_blocks < 2:
        return Interval(value=value, low=-inf, high=inf)
    blocks = values[: num_blocks * BLOCK].reshape(num_blocks, BLOCK).mean(axis=1)
    error = Z99 * float(np.std(blocks, ddof=1)) / sqrt(num_blocks)
    return Interval(value=value, low=value - error, high=value + error)


def _estimate_share(is_so: NDArray[np.bool_]) -> Interval:
    return estimate_share(int(is_so.sum()), len(is_so), z=Z99)


def _largest(values: NDArray[np.float64]) -> float:
    return float(values.max()) if len(values) else 0.0


def _exp(value: float) -> float:
    return exp(value) if value < 700 else inf


# Limits by kind of step, and findings where a measurement is beyond its limit.

FP32_LOGIT_LIMIT = 5e-4
"""Largest difference of scores in an exact fp32 step, for scores up to 10; in proportion above.

Sums in another order alone: a merged SmolLM2-135M, 30 layers deep, is up to 1.2e-4 off its adapter
on 512 tokens and 2.4e-4 on 2,048 (benchmarks/results/artefacts.json); a random model of 2 layers,
whose weights are larger than trained ones, 3.1e-4 on some CPUs. The limit was 1e-4 first, then
3e-4: merges that were good by every other measure had failed both."""
FP32_SCORE = 10.0
NOISE_FACTOR = 8.0
"""How many rounding errors of one value may add up in a logit."""
EPSILON = {Dtype.FP32: 2.0**-24, Dtype.FP16: 2.0**-11, Dtype.BF16: 2.0**-8}
NONSENSE_PERPLEXITY = 10.0
"""Times the reference's: no quantization does that to a model that still works."""
NONSENSE_ENTROPY = 0.98
"""Of the largest possible: every token as likely as any other."""
LEAST_POSITIONS = 64
"""Fewer positions than these prove nothing."""

_GGUF_WIDTH = re.compile(r"(?:IQ|TQ|Q)(\d)")
_INTEGER_WIDTHS = re.compile(r"w(\d)a\d+")


def recognise_step(reference: str, other: str, *, is_same_engine: bool) -> StepKind:
    """The kind of step from the formats of both, as engines name them."""
    known = {record.engine_name.lower(): record.step for record in list_formats()}
    if other.lower() in known:
        return known[other.lower()]
    if other == "fp4":
        return StepKind.NF4
    # Files of other programs: GGUF types that are not made here, and odd GPTQ widths.
    if found := _GGUF_WIDTH.match(other.upper()):
        widths = {8: StepKind.Q8, 6: StepKind.Q6, 5: StepKind.Q5, 4: StepKind.Q4, 3: StepKind.Q3}
        return widths.get(int(found[1]), StepKind.Q2)
    if found := _INTEGER_WIDTHS.match(other):
        widths = {8: StepKind.INT8, 4: StepKind.GPTQ4, 3: StepKind.Q3}
        return widths.get(int(found[1]), StepKind.Q2)
    if other.startswith("gptq-"):
        return StepKind.Q2
    is_exact = is_same_engine and other == reference
    return StepKind.EXACT if is_exact else StepKind.FORMAT


def read_step(word: str) -> StepKind:
    """A kind by its name, for `--as`."""
    names = [kind.value for kind in StepKind]
    if word.strip().lower() not in names:
        raise UsageError(
            f"`--as {word[:40]}` is no kind of step.{did_you_mean(word, names)}",
            remedy=f"--as {'|'.join(names)}",
        )
    return StepKind(word.strip().lower())


def find_noise(stored: str, score: float) -> float:
    """How much rounding the weights to `stored` may change a logit of this size."""
    epsilon = EPSILON[find_plain_dtype(stored) or Dtype.BF16]
    return max(NOISE_FACTOR * epsilon * score, FP32_LOGIT_LIMIT * max(1.0, score / FP32_SCORE))


WORST_FACTOR = 3.0
"""The largest of some hundred million differences, relative to the usual rounding."""


def judge(
    found: ScoreComparison, summary: Summary, *, kind: StepKind, stored: str, noise: float
) -> list[Finding]:
    """Findings. Only a 99% interval that is wholly beyond the limit fails.

    `stored` is the dtype of the artefact's own values, where they are plain; `noise` is the
    rounding of its scores.
    """
    nonsense = _find_nonsense(summary)
    findings = [fail(AREA, nonsense)] if nonsense else list(_judge_limits(summary, kind))
    if nonsense is None:
        limit = noise if stored == "fp32" else WORST_FACTOR * noise
        if kind is StepKind.EXACT and summary.max_diff > limit:
            text = f"Scores differ by up to {summary.max_diff:.2g}; rounding to {stored} "
            findings.append(fail(AREA, f"{text}explains {limit:.2g}."))
        difference = found.num_vocabulary - found.reference_vocabulary
        if difference:
            text = (
                f"It has {abs(difference):,} rows {'more' if difference > 0 else 'less'} in its "
                f"vocabulary; the {found.num_common:,} common ones were compared."
            )
            findings.append(Finding(area=AREA, status=Status.INFO, detail=text))
    # At the first position attention is trivial: an error there lies outside attention.
    is_first_right = summary.first_max_diff <= 2 * noise
    is_later_wrong = summary.max_diff > 10 * max(summary.first_max_diff, noise)
    has_failed = any(finding.status is Status.ERROR for finding in findings)
    if has_failed and is_first_right and is_later_wrong:
        text = (
            "The first place of each text is right and the later ones are not: positions are "
            "read otherwise (rope settings), or the rows of q and k are in another order."
        )
        remedy = "compare rope settings in config.json, or convert it again"
        findings.append(Finding(area=AREA, status=Status.INFO, detail=text, remedy=remedy))
    if summary.num_positions < LEAST_POSITIONS:
        text = f"Only {summary.num_positions} places were compared."
        remedy = "--text FILE with more text, or --tokens with a larger number"
        findings.append(Finding(area=AREA, status=Status.WARNING, detail=text, remedy=remedy))
    return findings


def _find_nonsense(summary: Summary) -> str | None:
    if not summary.is_finite:
        return "Its scores are not finite numbers."
    if summary.entropy_fraction > NONSENSE_ENTROPY:
        return "Every token is as likely as any other: the weights say nothing."
    if summary.perplexity_change.low > NONSENSE_PERPLEXITY - 1:
        times = summary.perplexity / summary.reference_perplexity
        return (
            f"Perplexity is {times:,.0f} times the reference's: {summary.perplexity:,.0f} instead "
            f"of {summary.reference_perplexity:.2f}."
        )
    return None


def _judge_limits(summary: Summary, step: StepKind) -> Iterator[Finding]:
    limits, kind = LIMITS[step], step.value
    top1 = summary.settled_top1 if step in (StepKind.EXACT, StepKind.FORMAT) else summary.top1
    of = f" of {'an' if kind[0] in '8aeio' else 'a'} {kind} step"
    if limits.top1 is not None and top1.high < limits.top1:
        yield fail(
            AREA,
            f"Only {top1.value:.1%} of places have the same most likely token; {limits.top1:.1%} "
            f"is the least{of}.",
        )
    if limits.kl is not None and summary.kl.low > limits.kl:
        yield fail(
            AREA,
            f"The distributions are {summary.kl.value:.2g} nats apart; {limits.kl:g} is the most"
            f"{of}.",
        )
    change = summary.perplexity_change
    rise = f"Perplexity rose by {change.value:.1%} ({change.low:.1%} to {change.high:.1%})"
    if limits.perplexity is not None and change.low > limits.perplexity:
        yield fail(AREA, f"{rise}; {limits.perplexity:.1%} is the most{of}.")
    elif limits.usual_perplexity is not None and change.value > limits.usual_perplexity:
        yield Finding(
            area=AREA,
            status=Status.WARNING,
            detail=f"{rise}, more than such a step usually costs ({limits.usual_perplexity:.0%}).",
            remedy="calibrate on data like your own, or keep more bits",
        )
