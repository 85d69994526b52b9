"""Other hosts that lend llama.cpp their memory and cores, through its RPC backend."""

from __future__ import annotations

import ctypes
import re
from typing import Any

from tightfit.core.errors import EnvironmentFaultError, UsageError

DEFAULT_PORT = 50052
MAX_HOSTS = 64

_ADDRESS = re.compile(
    r"(?P<host>[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?)(:(?P<port>[0-9]{1,5}))?"
)
"""Names and IPv4: llama.cpp takes what follows the first colon as the port."""
_HOW_TO = (
    "build llama.cpp with -DGGML_RPC=ON and xllamacpp against it; on each host run "
    "`rpc-server -H ADDRESS -p 50052`. It asks for no password: private network only"
)


def read_hosts(text: str | None) -> tuple[str, ...]:
    """`a:50052,b` as addresses with a port each."""
    if text is None:
        return ()
    addresses = [_read_address(part.strip()) for part in text.split(",") if part.strip()]
    twice = next((one for one in addresses if addresses.count(one) > 1), None)
    if twice is not None:
        raise UsageError(f"`--hosts` names {twice} twice.", remedy="name each host once")
    if not 0 < len(addresses) <= MAX_HOSTS:
        raise UsageError(
            f"`--hosts` names {len(addresses)} hosts; 1 to {MAX_HOSTS} can be used.",
            remedy=f"--hosts node1:{DEFAULT_PORT},node2:{DEFAULT_PORT}",
        )
    return tuple(addresses)


def _read_address(text: str) -> str:
    parts = _ADDRESS.fullmatch(text)
    port = int(parts["port"] or DEFAULT_PORT) if parts else 0
    if parts is None or not 0 < port < 65536:
        raise UsageError(
            f"`--hosts`: {text[:60]!r} is no address.",
            remedy=f"--hosts node1:{DEFAULT_PORT},node2:{DEFAULT_PORT}",
        )
    return f"{parts['host']}:{port}"


def add_hosts(hosts: tuple[str, ...]) -> None:
    """Make the hosts' devices known to llama.cpp, before a model is loaded."""
    from tightfit.runtime.ggml import load_library, supports_rpc

    if not hosts:
        return
    if not supports_rpc():
        raise EnvironmentFaultError(
            "The installed llama.cpp was built without its RPC backend, which --hosts needs; "
            "the xllamacpp wheels are.",
            remedy=_HOW_TO,
        )
    register_hosts(load_library(), hosts)


def register_hosts(library: Any, hosts: tuple[str, ...]) -> None:
    """As llama.cpp's own `--rpc` does it. Source: `add_rpc_devices` in its common/arg.cpp."""
    pointer, text = ctypes.c_void_p, ctypes.c_char_p
    library.ggml_backend_reg_by_name.restype = pointer
    library.ggml_backend_reg_by_name.argtypes = [text]
    library.ggml_backend_reg_get_proc_address.restype = pointer
    library.ggml_backend_reg_get_proc_address.argtypes = [pointer, text]
    library.ggml_backend_register.restype = None
    library.ggml_backend_register.argtypes = [pointer]
    backend = library.ggml_backend_reg_by_name(b"RPC")
    found = backend and library.ggml_backend_reg_get_proc_address(
        backend, b"ggml_backend_rpc_add_server"
    )
    if not found:
        raise EnvironmentFaultError(
            "The installed llama.cpp names an RPC backend but does not offer it.", remedy=_HOW_TO
        )
    add_server = ctypes.CFUNCTYPE(pointer, text)(found)
    for host in hosts:
        devices = add_server(host.encode())
        if not devices:
            raise EnvironmentFaultError(
                f"No llama.cpp rpc-server answers at {host}.",
                remedy="start `rpc-server -H ADDRESS -p PORT` there, of the same llama.cpp release",
            )
        library.ggml_backend_register(devices)
