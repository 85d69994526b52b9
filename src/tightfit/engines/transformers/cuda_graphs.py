"""Rows in slots of fixed size, so that one decoding step can be replayed as a CUDA graph.

Launched from Python one by one, the kernels of a step take a fast GPU many times longer than
reading the weights. Each row has a slot of its own and writes its next key at its own length.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import cache_utils

from tightfit.engines.transformers.rows import DecoderRows, has_plain_cache, round_columns
from tightfit.runtime.attention import register_attention
from tightfit.runtime.compressed_tensors import rounds_activations
from tightfit.runtime.decoding import (
    SLOTS,
    as_mask,
    fuse_for_decoding,
    has_decode_kernels,
    write_slots,
)
from tightfit.runtime.libraries import is_out_of_memory

if TYPE_CHECKING:
    import torch

    from tightfit.engines.transformers.prefixes import Prefix


GraphShape = tuple[int, int]
"""Rows and columns."""
_WARM_ROWS, _WARM_TOKENS = (1, 2, 4, 8), 512
"""Of the first steps that are captured, before there is a request."""
_NUM_WARM_UPS = 2
"""The first calls choose kernels and allocate workspaces, which must not be captured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _CapturedGraph:
    graph: Any
    tokens: torch.Tensor
    logits: torch.Tensor


class CudaGraphs:
    """A decoding step by shape: captured as a CUDA graph where possible, else run eagerly.

    The step runs several times during capture, so it must have the same effect each time.
    """

    def __init__(self, step: Callable[[torch.Tensor], torch.Tensor], *, captures: bool) -> None:
        self._step = step
        self._captures = captures
        self._graphs: dict[GraphShape, _CapturedGraph] = {}
        self._pool: Any = None

    def forget(self) -> None:
        """Drop all graphs: the buffers have moved, and graphs hold their old addresses."""
        self._graphs.clear()

    def run(self, shape: GraphShape, tokens: torch.Tensor) -> torch.Tensor:
        """The step's logits for `tokens`, padded with idle rows to the shape's."""
        if not self._captures:
            return self._step(_pad(tokens, shape[0])[:, None])
        if shape not in self._graphs:
            captured = self._capture(shape, tokens)
            if captured is None:
                return self._step(_pad(tokens, shape[0])[:, None])
            self._graphs[shape] = captured
        found = self._graphs[shape]
        found.tokens[: len(tokens), 0] = tokens
        found.graph.replay()
        return found.logits

    def _capture(self, shape: GraphShape, tokens: torch.Tensor) -> _CapturedGraph | None:
        """None where a kernel of this model cannot be captured; capture is then switched off."""
        import torch

        inputs = _pad(tokens, shape[0])[:, None].clone()
        cuda: Any = torch.cuda  # half typed
        graph = cuda.CUDAGraph()
        try:
            stream: Any = cuda.Stream()
            stream.wait_stream(cuda.current_stream())
            with cuda.stream(stream):
                for _ in range(_NUM_WARM_UPS):
                    self._step(inputs)
            cuda.current_stream().wait_stream(stream)
            cuda.synchronize()
            # thread_local: other threads may copy or allocate during the capture.
            with cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                logits = self._step(inputs)
        except RuntimeError as error:
            cuda.synchronize()
            if is_out_of_memory(error):
                raise
            self._captures = False
            self._graphs.clear()
            return None
        self._pool = self._pool or graph.pool()
        return _CapturedGraph(graph=graph, tokens=inputs, logits=logits)


def _pad(tokens: torch.Tensor, count: int) -> torch.Tensor:
    import torch

    if len(tokens) == count:
        return tokens
    return torch.cat([tokens, tokens.new_zeros(count - len(tokens))])


# Rows in slots of fixed buffers.

_library: Any = cache_utils  # its classes are only half annotated


_KINDS = {"full_attention", "sliding_attention"}
"""Of layers, whose window is handed to the attention function."""


def supports_slots(model: Any) -> bool:
    """Whether the family takes positions and our attention, and keeps plain keys and values."""
    config = model.config
    text = config.get_text_config()
    return (
        not config.is_encoder_decoder
        and has_plain_cache(config)
        and getattr(model, "_supports_attention_backend", False)
        and "position_ids" in inspect.signature(model.forward).parameters
        and set(getattr(text, "layer_types", None) or ()) <= _KINDS
        and len({parameter.device for parameter in model.parameters()}) == 1
        and not rounds_activations(model)
    )


@contextmanager
def attending(model: Any, name: str) -> Iterator[None]:
    """The model's attention under another name."""
    config = model.config
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


class SlotLayer(_library.DynamicLayer):  # type: ignore[misc]
    """One layer's buffers: (slots, heads, columns, width)."""

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self._cache = cache

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token of every row at the row's own length; return the columns in use."""
        count, width = int(key_states.shape[0]), self._cache.width
        new = key_states[:, :, 0], value_states[:, :, 0]
        write_slots(*new, self.keys, self.values, self._cache.lengths[:count])
        return self.keys[:count, :, :width], self.values[:count, :, :width]

    def get_seq_length(self) -> int:
        return self._cache.width

    def resize(self, like: Any, num_slots: int, num_columns: int) -> None:
        """New buffers of this size with what the old ones held."""
        for name in ("keys", "values"):
            old, shape = getattr(self, name), getattr(like, name).shape
            if old is not None and old.shape[0] >= num_slots and old.shape[2] >= num_columns:
                continue  # an earlier attempt ran out of memory behind this layer
            new = getattr(like, name).new_zeros((num_slots, shape[1], num_columns, shape[-1]))
            if old is not None:
                new[: old.shape[0], :, : old.shape[2]] = old
            setattr(self, name, new)
        self.is_initialized = True


class SlotCache(_library.Cache):  # type: ignore[misc]
    """A `transformers` cache of slots. Lengths lie on the device."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        import torch

        super().__init__(layers=[SlotLayer(self) for _ in range(num_layers)])
        self.num_slots = 0
        self.num_columns = 0
        self.width = 0
        """Columns that the current step reads."""
        self.lengths = torch.zeros(0, dtype=torch.long, device=device)

    def fit(self, fresh: Any, num_slots: int, num_columns: int) -> bool:
        """Make room for so many slots and columns. True: the buffers have moved."""
        if num_slots <= self.num_slots and num_columns <= self.num_columns:
            return False
        num_slots = max(num_slots, self.num_slots)
        num_columns = max(num_columns, self.num_columns)
        for mine, theirs in zip(self.layers, fresh.layers, strict=True):
            mine.resize(theirs, num_slots, num_columns)
        self.num_slots, self.num_columns = num_slots, num_columns
        self.lengths = self.lengths.new_zeros(self.num_slots)
        return True

    def place(self, fresh: Any, lengths: Sequence[int], *, at: int) -> None:
        """Copy the rows of a prefill, which end in the same column, to the slots from `at` on."""
        span = fresh.span
        for mine, theirs in zip(self.layers, fresh.layers, strict=True):
            keys, values = theirs.held()
            for row, length in enumerate(lengths):
                mine.keys[at + row, :, :length] = keys[row, :, span.width - length :]
                mine.values[at + row, :, :length] = values[row, :, span.width - length :]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy one slot over another."""
        for layer in self.layers:
            layer.keys[target, :, :length] = layer.keys[source, :, :length]
            layer.values[target, :, :length] = layer.values[source, :, :length]


class SlotRows(DecoderRows):
    """Rows in slots; steps are replayed as CUDA graphs on a GPU."""

    def __init__(self, model: Any, *, most_rows: int, prefix_bytes: int = 0) -> None:
        super().__init__(model, most_rows=most_rows, prefix_bytes=prefix_bytes)
        register_attention()
        fuse_for_decoding(model)
        self._reads_filled = has_decode_kernels(self._device)
        """Attention reads filled columns alone, whatever the slots' size."""
        self._slots = most_rows
        """To allocate at once; fewer after memory has run out."""
        self._is_stale = True
        """The lengths on the device must be written again."""
        self._cuda_graphs = CudaGraphs(self._read_slots, captures=self._device.type == "cuda")

    def _add(self, fresh: Any, lengths: list[int], most_new: int) -> None:
        at = len(self._lengths)
        if self._cache is None:
            self._cache = SlotCache(len(fresh.layers), self._device)
        self._make_room(fresh, at + len(lengths), round_columns(max(lengths) + most_new))
        self._cache.place(fresh, lengths, at=at)
        fresh.clear()
        self._lengths.extend(lengths)
        self._is_stale = True

    def _make_room(self, fresh: Any, num_rows: int, num_columns: int) -> None:
        """Buffers for all rows there may be, since moving them costs all graphs; for these rows
        alone where memory does not allow more."""
        needed = min(self._most_rows, _round_rows(num_rows))
        try:
            has_moved = self._cache.fit(fresh, max(needed, self._slots), num_columns)
        except RuntimeError as error:
            self._cuda_graphs.forget()  # some buffers may have moved
            if not is_out_of_memory(error) or needed >= self._slots:
                raise
            self._slots = needed
            has_moved = self._cache.fit(fresh, needed, num_columns)
        if has_moved:
            self._cuda_graphs.forget()

    def warm_up(self) -> None:
        """Compile kernels and capture the steps of few rows, so that no request waits for it."""
        if self._device.type != "cuda":
            return
        # Learned positions end, and an index beyond them would end the process.
        config = self._model.config.get_text_config()
        most = getattr(config, "max_position_embeddings", None) or 2 * _WARM_TOKENS
        length = min(_WARM_TOKENS, most // 2)
        for count in filter(lambda rows: rows <= self._most_rows, _WARM_ROWS):
            try:
                joined = self.join([[row] * length for row in range(count)], length)
                self.step(joined.logits.argmax(dim=-1))
            finally:
                self._lengths.clear()
                self._prompts.clear()
                self._is_stale = True

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        import torch

        cache, count = self._cache, len(self._lengths)
        if self._is_stale:
            idle = [0] * (cache.num_slots - count)
            cache.lengths.copy_(torch.tensor([*self._lengths, *idle]))
            self._is_stale = False
        cache.width = cache.num_columns
        if not self._reads_filled:
            cache.width = min(cache.num_columns, round_columns(max(self._lengths) + 1))
        size = min(cache.num_slots, _round_rows(count))
        logits = self._cuda_graphs.run((size, cache.width), tokens)[:count]
        cache.lengths[:count] += 1
        self._lengths = [length + 1 for length in self._lengths]
        return logits

    def drop(self, row: int, tokens: Sequence[int] = ()) -> None:
        self._keep(row, tokens)
        last = self._forget_row(row)
        if row < len(self._lengths):
            self._cache.move(len(self._lengths), row, last)
        self._is_stale = True

    def _read_row(self, row: int, count: int) -> Prefix:
        return [
            (layer.keys[row, :, :count], layer.values[row, :, :count])
            for layer in self._cache.layers
        ]

    def _read_slots(self, tokens: torch.Tensor) -> torch.Tensor:
        """One token of every row in `tokens`: (rows, 1). Everything it reads stays in place."""
        cache = self._cache
        count = int(tokens.shape[0])
        lengths = cache.lengths[:count]
        with attending(self._model, SLOTS):
            output = self._model(
                input_ids=tokens,
                attention_mask=as_mask(lengths),
                position_ids=lengths[:, None],
                past_key_values=cache,
                use_cache=True,
                **self._extra,
            )
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits


def _round_rows(count: int) -> int:
    """1, 2, 4, 8, then multiples of 8: idle rows cost little, graphs cost memory."""
    if count > 8:
        return -(-count // 8) * 8
    return 1 << (count - 1).bit_length()
