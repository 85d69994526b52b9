"""The GPU catalogue, searched by any name people, drivers, Slurm or Kubernetes use for a card."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from typing import Any

from tightfit.core.errors import InvalidInputError, NotFoundError, UserError
from tightfit.core.text import did_you_mean, nearest, printable
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
class GpuMatch:
    """The row a name led to, and the rows the same name could have meant."""

    gpu: Gpu
    others: tuple[str, ...] = ()
    """Names of other variants; empty where the name says which one."""

    def warnings(self, name: str) -> list[str]:
        """Say which variant a word was taken for, where it could mean several."""
        if not self.others:
            return []
        return [f"`{name}` is read as {self.gpu.name}; also known: {', '.join(self.others)}."]


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


def match_gpu(name: str) -> GpuMatch:
    """The row that `name` means: a catalogue name, an alias, or what a driver prints.

    A word that fits several variants (`V100`, `A100`, `H100`) means the one with
    the smallest memory, and among equals the SXM card, the commoner in servers:
    a plan for it fits the others too. `others` lists what else it could be.
    """
    key = _normal(name)
    row_name = _index().get(key)
    if row_name is not None:
        return GpuMatch(gpu=_gpu(row_name), others=_others(row_name, key))
    match = _match_with_memory(name)
    if match is not None:
        return match
    raise NotFoundError(
        f"No GPU named `{printable(name, most=60)}` in the catalogue.{_suggestion(name)}",
        remedy="tightfit hardware    (lists every GPU); a card of your own is defined in a cluster "
        'file: `gpu: {name: "My Card", memory: 12GiB, like: "RTX 3060"}`',
    )


def search_gpus(word: str) -> list[Gpu]:
    """GPUs whose names contain `word`, or failing that the nearest ones."""
    key = _normal(word) or word.strip().casefold()
    rows = _rows()
    if not key:
        return list_gpus()
    inside = [
        name
        for name, row in rows.items()
        if any(key in _normal(alias) or key in alias.casefold() for alias in _names(row))
    ]
    if not inside:
        by_alias = {alias: name for name, row in rows.items() for alias in _names(row)}
        inside = list(dict.fromkeys(by_alias[alias] for alias in nearest(word, by_alias, most=5)))
    return [_gpu(name) for name in inside]


def describe_gpu(name: str) -> GpuRecord:
    """The row with every number as its source prints it."""
    gpu = find_gpu(name)
    row = _rows()[gpu.name]
    return GpuRecord(
        gpu=gpu,
        family=row["family"],
        aliases=tuple(_names(row)[1:]),
        numbers=(
            *(_number(*label, row[key]) for key, label in _LABELS.items() if key in row),
            *(
                _number(f"peak {kind}, dense", "TFLOP/s", number)
                for kind, number in row["peak_tflops_dense"].items()
            ),
        ),
    )


def find_architecture(gpu: Gpu) -> str:
    """AMD's name of a catalogue card's architecture, like `gfx942`; empty for NVIDIA's."""
    value: str = _rows()[gpu.name]["compute_capability"]["value"]
    return value if value.startswith("gfx") else ""


def gpu_names() -> list[str]:
    """Every name and alias, for completion and suggestions."""
    return [alias for row in _rows().values() for alias in _names(row)]


@lru_cache(maxsize=1)
def _document() -> _Row:
    text = resources.files("tightfit.catalogue").joinpath("gpus.json").read_text("utf-8")
    try:
        document: _Row = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidInputError(
            f"catalogue/gpus.json is not JSON: {error}.", remedy="mend that line"
        ) from None
    return document


@lru_cache(maxsize=1)
def _rows() -> dict[str, _Row]:
    rows = _document()["gpus"]
    for place, row in enumerate(rows, start=1):
        _check_row(row, row.get("name") or f"row {place}")
    return {row["name"]: row for row in rows}


def _check_row(row: _Row, name: str) -> None:
    """For who adds a row: what is missing or unknown in it, and the words there are."""
    problems = [f"no `{field}`" for field in _FIELDS - _OPTIONAL - row.keys()]
    problems += [f"unknown field `{field}`" for field in row.keys() - _FIELDS]
    problems += [
        f"unknown kind of peak `{kind}` (there are {', '.join(_PEAKS)})"
        for kind in row.get("peak_tflops_dense", {}).keys() - set(_PEAKS)
    ]
    if "pcie" in row and (pcie := row["pcie"]["value"]) not in PCIE_BYTES_PER_SECOND:
        problems.append(f"pcie `{pcie}` (there are {', '.join(PCIE_BYTES_PER_SECOND)})")
    if problems:
        raise InvalidInputError(
            f"catalogue/gpus.json, {name}: {'; '.join(sorted(problems))}.",
            remedy="compare it with the rows around it; EXTENDING.md has a whole one",
        )


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


def _match_with_memory(name: str) -> GpuMatch | None:
    """`RTX 4090-24GB`: a known name with its memory, which must be true."""
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
        else [
            row
            for row in rows.values()
            if any(_normal(alias).startswith(key) for alias in _names(row))
        ]
    )
    right = [row for row in named if _marketing_gb(row) == gigabytes]
    if right:
        return GpuMatch(gpu=_gpu(right[0]["name"]), others=tuple(row["name"] for row in right[1:]))
    sizes = sorted({_marketing_gb(row) for row in named})
    listed = " or ".join(f"{size:g}" for size in sizes)
    raise InvalidInputError(
        f"{base} has {listed} GB, not {gigabytes} GB.",
        remedy="write " + " or ".join(f"`{row['name']}`" for row in named),
    )


def _suggestion(name: str) -> str:
    stated = _STATED_MEMORY.fullmatch(name.strip())
    # The memory would make any card of that size look near; the name comes first.
    word = stated.group(1) if stated else name
    suggested = did_you_mean(printable(word, most=60), gpu_names())
    if suggested or stated is None:
        return suggested
    size = int(stated.group(2))
    same = [row["name"] for row in _rows().values() if _marketing_gb(row) == size]
    return f" Cards with {size} GB: {', '.join(same)}." if same else ""


def _marketing_gb(row: _Row) -> float:
    return float(row["memory_marketing_gb"]["value"])


@cache
def _gpu(name: str) -> Gpu:
    row = _rows()[name]
    memory_bytes, memory_note = _memory_bytes(row)
    nvlink = row.get("nvlink_gb_per_s_one_direction")
    peer = row.get("peer_gb_per_s_one_direction")
    best = row.get("achievable_bf16_tflops")
    major, dot, minor = row["compute_capability"]["value"].partition(".")
    return Gpu(
        name=name,
        marketing_gb=_marketing_gb(row),
        memory_bytes=memory_bytes,
        compute_capability=(int(major), int(minor)) if dot else None,
        peak_flops={
            kind: number["value"] * TERA for kind, number in row["peak_tflops_dense"].items()
        },
        memory_bytes_per_second=row["memory_bandwidth_gb_per_s"]["value"] * GB,
        nvlink_bytes_per_second=nvlink["value"] * GB if nvlink else None,
        nvlink_needs_bridge=bool(nvlink and nvlink.get("needs_bridge", False)),
        pcie_bytes_per_second=PCIE_BYTES_PER_SECOND[row["pcie"]["value"]],
        peer_bytes_per_second=peer["value"] * GB if peer else None,
        supports_bf16=row["bf16_supported"]["value"],
        achievable_bf16_flops=best["value"] * TERA if best else None,
        tdp_watts=row["tdp_w"]["value"],
        prices=tuple(
            Price(
                cloud=price["cloud"],
                usd_per_gpu_hour=price["median_usd_per_gpu_hour"],
                usd_per_gpu_hour_min=price["min_usd_per_gpu_hour"],
                usd_per_gpu_hour_spot=price["spot_median_usd_per_gpu_hour"],
                includes_host=price["includes_host"],
                date=_document()["price_date"],
                source=f"{price['accelerator']} in {_source(price['source'])}",
            )
            for price in row["prices"]
        ),
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


def _source(key: str) -> str:
    """A source key in full; other words as they are."""
    sources: dict[str, str] = _document()["sources"]
    return sources.get(key, key)


_PEAKS = ("fp32", "tf32", "fp16", "bf16", "fp8")
_LABELS = {
    "memory_marketing_gb": ("memory as sold", "GB"),
    "memory_nvidia_smi_mib": ("memory in nvidia-smi", "MiB"),
    "memory_torch_total_mib": ("memory in torch", "MiB"),
    "achievable_bf16_tflops": ("best measured bf16", "TFLOP/s"),
    "memory_bandwidth_gb_per_s": ("memory bandwidth", "GB/s"),
    "nvlink_gb_per_s_one_direction": ("GPU to GPU link, one direction", "GB/s"),
    "pcie": ("PCIe", ""),
    "peer_gb_per_s_one_direction": ("GPU to GPU over PCIe, one direction", "GB/s"),
    "compute_capability": ("compute capability", ""),
    "bf16_supported": ("bf16", ""),
    "tdp_w": ("power", "W"),
}
_FIELDS = {"name", "family", "aliases", "default_for", "peak_tflops_dense", "prices", "notes"} | (
    _LABELS.keys()
)
_OPTIONAL = {
    "memory_nvidia_smi_mib",
    "memory_torch_total_mib",
    "nvlink_gb_per_s_one_direction",
    "peer_gb_per_s_one_direction",
    "achievable_bf16_tflops",
    "default_for",
    "notes",
}
"""EXTENDING.md says what each is."""


def _number(label: str, unit: str, number: _Row) -> SourcedNumber:
    value = number["value"]
    return SourcedNumber(
        label=label,
        value=", ".join(map(str, value)) if isinstance(value, list) else str(value),
        unit=unit,
        source=_source(number["source"]),
        note=number.get("note", ""),
    )


# Which GPU a cluster means by its own words: a GRES type, node features, a product label.

MIG_MEMORY_FRACTION = 0.93
"""Of a slice's nominal GiB; drivers show 0.95 (4864 MiB for 1g.5gb), torch a little less."""
MIG_COMPUTE_SLICES = 7
"""An A100 or H100 divides its multiprocessors into sevenths (NVIDIA MIG User Guide)."""

_MIG = re.compile(
    r"(?P<base>.*?)[\s\-_.]*(?:mig[\s\-_.]*)?(?P<g>[1-7])g\.(?P<gb>[0-9]{1,3})gb.*", re.I
)
_MEMORY = re.compile(r"(?<![0-9])([0-9]{1,3})\s*g(?:b|ib)?(?![a-z0-9])", re.IGNORECASE)
_ARCHITECTURES: dict[str, tuple[tuple[int, ...], ...]] = {
    "kepler": ((3,),),
    "maxwell": ((5,),),
    "pascal": ((6,),),
    "volta": ((7, 0),),
    "turing": ((7, 5),),
    "ampere": ((8, 0), (8, 6)),
    "ada": ((8, 9),),
    "lovelace": ((8, 9),),
    "hopper": ((9,),),
    "blackwell": ((10,), (12,)),
}
"""First parts of the compute capabilities that go by this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuGuess:
    """A GPU, what had to be assumed to name it, and whether it is a slice of one."""

    gpu: Gpu | None
    warnings: tuple[str, ...] = ()
    is_slice: bool = False


@lru_cache(maxsize=1024)
def guess_gpu(kind: str | None, hints: tuple[str, ...]) -> GpuGuess:
    """The catalogue's GPU for a type word (None: not stated) beside free-form hints.

    In order: the type itself, a MIG profile, a hint that names a GPU, and last the
    slowest card that has the memory and architecture that the hints name.
    """
    mig = _MIG.fullmatch(kind) if kind else None
    if mig is not None:
        return _slice(mig)
    if kind is not None:
        match = _try_match(kind)
        if match is not None:
            return _narrow(kind, match, hints)
    for hint in hints:
        match = _try_match(hint)
        if match is not None:
            guess = _narrow(hint, match, hints)
            note = f"{_type(kind)} is read as {match.gpu.name} by the feature `{hint}`."
            return GpuGuess(gpu=guess.gpu, warnings=guess.warnings or (note,))
    return _by_memory(kind, hints)


def _type(kind: str | None) -> str:
    return f"GPU type `{kind}`" if kind else "A GPU type that is not stated"


def _try_match(word: str) -> GpuMatch | None:
    try:
        return match_gpu(word)
    except UserError:
        return None


def _narrow(word: str, match: GpuMatch, hints: Sequence[str]) -> GpuGuess:
    """Choose among the variants of a word by the memory or board that the hints name."""
    if not match.others:
        return GpuGuess(gpu=match.gpu)
    variants = [match.gpu, *(find_gpu(name) for name in match.others)]
    sizes = _memory_sizes(hints)
    fitting = [gpu for gpu in variants if gpu.marketing_gb in sizes] or variants
    boards = [board for board in ("pcie", "sxm") if any(board in hint.lower() for hint in hints)]
    right = [
        gpu for gpu in fitting if any(board in gpu.name.lower() for board in boards)
    ] or fitting
    chosen = right[0]
    if len(right) == 1:
        return GpuGuess(gpu=chosen)
    rest = ", ".join(gpu.name for gpu in right[1:])
    return GpuGuess(
        gpu=chosen, warnings=(f"`{word}` is read as {chosen.name}; also known: {rest}.",)
    )


def _memory_sizes(hints: Sequence[str]) -> set[float]:
    return {float(size) for hint in hints for size in _MEMORY.findall(hint)}


def _by_memory(kind: str | None, hints: Sequence[str]) -> GpuGuess:
    words = {word for hint in (*hints, kind or "") for word in re.split(r"[^a-z]+", hint.lower())}
    generations = [part for word in sorted(words) for part in _ARCHITECTURES.get(word, ())]
    sizes = _memory_sizes([*hints, kind or ""])
    fitting = [
        gpu
        for gpu in list_gpus()
        if gpu.marketing_gb in sizes and gpu.compute_capability is not None
        if not generations
        or any(gpu.compute_capability[: len(part)] == part for part in generations)
    ]
    if not fitting:
        known = f" (features: {', '.join(hints)})" if hints else ""
        note = f"{_type(kind)}{known} is not in the catalogue; its nodes are left out."
        return GpuGuess(
            gpu=None, warnings=(note + " Describe them in a cluster YAML to plan for them.",)
        )
    slowest = min(fitting, key=lambda gpu: max(gpu.peak_flops.values()))
    note = f"{_type(kind)} is planned as {slowest.name}, the slowest known card with its memory."
    return GpuGuess(gpu=slowest, warnings=(note,))


def _slice(mig: re.Match[str]) -> GpuGuess:
    match = _try_match(mig["base"]) if mig["base"] else None
    whole = match.gpu if match else find_gpu("A100")
    sevenths, gigabytes = int(mig["g"]), int(mig["gb"])
    # 5 of 40 GB or 10 of 80 GB in one seventh: the larger card shows in the larger slice.
    if match and match.others and gigabytes / sevenths >= whole.marketing_gb / 4:
        larger = [find_gpu(name) for name in match.others]
        whole = max([whole, *larger], key=lambda gpu: gpu.marketing_gb)
    gpu = slice_gpu(whole, sevenths=sevenths, gigabytes=gigabytes)
    note = f"{gpu.name}: one job uses one MIG slice; slices cannot work together."
    return GpuGuess(gpu=gpu, warnings=(note,), is_slice=True)


def slice_gpu(whole: Gpu, *, sevenths: int, gigabytes: int) -> Gpu:
    """A MIG slice as a small GPU: its share of the arithmetic and of the memory's speed."""
    compute = min(1.0, sevenths / MIG_COMPUTE_SLICES)
    memory = min(1.0, gigabytes / whole.marketing_gb)
    return whole.model_copy(
        update={
            "name": f"{whole.name} MIG {sevenths}g.{gigabytes}gb",
            "marketing_gb": float(gigabytes),
            "memory_bytes": int(gigabytes * GIB * MIG_MEMORY_FRACTION),
            "peak_flops": {kind: rate * compute for kind, rate in whole.peak_flops.items()},
            "achievable_bf16_flops": None,
            "memory_bytes_per_second": whole.memory_bytes_per_second * memory,
            "nvlink_bytes_per_second": None,
            "prices": (),
            "notes": f"a MIG slice of {whole.name}: rates scaled by its share",
        }
    )
