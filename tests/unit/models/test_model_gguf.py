"""GGUF headers: written by the gguf package, by hand, and broken in every way."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError, UserError
from tightfit.models.gguf import LongArray, read_gguf_header
from tightfit.models.resolve import resolve_model

HIDDEN, INNER, VOCAB, HEADS, KV_HEADS, LAYERS = 64, 96, 80, 4, 2, 2
KV_WIDTH = HIDDEN // HEADS * KV_HEADS


def write_gguf(
    path: Path,
    architecture: str,
    tensors: dict[str, tuple[int, ...]],
    *,
    dtype: type = np.float16,
    tokens: bool = True,
) -> Path:
    """A file with zero weights, by the reference implementation. Shapes are row-major."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_context_length(512)
    if tokens:
        writer.add_token_list([f"token {index}" for index in range(VOCAB)])
    for name, shape in tensors.items():
        writer.add_tensor(name, np.zeros(shape, dtype=dtype if len(shape) > 1 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_tensors(*, tied: bool, bias: bool = False) -> dict[str, tuple[int, ...]]:
    tensors: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "rope_freqs.weight": (8,),
    }
    if not tied:
        tensors["output.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        for name, shape in {
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (KV_WIDTH, HIDDEN),
            "attn_v": (KV_WIDTH, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }.items():
            tensors[f"blk.{layer}.{name}.weight"] = shape
            if bias and name in {"attn_q", "attn_k", "attn_v"}:
                tensors[f"blk.{layer}.{name}.bias"] = shape[:1]
    return tensors


def count(tensors: dict[str, tuple[int, ...]]) -> int:
    return sum(int(np.prod(shape)) for name, shape in tensors.items() if "rope" not in name)


@pytest.mark.parametrize("tied", [True, False])
def test_llama_file_by_the_reference_writer(tmp_path: Path, tied: bool) -> None:
    tensors = llama_tensors(tied=tied)
    spec = resolve_model(str(write_gguf(tmp_path / "m.gguf", "llama", tensors)))

    assert spec.num_params == count(tensors)
    assert spec.tie_embeddings is tied
    assert spec.warnings == ()
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (HEADS, KV_HEADS, HIDDEN // HEADS)
    assert (spec.model_type, spec.stored_dtype) == ("llama", Dtype.FP16)
    assert spec.file_bytes == (tmp_path / "m.gguf").stat().st_size
    assert "q_proj" in spec.module_names


def test_qwen2_file_has_its_biases(tmp_path: Path) -> None:
    tensors = llama_tensors(tied=False, bias=True)
    spec = resolve_model(str(write_gguf(tmp_path / "m.gguf", "qwen2", tensors)))

    assert (spec.num_params, spec.warnings) == (count(tensors), ())


def test_the_tensors_decide_where_metadata_lead_elsewhere(tmp_path: Path) -> None:
    tensors = llama_tensors(tied=False) | {"blk.0.surprise.weight": (7, 11)}
    spec = resolve_model(str(write_gguf(tmp_path / "m.gguf", "llama", tensors)))

    assert spec.num_params == count(tensors)
    assert any(f"{count(tensors):,}" in warning for warning in spec.warnings)


def test_header_equals_what_the_reference_reader_sees(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", llama_tensors(tied=False))
    ours, theirs = read_gguf_header(path), gguf.GGUFReader(path)

    assert [(t.name, list(t.shape), t.type_id) for t in ours.tensors] == [
        (t.name, t.shape.tolist(), int(t.tensor_type)) for t in theirs.tensors
    ]
    assert set(ours.metadata) == {name for name in theirs.fields if not name.startswith("GGUF.")}
    assert ours.metadata["tokenizer.ggml.tokens"] == LongArray(VOCAB)

    whole = read_gguf_header(path, keeps_arrays=True)
    assert {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in whole.metadata.items()
    } == {name: theirs.fields[name].contents() for name in whole.metadata}
    assert [t.start for t in whole.tensors] == [t.data_offset for t in theirs.tensors]


def test_unknown_architecture_warns(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "brandnew", llama_tensors(tied=False))

    assert any("`brandnew`" in warning for warning in resolve_model(str(path)).warnings)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def head(*, version: int = 3, tensors: int = 0, pairs: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)


def number(key: str, value: int) -> bytes:
    return string(key) + struct.pack("<II", 4, value)


def test_metadata_alone_byte_by_byte(tmp_path: Path) -> None:
    """A header written by hand: version 2, no tensors, a vocabulary of three."""
    pairs = [
        string("general.architecture") + struct.pack("<I", 8) + string("llama"),
        number("llama.block_count", 2),
        number("llama.embedding_length", 8),
        number("llama.feed_forward_length", 16),
        number("llama.attention.head_count", 2),
        string("tokenizer.ggml.tokens")
        + struct.pack("<IIQ", 9, 8, 3)
        + string("a")
        + string("b")
        + string("ü"[:1]).replace(struct.pack("<Q", 1), struct.pack("<Q", 2)),
    ]
    path = tmp_path / "m.gguf"
    path.write_bytes(head(version=2, pairs=len(pairs)) + b"".join(pairs))

    spec = resolve_model(str(path))

    assert (spec.vocab_size, spec.num_layers) == (3, 2)
    assert spec.num_params == 3 * 8 + 2 * (4 * 64 + 3 * 128 + 16) + 8


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GGUF",
        b"GGML" + bytes(100),
        head(version=1),
        head(version=0x03000000),
        head(pairs=2**63),
        head(tensors=2**63),
        head(pairs=2**64 - 1) + bytes(1000),
        head(pairs=1) + struct.pack("<Q", 2**62),
        head(pairs=1) + string("k") + struct.pack("<I", 99) + bytes(64),
        head(pairs=1) + string("k") + struct.pack("<IIQ", 9, 8, 2**60) + bytes(64),
        head(pairs=1) + string("k") + struct.pack("<IIQ", 9, 10, 2**61) + bytes(64),
        head(pairs=1) + string("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(64),
        head(tensors=1) + string("t") + struct.pack("<I", 2**31) + bytes(64),
        head(tensors=1) + string("t") + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0) + bytes(64),
        head(tensors=1) + string("t") + struct.pack("<IQQIQ", 2, 4, 4, 0, 2**50) + bytes(64),
        head() + bytes(64),
    ],
)
def test_broken_files_are_one_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(InvalidInputError) as caught:
        resolve_model(str(path))

    assert "m.gguf" in caught.value.problem


def test_a_file_cut_anywhere_never_crashes(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", "llama", llama_tensors(tied=True)).read_bytes()
    path = tmp_path / "cut.gguf"
    cuts = range(0, len(whole) - 1, 97)
    for end in cuts:
        path.write_bytes(whole[:end])
        try:
            resolve_model(str(path))
        except InvalidInputError:
            continue
        assert end > len(whole) * 0.9  # only the last tensor's own data may be missing unseen

    assert len(cuts) > 500


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", "llama", llama_tensors(tied=True))


@settings(max_examples=500, deadline=None, database=None)
@given(changes=st.dictionaries(st.integers(0, 2500), st.integers(0, 255), min_size=1, max_size=6))
def test_damaged_headers_never_crash(whole_file: Path, changes: dict[int, int]) -> None:
    content = bytearray(whole_file.read_bytes())
    for at, value in changes.items():
        content[at] = value
    damaged = whole_file.with_name("damaged.gguf")
    damaged.write_bytes(content)
    with contextlib.suppress(UserError):  # anything else is a crash
        resolve_model(str(damaged))
