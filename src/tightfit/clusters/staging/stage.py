"""Stage a model on many nodes: inspect, measure rates, choose a method, copy, check, finish."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tightfit.clusters.staging.agent import Answer
from tightfit.clusters.staging.blocks import Layout, to_ranges
from tightfit.clusters.staging.cost import (
    CopyMethod,
    CopyRates,
    MethodChoice,
    choose_block_bytes,
    choose_method,
)
from tightfit.clusters.staging.nodes import StagingGroup, StagingNode
from tightfit.core.errors import CheckFailedError, NotFoundError, SetupError
from tightfit.core.frozen import Frozen
from tightfit.runtime.staged import Manifest, read_source


class StagedNode(Frozen):
    """One node at the end."""

    node: str
    host: str
    path: str
    state: str
    """`staged`, `already there`, `planned` (a dry run) or `lost`."""
    num_kept_bytes: int = 0
    """Found there from an earlier staging, read back and sound."""
    num_repaired_blocks: int = 0
    """Blocks found there whose contents had changed, fetched again."""
    why: str = ""
    """Of a node that was lost."""


class MeasuredRates(Frozen):
    """Bytes per second; None where it was not measured."""

    one_reader: float | None = None
    all_readers: float | None = None
    link: float | None = None


class StageResult(Frozen):
    """A staging from its decision to its end."""

    source: str
    num_files: int
    num_bytes: int
    block_bytes: int
    how: str | None
    """None where nothing had to be moved."""
    why: str
    rates: MeasuredRates
    predicted_seconds: dict[str, float]
    """Of each way that is possible, without the measuring."""
    measure_seconds: float = 0.0
    copy_seconds: float | None = None
    check_seconds: float | None = None
    num_rounds: int = 0
    is_dry: bool = False
    nodes: tuple[StagedNode, ...]

    @property
    def measured_seconds(self) -> float | None:
        """What the prediction is of: moving and checking."""
        return None if self.copy_seconds is None else self.copy_seconds + (self.check_seconds or 0)

    @property
    def lost(self) -> list[StagedNode]:
        return [node for node in self.nodes if node.state == "lost"]

    def find_error(self) -> SetupError | None:
        """The error to report where nodes were lost."""
        if not self.lost:
            return None
        return SetupError(
            f"{len(self.lost)} of {len(self.nodes)} nodes were lost and have no whole copy: "
            f"{', '.join(node.why or node.node for node in self.lost)}.",
            remedy="the same command goes on where it stopped, once they are back",
        )


# The rates that a choice rests on, measured on the nodes themselves in about three seconds.

READ_SECONDS = 1.0
LINK_SECONDS = 0.6
PROBED_FRACTION = 1 / 4
"""Of a node's missing blocks, at most, per measurement: a small model is not read twice over."""
UNEVEN_FRACTION = 0.5
"""Of the median: a rate below it may be the machine's doing and not the node's."""


def measure_rates(team: StagingGroup, *, check_rate: float | None) -> CopyRates:
    """One reader, all readers at different offsets, and every link of the chain at once.

    What is read is kept, so that reading it is not lost time.
    """
    head = team.members[0]
    one = _measure_reading(team, [head]).get(head.node)
    if len(team.members) == 1:
        return CopyRates(one_reader=one, all_readers=one, link=None, check=check_rate)
    everybody: dict[str, float] = {}
    if {member.node for member in team.members} <= team.readers:
        everybody = _measure_again_if_uneven(lambda: _measure_reading(team, list(team.members)))
    if one is not None:
        one = max(one, everybody.get(head.node, 0.0))  # alone it is no slower than in a crowd
    links = _measure_again_if_uneven(lambda: _measure_links(team))
    return CopyRates(
        one_reader=one,
        all_readers=min(everybody.values(), default=None),
        link=min(links.values()) if len(links) == len(team.members) - 1 else None,
        check=check_rate,
    )


def _measure_again_if_uneven(measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Rates by node. Where one lags far behind, once more: other work can only slow it down."""
    found = measure()
    if not found or min(found.values()) >= UNEVEN_FRACTION * median(found.values()):
        return found
    again = measure()
    return {node: max(rate, again.get(node, 0.0)) for node, rate in found.items()}


def _measure_reading(team: StagingGroup, members: list[StagingNode]) -> dict[str, float]:
    """Of each node that has something left to read."""
    lacking = [member for member in members if team.missing(member) and member.node in team.readers]
    most = max(1, int(team.layout.num_blocks * PROBED_FRACTION))
    step = team.layout.num_blocks // len(members)

    def arguments(member: StagingNode) -> dict[str, object]:
        return {
            "blocks": to_ranges(team.missing(member)),
            "first": members.index(member) * step,
            "seconds": READ_SECONDS,
            "most_blocks": most,
        }

    replies = team.ask("read", arguments, lacking)
    team.note(replies)
    return _list_rates(replies)


def _measure_links(team: StagingGroup) -> dict[str, float]:
    """Of each node but the first: how fast it is sent to by the one before."""
    children = team.wire_up(CopyMethod.CHAIN)
    nodes = [member.node for member in team.members]
    replies = team.ask(
        "probe",
        lambda member: {
            "takes": member.node != nodes[0],
            "send_to": children[member.node][0] if children[member.node] else None,
            "seconds": LINK_SECONDS,
        },
    )
    return _list_rates(replies)


def _list_rates(replies: dict[str, Answer]) -> dict[str, float]:
    return {
        node: answer["num_bytes"] / answer["seconds"]
        for node, answer in replies.items()
        if answer.get("num_bytes")
    }


# A model into the RAM disks of many nodes: look, measure, decide, copy, check, finish.

MAX_ROUNDS = 5
"""A lost node or a damaged block costs one more round; what fails so often is broken."""
MEASURED_FROM_BLOCKS = 16
"""A smaller model is there sooner than the rates are known."""
_TICK_SECONDS = 0.3
ProgressCallback = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRequest:
    """What to stage, where to, and how."""

    source: Path
    to: Path
    how: CopyMethod | None = None
    """None: measured and chosen."""
    leave_bytes: int | None = None
    verify: bool = False
    """Read a copy that is there back, too."""
    interface: str | None = None
    is_dry: bool = False
    announce: Callable[[MethodChoice, Manifest], None] | None = None
    """Called with the choice before anything is copied by it."""
    report: ProgressCallback | None = None


def describe_source(source: Path) -> Manifest:
    """The files to stage, in blocks of a size that suits them."""
    try:
        small = read_source(source, block_bytes=1)
    except OSError as error:
        raise NotFoundError(
            f"Cannot read {error.filename or source}: {error.strerror or error}.",
            remedy="name a model whose files are all there",
        ) from error
    return small.model_copy(update={"block_bytes": choose_block_bytes(small.num_bytes)})


class Stager:
    """One staging. `run` goes through it from top to bottom."""

    def __init__(self, request: StageRequest, members: Sequence[StagingNode]) -> None:
        self._request = request
        self._wanted = describe_source(request.source)
        self._all = list(members)
        self._team = StagingGroup(members, Layout(self._wanted), request.interface)
        self._looked: dict[str, Answer] = {}
        self._num_rounds = 0

    def run(self) -> StageResult:
        self._look()
        if self._team.is_filled:
            return self._tell(None, why="a whole copy is on every node already")
        self._team.order()
        began = time.monotonic()
        choice, rates = self._decide()
        measured = time.monotonic() - began
        if self._request.announce is not None:
            self._request.announce(choice, self._wanted)
        if self._request.is_dry:
            return self._tell(choice, why=choice.why, rates=rates, measure_seconds=measured)
        seconds = self._copy_and_check(choice.how)
        self._finish()
        return self._tell(
            choice, why=choice.why, rates=rates, measure_seconds=measured, seconds=seconds
        )

    def _look(self) -> None:
        """What each node has; refuses before a byte is copied where one has no room."""
        request = self._request
        looked = self._looked = self._team.ask(
            "look",
            lambda _: {
                "wanted": self._wanted.model_dump(mode="json"),
                "to": str(request.to),
                "leave_bytes": request.leave_bytes,
                "verify": request.verify,
                "is_dry": request.is_dry,
            },
        )
        short = [
            f"{node}: {reply['shortage']}" for node, reply in looked.items() if reply["shortage"]
        ]
        if short:
            raise SetupError(
                f"{request.to} has no room for {self._wanted.source}. {'; '.join(short)}.",
                remedy=f"tightfit stage --list --to {request.to} shows what lies there; --clean "
                "removes it, --to another place has more room, --leave says what the job needs",
            )
        self._team.note(looked)
        self._team.readers = {node for node, reply in looked.items() if reply["can_read"]}
        is_served = any(reply["is_whole"] for reply in looked.values())
        if not self._team.readers and not is_served:
            raise NotFoundError(
                f"No node sees the files of {self._wanted.source} as they are here.",
                remedy="put the model in a folder that the nodes share",
            )

    def _decide(self) -> tuple[MethodChoice, CopyRates]:
        team, asked = self._team, self._request.how
        nothing = CopyRates(one_reader=None, all_readers=None, link=None)
        can_all_read = {member.node for member in team.members} <= team.readers
        if asked is CopyMethod.ALL_READ and not can_all_read:
            blind = sorted({member.node for member in team.members} - team.readers)
            raise NotFoundError(
                f"{', '.join(blind)} cannot read {self._wanted.source}, or see it otherwise.",
                remedy="--how chain: only one node then reads it",
            )
        if asked is not None:
            return MethodChoice(
                how=asked, seconds={}, why=f"--how {asked.value} was asked for"
            ), nothing
        if team.layout.num_blocks < MEASURED_FROM_BLOCKS:
            how = CopyMethod.ALL_READ if can_all_read else CopyMethod.CHAIN
            why = "the model is so small that measuring would take longer than copying"
            return MethodChoice(how=how, seconds={}, why=why), nothing
        check_rate = min(reply["check_rate"] for reply in self._looked.values())
        rates = measure_rates(team, check_rate=check_rate)
        if rates.one_reader is None and rates.link is None:
            how = CopyMethod.ALL_READ if can_all_read else CopyMethod.CHAIN
            return MethodChoice(how=how, seconds={}, why="nothing could be measured"), rates
        return choose_method(team.measure_load(), rates), rates

    def _copy_and_check(self, how: CopyMethod) -> tuple[float, float]:
        """Rounds until every node that is left has every block, read back and equal to others'."""
        copying = checking = 0.0
        before = -1
        while self._num_rounds < MAX_ROUNDS:
            self._num_rounds += 1
            began = time.monotonic()
            self._copy(how)
            moved = time.monotonic()
            self._check()
            copying, checking = copying + moved - began, checking + time.monotonic() - moved
            if self._team.is_filled:
                return copying, checking
            have = sum(len(self._team.have[member.node]) for member in self._team.members)
            if have == before:
                break
            before = have
            self._team.order()
        raise CheckFailedError(
            f"After {self._num_rounds} rounds some blocks are still missing or differ.",
            remedy="start this again; where it fails once more, check the nodes' memory and disks",
        )

    def _copy(self, how: CopyMethod) -> None:
        team = self._team
        lacking = [member for member in team.members if team.missing(member)]
        with self._watched():
            if how is CopyMethod.ALL_READ or len(team.members) == 1:
                team.ask(
                    "read", lambda member: {"blocks": to_ranges(team.missing(member))}, lacking
                )
                return
            lacked = set().union(*(team.missing(member) for member in lacking))
            children = team.wire_up(how)
            first = team.members[0].node
            team.ask(
                "relay",
                lambda member: {
                    "takes": member.node != first,
                    "send_to": children[member.node],
                    "blocks": to_ranges(lacked) if member.node == first else None,
                },
            )

    def _check(self) -> None:
        """Each copy against its own records, then the nodes' records against each other."""
        replies = self._team.ask("check")
        self._team.note(replies)
        whole = {node: answer for node, answer in replies.items() if not answer["missing"]}
        if len({answer["root"] for answer in whole.values()}) < 2:
            return
        listed = self._team.ask(
            "check",
            lambda _: {"detail": True},
            [member for member in self._team.members if member.node in whole],
        )
        first, *others = listed
        for node in others:
            pairs = zip(listed[first]["digests"], listed[node]["digests"], strict=True)
            unlike = [index for index, (one, other) in enumerate(pairs) if one != other]
            if unlike:
                # One of the two read something wrong: both fetch it again.
                wrong = [m for m in self._team.members if m.node in (first, node)]
                self._drop(wrong, unlike)

    def _drop(self, members: Sequence[StagingNode], blocks: Sequence[int]) -> None:
        self._team.note(self._team.ask("drop", lambda _: {"blocks": to_ranges(blocks)}, members))

    def _finish(self) -> None:
        now = describe_source(self._request.source)
        if now != self._wanted:
            raise CheckFailedError(
                f"{self._wanted.source} was changed while it was copied; the copy is not used.",
                remedy="start this again: it copies the new files",
            )
        for node, reply in self._team.ask("finish").items():
            self._looked[node] = {**self._looked[node], **reply}

    def _watched(self) -> _ProgressThread:
        return _ProgressThread(self._request.report, self._team, self._wanted.num_bytes)

    def _tell(
        self,
        choice: MethodChoice | None,
        *,
        why: str,
        rates: CopyRates | None = None,
        measure_seconds: float = 0.0,
        seconds: tuple[float, float] | None = None,
    ) -> StageResult:
        wanted = self._wanted
        found = MeasuredRates()
        if rates is not None:
            found = MeasuredRates(
                one_reader=rates.one_reader, all_readers=rates.all_readers, link=rates.link
            )
        return StageResult(
            source=wanted.source,
            num_files=len(wanted.files),
            num_bytes=wanted.num_bytes,
            block_bytes=wanted.block_bytes,
            how=None if choice is None else choice.how.value,
            why=why,
            rates=found,
            predicted_seconds={}
            if choice is None
            else {how.value: value for how, value in choice.seconds.items()},
            measure_seconds=measure_seconds,
            copy_seconds=None if seconds is None else seconds[0],
            check_seconds=None if seconds is None else seconds[1],
            num_rounds=self._num_rounds,
            is_dry=self._request.is_dry,
            nodes=tuple(self._report_node(member.node) for member in self._all),
        )

    def _report_node(self, node: str) -> StagedNode:
        reply: dict[str, Any] = self._looked.get(node, {})
        state = "planned" if self._request.is_dry else "staged"
        if reply.get("is_whole"):
            state = "already there"
        if node in self._team.lost:
            state = "lost"
        kept = self._team.layout.measure(
            index for first, end in reply.get("have", ()) for index in range(first, end)
        )
        return StagedNode(
            node=node,
            host=reply.get("host", node),
            path=reply.get("path", ""),
            state=state,
            num_kept_bytes=kept,
            num_repaired_blocks=reply.get("bad", 0),
            why=self._team.lost.get(node, ""),
        )


class _ProgressThread:
    """Tells how far the nodes are while a round is under way."""

    def __init__(self, report: ProgressCallback | None, team: StagingGroup, num_bytes: int) -> None:
        self._report = report
        self._team = team
        self._num_bytes = num_bytes
        self._pool = ThreadPoolExecutor(1)
        self._is_over = False

    def __enter__(self) -> None:
        if self._report is not None:
            self._pool.submit(self._run)

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._pool.shutdown()

    def _run(self) -> None:
        assert self._report is not None
        while not self._is_over:
            members = list(self._team.members)
            done = sum(member.num_stored_bytes for member in members)
            self._report("copying", done, self._num_bytes * len(members))
            time.sleep(_TICK_SECONDS)
