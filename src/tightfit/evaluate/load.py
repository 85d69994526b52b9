"""The models that an evaluation compares, loaded once each, or once for both."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.dtypes import Dtype
from tightfit.evaluate.scores import BASE, MODEL, TUNED
from tightfit.evaluate.target import Target
from tightfit.runtime.adapters import load_adapter
from tightfit.runtime.devices import local_device
from tightfit.runtime.load import LoadRequest, load_base

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestants:
    """Models to score, one after another."""

    target: Target
    with_base: bool
    device: torch.device
    request: LoadRequest

    @property
    def device_name(self) -> str:
        return str(self.device)

    @property
    def dtype_name(self) -> str:
        return self.request.weights.value

    def models(self) -> Iterator[tuple[str, Any]]:
        """Column name and model. A model is valid until the next one is asked for."""
        target = self.target
        if target.adapter is not None:
            adapted = load_adapter(self._load(target.base), target.adapter)
            if self.with_base:
                with adapted.disable_adapter():
                    yield BASE, adapted
            yield TUNED, adapted
        elif target.tuned is not None:
            if self.with_base:
                yield BASE, self._load(target.base)
                gc.collect()  # the first is gone before the second comes
            yield TUNED, self._load(target.tuned)
        else:
            yield MODEL, self._load(target.base)

    def _load(self, folder: Path) -> Any:
        model: Any = load_base(folder, self.request, self.device)
        return model.eval()


def gather_contestants(target: Target, *, with_base: bool) -> Contestants:
    """The models of a target, to be loaded on this machine's first device."""
    device = local_device(0)
    request = choose_load(target, device)
    return Contestants(target=target, with_base=with_base, device=device, request=request)


def choose_load(target: Target, device: torch.device) -> LoadRequest:
    """As the run had it; on a CPU unpacked weights are fp32, which is fast and exact there.

    Attention is torch's own: the attention of packed training keeps no key-value cache.
    """
    is_cpu = device.type == "cpu"
    weights = target.weights or (Dtype.FP32 if is_cpu else _best_on(device))
    if is_cpu and not weights.is_quantized:
        weights = Dtype.FP32
    compute = target.compute if weights.is_quantized else weights
    return LoadRequest(
        weights=weights, compute=compute or Dtype.FP32, double_quant=target.double_quant
    )


def _best_on(device: torch.device) -> Dtype:
    import torch

    major, _ = torch.cuda.get_device_capability(device)
    return Dtype.BF16 if major >= 8 else Dtype.FP16
