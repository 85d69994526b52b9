"""Slurm: recorded outputs of a real controller, documented variants, and its errors."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightfit.core.errors import NotFoundError, SetupError, UserError
from tightfit.hardware.inventory import (
    Inventory,
    NodeState,
    count_totals,
    list_inventory_rows,
    plannable_cluster,
)
from tightfit.hardware.slurm import (
    ALL_PARTITIONS,
    NODES_COMMAND,
    Gres,
    build_inventory,
    count_shared,
    parse_details,
    parse_gres,
    parse_nodes,
    probe_slurm_inventory,
    read_state,
)
from tightfit.hardware.types import Cluster, NodeGroup

GOLDEN = Path(__file__).parents[2] / "golden" / "hardware"


def _run_recorded(name: str) -> object:
    def run(arguments: Sequence[str], timeout_seconds: float) -> str:
        assert 0 < timeout_seconds <= 60
        is_of_nodes = tuple(arguments[: len(NODES_COMMAND)]) == NODES_COMMAND
        kind = "nodes" if is_of_nodes else "used"
        path = GOLDEN / f"{name}.{kind}.txt"
        if not path.exists():
            raise SetupError("no such option", remedy="none")
        return path.read_text()

    return run


def _probe(name: str, partition: str | None = None) -> Cluster:
    return plannable_cluster(_inventory(name, partition))


def _inventory(name: str, partition: str | None = None) -> Inventory:
    return probe_slurm_inventory(partition, run=_run_recorded(name))  # type: ignore[arg-type]


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
        "odd/1xa100_1g.5gb": ("A100-SXM4-40GB MIG 1g.5gb", 1, 1, 4),
    }
    assert groups["long"].max_seconds is None
    assert groups["debug"].max_seconds == 30 * 60
    assert groups["batch/6xt4"].max_seconds == 7 * 86_400
    assert groups["batch/6xt4"].node.host_memory_bytes == 192_000 * 2**20
    assert groups["batch/6xt4"].node.num_cores == 4
    assert groups["batch/6xt4"].num_free_nodes == 0, "two of its six GPUs are taken"


def test_what_is_left_out_is_said() -> None:
    warnings = "\n".join(_probe("slurm_22_05_mixed").warnings)
    assert "1 node without GPUs not planned for: cpu01 (--on slurm:cpu plans" in warnings
    assert "gpu02 (idle*: it does not answer), gpu03 (drain)" in warnings
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


def test_a_partition_without_gpus_is_planned_as_cpus() -> None:
    cluster = _probe("slurm_22_05_mixed", "cpu")
    (group,) = cluster.groups
    assert (group.name, group.num_nodes, group.num_free_nodes) == ("cpu", 1, 1)
    assert group.max_seconds == 3600
    assert group.node.gpu.is_cpu
    assert group.node.gpu.memory_bytes == group.node.host_memory_bytes == 192_000 * 2**20
    assert group.node.gpu.peak_flops == {"fp32": 4 * 2.0e9 * 32}
    assert any("assumed: 2 GHz, AVX2" in warning for warning in cluster.warnings)


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


def test_a_line_of_another_shape_is_an_error_with_the_command_to_try() -> None:
    with pytest.raises(SetupError) as caught:
        parse_nodes("node1 batch gpu:1\n")
    assert "sinfo" in caught.value.remedy


def test_an_empty_cluster_is_an_error() -> None:
    with pytest.raises(SetupError):
        build_inventory(parse_nodes(""), details={})


def test_a_missing_command_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError) as caught:
        probe_slurm_inventory()
    assert "`sinfo` is not on this machine" in caught.value.problem
    assert "--on" in caught.value.remedy


def test_a_failing_command_gives_its_own_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "sinfo"
    script.write_text("#!/bin/sh\necho 'slurm_load_partitions: Unable to contact' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(SetupError, match="Unable to contact"):
        probe_slurm_inventory()


def test_the_users_own_format_does_not_leak_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "sinfo"
    golden = GOLDEN / "slurm_22_05_mixed.nodes.txt"
    script.write_text(f'#!/bin/sh\n[ -z "$SINFO_FORMAT" ] || exit 3\ncat {golden}\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SINFO_FORMAT", "%n")
    assert plannable_cluster(probe_slurm_inventory("long")).num_gpus == 4


def test_every_node_is_in_the_inventory_once() -> None:
    inventory = _inventory("slurm_22_05_lab")
    seen = {
        node.name: (node.pools, node.state, node.num_free_gpus, node.num_free_cores, node.reason)
        for node in inventory.nodes
    }
    assert seen == {
        "big01": (("gpu", "low"), NodeState.MIXED, 1, 3, ""),
        "cpu01": (("cpu", "low"), NodeState.MIXED, 0, 1, ""),
        "cpu02": (("cpu", "low"), NodeState.DRAINED, 0, 0, "bad fan, ask Eva"),
        "gpu01": (("gpu", "low"), NodeState.MIXED, 0, 3, ""),
        "gpu02": (("gpu", "low"), NodeState.DOWN, 0, 0, "Not responding"),
    }
    totals = count_totals(inventory)
    assert (totals.num_nodes, totals.num_gpus, totals.num_free_gpus) == (5, 4, 1)
    assert (totals.num_cores, totals.num_free_cores) == (20, 7)
    assert totals.memory_bytes == 5 * 16_000 * 2**20


def test_rows_are_by_partition_and_kind() -> None:
    rows = {
        (row.pool.name, row.kind): (len(row.nodes), row.num_free_nodes, row.num_free_gpus)
        for row in list_inventory_rows(_inventory("slurm_22_05_lab"))
    }
    assert rows == {
        ("cpu", "CPU"): (2, 0, 0),
        ("gpu", "1 x Tesla V100-PCIE-32GB"): (2, 0, 0),
        ("gpu", "2 x A100-SXM4-40GB"): (1, 0, 1),
        ("low", "1 x Tesla V100-PCIE-32GB"): (2, 0, 0),
        ("low", "2 x A100-SXM4-40GB"): (1, 0, 1),
        ("low", "CPU"): (2, 0, 0),
    }


def test_a_partition_of_the_inventory_alone() -> None:
    inventory = _inventory("slurm_22_05_lab", "gpu")
    assert [node.name for node in inventory.nodes] == ["big01", "gpu01", "gpu02"]
    assert {row.pool.name for row in list_inventory_rows(inventory)} == {"gpu"}


def test_a_closed_partition_has_nothing_free() -> None:
    rows = [
        r for r in list_inventory_rows(_inventory("slurm_22_05_mixed")) if r.pool.name == "closed"
    ]
    assert rows
    assert all(row.num_free_gpus == 0 and row.num_free_nodes == 0 for row in rows)


def test_a_hidden_partition_is_found_by_its_name() -> None:
    shown = "n1|open|up|gpu:t4:2|64000|8|idle|infinite|0|(null)\n"
    hidden = "n2|secret|up|gpu:a100:4|64000|8|idle|infinite|0|(null)\n"

    def run(arguments: Sequence[str], _seconds: float) -> str:
        is_all = ALL_PARTITIONS in arguments
        if tuple(arguments[: len(NODES_COMMAND)]) != NODES_COMMAND:
            return ""
        return shown + (hidden if is_all else "")

    shown_groups = plannable_cluster(probe_slurm_inventory(run=run)).groups
    assert [group.name for group in shown_groups] == ["open"]
    assert plannable_cluster(probe_slurm_inventory("secret", run=run)).num_gpus == 4
    with pytest.raises(NotFoundError, match="`secret`"):
        probe_slurm_inventory(
            "secre", run=lambda arguments, _s: run([*arguments, ALL_PARTITIONS], 1.0)
        )


NODE = "n1|p|up|{gres}|64000|{cores}|{state}|infinite|0|{features}\n"


def _one(*, gres: str, used: str = "", state: str = "mix", cores: str = "") -> Inventory:
    details = f"{'n1':64}{used:256}{'0':24}{cores:40}{'2:16:2':24}{'none':200}"
    line = NODE.format(gres=gres, cores=64, state=state, features="(null)")
    return build_inventory(parse_nodes(line), details=parse_details(details))


@pytest.mark.parametrize(
    ("gres", "used", "free"),
    [
        ("gpu:a100:4(S:0-1)", "gpu:a100:2(IDX:0-1)", 2),
        ("gpu:a100:4", "gpu:a100:3(IDX:0,2-3)", 1),
        ("gpu:4", "gpu:(null):1(IDX:2)", 3),
        ("gpu:4", "gpu:a100:1(IDX:2)", 3),
        ("gpu:a100:4", "gpu:2(IDX:0-1)", 2),
        ("gpu:a100:no_consume:4", "gpu:a100:0(IDX:N/A)", 4),
        ("gpu:a100:2,shard:a100:16", "gpu:a100:0(IDX:N/A),shard:a100:3(3/8,0/8)", 1),
        ("gpu:a100:2,shard:16", "gpu:a100:0(IDX:N/A),shard:16(8/8,8/8)", 0),
        ("gpu:t4:2,gpu:a100:2", "gpu:t4:2(IDX:0-1),gpu:a100:1(IDX:2)", 1),
        ("gpu:a100_1g.5gb:7", "gpu:a100_1g.5gb:2(IDX:0-1)", 5),
        ("gpu:a100:4", "gpu:a100:2(IDX:0-", 2),
    ],
)
def test_free_gpus_by_the_forms_of_use(gres: str, used: str, free: int) -> None:
    assert _one(gres=gres, used=used).nodes[0].num_free_gpus == free


def test_a_gpu_without_a_free_core_beside_it_is_not_free() -> None:
    inventory = _one(gres="gpu:a100:4", used="gpu:a100:1(IDX:0)", cores="64/0/0/64")
    assert inventory.nodes[0].num_free_gpus == 0


def test_threads_are_not_cores() -> None:
    (group,) = plannable_cluster(_one(gres="(null)", state="idle", cores="0/64/0/64")).groups
    assert group.node.num_cores == 64
    assert group.node.gpu.name == "CPU, 32 cores", "two threads each"


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("idle", NodeState.IDLE),
        ("idle~", NodeState.IDLE),
        ("idle*", NodeState.DOWN),
        ("idle-", NodeState.RESERVED),
        ("idle$", NodeState.RESERVED),
        ("maint", NodeState.RESERVED),
        ("resv", NodeState.RESERVED),
        ("plnd", NodeState.RESERVED),
        ("pow_dn", NodeState.RESERVED),
        ("mix", NodeState.MIXED),
        ("mix-", NodeState.MIXED),
        ("alloc", NodeState.ALLOCATED),
        ("comp", NodeState.ALLOCATED),
        ("drain", NodeState.DRAINED),
        ("drain*", NodeState.DRAINED),
        ("drng@", NodeState.DRAINED),
        ("down", NodeState.DOWN),
        ("down*", NodeState.DOWN),
        ("inval", NodeState.DOWN),
        ("futr", NodeState.DOWN),
    ],
)
def test_states(word: str, state: NodeState) -> None:
    assert read_state(word) is state


def test_shards_of_several_cards() -> None:
    assert count_shared("gpu:a100:0,shard:a100:3(3/8,0/8,1/8)") == 2
    assert count_shared("gpu:a100:2(IDX:0-1)") == 0


def test_one_word_for_two_cards_is_two_groups() -> None:
    lines = [
        NODE.format(gres="gpu:2", cores=8, state="idle", features=card).replace("n1", f"n{card}")
        for card in ("a40", "t4")
    ]
    groups = plannable_cluster(build_inventory(parse_nodes("".join(lines)), details={})).groups
    assert [group.name for group in groups] == ["p/2xA40", "p/2xTesla T4"]


def test_cpu_nodes_of_other_sizes_are_other_groups() -> None:
    sizes = ((64, 256_000), (64, 257_000), (64, 1_024_000), (128, 256_000))
    lines = [
        f"n{number}|p|up|(null)|{memory}|{cores}|idle|infinite|0|(null)"
        for number, (cores, memory) in enumerate(sizes)
    ]
    groups = plannable_cluster(build_inventory(parse_nodes("\n".join(lines)), details=None)).groups
    assert {group.name: group.num_nodes for group in groups} == {
        "p/64-cores-250GiB": 2,
        "p/64-cores-1000GiB": 1,
        "p/128-cores": 1,
    }


def test_gpus_that_are_all_down_are_an_error_and_no_cpus() -> None:
    lines = "g1|p|up|gpu:t4:2|64000|8|down*|infinite|0|(null)\n" + NODE.format(
        gres="(null)", cores=8, state="idle", features="(null)"
    )
    with pytest.raises(SetupError, match="no GPU node that can be planned for") as error:
        plannable_cluster(build_inventory(parse_nodes(lines), details=None))
    assert "g1 (down*: it does not answer)" in error.value.problem


_FIELD = st.text(st.characters(exclude_characters="\n\r|", exclude_categories=["Cs"]))
_LINES = st.lists(st.lists(_FIELD, min_size=10, max_size=10).map("|".join), max_size=3)


@given(_LINES)
def test_any_lines_give_a_cluster_or_one_error(lines: list[str]) -> None:
    text = "\n".join(lines)
    with contextlib.suppress(UserError):
        plannable_cluster(build_inventory(parse_nodes(text), details=parse_details(text)))
