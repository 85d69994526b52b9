"""Whether a folder lies on a disk that several machines share."""

from __future__ import annotations

from pathlib import Path

import psutil

SHARED_KINDS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "afs", "9p",
     "glusterfs", "fuse.sshfs", "fuse.glusterfs", "fuse.juicefs", "wekafs", "panfs", "pvfs2"}
)  # fmt: skip


def is_network_folder(folder: Path) -> bool:
    """By the mount that holds it; False where mounts cannot be listed."""
    return find_kind(folder) in SHARED_KINDS


def find_kind(folder: Path) -> str | None:
    """The file system's name, as `nfs4` or `ext4`; None where mounts cannot be listed."""
    try:
        place = folder.resolve()
        mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    except (OSError, RuntimeError):  # links in a circle
        return None
    above = (path for path in (place, *place.parents) if path in mounts)
    return next((mounts[path].lower() for path in above), None)
