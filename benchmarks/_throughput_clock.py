"""Measurements of one framework: step times, tokens, losses, peaks."""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import Any

NUM_LOSSES = 5


class Clock:
    """Ticks at each step's end; waits for the device only where the measurement starts and ends."""

    def __init__(self, *, device: str, num_warm_up: int, num_steps: int) -> None:
        self._is_cuda = device != "cpu"
        self._num_warm_up = num_warm_up
        self.num_ticks = num_warm_up + num_steps
        self._times: list[float] = []
        self.losses: list[float] = []

    def start(self) -> None:
        """The model is built: what building took is not training's."""
        if self._is_cuda:
            import torch

            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def tick(self) -> None:
        if self._is_cuda and len(self._times) + 1 in (self._num_warm_up, self.num_ticks):
            import torch

            torch.cuda.synchronize()
        self._times.append(time.perf_counter())

    def report(self, step_tokens: list[int]) -> dict[str, Any]:
        """`step_tokens`: trained tokens of every step, warm-up included."""
        times = self._times[self._num_warm_up - 1 : self.num_ticks]
        seconds = [after - before for before, after in pairwise(times)]
        tokens = step_tokens[self._num_warm_up : self.num_ticks]
        return summarise(seconds, tokens, self.losses) | self._read_memory()

    def _read_memory(self) -> dict[str, int]:
        if not self._is_cuda:
            return {}
        import torch

        return {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        }


def summarise(seconds: list[float], tokens: list[int], losses: list[float]) -> dict[str, Any]:
    """Of the measured steps; `losses` from the first step on."""
    return {
        "num_steps": len(seconds),
        "step_seconds": statistics.median(seconds),
        "measured_seconds": sum(seconds),
        "num_trained_tokens": sum(tokens),
        "tokens_per_second": sum(tokens) / sum(seconds),
        "all_step_seconds": [round(value, 5) for value in seconds],
        "first_losses": [round(value, 5) for value in losses[:NUM_LOSSES]],
    }
