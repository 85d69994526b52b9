"""Copies on real files and sockets: whole, resumed, repaired, refused, stale."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from stage_cases import BLOCK, digest, flip_byte, make_nodes, make_source, stage

from tightfit.clusters.staging import CopyMethod, transfer
from tightfit.clusters.staging.agent import Agent
from tightfit.clusters.staging.home import lock_model
from tightfit.clusters.staging.stage import Stager, StageRequest, describe_source, measure_rates
from tightfit.clusters.staging.store import Store
from tightfit.core.errors import CheckFailedError, NotFoundError, SetupError, UsageError
from tightfit.runtime.staged import find_staged, home_in, list_model_files


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TIGHTFIT_STAGE", raising=False)


@pytest.mark.parametrize("how", [*CopyMethod, None])
def test_every_node_has_the_same_files(tmp_path: Path, how: CopyMethod | None) -> None:
    source = make_source(tmp_path / "model")
    done = stage(source, make_nodes(tmp_path), how)

    assert [node.state for node in done.nodes] == ["staged"] * 4
    assert all(digest(Path(node.path)) == digest(source) for node in done.nodes)
    if how is None:
        assert set(done.predicted_seconds) == {"all-read", "chain", "tree"}
        assert done.rates.one_reader
        assert done.rates.link
    copy = Path(done.nodes[1].path)
    assert copy.parent.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in copy.iterdir()} == {0o600}
    assert {path.name: path.stat().st_mtime_ns for path in copy.iterdir()} == {
        path.name: path.stat().st_mtime_ns for path in source.iterdir()
    }


def test_what_is_whole_is_left_alone(tmp_path: Path) -> None:
    source = make_source(tmp_path / "model")
    stage(source, make_nodes(tmp_path), CopyMethod.CHAIN)
    nodes = make_nodes(tmp_path)
    done = stage(source, nodes)

    assert (done.how, done.copy_seconds) == (None, None)
    assert [node.state for node in done.nodes] == ["already there"] * 4
    assert all(node.asked == ["look"] for node in nodes)


def test_a_new_node_is_served_by_one_that_has_a_copy(tmp_path: Path) -> None:
    source = make_source(tmp_path / "model")
    stage(source, make_nodes(tmp_path, "c"), CopyMethod.ALL_READ)
    done = stage(source, make_nodes(tmp_path, "abc"))

    states = {node.node: node.state for node in done.nodes}
    assert states == {"a": "staged", "b": "staged", "c": "already there"}
    assert all(digest(Path(node.path)) == digest(source) for node in done.nodes)


@pytest.mark.parametrize("how", [CopyMethod.CHAIN, CopyMethod.TREE])
def test_a_node_that_dies_does_not_keep_the_others_from_it(
    tmp_path: Path, how: CopyMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "CONNECT_SECONDS", 1.5)
    source = make_source(tmp_path / "model")
    nodes = make_nodes(tmp_path)
    nodes[1].dies_at = "relay"
    done = stage(source, nodes, how)

    assert [node.state for node in done.nodes] == ["staged", "lost", "staged", "staged"]
    assert done.num_rounds == 2
    whole = [node for node in done.nodes if node.state == "staged"]
    assert all(digest(Path(node.path)) == digest(source) for node in whole)


@pytest.mark.parametrize("how", list(CopyMethod))
def test_a_disk_that_fills_up_does_not_keep_the_others_from_it(
    tmp_path: Path, how: CopyMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Store.write

    def run_full(self: Store, index: int, data: bytes | memoryview, digest: bytes) -> None:
        if index > 5 and self.home.parent.name == "node-b":
            raise SetupError("Cannot write: No space left.", remedy="make room")
        write(self, index, data, digest)

    monkeypatch.setattr(Store, "write", run_full)
    source = make_source(tmp_path / "model")
    done = stage(source, make_nodes(tmp_path), how)

    assert [node.state for node in done.nodes] == ["staged", "lost", "staged", "staged"]
    assert done.nodes[1].why == "b: Cannot write: No space left"
    whole = [node for node in done.nodes if node.state == "staged"]
    assert all(digest(Path(node.path)) == digest(source) for node in whole)


def test_all_nodes_lost_is_one_message(tmp_path: Path) -> None:
    source = make_source(tmp_path / "model")
    nodes = make_nodes(tmp_path, "ab")
    for node in nodes:
        node.dies_at = "read"

    with pytest.raises(SetupError, match="All nodes are lost"):
        stage(source, nodes)


def test_what_was_read_for_measuring_is_not_read_again(tmp_path: Path) -> None:
    """The rates of a node that rereads what it has would be too low as well."""
    source = make_source(tmp_path / "model", num_blocks=40)
    nodes = make_nodes(tmp_path, "ab")
    request = StageRequest(source=source, to=tmp_path, interface="lo", leave_bytes=0)
    stager = Stager(request, nodes)
    stager._look()
    rates = measure_rates(stager._team, check_rate=None)
    lacking = {node.node: len(stager._team.missing(node)) for node in nodes}
    for node in nodes:
        node.close()

    assert rates.all_readers is not None
    assert lacking["a"] < lacking["b"] < stager._team.layout.num_blocks


def start_agent() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tightfit.clusters.staging.agent"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def tell(agent: subprocess.Popen[bytes], op: str, **arguments: Any) -> None:
    assert agent.stdin is not None
    agent.stdin.write(json.dumps({"id": 1, "do": op, "given": arguments}).encode() + b"\n")
    agent.stdin.flush()


def hear(agent: subprocess.Popen[bytes]) -> Any:
    assert agent.stdout is not None
    while "id" not in (reported := json.loads(agent.stdout.readline())):
        pass
    return reported["answer"]


def copy_and_kill(source: Path, place: Path, *, num_blocks: int) -> None:
    """A real agent is killed while it copies, with at least so many blocks there."""
    wanted = describe_source(source)
    place.mkdir(parents=True, exist_ok=True)
    blocks = [[0, Store(home_in(place), wanted).layout.num_blocks]]
    with start_agent() as agent:
        tell(agent, "look", wanted=wanted.model_dump(mode="json"), to=str(place), leave_bytes=0)
        assert hear(agent)["shortage"] is None
        tell(agent, "read", blocks=blocks, most_blocks=num_blocks)
        assert hear(agent)["num_bytes"]
        tell(agent, "read", blocks=blocks)
        agent.send_signal(signal.SIGKILL)


def test_a_killed_copy_goes_on_where_it_stopped(tmp_path: Path) -> None:
    source = make_source(tmp_path / "model", num_blocks=48)
    place = tmp_path / "node-a"
    copy_and_kill(source, place, num_blocks=20)
    assert list(home_in(place).glob("*.partial"))
    assert not list(home_in(place).glob("*.json"))

    done = stage(source, make_nodes(tmp_path, "a"))

    assert done.nodes[0].num_kept_bytes >= 18 * BLOCK
    assert done.nodes[0].num_repaired_blocks == 0
    assert digest(Path(done.nodes[0].path)) == digest(source)
    left = sorted(path.name for path in home_in(place).iterdir())
    assert [name.rpartition(".")[2] for name in left if "." in name] == ["json", "lock"]


def test_a_corrupted_byte_in_a_partial_copy_is_found(tmp_path: Path) -> None:
    source = make_source(tmp_path / "model", num_blocks=48)
    place = tmp_path / "node-a"
    copy_and_kill(source, place, num_blocks=20)
    (partial,) = home_in(place).glob("*.partial")
    flip_byte(partial / "model.safetensors", 5 * BLOCK + 77)
    (progress,) = home_in(place).glob("*.progress")
    os.truncate(progress, progress.stat().st_size - 7)  # a record that was being written

    done = stage(source, make_nodes(tmp_path, "a"))

    assert done.nodes[0].num_repaired_blocks == 1
    assert digest(Path(done.nodes[0].path)) == digest(source)


def test_a_corrupted_byte_in_a_whole_copy_is_found_and_only_its_block_fetched(
    tmp_path: Path,
) -> None:
    source = make_source(tmp_path / "model")
    (node,) = stage(source, make_nodes(tmp_path, "a")).nodes
    flip_byte(Path(node.path) / "model.safetensors", 9 * BLOCK)

    assert stage(source, make_nodes(tmp_path, "a")).how is None, "sizes and times say nothing"
    dry = stage(source, make_nodes(tmp_path, "a"), verify=True, is_dry=True)
    assert (dry.nodes[0].state, dry.nodes[0].num_repaired_blocks) == ("planned", 1)
    assert dry.how is not None, "what was found damaged is not a whole copy"
    done = stage(source, make_nodes(tmp_path, "a"), verify=True)

    assert done.nodes[0].num_repaired_blocks == 1
    assert done.num_bytes - done.nodes[0].num_kept_bytes == BLOCK
    assert digest(Path(node.path)) == digest(source)


def test_nodes_that_read_different_bytes_read_them_again(tmp_path: Path) -> None:
    """One node's earlier read was wrong, records and all: only another node can tell."""
    source = make_source(tmp_path / "model", num_blocks=48)
    flip_byte(source / "model.safetensors", 3 * BLOCK)
    copy_and_kill(source, tmp_path / "node-b", num_blocks=20)
    flip_byte(source / "model.safetensors", 3 * BLOCK)

    done = stage(source, make_nodes(tmp_path, "ab"), CopyMethod.ALL_READ)

    assert done.num_rounds == 2
    assert all(digest(Path(node.path)) == digest(source) for node in done.nodes)


def test_a_source_that_changes_meanwhile_is_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_source(tmp_path / "model")
    check = Stager._check

    def change(self: Stager) -> None:
        check(self)
        (source / "config.json").write_text('{"model_type": "other"}')

    monkeypatch.setattr(Stager, "_check", change)
    with pytest.raises(CheckFailedError, match="changed while it was copied"):
        stage(source, make_nodes(tmp_path, "a"))
    assert not list(home_in(tmp_path / "node-a").glob("*.json"))


def test_a_second_staging_of_the_same_model_waits(tmp_path: Path) -> None:
    source = make_source(tmp_path / "model", num_blocks=1)
    home = home_in(tmp_path / "node-a")
    home.mkdir(parents=True)
    with (
        lock_model(home, describe_source(source).key),
        pytest.raises(UsageError, match="is at work"),
    ):
        stage(source, make_nodes(tmp_path, "a"))


def test_only_what_loading_reads_is_copied(tmp_path: Path) -> None:
    source = make_source(tmp_path / "model", num_blocks=1)
    for name in ("pytorch_model.bin", "optimizer.pt", "README.md", ".gitattributes"):
        (source / name).write_bytes(b"x")
    (source / "chat_template.jinja").write_text("{{ x }}")
    (source / "checkpoints").mkdir()

    assert list_model_files(source) == [
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_links_of_a_hub_cache_become_files(tmp_path: Path) -> None:
    blobs = make_source(tmp_path / "blobs", num_blocks=2)
    snapshot = tmp_path / "models--a--b" / "snapshots" / "123"
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    (node,) = stage(snapshot, make_nodes(tmp_path, "a")).nodes

    assert digest(Path(node.path)) == digest(blobs)
    assert not any(path.is_symlink() for path in Path(node.path).iterdir())
    assert Path(node.path).name.startswith("models--a--b-")


def use_place(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    monkeypatch.setenv("TIGHTFIT_STAGE", str(place))


def test_a_whole_copy_is_used_until_its_source_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_source(tmp_path / "model", num_blocks=2)
    use_place(monkeypatch, tmp_path / "node-a")
    assert find_staged(source) is None
    (node,) = stage(source, make_nodes(tmp_path, "a")).nodes
    link = tmp_path / "link"
    link.symlink_to(source)

    assert find_staged(source) == Path(node.path)
    assert find_staged(link) == Path(node.path)
    (source / "generation_config.json").write_text("{}")
    assert find_staged(source) is None, "a new file"
    (source / "generation_config.json").unlink()
    assert find_staged(source) == Path(node.path)
    os.utime(source / "model.safetensors")
    assert find_staged(source) is None, "newer weights"

    done = stage(source, make_nodes(tmp_path, "a"))
    assert done.nodes[0].state == "staged"
    assert find_staged(source) == Path(node.path)


def test_a_copy_that_lost_or_changed_a_file_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_source(tmp_path / "model", num_blocks=2)
    use_place(monkeypatch, tmp_path / "node-a")
    (node,) = stage(source, make_nodes(tmp_path, "a")).nodes
    config = Path(node.path) / "config.json"
    kept = tmp_path / "kept.json"
    shutil.move(config, kept)
    assert find_staged(source) is None
    config.symlink_to(kept)
    assert find_staged(source) is None, "a link is not what was staged"
    config.unlink()
    shutil.move(kept, config)
    assert find_staged(source) == Path(node.path)
    Path(node.path).parent.chmod(0o777)
    assert find_staged(source) is None, "others could have changed it"


def test_a_partial_copy_is_never_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_source(tmp_path / "model", num_blocks=48)
    use_place(monkeypatch, tmp_path / "node-a")
    copy_and_kill(source, tmp_path / "node-a", num_blocks=48)

    assert find_staged(source) is None


def test_a_place_beside_the_ram_disk_is_remembered(tmp_path: Path) -> None:
    source = make_source(tmp_path / "model", num_blocks=1)
    (node,) = stage(source, make_nodes(tmp_path, "a")).nodes

    assert find_staged(source) == Path(node.path)


def test_the_environment_can_turn_copies_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_source(tmp_path / "model", num_blocks=1)
    stage(source, make_nodes(tmp_path, "a"))
    monkeypatch.setenv("TIGHTFIT_STAGE", "none")

    assert find_staged(source) is None


def test_a_gguf_file_is_staged_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "m-00001-of-00002.gguf"
    for number in (1, 2):
        (tmp_path / f"m-0000{number}-of-00002.gguf").write_bytes(os.urandom(BLOCK + number))
    use_place(monkeypatch, tmp_path / "node-a")
    (node,) = stage(file, make_nodes(tmp_path, "a")).nodes

    assert find_staged(file) == Path(node.path) / file.name
    assert len(digest(Path(node.path))) == 2


def test_all_read_is_refused_where_a_node_does_not_see_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_source(tmp_path / "model", num_blocks=20)
    nodes = make_nodes(tmp_path, "abc")
    look = Agent.look

    def blind(self: Agent, **arguments: Any) -> Any:
        reported = look(self, **arguments)
        return {**reported, "can_read": "node-a" not in arguments["to"]}

    monkeypatch.setattr(Agent, "look", blind)
    with pytest.raises(NotFoundError, match="a cannot read"):
        stage(source, nodes, CopyMethod.ALL_READ)
    done = stage(source, make_nodes(tmp_path, "abc"))

    assert "all-read" not in done.predicted_seconds
    assert all(digest(Path(node.path)) == digest(source) for node in done.nodes)
