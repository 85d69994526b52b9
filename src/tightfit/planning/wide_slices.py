"""The last choice of a plan: wide slices for the fused loss, where memory is left for them."""

from __future__ import annotations

from dataclasses import replace

from tightfit.core.strategy import Loss
from tightfit.estimate.logits import has_head_apart
from tightfit.estimate.result import Verdict
from tightfit.planning.ranking import Candidate, measure_seconds
from tightfit.planning.sift import Sieve

WIDE_FACTOR = 4
"""As fast as wider ones, or nearly. Head and loss of 8192 tokens on one H200, 4096 wide, 128,256
words, bf16, at factors 1, 2, 4 and 8: 27.0, 25.8, 24.4 and 24.6 ms with a frozen head, 52.7, 42.1,
38.3 and 37.1 ms with a trained one (benchmarks/results/h200_fused_kernels.json)."""


def widen_slices(sieve: Sieve, candidate: Candidate) -> Candidate:
    """The candidate with wide slices where they fit and gain time, else as it was.

    They are worth less than any layer that need not be recomputed: a plan that recomputes has no
    memory to give away.
    """
    strategy = candidate.strategy
    is_sliced = strategy.loss is Loss.FUSED and has_head_apart(sieve.request.spec)
    is_open = "loss_slice_factor" not in sieve.request.fixed
    if not is_sliced or not is_open or strategy.checkpointing:
        return candidate
    wide = strategy.model_copy(update={"loss_slice_factor": WIDE_FACTOR})
    if sieve.is_known_to_fail(candidate.layout, wide):
        return candidate
    outline = sieve.outline(candidate.layout, wide)
    is_faster = measure_seconds(outline) < measure_seconds(candidate.outline)
    if not is_faster or outline.verdict is not Verdict.FITS:
        return candidate
    return replace(candidate, strategy=wide, outline=outline)
