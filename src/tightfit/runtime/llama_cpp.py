"""llama.cpp's shared library from the `xllamacpp` wheel: its RPC backend, logits, tokenizer."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tightfit.core.errors import InvalidInputError, SetupError
from tightfit.core.files import cache_folder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


REMEDY = "pip install 'tightfit[gguf]'    (the xllamacpp wheel; no compiler needed)"

_LogHandler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


_drop = _LogHandler(lambda _level, _text, _data: None)
"""Drops llama.cpp's log; its errors come as return values."""


def has_llama() -> bool:
    """Whether GGUF files can be run and quantized here."""
    return importlib.util.find_spec("xllamacpp") is not None


@functools.cache
def load_library() -> ctypes.CDLL:
    """The library with the C functions of llama.h and ggml.h, once per process."""
    spec = importlib.util.find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        raise SetupError("GGUF files need llama.cpp, which is not installed.", remedy=REMEDY)
    found = sorted(Path(spec.origin).parent.glob("xllamacpp*.so"))
    if not found:
        raise SetupError("The installed xllamacpp has no library.", remedy=REMEDY)
    try:
        library = ctypes.CDLL(str(found[0]))
        library.llama_log_set.argtypes = [_LogHandler, ctypes.c_void_p]
        library.llama_log_set(_drop, None)
        library.llama_backend_init()
    except (OSError, AttributeError) as error:
        raise SetupError(
            f"llama.cpp cannot be loaded from {found[0].name}: {error}.", remedy=REMEDY
        ) from error
    return library


def supports_rpc() -> bool:
    """Whether this build can use other hosts through llama.cpp's RPC backend."""
    library = load_library()
    library.llama_supports_rpc.restype = ctypes.c_bool
    return bool(library.llama_supports_rpc())


# llama.cpp's RPC backend, which the wheel leaves out: where it is kept, how it is loaded.

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
    from importlib import metadata  # slow to import, and `--help` imports this module

    return metadata.version("xllamacpp")


def rpc_folder() -> RpcFolder:
    """Where the backend for the installed wheel is kept. Not made here."""
    return RpcFolder(cache_folder() / "llama-rpc" / installed_release())


def read_protocol(header: Path) -> Protocol:
    """The protocol that a `ggml-rpc.h` states."""
    numbers = dict(_PROTOCOL_NUMBER.findall(header.read_text("utf-8")))
    return Protocol(major=int(numbers["MAJOR"]), minor=int(numbers["MINOR"]))


def load_rpc() -> Protocol | None:
    """Give the loaded llama.cpp its RPC backend; the protocol where it is known.

    A build that has the backend in itself needs no library, and does not state its protocol.
    """
    library, folder = load_library(), rpc_folder()
    if not supports_rpc():
        if not folder.library.is_file():
            raise SetupError(
                "llama.cpp's RPC backend, which --hosts needs, is not in the xllamacpp wheel and "
                "was not built here yet.",
                remedy=HOW_TO_BUILD,
            )
        # The backend takes ggml's functions from the wheel, which Python loaded for itself alone.
        ctypes.CDLL(library._name, mode=ctypes.RTLD_GLOBAL)
        library.ggml_backend_load.restype = ctypes.c_void_p
        library.ggml_backend_load.argtypes = [ctypes.c_char_p]
        if not library.ggml_backend_load(str(folder.library).encode()):
            raise SetupError(
                f"llama.cpp cannot load {folder.library}.",
                remedy=f"rm -r {folder.path}; {HOW_TO_BUILD}",
            )
    return read_protocol(folder.header) if folder.header.is_file() else None


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
        raise SetupError(
            f"The installed llama.cpp has an RPC backend without `{name}`.", remedy=HOW_TO_BUILD
        )
    return int(found)


# A GGUF file's scores and tokenizer through llama.h: what the HTTP-shaped server does not give.


class _Opaque(ctypes.Structure):
    """Parameters that only llama.cpp itself fills in and reads.

    Larger than any release's struct: one of this size travels by hidden pointer or on
    the stack, where the callee reads as much as it knows of.
    """

    _fields_ = (("content", ctypes.c_uint32 * 512),)


class _Batch(ctypes.Structure):
    """`struct llama_batch`, with room behind it for fields of later releases."""

    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
        ("spare", ctypes.c_uint32 * 16),
    )


EMBEDDED_POSITIONS = 512


class LlamaModel:
    """One GGUF file in memory with a context of its own. Not for several threads at once."""

    def __init__(
        self,
        path: Path,
        *,
        num_positions: int = 512,
        num_threads: int = 1,
        adapters: Sequence[Path] = (),
    ) -> None:
        self._library = _declare(load_library())
        self._num_positions = num_positions
        self._context = None
        self._model = self._library.llama_model_load_from_file(
            str(path).encode(), self._library.llama_model_default_params()
        )
        if not self._model:
            raise InvalidInputError(
                f"llama.cpp cannot load {path}.",
                remedy="make or fetch the file again; `tightfit models FILE` shows what is in it",
            )
        # Before the context, whose graphs are sized for them. The model frees them with itself.
        self._adapters = {path: self._load_adapter(path) for path in adapters}
        self._vocabulary = self._library.llama_model_get_vocab(self._model)
        self._context = self._make_context(num_threads)
        self._batch = self._library.llama_batch_init(num_positions, 0, 1)

    @property
    def num_vocabulary(self) -> int:
        return int(self._library.llama_vocab_n_tokens(self._vocabulary))

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Scores of every next token after each of `tokens`, from an empty cache."""
        import numpy as np

        self._clear(tokens)
        self._decode(tokens, 0)
        scores = self._library.llama_get_logits(self._context)
        shape = (len(tokens), self.num_vocabulary)
        copied: NDArray[np.float32] = np.ctypeslib.as_array(scores, shape).copy()
        return copied

    def embed(self, tokens: Sequence[int], *, is_mean: bool) -> NDArray[np.float32]:
        """The mean of the last hidden states, or the last one: (width,)."""
        import numpy as np

        library, context = self._library, self._context
        width = int(library.llama_model_n_embd(self._model))
        total: NDArray[np.float32] = np.zeros(width, dtype=np.float32)
        self._clear(tokens)
        library.llama_set_embeddings(context, True)
        try:
            # In pieces: beside the states, the scores of a piece are held.
            for start in range(0, len(tokens), EMBEDDED_POSITIONS):
                piece = tokens[start : start + EMBEDDED_POSITIONS]
                self._decode(piece, start)
                if library.llama_pooling_type(context):  # the file itself states one
                    found = np.ctypeslib.as_array(
                        library.llama_get_embeddings_seq(context, 0), (width,)
                    )
                    last, mean = found, found
                else:
                    states = np.ctypeslib.as_array(
                        library.llama_get_embeddings(context), (len(piece), width)
                    )
                    last, mean = states[-1], states.mean(axis=0)
                total = total + mean * len(piece) if is_mean else last.copy()
        finally:
            library.llama_set_embeddings(context, False)
        return total / np.float32(len(tokens)) if is_mean else total

    def _load_adapter(self, path: Path) -> int:
        loaded = self._library.llama_adapter_lora_init(self._model, str(path).encode())
        if not loaded:
            self.close()
            raise InvalidInputError(
                f"llama.cpp cannot load the adapter {path}.", remedy="make the file again"
            )
        return int(loaded)

    def use_adapter(self, path: Path | None) -> None:
        """Compute with one of the adapters, or with none, from now on."""
        count = 0 if path is None else 1
        handles = (ctypes.c_void_p * 1)(self._adapters[path] if path is not None else None)
        scales = (ctypes.c_float * 1)(1.0)
        self._library.llama_set_adapters_lora(self._context, handles, count, scales)

    def _clear(self, tokens: Sequence[int]) -> None:
        if not 0 < len(tokens) <= self._num_positions:
            raise ValueError(f"{len(tokens)} tokens, where 1 to {self._num_positions} fit")
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)

    def _decode(self, tokens: Sequence[int], start: int) -> None:
        """Compute tokens that follow the first `start`."""
        batch = self._batch
        for place, token in enumerate(tokens):
            batch.token[place] = token
            batch.pos[place] = start + place
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = 0
            batch.logits[place] = 1
        batch.n_tokens = len(tokens)
        code = self._library.llama_decode(self._context, batch)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code}")

    def tokenize(self, text: str) -> list[int]:
        """By the file's own tokenizer; control tokens count wherever they stand; none is added."""
        data = text.encode()
        room = len(data) + 16
        tokens = (ctypes.c_int32 * room)()
        count = self._library.llama_tokenize(
            self._vocabulary, data, len(data), tokens, room, False, True
        )
        if count < 0:
            raise RuntimeError(f"llama_tokenize wants room for {-count} tokens")
        return list(tokens[:count])

    def close(self) -> None:
        """Give the memory back. Safe to call twice."""
        if self._context:
            self._library.llama_batch_free(self._batch)
            self._library.llama_free(self._context)
            self._context = None
        if self._model:
            self._library.llama_model_free(self._model)
            self._model = None

    def __enter__(self) -> LlamaModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_context(self, num_threads: int) -> int:
        settings = self._library.llama_context_default_params()
        # n_ctx, n_batch, n_ubatch: the first three fields of every release so far.
        for field in range(3):
            settings.content[field] = self._num_positions
        context = self._library.llama_init_from_model(self._model, settings)
        if not context or self._library.llama_n_ubatch(context) != self._num_positions:
            self.close()
            raise RuntimeError("llama.cpp made no context of the wanted size")
        self._library.llama_set_n_threads(context, num_threads, num_threads)
        return int(context)


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """The functions' C types. Source: llama.h."""
    pointer, number, flag = ctypes.c_void_p, ctypes.c_int32, ctypes.c_bool
    signatures: dict[str, tuple[object, list[object]]] = {
        "llama_model_default_params": (_Opaque, []),
        "llama_context_default_params": (_Opaque, []),
        "llama_model_load_from_file": (pointer, [ctypes.c_char_p, _Opaque]),
        "llama_init_from_model": (pointer, [pointer, _Opaque]),
        "llama_model_free": (None, [pointer]),
        "llama_free": (None, [pointer]),
        "llama_n_ubatch": (ctypes.c_uint32, [pointer]),
        "llama_set_n_threads": (None, [pointer, number, number]),
        "llama_model_get_vocab": (pointer, [pointer]),
        "llama_vocab_n_tokens": (number, [pointer]),
        "llama_get_memory": (pointer, [pointer]),
        "llama_memory_clear": (None, [pointer, flag]),
        "llama_batch_init": (_Batch, [number, number, number]),
        "llama_batch_free": (None, [_Batch]),
        "llama_decode": (number, [pointer, _Batch]),
        "llama_get_logits": (ctypes.POINTER(ctypes.c_float), [pointer]),
        "llama_adapter_lora_init": (pointer, [pointer, ctypes.c_char_p]),
        "llama_set_adapters_lora": (
            number,
            [pointer, ctypes.POINTER(pointer), ctypes.c_size_t, ctypes.POINTER(ctypes.c_float)],
        ),
        "llama_set_embeddings": (None, [pointer, flag]),
        "llama_get_embeddings": (ctypes.POINTER(ctypes.c_float), [pointer]),
        "llama_get_embeddings_seq": (ctypes.POINTER(ctypes.c_float), [pointer, number]),
        "llama_pooling_type": (number, [pointer]),
        "llama_model_n_embd": (number, [pointer]),
        "llama_tokenize": (
            number,
            [pointer, ctypes.c_char_p, number, ctypes.POINTER(number), number, flag, flag],
        ),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
