"""llama.cpp's shared library, as the `xllamacpp` wheel carries it: found, loaded, kept quiet."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path

from tightfit.core.errors import EnvironmentFaultError

REMEDY = "pip install 'tightfit[gguf]'    (the xllamacpp wheel; no compiler needed)"

_LogHandler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


_drop = _LogHandler(lambda _level, _text, _data: None)
"""llama.cpp's own log; its faults reach us by return values."""


def has_llama() -> bool:
    """Whether GGUF files can be run and quantized here."""
    return importlib.util.find_spec("xllamacpp") is not None


@functools.cache
def load_library() -> ctypes.CDLL:
    """The library with the C functions of llama.h and ggml.h, once per process."""
    spec = importlib.util.find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        raise EnvironmentFaultError(
            "GGUF files need llama.cpp, which is not installed.", remedy=REMEDY
        )
    found = sorted(Path(spec.origin).parent.glob("xllamacpp*.so"))
    if not found:
        raise EnvironmentFaultError("The installed xllamacpp has no library.", remedy=REMEDY)
    try:
        library = ctypes.CDLL(str(found[0]))
        library.llama_log_set.argtypes = [_LogHandler, ctypes.c_void_p]
        library.llama_log_set(_drop, None)
        library.llama_backend_init()
    except (OSError, AttributeError) as fault:
        raise EnvironmentFaultError(
            f"llama.cpp cannot be loaded from {found[0].name}: {fault}.", remedy=REMEDY
        ) from fault
    return library


def supports_rpc() -> bool:
    """Whether this build can use other hosts through llama.cpp's RPC backend."""
    library = load_library()
    library.llama_supports_rpc.restype = ctypes.c_bool
    return bool(library.llama_supports_rpc())
