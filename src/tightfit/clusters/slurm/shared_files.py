"""Whether the nodes of a cluster see a job's files, as far as that can be told from here."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

from tightfit.clusters.site import Site
from tightfit.core.errors import NotFoundError
from tightfit.runs.environment import NETWORK_FILE_SYSTEMS, find_file_system

OWN_KINDS = frozenset(
    {"tmpfs", "ramfs", "devtmpfs", "overlay", "aufs", "squashfs", "proc", "sysfs", "cgroup",
     "cgroup2", "devpts"}
)  # fmt: skip
"""In a machine's memory, in its kernel or in a container: no other machine sees them."""
OWN_FOLDERS = tuple(map(Path, ("/tmp", "/var/tmp", "/dev", "/run", "/proc", "/sys")))
"""Every machine has its own, whatever disk they are on."""


def check_shared(places: Mapping[str, Path], site: Site) -> list[str]:
    """Refuse a place that other machines cannot see; a note on those that may be seen or not.

    `places` are by what they hold: `The run folder`. What lies in `runs` or `shared` of site.yaml
    is shared by the site's own word. A disk of this machine may well be exported to all others,
    which does not show here.
    """
    stated = [Path(path).expanduser() for path in (site.runs, *site.shared) if path is not None]
    unsure = []
    for what, path in places.items():
        kind = find_file_system(path)
        if kind in NETWORK_FILE_SYSTEMS or _is_inside(path, stated):
            continue
        if kind in OWN_KINDS or _is_inside(path, OWN_FOLDERS):
            raise _not_shared(what, path, kind)
        unsure.append(f"{what.lower()} {path}")
    if not unsure:
        return []
    return [
        f"Every node must see {' and '.join(unsure)}, which cannot be told from here; to try it: "
        "tightfit preflight --on slurm:PARTITION --shared FOLDER. Where they do, `runs:` or "
        "`shared:` in site.yaml says so; where not, --output names another folder."
    ]


def is_this_machine(nodes: Iterable[str]) -> bool:
    """Whether the cluster is this machine alone, which sees all of its own files."""
    here = _short(socket.gethostname())
    return all(_short(node) == here for node in nodes)


def _short(name: str) -> str:
    return name.partition(".")[0].casefold()


def _is_inside(path: Path, roots: Iterable[Path]) -> bool:
    """By the names as they are given and by where links lead."""
    place = path.resolve()
    return any(
        place.is_relative_to(root.resolve()) or path.absolute().is_relative_to(root.absolute())
        for root in roots
    )


def _not_shared(what: str, path: Path, kind: str | None) -> NotFoundError:
    why = "in a folder that every machine has of its own"
    if kind in OWN_KINDS:
        why = f"on a {kind} of this machine"
    if what == "The run folder":
        remedy = "--output FOLDER on a shared file system, or `runs:` in site.yaml"
    else:
        remedy = "move it to a shared file system"
    return NotFoundError(
        f"No node would see {what.lower()} {path}: it lies {why}.",
        remedy=f"{remedy}    (where every node does see it: `shared:` in site.yaml)",
    )
