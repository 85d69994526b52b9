"""Replays: a step's kernels recorded once per shape as a CUDA graph, and started as one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tightfit.runtime.devices import is_out_of_memory

if TYPE_CHECKING:
    import torch

Shape = tuple[int, int]
"""Rows and columns."""
_NUM_WARM_UPS = 2
"""Libraries choose kernels and take workspaces in their first calls, not to be recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recording:
    graph: Any
    tokens: torch.Tensor
    logits: torch.Tensor


class Replays:
    """A step by shape: recorded where that works, started from Python where it does not.

    A step is run several times while it is recorded, so it must come to the same each time.
    """

    def __init__(self, step: Callable[[torch.Tensor], torch.Tensor], *, is_recorded: bool) -> None:
        self._step = step
        self._is_recorded = is_recorded
        self._recordings: dict[Shape, _Recording] = {}
        self._pool: Any = None

    @property
    def num_recordings(self) -> int:
        return len(self._recordings)

    def forget(self) -> None:
        """The buffers have moved: every recording reads where they were."""
        self._recordings.clear()

    def run(self, shape: Shape, tokens: torch.Tensor) -> torch.Tensor:
        """The step's logits for `tokens`, with idle rows behind them up to the shape's."""
        if not self._is_recorded:
            return self._step(_pad(tokens, shape[0])[:, None])
        if shape not in self._recordings:
            recording = self._record(shape, tokens)
            if recording is None:
                return self._step(_pad(tokens, shape[0])[:, None])
            self._recordings[shape] = recording
        found = self._recordings[shape]
        found.tokens[: len(tokens), 0] = tokens
        found.graph.replay()
        return found.logits

    def _record(self, shape: Shape, tokens: torch.Tensor) -> _Recording | None:
        """None where a kernel of this model cannot be recorded; nothing is tried from then on."""
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
            # Only this thread is held to the rules: others may copy or ask for memory meanwhile.
            with cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                logits = self._step(inputs)
        except RuntimeError as fault:
            cuda.synchronize()
            if is_out_of_memory(fault):
                raise
            self._is_recorded = False
            self._recordings.clear()
            return None
        self._pool = self._pool or graph.pool()
        return _Recording(graph=graph, tokens=inputs, logits=logits)


def _pad(tokens: torch.Tensor, count: int) -> torch.Tensor:
    import torch

    if len(tokens) == count:
        return tokens
    return torch.cat([tokens, tokens.new_zeros(count - len(tokens))])
