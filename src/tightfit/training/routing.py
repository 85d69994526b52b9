"""The routers of a mixture of experts in training: their load-balancing loss, and the load of each
expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tightfit.core.strategy import Strategy
from tightfit.runtime.kernels.tiled_mlp import CURRENT_TILE
from tightfit.training.context_parallel import ContextParallel


class RoutingSums(NamedTuple):
    """One rank's sums over a step's micro-batches, on its device."""

    router_loss: Tensor
    """Each micro-batch's router loss times its trained tokens; without the weight."""
    loss_weight: float
    expert_tokens: Tensor
    """[layers, experts]: how many tokens were sent to each expert."""


class Routing:
    """Adds the router loss to the objective and counts the tokens of each expert.

    The router loss is transformers' `load_balancing_loss_func`: experts x the sum over experts of
    (share of tokens sent to it x mean probability), both over all layers and all tokens that are
    not padding. Each micro-batch's counts as many times as it has trained tokens, so a step's is
    the mean over its micro-batches and ranks by their trained tokens. With one micro-batch that is
    transformers' value. Several of equal length give the value of all together, plus experts x
    the covariances of share and probability over micro-batches: each is balanced by itself.

    Counts and loss are added up on the device, and read once per step. What backward recomputes is
    not counted again. Experts are counted where transformers calls them with the chosen ones;
    Llama 4, whose modelling code does not, has no counts.
    """

    def __init__(self, experts: Sequence[Any], *, loss_weight: float, num_choices: int) -> None:
        self._loss_weight = loss_weight
        self._num_choices = num_choices
        self._shape = (len(experts), max((one.num_experts for one in experts), default=0))
        self._is_token: Tensor | None = None
        """Of the micro-batch whose forward pass runs and counts; None outside of it."""
        self._expert_tokens: Tensor | None = None
        self._router_loss: Tensor | None = None
        for layer, module in enumerate(experts):
            module.register_forward_pre_hook(partial(self._count, layer))

    @classmethod
    def attach(cls, model: nn.Module, strategy: Strategy) -> Routing | None:
        """Of a model with experts. None where layers are compiled, which a hook would cut in two,
        and for models without experts."""
        experts = [part for part in model.modules() if hasattr(type(part), "_apply_gate")]
        if strategy.compile or not (experts or strategy.router_loss_weight):
            return None
        base: Any = model
        base = base.get_base_model() if hasattr(base, "peft_config") else base
        return cls(
            experts,
            loss_weight=strategy.router_loss_weight,
            num_choices=getattr(base, "num_experts_per_tok", 0),
        )

    def run(
        self,
        call: Callable[..., Any],
        inputs: dict[str, Tensor],
        is_token: Tensor,
        *,
        is_counted: bool,
        context: ContextParallel | None = None,
    ) -> tuple[Any, Tensor | None]:
        """The outputs of a forward pass in training, and its router loss where wanted: of whole
        rows, where `context` shares them."""
        if self._expert_tokens is None:
            self._expert_tokens = torch.zeros(
                self._shape, dtype=torch.int64, device=is_token.device
            )
        self._is_token = is_token if is_counted else None
        try:
            if not self._loss_weight:
                return call(**inputs, use_cache=False), None
            outputs = call(**inputs, use_cache=False, output_router_logits=True)
        finally:
            self._is_token = None
        if context is not None:
            return outputs, self._balance_shared(outputs.router_logits, is_token, context)
        return outputs, self._balance(outputs.router_logits, is_token)

    def _balance_shared(
        self, router_logits: tuple[Tensor, ...], is_token: Tensor, context: ContextParallel
    ) -> Tensor:
        """The same value from the sums over the ranks that share the rows."""
        weights = is_token.reshape(-1).float()
        num_experts = router_logits[0].shape[-1]
        chosen = probabilities = weights.new_zeros(num_experts)
        for logits in router_logits:
            shares = logits.softmax(dim=-1)
            experts = shares.topk(self._num_choices, dim=-1).indices.reshape(-1)
            sent = weights.repeat_interleave(self._num_choices)
            chosen = chosen.scatter_add(0, experts, sent)
            probabilities = probabilities + (shares.float() * weights[:, None]).sum(dim=0)
        num_tokens = len(router_logits) * weights.sum()
        sums = context.sum_over_group(torch.cat([chosen, probabilities, num_tokens[None]]))
        chosen, probabilities = sums[:num_experts], sums[num_experts:-1]
        return num_experts * (chosen * probabilities).sum() / sums[-1].square()

    def _balance(self, router_logits: tuple[Tensor, ...], is_token: Tensor) -> Tensor:
        # Every family's modelling file has the same function.
        from transformers.models.mixtral import modeling_mixtral

        compute: Any = modeling_mixtral.load_balancing_loss_func
        num_experts = router_logits[0].shape[-1]
        balance: Tensor = compute(router_logits, num_experts, self._num_choices, is_token)
        return balance

    def add_loss(self, loss_sum: Tensor, balance: Tensor, num_trained_tokens: int) -> Tensor:
        """The sum of token losses with the router loss, and the latter kept for the metrics."""
        summed = balance * num_trained_tokens
        kept = summed.detach()
        self._router_loss = kept if self._router_loss is None else self._router_loss + kept
        return loss_sum + self._loss_weight * summed

    def _count(self, layer: int, _experts: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._is_token is None or self._expert_tokens is None:
            return
        chosen: Tensor = inputs[1]
        is_token = self._is_token.reshape(-1)
        for tile in CURRENT_TILE:
            is_token = is_token[tile]
        tokens = is_token.to(torch.int64).reshape(-1, 1).expand(chosen.shape)
        self._expert_tokens[layer].scatter_add_(0, chosen.reshape(-1), tokens.reshape(-1))

    def take(self) -> RoutingSums | None:
        """The sums since the last call; None before the first forward pass."""
        counted, router_loss = self._expert_tokens, self._router_loss
        self._expert_tokens = self._router_loss = None
        if counted is None:
            return None
        if router_loss is None:
            router_loss = torch.zeros((), device=counted.device)
        return RoutingSums(router_loss, self._loss_weight, counted)


def mark_tokens(labels: Tensor, lengths: Tensor | None) -> Tensor:
    """1 for a token and 0 for padding, in the shape of `labels`."""
    if lengths is None:
        return torch.ones_like(labels)
    return (torch.arange(labels.shape[1], device=labels.device) < lengths[:, None]).long()


def measure_loads(expert_tokens: Tensor) -> Tensor:
    """Two numbers of `[layers, experts]` counts: the most loaded expert of any layer over the mean
    of its layer, and the share of experts without a token."""
    counts = expert_tokens.double()
    mean = counts.mean(dim=1).clamp(min=1e-9)
    return torch.stack([(counts.amax(dim=1) / mean).max(), (counts == 0).double().mean()])
