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
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tightfit.core.errors import InvalidInputError, UserError
from tightfit.core.suggest import did_you_mean
from tightfit.core.units import (
    GB,
    GIB,
    TERA,
    parse_bytes,
    parse_link_speed,
    parse_time_limit,
    render_bytes,
)
from tightfit.core.validation import printable
from tightfit.core.yaml_text import PlainLoader, read_text
from tightfit.hardware.catalogue import UNSTATED_MEMORY_FRACTION, GpuMatch, find_gpu, match_gpu
from tightfit.hardware.types import Cluster, Gpu, Node, NodeGroup
from tightfit.hardware.words import MAX_COUNT, ambiguity_warnings

# A card that the catalogue does not have, described by the user and by its likeness to another.

CUSTOM_GPU_KEYS = ("name", "memory", "like", "compute_capability", "tflops_fp16", "bandwidth")
CUSTOM_GPU_EXAMPLE = 'write it like `gpu: {name: "RTX 3050", memory: 8GiB, like: "RTX 3060"}`'
_CAPABILITY = re.compile(r"([0-9]{1,2})\.([0-9])")
_NUMBER = re.compile(r"[0-9]{1,6}(?:\.[0-9]{1,6})?")
_BANDWIDTH = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*([GT])B(?:/s|ps)?", re.IGNORECASE)
_SMALLEST_CARD_BYTES, _LARGEST_CARD_BYTES = GIB, 1024 * GIB
_BF16_SINCE = (8, 0)
_FP8_SINCE = (8, 9)


def read_custom_gpu(said: Mapping[str, str]) -> Gpu:
    """The card that the texts under `CUSTOM_GPU_KEYS` describe.

    What is not stated is taken from the card it is `like`. All arithmetic rates
    are scaled by the one that is stated, for they mostly grow together. Memory
    is what is sold: torch sees a little less, as on the catalogue's cards.
    """
    for key in ("name", "memory", "like"):
        if key not in said:
            raise InvalidInputError(f"`{key}` is missing.", remedy=CUSTOM_GPU_EXAMPLE)
    model = find_gpu(said["like"])
    sold = parse_bytes(said["memory"])
    if not _SMALLEST_CARD_BYTES <= sold <= _LARGEST_CARD_BYTES:
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


MAX_FILE_BYTES = 1024**2
MAX_GROUPS = 32
"""Each group is planned for apart; more would take minutes."""
MAX_CORES = 16_384
_LARGEST_BYTES = 1024**6
_REMEDY = (
    "write it like `groups: [{gpu: T4, gpus_per_node: 4, nodes: 2}]`"
    "    (docs/cluster-file.example.yaml has every key)"
)

_CLUSTER_KEYS = ("network", "groups")
_GROUP_KEYS = (
    "name",
    "gpu",
    "gpus_per_node",
    "nodes",
    "ram",
    "cores",
    "shm",
    "disk",
    "nvlink",
    "time_limit",
)


class _PlainLoader(PlainLoader):
    """Scalars stay text, because YAML 1.1 reads 12:00:00 as the number 43200."""


def _construct_mapping(loader: _PlainLoader, node: Any) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for key, value in node.value:
        problem = None
        if not isinstance(key, yaml.ScalarNode):
            problem = "a key must be a word"
        elif key.value in document:
            problem = f"the key `{key.value[:40]}` is there twice"
        if problem is not None:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        document[key.value] = loader.construct_object(value, deep=True)
    return document


_PlainLoader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def read_cluster_file(path: Path) -> Cluster:
    """Read and check a cluster YAML."""
    text = read_text(path, max_bytes=MAX_FILE_BYTES, remedy=_REMEDY)
    return parse_cluster(text, name=str(path))


def parse_cluster(text: str, *, name: str) -> Cluster:
    """The cluster that the YAML text describes; `name` stands in messages."""
    document = _load(text, name)
    if document is None:
        raise InvalidInputError(f"{name} is empty.", remedy=_REMEDY)
    top = _mapping(document, name, _CLUSTER_KEYS, path="")
    groups = top.get("groups")
    if not isinstance(groups, list) or not groups:
        raise _fault(name, "groups", "must be a list of at least one group")
    if len(groups) > MAX_GROUPS:
        raise InvalidInputError(
            f"{name}: groups has {len(groups)} groups; at most {MAX_GROUPS} are planned at once.",
            remedy="give machines that are alike one group with `nodes: N`, or split the file",
        )
    parsed = [_group(entry, name, f"groups[{index}]") for index, entry in enumerate(groups)]
    _refuse_repeated_names([group.name for group, _ in parsed], name)
    network = _optional(top, "network", name, path="", parse=parse_link_speed)
    return Cluster(
        groups=tuple(group for group, _ in parsed),
        network_bytes_per_second=network,
        source=name,
        warnings=tuple(dict.fromkeys(warning for _, notes in parsed for warning in notes)),
    )


def _load(text: str, name: str) -> object:
    try:
        return yaml.load(text, Loader=_PlainLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}, line {mark.line + 1}, column {mark.column + 1}" if mark else name
        what = (error.problem or "not YAML").strip()[:200]
        raise InvalidInputError(f"{where}: {what}.", remedy=_REMEDY) from error
    except RecursionError as error:
        raise InvalidInputError(f"{name} is nested too deeply.", remedy=_REMEDY) from error
    except (yaml.YAMLError, ValueError) as error:
        what = " ".join(str(error).split())[:200]
        raise InvalidInputError(f"{name} is not YAML: {what}.", remedy=_REMEDY) from error


def _group(entry: object, name: str, path: str) -> tuple[NodeGroup, list[str]]:
    keys = _mapping(entry, name, _GROUP_KEYS, path=path)
    if "gpu" not in keys:
        raise _fault(name, f"{path}.gpu", "is missing")
    word, match = _card(keys["gpu"], name, f"{path}.gpu")
    limit = _optional(keys, "time_limit", name, path=path, parse=parse_time_limit)
    node = Node(
        gpu=match.gpu,
        num_gpus=_optional(keys, "gpus_per_node", name, path=path, parse=_count(MAX_COUNT)) or 1,
        host_memory_bytes=_optional(keys, "ram", name, path=path, parse=_size),
        num_cores=_optional(keys, "cores", name, path=path, parse=_count(MAX_CORES)),
        shm_bytes=_optional(keys, "shm", name, path=path, parse=_small_size),
        disk_bytes=_optional(keys, "disk", name, path=path, parse=_size),
        has_nvlink=_optional(keys, "nvlink", name, path=path, parse=_switch),
    )
    group = NodeGroup(
        name=_optional(keys, "name", name, path=path, parse=_name) or word,
        node=node,
        num_nodes=_optional(keys, "nodes", name, path=path, parse=_count(MAX_COUNT)) or 1,
        max_seconds=limit,
    )
    if node.has_nvlink and node.gpu.nvlink_bytes_per_second is None:
        raise _fault(name, f"{path}.nvlink", f"is true, but {node.gpu.name} has no NVLink")
    return group, ambiguity_warnings(word, match)


def _card(value: object, name: str, path: str) -> tuple[str, GpuMatch]:
    """A name from the catalogue, or a card described key by key."""
    if not isinstance(value, dict):
        word = _text(value, name, path)
        return word, _within(name, path, lambda: match_gpu(word))
    keys = _mapping(value, name, CUSTOM_GPU_KEYS, path=path)
    said = {key: _text(item, name, f"{path}.{key}") for key, item in keys.items()}
    gpu: Gpu = _within(name, path, lambda: read_custom_gpu(said))
    return gpu.name, GpuMatch(gpu=gpu)


def _mapping(value: object, name: str, known: tuple[str, ...], *, path: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise _fault(name, path or "the file", f"must be keys and values, not {_kind(value)}")
    for key in value:
        if key not in known:
            where = f"{path}.{key}" if path else str(key)
            shown = where if len(where) <= 80 else where[:77] + "..."
            raise InvalidInputError(
                f"{name}: unknown key `{shown}`.{did_you_mean(str(key)[:60], known)}",
                remedy=_REMEDY,
            )
    return value


def _optional(
    keys: dict[str, object],
    key: str,
    name: str,
    *,
    path: str,
    parse: Callable[[str], Any],
) -> Any:
    if key not in keys:
        return None
    where = f"{path}.{key}" if path else key
    text = _text(keys[key], name, where)
    return _within(name, where, lambda: parse(text))


def _text(value: object, name: str, path: str) -> str:
    if isinstance(value, str) and value.strip():
        return value.strip()
    raise _fault(name, path, f"must be one value, not {_kind(value)}")


def _within(name: str, path: str, parse: Callable[[], Any]) -> Any:
    """Run a parser and say in which key of which file it failed."""
    try:
        return parse()
    except UserError as error:
        raise type(error)(f"{name}: {path}: {error.problem}", remedy=error.remedy) from error


def _count(largest: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        number = int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else 0
        if not 1 <= number <= largest:
            raise InvalidInputError(
                f"`{text[:40]}` must be a whole number from 1 to {largest}.", remedy=_REMEDY
            )
        return number

    return parse


def _size(text: str) -> int:
    return _size_of_at_least(text, GIB)


def _small_size(text: str) -> int:
    return _size_of_at_least(text, 1024**2)


def _size_of_at_least(text: str, smallest: int) -> int:
    example = f"write it with its unit, like {'384GiB' if smallest >= GIB else '64GiB'} or 384GB"
    try:
        size = parse_bytes(text)
    except InvalidInputError as error:  # a bare number of bytes is a size, but no node's
        raise InvalidInputError(error.problem, remedy=example) from error
    if not smallest <= size <= _LARGEST_BYTES:
        raise InvalidInputError(
            f"`{printable(text, most=40)}` is {render_bytes(size)}, which no node has.",
            remedy=example,
        )
    return size


def _switch(text: str) -> bool:
    if text.casefold() not in ("true", "false", "yes", "no"):
        raise InvalidInputError(f"`{text[:40]}` must be true or false.", remedy=_REMEDY)
    return text.casefold() in ("true", "yes")


def _name(text: str) -> str:
    if len(text) > 100:
        raise InvalidInputError("a name has at most 100 characters.", remedy=_REMEDY)
    return text


def _refuse_repeated_names(names: Iterable[str], name: str) -> None:
    seen: set[str] = set()
    for group in names:
        if group in seen:
            raise _fault(name, "groups", f"has two groups called `{group}`; give each a `name`")
        seen.add(group)


def _kind(value: object) -> str:
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "keys and values"
    return "nothing" if value is None or value == "" else "text"


def _fault(name: str, path: str, what: str) -> InvalidInputError:
    return InvalidInputError(f"{name}: {path} {what}.", remedy=_REMEDY)
