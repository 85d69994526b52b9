"""A cluster described in a YAML file, with cards of its own where the catalogue has none.

    network: 100Gb/s            # between nodes, one direction; b is bits, B is bytes
    groups:
      - name: volta             # a partition, a pool, any name
        gpu: V100-32GB          # any name that `tightfit hardware` lists
        gpus_per_node: 4
        nodes: 3
        ram: 384GiB             # per node
        cores: 40
        shm: 190GiB             # size of /dev/shm
        disk: 2TB               # free, where models and checkpoints go
        nvlink: true            # default: as the card usually comes
        time_limit: 7-00:00:00  # as Slurm writes it
      - gpu: {name: "RTX 3050", memory: 8GiB, like: "RTX 3060", tflops_fp16: 18.2}

Only `gpu` is required in a group; the planner assumes the rest and says so.
`docs/cluster-file.example.yaml` has every key.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tightfit.core.errors import InvalidInputError, UserError
from tightfit.core.text import did_you_mean, printable
from tightfit.core.units import (
    GB,
    GIB,
    MIB,
    TERA,
    parse_bytes,
    parse_link_speed,
    parse_time_limit,
    render_bytes,
)
from tightfit.core.yaml_text import read_yaml
from tightfit.hardware.catalogue import UNSTATED_MEMORY_FRACTION, find_gpu, match_gpu
from tightfit.hardware.types import MAX_COUNT, Cluster, Gpu, Node, NodeGroup

MAX_GROUPS = 32
"""Each group is planned for apart; more would take minutes."""
MAX_CORES = 16_384
_LARGEST_BYTES = 1024**6
_BF16_SINCE = (8, 0)
_FP8_SINCE = (8, 9)
_REMEDY = (
    "write it like `groups: [{gpu: T4, gpus_per_node: 4, nodes: 2}]`"
    "    (docs/cluster-file.example.yaml has every key)"
)

# Each key has a parser of its text, which raises an error without the key's name.


def _count(text: str, *, largest: int) -> int:
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else 0
    if not 1 <= number <= largest:
        raise _error(f"`{text[:40]}` must be a whole number from 1 to {largest}")
    return number


def _size(text: str, *, smallest: int, largest: int = _LARGEST_BYTES, of: str = "node") -> int:
    remedy = f"write it with its unit, like {'12GiB' if of == 'card' else '384GiB or 384GB'}"
    try:
        size = parse_bytes(text)
    except InvalidInputError as error:
        raise InvalidInputError(error.problem, remedy=remedy) from error
    if not smallest <= size <= largest:  # a bare number of bytes is a size too
        shown = f"`{printable(text, most=40)}` is {render_bytes(size)}"
        raise InvalidInputError(f"{shown}, which no {of} has.", remedy=remedy)
    return size


def _switch(text: str) -> bool:
    if text.casefold() not in ("true", "false", "yes", "no"):
        raise _error(f"`{text[:40]}` must be true or false")
    return text.casefold() in ("true", "yes")


def _name(text: str) -> str:
    if len(text) > 100:
        raise _error("a name has at most 100 characters")
    return printable(text, most=100)


def _tflops(text: str) -> float:
    tflops = float(text) if re.fullmatch(r"[0-9]{1,6}(?:\.[0-9]{1,6})?", text) else 0.0
    if not 0.5 <= tflops <= 100_000:
        raise InvalidInputError(
            f"`{printable(text, most=40)}` must be a number of TFLOP/s.",
            remedy="write the dense fp16 rate with fp32 accumulation, like `tflops_fp16: 25.5`",
        )
    return tflops


def _capability(text: str) -> tuple[int, int]:
    parts = re.fullmatch(r"([0-9]{1,2})\.([0-9])", text)
    if parts is None or not 3 <= int(parts[1]) <= 20:
        raise InvalidInputError(
            f"`{printable(text, most=40)}` must be like 8.6.",
            remedy="see what the driver says: nvidia-smi --query-gpu=compute_cap --format=csv",
        )
    return int(parts[1]), int(parts[2])


def _bandwidth(text: str) -> float:
    parts = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*([GT])B(?:/s|ps)?", text, re.I)
    rate = float(parts[1]) * (GB if parts[2].upper() == "G" else 1000 * GB) if parts else 0.0
    if not 10 * GB <= rate <= 100_000 * GB:
        raise InvalidInputError(
            f"`{printable(text, most=40)}` must be the memory's speed.",
            remedy="write it like `bandwidth: 360GB/s`",
        )
    return rate


Parsers = Mapping[str, Callable[[str], Any]]
GROUP_PARSERS: Parsers = {
    "gpu": match_gpu,
    "name": _name,
    "gpus_per_node": partial(_count, largest=MAX_COUNT),
    "nodes": partial(_count, largest=MAX_COUNT),
    "ram": partial(_size, smallest=GIB),
    "cores": partial(_count, largest=MAX_CORES),
    "shm": partial(_size, smallest=MIB),
    "disk": partial(_size, smallest=GIB),
    "nvlink": _switch,
    "time_limit": parse_time_limit,
}
CARD_PARSERS: Parsers = {
    "name": _name,
    "memory": partial(_size, smallest=GIB, largest=1024 * GIB, of="card"),
    "like": find_gpu,
    "compute_capability": _capability,
    "tflops_fp16": _tflops,
    "bandwidth": _bandwidth,
}


def read_cluster_file(path: Path) -> Cluster:
    """Read and check a cluster YAML."""
    document = read_yaml(path).value
    with _within(f"{path}: "):
        if document is None:
            raise _error("the file is empty")
        top = _check_keys(document, "", ("network", "groups"))
        entries = top.pop("groups", None)
        if not isinstance(entries, list) or not entries:
            raise _error("groups must be a list of at least one group")
        if len(entries) > MAX_GROUPS:
            raise InvalidInputError(
                f"groups has {len(entries)} groups; at most {MAX_GROUPS} are planned at once.",
                remedy="give machines that are alike one group with `nodes: N`, or split the file",
            )
        warnings: list[str] = []
        groups = tuple(_read_group(one, f"groups[{i}]", warnings) for i, one in enumerate(entries))
        repeated, times = Counter(group.name for group in groups).most_common(1)[0]
        if times > 1:
            raise _error(f"groups has two groups called `{repeated}`; give each a `name`")
        network = _parse_values(top, "", {"network": parse_link_speed}).get("network")
    return Cluster(
        groups=groups,
        network_bytes_per_second=network,
        source=str(path),
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _read_group(entry: object, path: str, warnings: list[str]) -> NodeGroup:
    keys = _check_keys(entry, path, GROUP_PARSERS)
    if "gpu" not in keys:
        raise _error(f"{path}.gpu is missing")
    if isinstance(keys["gpu"], dict):
        gpu = _read_card(keys.pop("gpu"), f"{path}.gpu")
        word = gpu.name
        found = _parse_values(keys, path, GROUP_PARSERS)
    else:
        found = _parse_values(keys, path, GROUP_PARSERS)
        word, gpu = str(keys["gpu"]).strip(), found["gpu"].gpu
        warnings += found["gpu"].warnings(word)
    if found.get("nvlink") and gpu.nvlink_bytes_per_second is None:
        raise _error(f"{path}.nvlink is true, but {gpu.name} has no NVLink")
    return NodeGroup(
        name=found.get("name", word),
        node=Node(
            gpu=gpu,
            num_gpus=found.get("gpus_per_node", 1),
            host_memory_bytes=found.get("ram"),
            num_cores=found.get("cores"),
            shm_bytes=found.get("shm"),
            disk_bytes=found.get("disk"),
            has_nvlink=found.get("nvlink"),
        ),
        num_nodes=found.get("nodes", 1),
        max_seconds=found.get("time_limit"),
    )


def _read_card(entry: object, path: str) -> Gpu:
    """A card that the catalogue does not have; what is not stated is that of the card it is `like`.

    All arithmetic rates are scaled by the one that is stated, for they mostly grow together. Memory
    is what is sold: torch sees a little less, as on the catalogue's cards.
    """
    found = _parse_values(_check_keys(entry, path, CARD_PARSERS), path, CARD_PARSERS)
    for key in ("name", "memory", "like"):
        if key not in found:
            raise InvalidInputError(
                f"{path}: `{key}` is missing.",
                remedy='write it like `gpu: {name: "RTX 3050", memory: 8GiB, like: "RTX 3060"}`',
            )
    like: Gpu = found["like"]
    capability = found.get("compute_capability", like.compute_capability)
    rates = dict(like.peak_flops)
    if "tflops_fp16" in found:
        scale = found["tflops_fp16"] * TERA / rates.get("fp16", rates["fp32"])
        rates = {kind: rate * scale for kind, rate in rates.items()}
    if capability is not None and capability < _BF16_SINCE:
        rates = {kind: rate for kind, rate in rates.items() if kind in ("fp32", "fp16")}
    elif capability is not None:
        rates.setdefault("bf16", rates.get("fp16", rates["fp32"]))
        if capability < _FP8_SINCE:
            rates.pop("fp8", None)
    return like.model_copy(
        update={
            "name": found["name"],
            "marketing_gb": found["memory"] / GIB,
            "memory_bytes": int(found["memory"] * UNSTATED_MEMORY_FRACTION),
            "compute_capability": capability,
            "peak_flops": rates,
            "memory_bytes_per_second": found.get("bandwidth", like.memory_bytes_per_second),
            "supports_bf16": "bf16" in rates,
            "achievable_bf16_flops": None,
            "tdp_watts": None,
            "prices": (),
            "source": "cluster file",
            "notes": f"as described in the cluster file; what it leaves out is {like.name}'s",
        }
    )


def _check_keys(value: object, path: str, known: Collection[str]) -> dict[str, object]:
    if not isinstance(value, dict):
        raise _error(f"{path or 'the file'} must be keys and values, not {_kind(value)}")
    for key in value:
        if key not in known:
            shown = printable(f"{path}.{key}" if path else str(key))
            raise _error(f"unknown key `{shown}`", hint=did_you_mean(str(key)[:60], known))
    return dict(value)


def _parse_values(values: Mapping[str, object], path: str, parsers: Parsers) -> dict[str, Any]:
    """Each value parsed from its text; an error names its key."""
    found = {}
    for key, value in values.items():
        name = f"{path}.{key}" if path else key
        if value is None or isinstance(value, list | dict) or not str(value).strip():
            raise _error(f"{name} must be one value, not {_kind(value)}")
        with _within(f"{name}: "):
            found[key] = parsers[key](str(value).strip())
    return found


@contextmanager
def _within(prefix: str) -> Iterator[None]:
    """Prefix an error from inside with the file or key it came from."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"{prefix}{error.problem}", remedy=error.remedy) from error


def _kind(value: object) -> str:
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "keys and values"
    return "nothing" if value is None or value == "" else "text"


def _error(problem: str, *, hint: str = "") -> InvalidInputError:
    return InvalidInputError(f"{problem}.{hint}", remedy=_REMEDY)
