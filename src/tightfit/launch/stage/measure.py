"""The rates that a choice rests on, measured on the nodes themselves in about three seconds."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from tightfit.launch.stage.agent import Answer
from tightfit.launch.stage.blocks import to_ranges
from tightfit.launch.stage.cost import How, Rates
from tightfit.launch.stage.crew import Member
from tightfit.launch.stage.team import Team

READ_SECONDS = 1.0
LINK_SECONDS = 0.6
PROBED_FRACTION = 1 / 4
"""Of a node's missing blocks, at most, per measurement: a small model is not read twice over."""
UNEVEN_FRACTION = 0.5
"""Of the median: a rate below it may be the machine's doing and not the node's."""


def measure_rates(team: Team, *, check_rate: float | None) -> Rates:
    """One reader, all readers at different offsets, and every link of the chain at once.

    What is read is kept, so that reading it is not lost time.
    """
    head = team.members[0]
    one = _measure_reading(team, [head]).get(head.node)
    if len(team.members) == 1:
        return Rates(one_reader=one, all_readers=one, link=None, check=check_rate)
    everybody: dict[str, float] = {}
    if {member.node for member in team.members} <= team.readers:
        everybody = _settle(lambda: _measure_reading(team, list(team.members)))
    if one is not None:
        one = max(one, everybody.get(head.node, 0.0))  # alone it is no slower than in a crowd
    links = _settle(lambda: _measure_links(team))
    return Rates(
        one_reader=one,
        all_readers=min(everybody.values(), default=None),
        link=min(links.values()) if len(links) == len(team.members) - 1 else None,
        check=check_rate,
    )


def _settle(measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Rates by node. Where one lags far behind, once more: other work can only slow it down."""
    found = measure()
    if not found or min(found.values()) >= UNEVEN_FRACTION * median(found.values()):
        return found
    again = measure()
    return {node: max(rate, again.get(node, 0.0)) for node, rate in found.items()}


def _measure_reading(team: Team, members: list[Member]) -> dict[str, float]:
    """Of each node that has something left to read."""
    lacking = [member for member in members if team.missing(member) and member.node in team.readers]
    most = max(1, int(team.layout.num_blocks * PROBED_FRACTION))
    step = team.layout.num_blocks // len(members)

    def arguments(member: Member) -> dict[str, object]:
        return {
            "blocks": to_ranges(team.missing(member)),
            "first": members.index(member) * step,
            "seconds": READ_SECONDS,
            "most_blocks": most,
        }

    told = team.ask("read", arguments, lacking)
    team.note(told)
    return _list_rates(told)


def _measure_links(team: Team) -> dict[str, float]:
    """Of each node but the first: how fast it is sent to by the one before."""
    children = team.wire_up(How.CHAIN)
    nodes = [member.node for member in team.members]
    told = team.ask(
        "probe",
        lambda member: {
            "takes": member.node != nodes[0],
            "send_to": children[member.node][0] if children[member.node] else None,
            "seconds": LINK_SECONDS,
        },
    )
    return _list_rates(told)


def _list_rates(told: dict[str, Answer]) -> dict[str, float]:
    return {
        node: answer["num_bytes"] / answer["seconds"]
        for node, answer in told.items()
        if answer.get("num_bytes")
    }
