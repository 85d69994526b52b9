"""Damaged GGUF files: refused by our reader, or by llama.cpp in a process of its own."""

from __future__ import annotations

import contextlib
from pathlib import Path
from random import Random

import gguf
import pytest

from hostile_trials import count_cases
from small_models import make_llama
from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError, UserError
from tightfit.core.sampling import Sampling
from tightfit.engines.llama_cpp import read_llama_file
from tightfit.engines.open import EngineRequest, open_engine
from tightfit.engines.protocol import Request, answer
from tightfit.export.convert import convert_to_gguf
from tightfit.models.gguf import TENSOR_TYPES, read_gguf_header, read_gguf_model
from tightfit.runtime.model_files import find_artefact

NUM_READ = count_cases(1000)
NUM_OPENED = NUM_READ // 20
"""A process each."""
FILLINGS = (b"\0", b"\xff", b"\x01", b"\x7f")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("gguf")
    convert_to_gguf(make_llama(folder / "model"), folder / "small.gguf", dtype=Dtype.FP32)
    return (folder / "small.gguf").read_bytes()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "cache"))


def damage(whole: bytes, num_header_bytes: int, seed: int) -> bytes:
    """The file with a few bytes of its header changed, or with bytes missing or doubled."""
    chance = Random(seed)
    data = bytearray(whole)
    for _ in range(chance.randint(1, 3)):
        at, count = chance.randrange(4, num_header_bytes), chance.choice((1, 1, 2, 4, 8))
        match chance.randrange(8):
            case 0:
                del data[at : at + count]
            case 1:
                data[at:at] = data[at : at + count]
            case _:
                data[at : at + count] = chance.choice((*FILLINGS, chance.randbytes(1))) * count
    return bytes(data)


def open_and_answer(path: Path) -> None:
    request = EngineRequest(artefact=find_artefact(str(path)), context=64, slots=1, threads=1)
    engine = open_engine(request)
    try:
        answer(engine, Request(prompt=(5, 6, 7), sampling=Sampling(max_new_tokens=2)))
    finally:
        engine.close()


def test_types_are_those_of_the_gguf_package() -> None:
    assert {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()} == TENSOR_TYPES


def test_damaged_headers_are_read_or_refused(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(whole)
    size = min(tensor.start for tensor in read_gguf_header(path).tensors)
    num_refused = 0
    for seed in range(NUM_READ):
        path.write_bytes(damage(whole, size, seed))
        try:
            read_gguf_model(path)
            read_llama_file(path)
        except UserError:
            num_refused += 1
    assert num_refused > NUM_READ / 2


def test_files_that_our_reader_accepts_end_no_server(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(whole)
    size = min(tensor.start for tensor in read_gguf_header(path).tensors)
    num_opened = 0
    for seed in range(NUM_OPENED):
        path.write_bytes(damage(whole, size, seed))
        with contextlib.suppress(UserError):
            open_and_answer(path)
            num_opened += 1
    assert num_opened > 0


def test_a_file_that_crashes_llama_cpp_is_one_error(tmp_path: Path, whole: bytes) -> None:
    """A token that is there twice ends the process that reads it."""
    path = tmp_path / "twice.gguf"
    path.write_bytes(whole)
    tokens = read_gguf_header(path, keeps_arrays=True).metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, tuple)
    stored = [len(text).to_bytes(8, "little") + text for text in map(encode, tokens)]
    once = [record for record in stored if len(record) == 12 and whole.count(record) == 1]
    path.write_bytes(whole.replace(once[0], once[1]))
    with pytest.raises(InvalidInputError, match=r"llama\.cpp crashes on"):
        open_and_answer(path)


def encode(token: object) -> bytes:
    return str(token).encode()
