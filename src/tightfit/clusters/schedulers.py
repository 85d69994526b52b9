"""Where each kind of cluster is registered: its class, and its options of `submit`.

Light on purpose: `--help` lists the options before anything heavy is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.clusters.kubernetes.options import KubernetesOptions
from tightfit.clusters.slurm.options import SlurmOptions
from tightfit.core.options import text_option

BACKENDS = {
    "slurm": "tightfit.clusters.slurm.backend:SlurmBackend",
    "k8s": "tightfit.clusters.kubernetes.backend:KubernetesBackend",
    "kubernetes": "tightfit.clusters.kubernetes.backend:KubernetesBackend",
    "here": "tightfit.clusters.local.backend:LocalBackend",
}
"""The first word of `--on`, and the class behind it; imported when it is asked for."""


def name_clusters() -> str:
    """`slurm, k8s or here`: the words of `--on`, one for each class."""
    words = {place: word for word, place in reversed(BACKENDS.items())}
    *others, last = sorted(words.values(), key=list(BACKENDS).index)
    return f"{', '.join(others)} or {last}"


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions(
    KubernetesOptions,
    SlurmOptions,
):
    """The options of every scheduler; a backend refuses those of the others."""

    time_limit: str | None = text_option(
        "TIME", "As Slurm writes it. [default: from the predicted time]", example="12:00:00"
    )
