"""How long each way of staging takes, and which one to take: pure arithmetic on measured rates."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from pydantic import Field

from tightfit.clusters.staging import CopyMethod
from tightfit.core.frozen import Frozen
from tightfit.core.units import MIB, render_bytes, render_seconds

BETTER_FRACTION = 0.9
"""Another way must beat all-read by a tenth: it is the simplest, and loses least to a slow node."""
FAN_OUT = 2
MIN_BLOCK_BYTES = MIB
MAX_BLOCK_BYTES = 16 * MIB
_MAX_BLOCKS = 2048
"""Aimed at: enough for a pipeline to fill, few enough for a short manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyLoad:
    """What has to be moved. Nodes that resume lack less than the whole."""

    num_nodes: int
    direct_bytes: int
    """The most that any one node lacks."""
    head_bytes: int
    """What the first node has to read from the source: 0 where it has a whole copy already."""
    relay_bytes: int
    """What at least one of the other nodes lacks."""
    block_bytes: int
    checked_bytes: int = 0
    """What each node reads back at the end."""


class CopyRates(Frozen):
    """Bytes per second. None: not measured, or not possible."""

    one_reader: float | None = None
    all_readers: float | None = None
    """Of the slowest node while all nodes read at once."""
    link: float | None = None
    """Of the slowest link from a node to the next, while all of them are in use."""
    check: float | None = Field(default=None, exclude=True)
    """Of the slowest node reading its copy back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodChoice:
    """What was decided and on what grounds."""

    how: CopyMethod
    seconds: dict[CopyMethod, float]
    """Predicted, of each way that is possible."""
    why: str


def choose_block_bytes(num_bytes: int) -> int:
    """A power of two, so that a model is some 2,000 blocks; within bounds."""
    wanted = MIN_BLOCK_BYTES
    while wanted < MAX_BLOCK_BYTES and wanted * _MAX_BLOCKS < num_bytes:
        wanted *= 2
    return wanted


def estimate_seconds(load: CopyLoad, rates: CopyRates) -> dict[CopyMethod, float]:
    """Of each way that the rates allow.

    A chain and a tree pass each block on as soon as they have it whole, so that the slowest
    stage sets the pace, and each step down adds the time of one block. A node of the tree sends
    everything twice over one link. Leaves out start-up, a few hundred milliseconds.
    """
    check = load.checked_bytes / rates.check if rates.check else 0.0
    reading = rates.one_reader if load.num_nodes == 1 else rates.all_readers
    found = {CopyMethod.ALL_READ: _divide(load.direct_bytes, reading)}
    if load.num_nodes > 1:
        found[CopyMethod.CHAIN] = _relay_seconds(load, rates, fan_out=1, depth=load.num_nodes - 1)
        fan_out = min(FAN_OUT, load.num_nodes - 1)
        depth = load.num_nodes.bit_length() - 1
        found[CopyMethod.TREE] = _relay_seconds(load, rates, fan_out=fan_out, depth=depth)
    return {how: seconds + check for how, seconds in found.items() if seconds < inf}


def choose_method(load: CopyLoad, rates: CopyRates) -> MethodChoice:
    """The fastest way, and in a sentence what makes it so."""
    seconds = estimate_seconds(load, rates)
    if not seconds:
        raise ValueError("no rate was measured")
    best = min(seconds, key=lambda how: (seconds[how], how is not CopyMethod.CHAIN))
    direct = seconds.get(CopyMethod.ALL_READ)
    if direct is not None and seconds[best] > BETTER_FRACTION * direct:
        best = CopyMethod.ALL_READ
    return MethodChoice(how=best, seconds=seconds, why=_explain(best, seconds, load, rates))


def _relay_seconds(load: CopyLoad, rates: CopyRates, *, fan_out: int, depth: int) -> float:
    read = _divide(load.head_bytes, rates.one_reader)
    send = _divide(load.relay_bytes, rates.link) * fan_out
    fill = _divide(load.block_bytes, rates.link) * fan_out * depth if load.relay_bytes else 0.0
    return max(read, send) + fill


def _divide(num_bytes: int, rate: float | None) -> float:
    if num_bytes == 0:
        return 0.0
    return num_bytes / rate if rate else inf


def _explain(
    best: CopyMethod, seconds: dict[CopyMethod, float], load: CopyLoad, rates: CopyRates
) -> str:
    one, every, link = (
        "an unknown rate" if rate is None else f"{render_bytes(rate)}/s"
        for rate in (rates.one_reader, rates.all_readers, rates.link)
    )
    if load.num_nodes == 1:
        return f"one node reads the source itself, at {one}"
    origin = f"one node alone reads {one}"
    if load.head_bytes == 0:
        origin = "the first node has a copy already"
    elif rates.all_readers is not None:
        origin += f" where all at once read {every} each"
    reason = {
        CopyMethod.ALL_READ: f"every node can read {every} from the source while all of them do",
        CopyMethod.CHAIN: f"{origin}, and each node passes it on at {link}",
        CopyMethod.TREE: f"{origin}, and the nodes pass it on to two others each at {link}",
    }[best]
    others = [
        f"{how.value} would take {render_seconds(value)}"
        for how, value in seconds.items()
        if how is not best
    ]
    return f"{reason}; {', '.join(others)}" if others else reason
