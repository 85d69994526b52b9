"""Where workers run, and the batch scripts and Jobs that start them there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tightfit.clusters.site import KubernetesSite, Site, Volume
from tightfit.core.errors import NotFoundError, UsageError
from tightfit.farming.backends.kubernetes import KubernetesStarter, choose_pod_groups
from tightfit.farming.backends.slurm import SlurmStarter
from tightfit.farming.estimate import FarmWorkload, estimate_farm
from tightfit.farming.worker_pool import (
    StartedWorkers,
    WorkerBackend,
    WorkerGroup,
    choose_slurm_groups,
    read_partitions,
)
from tightfit.hardware.slurm import build_inventory, parse_nodes

GOLDEN = Path(__file__).parents[2] / "golden" / "farm"
SINFO = """\
gpu01|gpu|up|gpu:v100d32q:1|16000|4|idle|1:00:00|0|(null)
gpu02|gpu|up|gpu:v100d32q:1|16000|4|down*|1:00:00|0|(null)
big01|gpu|up|gpu:a100:2|16000|4|mix|1:00:00|0|(null)
cpu01|cpu*|up|(null)|16000|4|idle|1:00:00|0|(null)
gpu01|low|up|gpu:v100d32q:1|16000|4|idle|1:00:00|0|(null)
big01|low|up|gpu:a100:2|16000|4|mix|1:00:00|0|(null)
cpu01|low|up|(null)|16000|4|idle|1:00:00|0|(null)
cpu09|low|up|(null)|16000|8|idle|1:00:00|0|(null)
"""


def find(*words: str, most: int | None = None) -> tuple[WorkerGroup, ...]:
    return choose_slurm_groups(build_inventory(parse_nodes(SINFO), details=None), words, most=most)


def test_every_node_once_however_many_partitions_it_is_in() -> None:
    places = {place.name: place for place in find("all")}

    assert set(places) == {"cpu", "gpu", "low"}
    assert places["gpu"].num_workers == 3, "one for each GPU of the nodes that take jobs"
    assert places["cpu"].num_workers == 1
    assert places["low"].num_workers == 1, "what no other partition has"
    assert places["low"].gpus_per_worker == 0
    assert set(places["low"].excluded) == {"gpu01", "big01", "cpu01"}
    assert [kind.num_workers for kind in places["gpu"].types] == [1, 2]


def test_a_mixed_partition_is_two_places() -> None:
    places = find("low", most=2)

    assert [(place.name, place.num_workers) for place in places] == [("low-gpu", 2), ("low-cpu", 2)]


def test_partitions_that_are_not_there() -> None:
    with pytest.raises(NotFoundError, match="no partition `gpus`"):
        find("gpus")
    with pytest.raises(UsageError, match="stands alone"):
        read_partitions("local,gpu")
    with pytest.raises(UsageError):
        read_partitions("gpu,,cpu")
    assert read_partitions(None) == ("local",)


@pytest.mark.parametrize("name", ["gpu", "low-cpu"])
def test_the_script_of_an_array(name: str) -> None:
    place = next(p for p in (*find("gpu"), *find("low")) if p.name == name)
    site = Site(setup=("module load cuda",), python="/opt/py/bin/python")
    starter = SlurmStarter(Path("/shared/.answers.jsonl.farm"), site)

    script = starter.write_script(place, place.num_workers)

    golden = GOLDEN / f"{name}.sbatch"
    if os.environ.get("TIGHTFIT_GOLDEN") == "write":
        golden.write_text(script)
    assert script == golden.read_text(), f"see {golden}; TIGHTFIT_GOLDEN=write writes it"


def test_tasks_that_are_over_are_not_counted() -> None:
    def run(words: Sequence[str], _seconds: float) -> str:
        assert words[0] == "squeue"
        rows = [("7_0", "RUNNING"), ("7_1", "COMPLETED"), ("7_2", "PENDING"), ("7_3", "NODE_FAIL")]
        return "\n".join(f"{name:48}{state:24}{'0':12}{'None':80}{'':256}" for name, state in rows)

    starter = SlurmStarter(Path("/shared/f"), Site(), run=run)
    job = StartedWorkers(group="gpu", kind=WorkerBackend.SLURM, names=("7",), num_workers=4)

    assert starter.count_alive([job]) == 2


class NoCluster:
    """Holds no Jobs."""

    def list(self, _kind: str, **_query: str) -> list[dict[str, Any]]:
        return []


def test_pods_see_the_folder_under_its_own_path(tmp_path: Path) -> None:
    volume = Volume(name="data", claim="data", mount="/data", local=str(tmp_path))
    site = Site(kubernetes=KubernetesSite(image="tightfit:1", volumes=(volume,)))
    folder = tmp_path / ".answers.jsonl.farm"
    folder.mkdir()
    starter = KubernetesStarter(folder, site, open_cluster=NoCluster)  # type: ignore[arg-type]
    inventory = build_inventory(parse_nodes(SINFO), details=None)
    places = choose_pod_groups(inventory, most=None)
    assert [(place.name, place.num_workers) for place in places] == [("k8s-gpu", 3), ("k8s-cpu", 2)]

    (job,) = starter.write_objects(places[0], 3)

    assert job["kind"] == "Job"
    assert job["spec"]["completions"] == 3
    assert job["spec"]["completionMode"] == "Indexed"
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert str(folder) in container["args" if "args" in container else "command"]
    assert str(tmp_path) in {mount["mountPath"] for mount in container["volumeMounts"]}
    outside = KubernetesStarter(Path("/elsewhere/f"), site, open_cluster=NoCluster)  # type: ignore[arg-type]
    with pytest.raises(NotFoundError, match="No pod would see"):
        outside.write_objects(places[0], 1)


def test_without_a_prediction_only_the_rent_is_known() -> None:
    estimate = estimate_farm(find("all"), None, FarmWorkload(num_answers=10, num_new_tokens=1000))

    assert estimate.seconds is None
    assert estimate.usd is None
    prices = {kind.name: kind.usd_per_hour for kind in estimate.types}
    assert any(price for price in prices.values())
