"""Agents on this machine: they answer, stay silent, or never start; nothing waits for ever."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tightfit.launch.preflight.crew import AGENT, Crew, SilentAgentError, Start
from tightfit.launch.preflight.messages import Facts, Outcome
from tightfit.launch.preflight.run import plan_start
from tightfit.launch.site import Site

HERE = "env TIGHTFIT_TEST_NODE={node}"
REAL = (sys.executable, "-m", AGENT)


@contextmanager
def crew_of(*nodes: str, argv: tuple[str, ...] = REAL, seconds: float = 60.0) -> Iterator[Crew]:
    crew = Crew(nodes)
    try:
        crew.start(Start(prefix=HERE, argv=argv, env={}), seconds)
        yield crew
    finally:
        crew.end()


def test_agents_tell_what_their_nodes_are() -> None:
    with crew_of("a", "b") as crew:
        told = crew.ask("facts", 30.0)

    assert set(told) == {"a", "b"}
    facts = Facts.model_validate(told["a"])
    assert facts.python == ".".join(map(str, sys.version_info[:3]))
    assert facts.packages["tightfit"]
    assert {"lo"} <= {device.name for device in facts.devices}
    assert "127.0.0.1/8" in {text for device in facts.devices for text in device.addresses}
    assert facts.memory_bytes > facts.free_memory_bytes > 0


def test_doors_are_found_open_refused_and_taken() -> None:
    with crew_of("a", "b") as crew:
        doors = crew.ask("open", 10.0, {"a": {"port": None}})["a"]
        taken = crew.ask("open", 10.0, {"b": {"port": doors["tcp_port"]}})["b"]
        open_, closed = (
            {"node": "a", "address": "127.0.0.1", "port": port, "is_ours": True}
            for port in (doors["tcp_port"], 1)
        )
        told = crew.ask("knock", 10.0, {"b": {"targets": [open_, closed], "seconds": 8.0}})["b"]
        stream = {"node": "a", "address": "127.0.0.1", "port": doors["tcp_port"], "seconds": 0.3}
        sent = crew.ask("stream", 10.0, {"b": stream})["b"]

    assert [knock["outcome"] for knock in told] == [Outcome.OK.value, Outcome.REFUSED.value]
    assert 0 < told[0]["rtt_seconds"] < 1
    assert "taken by" in taken["rendezvous_fault"]
    assert sent["bytes_per_second"] > 1e6


def test_datagrams_are_counted_by_sender() -> None:
    with crew_of("a", "b") as crew:
        doors = crew.ask("open", 10.0, {"a": {"port": None}})["a"]
        target = {"address": "127.0.0.1", "port": doors["udp_port"], "large_bytes": 1472}
        spray = {"targets": [target], "sender": 1, "num_small": 50, "num_large": 3}
        crew.ask("spray", 10.0, {"b": spray})
        time.sleep(0.2)
        heard = crew.ask("heard", 10.0)

    assert heard["a"] == [{"sender": 1, "num_small": 50, "num_large": 3}]
    assert heard["b"] == []


def test_the_folder_is_raced_for(tmp_path: Path) -> None:
    place = str(tmp_path / "probe")

    def step(name: str, **given: object) -> dict[str, object]:
        return {"step": name, "place": place, "given": {"nonce": "xyz", **given}}

    with crew_of("a", "b") as crew:
        assert crew.ask("folder", 10.0, {"a": step("plant")})["a"]["is_done"]
        assert crew.ask("folder", 10.0, {"b": step("find", seconds=5.0)})["b"]["is_done"]
        raced = crew.ask("folder", 10.0, {"a": step("race"), "b": step("race")})

    won = [name for told in raced.values() for name in told["won"]]
    assert sorted(won) == ["exclusive", "linked"]


def test_a_login_shell_may_talk_first() -> None:
    noise = ("sh", "-c", 'echo "Welcome to node 7"; echo "{}"; exec "$@"', "sh", *REAL)
    with crew_of("a", argv=noise) as crew:
        assert crew.present == ["a"]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'Permission denied (publickey).' >&2; exit 255", "Permission denied (publickey)."),
        ("exit 3", "exit code 3"),
        ("echo waiting >&2; sleep 30", "no answer in 2 s: waiting"),
        ('echo \'{"hello": 1, "protocol": 99, "version": "9.9"}\'; sleep 30', "tightfit 9.9"),
    ],
)
def test_an_agent_that_does_not_start(script: str, said: str) -> None:
    begin = time.monotonic()
    with crew_of("a", argv=("sh", "-c", script), seconds=2.0) as crew:
        fault = crew.agents["a"].fault
        with pytest.raises(SilentAgentError):
            crew.agents["a"].ask("facts", 1.0, {})

    assert fault is not None
    assert said in fault
    assert time.monotonic() - begin < 20


def test_a_question_without_an_answer_is_bounded() -> None:
    hello = '{"hello": 1, "protocol": 1, "version": "x"}'
    begin = time.monotonic()
    with crew_of("a", argv=("sh", "-c", f"echo '{hello}'; sleep 60")) as crew:
        assert crew.ask("facts", 0.5) == {}
        assert crew.silent[("a", "facts")] == "no answer in 0 s"
    assert time.monotonic() - begin < 20


def test_an_unknown_question_is_a_fault_not_a_death() -> None:
    with crew_of("a") as crew:
        assert crew.ask("nonsense", 10.0) == {}
        assert "no question is named nonsense" in crew.silent[("a", "nonsense")]
        assert crew.ask("clock", 10.0)["a"] == pytest.approx(time.time(), abs=30)


def test_the_site_says_how_an_agent_starts() -> None:
    plain = plan_start(Site(), "ssh {node}")
    assert plain.argv[-3:] == REAL
    assert plain.argv[:3] == ("env", "-u", "MASTER_ADDR")
    site = Site(setup=("module load cuda",), python="/opt/py", environment={"A": "1"})
    start = plan_start(site, "ssh {node}")
    assert start.argv[-1] == f"module load cuda\nexec /opt/py -m {AGENT}"
    assert start.env == {"A": "1"}
    boxed = plan_start(Site(container="image.sqsh"), "srun -w {node}")
    assert boxed.prefix == "srun -w {node} --container-image=image.sqsh"
    words = plan_start(Site(container="apptainer exec --nv x.sif", python="python3"), "ssh {node}")
    assert words.argv[-7:-3] == ("apptainer", "exec", "--nv", "x.sif")
