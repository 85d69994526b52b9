"""Training state to and from disk, by torch's distributed checkpoint, whatever holds it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from tightfit.core.errors import InvalidInputError
from tightfit.runtime.devices import is_out_of_memory


def save_state(
    folder: Path,
    module: nn.Module,
    optimizer: Optimizer,
    scaler: torch.amp.GradScaler,
    *,
    alone: bool = False,
) -> None:
    """Write every rank's share into `folder`; files are synced when this returns."""
    state = _state(module, optimizer, scaler)
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    with _no_advice():
        save(state, storage_writer=writer, no_dist=alone or not dist.is_initialized())


def load_state(
    folder: Path, module: nn.Module, optimizer: Optimizer, scaler: torch.amp.GradScaler
) -> None:
    """Read this rank's share, in place."""
    reader = FileSystemReader(folder)
    has_optimizer = any(
        key.startswith("optimizer.") for key in reader.read_metadata().state_dict_metadata
    )
    if has_optimizer and not optimizer.state:
        prime_optimizer(optimizer)
    state = _state(module, optimizer, scaler)
    try:
        with _no_advice():
            load(state, storage_reader=reader, no_dist=not dist.is_initialized())
    except (CheckpointException, RuntimeError, ValueError) as fault:
        if is_out_of_memory(fault):
            raise
        raise InvalidInputError(
            f"The checkpoint {folder} does not fit this plan: {_first_line(fault)}.",
            remedy="start the run in a new folder, or with the plan it was started with",
        ) from fault
    for parameter, name in _optimizer_names(module, optimizer).items():
        # Tensors were filled in place; what is no tensor (bitsandbytes' step) was replaced.
        optimizer.state[parameter].update(state["optimizer"][name])
    if scaler.is_enabled():
        scaler.load_state_dict(state["scaler"])


def gather_trained(model: nn.Module) -> dict[str, Tensor]:
    """Whole trained tensors on rank 0's CPU, one gathered at a time; a tied one once."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    gathered = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        value: Any = parameter.detach()
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        if is_first:
            # A copy of its own: the caller may keep it while training goes on.
            gathered[name] = whole.to("cpu", copy=True)
        del whole
    return gathered


def _state(module: nn.Module, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> dict[str, Any]:
    """Views of the live tensors by parameter name, which fit any sharding and any order.

    By hand rather than by `get_optimizer_state_dict`, which makes copies, counts a step
    where none was taken, and cannot load what bitsandbytes saves.
    """
    state: dict[str, Any] = {
        "model": {
            name: parameter.detach()
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
    }
    if optimizer.state:
        state["optimizer"] = {
            name: dict(optimizer.state[parameter])
            for parameter, name in _optimizer_names(module, optimizer).items()
        }
    if scaler.is_enabled():
        state["scaler"] = scaler.state_dict()
    return state


def _optimizer_names(module: nn.Module, optimizer: Optimizer) -> dict[nn.Parameter, str]:
    """Parameters that the optimizer holds state of."""
    named = module.named_parameters()
    return {parameter: name for name, parameter in named if parameter in optimizer.state}


def prime_optimizer(optimizer: Optimizer) -> None:
    """Have the optimizer make its state, by a step that moves nothing."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _first_line(fault: BaseException) -> str:
    if isinstance(fault, CheckpointException) and fault.failures:
        fault = next(iter(fault.failures.values()))[0]
    lines = str(fault).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(fault).__name__


@contextmanager
def _no_advice() -> Iterator[None]:
    """torch warns that there is no process group where none is wanted."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to")
        yield
