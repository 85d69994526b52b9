"""DDP on fake tensors: the buckets that hold gradients, as torch's Reducer lays them out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tightfit.estimate.trace.recorder import Recorder
from tightfit.estimate.trace.recording import GRADIENTS
from tightfit.train.engine import TorchEngine

FIRST_BUCKET_BYTES = 2**20
BUCKET_BYTES = 25 * 2**20
"""DDP's defaults, `dist._DEFAULT_FIRST_BUCKET_BYTES` and `bucket_cap_mb`."""


class Buckets:
    """Gradients' home under DDP with `gradient_as_bucket_view`.

    The buckets stand from the start to the end. A gradient is made outside, copied into its
    place and dropped; where micro-batches are accumulated without exchange it stays outside
    until the last one. The first step has one bucket per dtype; before the second they are
    laid out anew in the order in which gradients came.
    Source: torch reducer.cpp, `initialize_buckets`, `mark_variable_ready_dense`.
    """

    def __init__(self, parameters: list[Any], recorder: Recorder) -> None:
        self._recorder = recorder
        self._buckets: list[Tensor] = []
        self._views: dict[nn.Parameter, Tensor] = {}
        self._arrived: list[nn.Parameter] = []
        self._is_rebuilt = False
        self.is_exchanging = True
        self._lay_out(parameters, [sys.maxsize])
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._take)

    def before_forward(self) -> None:
        if self._arrived and not self._is_rebuilt:
            self._lay_out(self._arrived, [FIRST_BUCKET_BYTES, BUCKET_BYTES])
            self._is_rebuilt = True

    def _lay_out(self, parameters: list[nn.Parameter], limits: list[int]) -> None:
        assign: Any = vars(dist)["_compute_bucket_assignment_by_size"]
        groups, _ = assign(parameters, limits, [False] * len(parameters))
        self._views.clear()
        self._buckets.clear()
        for group in groups:
            members = [parameters[place] for place in group]
            first = members[0]
            bucket: Any = torch.empty(
                sum(p.numel() for p in members), dtype=first.dtype, device=first.device
            )
            self._recorder.hold([bucket], GRADIENTS)
            self._buckets.append(bucket)
            parts = bucket.split([p.numel() for p in members])
            for parameter, part in zip(members, parts, strict=True):
                self._views[parameter] = part.view(parameter.shape)

    def _take(self, parameter: nn.Parameter) -> None:
        if parameter.grad is None:
            return
        if not self.is_exchanging:
            self._recorder.mark([parameter.grad], GRADIENTS)
            return
        if not self._is_rebuilt:
            self._arrived.append(parameter)
        view = self._views[parameter]
        with torch.no_grad():
            view.copy_(parameter.grad)
        parameter.grad = view


class ReplicatedEngine(TorchEngine):
    """TorchEngine over a module whose gradients live in buckets."""

    def __init__(self, *args: Any, recorder: Recorder, **settings: Any) -> None:
        super().__init__(*args, **settings)
        trained = [p for p in self.module.parameters() if p.requires_grad]
        self._buckets = Buckets(trained, recorder)
        self.module.register_forward_pre_hook(self._before_forward)

    @contextmanager
    def accumulate(self, *, is_last: bool) -> Iterator[None]:
        self._buckets.is_exchanging = is_last
        yield

    def _before_forward(self, _module: nn.Module, _args: Any) -> None:
        if torch.is_grad_enabled():
            self._buckets.before_forward()
