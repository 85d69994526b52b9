"""nf4 weights in shards: how they travel, and the check that they compute what they did whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tightfit.core.errors import UserError
from tightfit.runtime.load import LoadRequest, packing_config

TOLERANCE = 1e-3
"""Of the largest output. The same kernel on the same codes gives the same bits; wrong codes or
scales are off by the size of the outputs themselves."""


def list_packed(model: nn.Module) -> list[str]:
    """Names of the modules whose weights are packed in 4 bits."""
    return [name for name, module in model.named_modules() if _is_packed(module)]


def pack_skeleton(model: Any, names: list[str], request: LoadRequest) -> None:
    """Put packed modules without values where rank 0's model has packed ones."""
    if not names:
        return
    from bitsandbytes.nn import modules

    linear_4bit: Any = modules.Linear4bit
    packing = packing_config(request)
    for name in names:
        plain = model.get_submodule(name)
        packed = linear_4bit(
            plain.in_features,
            plain.out_features,
            plain.bias is not None,
            packing.bnb_4bit_compute_dtype,
            compress_statistics=packing.bnb_4bit_use_double_quant,
            quant_type=packing.bnb_4bit_quant_type,
            quant_storage=packing.bnb_4bit_quant_storage,
            device=torch.device("meta"),
        )
        packed.bias = plain.bias
        packed.requires_grad_(False)
        _keep_codes(packed)
        model.set_submodule(name, packed)
    model.is_loaded_in_4bit = True
    model.is_quantized = True
    model.quantization_method = packing.quant_method
    model.config.quantization_config = packing


def split_packed(tensor: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Codes as plain values, and the scales beside them; of a plain tensor itself and nothing."""
    state = getattr(tensor, "quant_state", None)
    plain = tensor.detach()
    if state is None:
        return plain, {}
    return plain.as_subclass(Tensor), state.as_dict(packed=True)


def rebuild_packed(codes: Tensor, statistics: dict[str, Tensor], owner: nn.Module) -> Tensor:
    """bitsandbytes' parameter again; `owner` remembers the scales when sharding drops them."""
    from bitsandbytes.nn import modules

    params_4bit: Any = modules.Params4bit
    rebuilt: Tensor = params_4bit.from_prequantized(
        codes, statistics, requires_grad=False, device=codes.device, module=owner
    )
    return rebuilt


class PackedCheck:
    """One fixed input through every packed matrix, before it is sharded and after.

    Sharding takes bitsandbytes' parameters apart and puts them together again at each
    use, in ways that differ with versions of both libraries.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._wanted: dict[int, Tensor] = {}

    def note(self, layer: nn.Module) -> None:
        """Keep what the whole matrices of `layer` answer."""
        for packed in _packed_in(layer):
            self._wanted[id(packed)] = self._answer(packed)

    def compare(self, layers: list[nn.Module]) -> None:
        """Raise on every rank where a sharded matrix answers anything else on any of them."""
        if not self._wanted:
            return
        worst = torch.zeros((), device=self._device)
        for layer in layers:
            gathered: Any = layer
            gathered.unshard()
            for packed in _packed_in(layer):
                worst = torch.maximum(worst, self._distance(packed))
            gathered.reshard()
        self._wanted.clear()
        if dist.is_initialized():
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        # Written so that a nan is refused too.
        if not float(worst) <= TOLERANCE:
            raise UserError(
                f"4-bit weights do not survive sharding with these versions of torch and "
                f"bitsandbytes: outputs are off by {float(worst):.1%}.",
                remedy="--sharding ddp, which keeps them whole, or --weights bf16",
            )

    def _distance(self, packed: nn.Module) -> Tensor:
        wanted = self._wanted[id(packed)]
        if dist.is_initialized():
            dist.broadcast(wanted, src=0)
        answer = self._answer(packed)
        distance: Tensor = (answer - wanted).abs().max() / wanted.abs().max()
        return torch.nan_to_num(distance, nan=float("inf"))

    def _answer(self, packed: Any) -> Tensor:
        generator = torch.Generator().manual_seed(packed.in_features)
        question = torch.randn(1, packed.in_features, generator=generator)
        # With a gradient wanted, as in training: bitsandbytes has another kernel without.
        question = question.to(self._device, packed.compute_dtype).requires_grad_(True)
        answer: Tensor = packed(question).detach().float()
        return answer


def _packed_in(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if _is_packed(part)]


def _is_packed(module: nn.Module) -> bool:
    # By name: most jobs have no bitsandbytes. peft's wrapper of the same name has no codes itself.
    is_bitsandbytes = type(module).__module__.startswith("bitsandbytes.")
    return is_bitsandbytes and type(module).__name__ == "Linear4bit"


def _keep_codes(packed: Any) -> None:
    """As `runtime/load.py` does: bitsandbytes may not repack codes for the CPU."""
    if hasattr(packed, "support_avx512bf16_for_cpu"):
        packed.support_avx512bf16_for_cpu = False
