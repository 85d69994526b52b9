"""Objects into a cluster and out of it again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tightfit.core.errors import EnvironmentFaultError, NotFoundError
from tightfit.launch.kubernetes.connect import Cluster
from tightfit.launch.kubernetes.pod import Document

LEADERS = ("Job", "TrainJob")
"""Kinds that start pods; what else a job has belongs to its leader and goes with it."""
GONE_SECONDS = 180.0
"""For the pods of an earlier start to be gone."""
POLL_SECONDS = 1.0


def apply_objects(
    cluster: Cluster,
    objects: Sequence[Document],
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Make or keep the objects; False where the very job was already there and not over.

    A job of this name that is over makes room: it is the same run, gone on with.
    """
    leader = find_leader(objects)
    companions = [thing for thing in objects if thing is not leader]
    held = cluster.get(leader["kind"], leader["metadata"]["name"])
    if held is not None and is_over(held):
        _remove(cluster, leader, sleep)
        held = None
    for thing in companions:
        cluster.apply(thing)
    made = cluster.apply(leader)
    for thing in companions:
        cluster.apply(_owned(thing, made))
    return held is None


def cancel_job(cluster: Cluster, leader: Document) -> bool:
    """Delete a job with its pods, which save first; False where it was gone."""
    return cluster.delete(leader["kind"], leader["metadata"]["name"])


def find_leader(objects: Sequence[Document]) -> Document:
    return next(thing for thing in objects if thing["kind"] in LEADERS)


def is_over(job: Document) -> bool:
    """Whether a Job or TrainJob has ended, either way."""
    conditions = (job.get("status") or {}).get("conditions") or []
    return any(
        one.get("type") in ("Complete", "Failed") and one.get("status") == "True"
        for one in conditions
    )


def check_claims(cluster: Cluster, objects: Sequence[Document], *, num_pods: int) -> list[str]:
    """Refuse claims that are not there; warn of those that one node alone can mount.

    Claims are in the pod template of a Job and in the patch of a TrainJob: both are searched.
    """
    warnings = []
    for name in sorted(_claims_in(list(objects))):
        try:
            claim = cluster.get("PersistentVolumeClaim", name)
        except EnvironmentFaultError:  # one may be allowed to use what one may not read
            continue
        if claim is None:
            raise NotFoundError(
                f"Namespace {cluster.namespace} has no PersistentVolumeClaim {name}.",
                remedy=f"kubectl get pvc -n {cluster.namespace}    (lists them; see volumes in "
                "site.yaml)",
            )
        modes = (claim.get("spec") or {}).get("accessModes") or []
        if num_pods > 1 and not {"ReadWriteMany", "ReadOnlyMany"} & set(modes):
            warnings.append(
                f"claim {name} can be mounted by one node ({', '.join(modes)}), but the job has "
                f"{num_pods} pods"
            )
    return warnings


def _claims_in(thing: object) -> set[str]:
    if isinstance(thing, list):
        return {name for item in thing for name in _claims_in(item)}
    if not isinstance(thing, dict):
        return set()
    found = {name for value in thing.values() for name in _claims_in(value)}
    claim = thing.get("persistentVolumeClaim")
    return found | ({str(claim["claimName"])} if isinstance(claim, dict) else set())


def _owned(thing: Document, owner: Document) -> Document:
    """The same, to be deleted by the cluster when its owner is."""
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
    }
    return {**thing, "metadata": {**thing["metadata"], "ownerReferences": [reference]}}


def _remove(cluster: Cluster, leader: Document, sleep: Callable[[float], None]) -> None:
    kind, name = leader["kind"], leader["metadata"]["name"]
    cluster.delete(kind, name)
    waited = 0.0
    while cluster.get(kind, name) is not None:
        if waited >= GONE_SECONDS:
            raise EnvironmentFaultError(
                f"{kind} {name} is over but will not go away.",
                remedy=f"kubectl describe {kind.lower()} {name} -n {cluster.namespace}",
            )
        sleep(POLL_SECONDS)
        waited += POLL_SECONDS
