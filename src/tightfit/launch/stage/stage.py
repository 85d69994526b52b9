"""A model into the RAM disks of many nodes: look, measure, decide, copy, check, finish."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightfit.core.errors import CheckFailedError, EnvironmentFaultError, NotFoundError
from tightfit.launch.stage.agent import Answer
from tightfit.launch.stage.blocks import Layout, to_ranges
from tightfit.launch.stage.cost import Choice, How, Rates, choose_block_bytes, choose_how
from tightfit.launch.stage.crew import Member
from tightfit.launch.stage.measure import measure_rates
from tightfit.launch.stage.result import MeasuredRates, NodeReport, Staging
from tightfit.launch.stage.team import Team
from tightfit.runtime.staged import Manifest, read_source

MAX_ROUNDS = 5
"""A lost node or a damaged block costs one more round; what fails so often is broken."""
MEASURED_FROM_BLOCKS = 16
"""A smaller model is there sooner than the rates are known."""
_TICK_SECONDS = 0.3
Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRequest:
    """What to stage, where to, and how."""

    source: Path
    to: Path
    how: How | None = None
    """None: measured and chosen."""
    leave_bytes: int | None = None
    verify: bool = False
    """Read a copy that is there back, too."""
    interface: str | None = None
    is_dry: bool = False
    announce: Callable[[Choice, Manifest], None] | None = None
    """Called with the choice before anything is copied by it."""
    report: Report | None = None


def describe_source(source: Path) -> Manifest:
    """The files to stage, in blocks of a size that suits them."""
    try:
        small = read_source(source, block_bytes=1)
    except OSError as fault:
        raise NotFoundError(
            f"Cannot read {fault.filename or source}: {fault.strerror or fault}.",
            remedy="name a model whose files are all there",
        ) from fault
    return small.model_copy(update={"block_bytes": choose_block_bytes(small.num_bytes)})


class Stager:
    """One staging. `run` goes through it from top to bottom."""

    def __init__(self, request: StageRequest, members: Sequence[Member]) -> None:
        self._request = request
        self._wanted = describe_source(request.source)
        self._all = list(members)
        self._team = Team(members, Layout(self._wanted), request.interface)
        self._looked: dict[str, Answer] = {}
        self._num_rounds = 0

    def run(self) -> Staging:
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
        short = [f"{node}: {told['shortage']}" for node, told in looked.items() if told["shortage"]]
        if short:
            raise EnvironmentFaultError(
                f"{request.to} has no room for {self._wanted.source}. {'; '.join(short)}.",
                remedy=f"tightfit stage --list --to {request.to} shows what lies there; --clean "
                "removes it, --to another place has more room, --leave says what the job needs",
            )
        self._team.note(looked)
        self._team.readers = {node for node, told in looked.items() if told["can_read"]}
        is_served = any(told["is_whole"] for told in looked.values())
        if not self._team.readers and not is_served:
            raise NotFoundError(
                f"No node sees the files of {self._wanted.source} as they are here.",
                remedy="put the model in a folder that the nodes share",
            )

    def _decide(self) -> tuple[Choice, Rates]:
        team, asked = self._team, self._request.how
        nothing = Rates(one_reader=None, all_readers=None, link=None)
        can_all_read = {member.node for member in team.members} <= team.readers
        if asked is How.ALL_READ and not can_all_read:
            blind = sorted({member.node for member in team.members} - team.readers)
            raise NotFoundError(
                f"{', '.join(blind)} cannot read {self._wanted.source}, or see it otherwise.",
                remedy="--how chain: only one node then reads it",
            )
        if asked is not None:
            return Choice(how=asked, seconds={}, why=f"--how {asked.value} was asked for"), nothing
        if team.layout.num_blocks < MEASURED_FROM_BLOCKS:
            how = How.ALL_READ if can_all_read else How.CHAIN
            why = "the model is so small that measuring would take longer than copying"
            return Choice(how=how, seconds={}, why=why), nothing
        check_rate = min(told["check_rate"] for told in self._looked.values())
        rates = measure_rates(team, check_rate=check_rate)
        if rates.one_reader is None and rates.link is None:
            how = How.ALL_READ if can_all_read else How.CHAIN
            return Choice(how=how, seconds={}, why="nothing could be measured"), rates
        return choose_how(team.measure_load(), rates), rates

    def _copy_and_check(self, how: How) -> tuple[float, float]:
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

    def _copy(self, how: How) -> None:
        team = self._team
        lacking = [member for member in team.members if team.missing(member)]
        with self._watched():
            if how is How.ALL_READ or len(team.members) == 1:
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
        told = self._team.ask("check")
        self._team.note(told)
        whole = {node: answer for node, answer in told.items() if not answer["missing"]}
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

    def _drop(self, members: Sequence[Member], blocks: Sequence[int]) -> None:
        self._team.note(self._team.ask("drop", lambda _: {"blocks": to_ranges(blocks)}, members))

    def _finish(self) -> None:
        now = describe_source(self._request.source)
        if now != self._wanted:
            raise CheckFailedError(
                f"{self._wanted.source} was changed while it was copied; the copy is not used.",
                remedy="start this again: it copies the new files",
            )
        for node, told in self._team.ask("finish").items():
            self._looked[node] = {**self._looked[node], **told}

    def _watched(self) -> _Watch:
        return _Watch(self._request.report, self._team, self._wanted.num_bytes)

    def _tell(
        self,
        choice: Choice | None,
        *,
        why: str,
        rates: Rates | None = None,
        measure_seconds: float = 0.0,
        seconds: tuple[float, float] | None = None,
    ) -> Staging:
        wanted = self._wanted
        found = MeasuredRates()
        if rates is not None:
            found = MeasuredRates(
                one_reader=rates.one_reader, all_readers=rates.all_readers, link=rates.link
            )
        return Staging(
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

    def _report_node(self, node: str) -> NodeReport:
        told: dict[str, Any] = self._looked.get(node, {})
        state = "planned" if self._request.is_dry else "staged"
        if told.get("is_whole"):
            state = "already there"
        if node in self._team.lost:
            state = "lost"
        kept = self._team.layout.measure(
            index for first, end in told.get("have", ()) for index in range(first, end)
        )
        return NodeReport(
            node=node,
            host=told.get("host", node),
            path=told.get("path", ""),
            state=state,
            num_kept_bytes=kept,
            num_repaired_blocks=told.get("bad", 0),
            why=self._team.lost.get(node, ""),
        )


class _Watch:
    """Tells how far the nodes are while a round is under way."""

    def __init__(self, report: Report | None, team: Team, num_bytes: int) -> None:
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
