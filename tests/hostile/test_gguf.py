"""Damaged GGUF files: refused by our reader, or by llama.cpp in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import gguf
import pytest
from mutate import mutate_bytes

from hostile_trials import StartTrials
from small_models import make_llama
from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError
from tightfit.core.sampling import Sampling
from tightfit.engines.llama_cpp import read_llama_file
from tightfit.engines.llama_process import LlamaProcess, LlamaSettings
from tightfit.engines.open import EngineRequest, open_engine
from tightfit.engines.protocol import Request, answer
from tightfit.export.convert import convert_to_gguf
from tightfit.models.gguf import TENSOR_TYPES, read_gguf_header, read_gguf_model
from tightfit.runtime.model_files import find_artefact


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("gguf")
    convert_to_gguf(make_llama(folder / "model"), folder / "small.gguf", dtype=Dtype.FP32)
    return (folder / "small.gguf").read_bytes()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "cache"))


def open_and_answer(path: Path) -> None:
    request = EngineRequest(artefact=find_artefact(str(path)), context=64, slots=1, threads=1)
    engine = open_engine(request)
    try:
        answer(engine, Request(prompt=(5, 6, 7), sampling=Sampling(max_new_tokens=2)))
    finally:
        engine.close()


def test_types_are_those_of_the_gguf_package() -> None:
    assert {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()} == TENSOR_TYPES


def test_damaged_headers_are_read_or_refused(
    trials: StartTrials, tmp_path: Path, whole: bytes
) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(whole)
    size = min(tensor.start for tensor in read_gguf_header(path).tensors)

    def make(rng: Random) -> Callable[[], object]:
        path.write_bytes(whole[:4] + mutate_bytes(rng, whole[4:size]) + whole[size:])
        return lambda: (read_gguf_model(path), read_llama_file(path))

    once = trials("GGUF headers", num_short=400)
    once.try_each(make)
    assert once.tally.codes[InvalidInputError.exit_code] > once.tally.codes.total() / 2


def test_files_that_our_reader_accepts_end_no_server(
    trials: StartTrials, tmp_path: Path, whole: bytes
) -> None:
    path = tmp_path / "damaged.gguf"

    def make(rng: Random) -> Callable[[], object]:
        at = rng.randrange(4, len(whole) // 2)  # one byte, or hardly any would be opened
        path.write_bytes(whole[:at] + rng.randbytes(1) + whole[at + 1 :])
        return partial(open_and_answer, path)

    once = trials("GGUF in llama.cpp", num_short=12)
    once.try_each(make)
    assert once.tally.codes[0] > 0


def test_a_file_that_crashes_llama_cpp_is_one_error(tmp_path: Path, whole: bytes) -> None:
    """A token that is there twice ends the process that reads it."""
    path = tmp_path / "twice.gguf"
    path.write_bytes(whole)
    tokens = read_gguf_header(path, keeps_arrays=True).metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, tuple)
    stored = [len(text).to_bytes(8, "little") + text for text in map(encode, tokens)]
    once = [record for record in stored if len(record) == 12 and whole.count(record) == 1]
    path.write_bytes(whole.replace(once[0], once[1]))
    settings = LlamaSettings(path=str(path), context=64, slots=1, device="cpu", threads=1)
    with pytest.raises(InvalidInputError, match=r"llama\.cpp crashes on"):
        LlamaProcess(settings)


def encode(token: object) -> bytes:
    return str(token).encode()
