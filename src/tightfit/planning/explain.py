"""Why a plan looks as it does: each lever turned back, estimated again, and put in a sentence."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from tightfit.core.units import render_bytes
from tightfit.estimation.result import EstimateSummary, Verdict
from tightfit.planning.filter import StrategyFilter, name_memory_share
from tightfit.planning.levers import LEVERS, Lever
from tightfit.planning.ranking import Candidate, measure_seconds

LEAST_SLOWDOWN = 1.02
"""Less is not worth a warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeverEffect:
    """What a lever brings: this plan against the same plan without it."""

    name: str
    fields: tuple[str, ...]
    """Of the strategy, that ask for it."""
    speedup: float
    """Time without the lever over time with it; above 1 the lever is faster."""
    added_bytes: int
    """Peak per GPU with the lever less the peak without it; negative saves memory."""
    verdict_without: Verdict
    share: str = "per GPU"
    """Whose memory `added_bytes` are."""

    @property
    def sentence(self) -> str:
        parts = []
        if self.speedup >= 1.005:
            parts.append(f"{self.speedup:.2f}x faster")
        elif self.speedup <= 0.995:
            parts.append(f"{1 / self.speedup:.2f}x slower")
        if abs(self.added_bytes) >= 2**26:
            sign = "+" if self.added_bytes > 0 else "-"
            parts.append(f"{sign}{render_bytes(abs(self.added_bytes))} {self.share}")
        if self.verdict_without is Verdict.DOES_NOT_FIT:
            parts.append("without it the job does not fit")
        elif self.verdict_without is Verdict.TIGHT:
            parts.append("without it the fit is tight")
        elif self.added_bytes > 2**26:
            parts.append("still fits")
        return f"{self.name}: " + (", ".join(parts) if parts else "no difference here")


def measure_levers(sieve: StrategyFilter, candidate: Candidate) -> Iterator[LeverEffect]:
    """What each pulled lever brings, in the order of `LEVERS`."""
    strategy, layout = candidate.strategy, candidate.layout
    for lever in LEVERS:
        if not lever.is_pulled(strategy):
            continue
        without = strategy.model_copy(update=lever.turned_back)
        if sieve.find_violation(layout, without) is None:
            effect = _compare(lever, candidate.outline, sieve.outline(layout, without))
            effect = replace(effect, share=name_memory_share(layout.group.node))
            if lever.is_for_memory:
                effect = replace(effect, speedup=min(effect.speedup, 1.0))
            yield effect


def explain_choice(
    sieve: StrategyFilter, candidate: Candidate, effects: Sequence[LeverEffect]
) -> tuple[str, ...]:
    """Sentences for a plan: its levers, then what the batch became."""
    sentences = [effect.sentence for effect in effects]
    return (*sentences, *_explain_batch(sieve, candidate), *_explain_nodes(candidate))


def warn_of_slow_settings(fixed: Collection[str], effects: Sequence[LeverEffect]) -> Iterator[str]:
    """Levers that the user fixed, that cost time here, and that the job fits without."""
    for effect in effects:
        asked = [name for name in effect.fields if name in fixed]
        is_slow = effect.speedup < 1 / LEAST_SLOWDOWN
        if asked and is_slow and effect.verdict_without is Verdict.FITS:
            yield (
                f"{effect.name}: asked for, but without it the same plan fits and is predicted to "
                f"be {1 / effect.speedup:.2f}x faster: leave {' and '.join(asked)} out"
            )


def _compare(lever: Lever, with_it: EstimateSummary, without: EstimateSummary) -> LeverEffect:
    return LeverEffect(
        name=lever.name,
        fields=lever.fields,
        speedup=measure_seconds(without) / max(measure_seconds(with_it), 1e-12),
        added_bytes=with_it.gpu.peak_reserved_bytes - without.gpu.peak_reserved_bytes,
        verdict_without=without.verdict,
    )


def _explain_batch(sieve: StrategyFilter, candidate: Candidate) -> Iterator[str]:
    s = candidate.strategy
    wanted = sieve.request.effective_batch
    got = s.micro_batch * s.grad_accum * s.world_size
    if got > wanted:
        yield f"{s.world_size} GPUs take a sequence each at least: {got} per step, not {wanted}"
    elif got < wanted:
        gpus = "1 GPU" if s.world_size == 1 else f"{s.world_size} GPUs"
        made_of = f"{gpus} x micro-batch {s.micro_batch} x {s.grad_accum}"
        yield f"{got} sequences per step, not {wanted}: {made_of}"


def _explain_nodes(candidate: Candidate) -> Iterator[str]:
    free = candidate.layout.group.num_free_nodes
    wanted = candidate.strategy.num_nodes
    if free is not None and free < wanted:
        yield f"needs {wanted} nodes of {candidate.layout.group.name}; {free} are free now"
