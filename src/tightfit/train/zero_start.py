"""Starting DeepSpeed: the right accelerator, no chatter, nothing compiled, a group to speak in."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import torch.distributed as dist

from tightfit.core.errors import EnvironmentFaultError
from tightfit.train.place import Place, join_alone


def start_deepspeed(place: Place) -> Any:
    """The deepspeed module, bound to the place's device and to torch's process group.

    DeepSpeed is kept from compiling anything: the one extension it would build by
    itself on CPUs serves inference alone, and a build needs a compiler and leaves a
    lock behind when it is killed, on which every later start would hang.
    """
    # Read at import; a machine with a GPU would otherwise get it even for a plan on the CPU.
    os.environ["DS_ACCELERATOR"] = place.device.type
    deepspeed = _import_deepspeed()
    _silence()
    deepspeed.ops.__compatible_ops__ = {}
    _match_accelerator(place)
    os.environ.setdefault("LOCAL_RANK", str(place.local_rank))  # it asks for it without torchrun
    if not dist.is_initialized():
        join_alone(place)
    # Told not to look for MPI: the group is there.
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    return deepspeed


def _import_deepspeed() -> Any:
    try:
        import deepspeed
    except ImportError as fault:
        raise EnvironmentFaultError(
            f"The plan uses ZeRO, and DeepSpeed cannot be imported: {fault}.",
            remedy="pip install 'tightfit[zero]', or --set sharding=fsdp",
        ) from fault
    return deepspeed


def _silence() -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # torch 2.13 renames collectives that DeepSpeed 0.19 still calls by their old names.
    warnings.filterwarnings(
        "ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning
    )


def _match_accelerator(place: Place) -> None:
    """What was imported before, by whomever, must agree."""
    from deepspeed.accelerator import get_accelerator

    name = get_accelerator().device_name()
    if name.partition(":")[0] != place.device.type:
        raise EnvironmentFaultError(
            f"DeepSpeed was started for {name} in this process, and the plan runs on "
            f"{place.device.type}.",
            remedy=f"export DS_ACCELERATOR={place.device.type}",
        )
