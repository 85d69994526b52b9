"""A farm's store in memory that counts requests, for simulations and tests."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

from tightfit.farming.store import StoredFile

NAMES_PER_LISTING = 128
"""What one reply of an NFS server to READDIR holds, at 64 bytes a name and 8 KiB a reply."""
NFS_REQUESTS_PER_CALL = {
    "create": 2,
    "write": 3,
    "publish": 6,
    "replace": 4,
    "look": 3,
    "miss": 1,
    "beat": 1,
}
"""Requests to an NFS 4 server. `create`: OPEN, CLOSE; `write`: with a WRITE between; `publish`:
OPEN, WRITE, COMMIT, CLOSE, LINK, REMOVE; `replace`: OPEN, WRITE, CLOSE, RENAME; `look`: OPEN, READ,
CLOSE, of which a `miss` is the first; `beat`: SETATTR, whose reply has the time."""


class MemoryStore:
    """Folders as dictionaries. `clock` is the file server's."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.calls: Counter[str] = Counter()
        """By operation."""
        self.num_requests = 0
        """To a file server, had there been one."""
        self._clock = clock
        self._folders: dict[str, dict[str, StoredFile]] = defaultdict(dict)

    def create(self, path: str, content: bytes = b"") -> bool:
        is_new = self._add(path, content)
        self._count("create", "miss" if not is_new else "write" if content else "create")
        return is_new

    def publish(self, path: str, content: bytes) -> bool:
        self._count("publish", "publish")
        return self._add(path, content)

    def replace(self, path: str, content: bytes) -> None:
        self._count("replace", "replace")
        folder, name = _split_path(path)
        self._folders[folder][name] = StoredFile(self._clock(), content)

    def look(self, path: str) -> StoredFile | None:
        folder, name = _split_path(path)
        found = self._folders[folder].get(name)
        self._count("look", "look" if found else "miss")
        return found

    def names(self, folder: str) -> list[str]:
        found = list(self._folders[folder])
        self.calls["names"] += 1
        self.num_requests += 1 + len(found) // NAMES_PER_LISTING
        return found

    def beat(self, path: str) -> float:
        self._count("beat", "beat")
        folder, name = _split_path(path)
        seen = self._folders[folder].get(name)
        if seen is None:
            raise FileNotFoundError(path)
        self._folders[folder][name] = StoredFile(self._clock(), seen.content)
        return self._clock()

    def _add(self, path: str, content: bytes) -> bool:
        folder, name = _split_path(path)
        if name in self._folders[folder]:
            return False
        self._folders[folder][name] = StoredFile(self._clock(), content)
        return True

    def _count(self, call: str, cost: str) -> None:
        self.calls[call] += 1
        self.num_requests += NFS_REQUESTS_PER_CALL[cost]


def _split_path(path: str) -> tuple[str, str]:
    folder, _, name = path.rpartition("/")
    return folder, name
