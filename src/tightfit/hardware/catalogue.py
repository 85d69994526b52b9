"""The GPU catalogue: rows of `catalogue/gpus.json` as `Gpu`, found by any name people use."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from typing import Any

from tightfit.core.errors import InvalidInputError, NotFoundError
from tightfit.core.faults import printable
from tightfit.core.suggest import did_you_mean, nearest
from tightfit.core.units import GB, GIB, MIB, TERA
from tightfit.hardware.types import Gpu, Price

UNSTATED_MEMORY_FRACTION = 0.93
"""Of the marketing GiB, where no tool's total was ever seen: T4, A10, L40S show 0.91 to 0.94."""

PCIE_BYTES_PER_SECOND = {
    "PCIe 2.0 x16": 8.0e9,
    "PCIe 3.0 x16": 15.75e9,
    "PCIe 4.0 x8": 15.75e9,
    "PCIe 4.0 x16": 31.5e9,
    "PCIe 5.0 x8": 31.5e9,
    "PCIe 5.0 x16": 63.0e9,
}
"""One direction after line coding (8b/10b, then 128b/130b), before packet headers."""

_VENDOR_WORDS = re.compile(r"(?<![a-z])(nvidia|tesla|geforce|quadro|grid|amd|instinct)(?![a-z])")
_PUNCTUATION = re.compile(r"[\s\-_./]+")
_STATED_MEMORY = re.compile(r"(.*?)[\s\-_]*([0-9]{1,4})\s*(?:gb|gib|g)", re.IGNORECASE)

_Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The row a name led to, and the rows the same name could have meant."""

    gpu: Gpu
    others: tuple[str, ...] = ()
    """Names of other variants; empty where the name says which one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcedNumber:
    """One number as its source prints it."""

    label: str
    value: str
    unit: str
    source: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRecord:
    """One row with the source of every number in it."""

    gpu: Gpu
    family: str
    aliases: tuple[str, ...]
    numbers: tuple[SourcedNumber, ...]


def list_gpus() -> list[Gpu]:
    """Every row, in the catalogue's order (old to new)."""
    return [_gpu(name) for name in _rows()]


def find_gpu(name: str) -> Gpu:
    """The GPU of this name. `V100` and the like mean one variant: see `match_gpu`."""
    return match_gpu(name).gpu


def match_gpu(name: str) -> Match:
    """The row that `name` means: a catalogue name, an alias, or what a driver prints.

    A word that fits several variants (`V100`, `A100`, `H100`) means the one with
    the smallest memory, and among equals the SXM card, the commoner in servers:
    a plan for it fits the others too. `others` lists what else it could be.
    """
    key = _normal(name)
    row_name = _index().get(key)
    if row_name is not None:
        return Match(gpu=_gpu(row_name), others=_others(row_name, key))
    match = _match_with_memory(name)
    if match is not None:
        return match
    raise NotFoundError(
        f"No GPU named `{_shorten(name)}` in the catalogue.{_suggestion(name)}",
        remedy="tightfit hardware    (lists every GPU); a card of your own is defined in a cluster "
        'file: `gpu: {name: "My Card", memory: 12GiB, like: "RTX 3060"}`',
    )


def search_gpus(word: str) -> list[Gpu]:
    """GPUs whose names contain `word`, or failing that the nearest ones."""
    key = _normal(word) or word.strip().casefold()
    rows = _rows()
    if not key:
        return list_gpus()
    inside = [name for name, row in rows.items() if _contains(row, key)]
    if not inside:
        by_alias = {alias: name for name, row in rows.items() for alias in _names(row)}
        inside = list(dict.fromkeys(by_alias[alias] for alias in nearest(word, by_alias, most=5)))
    return [_gpu(name) for name in inside]


def _contains(row: _Row, key: str) -> bool:
    return any(key in _normal(alias) or key in alias.casefold() for alias in _names(row))


def describe_gpu(name: str) -> GpuRecord:
    """The row with every number as its source prints it."""
    gpu = find_gpu(name)
    row = _rows()[gpu.name]
    return GpuRecord(
        gpu=gpu,
        family=row["family"],
        aliases=tuple(_names(row)[1:]),
        numbers=tuple(_numbers(row)),
    )


def gpu_names() -> list[str]:
    """Every name and alias, for completion and suggestions."""
    return [alias for row in _rows().values() for alias in _names(row)]


@lru_cache(maxsize=1)
def _document() -> _Row:
    text = resources.files("tightfit.catalogue").joinpath("gpus.json").read_text("utf-8")
    document: _Row = json.loads(text)
    return document


@lru_cache(maxsize=1)
def _rows() -> dict[str, _Row]:
    return {row["name"]: row for row in _document()["gpus"]}


@lru_cache(maxsize=1)
def _index() -> dict[str, str]:
    """Normalised name to row name."""
    return {_normal(alias): name for name, row in _rows().items() for alias in _names(row)}


def _names(row: _Row) -> list[str]:
    return [row["name"], *row["aliases"], *row.get("default_for", ())]


def _normal(name: str) -> str:
    """`NVIDIA A100-SXM4-40GB`, `a100_sxm4 40gb` and `A100 SXM4 40 GB` are one name."""
    return _PUNCTUATION.sub("", _VENDOR_WORDS.sub("", name.casefold()))


def _others(row_name: str, key: str) -> tuple[str, ...]:
    row = _rows()[row_name]
    if key not in {_normal(word) for word in row.get("default_for", ())}:
        return ()
    stated = _STATED_MEMORY.fullmatch(key)
    return tuple(
        name
        for name, other in _rows().items()
        if other["family"] == row["family"]
        and name != row_name
        and (stated is None or _marketing_gb(other) == int(stated.group(2)))
    )


def _match_with_memory(name: str) -> Match | None:
    """`RTX 4090-24GB`: a known name with its memory said too, which must be true."""
    stated = _STATED_MEMORY.fullmatch(name.strip())
    if stated is None or not _normal(stated.group(1)):
        return None
    base, gigabytes = stated.group(1).strip(), int(stated.group(2))
    row_name = _index().get(_normal(base))
    if row_name is None:
        return None
    rows = _rows()
    key, family = _normal(base), rows[row_name]["family"]
    defaults = {_normal(word) for word in (family, *rows[row_name].get("default_for", ()))}
    named = (
        [row for row in rows.values() if row["family"] == family]
        if key in defaults
        else [row for row in rows.values() if _has_prefix(row, key)]
    )
    right = [row for row in named if _marketing_gb(row) == gigabytes]
    if right:
        return Match(gpu=_gpu(right[0]["name"]), others=tuple(row["name"] for row in right[1:]))
    sizes = sorted({_marketing_gb(row) for row in named})
    listed = " or ".join(f"{size:g}" for size in sizes)
    raise InvalidInputError(
        f"{base} has {listed} GB, not {gigabytes} GB.",
        remedy="write " + " or ".join(f"`{row['name']}`" for row in named),
    )


def _has_prefix(row: _Row, key: str) -> bool:
    return any(_normal(alias).startswith(key) for alias in _names(row))


def _suggestion(name: str) -> str:
    stated = _STATED_MEMORY.fullmatch(name.strip())
    # The memory would make any card of that size look near; the name comes first.
    said = did_you_mean(_shorten(stated.group(1) if stated else name), gpu_names())
    if said or stated is None:
        return said
    size = int(stated.group(2))
    same = [row["name"] for row in _rows().values() if _marketing_gb(row) == size]
    return f" Cards with {size} GB: {', '.join(same)}." if same else ""


def _shorten(name: str) -> str:
    return printable(name, most=60)


def _marketing_gb(row: _Row) -> float:
    return float(row["memory_marketing_gb"]["value"])


@cache
def _gpu(name: str) -> Gpu:
    row = _rows()[name]
    memory_bytes, memory_note = _memory_bytes(row)
    nvlink = row.get("nvlink_gb_per_s_one_direction")
    best = row.get("achievable_bf16_tflops")
    return Gpu(
        name=name,
        marketing_gb=_marketing_gb(row),
        memory_bytes=memory_bytes,
        compute_capability=_capability(row["compute_capability"]["value"]),
        peak_flops={
            kind: number["value"] * TERA for kind, number in row["peak_tflops_dense"].items()
        },
        memory_bytes_per_second=row["memory_bandwidth_gb_per_s"]["value"] * GB,
        nvlink_bytes_per_second=nvlink["value"] * GB if nvlink else None,
        nvlink_needs_bridge=bool(nvlink and nvlink.get("needs_bridge", False)),
        pcie_bytes_per_second=PCIE_BYTES_PER_SECOND[row["pcie"]["value"]],
        supports_bf16=row["bf16_supported"]["value"],
        achievable_bf16_flops=best["value"] * TERA if best else None,
        tdp_watts=row["tdp_w"]["value"],
        prices=tuple(_price(price) for price in row["prices"]),
        source=f"catalogue:{name}",
        notes="; ".join(note for note in (row.get("notes", ""), memory_note) if note),
    )


def _memory_bytes(row: _Row) -> tuple[int, str]:
    """The smallest total torch reported, else nvidia-smi's, else a part of the marketing size."""
    for key in ("memory_torch_total_mib", "memory_nvidia_smi_mib"):
        if key in row:
            value = row[key]["value"]
            smallest = min(value) if isinstance(value, list) else value
            return int(smallest * MIB), ""
    note = (
        f"memory taken as {UNSTATED_MEMORY_FRACTION:.0%} of the marketing size: no total was seen"
    )
    return int(_marketing_gb(row) * GIB * UNSTATED_MEMORY_FRACTION), note


def _capability(text: str) -> tuple[int, int] | None:
    major, dot, minor = text.partition(".")
    return (int(major), int(minor)) if dot else None


def _price(price: _Row) -> Price:
    return Price(
        cloud=price["cloud"],
        usd_per_gpu_hour=price["median_usd_per_gpu_hour"],
        usd_per_gpu_hour_min=price["min_usd_per_gpu_hour"],
        usd_per_gpu_hour_spot=price["spot_median_usd_per_gpu_hour"],
        includes_host=price["includes_host"],
        date=_document()["price_date"],
        source=f"{price['accelerator']} in {_source(price['source'])}",
    )


def _source(key: str) -> str:
    """A source key in full; words stand for themselves."""
    sources: dict[str, str] = _document()["sources"]
    return sources.get(key, key)


_LABELS = {
    "memory_marketing_gb": ("memory as sold", "GB"),
    "memory_nvidia_smi_mib": ("memory in nvidia-smi", "MiB"),
    "memory_torch_total_mib": ("memory in torch", "MiB"),
    "achievable_bf16_tflops": ("best measured bf16", "TFLOP/s"),
    "memory_bandwidth_gb_per_s": ("memory bandwidth", "GB/s"),
    "nvlink_gb_per_s_one_direction": ("GPU to GPU link, one direction", "GB/s"),
    "pcie": ("PCIe", ""),
    "compute_capability": ("compute capability", ""),
    "bf16_supported": ("bf16", ""),
    "tdp_w": ("power", "W"),
}


def _numbers(row: _Row) -> Iterator[SourcedNumber]:
    for key, (label, unit) in _LABELS.items():
        if key in row:
            yield _number(label, unit, row[key])
    for kind, number in row["peak_tflops_dense"].items():
        yield _number(f"peak {kind}, dense", "TFLOP/s", number)


def _number(label: str, unit: str, number: _Row) -> SourcedNumber:
    value = number["value"]
    return SourcedNumber(
        label=label,
        value=", ".join(map(str, value)) if isinstance(value, list) else str(value),
        unit=unit,
        source=_source(number["source"]),
        note=number.get("note", ""),
    )
