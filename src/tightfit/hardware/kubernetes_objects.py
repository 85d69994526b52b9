"""Reading a Kubernetes API object without trusting its shape: quantities, requests, conditions."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from tightfit.hardware.kubernetes_lists import Object

GPU_RESOURCE = re.compile(r"(?:nvidia|amd)\.com/(?:gpu(?:\.shared)?|mig-(?P<mig>[1-7]g\.[0-9]+gb))")

_QUANTITY = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)(?:[eE]\+?([0-9]{1,2})|([kKMGTPE]i?|m))?")
_FACTORS = {
    **{prefix: 1000.0**power for power, prefix in enumerate("kMGTPE", start=1)},
    **{f"{prefix}i": 1024.0**power for power, prefix in enumerate("KMGTPE", start=1)},
    "m": 0.001,
}


def parse_quantity(text: object) -> float:
    """A Kubernetes quantity (`64Gi`, `31850m`, `1e3`) as a number; 0 where it is none."""
    parts = _QUANTITY.fullmatch(str(text))
    if parts is None:
        return 0.0
    number, exponent, suffix = parts.groups()
    return float(number) * (10.0 ** int(exponent) if exponent else _FACTORS.get(suffix, 1.0))


def at(thing: object, *keys: str) -> Any:
    """The value under nested keys, None where any is missing."""
    for key in keys:
        thing = thing.get(key) if isinstance(thing, dict) else None
    return thing


def keys_at(thing: object, *keys: str) -> dict[str, Any]:
    value = at(thing, *keys)
    return value if isinstance(value, dict) else {}


def list_at(thing: object, *keys: str) -> list[Any]:
    value = at(thing, *keys)
    return value if isinstance(value, list) else []


def sum_requests(pods: Iterable[Object]) -> dict[str, dict[str, float]]:
    """Node to resource to how much of it running or starting pods ask for."""
    held: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for pod in pods:
        node = at(pod, "spec", "nodeName")
        if not node or at(pod, "status", "phase") in ("Succeeded", "Failed"):
            continue
        for resource, amount in _pod_request(pod).items():
            held[str(node)][resource] += amount
    return held


def _pod_request(pod: Object) -> dict[str, float]:
    """What a pod holds: containers and sidecars together, or its largest init container."""
    total: dict[str, float] = defaultdict(float)
    first = list_at(pod, "spec", "initContainers")
    sidecars = [one for one in first if at(one, "restartPolicy") == "Always"]
    for container in (*list_at(pod, "spec", "containers"), *sidecars):
        for resource, amount in _container_request(container).items():
            total[resource] += amount
    for container in first:
        for resource, amount in _container_request(container).items():
            total[resource] = max(total[resource], amount)
    return dict(total)


def _container_request(container: object) -> dict[str, float]:
    limits = keys_at(container, "resources", "limits")
    requests = keys_at(container, "resources", "requests")
    return {name: parse_quantity(value) for name, value in {**limits, **requests}.items()}
