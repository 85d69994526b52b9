"""Slurm: recorded outputs of a real controller, documented variants, and its faults."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightfit.core.errors import EnvironmentFaultError, NotFoundError, UserError
from tightfit.hardware.slurm import (
    NODES_COMMAND,
    Gres,
    build_cluster,
    parse_gres,
    parse_nodes,
    parse_used,
    probe_slurm,
)
from tightfit.hardware.types import Cluster, NodeGroup

GOLDEN = Path(__file__).parents[2] / "golden" / "hardware"


def _run_recorded(name: str) -> object:
    def run(arguments: Sequence[str], timeout_seconds: float) -> str:
        assert 0 < timeout_seconds <= 60
        kind = "nodes" if tuple(arguments) == NODES_COMMAND else "used"
        path = GOLDEN / f"{name}.{kind}.txt"
        if not path.exists():
            raise EnvironmentFaultError("no such option", remedy="none")
        return path.read_text()

    return run


def _probe(name: str, partition: str | None = None) -> Cluster:
    return probe_slurm(partition, run=_run_recorded(name))  # type: ignore[arg-type]


def _groups(cluster: Cluster) -> dict[str, NodeGroup]:
    return {group.name: group for group in cluster.groups}


def test_a_real_cluster_of_many_kinds() -> None:
    groups = _groups(_probe("slurm_22_05_mixed"))
    seen = {
        name: (group.node.gpu.name, group.node.num_gpus, group.num_nodes, group.num_free_gpus)
        for name, group in groups.items()
    }
    assert seen == {
        "batch/6xt4": ("Tesla T4", 6, 1, 4),
        "batch/2xrtx6000": ("Quadro RTX 6000", 2, 1, 2),
        "batch/4xv100d32q": ("Tesla V100-PCIE-32GB", 4, 1, 0),
        "long": ("Tesla V100-PCIE-32GB", 4, 1, 0),
        "debug": ("Tesla T4", 6, 1, 4),
        "odd/4xgpu": ("A40", 4, 1, 4),
        "odd/2xtesla": ("Tesla V100-SXM2-16GB", 2, 1, 0),
        "odd/7xa100_1g.5gb": ("A100-SXM4-40GB MIG 1g.5gb", 1, 1, 4),
    }
    assert groups["long"].max_seconds is None
    assert groups["debug"].max_seconds == 30 * 60
    assert groups["batch/6xt4"].max_seconds == 7 * 86_400
    assert groups["batch/6xt4"].node.host_memory_bytes == 192_000 * 2**20
    assert groups["batch/6xt4"].node.num_cores == 4
    assert groups["batch/6xt4"].num_free_nodes == 0, "two of its six GPUs are taken"


def test_what_is_left_out_is_said() -> None:
    warnings = "\n".join(_probe("slurm_22_05_mixed").warnings)
    assert "cpu01 without GPUs" in warnings
    assert "gpu02 (idle*), gpu03 (drain)" in warnings
    assert "Partition closed takes no jobs" in warnings
    assert "A40 by the feature `a40`" in warnings
    assert "MIG slice" in warnings
    assert "share nodes" in warnings


def test_a_powered_off_node_does_not_count() -> None:
    groups = _groups(_probe("slurm_22_05_small", "gpu"))
    assert groups["gpu/1xv100d32q"].num_nodes == 1
    assert groups["gpu/2xa100"].num_free_gpus == 1
    assert groups["gpu/2xa100"].num_free_nodes == 0


def test_one_partition_alone() -> None:
    cluster = _probe("slurm_22_05_mixed", "long")
    assert [group.name for group in cluster.groups] == ["long"]
    assert cluster.source == "slurm:long"


def test_an_unknown_partition_gets_near_names() -> None:
    with pytest.raises(NotFoundError) as caught:
        _probe("slurm_22_05_mixed", "bach")
    assert "`batch`" in caught.value.problem
    assert "debug" in caught.value.remedy


def test_a_partition_without_gpus_is_a_fault_that_says_so() -> None:
    with pytest.raises(EnvironmentFaultError) as caught:
        _probe("slurm_22_05_mixed", "cpu")
    assert "cpu01 without GPUs" in caught.value.problem


def test_documented_forms_and_states() -> None:
    cluster = _probe("slurm_documented")
    groups = _groups(cluster)
    main = groups["main"]
    assert main.node.gpu.name == "Tesla V100-SXM2-32GB", "the feature gpu32gb chose the variant"
    assert main.num_nodes == 5, "a draining node is left out; reserved and completing ones stay"
    assert main.num_free_nodes == 1, "only the sleeping one: planned ones wait for other jobs"
    assert main.node.host_memory_bytes == 380_000 * 2**20, "the smallest of the group"
    assert groups["pair/2xt4"].node.num_gpus == 2
    assert groups["pair/1xrtx6000"].node.gpu.name == "Quadro RTX 6000"
    assert groups["pair/2xt4"].node.host_memory_bytes is None, "1 MB is Slurm's own default"
    assert groups["share"].node.gpu.marketing_gb == 16
    assert groups["share"].node.gpu.compute_capability == (7, 0)
    assert groups["auto"].node.gpu.name == "A100-SXM4-80GB"
    assert "far" not in groups
    warnings = "\n".join(cluster.warnings)
    assert "`gtx980`" in warnings
    assert "which GPUs are in use" in warnings, "the second command failed here"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu:v100:4", [("v100", 4)]),
        ("gpu:4(S:0-1)", [(None, 4)]),
        ("gpu:v100:4(S:0,2)", [("v100", 4)]),
        ("gpu:a100_1g.5gb:7", [("a100_1g.5gb", 7)]),
        ("gpu:tesla:2,mps:400", [("tesla", 2)]),
        ("gpu:t4:2,gpu:rtx6000:1", [("t4", 2), ("rtx6000", 1)]),
        ("gpu", [(None, 1)]),
        ("gpu:tesla", [("tesla", 1)]),
        ("gpu:a100:1(IDX:0)", [("a100", 1)]),
        ("gpu:a100:0(IDX:N/A)", [("a100", 0)]),
        ("(null)", []),
        ("", []),
        ("craynetwork:4", []),
    ],
)
def test_gres_forms(text: str, expected: list[tuple[str | None, int]]) -> None:
    assert parse_gres(text) == tuple(Gres(kind=kind, count=count) for kind, count in expected)


def test_a_line_of_another_shape_is_a_fault_with_the_command_to_try() -> None:
    with pytest.raises(EnvironmentFaultError) as caught:
        parse_nodes("node1 batch gpu:1\n")
    assert "sinfo" in caught.value.remedy


def test_an_empty_cluster_is_a_fault() -> None:
    with pytest.raises(EnvironmentFaultError):
        build_cluster(parse_nodes(""), used={})


def test_a_missing_command_is_a_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentFaultError) as caught:
        probe_slurm()
    assert "`sinfo` is not on this machine" in caught.value.problem
    assert "--on" in caught.value.remedy


def test_a_failing_command_gives_its_own_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "sinfo"
    script.write_text("#!/bin/sh\necho 'slurm_load_partitions: Unable to contact' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(EnvironmentFaultError, match="Unable to contact"):
        probe_slurm()


def test_the_users_own_format_does_not_leak_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "sinfo"
    golden = GOLDEN / "slurm_22_05_mixed.nodes.txt"
    script.write_text(f'#!/bin/sh\n[ -z "$SINFO_FORMAT" ] || exit 3\ncat {golden}\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SINFO_FORMAT", "%n")
    assert probe_slurm("long").num_gpus == 4


_FIELD = st.text(st.characters(exclude_characters="\n\r|", exclude_categories=["Cs"]))
_LINES = st.lists(st.lists(_FIELD, min_size=10, max_size=10).map("|".join), max_size=3)


@given(_LINES)
def test_any_lines_give_a_cluster_or_one_fault(lines: list[str]) -> None:
    text = "\n".join(lines)
    with contextlib.suppress(UserError):
        build_cluster(parse_nodes(text), used=parse_used(text))
