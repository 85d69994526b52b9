"""Other hosts that lend llama.cpp their memory and cores, through its RPC backend."""

from __future__ import annotations

import ctypes
import re

from tightfit.core.errors import EnvironmentFaultError, UsageError
from tightfit.engines.llama.rpc_guard import silence_abort
from tightfit.engines.llama.rpc_hello import how_to_start, probe_host
from tightfit.runtime.ggml import load_library
from tightfit.runtime.rpc_library import find_rpc_function, load_rpc

DEFAULT_PORT = 50052
MAX_HOSTS = 16
"""llama.cpp spreads a model over as many devices. Source: `llama_max_devices` in llama.cpp."""

_ADDRESS = re.compile(
    r"(?P<host>[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?)(:(?P<port>[0-9]{1,5}))?"
)
"""Names and IPv4: llama.cpp takes what follows the first colon as the port."""


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
    if not hosts:
        return
    protocol = load_rpc()
    for host in hosts:
        probe_host(host, protocol)
    silence_abort(load_library())
    _register_hosts(hosts)


def _register_hosts(hosts: tuple[str, ...]) -> None:
    """As llama.cpp's own `--rpc` does it. Source: `add_rpc_devices` in its common/arg.cpp."""
    library, pointer = load_library(), ctypes.c_void_p
    library.ggml_backend_register.restype = None
    library.ggml_backend_register.argtypes = [pointer]
    add_server = ctypes.CFUNCTYPE(pointer, ctypes.c_char_p)(
        find_rpc_function("ggml_backend_rpc_add_server")
    )
    for host in hosts:
        devices = add_server(host.encode())
        if not devices:
            raise EnvironmentFaultError(
                f"The rpc-server at {host} offers no device.", remedy=how_to_start(host)
            )
        library.ggml_backend_register(devices)
