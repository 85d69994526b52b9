"""llama.cpp's RPC backend, which the wheel leaves out: where it is kept, how it is loaded."""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
from dataclasses import dataclass
from pathlib import Path

from tightfit.core.cache import cache_folder
from tightfit.core.errors import EnvironmentFaultError
from tightfit.runtime.ggml import load_library, supports_rpc

HOW_TO_BUILD = (
    "python -m tightfit.runtime.build_rpc    (once, here and on each host; a minute). Its server "
    "asks for no password: private network only"
)

_PROTOCOL_NUMBER = re.compile(r"#define\s+RPC_PROTO_(MAJOR|MINOR)_VERSION\s+(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """What two sides of a connection must agree on. Source: `ggml-rpc.h`."""

    major: int
    minor: int

    def understands(self, server: Protocol) -> bool:
        """As llama.cpp's client decides it. Source: `negotiate_hello` in its ggml-rpc.cpp."""
        return server.major == self.major and server.minor <= self.minor

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


@dataclass(frozen=True, slots=True)
class RpcFolder:
    """What `build_rpc` makes for one release of the wheel."""

    path: Path

    @property
    def library(self) -> Path:
        return self.path / "libggml-rpc.so"

    @property
    def header(self) -> Path:
        """The release's own `ggml-rpc.h`, which states the protocol."""
        return self.path / "ggml-rpc.h"


def installed_release() -> str:
    """The wheel's release: a library of another one would read other structures."""
    return importlib.metadata.version("xllamacpp")


def rpc_folder() -> RpcFolder:
    """Where the backend for the installed wheel is kept. Not made here."""
    return RpcFolder(cache_folder() / "llama-rpc" / installed_release())


def read_protocol(header: Path) -> Protocol:
    """The protocol that a `ggml-rpc.h` states."""
    numbers = dict(_PROTOCOL_NUMBER.findall(header.read_text("utf-8")))
    return Protocol(major=int(numbers["MAJOR"]), minor=int(numbers["MINOR"]))


def load_rpc() -> Protocol | None:
    """Give the loaded llama.cpp its RPC backend; the protocol where it is known.

    A build that has the backend in itself needs no library, and does not tell its protocol.
    """
    library = load_library()
    if supports_rpc():
        return _known_protocol()
    folder = rpc_folder()
    if not folder.library.is_file():
        raise EnvironmentFaultError(
            "llama.cpp's RPC backend, which --hosts needs, is not in the xllamacpp wheel and was "
            "not built here yet.",
            remedy=HOW_TO_BUILD,
        )
    # The backend takes ggml's functions from the wheel, which Python loaded for itself alone.
    ctypes.CDLL(library._name, mode=ctypes.RTLD_GLOBAL)
    library.ggml_backend_load.restype = ctypes.c_void_p
    library.ggml_backend_load.argtypes = [ctypes.c_char_p]
    if not library.ggml_backend_load(str(folder.library).encode()):
        raise EnvironmentFaultError(
            f"llama.cpp cannot load {folder.library}.",
            remedy=f"rm -r {folder.path}; {HOW_TO_BUILD}",
        )
    return _known_protocol()


def find_rpc_function(name: str) -> int:
    """The address of a function that the loaded backend offers by name."""
    library = load_library()
    pointer, text = ctypes.c_void_p, ctypes.c_char_p
    library.ggml_backend_reg_by_name.restype = pointer
    library.ggml_backend_reg_by_name.argtypes = [text]
    library.ggml_backend_reg_get_proc_address.restype = pointer
    library.ggml_backend_reg_get_proc_address.argtypes = [pointer, text]
    backend = library.ggml_backend_reg_by_name(b"RPC")
    found = backend and library.ggml_backend_reg_get_proc_address(backend, name.encode())
    if not found:
        raise EnvironmentFaultError(
            f"The installed llama.cpp has an RPC backend without `{name}`.", remedy=HOW_TO_BUILD
        )
    return int(found)


def _known_protocol() -> Protocol | None:
    header = rpc_folder().header
    return read_protocol(header) if header.is_file() else None
