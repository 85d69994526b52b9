"""What a user may write after --on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tightfit.core.errors import NotFoundError, SetupError, UsageError
from tightfit.hardware import kubernetes, local, slurm
from tightfit.hardware.inventory import ClusterNode, Inventory, NodeGpus, NodePool, NodeState
from tightfit.hardware.resolve import parse_hardware, resolve_hardware
from tightfit.hardware.types import Cluster


def test_each_word_goes_to_its_own_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def answer(*arguments: object) -> Cluster:
        asked.append(arguments)
        return parse_hardware("T4")

    def list_nodes(*arguments: object) -> Inventory:
        asked.append(arguments)
        card = NodeGpus(kind="t4", label="t4", count=1, num_free=1)
        node = ClusterNode(
            name="n1", pools=("gpu",), devices=(card,), state=NodeState.IDLE, state_word="idle"
        )
        return Inventory(source="slurm", pools=(NodePool(name="gpu"),), nodes=(node,))

    monkeypatch.setattr(local, "probe_here", answer)
    monkeypatch.setattr(slurm, "probe_slurm_inventory", list_nodes)
    monkeypatch.setattr(kubernetes, "probe_kubernetes_inventory", list_nodes)
    for text in ("here", "HERE ", "slurm", "slurm:gpu", "k8s", "kubernetes:big"):
        assert resolve_hardware(text).num_gpus == 1
    assert asked == [(), (), (None,), ("gpu",), (None,), ("big",)]


def test_words_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab.yml").write_text("groups: [{gpu: T4, gpus_per_node: 6}]")
    assert resolve_hardware("lab.yml").num_gpus == 6
    assert resolve_hardware("lab.yml").source == "lab.yml"
    assert resolve_hardware(" 4xT4 ").num_gpus == 4
    with pytest.raises(NotFoundError, match="no file"):
        resolve_hardware("nothing.yaml")


def test_nothing_is_refused() -> None:
    with pytest.raises(UsageError):
        resolve_hardware("  ")
    for text in ("slurm:", "k8s: "):
        with pytest.raises(UsageError):
            resolve_hardware(text)


def test_a_probe_without_its_command_is_one_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for text in ("slurm", "k8s"):
        with pytest.raises(SetupError) as caught:
            resolve_hardware(text)
        assert caught.value.exit_code == 6
