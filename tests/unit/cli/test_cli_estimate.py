"""`tightfit estimate`: the JSON that scripts rely on, and the ZeRO table."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Run

from tightfit.api.training import hardware
from tightfit.core.errors import SetupError
from tightfit.core.units import GIB
from tightfit.estimation.result import Estimate
from tightfit.hardware.resolve import resolve_hardware

PROMISED = (
    "verdict",
    "reason",
    "parameters.total",
    "parameters.trainable",
    "gpu.peak_allocated_bytes",
    "gpu.peak_reserved_bytes",
    "gpu.capacity_bytes",
    "gpu.components",
    "host.peak_bytes",
    "disk.bytes",
    "time.seconds_per_step",
    "time.tokens_per_second",
    "model.name",
    "strategy.micro_batch",
    "hardware.gpu",
)


def look_up(document: dict[str, Any], path: str) -> Any:
    found: Any = document
    for key in path.split("."):
        found = found[key]
    return found


def test_json_has_every_promised_key(run: Run) -> None:
    reported = run("estimate", "Llama-2-7b", "--on", "V100-32GB", "--json").json

    for path in PROMISED:
        assert look_up(reported, path) is not None, path
    assert sum(reported["gpu"]["components"].values()) == reported["gpu"]["peak_reserved_bytes"]
    assert reported["parameters"]["total"] == 6_738_415_616
    assert reported["verdict"] == "fits"


def test_json_less_its_echo_is_an_estimate(run: Run) -> None:
    reported = run("estimate", "gpt2", "--on", "T4", "--json").json
    for key in ("model", "strategy", "hardware"):
        del reported[key]
    Estimate.model_validate(reported)


def test_every_documented_option_is_taken(run: Run) -> None:
    line = (
        "estimate Llama-2-7b --method lora --weights bf16 --compute bf16 --adapter-dtype fp32 "
        "--optimizer adamw-foreach --lora-rank 8 --lora-targets q_proj,v_proj --micro-batch 2 "
        "--seq-len 512 --grad-accum 4 --no-checkpointing --attention flash --loss fused "
        "--fused-kernels --sharding zero2 --offload optimizer --no-double-quant "
        "--train-embeddings --on 4xA100-40GB --json"
    )
    reported = run(*line.split()).json
    expected = {
        "optimizer": "adamw-foreach",
        "lora_targets": ["q_proj", "v_proj"],
        "checkpointing": False,
        "sharding": "zero2",
        "offload": "optimizer",
        "gpus_per_node": 4,
    }
    assert reported["strategy"].items() >= expected.items()


def test_lora_trains_what_peft_trains(run: Run) -> None:
    """Rank 16 on q and v of Llama-2-7B: 2 x 32 x 16 x (4096 + 4096) = 8,388,608."""
    options = ("--lora-rank", "16", "--lora-targets", "q_proj,v_proj")
    reported = run("estimate", "Llama-2-7b", *options, "--on", "T4", "--json").json
    assert reported["parameters"]["trainable"] == 8_388_608


def test_an_estimate_needs_no_gpu_and_says_what_it_assumed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_gpu_here(text: str) -> object:
        if text == "here":
            raise SetupError("No GPU.", remedy="-")
        return resolve_hardware(text)

    monkeypatch.setattr(hardware, "resolve_hardware", no_gpu_here)

    answer = run("estimate", "gpt2", "--json")

    assert answer.code == 0
    assert any("No GPU is here" in note for note in answer.json["assumptions"])


@pytest.mark.parametrize(
    ("options", "verdict"),
    [
        (("--method", "full", "--on", "T4"), "does_not_fit"),
        (("--method", "full", "--weights", "nf4", "--on", "A100-80GB"), "illegal"),
    ],
)
def test_a_bad_answer_is_still_an_answer_unless_checked(
    run: Run, options: tuple[str, ...], verdict: str
) -> None:
    answer = run("estimate", "Llama-2-7b", *options, "--json")
    assert answer.json["verdict"] == verdict
    assert answer.json["reason"]
    assert answer.code == 0

    checked = run("estimate", "Llama-2-7b", *options, "--check")
    assert checked.code == 5
    assert checked.out.startswith(verdict.replace("_", " "))


def test_check_passes_what_fits(run: Run) -> None:
    assert run("estimate", "gpt2", "--on", "A100-80GB", "--check").code == 0


def test_the_groups_left_aside_are_named(run: Run) -> None:
    reported = run("estimate", "gpt2", "--on", "6xT4 + 2xRTX6000", "--json").json
    assert reported["hardware"]["group"] == "6xT4"
    assert any("2xRTX6000" in note for note in reported["assumptions"])


GPU_LIVE = (0.12, 0.12, 0.79, 0.79, 6.10, 6.10)
HOST_LIVE = (71.71, 127.48, 63.74, 127.48, 1.47, 127.48)
GPU_COLD = (0.12, 0.12, 0.78, 0.78, 6.09, 6.09)
HOST_COLD = (71.69, 127.45, 63.72, 127.45, 1.43, 127.45)
COLD = ("--total-params", "2851e6", "--largest-layer-params", "32e6")


@pytest.mark.parametrize(
    ("subject", "gpu", "host"),
    [(("t5-3b",), GPU_LIVE, HOST_LIVE), (COLD, GPU_COLD, HOST_COLD)],
    ids=["live", "cold"],
)
def test_the_zero_table_is_deepspeeds_to_the_digit(
    run: Run, subject: tuple[str, ...], gpu: tuple[float, ...], host: tuple[float, ...]
) -> None:
    """The figures that DeepSpeed's documentation prints for t5-3b on one node of 8 GPUs."""
    line = ("estimate", *subject, "--zero-table", "--gpus-per-node", "8", "--nodes", "1")

    rows = run(*line, "--json").json["rows"]
    assert tuple(round(row["gpu_bytes"] / GIB, 2) for row in rows) == gpu
    assert tuple(round(row["host_bytes"] / GIB, 2) for row in rows) == host

    text = run(*line).out
    for card, node in zip(gpu, host, strict=True):
        assert f"{card:.2f}GB" in text
        assert f"{node:.2f}GB" in text
