"""Stage a model on many nodes: inspect, measure rates, choose a method, copy, check, finish."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tightfit.clusters.site import Site
from tightfit.clusters.staging import CopyMethod
from tightfit.clusters.staging.agent import Answer
from tightfit.clusters.staging.cost import (
    CopyRates,
    MethodChoice,
    choose_block_bytes,
    choose_method,
)
from tightfit.clusters.staging.nodes import StagingGroup, StagingNode
from tightfit.clusters.staging.store import Layout, from_ranges, to_ranges
from tightfit.core.errors import CheckFailedError, NotFoundError, SetupError, UsageError
from tightfit.core.frozen import Frozen
from tightfit.runtime.model_files import find_artefact, find_gguf
from tightfit.runtime.staged import RAM_DISK, VARIABLE, Manifest, read_source


def locate_source(name: str) -> Path:
    """The folder or GGUF file that a model's name means; of an adapter the model it needs."""
    gguf = find_gguf(Path(name).expanduser())
    if gguf is not None:
        return gguf
    artefact = find_artefact(name)
    return artefact.base or artefact.path


def choose_target(stated: str | None, site: Site, environ: Mapping[str, str]) -> Path:
    """--to, TIGHTFIT_STAGE's first, the site's, or the RAM disk."""
    named = environ.get(VARIABLE, "").split(os.pathsep)[0].strip()
    text = stated or (named if named.lower() != "none" else "") or site.stage_to or str(RAM_DISK)
    path = Path(text).expanduser()
    if not path.is_absolute():
        raise UsageError(
            f"`--to {text}` is not the same folder on every node.",
            remedy="--to with its whole path, like /dev/shm",
        )
    return path


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


class StageResult(Frozen):
    """A staging from its decision to its end."""

    source: str
    num_files: int
    num_bytes: int
    block_bytes: int
    how: str | None
    """None where nothing had to be moved."""
    why: str
    rates: CopyRates
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
    if team.can_all_read:
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
    """Rates by node. If one lags far behind, once more: other work can only slow it down."""
    found = measure()
    if not found or min(found.values()) >= UNEVEN_FRACTION * median(found.values()):
        return found
    again = measure()
    return {node: max(rate, again.get(node, 0.0)) for node, rate in found.items()}


def _measure_reading(team: StagingGroup, members: list[StagingNode]) -> dict[str, float]:
    """Of each node that has something left to read."""
    step = team.layout.num_blocks // len(members)
    replies = team.ask(
        "read",
        lambda member: {
            "blocks": to_ranges(team.missing(member)),
            "first": members.index(member) * step,
            "seconds": READ_SECONDS,
            "most_blocks": max(1, int(team.layout.num_blocks * PROBED_FRACTION)),
        },
        [member for member in members if team.missing(member) and member.node in team.readers],
    )
    team.note(replies)
    return _list_rates(replies)


def _measure_links(team: StagingGroup) -> dict[str, float]:
    """Of each node but the first: how fast the one before sends to it."""
    children = team.wire_up(CopyMethod.CHAIN)
    first = team.members[0].node
    replies = team.ask(
        "probe",
        lambda member: {
            "takes": member.node != first,
            "send_to": next(iter(children[member.node]), None),
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


# The staging itself.

MAX_ROUNDS = 5
"""A lost node or a damaged block costs one more round; what fails so often is broken."""
MEASURED_FROM_BLOCKS = 16
"""A smaller model is copied sooner than the rates are known."""
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


class Stager:
    """One staging. `run` goes through it from top to bottom."""

    def __init__(self, request: StageRequest, members: Sequence[StagingNode]) -> None:
        self._request = request
        self._wanted = describe_source(request.source)
        self._all = list(members)
        self._team = StagingGroup(members, Layout(self._wanted), request.interface)
        self._looked: dict[str, Answer] = {}
        self._rates = CopyRates()
        self._num_rounds = 0

    def run(self) -> StageResult:
        self._look()
        if self._team.is_filled:
            is_published = all(reply["is_whole"] for reply in self._looked.values())
            if not is_published and not self._request.is_dry:  # the one before was killed
                self._finish()
            return self._make_result(None)
        self._team.order()
        began = time.monotonic()
        choice = self._decide()
        measured = time.monotonic() - began
        if self._request.announce is not None:
            self._request.announce(choice, self._wanted)
        if self._request.is_dry:
            return self._make_result(choice, measure_seconds=measured)
        copying, checking = self._copy_and_check(choice.how)
        self._finish()
        return self._make_result(
            choice, measure_seconds=measured, copy_seconds=copying, check_seconds=checking
        )

    def _look(self) -> None:
        """What each node has; refuses before a byte is copied if one has no room."""
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
        if not self._team.readers and not any(reply["is_whole"] for reply in looked.values()):
            raise NotFoundError(
                f"No node sees the files of {self._wanted.source} as they are here.",
                remedy="put the model in a folder that the nodes share",
            )

    def _decide(self) -> MethodChoice:
        team, asked = self._team, self._request.how
        if asked is CopyMethod.ALL_READ and not team.can_all_read:
            blind = sorted({member.node for member in team.members} - team.readers)
            raise NotFoundError(
                f"{', '.join(blind)} cannot read {self._wanted.source}, or see it otherwise.",
                remedy="--how chain: only one node then reads it",
            )
        if asked is not None:
            return MethodChoice(how=asked, seconds={}, why=f"--how {asked.value} was asked for")
        simplest = CopyMethod.ALL_READ if team.can_all_read else CopyMethod.CHAIN
        if team.layout.num_blocks < MEASURED_FROM_BLOCKS:
            why = "the model is so small that measuring would take longer than copying"
            return MethodChoice(how=simplest, seconds={}, why=why)
        check_rate = min(reply["check_rate"] for reply in self._looked.values())
        self._rates = measure_rates(team, check_rate=check_rate)
        if self._rates.one_reader is None and self._rates.link is None:
            return MethodChoice(how=simplest, seconds={}, why="nothing could be measured")
        return choose_method(team.measure_load(), self._rates)

    def _copy_and_check(self, how: CopyMethod) -> tuple[float, float]:
        """Rounds until every node that is left has every block, read back and equal to others'."""
        team = self._team
        copying = checking = 0.0
        before = -1
        while self._num_rounds < MAX_ROUNDS:
            self._num_rounds += 1
            began = time.monotonic()
            with _report_progress(self._request.report, team, self._wanted.num_bytes):
                self._copy(how)
            moved = time.monotonic()
            self._check()
            copying, checking = copying + moved - began, checking + time.monotonic() - moved
            if team.is_filled:
                return copying, checking
            have = sum(len(team.have[member.node]) for member in team.members)
            if have == before:
                break
            before = have
            team.order()
        raise CheckFailedError(
            f"After {self._num_rounds} rounds some blocks are still missing or differ.",
            remedy="start this again; where it fails once more, check the nodes' memory and disks",
        )

    def _copy(self, how: CopyMethod) -> None:
        team = self._team
        lacking = [member for member in team.members if team.missing(member)]
        if how is CopyMethod.ALL_READ or len(team.members) == 1:
            team.ask("read", lambda member: {"blocks": to_ranges(team.missing(member))}, lacking)
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
        team = self._team
        replies = team.ask("check")
        team.note(replies)
        whole = {node: answer for node, answer in replies.items() if not answer["missing"]}
        if len({answer["root"] for answer in whole.values()}) < 2:
            return
        members = {member.node: member for member in team.members}
        listed = team.ask("check", lambda _: {"detail": True}, [members[node] for node in whole])
        first, *others = listed
        for node in others:
            pairs = zip(listed[first]["digests"], listed[node]["digests"], strict=True)
            unlike = [index for index, (one, other) in enumerate(pairs) if one != other]
            if unlike:
                # One of the two read something wrong: both fetch it again.
                self._drop([members[first], members[node]], unlike)

    def _drop(self, members: Sequence[StagingNode], blocks: Sequence[int]) -> None:
        self._team.note(self._team.ask("drop", lambda _: {"blocks": to_ranges(blocks)}, members))

    def _finish(self) -> None:
        if describe_source(self._request.source) != self._wanted:
            raise CheckFailedError(
                f"{self._wanted.source} was changed while it was copied; the copy is not used.",
                remedy="start this again: it copies the new files",
            )
        for node, reply in self._team.ask("finish").items():
            self._looked[node] = {**self._looked[node], **reply}

    def _make_result(
        self,
        choice: MethodChoice | None,
        *,
        measure_seconds: float = 0.0,
        copy_seconds: float | None = None,
        check_seconds: float | None = None,
    ) -> StageResult:
        seconds = choice.seconds if choice else {}
        return StageResult(
            source=self._wanted.source,
            num_files=len(self._wanted.files),
            num_bytes=self._wanted.num_bytes,
            block_bytes=self._wanted.block_bytes,
            how=choice.how.value if choice else None,
            why=choice.why if choice else "a whole copy is on every node already",
            rates=self._rates,
            predicted_seconds={how.value: value for how, value in seconds.items()},
            measure_seconds=measure_seconds,
            copy_seconds=copy_seconds,
            check_seconds=check_seconds,
            num_rounds=self._num_rounds,
            is_dry=self._request.is_dry,
            nodes=tuple(self._report_node(member.node) for member in self._all),
        )

    def _report_node(self, node: str) -> StagedNode:
        reply = self._looked.get(node, {})
        state = "planned" if self._request.is_dry else "staged"
        if reply.get("is_whole"):
            state = "already there"
        if node in self._team.lost:
            state = "lost"
        return StagedNode(
            node=node,
            host=reply.get("host", node),
            path=reply.get("path", ""),
            state=state,
            num_kept_bytes=self._team.layout.measure(from_ranges(reply.get("have", []))),
            num_repaired_blocks=reply.get("bad", 0),
            why=self._team.lost.get(node, ""),
        )


@contextmanager
def _report_progress(
    report: ProgressCallback | None, team: StagingGroup, num_bytes: int
) -> Iterator[None]:
    """Report how far the nodes are, a few times a second, inside the block."""
    is_over = threading.Event()

    def run() -> None:
        assert report is not None
        while not is_over.is_set():
            members = list(team.members)
            done = sum(member.num_stored_bytes for member in members)
            report("copying", done, num_bytes * len(members))
            is_over.wait(_TICK_SECONDS)

    thread = threading.Thread(target=run, daemon=True)
    if report is not None:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        if report is not None:
            thread.join()
