"""Hardware as a user states it: `4xV100-32GB`, `2n x 4xA100-40GB`, `6xT4 + 2xRTX 6000`, `here`,
`cpu`, `slurm[:NAME]`, `k8s` or a cluster YAML."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from tightfit.core.errors import InvalidInputError, NotFoundError, UsageError, UserError
from tightfit.hardware.catalogue import match_gpu
from tightfit.hardware.types import MAX_COUNT, Cluster, Node, NodeGroup

if TYPE_CHECKING:
    from tightfit.hardware.inventory import Inventory

MAX_USUAL_GPUS_PER_NODE = 16
"""No server holds more; a larger count was probably meant as nodes."""
MAX_PROCESSES = 1024
"""Of one CPU."""
MAX_TEXT = 1_000
HARDWARE_EXAMPLES = "write it like V100-32GB, 4xV100-32GB, 2n x 4xA100-40GB or 6xT4 + 2xRTX6000"

_GROUP = re.compile(
    r"(?:(?P<nodes>[+-]?[0-9]+)\s*(?:nodes?|n)\b\s*[x×*]?\s*|(?P<tight>[+-]?[0-9]+)nx\s*)?"
    r"(?:(?P<gpus>[+-]?[0-9]+)\s*[x×*](?!tx?$)\s*)?"  # the x of a Radeon 7900XT counts nothing
    r"(?P<gpu>.+)",
    re.IGNORECASE,
)
_COUNT_AFTER = re.compile(r"(?P<gpu>.+?)\s*[:x×*]\s*(?P<count>[0-9]+)", re.IGNORECASE)
_COUNT_WITHOUT_X = re.compile(r"(?P<count>[0-9]+)\s+(?P<gpu>.+)")
_CPU = re.compile(r"(?:(?P<count>[0-9]+)\s*[x×*]\s*)?cpus?", re.IGNORECASE)
_TWO_COUNTS = re.compile(r"(?P<gpus>[0-9]+)\s*[x×*]\s*(?P<gpu>.+)", re.IGNORECASE)
SCHEDULERS = ("slurm", "k8s", "kubernetes")


def resolve_hardware(text: str) -> Cluster:
    """Find out what the text means and look there. Words are read where nothing else matches."""
    words = text.strip()
    if words.casefold() == "here":
        from tightfit.hardware.local import probe_here

        return probe_here()
    num_processes = read_cpu_words(words)
    if num_processes is not None:
        from tightfit.hardware.local import probe_cpu

        return probe_cpu(num_processes)
    inventory = probe_inventory(words)
    if inventory is not None:
        from tightfit.hardware.inventory import plannable_cluster

        return plannable_cluster(inventory)
    if words.casefold().endswith((".yaml", ".yml")):
        from tightfit.hardware.cluster_file import read_cluster_file

        return read_cluster_file(Path(words).expanduser())
    if not words:
        raise UsageError(
            "No hardware was named.",
            remedy=f"--on here, --on cpu, --on slurm, --on k8s, or {HARDWARE_EXAMPLES}",
        )
    return parse_hardware(words)


def probe_inventory(text: str) -> Inventory | None:
    """Every node of the scheduler that the text names; None where it names none."""
    word, colon, pool = (part.strip() for part in text.strip().partition(":"))
    if word.casefold() not in SCHEDULERS:
        return None
    if colon and not pool:
        raise UsageError(
            f"`{word}:` names no part of it.", remedy=f"--on {word} or --on {word}:NAME"
        )
    if word.casefold() == "slurm":
        from tightfit.hardware.slurm import probe_slurm_inventory

        return probe_slurm_inventory(pool or None)
    from tightfit.hardware.kubernetes import probe_kubernetes_inventory

    return probe_kubernetes_inventory(pool or None)


def read_cpu_words(text: str) -> int | None:
    """Processes that `cpu` or `2xcpu` ask for; None where the words mean something else."""
    parts = _CPU.fullmatch(text.strip())
    if parts is None:
        return None
    digits = parts["count"] or "1"
    count = int(digits) if len(digits) <= 9 else 0
    if not 1 <= count <= MAX_PROCESSES:
        raise InvalidInputError(
            f"`{text.strip()[:40]}`: 1 to {MAX_PROCESSES} processes can share a CPU.",
            remedy="--on cpu, or --on 2xcpu for two processes",
        )
    return count


def parse_hardware(text: str) -> Cluster:
    """The cluster the words describe. `+` or `,` joins groups; `n` says how many nodes one has."""
    if len(text) > MAX_TEXT:
        raise InvalidInputError(
            f"Hardware words of {len(text)} characters are too long.", remedy=HARDWARE_EXAMPLES
        )
    phrases = [phrase.strip() for phrase in re.split(r"[+,]", text)]
    if not any(phrases):
        raise InvalidInputError("No hardware was named.", remedy=HARDWARE_EXAMPLES)
    if not all(phrases):
        raise InvalidInputError(f"`{text}` has an empty group.", remedy=HARDWARE_EXAMPLES)
    groups: list[NodeGroup] = []
    warnings: list[str] = []
    for phrase in phrases:
        group, notes = _parse_group(phrase)
        groups.append(group)
        warnings += notes
    return Cluster(groups=tuple(groups), source="words", warnings=tuple(dict.fromkeys(warnings)))


def _parse_group(phrase: str) -> tuple[NodeGroup, list[str]]:
    parts = _GROUP.fullmatch(phrase)
    if parts is None:
        raise InvalidInputError(f"`{phrase}` is not hardware.", remedy=HARDWARE_EXAMPLES)
    num_nodes = _count(parts["nodes"] or parts["tight"], "nodes", phrase)
    num_gpus = _count(parts["gpus"], "GPUs", phrase)
    name = parts["gpu"].strip()
    try:
        match = match_gpu(name)
    except NotFoundError as error:
        raise _misread(name, num_gpus, said_nodes=num_nodes > 1) or error from None
    warnings = match.warnings(name)
    if num_gpus > MAX_USUAL_GPUS_PER_NODE:
        warnings.append(
            f"`{phrase}` is read as one node with {num_gpus} GPUs; "
            f"for several nodes write it like {-(-num_gpus // 8)}n x 8x{name}."
        )
    node = Node(gpu=match.gpu, num_gpus=num_gpus)
    return NodeGroup(name=phrase, node=node, num_nodes=num_nodes), warnings


def _count(digits: str | None, what: str, phrase: str) -> int:
    if digits is None:
        return 1
    # The length first: Python refuses to read integers of thousands of digits.
    number = int(digits) if len(digits) <= 9 else MAX_COUNT + 1
    if digits.startswith("-") or number < 1 or number > MAX_COUNT:
        shown = digits if len(digits) <= 20 else digits[:17] + "..."
        raise InvalidInputError(
            f"`{shown}` {what} in `{phrase[:60]}`: must be 1 to {MAX_COUNT}.",
            remedy=HARDWARE_EXAMPLES,
        )
    return number


def _misread(name: str, num_gpus: int, *, said_nodes: bool) -> UserError | None:
    """A better message for words in the wrong order, where the GPU itself is known."""
    for pattern in (_COUNT_AFTER, _COUNT_WITHOUT_X, _TWO_COUNTS):
        parts = pattern.fullmatch(name)
        if parts is None:
            continue
        try:
            match_gpu(parts["gpu"])
        except UserError:
            continue
        if pattern is _TWO_COUNTS:
            right = f"{num_gpus}n x {parts['gpus']}x{parts['gpu']}"
        elif num_gpus > 1 or said_nodes:
            continue
        else:
            right = f"{parts['count']}x{parts['gpu']}"
        return InvalidInputError(f"`{name}` is not how hardware is written.", remedy=f"`{right}`")
    return None
