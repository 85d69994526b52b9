"""Options of `submit` that Kubernetes alone takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tightfit.core.options import path_option, switch_option, text_option, word_option

KINDS = ("job", "trainjob")


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    kind: str | None = word_option(
        KINDS,
        "Kubernetes: a plain Job, or a TrainJob. [default: trainjob where Kubeflow Trainer is "
        "installed and can say all that the job needs]",
        name="--as",
    )
    write: Path | None = path_option(
        "Kubernetes: write the objects as YAML in place of applying them.", example="job.yaml"
    )
    context: str | None = text_option("NAME", "Kubernetes: of the kubeconfig.", example="lab")
    namespace: str | None = text_option(
        "NAME", "Kubernetes: in place of site.yaml's or the context's.", example="team"
    )
    stage: bool = switch_option("Kubernetes: each pod first copies the model to its RAM disk.")
