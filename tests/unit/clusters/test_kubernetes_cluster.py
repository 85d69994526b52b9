"""Applying, following and cancelling, against a server that speaks real HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes_cases import build_case, make_job, make_site
from kubernetes_server import RUNTIME, TRAINER, ApiServer, make_node, make_pod

from local_cases import Notes
from tightfit.clusters.kubernetes.backend import find_selector
from tightfit.clusters.kubernetes.client import (
    JobPhase,
    KubernetesApi,
    apply_objects,
    check_claims,
    connect,
    describe_pod,
    read_job_snapshot,
    wait_for_job,
)
from tightfit.clusters.kubernetes.objects import build_train_job, build_training, choose_builder
from tightfit.clusters.site import KubernetesSite
from tightfit.core.errors import InvalidInputError, NotFoundError, SetupError, UsageError
from tightfit.runs.metrics import EventRecord, append_record
from tightfit.runs.run_folder import RunFolder

OBJECTS = build_case("lora_13b_two_pods")
NAME = OBJECTS[-1]["metadata"]["name"]
JOB = f"/apis/batch/v1/namespaces/team/jobs/{NAME}"
SERVICE = f"/api/v1/namespaces/team/services/{NAME}"
PODS = "/api/v1/namespaces/team/pods"
CLAIM = "/api/v1/namespaces/team/persistentvolumeclaims/team-shared"


@pytest.fixture
def server() -> Iterator[ApiServer]:
    found = ApiServer()
    found.start()
    yield found
    found.stop()


@pytest.fixture
def cluster(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KubernetesApi:
    server.write_kubeconfig(tmp_path / "kubeconfig")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    return connect(KubernetesSite())


def _over(server: ApiServer, kind: str) -> None:
    server.objects[JOB]["status"] = {"conditions": [{"type": kind, "status": "True"}]}


class TestConnect:
    def test_namespace_by_option_site_context(
        self, cluster: KubernetesApi, server: ApiServer
    ) -> None:
        assert (cluster.namespace, cluster.server) == ("team", server.url)
        assert connect(KubernetesSite(namespace="site")).namespace == "site"
        assert connect(KubernetesSite(namespace="site"), namespace="said").namespace == "said"

    def test_no_cluster(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        with pytest.raises(NotFoundError, match="No Kubernetes cluster is configured") as caught:
            connect(KubernetesSite())
        assert "--write" in caught.value.remedy

    def test_a_broken_kubeconfig(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for text in ("", "[", "clusters: 7\n", "current-context: x\n"):
            (tmp_path / "kubeconfig").write_text(text)
            monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
            with pytest.raises(NotFoundError, match="No Kubernetes cluster is configured"):
                connect(KubernetesSite())

    @pytest.mark.usefixtures("cluster")
    def test_an_unknown_context(self) -> None:
        with pytest.raises(UsageError, match="no context `other`") as caught:
            connect(KubernetesSite(), context="other")
        assert caught.value.remedy == "--context lab"

    def test_a_server_that_is_down(self, cluster: KubernetesApi, server: ApiServer) -> None:
        server.stop()
        with pytest.raises(SetupError, match="gives no answer"):
            cluster.get("Job", "x")


class TestApply:
    def test_what_is_sent(self, cluster: KubernetesApi, server: ApiServer) -> None:
        assert apply_objects(cluster, OBJECTS)
        sent = [one for one in server.requests if one.method == "PATCH"]
        assert [one.path for one in sent] == [SERVICE, JOB, SERVICE]
        for one in sent:
            assert one.content_type == "application/apply-patch+yaml"
            assert one.query == {"fieldManager": "tightfit", "force": "true"}
        assert [one.body for one in sent[:2]] == OBJECTS
        (owner,) = sent[2].body["metadata"]["ownerReferences"]
        assert owner["kind"] == "Job"
        assert owner["uid"] == server.objects[JOB]["metadata"]["uid"]

    def test_twice_is_once(self, cluster: KubernetesApi, server: ApiServer) -> None:
        assert apply_objects(cluster, OBJECTS)
        before = server.objects[JOB]
        assert not apply_objects(cluster, OBJECTS)
        assert server.objects[JOB] == before
        assert not [one for one in server.requests if one.method == "DELETE"]

    @pytest.mark.parametrize("kind", ["Failed", "Complete"])
    def test_a_job_that_is_over_makes_room(
        self, cluster: KubernetesApi, server: ApiServer, kind: str
    ) -> None:
        apply_objects(cluster, OBJECTS)
        old = server.objects[JOB]["metadata"]["uid"]
        _over(server, kind)
        assert apply_objects(cluster, OBJECTS, sleep=lambda _seconds: None)
        assert server.objects[JOB]["metadata"]["uid"] != old
        (gone,) = (one for one in server.requests if one.method == "DELETE")
        assert gone.query == {"propagationPolicy": "Background"}

    def test_cancel(self, cluster: KubernetesApi, server: ApiServer) -> None:
        apply_objects(cluster, OBJECTS)
        assert cluster.delete("Job", NAME)
        assert JOB not in server.objects
        assert not cluster.delete("Job", NAME)

    def test_forbidden_names_verb_and_resource(
        self, cluster: KubernetesApi, server: ApiServer
    ) -> None:
        server.refusals["PATCH", "jobs"] = (403, 'User "me" cannot patch resource "jobs"')
        with pytest.raises(SetupError, match="You may not patch jobs") as caught:
            apply_objects(cluster, OBJECTS)
        assert "kubectl auth can-i patch jobs -n team" in caught.value.remedy

    def test_unknown_to_the_server(self, cluster: KubernetesApi, server: ApiServer) -> None:
        server.refusals["GET", "jobs"] = (401, "Unauthorized")
        with pytest.raises(SetupError, match="does not know you"):
            apply_objects(cluster, OBJECTS)

    def test_refused_by_a_rule_of_the_cluster(
        self, cluster: KubernetesApi, server: ApiServer
    ) -> None:
        server.refusals["PATCH", "jobs"] = (422, "spec.template: field is immutable")
        with pytest.raises(InvalidInputError, match="field is immutable"):
            apply_objects(cluster, OBJECTS)

    def test_a_missing_namespace(self, cluster: KubernetesApi, server: ApiServer) -> None:
        server.refusals["PATCH", "services"] = (404, 'namespaces "team" not found')
        with pytest.raises(NotFoundError, match="no namespace team"):
            apply_objects(cluster, OBJECTS)

    def test_claims_are_looked_at(self, cluster: KubernetesApi, server: ApiServer) -> None:
        with pytest.raises(NotFoundError, match="no PersistentVolumeClaim team-shared"):
            check_claims(cluster, OBJECTS, num_pods=2)
        server.objects[CLAIM] = {"spec": {"accessModes": ["ReadWriteOnce"]}}
        (warning,) = check_claims(cluster, OBJECTS, num_pods=2)
        assert "one node" in warning
        assert check_claims(cluster, OBJECTS, num_pods=1) == []
        server.objects[CLAIM] = {"spec": {"accessModes": ["ReadWriteMany"]}}
        assert check_claims(cluster, build_case("trainjob"), num_pods=2) == []
        server.refusals["GET", "persistentvolumeclaims"] = (403, "no")
        assert check_claims(cluster, OBJECTS, num_pods=2) == []


class TestTrainJob:
    def test_where_it_is_not_installed(self, cluster: KubernetesApi) -> None:
        job, site = make_job("trainjob"), make_site()
        assert choose_builder(job, site, cluster, asked=None)[0] is build_training
        with pytest.raises(NotFoundError, match="not installed") as caught:
            choose_builder(job, site, cluster, asked="trainjob")
        assert caught.value.remedy.startswith("--as job")

    def test_where_it_is_installed(self, cluster: KubernetesApi, server: ApiServer) -> None:
        job, site = make_job("trainjob"), make_site()
        server.objects[TRAINER] = {"kind": "APIResourceList"}
        with pytest.raises(NotFoundError, match="no runtime `torch-distributed`"):
            choose_builder(job, site, cluster, asked="trainjob")
        server.objects[RUNTIME] = {"kind": "ClusterTrainingRuntime"}
        build, reported = choose_builder(job, site, cluster, asked=None)
        assert build is build_train_job
        assert "--as job" in reported
        with_secret = make_site(secrets=("wandb",))
        assert choose_builder(job, with_secret, cluster, asked=None)[0] is build_training
        assert apply_objects(cluster, build(job, site))
        assert f"{TRAINER}/namespaces/team/trainjobs/{NAME}" in server.objects

    def test_without_a_cluster_only_when_asked(self) -> None:
        job, site = make_job("trainjob"), make_site()
        assert choose_builder(job, site, None, asked=None)[0] is build_training
        assert choose_builder(job, site, None, asked="trainjob")[0] is build_train_job


class TestFollow:
    def test_why_pods_wait(self, cluster: KubernetesApi, server: ApiServer) -> None:
        apply_objects(cluster, OBJECTS)
        no_room = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
        server.lists[PODS] = [
            make_pod("b", 1, "Pending", containerStatuses=[{"state": {"waiting": waiting}}]),
            make_pod("a", 0, "Pending", node=None,
                     conditions=[{**no_room, "message": "0/3 nodes: Insufficient nvidia.com/gpu"}]),
            make_pod("c", 2, "Pending"),
        ]  # fmt: skip
        server.lists["/api/v1/namespaces/team/events"] = [
            {"involvedObject": {"name": "c"}, "reason": "FailedMount", "message": "no claim"}
        ]
        first, second, third = read_job_snapshot(cluster, "Job", NAME).pods
        assert first.why == "Unschedulable: 0/3 nodes: Insufficient nvidia.com/gpu"
        assert second.is_stuck
        assert third.why == "FailedMount: no claim"
        asked = [one.query for one in server.requests if one.path == PODS]
        assert asked[-1] == {"labelSelector": f"batch.kubernetes.io/job-name={NAME}"}

    def test_why_a_pod_was_disrupted(self, cluster: KubernetesApi, server: ApiServer) -> None:
        # As the scheduler and the kubelet write it.
        preempted = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "PreemptionByScheduler",
            "message": "default-scheduler: preempting to accommodate a higher priority pod",
        }
        ended = {"name": "train", "state": {"terminated": {"exitCode": 75, "reason": "Error"}}}
        apply_objects(cluster, OBJECTS)
        server.lists[PODS] = [
            make_pod("a", 0, "Failed", conditions=[preempted], containerStatuses=[ended]),
            make_pod("b", 1, "Running", conditions=[{**preempted, "reason": "DeletionByPodGC"}]),
        ]
        texts = [describe_pod(pod) for pod in read_job_snapshot(cluster, "Job", NAME).pods]
        assert "ended with exit code 75 on n1: preempted by a pod of higher priority" in texts[0]
        assert "running on n1: its node is gone" in texts[1]

    def test_news_until_the_end(
        self,
        cluster: KubernetesApi,
        server: ApiServer,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("tightfit.clusters.kubernetes.client.FOLLOW_SECONDS", 0.0)
        apply_objects(cluster, OBJECTS)
        run, notes, looks = RunFolder(path=tmp_path), Notes(), iter(range(100))

        def go_on(path: str) -> None:
            if path != JOB:
                return
            look = next(looks)
            if look == 1:
                server.lists[PODS] = [make_pod("a", 0, "Running")]
                append_record(run.metrics_path, EventRecord(step=3, text="saved"))
            if look == 2:
                server.refusals["GET", "pods"] = (503, "upgrading")
            if look == 3:
                ended = {"terminated": {"exitCode": 5, "reason": "Error", "message": "too big"}}
                server.refusals.clear()
                server.lists[PODS] = [make_pod("a", 0, "Failed",
                                               containerStatuses=[{"state": ended}])]  # fmt: skip
                server.objects[JOB]["status"] = {
                    "conditions": [
                        {"type": "Failed", "status": "True", "reason": "PodFailurePolicy"}
                    ]
                }

        server.on_get = go_on
        view = wait_for_job(cluster, "Job", NAME, notes, run=run)
        assert view.phase is JobPhase.FAILED
        assert view.pods[0].exit_code == 5
        assert [record.step for record in notes.records] == [3]
        assert notes.said[0] == "pod 0 is running on n1"
        assert "upgrading" in notes.said[1]
        assert notes.said[2] == "pod 0 ended with exit code 5 on n1: Error: too big"

    def test_a_queue_and_a_deletion(self, cluster: KubernetesApi, server: ApiServer) -> None:
        apply_objects(cluster, OBJECTS)
        held = {"type": "Suspended", "status": "True"}
        server.objects[JOB]["status"] = {"conditions": [held]}
        assert read_job_snapshot(cluster, "Job", NAME).phase is JobPhase.SUSPENDED
        del server.objects[JOB]
        assert read_job_snapshot(cluster, "Job", NAME).phase is JobPhase.GONE


class TestPlacement:
    def test_one_kind_of_gpu_needs_no_label(self) -> None:
        nodes = [make_node("a", "Tesla-T4"), make_node("b", "Tesla-T4"), make_node("c", None)]
        assert find_selector(nodes, gpu_name="Tesla T4", gpu_resource="nvidia.com/gpu") == {}

    def test_the_label_of_the_card(self) -> None:
        nodes = [make_node("a", "Tesla-T4"), make_node("b", "NVIDIA-A100-SXM4-40GB")]
        found = find_selector(nodes, gpu_name="Tesla T4", gpu_resource="nvidia.com/gpu")
        assert found == {"nvidia.com/gpu.product": "Tesla-T4"}

    def test_no_such_card(self) -> None:
        nodes = [make_node("a", "Tesla-T4")]
        assert find_selector(nodes, gpu_name="L4", gpu_resource="nvidia.com/gpu") is None
