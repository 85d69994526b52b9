"""Flags of every verb that asks a model, read as typed and turned into what engines take."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner

from tightfit.api.options.common import Output
from tightfit.api.options.engines import (
    EngineOptions,
    SamplingOptions,
    engine_request,
    read_sampling,
)
from tightfit.cli.command import make_command
from tightfit.core.dtypes import Dtype
from tightfit.core.errors import UsageError
from tightfit.core.sampling import Sampling
from tightfit.runtime.model_files import Artefact, ArtefactKind

ARTEFACT = Artefact(name="it", kind=ArtefactKind.GGUF, path=Path("it"), tokenizer=Path("it"))


@dataclass(frozen=True, kw_only=True)
class Flags(EngineOptions, SamplingOptions):
    """A verb that has them all."""


def read(monkeypatch: pytest.MonkeyPatch, *words: str) -> Flags:
    """As the command line reads them, by way of a verb made for the test."""
    found: list[Flags] = []
    module = ModuleType("tightfit.cli.asking")
    vars(module)["asking"] = lambda options, _output: found.append(options)
    monkeypatch.setitem(sys.modules, "tightfit.cli.asking", module)
    app = typer.Typer()
    app.command()(make_command("asking", Flags, Output))
    result = CliRunner().invoke(app, list(words))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return found[0]


def test_nothing_said_is_every_default(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = read(monkeypatch)
    assert read_sampling(flags) == Sampling()
    request = engine_request(flags, ARTEFACT)
    assert (request.engine, request.device, request.weights) == ("auto", "auto", None)
    assert (request.context, request.slots, request.threads, request.hosts) == (
        None,
        None,
        None,
        (),
    )


def test_all_that_can_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = read(
        monkeypatch,
        *["--engine", "LLAMA.CPP", "--device", "cuda:1", "--weights", "bf16", "--context", "2048"],
        *[
            "--parallel",
            "3",
            "--threads",
            "2",
            "--hosts",
            "a,b:7",
            "--temperature",
            "0.5",
            "--top-p",
            "0.9",
        ],
        *["--top-k", "5", "--min-p", "0.1", "--repetition-penalty", "1.2", "--max-new-tokens", "9"],
        *["--seed", "0", "--stop", ";", "--stop", "END", "--set", "template=chatml"],
    )
    request = engine_request(flags, ARTEFACT)
    assert (request.engine, request.device) == ("llama.cpp", "cuda:1")
    assert request.weights is Dtype.BF16
    assert (request.context, request.slots, request.threads) == (2048, 3, 2)
    assert request.hosts == ("a:50052", "b:7")
    assert request.template == "chatml"
    assert read_sampling(flags) == Sampling(
        max_new_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        repetition_penalty=1.2,
        seed=0,
        stop=(";", "END"),
    )


@pytest.mark.parametrize(
    "words",
    [
        "--engine lama",
        "--weights int4",
        "--device gpu",
        "--device cuda:x",
        "--context 0",
        "--parallel -1",
        "--temperature -0.1",
        "--temperature hot",
        "--temperature nan",
        "--top-p 0",
        "--top-p 1.1",
        "--top-k -1",
        "--top-k 1.5",
        "--min-p 2",
        "--repetition-penalty 0",
        "--seed -1",
        "--seed 4294967295",
        "--max-new-tokens 0",
    ],
)
def test_a_wrong_value_names_the_option_and_one_that_works(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError) as caught:
        read(monkeypatch, *words.split())
    option = words.split(maxsplit=1)[0]
    assert option in caught.value.problem
    assert caught.value.remedy.startswith(option)


@pytest.mark.parametrize("words", ["--set color=red", "--hosts a:b"])
def test_words_are_read_with_the_request(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = read(monkeypatch, *words.split())
    with pytest.raises(UsageError, match=words.split(maxsplit=1)[0]):
        engine_request(flags, ARTEFACT)
