"""A card that the catalogue does not have, described by the user and by its likeness to another."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tightfit.core.errors import InvalidInputError
from tightfit.core.faults import printable
from tightfit.core.units import GB, GIB, TERA, parse_bytes, render_bytes
from tightfit.hardware.catalogue import UNSTATED_MEMORY_FRACTION, find_gpu
from tightfit.hardware.types import Gpu

CARD_KEYS = ("name", "memory", "like", "compute_capability", "tflops_fp16", "bandwidth")
EXAMPLE = 'write it like `gpu: {name: "RTX 3050", memory: 8GiB, like: "RTX 3060"}`'
_CAPABILITY = re.compile(r"([0-9]{1,2})\.([0-9])")
_NUMBER = re.compile(r"[0-9]{1,6}(?:\.[0-9]{1,6})?")
_BANDWIDTH = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*([GT])B(?:/s|ps)?", re.IGNORECASE)
_SMALLEST_BYTES, _LARGEST_BYTES = GIB, 1024 * GIB
_BF16_SINCE = (8, 0)
_FP8_SINCE = (8, 9)


def read_card(said: Mapping[str, str]) -> Gpu:
    """The card that the texts under `CARD_KEYS` describe.

    What is not stated is taken from the card it is `like`. All arithmetic rates
    are scaled by the one that is stated, for they mostly grow together. Memory
    is what is sold: torch sees a little less, as on the catalogue's cards.
    """
    for key in ("name", "memory", "like"):
        if key not in said:
            raise InvalidInputError(f"`{key}` is missing.", remedy=EXAMPLE)
    model = find_gpu(said["like"])
    sold = parse_bytes(said["memory"])
    if not _SMALLEST_BYTES <= sold <= _LARGEST_BYTES:
        raise InvalidInputError(
            f"`{printable(said['memory'], most=40)}` is {render_bytes(sold)}, which no card has.",
            remedy="write its memory with the unit, like 12GiB",
        )
    capability = _capability(said.get("compute_capability")) or model.compute_capability
    rates = _rates(said.get("tflops_fp16"), model, capability)
    return model.model_copy(
        update={
            "name": printable(said["name"], most=100),
            "marketing_gb": sold / GIB,
            "memory_bytes": int(sold * UNSTATED_MEMORY_FRACTION),
            "compute_capability": capability,
            "peak_flops": rates,
            "memory_bytes_per_second": _bandwidth(said.get("bandwidth"))
            or model.memory_bytes_per_second,
            "supports_bf16": "bf16" in rates,
            "achievable_bf16_flops": None,
            "tdp_watts": None,
            "prices": (),
            "source": "cluster file",
            "notes": f"as described in the cluster file; what it leaves out is {model.name}'s",
        }
    )


def _rates(stated: str | None, model: Gpu, capability: tuple[int, int] | None) -> dict[str, float]:
    scale = 1.0
    if stated is not None:
        matched = _NUMBER.fullmatch(stated)
        tflops = float(stated) if matched else 0.0
        if not 0.5 <= tflops <= 100_000:
            raise InvalidInputError(
                f"`tflops_fp16` is `{printable(stated, most=40)}`; it must be a number of TFLOP/s.",
                remedy="write the dense fp16 rate with fp32 accumulation, like `tflops_fp16: 25.5`",
            )
        scale = tflops * TERA / model.peak_flops.get("fp16", model.peak_flops["fp32"])
    rates = {kind: rate * scale for kind, rate in model.peak_flops.items()}
    if capability is not None and capability < _BF16_SINCE:
        rates = {kind: rate for kind, rate in rates.items() if kind in ("fp32", "fp16")}
    elif capability is not None:
        rates.setdefault("bf16", rates.get("fp16", rates["fp32"]))
        if capability < _FP8_SINCE:
            rates.pop("fp8", None)
    return rates


def _capability(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    parts = _CAPABILITY.fullmatch(text)
    if parts is None or not 3 <= int(parts[1]) <= 20:
        raise InvalidInputError(
            f"`compute_capability` is `{printable(text, most=40)}`; it must be like 8.6.",
            remedy="see what the driver says: nvidia-smi --query-gpu=compute_cap --format=csv",
        )
    return int(parts[1]), int(parts[2])


def _bandwidth(text: str | None) -> float | None:
    if text is None:
        return None
    parts = _BANDWIDTH.fullmatch(text)
    rate = float(parts[1]) * (GB if parts[2].upper() == "G" else 1000 * GB) if parts else 0.0
    if not 10 * GB <= rate <= 100_000 * GB:
        raise InvalidInputError(
            f"`bandwidth` is `{printable(text, most=40)}`; it must be the memory's speed.",
            remedy="write it like `bandwidth: 360GB/s`",
        )
    return rate
