"""How long a row fits: for each set of levers the longest row, and how fast it goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from tightfit.core.settings import MAX_SEQ_LEN
from tightfit.core.strategy import Strategy
from tightfit.estimation.job import estimate_job_summary
from tightfit.estimation.result import EstimateSummary, Verdict
from tightfit.hardware.types import Cluster
from tightfit.planning.filter import assume_host
from tightfit.planning.request import JobRequest
from tightfit.planning.rules import Case, find_first_violation
from tightfit.planning.space import (
    MOST_MLP_TILES,
    Layout,
    enumerate_strategies,
    list_layouts,
    list_long_row_levers,
)

STEP_TOKENS = 1024
"""Lengths are multiples of this."""
NEAR_FRACTION = 0.98
"""Of what is as nearly as long as the longest, the fastest is shown."""

_Change = Callable[[JobRequest, Layout, Strategy], Strategy]


class LongestRow(NamedTuple):
    """The longest row under some levers."""

    levers: str
    seq_len: int
    """0: not even the shortest fits."""
    strategy: Strategy | None = None
    group: str = ""
    summary: EstimateSummary | None = None

    @property
    def seconds_per_row(self) -> float | None:
        """On all GPUs together, of one row a GPU."""
        if self.summary is None or not self.summary.time.tokens_per_second:
            return None
        return self.seq_len / self.summary.time.tokens_per_second


def _without_recomputation(_request: JobRequest, _layout: Layout, s: Strategy) -> Strategy:
    plain = {"checkpointing": False, "mlp_tiles": 1, "offloaded_inputs": 0}
    return s.model_copy(update=plain)


def _recomputed(_request: JobRequest, _layout: Layout, s: Strategy) -> Strategy:
    plain = {"checkpointing": True, "mlp_tiles": 1, "offloaded_inputs": 0}
    return s.model_copy(update=plain)


def _in_host_memory(request: JobRequest, layout: Layout, s: Strategy) -> Strategy:
    s = _recomputed(request, layout, s)
    levers = list_long_row_levers(request.spec, s, layout.group.node)
    found: dict[str, Any] = next((one for one in levers if "offloaded_inputs" in one), {})
    return s.model_copy(update=found)


def _tiled(request: JobRequest, layout: Layout, s: Strategy) -> Strategy:
    s = _in_host_memory(request, layout, s)
    return s.model_copy(update={"mlp_tiles": MOST_MLP_TILES})


_LADDER: tuple[tuple[str, _Change], ...] = (
    ("nothing recomputed", _without_recomputation),
    ("all layers recomputed", _recomputed),
    ("their inputs in host memory", _in_host_memory),
    ("their MLPs in tiles", _tiled),
    ("weights in host memory", _tiled),
)
"""Each keeps what is before it. With weights in host memory only the last."""


def find_longest_rows(request: JobRequest, cluster: Cluster) -> tuple[LongestRow, ...]:
    """For each rung of the ladder the longest row over all strategies, one row a GPU, by the closed
    form; it fits as a plan does, with the formula's margin. What a request fixes stays."""
    # Kernels for windows are offered for rows that are longer than the window.
    asked = replace(request, seq_len=2**20, profile=None)
    starts = [
        (layout, strategy)
        for group in cluster.groups
        for layout in list_layouts(
            group.model_copy(update={"node": assume_host(group.node)}), asked
        )
        for strategy in enumerate_strategies(asked, layout)
        if strategy.checkpointing
    ]
    judge = _Judge(asked, cluster)
    staying = [start for start in starts if not start[1].offload.moves_params]
    return tuple(
        judge.find(name, change, starts if number == len(_LADDER) else staying)
        for number, (name, change) in enumerate(_LADDER, start=1)
    )


class _Judge:
    def __init__(self, request: JobRequest, cluster: Cluster) -> None:
        self._request = request
        self._network = cluster.network_bytes_per_second

    def find(self, name: str, change: _Change, starts: list[tuple[Layout, Strategy]]) -> LongestRow:
        lengths: list[tuple[Layout, Strategy, int]] = []
        best = 0
        for layout, strategy in starts:
            # Most are shorter than the best: one look.
            if self._try(layout, strategy, change, max(best, STEP_TOKENS)) is None:
                near = int(best * NEAR_FRACTION) // STEP_TOKENS * STEP_TOKENS
                if near and self._try(layout, strategy, change, near) is not None:
                    lengths.append((layout, strategy, near))
                continue
            length = self._bisect(layout, strategy, change, max(best, STEP_TOKENS))
            lengths.append((layout, strategy, length))
            best = max(best, length)
        found = [
            LongestRow(name, length, changed, layout.group.name, summary)
            for layout, strategy, length in lengths
            if length >= NEAR_FRACTION * best
            and (tried := self._try(layout, strategy, change, length)) is not None
            for changed, summary in (tried,)
        ]
        return min(found, key=_rank, default=LongestRow(name, 0))

    def _bisect(self, layout: Layout, strategy: Strategy, change: _Change, low: int) -> int:
        """`low` fits."""
        high = 2 * low
        while high < MAX_SEQ_LEN and self._try(layout, strategy, change, high) is not None:
            low, high = high, 2 * high
        while high - low > max(STEP_TOKENS, low // 100):
            middle = (low + high) // 2 // STEP_TOKENS * STEP_TOKENS
            if middle <= low:
                break
            if self._try(layout, strategy, change, middle) is None:
                high = middle
            else:
                low = middle
        return low

    def _try(
        self, layout: Layout, strategy: Strategy, change: _Change, seq_len: int
    ) -> tuple[Strategy, EstimateSummary] | None:
        """The strategy with rows of this length, if it is legal and fits with room."""
        num_rows = max(1, self._request.effective_batch // strategy.world_size)
        sized = strategy.model_copy(
            update={"seq_len": seq_len, "micro_batch": 1, "grad_accum": num_rows}
        )
        changed = change(self._request, layout, sized)
        changed = changed.model_copy(
            update={k: v for k, v in self._request.fixed.items() if k != "seq_len"}
        )
        node, spec = layout.group.node, self._request.spec
        case = Case(spec=spec, strategy=changed, node=node, num_nodes=layout.group.num_nodes)
        if find_first_violation(case) is not None:
            return None
        summary = estimate_job_summary(
            spec=spec, strategy=changed, node=node, network_bytes_per_second=self._network
        )
        return (changed, summary) if summary.verdict is Verdict.FITS else None


def _rank(row: LongestRow) -> float:
    assert row.summary is not None
    return -row.summary.time.tokens_per_second


def describe_length_notes(request: JobRequest, rows: tuple[LongestRow, ...]) -> Iterator[str]:
    """What the table does not say."""
    longest = max((row.seq_len for row in rows), default=0)
    made_for = request.spec.max_positions
    if made_for is not None and longest > made_for:
        yield (
            f"{request.spec.name} was made for {made_for:,} tokens: longer rows fit, but its "
            "positions were not trained on them"
        )
    yield "by formula, with its margin of error; one row on each GPU at a time"
