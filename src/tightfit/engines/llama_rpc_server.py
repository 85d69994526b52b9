"""`python -m tightfit.engines.llama_rpc_server --address A`: lend this machine to `--hosts`.

llama.cpp's own rpc-server, out of the wheel and the library that `build_rpc` made for it: the GPUs
that the wheel can use, else the CPU. It asks for no password, so it wants an address to listen at.
"""

from __future__ import annotations

import argparse
import ctypes
import signal
import sys

from tightfit.core.errors import SetupError, UserError
from tightfit.engines.llama_devices import DEFAULT_RPC_PORT, choose_threads, list_gpus, read_hosts
from tightfit.runtime.llama_cpp import find_rpc_function, load_library, load_rpc

_LINE_BUFFERED = 1
"""`_IOLBF` of glibc and musl."""


def main() -> int:
    """Serve one client after the other until ended."""
    parser = argparse.ArgumentParser(prog="python -m tightfit.engines.llama_rpc_server")
    parser.add_argument("--address", required=True, help="of this machine, in a private network")
    parser.add_argument("--port", type=int, default=DEFAULT_RPC_PORT)
    parser.add_argument("--threads", type=int, help="of the CPU; default: the physical cores")
    flags = parser.parse_args()
    try:
        (endpoint,) = read_hosts(f"{flags.address}:{flags.port}")
        serve_devices(endpoint, num_threads=choose_threads(flags.threads))
    except UserError as error:
        print(error.as_lines(), file=sys.stderr)
        return error.exit_code
    return 0


def serve_devices(endpoint: str, *, num_threads: int) -> None:
    """Return only if it cannot listen there. Source: `main` in llama.cpp's rpc-server.cpp."""
    load_rpc()
    library, pointer, size = load_library(), ctypes.c_void_p, ctypes.c_size_t
    library.ggml_backend_dev_by_name.restype = pointer
    library.ggml_backend_dev_by_name.argtypes = [ctypes.c_char_p]
    names = list_gpus() or ("CPU",)
    devices = (pointer * len(names))(
        *(library.ggml_backend_dev_by_name(name.encode()) for name in names)
    )
    kind = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, size, size, pointer)
    start = kind(find_rpc_function("ggml_backend_rpc_start_server"))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python handles no signals while C code serves
    # llama.cpp prints its address through C's stdout, which is block-buffered into pipes.
    process = ctypes.CDLL(None)
    process.setvbuf(ctypes.c_void_p.in_dll(process, "stdout"), None, _LINE_BUFFERED, 0)
    start(endpoint.encode(), None, num_threads, len(devices), devices)
    raise SetupError(
        f"The rpc-server cannot listen at {endpoint}.",
        remedy="an address of this machine and a port that nobody uses: --address A --port N",
    )


if __name__ == "__main__":
    sys.exit(main())
