"""Names and labels as Kubernetes accepts them, and a check of those in site.yaml."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

from tightfit.clusters.site import KubernetesSite
from tightfit.core.errors import InvalidInputError

MAX_NAME = 40
"""Of the 63 characters of a host name; the rest is for `-node-0-` and a pod's number."""
_DIGEST = 6

FIELD_MANAGER = "tightfit"
"""Under which the API server remembers which fields are ours."""


def name_job(text: str, *, place: str = "") -> str:
    """A label that a Job, a Service and a host can all be called by.

    `place` (a run's folder) tells two jobs of the same word apart: a namespace is shared.
    """
    word = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not word[:1].isalpha():  # a Service's name begins with a letter
        word = f"run-{word}".rstrip("-")
    digest = hashlib.sha256((place or text).encode()).hexdigest()[:_DIGEST]
    if not place and len(word) <= MAX_NAME:
        return word
    return f"{word[: MAX_NAME - _DIGEST - 1].rstrip('-')}-{digest}"


def escape(text: str) -> str:
    """Text that the kubelet passes on as it is: it would expand `$(NAME)` and shorten `$$`."""
    return text.replace("$", "$$")


def label_job(name: str) -> dict[str, str]:
    """By which people and `tightfit` find what belongs together."""
    return {
        "app.kubernetes.io/name": "tightfit",
        "app.kubernetes.io/instance": name,
        "app.kubernetes.io/managed-by": FIELD_MANAGER,
    }


# Names in site.yaml that no API server would take, told before a job is made of them.

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_PART = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_SUBDOMAIN = re.compile(rf"(?=.{{1,253}}\Z){_PART}(\.{_PART})*")
_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
_LABEL_RULE = "up to 63 lower-case letters, digits and `-`, as RFC 1123 has it"
_SUBDOMAIN_RULE = "lower-case letters, digits, `-` and `.`, as RFC 1123 has it"
_VALUE_RULE = "up to 63 letters, digits, `-`, `_` and `.`"
_KEY_RULE = f"{_VALUE_RULE}, after an optional domain and `/`"
InvalidSiteName = tuple[str, str, str]
"""The key in site.yaml, its value, and what such a value may be."""


def check_site_names(site: KubernetesSite) -> None:
    """Refuses the first name that the API server would; whether it exists is not asked.

    Source: kubernetes.io/docs/concepts/overview/working-with-objects/names and /labels.
    """
    error = next(_find_invalid_names(site), None)
    if error is None:
        return
    key, value, rule = error
    raise InvalidInputError(
        f"`{value[:80]}` cannot be `kubernetes.{key}`.", remedy=f"{key}: {rule}"
    )


def _find_invalid_names(site: KubernetesSite) -> Iterator[InvalidSiteName]:
    if not _LABEL.fullmatch(site.namespace):
        yield "namespace", site.namespace, _LABEL_RULE
    if site.image is not None and re.search(r"\s", site.image):
        yield "image", site.image, "no spaces, like registry.example.org/tightfit:0.1-cuda"
    named = [
        ("image_pull_secret", site.image_pull_secret),
        ("service_account", site.service_account),
        ("priority_class", site.priority_class),
        ("queue", site.queue),
        *(("secrets", secret) for secret in site.secrets),
        *(("volumes.claim", volume.claim) for volume in site.volumes),
    ]
    for key, value in named:
        if value is not None and not _SUBDOMAIN.fullmatch(value):
            yield key, value, _SUBDOMAIN_RULE
    for volume in site.volumes:
        for key, path in (("volumes.mount", volume.mount), ("volumes.local", volume.local)):
            if path is not None and ":" in path:
                yield key, path, "a path without `:`"
    if not _is_key(site.gpu_resource):
        yield "gpu_resource", site.gpu_resource, _KEY_RULE
    for key, value in site.node_selector.items():
        if not _is_key(key):
            yield "node_selector", key, _KEY_RULE
        if not _VALUE.fullmatch(value):
            yield "node_selector", value, _VALUE_RULE


def _is_key(text: str) -> bool:
    """A label's or resource's name: `gpu`, `nvidia.com/gpu`."""
    domain, slash, name = text.rpartition("/")
    is_domain_right = bool(_SUBDOMAIN.fullmatch(domain)) if slash else True
    return bool(name) and is_domain_right and bool(_VALUE.fullmatch(name))
