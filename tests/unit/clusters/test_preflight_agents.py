"""Agents on this machine: they answer, stay silent, or never start; nothing waits for ever."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tightfit.clusters import agents
from tightfit.clusters.preflight import gather as crews
from tightfit.clusters.preflight.gather import AGENT, AgentCommand, AgentPool, make_agent_command
from tightfit.clusters.preflight.observations import PROTOCOL, ConnectionOutcome, NodeFacts
from tightfit.clusters.site import Site
from tightfit.core.import_path import module_words

HERE = "env TIGHTFIT_TEST_NODE={node}"
REAL = (sys.executable, *module_words(AGENT))


@contextmanager
def crew_of(
    *nodes: str, argv: tuple[str, ...] = REAL, seconds: float = 60.0
) -> Iterator[AgentPool]:
    pool = AgentPool(nodes)
    try:
        pool.start(AgentCommand(prefix=HERE, argv=argv, env={}), seconds)
        yield pool
    finally:
        pool.end()


def ask_until(ask: Callable[[], Any], is_good: Callable[[Any], bool]) -> Any:
    """A good answer, or the last one: while a process pauses, what is sent lies in the kernel."""
    end = time.monotonic() + 60
    while not is_good(reported := ask()) and time.monotonic() < end:
        time.sleep(0.1)
    return reported


def test_agents_tell_what_their_nodes_are() -> None:
    with crew_of("a", "b") as pool:
        reported = pool.ask("facts", 60.0)

    assert set(reported) == {"a", "b"}
    facts = NodeFacts.model_validate(reported["a"])
    assert facts.python == ".".join(map(str, sys.version_info[:3]))
    assert facts.packages["tightfit"]
    assert {"lo"} <= {device.name for device in facts.devices}
    assert "127.0.0.1/8" in {text for device in facts.devices for text in device.addresses}
    assert facts.memory_bytes > facts.free_memory_bytes > 0


def test_doors_are_found_open_refused_and_taken() -> None:
    with crew_of("a", "b") as pool:
        ports = pool.ask("open", 60.0, {"a": {"rendezvous_port": None}})["a"]
        taken = pool.ask("open", 60.0, {"b": {"rendezvous_port": ports["tcp_port"]}})["b"]
        open_, closed = (
            {"node": "a", "address": "127.0.0.1", "port": port, "is_ours": True}
            for port in (ports["tcp_port"], 1)
        )
        told = pool.ask("connect", 60.0, {"b": {"targets": [open_, closed], "seconds": 48.0}})["b"]
        stream = {"node": "a", "address": "127.0.0.1", "port": ports["tcp_port"], "seconds": 0.3}
        sent = ask_until(
            lambda: pool.ask("stream", 60.0, {"b": stream})["b"],
            lambda told: bool(told["bytes_per_second"] > 1e6),
        )

    assert [probe["outcome"] for probe in told] == [
        ConnectionOutcome.OK.value,
        ConnectionOutcome.REFUSED.value,
    ]
    assert 0 < told[0]["rtt_seconds"] < 5  # the shortest of several
    assert "taken by" in taken["rendezvous_error"]
    assert sent["bytes_per_second"] > 1e6


def test_datagrams_are_counted_by_sender() -> None:
    with crew_of("a", "b") as pool:
        ports = pool.ask("open", 60.0, {"a": {"rendezvous_port": None}})["a"]
        target = {"address": "127.0.0.1", "port": ports["udp_port"], "large_bytes": 1472}
        spray = {"targets": [target], "sender": 1, "num_small": 50, "num_large": 3}
        pool.ask("datagrams", 60.0, {"b": spray})
        sent = [
            {"sender": 1, "num_small": 50, "num_large": 3, "num_dropped": 0},
            {"sender": 2, "num_small": 0, "num_large": 0, "num_dropped": 0},
        ]
        asked = {"a": {"senders": [1, 2]}}
        received = ask_until(
            lambda: pool.ask("received", 60.0, asked), lambda told: told["a"] == sent
        )

    assert received["a"] == sent


def test_the_folder_is_raced_for(tmp_path: Path) -> None:
    place = str(tmp_path / "probe")

    def step(name: str) -> dict[str, object]:
        return {"step": name, "folder": place, "nonce": "xyz", "names": [], "seconds": 50.0}

    with crew_of("a", "b") as pool:
        assert pool.ask("folder", 60.0, {"a": step("plant")})["a"]["is_done"]
        assert pool.ask("folder", 60.0, {"b": step("find")})["b"]["is_done"]
        raced = pool.ask("folder", 60.0, {"a": step("race"), "b": step("race")})

    won = [name for reported in raced.values() for name in reported["won"]]
    assert sorted(won) == ["exclusive", "linked"]


def test_a_login_shell_may_talk_first() -> None:
    noise = ("sh", "-c", 'echo "Welcome to node 7"; echo "{}"; exec "$@"', "sh", *REAL)
    with crew_of("a", argv=noise) as pool:
        assert pool.present == ["a"]


def find_error(script: str, *, seconds: float) -> str:
    """Why an agent does not run that was given so long to start."""
    begin = time.monotonic()
    with crew_of("a", argv=("sh", "-c", script), seconds=seconds) as pool:
        assert pool.ask("facts", 1.0) == {}

    error = pool.absent["a"]
    assert time.monotonic() - begin < 120
    return error


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'Permission denied (publickey).' >&2; exit 255", "Permission denied (publickey)."),
        ("exit 3", "exit code 3"),
    ],
)
def test_an_agent_that_ends_at_once(
    script: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both end by themselves; a machine that pauses takes longer to say so.
    monkeypatch.setattr(crews, "END_SECONDS", 60.0)
    monkeypatch.setattr(agents, "FINAL_OUTPUT_SECONDS", 60.0)

    assert said in find_error(script, seconds=60.0)


def test_an_agent_of_another_version() -> None:
    script = 'echo \'{"hello": 1, "protocol": 99, "version": "9.9"}\'; sleep 600'

    assert "tightfit 9.9" in find_error(script, seconds=60.0)


def test_an_agent_that_never_greets() -> None:
    for seconds in (2.0, 10.0, 60.0):  # more where it was too slow to say even that it waits
        error = find_error("echo waiting >&2; sleep 600", seconds=seconds)
        if "waiting" in error:
            break

    assert error == f"no answer in {seconds:.0f} s: waiting"


def test_a_question_without_an_answer_is_bounded() -> None:
    hello = json.dumps({"hello": 1, "protocol": PROTOCOL, "version": "x"})
    begin = time.monotonic()
    with crew_of("a", argv=("sh", "-c", f"echo '{hello}'; sleep 600")) as pool:
        assert pool.ask("facts", 0.5) == {}
        assert pool.silent[("a", "facts")] == "no answer in 0 s"
    assert time.monotonic() - begin < 120


def test_an_unknown_question_is_a_error_not_a_death() -> None:
    with crew_of("a") as pool:
        assert pool.ask("nonsense", 60.0) == {}
        assert "no question is named nonsense" in pool.silent[("a", "nonsense")]
        assert pool.ask("clock", 60.0)["a"] == pytest.approx(time.time(), abs=60)


def test_the_site_says_how_an_agent_starts() -> None:
    plain = make_agent_command(Site(), "ssh {node}")
    assert plain.argv[-len(REAL) :] == REAL
    assert plain.argv[:3] == ("env", "-u", "MASTER_ADDR")
    site = Site(setup=("module load cuda",), python="/opt/py", environment={"A": "1"})
    start = make_agent_command(site, "ssh {node}")
    assert start.argv[-1] == f"module load cuda\nexec {shlex.join(('/opt/py', *REAL[1:]))}"
    assert start.env == {"A": "1"}
    boxed = make_agent_command(Site(container="image.sqsh"), "srun -w {node}")
    assert boxed.prefix == "srun -w {node} --container-image=image.sqsh"
    words = make_agent_command(
        Site(container="apptainer exec --nv x.sif", python="python3"), "ssh {node}"
    )
    assert words.argv[: -len(REAL)][-4:] == ("apptainer", "exec", "--nv", "x.sif")
