"""Context parallel: the ranks of a group share each row.

Each rank computes a slice of every row's tokens. Before attention an all-to-all gives each rank all
tokens of its share of the heads, and after it another gives the tokens back: so every attention
kernel computes what it would alone, masks, windows and packed documents included. Loss and
gradients add up over ranks as they do over rows, so DDP, FSDP2 and ZeRO need to know nothing of it.

Source: DeepSpeed Ulysses, arXiv:2309.14509. Why no ring: docs/decisions/0016-context-parallel.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from tightfit.core.errors import UsageError
from tightfit.core.strategy import Strategy
from tightfit.training.batches import IGNORED

_NAME = "tightfit_context"
_MASKS = ("create_causal_mask", "create_sliding_window_causal_mask")
_PER_HEAD = ("s_aux", "slopes")
"""Arguments of an attention function that have a value for each query head."""

_numbers = count()
_known: dict[str, ContextParallel] = {}
"""By the name of the attention that a model's config has."""


class ContextParallel:
    """One rank's place in the group that shares rows."""

    def __init__(self, size: int, attention: str) -> None:
        self.size = size
        self.attention = attention
        """The implementation that computes whole rows."""
        self.positions: Tensor | None = None
        """Of the batch that is computed, `[rows or 1, tokens]`, of whole rows."""
        self._group: Any = None

    @property
    def group(self) -> Any:
        """Consecutive ranks, so that those of a node exchange most; made by all ranks together."""
        if self._group is None:
            make: Any = dist.new_subgroups
            self._group, _ = make(group_size=self.size)
        return self._group

    @property
    def rank(self) -> int:
        return dist.get_rank() % self.size

    def cut(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens."""
        size = tensor.shape[dim] // self.size
        return tensor.narrow(dim, self.rank * size, size)

    def cut_batch(
        self, labels: Tensor, lengths: Tensor | None, inputs: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """This rank's labels, the token to predict at each place, lengths counted from its first
        token, and inputs.

        Rows are padded to a multiple of the group. The tokens to predict are shifted before rows
        are cut: the last of a slice predicts the first of the next.
        """
        rows, num_tokens = labels.shape
        extra = -num_tokens % self.size
        targets = pad(labels[:, 1:], (0, 1 + extra), value=IGNORED)
        positions = inputs.get("position_ids")
        if positions is None:
            positions = torch.arange(num_tokens, device=labels.device)[None]
        if extra:  # the padding goes on where the last document ends, and has no loss
            more = torch.arange(1, 1 + extra, device=labels.device)
            positions = torch.cat([positions, positions[:, -1:] + more], dim=1)
        self.positions = positions
        if lengths is None:
            lengths = labels.new_full((rows,), num_tokens)
        start = self.rank * ((num_tokens + extra) // self.size)
        own = {
            "input_ids": self.cut(pad(inputs["input_ids"], (0, extra))),
            "position_ids": self.cut(positions),
        }
        labels = self.cut(pad(labels, (0, extra), value=IGNORED))
        return labels, self.cut(targets), lengths - start, inputs | own

    def sum_over_group(self, values: Tensor) -> Tensor:
        """The sum over the group's ranks, with gradients."""
        apply: Any = _AllReduce.apply
        summed: Tensor = apply(values, self.group)
        return summed

    def exchange(self, x: Tensor, *, split: int, join: int) -> Tensor:
        """Give each rank its part along `split` of what all have, joined along `join`."""
        apply: Any = _AllToAll.apply
        exchanged: Tensor = apply(x, self.group, split, join)
        return exchanged


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, split: int, join: int) -> Tensor:
        ctx.group, ctx.dims = group, (split, join)
        return _all_to_all(x, group, split, join)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        split, join = ctx.dims
        return _all_to_all(gradients[0], ctx.group, join, split), None, None, None


def _all_to_all(x: Tensor, group: Any, split: int, join: int) -> Tensor:
    size = dist.get_world_size(group)
    parts = (*x.shape[:split], size, x.shape[split] // size, *x.shape[split + 1 :])
    sent = x.reshape(parts).movedim(split, 0).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.movedim(0, join).flatten(join, join + 1)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _sum(values, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _sum(gradients[0], ctx.group), None


def _sum(values: Tensor, group: Any) -> Tensor:
    summed = values.clone()
    dist.all_reduce(summed, group=group)
    return summed


# A model whose attention sees whole rows


def share_rows(model: Any, strategy: Strategy) -> None:
    """Let this model compute slices of rows, if the plan cuts them; on any device, meta included.

    The model stays as it is but for the name of its attention, under which transformers finds ours.
    """
    if strategy.context_parallel == 1:
        return
    from transformers import AttentionInterface, AttentionMaskInterface

    config = model.config.get_text_config()
    context = ContextParallel(strategy.context_parallel, config._attn_implementation)
    name = f"{_NAME}_{next(_numbers)}"
    _known[name] = context
    AttentionInterface.register(name, partial(_attend, context))
    list_masks: Any = AttentionMaskInterface
    masks = list_masks()
    if context.attention in masks:
        AttentionMaskInterface.register(name, masks[context.attention])
    _make_whole_masks(sys.modules[type(model).__module__])
    for part in model.modules():
        kinds = getattr(part, "rope_type", ())
        kinds = kinds.values() if isinstance(kinds, dict) else (kinds,)
        if any("dynamic" in kind or kind == "longrope" for kind in kinds if kind):
            # Its frequencies depend on how long the row is.
            part.forward = partial(_rotate_whole, config, part.forward)
    config._attn_implementation = name


def find_context(model: Any) -> ContextParallel | None:
    """What `share_rows` gave this model; None where rows are whole."""
    return _known.get(model.config.get_text_config()._attn_implementation)


def _attend(
    context: ContextParallel,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of whole rows over this rank's heads; `[rows, heads, tokens, width]` in.

    Grouped keys are repeated as often as it takes to give each rank equally many: query heads of
    a rank are neighbours, and so are the keys that they share.
    """
    size, num_heads = context.size, query.shape[1]
    if num_heads % size:
        raise UsageError(
            f"{num_heads} attention heads cannot be spread over {size} GPUs.",
            remedy=f"--set context_parallel={gcd(num_heads, size)}",
        )
    times = size // gcd(key.shape[1], size)
    if times > 1:
        key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
    query, key, value = (context.exchange(x, split=1, join=2) for x in (query, key, value))
    for name in _PER_HEAD:
        if options.get(name) is not None:
            options[name] = context.cut(options[name], dim=0)
    options["position_ids"] = context.positions
    local: Any = _OwnHeads(module, context, query.shape[1] // key.shape[1])
    attend = _find_attention(module, context.attention)
    output = attend(local, query, key, value, attention_mask, **options)[0]
    return context.exchange(output, split=1, join=2), None


def _find_attention(module: nn.Module, name: str) -> Callable[..., Any]:
    from transformers import AttentionInterface

    functions: Any = AttentionInterface
    # Each modelling file has an eager attention of its own.
    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    found: Callable[..., Any] = eager if name == "eager" else functions()[name]
    return found


class _OwnHeads:
    """An attention module as its function should see it: with this rank's heads."""

    def __init__(self, module: nn.Module, context: ContextParallel, groups: int) -> None:
        self._module = module
        self.num_key_value_groups = groups
        sinks = getattr(module, "sinks", None)
        if isinstance(sinks, Tensor):
            self.sinks = context.cut(sinks, dim=0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _make_whole_masks(code: Any) -> None:
    """Let the mask functions of a modelling file make masks of whole rows, where rows are cut."""
    for name in _MASKS:
        make = getattr(code, name, None)
        if make is not None and not _is_whole(make):
            setattr(code, name, _WholeMask(make))


class _WholeMask:
    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("config", args[0] if args else None)
        context = _known.get(getattr(config, "_attn_implementation", ""))
        if context is None or context.positions is None:
            return self._make(*args, **kwargs)
        # transformers reads sizes, dtype and device of them.
        name = "inputs_embeds" if "inputs_embeds" in kwargs else "input_embeds"
        shape = (len(kwargs[name]), context.positions.shape[1], 1)
        whole = {name: kwargs[name].new_empty(1).expand(shape), "position_ids": context.positions}
        return self._make(*args, **(kwargs | whole))


def _is_whole(make: Any) -> bool:
    """Also inside what `hand_positions_to_masks` made of it."""
    while isinstance(make, partial):
        make = make.args[0]
    return isinstance(make, _WholeMask)


def _rotate_whole(
    config: Any, forward: Callable[..., Any], x: Tensor, *args: Any, **options: Any
) -> Any:
    """Rotary embeddings of whole rows, cut."""
    context = _known.get(config._attn_implementation)
    if context is None:
        return forward(x, *args, **options)
    rest = args[1:]
    options.pop("position_ids", None)
    cos, sin = forward(x, context.positions, *rest, **options)
    return context.cut(cos), context.cut(sin)
