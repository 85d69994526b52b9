"""Hardware in words: `4xV100-32GB`, `2n x 4xA100-40GB`, `6xT4 + 2xRTX 6000`."""

from __future__ import annotations

import re

from tightfit.core.errors import InvalidInputError, NotFoundError, UserError
from tightfit.hardware.catalogue import GpuMatch, match_gpu
from tightfit.hardware.types import Cluster, Node, NodeGroup

MAX_COUNT = 65_536
"""Of nodes or GPUs; more is a slip of the keyboard."""
MAX_USUAL_GPUS_PER_NODE = 16
"""No server holds more; a larger count was probably meant as nodes."""
MAX_PROCESSES = 1024
"""Of one CPU."""
MAX_TEXT = 1_000
HARDWARE_EXAMPLES = "write it like V100-32GB, 4xV100-32GB, 2n x 4xA100-40GB or 6xT4 + 2xRTX6000"

_GROUP = re.compile(
    r"(?:(?P<nodes>[+-]?[0-9]+)\s*(?:nodes?|n)\b\s*[x×*]?\s*|(?P<tight>[+-]?[0-9]+)nx\s*)?"
    r"(?:(?P<gpus>[+-]?[0-9]+)\s*[x×*]\s*)?"
    r"(?P<gpu>.+)",
    re.IGNORECASE,
)
_COUNT_AFTER = re.compile(r"(?P<gpu>.+?)\s*[:x×*]\s*(?P<count>[0-9]+)", re.IGNORECASE)
_COUNT_WITHOUT_X = re.compile(r"(?P<count>[0-9]+)\s+(?P<gpu>.+)")
_CPU = re.compile(r"(?:(?P<count>[0-9]+)\s*[x×*]\s*)?cpus?", re.IGNORECASE)
_TWO_COUNTS = re.compile(r"(?P<gpus>[0-9]+)\s*[x×*]\s*(?P<gpu>.+)", re.IGNORECASE)


def read_cpu_words(text: str) -> int | None:
    """Processes that `cpu` or `2xcpu` ask for; None where the words mean something else."""
    parts = _CPU.fullmatch(text.strip())
    if parts is None:
        return None
    count = int(parts["count"]) if parts["count"] and len(parts["count"]) <= 9 else 1
    if (parts["count"] and len(parts["count"]) > 9) or not 1 <= count <= MAX_PROCESSES:
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
    warnings = ambiguity_warnings(name, match)
    if num_gpus > MAX_USUAL_GPUS_PER_NODE:
        warnings.append(
            f"`{phrase}` is read as one node with {num_gpus} GPUs; "
            f"for several nodes write it like {-(-num_gpus // 8)}n x 8x{name}."
        )
    node = Node(gpu=match.gpu, num_gpus=num_gpus)
    return NodeGroup(name=phrase, node=node, num_nodes=num_nodes), warnings


def ambiguity_warnings(name: str, match: GpuMatch) -> list[str]:
    """Say which variant a word was taken for, where it could mean several."""
    if not match.others:
        return []
    return [f"`{name}` is read as {match.gpu.name}; also known: {', '.join(match.others)}."]


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
        if parts is None or not _is_known(parts["gpu"]):
            continue
        if pattern is _TWO_COUNTS:
            right = f"{num_gpus}n x {parts['gpus']}x{parts['gpu']}"
        elif num_gpus > 1 or said_nodes:
            continue
        else:
            right = f"{parts['count']}x{parts['gpu']}"
        return InvalidInputError(f"`{name}` is not how hardware is written.", remedy=f"`{right}`")
    return None


def _is_known(name: str) -> bool:
    try:
        match_gpu(name)
    except UserError:
        return False
    return True
