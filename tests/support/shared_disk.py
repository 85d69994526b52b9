"""A shared file system for tests: one host serves a folder over TCP, others mount it by FUSE.

    python tests/shared_disk.py serve FOLDER ADDRESS PORT
    python tests/shared_disk.py mount ADDRESS PORT MOUNTPOINT

What a host reads there crosses its own link and the server's, so that shaping a link shapes the
storage. Flat folders, read only, and no library: the kernel's protocol, version 7.31, by hand.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import socket
import stat
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path

NUM_THREADS = 3
_REQUEST = struct.Struct("!IQI")
_LIST = 0xFFFFFFFF
_IN = struct.Struct("<IIQQIIIHH")
_OUT = struct.Struct("<IiQ")
_ATTR = struct.Struct("<6Q10I")
_READ = struct.Struct("<QQIIQII")
_ROOT = 1
_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ_OP, _STATFS = 1, 2, 3, 14, 15, 17
_RELEASE, _FLUSH, _INIT, _OPENDIR, _READDIR, _RELEASEDIR = 18, 25, 26, 27, 28, 29
_SILENT = (_FORGET, 36, 42)
"""Forget, interrupt, batch forget: the kernel waits for no answer."""
_ASYNC_READ, _MAX_PAGES = 1, 1 << 22
_MOST_BYTES = 1 << 20


def receive(link: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        part = link.recv(num_bytes - len(data))
        if not part:
            raise ConnectionError("the server has gone")
        data += part
    return bytes(data)


def serve(folder: Path, address: str, port: int) -> None:
    """Answer reads of the folder's files by number until killed."""
    server = socket.create_server((address, port), backlog=64)
    print("ready", flush=True)
    while True:
        link, _ = server.accept()
        threading.Thread(target=_answer, args=(link, folder), daemon=True).start()


def _answer(link: socket.socket, folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir())
    files = [os.open(folder / name, os.O_RDONLY) for name in names]
    try:
        while True:
            number, offset, size = _REQUEST.unpack(receive(link, _REQUEST.size))
            if number == _LIST:
                facts = [os.fstat(file) for file in files]
                listed = [
                    (name, fact.st_size, fact.st_mtime_ns)
                    for name, fact in zip(names, facts, strict=True)
                ]
                data = json.dumps(listed).encode()
            else:
                data = os.pread(files[number], size, offset)
            link.sendall(struct.pack("!I", len(data)) + data)
    except OSError:
        pass
    finally:
        link.close()
        for file in files:
            os.close(file)


class Mounted:
    """The client's side: requests of the kernel, answered by the server."""

    def __init__(self, address: str, port: int, mountpoint: Path) -> None:
        self._place = (address, port)
        self._listed: list[tuple[str, int, int]] = json.loads(
            self._fetch(self._connect(), _LIST, 0, 0)
        )
        self._fuse = _open_fuse()
        libc = ctypes.CDLL(None, use_errno=True)
        options = f"fd={self._fuse},rootmode=40000,user_id=0,group_id=0,allow_other"
        done = libc.mount(b"shared", os.fsencode(mountpoint), b"fuse", 1, options.encode())
        if done != 0:
            raise OSError(ctypes.get_errno(), "mount")

    def _connect(self) -> socket.socket:
        return socket.create_connection(self._place)

    def _fetch(self, link: socket.socket, number: int, offset: int, size: int) -> bytes:
        link.sendall(_REQUEST.pack(number, offset, size))
        (length,) = struct.unpack("!I", receive(link, 4))
        return receive(link, length)

    def run(self) -> None:
        """Until the file system is unmounted or this process is killed."""
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(NUM_THREADS)]
        for thread in threads:
            thread.start()
        print("ready", flush=True)
        for thread in threads:
            thread.join()

    def _work(self) -> None:
        link = self._connect()
        while True:
            try:
                request = os.read(self._fuse, _MOST_BYTES + 4096)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    continue
                return
            head = _IN.unpack_from(request)
            opcode, unique, node = head[1], head[2], head[3]
            if opcode in _SILENT:
                continue
            try:
                body, code = self._do(opcode, node, request[_IN.size :], link), 0
            except OSError as error:
                body, code = b"", -(error.errno or errno.EIO)
            os.write(self._fuse, _OUT.pack(_OUT.size + len(body), code, unique) + body)

    def _do(self, opcode: int, node: int, body: bytes, link: socket.socket) -> bytes:
        if opcode == _READ_OP:
            _, offset, size, *_ = _READ.unpack_from(body)
            return self._fetch(link, node - 2, offset, size)
        known: dict[int, Callable[[], bytes]] = {
            _INIT: lambda: _begin(body),
            _LOOKUP: lambda: self._find(body.rstrip(b"\0").decode()),
            _GETATTR: lambda: struct.pack("<QII", 3600, 0, 0) + self._attr(node),
            _OPEN: lambda: struct.pack("<QII", node, 0, 0),
            _OPENDIR: lambda: struct.pack("<QII", node, 0, 0),
            _READDIR: lambda: self._list(*_READ.unpack_from(body)[1:3]),
            _RELEASE: bytes,
            _RELEASEDIR: bytes,
            _FLUSH: bytes,
            _STATFS: lambda: struct.pack("<5Q4I24x", 1 << 20, 0, 0, 100, 0, 4096, 255, 4096, 0),
        }
        if opcode not in known:
            raise OSError(errno.ENOSYS, "unknown")
        return known[opcode]()

    def _find(self, name: str) -> bytes:
        for node, (known, _, _) in enumerate(self._listed, start=_ROOT + 1):
            if known == name:
                return struct.pack("<4Q2I", node, 0, 3600, 3600, 0, 0) + self._attr(node)
        raise OSError(errno.ENOENT, name)

    def _attr(self, node: int) -> bytes:
        if node == _ROOT:
            return _ATTR.pack(1, 0, 0, 0, 0, 0, 0, 0, 0, 0o40755, 2, 0, 0, 0, 4096, 0)
        _, size, mtime_ns = self._listed[node - 2]
        seconds, rest = divmod(mtime_ns, 10**9)
        blocks = -(-size // 512)
        times = (seconds, seconds, seconds, rest, rest, rest)
        return _ATTR.pack(node, size, blocks, *times, 0o100644, 1, 0, 0, 0, 4096, 0)

    def _list(self, offset: int, size: int) -> bytes:
        found = b""
        for number, (name, _, _) in enumerate(self._listed[offset:], start=offset):
            text = name.encode()
            entry = struct.pack("<QQII", number + 2, number + 1, len(text), 8) + text
            entry += bytes(-len(entry) % 8)
            if len(found) + len(entry) > size:
                break
            found += entry
        return found


def _open_fuse() -> int:
    """A container's /dev may be without it."""
    path = "/dev/fuse"
    try:
        if not Path(path).exists():
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(10, 229))
        return os.open(path, os.O_RDWR)
    except OSError as error:
        sys.exit(f"{error}: try `modprobe fuse`, or docker run --privileged --device {path}")


def _begin(body: bytes) -> bytes:
    """What this side can do, of what the kernel offers."""
    flags = struct.unpack_from("<IIII", body)[3] & (_ASYNC_READ | _MAX_PAGES)
    sizes = (16, 12, 4096, 1, _MOST_BYTES // 4096, 0)
    return struct.pack("<IIIIHHIIHH32x", 7, 31, _MOST_BYTES, flags, *sizes)


def main(words: list[str]) -> None:
    if words[0] == "serve":
        serve(Path(words[1]), words[2], int(words[3]))
    else:
        Mounted(words[1], int(words[2]), Path(words[3])).run()


if __name__ == "__main__":
    main(sys.argv[1:])
