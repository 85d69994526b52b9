"""ZeRO-3 on fake tensors: parameters gathered for the module that runs, and let go after it.

After DeepSpeed's sources (0.19, runtime/zero/stage3.py, parameter_offload.py), as rank 0 of any
number. Simplified: blocks that a second stream still reads are free at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tightfit.core.strategy import Loss
from tightfit.core.training import Training
from tightfit.estimate.trace.recording import COMMUNICATION, GRADIENTS, OPTIMIZER, WEIGHTS
from tightfit.runtime.random_weights import place_empty
from tightfit.train.optimizers import build_optimizer
from tightfit.train.step import Update
from tightfit.train.tracing.zero import ZeroProtocol
from tightfit.train.tracing.zero3_fetch import Coordinator, Piece
from tightfit.train.zero_config import make_stage3_fields

_NORM_DTYPE = torch.double


class FakeZero3Engine(ZeroProtocol):
    """Stage 3: weights, gradients and state in parts; whole parameters while they are used."""

    def __init__(self, module: nn.Module, training: Training, **settings: Any) -> None:
        super().__init__(module, **settings)
        text = self.model.config.get_text_config()
        self._fields = make_stage3_fields(text.hidden_size)
        self._pieces = self._partition()
        self.optimizer = build_optimizer(
            module.named_parameters(), self.strategy.optimizer, training
        )
        self._dtype = next(p.dtype for p in module.parameters() if p.requires_grad)
        self._subgroups = self._build_state()
        self._bucket_size: int = self._fields["reduce_bucket_size"]
        self._bucket = self.make(self._bucket_size, self._dtype, COMMUNICATION)
        trained = [p for group in self._subgroups for p in group.members]
        total = sum(self._pieces[p].part_size for p in trained)
        self._gradients = self.make(total, self._dtype, GRADIENTS)
        self._waiting: list[nn.Parameter] = []
        self._num_waiting = 0
        self._stream = torch.cpu.Stream()
        """`reduce_and_partition_stream`."""
        self.coordinator = Coordinator(module, self._pieces, self._fields, self.recorder)
        self._tell_external()
        self.coordinator.register_hooks()
        hooked: list[Any] = trained
        for parameter in hooked:
            parameter.register_post_accumulate_grad_hook(self._take)

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            self._reduce()
            self.coordinator.release_leftovers()

    def update(self, learning_rate: float) -> Update:
        self.coordinator.release_all()
        with torch.no_grad():
            norms = [
                torch.linalg.vector_norm(part.to(_NORM_DTYPE))
                for group in self._subgroups
                for part in self._cut(group)
            ]
        groups = self.optimizer.param_groups
        for group in self._subgroups:
            with torch.no_grad():
                group.master.grad = torch.cat(self._cut(group)).to(torch.float32)
                group.master.grad.mul_(1.0)
            group.settings["lr"] = learning_rate
            self.optimizer.param_groups = [group.settings]
            self.optimizer.step()
            group.master.grad = None
        self.optimizer.param_groups = groups
        self.coordinator.gather_persistent()
        return Update(grad_norm=torch.stack(norms).sum())

    def _partition(self) -> dict[nn.Parameter, Piece]:
        """Each parameter is made whole, cut, and let go before the next."""
        pieces: dict[nn.Parameter, Piece] = {}
        placed: dict[nn.Parameter, nn.Parameter] = {}
        for owner in list(self.module.modules()):
            for name, parameter in list(owner._parameters.items()):
                if parameter is None:
                    continue
                if parameter not in placed:
                    whole = torch.empty_like(parameter, device=self.device)
                    new = nn.Parameter(whole, parameter.requires_grad)
                    new.ds_shape = new.shape  # type: ignore[attr-defined]  # told apart, as by DeepSpeed
                    placed[parameter] = new
                    pieces[new] = Piece(new, len(pieces), self.world_size)
                    self.recorder.hold(pieces[new].list_parts(), WEIGHTS)
                    pieces[new].empty()
                    del whole
                owner._parameters[name] = placed[parameter]
        place_empty(self.module, self.device)
        return pieces

    def _build_state(self) -> list[_Subgroup]:
        """Trained parts in one buffer, their fp32 copies, and no gradients yet."""
        groups = [
            _Subgroup(dict(settings), members)
            for settings in self.optimizer.param_groups
            for members in self._split(settings["params"])
        ]
        sizes = [sum(self._pieces[p].part_size for p in group.members) for group in groups]
        for group in groups:
            for parameter in group.members:
                self._pieces[parameter].part = None
        flat: Any = self.make(sum(sizes), self._dtype, WEIGHTS)
        self._flat = flat
        converted = None
        for group, own in zip(groups, flat.split(sizes), strict=True):
            converted = own.to(torch.float32)
            group.master = converted.clone().requires_grad_()
            self.recorder.hold([group.master], OPTIMIZER)
            group.settings["params"] = [group.master]
        del converted
        self.optimizer.param_groups = [group.settings for group in groups]
        torch.zeros(max(sizes), dtype=torch.float32, device=self.device)
        return groups

    def _tell_external(self) -> None:
        """What modules read of others: the fused loss a head, adapted layers an adapter's dtype."""
        if self.strategy.loss is Loss.FUSED:
            self.coordinator.add_external(self.module, self.model.get_output_embeddings().weight)
        owners: list[Any] = list(self.module.modules())
        for owner in owners:
            adapters = getattr(owner, "lora_A", None)
            for adapter in adapters.values() if isinstance(adapters, nn.ModuleDict) else ():
                weight: Any = adapter.weight
                self.coordinator.add_external(owner, weight)

    def _split(self, parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        members: list[nn.Parameter] = []
        for parameter in parameters:
            members.append(parameter)
            if sum(self._pieces[p].part_size for p in members) >= self._fields["sub_group_size"]:
                yield members
                members = []
        if members:
            yield members

    def _cut(self, group: _Subgroup) -> list[Tensor]:
        """This rank's gradients of a subgroup."""
        start = 0
        for other in self._subgroups:
            if other is group:
                break
            start += sum(self._pieces[p].part_size for p in other.members)
        sizes = [self._pieces[p].part_size for p in group.members]
        own: Any = self._gradients.narrow(0, start, sum(sizes))
        return list(own.split(sizes))

    @torch.no_grad()
    def _take(self, parameter: nn.Parameter) -> None:
        piece = self._pieces[parameter]
        size = piece.num_values
        if self._waiting and self._num_waiting + size > self._bucket_size:
            self._reduce()
        assert parameter.grad is not None
        if self._num_waiting + size <= self._bucket_size:
            place = self._bucket.narrow(0, self._num_waiting, size).view(piece.shape)
            place.copy_(parameter.grad)
            parameter.grad = place
        self._waiting.append(parameter)
        self._num_waiting += size

    def _reduce(self) -> None:
        """`reduce_scatter_coalesced`: in place for one gradient that divides evenly."""
        if not self._waiting:
            return
        sizes = [self._pieces[p].part_size * self.world_size for p in self._waiting]
        is_alone = len(sizes) == 1 and sizes[0] == self._pieces[self._waiting[0]].num_values
        if not is_alone:
            before, self.recorder.purpose = self.recorder.purpose, COMMUNICATION
            with torch.cpu.stream(self._stream):
                torch.empty(sum(sizes), dtype=self._dtype, device=self.device)
            self.recorder.purpose = before
        for parameter in self._waiting:
            parameter.grad = None
        self._waiting.clear()
        self._num_waiting = 0


class _Subgroup:
    """Parameters that one call of the optimizer updates, as one flat fp32 tensor."""

    master: Tensor

    def __init__(self, settings: dict[str, Any], members: list[nn.Parameter]) -> None:
        self.settings = settings
        self.members = members


class LinearKeepingWeight(torch.autograd.Function):
    """DeepSpeed's `LinearFunctionForZeroStage3`: keeps input and parameter, not its transpose."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(values, weight, bias)
        if values.dim() == 2 and bias is not None:
            return torch.addmm(bias, values, weight.t())
        product = values.matmul(weight.t())
        if bias is not None:
            product += bias
        return product

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        values, weight, bias = ctx.saved_tensors
        of_values = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_values = gradient.matmul(weight)
        if ctx.needs_input_grad[1]:
            rows = gradient.reshape(-1, gradient.shape[-1])
            of_weight = rows.t().matmul(values.reshape(-1, values.shape[-1]))
        if bias is not None and ctx.needs_input_grad[2]:
            of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0)
        return of_values, of_weight, of_bias


@contextmanager
def deepspeed_linear() -> Iterator[None]:
    """DeepSpeed replaces `functional.linear` when it partitions."""
    from unittest.mock import patch

    def linear(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        apply: Any = LinearKeepingWeight.apply
        product: Tensor = apply(values, weight, bias)
        return product

    with patch.object(functional, "linear", linear):
        yield
