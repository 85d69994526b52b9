"""From the times of single answers to what the engine did all along: passes, fullness, traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tightfit.serve.generate.job import Timing

WINDOW_SECONDS = 1.0
MOST_WINDOWS = 600
SAME_PASS_SECONDS = 2e-3
"""First tokens that come this close together came out of one pass over their prompts."""
_SHORTEST_SECONDS = 1e-6


class Traffic(NamedTuple):
    """What one pass and one token move through memory."""

    bytes_per_pass: float
    """Weights, which every pass reads once for all answers under way."""
    kv_bytes_per_token: float
    """Keys and values of one token of context, which every new token of that answer reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One run, summed up. Passes and bytes are estimated from token counts and times."""

    seconds: float
    """From the first request to the last answer."""
    num_passes: float
    """Passes over the model: one for each step of all answers under way, and those over prompts."""
    mean_active: float
    """Answers under way together, averaged over the time in which there were any."""
    starved_fraction: float
    """Of the time until the last request: fewer requests were handed in than there are slots."""
    bytes_moved: float
    peak_bytes_per_second: float
    """Over the busiest second."""


def sum_timeline(
    timings: Sequence[Timing],
    traffic: Traffic,
    *,
    num_slots: int,
    num_passes: float | None = None,
) -> Timeline:
    """Sum up. An answer's tokens are taken to come evenly between its first and its last.

    `num_passes` is the engine's own count, where it keeps one.
    """
    start = min(timing.submitted_s for timing in timings)
    end = max(timing.finished_s for timing in timings)
    spans = _spans(timings)
    over_prompts = _prompt_passes(timings)
    estimated = sum((s.until - s.since) * s.passes_per_second for s in spans) + len(over_prompts)
    # Where the engine counted, its count holds, and the shape over time stays ours.
    scale = num_passes / estimated if num_passes and estimated else 1.0
    windows = _Windows(start, end)
    for span in spans:
        rate = scale * span.passes_per_second * traffic.bytes_per_pass
        rate += span.context_per_second * traffic.kv_bytes_per_token
        windows.add(span.since, span.until, rate)
    for moment, num_tokens in over_prompts:
        amount = scale * traffic.bytes_per_pass + num_tokens * traffic.kv_bytes_per_token
        windows.add_at(moment, amount)
    active = sum((span.until - span.since) * span.num_active for span in spans)
    busy = sum(span.until - span.since for span in spans if span.num_active)
    return Timeline(
        seconds=max(end - start, _SHORTEST_SECONDS),
        num_passes=scale * estimated,
        mean_active=active / busy if busy else 1.0,
        starved_fraction=_starved(timings, num_slots),
        bytes_moved=windows.total,
        peak_bytes_per_second=windows.peak,
    )


class _Span(NamedTuple):
    """A stretch of time in which the same answers are under way."""

    since: float
    until: float
    num_active: int
    passes_per_second: float
    context_per_second: float
    """Tokens of context that new tokens read."""


def _spans(timings: Sequence[Timing]) -> list[_Span]:
    changes: list[tuple[float, int, float, float]] = []
    for timing in timings:
        steps = timing.num_new_tokens - 1
        if steps <= 0:
            continue
        until = max(timing.finished_s, timing.first_token_s + _SHORTEST_SECONDS)
        rate = steps / (until - timing.first_token_s)
        context = rate * (timing.num_prompt_tokens + timing.num_new_tokens / 2)
        changes.append((timing.first_token_s, 1, rate, context))
        changes.append((until, -1, -rate, -context))
    changes.sort(key=lambda change: change[0])
    spans: list[_Span] = []
    num_active, rates, contexts, since = 0, 0.0, 0.0, 0.0
    for moment, count, rate, context in changes:
        if num_active and moment > since:
            spans.append(_Span(since, moment, num_active, rates / num_active, contexts))
        num_active, rates, contexts = num_active + count, rates + rate, contexts + context
        since = moment
        if not num_active:
            rates = contexts = 0.0  # sums of floats leave crumbs
    return spans


def _prompt_passes(timings: Sequence[Timing]) -> list[tuple[float, int]]:
    """When prompts were read, and how many tokens' keys and values each pass wrote."""
    passes: list[tuple[float, int]] = []
    for timing in sorted(timings, key=lambda timing: timing.first_token_s):
        fresh = timing.num_prompt_tokens - timing.num_cached_tokens
        if passes and timing.first_token_s - passes[-1][0] <= SAME_PASS_SECONDS:
            passes[-1] = (passes[-1][0], passes[-1][1] + fresh)
        else:
            passes.append((timing.first_token_s, fresh))
    return passes


def _starved(timings: Sequence[Timing], num_slots: int) -> float:
    start = min(timing.submitted_s for timing in timings)
    last = max(timing.submitted_s for timing in timings)
    if last - start < WINDOW_SECONDS:
        return 0.0
    changes = [(timing.submitted_s, 1) for timing in timings]
    changes += [(timing.finished_s, -1) for timing in timings]
    starved, num_open, since = 0.0, 0, start
    for moment, change in sorted(changes):
        until = min(moment, last)
        if num_open < num_slots and until > since:
            starved += until - since
        num_open, since = num_open + change, max(since, until)
    return starved / (last - start)


class _Windows:
    """Amounts over time, in windows of about a second."""

    def __init__(self, start: float, end: float) -> None:
        length = max(end - start, _SHORTEST_SECONDS)
        self._count = max(1, min(MOST_WINDOWS, int(length / WINDOW_SECONDS)))
        self._width = length / self._count
        self._start = start
        self._amounts = [0.0] * self._count

    @property
    def total(self) -> float:
        return sum(self._amounts)

    @property
    def peak(self) -> float:
        return max(self._amounts) / self._width

    def add(self, since: float, until: float, per_second: float) -> None:
        index = self._index(since)
        while since < until and index < self._count:
            edge = self._start + (index + 1) * self._width
            upto = until if index == self._count - 1 else min(until, edge)
            self._amounts[index] += max(0.0, upto - since) * per_second
            since, index = upto, index + 1

    def add_at(self, moment: float, amount: float) -> None:
        self._amounts[self._index(moment)] += amount

    def _index(self, moment: float) -> int:
        return min(max(int((moment - self._start) / self._width), 0), self._count - 1)
