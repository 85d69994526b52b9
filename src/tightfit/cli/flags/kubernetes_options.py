"""Options of a verb that takes jobs to Kubernetes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tightfit.cli.flags.options import path_option, switch_option, text_option, word_option

KINDS = ("job", "trainjob")

As = Annotated[
    str | None,
    word_option(
        "--as",
        KINDS,
        "Kubernetes: a plain Job, or a TrainJob. [default: trainjob where Kubeflow Trainer is "
        "installed and can say all that the job needs]",
    ),
]
WriteTo = Annotated[
    Path | None,
    path_option(
        "--write", "Kubernetes: write the objects as YAML in place of applying them.",
        example="job.yaml",
    ),
]  # fmt: skip
Context = Annotated[
    str | None,
    text_option("--context", "NAME", "Kubernetes: of the kubeconfig.", example="lab"),
]
Namespace = Annotated[
    str | None,
    text_option(
        "--namespace", "NAME", "Kubernetes: in place of site.yaml's or the context's.",
        example="team",
    ),
]  # fmt: skip
Stage = Annotated[
    bool,
    switch_option("--stage", "Kubernetes: each pod first copies the model to its RAM disk."),
]
