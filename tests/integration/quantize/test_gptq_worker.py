"""GPTQ-format models by the real quantizer: what comes out, interruptions, and other tools."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from small_models import make_llama
from tightfit.core.errors import SetupError
from tightfit.core.import_path import module_words
from tightfit.export.quantize import gptq_worker
from tightfit.export.quantize.gptq import (
    choose_group_size,
    explain_group_size,
    run_gptq,
    worker_command,
)
from tightfit.export.quantize.gptq_worker import GptqJob, gptqmodel_arguments, read_job

pytest.importorskip("auto_round", reason="pip install 'tightfit[quantize]'")

NUM_LAYERS = 3


def make_job(home: Path, **changes: Any) -> GptqJob:
    rows = home / "rows.npy"
    np.save(rows, np.random.default_rng(0).integers(4, 300, (8, 64)).astype(np.int32))
    settings: dict[str, Any] = {
        "model": str(home / "model"),
        "rows": str(rows),
        "out": str(home / "out"),
        "resume": str(home / "resume"),
        "bits": 8,
        "group_size": 64,
        "iters": 0,
        "device": "cpu",
    }
    return GptqJob(**(settings | changes))


def compare(model: Path, quantized: Path) -> float:
    """Correlation of the scores of both."""
    import torch
    from transformers import AutoModelForCausalLM

    from tightfit.runtime.gptq import load_gptq

    tokens = torch.arange(4, 100)[None]
    other = load_gptq(quantized, dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        before: Any = AutoModelForCausalLM.from_pretrained(model)(tokens).logits
        after: Any = other(tokens).logits
    return float(torch.corrcoef(torch.stack([before.flatten(), after.flatten()]))[0, 1])


def test_eight_bits_come_out_as_every_loader_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_llama(tmp_path / "model")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    received: list[tuple[int, int]] = []

    done = run_gptq(
        make_job(tmp_path), tmp_path / "work", report=lambda n, of: received.append((n, of))
    )

    out = tmp_path / "out"
    config = json.loads((out / "config.json").read_text())
    stated = config["quantization_config"]
    assert {key: stated[key] for key in ("quant_method", "bits", "group_size", "sym")} == {
        "quant_method": "gptq", "bits": 8, "group_size": 64, "sym": True,
    }  # fmt: skip
    assert stated["desc_act"] is False
    assert json.loads((out / "quantize_config.json").read_text()) == stated
    assert compare(model, out) > 0.999
    assert received[-1] == (2, 2)
    assert done.peak_host_bytes > 100 << 20
    assert not list(here.iterdir()), "the library's folder lies in the user's"
    assert list_dtypes(out)["model.embed_tokens.weight"] == "F16"
    assert "lm_head.qweight" not in list_dtypes(out)


def list_dtypes(folder: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "np") as stored:
        return {name: stored.get_slice(name).get_dtype() for name in stored.keys()}  # noqa: SIM118


def list_workers(home: Path) -> list[list[str]]:
    """Commands of processes that work on the job of that folder."""
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [words for words in commands if any(word.startswith(f"{home}/") for word in words)]


def test_an_interrupted_job_goes_on_behind_the_last_whole_layer(tmp_path: Path) -> None:
    model = make_llama(tmp_path / "model", num_hidden_layers=NUM_LAYERS, initializer_range=0.05)
    job = make_job(tmp_path, bits=4, group_size=32)

    def interrupt(_done: int, _of: int) -> None:
        assert list_workers(tmp_path)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_gptq(job, tmp_path / "work", report=interrupt)
    assert not list_workers(tmp_path)
    received: list[int] = []
    run_gptq(job, tmp_path / "work", report=lambda done, _of: received.append(done))

    assert len(received) < NUM_LAYERS  # the first layer is not told of again
    assert received[-1] == NUM_LAYERS
    names = list_dtypes(tmp_path / "out")
    packed = [name.removesuffix(".qweight") for name in names if name.endswith(".qweight")]
    assert not {f"{name}.weight" for name in packed} & set(names)
    assert len(packed) == 7 * NUM_LAYERS
    assert compare(model, tmp_path / "out") > 0.97


def test_a_missing_tool_is_named_with_a_way_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="gptqmodel") as caught:
        run_gptq(make_job(tmp_path, tool="gptqmodel"), tmp_path / "work")

    assert "--python" in caught.value.remedy


def test_a_worker_that_dies_is_told_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="stopped with code 1") as caught:
        run_gptq(make_job(tmp_path, rows=str(tmp_path / "none.npy")), tmp_path / "work")

    assert "log.txt" in caught.value.remedy


def test_another_environment_runs_the_worker_by_its_path(tmp_path: Path) -> None:
    command = worker_command("/opt/gptq/bin/python", tmp_path / "job.json")

    assert command[0] == "/opt/gptq/bin/python"
    assert Path(command[1]).samefile(gptq_worker.__file__)
    assert worker_command(None, tmp_path / "job.json")[:-2] == [
        sys.executable,
        *module_words(gptq_worker.__name__),
    ]


def test_the_other_tool_gets_the_same_job(tmp_path: Path) -> None:
    job = make_job(tmp_path, bits=3, group_size=128, tool="gptqmodel")
    path = tmp_path / "job.json"
    path.write_text(json.dumps({name: getattr(job, name) for name in job.__dataclass_fields__}))

    assert gptqmodel_arguments(read_job(path)) == {
        "bits": 3, "group_size": 128, "sym": True, "desc_act": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("widths", "bits", "size"),
    [
        ((4096, 11008), 4, 128),
        ((1088, 4352), 4, 64),
        ((576, 1536), 8, 64),
        ((576, 1536), 4, 32),
        ((96, 256), 8, 32),
        ((100, 256), 4, -1),
    ],
)
def test_groups_divide_every_row(widths: tuple[int, ...], bits: int, size: int) -> None:
    assert choose_group_size(widths, bits=bits) == size
    reported = explain_group_size(widths, size)
    assert (reported is None) == (size == 128)
