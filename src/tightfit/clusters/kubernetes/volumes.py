"""Which folder of this machine a pod sees, and under which path.

A volume that has a `local` path is mounted under that path too. Whatever plan, recipe and
checkpoints say of files then holds here and in the pods, and no path is ever rewritten.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tightfit.clusters.site import KubernetesSite, Volume
from tightfit.core.errors import InvalidInputError, NotFoundError

_SYSTEM = re.compile(
    "/|/(bin|boot|dev|dev/shm|etc|etc/tightfit|lib|lib64|opt|proc|run|sbin|sys|tmp|usr|var)"
    "|/usr/(bin|lib|local|local/bin|local/lib|share)"
)
"""Where a volume would hide what the container itself needs."""
OWN_VOLUMES = ("shm", "scratch", "config")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One volume under one path of the container."""

    volume: Volume
    path: str
    is_read_only: bool


def choose_mounts(site: KubernetesSite, *, written: Sequence[str] = ()) -> tuple[Mount, ...]:
    """Every volume of the site; only those that hold a `written` path can be written to.

    Of two nested ones that is the inner alone.
    """
    _check_names(site)
    holders = [find_volume(site, path) for path in written]
    mounts: dict[str, Mount] = {}
    for volume in site.volumes:
        is_written = volume in holders
        for path in _paths_of(volume):
            if _SYSTEM.fullmatch(path):
                raise InvalidInputError(
                    f"Volume `{volume.name}` would hide {path} of the container.",
                    remedy="mount it elsewhere in site.yaml, like `mount: /data`",
                )
            if path in mounts:
                raise InvalidInputError(
                    f"Volumes `{mounts[path].volume.name}` and `{volume.name}` are both {path}.",
                    remedy="give each volume of site.yaml its own `mount` and `local`",
                )
            mounts[path] = Mount(volume=volume, path=path, is_read_only=not is_written)
    return tuple(mounts.values())


def find_volume(site: KubernetesSite, path: str) -> Volume | None:
    """The volume through which pods see a path; of two nested ones the inner."""
    found = [
        (len(PurePosixPath(root).parts), volume)
        for volume in site.volumes
        for root in _paths_of(volume)
        if _is_inside(path, root)
    ]
    return max(found, key=lambda item: item[0])[1] if found else None


def require_volume(site: KubernetesSite, path: str, what: str) -> Volume:
    """The volume that holds a path, or which one is missing."""
    volume = find_volume(site, path)
    if volume is not None:
        return volume
    real = os.path.realpath(path)
    if real != path and find_volume(site, real) is not None:
        raise NotFoundError(
            f"{what} {path} is a link to {real}; pods see only the latter.",
            remedy=f"name it as pods see it: {real}",
        )
    seen = ", ".join(root for one in site.volumes for root in _paths_of(one)) or "none"
    raise NotFoundError(
        f"No pod would see {what.lower()} {path}: the volumes of site.yaml are {seen}.",
        remedy=f"add one to kubernetes.volumes with `local: {Path(path).parent}`, or move "
        "it into one of them",
    )


def _check_names(site: KubernetesSite) -> None:
    names = [volume.name for volume in site.volumes]
    wrong = [name for name in names if not _LABEL.fullmatch(name) or name in OWN_VOLUMES]
    if wrong:
        raise InvalidInputError(
            f"`{wrong[0]}` cannot be the name of a volume in site.yaml.",
            remedy=f"lower-case letters, digits and `-`, but not {', '.join(OWN_VOLUMES)}",
        )
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidInputError(
            f"site.yaml has two volumes called `{twice}`.", remedy="give each its own `name`"
        )


def _paths_of(volume: Volume) -> tuple[str, ...]:
    paths = [str(PurePosixPath(volume.mount))]
    if volume.local is not None:
        paths.append(str(Path(volume.local).expanduser()))
    return tuple(dict.fromkeys(paths))


def _is_inside(path: str, root: str) -> bool:
    return PurePosixPath(path).is_relative_to(root)
