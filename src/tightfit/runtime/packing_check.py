"""Does this bitsandbytes unpack what it packs? Tried before a model is trusted to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tightfit.core.errors import EnvironmentFaultError

if TYPE_CHECKING:
    import torch

MOST_ERROR = 0.15
"""Of normal values, as a share of their norm. nf4 loses 0.092 with blocks of 64; bitsandbytes
0.50.2 loses 0.2 to 0.4 on a CPU where rows are no multiple of a block."""


def check_unpacking(model: Any, device: torch.device) -> None:
    """Pack and unpack a few rows of every width that the model has; raise where they differ."""
    for width in list_widths(model):
        error = measure_unpacking(width, device)
        if error > MOST_ERROR:
            raise EnvironmentFaultError(
                f"bitsandbytes does not unpack nf4 matrices of width {width} rightly on this "
                f"{device.type}: {error:.0%} of the values' size is lost, where 9% is nf4's own.",
                remedy="--set weights=bf16, or train on a GPU",
            )


def list_widths(model: Any) -> list[int]:
    """Widths of the matrices that are packed in 4 bits, each once."""
    widths = {
        module.in_features
        for module in model.modules()
        if type(getattr(module, "weight", None)).__name__ == "Params4bit"
    }
    return sorted(widths)


def measure_unpacking(width: int, device: torch.device) -> float:
    """Norm of what is lost by packing normal values, as a share of their norm."""
    return float(pack_and_unpack(width, device))


def pack_and_unpack(width: int, device: torch.device) -> torch.Tensor:
    """`measure_unpacking`'s answer while it is still on `device`."""
    import torch
    from bitsandbytes import functional

    bnb: Any = functional  # not annotated
    drawn = torch.randn(64, width, generator=torch.Generator().manual_seed(0))
    values = drawn.to(device)
    codes, state = bnb.quantize_4bit(values, quant_type="nf4")
    lost = bnb.dequantize_4bit(codes, state) - values
    share: torch.Tensor = lost.norm() / values.norm()
    return share
