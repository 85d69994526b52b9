"""The optimizer that a strategy names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from tightfit.core.errors import SetupError
from tightfit.core.strategy import Optimizer as Kind
from tightfit.core.training import Training
from tightfit.runtime.kernels.adamw import TritonAdamW

MOMENTUM = 0.9


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]], kind: Kind, training: Training
) -> Optimizer:
    """The optimizer of all trained parameters, without weight decay for vectors (norms, biases)."""
    trained = [parameter for _, parameter in named_parameters if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if _is_matrix(p)], "weight_decay": training.weight_decay},
        {"params": [p for p in trained if not _is_matrix(p)], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    rate = training.learning_rate
    if kind is Kind.ADAMW:
        return AdamW(groups, lr=rate, fused=True)
    if kind is Kind.ADAMW_KERNEL:
        return TritonAdamW(groups, lr=rate)
    if kind is Kind.ADAMW_FOREACH:
        return AdamW(groups, lr=rate, foreach=True)
    if kind is Kind.SGD_MOMENTUM:
        return SGD(groups, lr=rate, momentum=MOMENTUM)
    if kind is Kind.ADAFACTOR:
        return Adafactor(groups, lr=rate)
    return _build_8bit(groups, rate, is_paged=kind is Kind.ADAMW_PAGED_8BIT)


def _is_matrix(parameter: nn.Parameter) -> bool:
    """A parameter partitioned by ZeRO-3 is flat, with its shape in `ds_shape`."""
    return len(getattr(parameter, "ds_shape", parameter.shape)) >= 2


def _build_8bit(groups: list[dict[str, Any]], rate: float, *, is_paged: bool) -> Optimizer:
    try:
        from bitsandbytes import optim
    except ImportError as error:
        raise SetupError(
            "The plan's 8-bit optimizer needs bitsandbytes, which is not installed.",
            remedy="pip install bitsandbytes, or --set optimizer=adamw",
        ) from error
    made: Optimizer = (optim.PagedAdamW8bit if is_paged else optim.AdamW8bit)(groups, lr=rate)
    return made
