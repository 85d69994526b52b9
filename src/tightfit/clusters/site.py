"""site.yaml: what every job of a site needs: account, modules, container, volumes.

docs/site.example.yaml has every key with a comment.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tightfit.core.errors import InvalidInputError, NotFoundError
from tightfit.core.frozen import Frozen
from tightfit.core.secrets import is_secret
from tightfit.core.validation import describe_validation_errors, describe_value
from tightfit.core.yaml_text import YamlDocument, read_yaml

SITE_VARIABLE = "TIGHTFIT_SITE"
MAX_WARN_SECONDS = 65_535
"""Slurm's own bound for --signal."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _as_text(value: Any) -> Any:
    """`OMP_NUM_THREADS: 8` is written without quotes by everyone."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _as_lines(value: Any) -> Any:
    """One line, or a block of lines, in place of a list."""
    if isinstance(value, str):
        return tuple(line for line in value.splitlines() if line.strip())
    return tuple(value) if isinstance(value, list) else value


Text = Annotated[str, Field(min_length=1, max_length=4096)]
Lines = Annotated[tuple[Text, ...], BeforeValidator(_as_lines)]


class SlurmSite(Frozen):
    """Options of `sbatch` that the plan does not determine. An option of `submit` wins."""

    account: Text | None = None
    partition: Text | None = None
    """For `--on slurm` without a partition."""
    qos: Text | None = None
    constraint: Text | None = None
    reservation: Text | None = None
    extra: Lines = ()
    """Raw options of sbatch, like `--exclusive`."""
    warn_seconds: int = Field(default=120, gt=0, le=MAX_WARN_SECONDS)
    """How long before the time limit a job is asked to save."""

    @field_validator("account", "partition", "qos", "reservation")
    @classmethod
    def _is_one_word(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and not re.fullmatch(r"[^\s'\"#]+", value):
            raise ValueError(f"`slurm.{info.field_name}` is one word without quotes or spaces")
        return value

    @field_validator("extra")
    @classmethod
    def _are_options(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        wrong = next((line for line in value if not line.startswith("-") or "\n" in line), None)
        if wrong is not None:
            raise ValueError(f"`slurm.extra` holds options like `--exclusive`, not `{wrong[:40]}`")
        for line in value:
            try:
                shlex.split(line, comments=True)
            except ValueError as error:
                raise ValueError(f"`slurm.extra` has an open quote: `{line[:40]}`") from error
        return value


class Volume(Frozen):
    """A folder that pods see, by a claim or from the node."""

    name: Text
    claim: Text | None = None
    """Name of a PersistentVolumeClaim."""
    host_path: Text | None = None
    mount: Text
    """Where the container sees it."""
    local: Text | None = None
    """The same folder as this machine sees it, where it does."""

    @model_validator(mode="after")
    def _has_one_source(self) -> Volume:
        if (self.claim is None) == (self.host_path is None):
            raise ValueError(f"volume `{self.name}` needs either `claim` or `host_path`")
        if not self.mount.startswith("/"):
            raise ValueError(f"volume `{self.name}`: `mount` is an absolute path")
        return self


class KubernetesSite(Frozen):
    """What every manifest of the site holds."""

    namespace: Text = "default"
    image: Text | None = None
    image_pull_secret: Text | None = None
    service_account: Text | None = None
    priority_class: Text | None = None
    queue: Text | None = None
    """Kueue's local queue."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    tolerations: tuple[dict[str, str | int], ...] = ()
    gpu_resource: Text = "nvidia.com/gpu"
    volumes: tuple[Volume, ...] = ()
    secrets: tuple[Text, ...] = ()
    """Secrets whose keys become variables of the container."""
    interface: Text = "eth0"


class Site(Frozen):
    """All of it optional: a site without a file is a site with defaults."""

    setup: Lines = ()
    """Shell lines before the job: `module load`, `conda activate`, `source .../activate`."""
    environment: dict[str, Annotated[str, BeforeValidator(_as_text)]] = Field(default_factory=dict)
    container: Text | None = None
    """An image for `srun --container-image` (Pyxis), or words such as `apptainer exec --nv X.sif`
    that stand before the command."""
    python: Text | None = None
    """The interpreter on the nodes."""
    interface: Text | None = None
    """Network device between nodes."""
    run_on_node: Text | None = None
    """Words before a command that is to run on `{node}`."""
    runs: Text | None = None
    """Folder for runs that every node sees."""
    shared: Lines = ()
    """More folders that every node sees, where that does not show from here."""
    stage_to: Text | None = None
    """Where `stage` puts models on each node."""
    slurm: SlurmSite = SlurmSite()
    kubernetes: KubernetesSite = KubernetesSite()

    @field_validator("environment")
    @classmethod
    def _are_names(cls, value: dict[str, str]) -> dict[str, str]:
        wrong = next((name for name in value if not _NAME.fullmatch(name)), None)
        if wrong is not None:
            raise ValueError(f"`environment.{wrong[:40]}` is not a name that a shell knows")
        secret = next((name for name, text in value.items() if is_secret(name, text)), None)
        if secret is not None:  # batch scripts, manifests and `ps` would show it
            raise ValueError(
                f"`environment.{secret[:40]}` is a secret, which everyone could read in batch "
                "scripts: let a line of `setup` read it from a file of yours, like "
                "`source ~/secrets.sh`, or name a Secret in `kubernetes.secrets`"
            )
        return value

    @field_validator("shared")
    @classmethod
    def _are_places(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        wrong = next((path for path in value if not path.startswith(("/", "~"))), None)
        if wrong is not None:
            raise ValueError(f"`shared` holds absolute paths, not `{wrong[:40]}`")
        return value

    @field_validator("run_on_node")
    @classmethod
    def _names_the_node(cls, value: str | None) -> str | None:
        if value is not None and "{node}" not in value:
            raise ValueError("`run_on_node` has no `{node}` in it, as in `ssh {node}`")
        return value

    @property
    def interpreter(self) -> str:
        """This one, unless another is named; inside a container it cannot be this one."""
        return self.python or (sys.executable if self.container is None else "python3")

    @property
    def python_argv(self) -> list[str]:
        """The interpreter on a node, after the container's own command where there is one."""
        is_prefix = self.container is not None and self.container_image is None
        return [*(shlex.split(self.container or "") if is_prefix else []), self.interpreter]

    @property
    def container_image(self) -> str | None:
        """For Pyxis; None where `container` is a command to stand in front."""
        return self.container if self.container and " " not in self.container else None


def read_site(path: Path | None = None) -> Site:
    """The site's file, or defaults where there is none; all errors of a bad file at once."""
    found = path or find_site_file(os.environ)
    if path is None and not os.environ.get(SITE_VARIABLE) and not found.is_file():
        return Site()
    if path is None and not found.exists():
        raise NotFoundError(
            f"${SITE_VARIABLE} names {found}, where there is no file.",
            remedy=f"unset {SITE_VARIABLE}, or begin with a copy of docs/site.example.yaml",
        )
    document = read_yaml(found)
    if document.value is None:
        return Site()
    if not isinstance(document.value, dict):
        problem = f"expected `key: value` lines, found {describe_value(document.value)}."
        raise _refused(document, [problem])
    try:
        # Strict JSON mode: text is never taken for a number.
        return Site.model_validate_json(json.dumps(_stated(document.value)), strict=True)
    except ValidationError as error:
        raise _refused(
            document, describe_validation_errors(error, Site, lines=document.lines)
        ) from error
    except (ValueError, TypeError, RecursionError) as error:
        raise _refused(document, [str(error).splitlines()[0]]) from error


def find_site_file(environ: Mapping[str, str]) -> Path:
    """By $TIGHTFIT_SITE, else in the folder for configuration."""
    if named := environ.get(SITE_VARIABLE):
        return Path(named).expanduser()
    base = environ.get("XDG_CONFIG_HOME") or "~/.config"
    try:
        return Path(base).expanduser() / "tightfit" / "site.yaml"
    except RuntimeError:  # a user without a home
        return Path("/nonexistent")


def _stated(value: Any) -> Any:
    """Keys with nothing behind them are not stated."""
    if isinstance(value, dict):
        return {key: _stated(item) for key, item in value.items() if item is not None}
    return [_stated(item) for item in value] if isinstance(value, list) else value


def _refused(document: YamlDocument, errors: list[str]) -> InvalidInputError:
    count = "1 error" if len(errors) == 1 else f"{len(errors)} errors"
    return InvalidInputError(
        "\n".join([f"{document.path} has {count}:", *(f"  {error}" for error in errors)]),
        remedy="correct the lines above    (docs/site.example.yaml has every key)",
    )
