"""Cluster YAML: the documented example, and every way to get it wrong."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError, NotFoundError, UserError
from tightfit.core.units import parse_link_speed, parse_time_limit
from tightfit.hardware import cluster_file
from tightfit.hardware.catalogue import find_gpu
from tightfit.hardware.cluster_file import CARD_PARSERS, GROUP_PARSERS, read_cluster_file
from tightfit.hardware.types import Cluster, Gpu

EXAMPLE = Path(__file__).parents[3] / "docs" / "cluster-file.example.yaml"


def parse_cluster(text: str, *, name: str) -> Cluster:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(text.encode())
        return read_cluster_file(path)


def test_the_documented_example_is_read() -> None:
    cluster = read_cluster_file(EXAMPLE)
    volta, turing, quadro, desktop = cluster.groups
    assert cluster.network_bytes_per_second == 12.5e9
    assert (volta.num_nodes, volta.node.num_gpus, volta.name) == (3, 4, "volta")
    assert volta.node.host_memory_bytes == 384 * 2**30
    assert volta.node.disk_bytes == 2 * 10**12
    assert volta.node.has_nvlink is True
    assert volta.max_seconds == 7 * 86_400
    assert (turing.node.num_gpus, turing.node.host_memory_bytes) == (6, None)
    assert quadro.max_seconds is None
    assert desktop.node.gpu.name == "RTX 3050"
    assert cluster.source == str(EXAMPLE)


def test_the_example_shows_every_key() -> None:
    text = EXAMPLE.read_text()
    for key in ("network", "groups", *GROUP_PARSERS):
        assert f"{key}:" in text
        assert f"{key}:" in inspect.getdoc(cluster_file)  # type: ignore[operator]
    assert all(f"{key}:" in text for key in CARD_PARSERS)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file is empty"),
        ("- 1", "must be keys and values, not a list"),
        ("groups: 3", "groups must be a list"),
        ("groups: []", "at least one group"),
        ("grops: []", "unknown key `grops`. Did you mean `groups`"),
        ("groups: [{gpu: T4, nodez: 3}]", "`groups[0].nodez`. Did you mean `nodes`"),
        ("groups: [{gpu: T4}, {nodes: 3}]", "groups[1].gpu is missing"),
        ("groups: [{gpu: [T4]}]", "groups[0].gpu must be one value, not a list"),
        ("groups: [{gpu: T4, nodes: many}]", "groups[0].nodes: `many` must be a whole number"),
        ("groups: [{gpu: T4, nodes: -1}]", "`-1` must be a whole number"),
        ("groups: [{gpu: T4, nodes: 1000000}]", "1 to 65536"),
        ("groups: [{gpu: T4, cores: 4.5}]", "whole number"),
        ("groups: [{gpu: T4, ram: 384}]", "which no node has"),
        ("groups: [{gpu: T4, ram: 9999999TB}]", "which no node has"),
        ("groups: [{gpu: T4, ram: lots}]", "is not a size"),
        ("groups: [{gpu: T4, nvlink: maybe}]", "true or false"),
        ("groups: [{gpu: T4, nvlink: true}]", "Tesla T4 has no NVLink"),
        ("groups: [{gpu: T4, time_limit: soon}]", "not a time limit"),
        ("groups: [{gpu: T4}, {gpu: T4}]", "two groups called `T4`"),
        ("groups: [{gpu: T4, gpu: T4}]", "given twice"),
        ("network: fast\ngroups: [{gpu: T4}]", "network: `fast` is not a network speed"),
        ("groups:\n  - gpu: T4\n   nodes: [", "line 3 "),
        ("a: &a [1]\nb: *a", "aliases"),
        ("groups: !!python/object/apply:os.getcwd []", "constructor"),
        ("[" * 50_000, "nested too deeply"),
        ("\x00", "not valid YAML"),
    ],
)
def test_errors_name_the_key_or_the_line(text: str, said: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        parse_cluster(text, name="c.yaml")
    assert said in caught.value.problem
    assert "c.yaml" in caught.value.problem
    assert caught.value.remedy


def test_an_unknown_gpu_is_looked_for_and_named_with_its_key() -> None:
    with pytest.raises(NotFoundError) as caught:
        parse_cluster("groups: [{gpu: V1000}]", name="c.yaml")
    assert "groups[0].gpu" in caught.value.problem
    assert "`V100`" in caught.value.problem


def test_a_bomb_of_merged_aliases_is_refused_at_once() -> None:
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 12)]
    with pytest.raises(InvalidInputError):
        parse_cluster("\n".join(lines), name="c.yaml")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("groups: [{gpu: T4}]")
    with pytest.raises(NotFoundError, match=r"cluster\.yaml"):
        read_cluster_file(tmp_path / "clustr.yaml")
    with pytest.raises(InvalidInputError):
        read_cluster_file(tmp_path)
    (tmp_path / "big.yaml").write_text("#" * (2**20 + 1))
    with pytest.raises(InvalidInputError, match="256 KiB"):
        read_cluster_file(tmp_path / "big.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidInputError, match="UTF-8"):
        read_cluster_file(tmp_path / "bytes.yaml")


def test_a_pipe_is_refused_rather_than_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "c.yaml")
    with pytest.raises(InvalidInputError, match="is a pipe"):
        read_cluster_file(tmp_path / "c.yaml")


def test_the_advice_for_a_size_is_taken_when_followed() -> None:
    for key in ("ram", "shm", "disk"):
        for bad in ("lots", "5", "0GiB"):
            with pytest.raises(InvalidInputError) as caught:
                parse_cluster(f"groups: [{{gpu: T4, {key}: {bad}}}]", name="c.yaml")
            advised = re.findall(r"[0-9]+(?:GiB|GB|TB)?", caught.value.remedy)
            assert len(advised) >= 2
            for size in advised:
                parse_cluster(f"groups: [{{gpu: T4, {key}: {size}}}]", name="c.yaml")


def test_more_groups_than_can_be_planned_for_quickly_are_refused() -> None:
    groups = "\n".join(f"  - {{name: g{number}, gpu: T4}}" for number in range(33))
    with pytest.raises(InvalidInputError, match="33 groups; at most 32") as caught:
        parse_cluster("groups:\n" + groups, name="c.yaml")
    assert "nodes" in caught.value.remedy


def _card(text: str) -> Gpu:
    return parse_cluster(f"groups: [{{gpu: {text}}}]", name="c.yaml").groups[0].node.gpu


def test_a_card_is_described_by_its_likeness() -> None:
    like = find_gpu("RTX 3090")
    gpu = _card('{name: "RTX 3060 X", memory: 12GiB, compute_capability: "8.6", like: RTX 3090}')
    assert gpu.name == "RTX 3060 X"
    assert 0.9 * 12 * 2**30 < gpu.memory_bytes < 12 * 2**30
    assert gpu.compute_capability == (8, 6)
    assert gpu.peak_flops == like.peak_flops
    assert gpu.memory_bytes_per_second == like.memory_bytes_per_second
    assert gpu.prices == ()
    assert "RTX 3090" in gpu.notes


def test_stated_rates_scale_the_others() -> None:
    gpu = _card("{name: x, memory: 8GB, like: RTX 3060, tflops_fp16: 18.2, bandwidth: 224GB/s}")
    assert gpu.flops(Dtype.FP16) == pytest.approx(18.2e12)
    assert gpu.flops(Dtype.BF16) == pytest.approx(18.2e12)
    assert gpu.flops(Dtype.FP32) == pytest.approx(9.1e12, rel=0.01)
    assert gpu.memory_bytes_per_second == 224e9


def test_an_older_card_loses_the_units_it_does_not_have() -> None:
    gpu = _card('{name: x, memory: 8GiB, like: RTX 4090, compute_capability: "7.5"}')
    assert not gpu.supports_bf16
    assert set(gpu.peak_flops) == {"fp32", "fp16"}
    newer = _card('{name: x, memory: 8GiB, like: T4, compute_capability: "8.6"}')
    assert newer.supports_bf16
    assert newer.peak_flops["bf16"] == newer.peak_flops["fp16"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{memory: 8GiB, like: T4}", "`name` is missing"),
        ("{name: x, like: T4}", "`memory` is missing"),
        ("{name: x, memory: 8GiB}", "`like` is missing"),
        ("{name: x, memory: 8GiB, like: T4, flops: 3}", "unknown key `groups[0].gpu.flops`"),
        ("{name: x, memory: 8, like: T4}", "which no card has"),
        ("{name: x, memory: much, like: T4}", "not a size"),
        ("{name: x, memory: 8GiB, like: T4, tflops_fp16: fast}", "a number of TFLOP/s"),
        ("{name: x, memory: 8GiB, like: T4, tflops_fp16: 0}", "a number of TFLOP/s"),
        ("{name: x, memory: 8GiB, like: T4, bandwidth: 300}", "the memory's speed"),
        ("{name: x, memory: 8GiB, like: T4, compute_capability: new}", "must be like 8.6"),
        ("{name: [x], memory: 8GiB, like: T4}", "groups[0].gpu.name must be one value"),
        ("{name: x, memory: 8GiB, like: {name: y}}", "groups[0].gpu.like must be one value"),
    ],
)
def test_errors_of_a_described_card(text: str, said: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        _card(text)
    assert said in caught.value.problem
    assert "groups[0].gpu" in caught.value.problem


def test_a_likeness_to_an_unknown_card_is_looked_for() -> None:
    with pytest.raises(NotFoundError, match="V100"):
        _card("{name: x, memory: 8GiB, like: V1000}")


_LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.just("T4")
)
_KEYS = st.one_of(
    st.sampled_from(["network", "groups", *GROUP_PARSERS, *CARD_PARSERS]),
    st.text(max_size=6),
)
_TREES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_KEYS, inner, max_size=4)),
    max_leaves=12,
)


@given(_TREES)
def test_any_document_is_read_or_refused(tree: object) -> None:
    _read_or_refuse(yaml.safe_dump(tree))


@given(st.dictionaries(st.sampled_from(sorted(GROUP_PARSERS)), _LEAVES))
def test_any_group_is_read_or_refused(group: dict[str, object]) -> None:
    _read_or_refuse(yaml.safe_dump({"groups": [group]}))


@given(st.text(max_size=80))
def test_any_text_is_read_or_refused(text: str) -> None:
    _read_or_refuse(text)


def _read_or_refuse(text: str) -> None:
    with contextlib.suppress(UserError):
        assert parse_cluster(text, name="c.yaml").groups


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1_800),
        ("30:15", 1_815),
        ("0:10", 10),
        ("1-0:10", 87_000),
        ("12:00:00", 43_200),
        ("1-12", 129_600),
        ("1-12:30", 131_400),
        ("7-00:00:00", 604_800),
        ("infinite", None),
        ("UNLIMITED", None),
    ],
)
def test_time_limits_are_read_as_slurm_writes_them(text: str, seconds: float | None) -> None:
    assert parse_time_limit(text) == seconds


@pytest.mark.parametrize("text", ["0", "-5", "1:2:3:4", "7 days", "9" * 50, "1-"])
def test_other_time_limits_are_refused(text: str) -> None:
    with pytest.raises(InvalidInputError):
        parse_time_limit(text)


def test_bits_and_bytes_are_told_apart() -> None:
    assert parse_link_speed("100Gb/s") == parse_link_speed("12.5GB/s") == 12.5e9
    assert parse_link_speed("10 Gbit/s") == parse_link_speed("10Gbps") == 1.25e9
    for text in ("100", "100G", "0Gb/s", "900000Tb/s", "-1Gb/s", "fast"):
        with pytest.raises(InvalidInputError):
            parse_link_speed(text)
