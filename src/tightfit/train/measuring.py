"""What each step cost: time, tokens, memory."""

from __future__ import annotations

import time

import psutil
import torch

from tightfit.hardware.own_memory import read_peak_bytes
from tightfit.ledger.metrics import StepRecord
from tightfit.planning.plan import Plan
from tightfit.train.agreement import Agreed
from tightfit.train.feed import StepItems


class Meter:
    """Clock and memory gauge of rank 0."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._plan = plan
        self._device = device
        self._process = psutil.Process()
        self._start = time.perf_counter()

    def restart(self) -> None:
        """Time from here on belongs to the next step."""
        self._start = time.perf_counter()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def record(
        self, items: StepItems, agreed: Agreed, *, rate: float, epoch: float, wait_seconds: float
    ) -> StepRecord:
        """The step that just ended; the next one starts now."""
        seconds = time.perf_counter() - self._start
        allocated, reserved, retries = self._read_memory()
        made = StepRecord(
            step=items.step + 1,
            epoch=epoch,
            loss=agreed.loss,
            learning_rate=rate,
            grad_norm=None if agreed.is_skipped else agreed.grad_norm,
            num_tokens=items.num_tokens,
            num_trained_tokens=items.num_trained_tokens,
            seconds=seconds,
            data_wait_seconds=wait_seconds,
            tokens_per_second=items.num_tokens / seconds,
            mfu_fraction=self._estimate_mfu(items.num_tokens, seconds),
            gpu_allocated_bytes=allocated,
            gpu_reserved_bytes=reserved,
            host_bytes=self._process.memory_info().rss,
            num_alloc_retries=retries,
        )
        self.restart()
        return made

    def _read_memory(self) -> tuple[int, int, int]:
        if self._device.type != "cuda":
            peak = read_peak_bytes()
            return peak, peak, 0
        # Asked once, and as it comes: the device has nothing to do meanwhile.
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        allocated, reserved = (stats[f"{name}_bytes"]["all"] for name in ("allocated", "reserved"))
        return allocated["peak"], reserved["peak"], stats["num_alloc_retries"]

    def _estimate_mfu(self, num_tokens: int, seconds: float) -> float | None:
        """The plan's FLOPs, in proportion to the tokens that really came."""
        predicted = self._plan.estimate.time
        planned_tokens = predicted.tokens_per_second * predicted.seconds_per_step
        strategy, gpu = self._plan.strategy, self._plan.hardware.node.gpu
        peak = gpu.flops(strategy.compute) * strategy.world_size
        if not planned_tokens or not peak:
            return None
        return predicted.flops_per_step * num_tokens / planned_tokens / seconds / peak
