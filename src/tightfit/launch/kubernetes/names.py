"""Names and words as Kubernetes takes them."""

from __future__ import annotations

import hashlib
import re

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
