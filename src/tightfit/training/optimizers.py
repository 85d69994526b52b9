"""The optimizer that a strategy names."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tightfit.core.errors import SetupError
from tightfit.core.strategy import Optimizer as Kind
from tightfit.core.training import Training


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
    make: Any = _import_factory(kind)
    made: Optimizer = make(groups, lr=training.learning_rate, **kind.record.options)
    return made


def _is_matrix(parameter: nn.Parameter) -> bool:
    """A parameter partitioned by ZeRO-3 is flat, with its shape in `ds_shape`."""
    return len(getattr(parameter, "ds_shape", parameter.shape)) >= 2


def _import_factory(kind: Kind) -> Any:
    module, _, name = kind.record.factory.partition(":")
    try:
        return getattr(import_module(module), name)
    except ImportError as error:
        package = kind.record.package or module
        raise SetupError(
            f"The plan's optimizer {kind.value} needs {package}, which is not installed.",
            remedy=f"pip install {package}, or --set optimizer=adamw",
        ) from error
