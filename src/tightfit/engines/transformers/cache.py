"""Keys and values of a changing batch: every row ends in the same column, and is written in place.

Rows have different lengths, so the columns on the left are empty in the shorter ones. Because
all rows end together, the distance between two columns is the distance between two tokens, and
causal, windowed and relative attention need nothing but a mask over the empty columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import cache_utils

from tightfit.runtime.libraries import is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tightfit.engines.transformers.prefixes import LayerParts, Prefix

_library: Any = cache_utils  # half typed
_SPARE_COLUMNS = 64
"""Columns to grow by at least."""


@dataclass(slots=True)
class Span:
    """Which part of every layer's buffers is in use. Columns are counted from any origin."""

    num_rows: int = 0
    start: int = 0
    end: int = 0
    most_rows: int = 1
    """The batch will not grow beyond these."""
    last: int = 0
    """The column that the longest answer can reach."""

    @property
    def width(self) -> int:
        return self.end - self.start


class RowLayer(_library.DynamicLayer):  # type: ignore[misc]
    """One layer's buffers, with spare columns, so that a step writes only one."""

    def __init__(self, span: Span) -> None:
        super().__init__()
        self._span = span
        self._origin = 0
        """The number of the buffers' first column."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write after the last column; the span advances once every layer has written."""
        span = self._span
        end = span.end + int(key_states.shape[-2])
        if not self.is_initialized:
            self._begin(key_states, value_states)
        self.fit(span.num_rows, span.start, end)
        here = slice(span.end - self._origin, end - self._origin)
        self.keys[: span.num_rows, :, here] = key_states
        self.values[: span.num_rows, :, here] = value_states
        seen = slice(span.start - self._origin, end - self._origin)
        return self.keys[: span.num_rows, :, seen], self.values[: span.num_rows, :, seen]

    def fit(self, num_rows: int, start: int, end: int) -> None:
        """Grow the buffers to these rows and columns. Safe to repeat after a failure."""
        rows, columns = int(self.keys.shape[0]), int(self.keys.shape[-2])
        is_wide = self._origin <= start and end <= self._origin + columns
        if num_rows <= rows and is_wide:
            return
        span = self._span
        more_rows = rows if num_rows <= rows else min(span.most_rows, max(num_rows, 2 * rows))
        spare = max(_SPARE_COLUMNS, (end - start) // 4)
        more_end = max(end, min(end + spare, span.last))
        try:
            self._move(max(num_rows, more_rows), start, more_end)
        except RuntimeError as error:
            if not is_out_of_memory(error) or (num_rows, end) == (more_rows, more_end):
                raise
            self._move(num_rows, start, end)

    def place(self, other: RowLayer, *, at: int, count: int) -> None:
        """Append `count` rows of another layer; both end in the same column."""
        theirs, width = other._span, other._span.width
        if not self.is_initialized:
            self._begin(other.keys, other.values)
        end = self._span.end
        self.fit(at + count, min(self._span.start, end - width), end)
        here = slice(end - width - self._origin, end - self._origin)
        there = slice(theirs.start - other._origin, theirs.end - other._origin)
        self.keys[at : at + count, :, here] = other.keys[:count, :, there]
        self.values[at : at + count, :, here] = other.values[:count, :, there]

    def move_row(self, source: int, target: int) -> None:
        """Copy one row over another."""
        seen = slice(self._span.start - self._origin, self._span.end - self._origin)
        self.keys[target, :, seen] = self.keys[source, :, seen]
        self.values[target, :, seen] = self.values[source, :, seen]

    def read_row(self, row: int, length: int, count: int) -> LayerParts:
        """Keys and values of the first `count` tokens of a row of `length` tokens."""
        start = self._span.end - length - self._origin
        seen = slice(start, start + count)
        return self.keys[row, :, seen], self.values[row, :, seen]

    def held(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the rows and columns in use."""
        span = self._span
        seen = slice(span.start - self._origin, span.end - self._origin)
        return self.keys[: span.num_rows, :, seen], self.values[: span.num_rows, :, seen]

    def get_seq_length(self) -> int:
        return self._span.width

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._span.width + query_length, 0

    def _begin(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.dtype, self.device = keys.dtype, keys.device
        self._origin = self._span.start
        self.keys = keys.new_empty((0, keys.shape[1], 0, keys.shape[-1]))
        self.values = values.new_empty((0, values.shape[1], 0, values.shape[-1]))
        self.is_initialized = True

    def _move(self, num_rows: int, start: int, end: int) -> None:
        span = self._span
        old_rows = min(span.num_rows, int(self.keys.shape[0]))
        seen = slice(span.start - self._origin, span.end - self._origin)
        here = slice(span.start - start, span.end - start)
        moved = []
        for old in (self.keys, self.values):
            new = old.new_empty((num_rows, old.shape[1], end - start, old.shape[-1]))
            # Unwritten columns are masked, but a NaN in them would still spread: 0 x NaN is NaN.
            new.zero_()
            if old.numel() and span.width:
                new[:old_rows, :, here] = old[:old_rows, :, seen]
            moved.append(new)
        self.keys, self.values = moved
        self._origin = start


class RowCache(_library.Cache):  # type: ignore[misc]
    """A `transformers` cache whose rows are added and dropped between steps."""

    def __init__(self, *, most_rows: int) -> None:
        self.span = Span(most_rows=most_rows)
        make: Any = self._make_layer
        super().__init__(layer_class_to_replicate=make)

    def _make_layer(self) -> RowLayer:
        return RowLayer(self.span)

    def clear(self) -> None:
        """Free the buffers now: the cache and its layers form a reference cycle."""
        self.layers.clear()

    def begin(self, num_rows: int, width: int) -> None:
        """Room for a prefill of exactly this shape in an empty cache."""
        self.span.num_rows, self.span.last = num_rows, self.span.end + width

    def seed(self, prefixes: Sequence[Prefix | None], width: int) -> None:
        """Fill the first columns of an empty cache: each row's prefix ends in the same one."""
        like = next(prefix for prefix in prefixes if prefix is not None)
        for number, part in enumerate(like):
            layer = self._make_layer()
            self.layers.append(layer)
            if part is None:
                continue
            layer._begin(part[0][None], part[1][None])
            layer.fit(self.span.num_rows, self.span.start, self.span.end + width)
            for row, prefix in enumerate(prefixes):
                held = None if prefix is None else prefix[number]
                if held is not None:
                    here = slice(width - int(held[0].shape[1]), width)
                    layer.keys[row, :, here], layer.values[row, :, here] = held
        self.advance(width)

    def read_row(self, row: int, length: int, count: int) -> Prefix:
        """Keys and values of the first `count` tokens of a row of `length` tokens."""
        return [
            layer.read_row(row, length, count) if layer.is_initialized else None
            for layer in self.layers
        ]

    def advance(self, num_columns: int) -> None:
        """Count columns that every layer has written."""
        self.span.end += num_columns

    def expect(self, num_columns: int) -> None:
        """The longest answer will take this many more columns."""
        self.span.last = self.span.end + num_columns

    def join(self, fresh: RowCache) -> None:
        """Append another cache's rows. A failure leaves this cache unchanged."""
        at, count = self.span.num_rows, fresh.span.num_rows
        while len(self.layers) < len(fresh.layers):
            self.layers.append(self._make_layer())
        for mine, theirs in zip(self.layers, fresh.layers, strict=False):
            if theirs.is_initialized:
                mine.place(theirs, at=at, count=count)
        self.span.num_rows += count
        self.span.start = min(self.span.start, self.span.end - fresh.span.width)

    def drop(self, row: int) -> None:
        """Drop one row; the last one takes its place."""
        last = self.span.num_rows - 1
        if row != last:
            for layer in self.layers:
                if layer.is_initialized:
                    layer.move_row(last, row)
        self.span.num_rows = last

    def trim(self, width: int) -> None:
        """Drop columns on the left that no row uses any more."""
        self.span.start = max(self.span.start, self.span.end - width)
