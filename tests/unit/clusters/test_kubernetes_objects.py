"""The objects of six recipes: as they are kept, and as every reader of them sees them.

After a wanted change: TIGHTFIT_GOLDEN=write python -m pytest THIS-FILE
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models as kubeflow
from kubernetes import client
from kubernetes_cases import CASES, GOLDEN, RUN, build_case, make_job, make_site
from kubernetes_reading import (
    NEWEST,
    expand,
    list_containers,
    list_descriptions,
    list_lost,
    list_resources,
    list_words,
    read_patch,
)

from tightfit.clusters.kubernetes.objects import (
    MAX_CONFIG_BYTES,
    STAGED_PATH,
    WORKER_NUMBER,
    build_train_job,
    build_training,
    predict_seconds,
    worker_job,
    write_manifest,
)
from tightfit.clusters.kubernetes.pod import (
    Document,
    PodResources,
    Task,
    choose_mounts,
    write_quantity,
)
from tightfit.core.errors import EXIT_REQUEUE, InvalidInputError, UsageError
from tightfit.core.units import GIB
from tightfit.hardware.kubernetes import parse_quantity

ALL = sorted(CASES)
WITH_JOB = [name for name in ALL if name != "trainjob"]


@pytest.mark.parametrize("name", ALL)
def test_golden(name: str) -> None:
    path = GOLDEN / f"{name}.yaml"
    comment = f"{name}: as tests/unit/clusters/kubernetes_cases.py has its recipe and site"
    text = write_manifest(build_case(name), comment=comment)
    if os.environ.get("TIGHTFIT_GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


def test_every_golden_file_has_a_case() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.yaml")) == ALL
    assert len(ALL) >= 6


@pytest.mark.parametrize("name", ALL)
def test_yaml_says_what_the_api_is_sent(name: str) -> None:
    assert list(yaml.safe_load_all((GOLDEN / f"{name}.yaml").read_text())) == build_case(name)


@pytest.mark.parametrize("name", WITH_JOB)
def test_strict_validator_takes_it(name: str) -> None:
    for thing in build_case(name):
        assert kubernetes_validate.validate(thing, NEWEST, strict=True)


@pytest.mark.parametrize("name", WITH_JOB)
def test_strict_validator_refuses_a_slip(name: str) -> None:
    job = json.loads(json.dumps(_leader(name)))
    job["spec"]["template"]["spec"]["containers"][0]["imagePullPolice"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, NEWEST, strict=True)


@pytest.mark.parametrize("name", WITH_JOB)
def test_official_models_give_back_every_key(name: str) -> None:
    api = client.ApiClient()
    for thing in build_case(name):
        kind = {"Job": "V1Job", "Service": "V1Service", "ConfigMap": "V1ConfigMap"}[thing["kind"]]
        model = api.deserialize(json.dumps(thing), kind, "application/json")
        assert api.sanitize_for_serialization(model) == thing


def test_kubeflow_models_give_back_every_key() -> None:
    (thing,) = build_case("trainjob")
    model = kubeflow.TrainerV1alpha1TrainJob.from_dict(thing)
    assert model is not None
    assert list(list_lost(thing, model.to_dict())) == []
    thing = json.loads(json.dumps(thing))
    thing["spec"]["trainer"]["numNode"] = 2
    model = kubeflow.TrainerV1alpha1TrainJob.from_dict(thing)
    assert model is not None
    assert list(list_lost(thing, model.to_dict())) == [".spec.trainer.numNode"]


def test_train_job_patches_a_valid_pod() -> None:
    """The Trainer merges the patch into a pod: as one, the strict validator takes it."""
    (thing,) = build_case("trainjob")
    pod = read_patch(thing)
    container = {**pod["containers"][0], "image": "x", "env": thing["spec"]["trainer"]["env"]}
    container["resources"] = thing["spec"]["trainer"]["resourcesPerNode"]
    whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}}
    assert kubernetes_validate.validate(
        {**whole, "spec": {**pod, "containers": [container]}}, NEWEST, strict=True
    )


@pytest.mark.parametrize("name", WITH_JOB)
def test_no_field_is_deprecated(name: str) -> None:
    seen = 0
    for thing in build_case(name):
        for path, description in list_descriptions(thing):
            seen += 1
            assert not re.search(r"\bdeprecated\b", description, re.IGNORECASE), path
    assert seen > 40


def test_the_search_for_deprecated_fields_finds_one() -> None:
    job = json.loads(json.dumps(_leader("qlora_7b")))
    job["spec"]["template"]["spec"]["serviceAccount"] = "trainer"
    found = [path for path, text in list_descriptions(job) if "eprecated" in text]
    assert found == [".spec.template.spec.serviceAccount"]


@pytest.mark.parametrize("name", ALL)
def test_quantities_are_quantities(name: str) -> None:
    for thing in build_case(name):
        for place in list_resources(thing):
            assert place["requests"] == place["limits"]  # QoS class Guaranteed
            for amount in place["limits"].values():
                assert parse_quantity(amount) > 0, amount


@pytest.mark.parametrize("name", WITH_JOB)
def test_memory_holds_the_ram_disk(name: str) -> None:
    pod = _leader(name)["spec"]["template"]["spec"]
    (limit,) = (v["emptyDir"]["sizeLimit"] for v in pod["volumes"] if v["name"] == "shm")
    memory = pod["containers"][0]["resources"]["limits"]["memory"]
    predicted = make_job(name).plan.estimate.host.peak_bytes
    assert parse_quantity(memory) >= parse_quantity(limit) + predicted


def test_a_staged_model_has_room_in_ram_disk_and_both_containers() -> None:
    pod = _leader("staged_model")["spec"]["template"]["spec"]
    staged = CASES["staged_model"].staged_bytes
    (limit,) = (v["emptyDir"]["sizeLimit"] for v in pod["volumes"] if v["name"] == "shm")
    assert parse_quantity(limit) > staged + GIB
    first, main = pod["initContainers"][0], pod["containers"][0]
    words = f"tightfit stage /models/meta-llama/Llama-2-7b-hf --to {STAGED_PATH}"
    assert first["args"][-1].endswith(f"&& exec {words}")
    assert first["resources"]["limits"]["memory"] == main["resources"]["limits"]["memory"]
    assert "nvidia.com/gpu" not in first["resources"]["limits"]
    ram_disk = {"name": "shm", "mountPath": "/dev/shm"}
    assert ram_disk in first["volumeMounts"]
    assert ram_disk in main["volumeMounts"]


@pytest.mark.parametrize("name", ALL)
def test_gpus_are_those_of_the_plan(name: str) -> None:
    plan = make_job(name).plan
    limits = [place["limits"].get("nvidia.com/gpu") for place in list_resources(_leader(name))]
    expected = None if plan.hardware.node.gpu.is_cpu else str(plan.strategy.gpus_per_node)
    assert expected in limits


def test_the_service_finds_the_pods_by_a_label_that_the_job_gives_them() -> None:
    service, job = build_case("lora_13b_two_pods")
    name = job["metadata"]["name"]
    # The Job controller labels its pods so; a template may not set that label itself.
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True


def test_pods_meet_at_the_first_ones_name() -> None:
    service, job = build_case("lora_13b_two_pods")
    words = list_words(job)
    host, port = words[words.index("--rendezvous") + 1].split(":")
    name, subdomain, namespace = job["metadata"]["name"], service["metadata"]["name"], "team"
    assert host == f"{name}-0.{subdomain}.{namespace}.svc"
    assert int(port) == service["spec"]["ports"][0]["port"]
    assert len(f"{name}-9999") <= 63
    assert words[words.index("--nodes") + 1] == str(job["spec"]["completions"]) == "2"
    assert words[words.index("--interface") + 1] == "net1"


def test_one_pod_needs_no_service() -> None:
    assert [thing["kind"] for thing in build_case("qlora_7b")] == ["Job"]
    assert "--rendezvous" not in list_words(_leader("qlora_7b"))


@pytest.mark.parametrize("name", ALL)
def test_words_reach_the_process_as_meant(name: str) -> None:
    """By the kubelet's own rule; JOB_COMPLETION_INDEX comes from the Job controller."""
    given = {"JOB_COMPLETION_INDEX": "1", "PET_MASTER_ADDR": "m", "PET_MASTER_PORT": "29500"}
    for container in list_containers(_leader(name)):
        known = dict(given)
        for variable in container["env"]:
            known[variable["name"]] = expand(variable.get("value", "10.1.2.3"), known)
        words = [expand(word, known) for word in [*container["command"], *container["args"]]]
        assert not [word for word in words if "$" in word]
        if "--local-addr" in words:
            assert words[words.index("--local-addr") + 1] == "10.1.2.3"
            assert words[words.index("--node-rank") + 1] == "1"


def test_dollars_in_names_are_kept() -> None:
    plan = make_job("qlora_7b")
    odd = "/mnt/shared/runs/a$(POD_IP)$$b$c"
    site = make_site().model_copy(update={"environment": {"TOKEN": "x$(HOME)y$$"}})
    (job,) = build_training(replace(plan, run=Path(odd)), site)
    (container,) = list_containers(job)
    known: dict[str, str] = {"POD_IP": "10.0.0.1", "HOME": "/tmp"}
    assert expand(container["args"][1], known) == odd
    (token,) = (one["value"] for one in container["env"] if one["name"] == "TOKEN")
    assert expand(token, known) == "x$(HOME)y$$"


@pytest.mark.parametrize("name", WITH_JOB)
def test_failures_are_sorted(name: str) -> None:
    spec = _leader(name)["spec"]
    rules = spec["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["Ignore", "FailJob"]
    assert rules[0]["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert rules[1]["onExitCodes"]["values"] == [3, 4, 5, 6, 7, 8]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert spec["maxFailedIndexes"] == 0
    assert spec["completions"] == spec["parallelism"]


@pytest.mark.parametrize("name", WITH_JOB)
def test_what_stops_at_its_deadline_comes_back_a_bounded_number_of_times(name: str) -> None:
    """A pod that meets its deadline saves and ends with 75; it bears no mark of a disruption."""
    spec = _leader(name)["spec"]
    assert spec["template"]["spec"]["activeDeadlineSeconds"] > 0
    for rule in spec["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes", {}).get("values", [])
        assert not (rule["action"] == "Ignore" and EXIT_REQUEUE in codes)
    assert spec["backoffLimitPerIndex"] == 10
    assert spec["maxFailedIndexes"] == 0


def test_a_short_time_limit_leaves_restarts_for_all_of_its_slices() -> None:
    job = make_job("qlora_7b")
    slow = job.plan.estimate.time.seconds_per_step_high * (job.plan.num_steps or 0)
    (made,) = build_training(replace(job, seconds=1800), make_site())
    assert made["spec"]["template"]["spec"]["activeDeadlineSeconds"] == 1800
    assert slow / 1800 < made["spec"]["backoffLimitPerIndex"] < 10 * slow / 1800


@pytest.mark.parametrize("name", ALL)
def test_pods_are_not_privileged(name: str) -> None:
    leader = _leader(name)
    pod = read_patch(leader) if leader["kind"] == "TrainJob" else leader["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    for container in pod["containers"]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert "hostNetwork" not in pod


@pytest.mark.parametrize("name", ALL)
def test_the_hub_is_off_and_only_the_run_is_written(name: str) -> None:
    leader = _leader(name)
    for container in list_containers(leader):
        assert {"name": "HF_HUB_OFFLINE", "value": "1"} in container["env"]
    pod = read_patch(leader) if leader["kind"] == "TrainJob" else leader["spec"]["template"]["spec"]
    for mount in pod["containers"][0]["volumeMounts"]:
        is_ours = mount["name"] in ("shm", "scratch") or RUN.startswith(mount["mountPath"])
        assert is_ours or mount["mountPath"] == "/data" or mount["readOnly"] is True


def test_secrets_queue_and_places() -> None:
    job = _leader("secrets_queue")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert [one["secretRef"]["name"] for one in container["envFrom"]] == ["wandb", "object-store"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-queue"
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "Tesla-T4"}
    assert {one["key"] for one in pod["tolerations"]} == {"team", "spot", "nvidia.com/gpu"}
    assert pod["priorityClassName"] == "batch-low"


def test_the_time_is_the_plans_with_a_margin() -> None:
    plan = make_job("qlora_7b").plan
    time = plan.estimate.time
    assert time.steps_per_epoch is not None
    slow = time.seconds_per_step_high * time.steps_per_epoch * plan.num_epochs
    limit = _leader("qlora_7b")["spec"]["template"]["spec"]["activeDeadlineSeconds"]
    assert slow * 1.25 < limit < slow * 1.25 + 3600
    unknown = plan.model_copy(
        update={
            "estimate": plan.estimate.model_copy(
                update={"time": time.model_copy(update={"steps_per_epoch": None})}
            )
        }
    )
    assert predict_seconds(unknown) is None


def test_a_train_jobs_deadline_is_longer_as_it_is_final() -> None:
    job, site = make_job("trainjob"), CASES["trainjob"].site
    predicted = predict_seconds(job.plan)
    assert predicted is not None
    (made,) = build_train_job(job, site)
    assert made["spec"]["activeDeadlineSeconds"] >= 2 * predicted
    (asked,) = build_train_job(replace(job, seconds=600), site)
    assert asked["spec"]["activeDeadlineSeconds"] == 600


def test_a_train_job_refuses_what_it_cannot_say() -> None:
    with pytest.raises(UsageError, match="Secrets"):
        build_train_job(make_job("trainjob"), make_site(secrets=("wandb",)))


def test_a_plan_travels_as_a_config_map() -> None:
    job = replace(make_job("qlora_7b"), carries_plan=True, argv=("tightfit", "train", "x"))
    config, leader = build_training(job, make_site())
    assert kubernetes_validate.validate(config, NEWEST, strict=True)
    assert json.loads(config["data"]["plan.json"])["strategy"]["method"] == "lora"
    (container,) = list_containers(leader)
    assert {"name": "config", "mountPath": "/etc/tightfit", "readOnly": True} in container[
        "volumeMounts"
    ]


def test_a_config_map_has_its_limit() -> None:
    job = replace(make_job("qlora_7b"), carries_plan=True)
    model = job.plan.model.model_copy(update={"name": "a" * MAX_CONFIG_BYTES})
    large = job.plan.model_copy(update={"model": model})
    with pytest.raises(InvalidInputError, match=r"1\.0 MiB"):
        build_training(replace(job, plan=large), make_site())


def test_workers_are_independent() -> None:
    resources = PodResources(num_gpus=1, num_cores=4, memory_bytes=8 * GIB, shm_bytes=GIB)
    site = make_site()
    task = Task(
        name="Farm of $(X)",
        argv=("tightfit", "farm-worker", "/mnt/shared/farm/a$(b)", "--number", WORKER_NUMBER),
        resources=resources,
        mounts=choose_mounts(site.kubernetes, written=("/mnt/shared/farm",)),
    )
    (job,) = worker_job(task, site, num_workers=12)
    assert kubernetes_validate.validate(job, NEWEST, strict=True)
    spec = job["spec"]
    assert job["metadata"]["name"] == "farm-of-x"
    assert (spec["completions"], spec["parallelism"]) == (12, 12)
    assert "maxFailedIndexes" not in spec
    assert "subdomain" not in spec["template"]["spec"]
    assert [r["action"] for r in spec["podFailurePolicy"]["rules"]][-1] == "FailIndex"
    known = {"JOB_COMPLETION_INDEX": "7", "b": "wrong"}
    words = [expand(word, known) for word in list_words(job)]
    assert words[-3:] == ["/mnt/shared/farm/a$(b)", "--number", "7"]
    assert write_quantity(9 * GIB) == "9Gi" == list_resources(job)[0]["limits"]["memory"]


def _leader(name: str) -> Document:
    return build_case(name)[-1]
