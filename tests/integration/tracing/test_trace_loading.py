"""The traced load stage: tensors in the libraries' own order, and blocks that a card was seen to
take."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from small_models import make_family, make_llama
from tightfit.core.strategy import Strategy
from tightfit.runtime import adapters
from tightfit.runtime.load import load_base
from tightfit.trace.gpu_emulation import GpuEmulation
from tightfit.trace.recorder import Recorder
from tightfit.trace.recording import TEMPORARY, WEIGHTS, Recording
from tightfit.trace.result import TracedStage
from tightfit.training.model import prepare_model
from tightfit.training.tracing.engine import (
    FAKE_DEVICE,
    build_meta_module,
    load_fake_weights,
    make_training,
)
from tightfit.training.tracing.fake_kernels import without_kernels
from tightfit.training.tracing.job import TraceJob
from tightfit.training.tracing.trace import DepthTracer, trace

CARD = (9, 0)
SMALL_BYTES = 1024
"""Single numbers and short tables are not compared."""


def _strategy(**fields: Any) -> Strategy:
    return Strategy.model_validate({"method": "lora", "micro_batch": 2, "seq_len": 32} | fields)


def _load(
    folder: Path, strategy: Strategy, *, has_random_weights: bool = False
) -> tuple[nn.Module, Recording]:
    """The model on fake tensors, and what its loading did."""
    recorder = Recorder(GpuEmulation(CARD), vocab_size=1)
    with without_kernels(strategy, FAKE_DEVICE, CARD):
        training = make_training(strategy, folder)
        module = build_meta_module(folder, strategy, training, has_varlen=False)
        with FakeTensorMode(allow_non_fake_inputs=True), recorder:
            load_fake_weights(
                module,
                strategy,
                FAKE_DEVICE,
                recorder=recorder,
                has_random_weights=has_random_weights,
            )
            recording = recorder.finish()
    return module, recording


def _list_events(recording: Recording, module: str = "") -> list[int]:
    """Bytes of each block, negative where it ends; of one module, large ones alone."""
    return [
        one.num_bytes if begins else -one.num_bytes
        for one, begins in recording.walk()
        if one.module.endswith(module) and one.num_bytes > SMALL_BYTES
    ]


@contextmanager
def _spied(order: list[str], bytes_warmed: list[int]) -> Iterator[None]:
    """Note the order in which transformers sets parameters, and what it would warm up."""
    from transformers import core_model_loading as loader
    from transformers import modeling_utils

    set_param: Any = loader.set_param_for_module

    def note(model: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        order.append(name)
        return set_param(model, name, *args, **kwargs)

    def count(model: Any, placed: dict[str, Any], quantizer: Any) -> None:
        device = torch.device("cpu")
        total = modeling_utils.get_total_byte_count(model, dict.fromkeys(placed, device), quantizer)
        bytes_warmed.append(int(total[device]) // 2 * 2)

    with (
        patch.object(loader, "set_param_for_module", note),
        patch.object(modeling_utils, "caching_allocator_warmup", count),
    ):
        yield


def _strip(name: str) -> str:
    for part in ("model.base_model.model.", ".base_layer"):
        name = name.replace(part, "", 1)
    return name


UNPACKED: dict[str, Any] = {"weights": "nf4", "dequantized_base": True}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"weights": "bf16"}),
    ("llama", {"weights": "nf4"}),
    ("llama", UNPACKED),
    ("llama", {"weights": "int8"}),
    ("gemma2", {"weights": "bf16"}),
]


@pytest.mark.parametrize(("family", "fields"), CASES)
def test_weights_come_as_transformers_brings_them(
    tmp_path: Path, family: str, fields: dict[str, Any]
) -> None:
    sizes = {"num_hidden_layers": 12, "intermediate_size": 128}  # layer 10 is not after layer 1
    folder = make_llama(tmp_path, **sizes) if family == "llama" else make_family(tmp_path, family)
    strategy = _strategy(attention="eager", **fields)
    order: list[str] = []
    warmed: list[int] = []
    with _spied(order, warmed):
        load_base(folder, strategy, torch.device("cpu"))
    _, recording = _load(folder, strategy)
    first = recording.allocations[0]
    assert (first.num_bytes, recording.events[:2]) == (warmed[0], [1, -1])
    named = [_strip(a.module) for a in recording.allocations if a.module and "lora" not in a.module]
    traced = list(dict.fromkeys(named))
    assert traced == list(dict.fromkeys(name.rpartition(".")[0] for name in order))


def _make_wide(folder: Path, **sizes: int) -> Path:
    """A config alone: fake tensors need no values."""
    made = make_llama(folder)
    path = made / "config.json"
    config = json.loads(path.read_text("utf-8"))
    heads = {"num_attention_heads": 32, "num_key_value_heads": 32, "num_hidden_layers": 1}
    path.write_text(json.dumps(config | heads | {"head_dim": 128} | sizes), "utf-8")
    return made


# One matrix each, as an H200 recorded them while Llama 2 7B and Llama 3.2 1B were loaded
# (torch 2.11, bitsandbytes 0.50): torch.cuda.memory._snapshot, blocks above 1 KiB.
NF4_4096 = [33554432, 1048576, 8388608, 1048576, 4096, 262144, -1048576, -1048576, -33554432]
NF4_11008 = [90177536, 2818048, 22544384, 2818048, 11008, 704512, -2818048, -2818048, -90177536]
INT8_2048 = [8388608, 8388608, 8192, 4194304, -8388608, -8388608]


@pytest.mark.parametrize("has_random_weights", [False, True])
def test_nf4_takes_the_blocks_that_a_card_took(tmp_path: Path, has_random_weights: bool) -> None:
    folder = _make_wide(tmp_path, hidden_size=4096, intermediate_size=11008)
    _, recording = _load(folder, _strategy(weights="nf4"), has_random_weights=has_random_weights)
    assert _list_events(recording, "q_proj.base_layer") == NF4_4096
    assert _list_events(recording, "down_proj.base_layer") == NF4_11008


@pytest.mark.parametrize("has_random_weights", [False, True])
def test_an_unpacked_base_comes_packed_and_is_unpacked_matrix_by_matrix(
    tmp_path: Path, has_random_weights: bool
) -> None:
    folder = _make_wide(tmp_path, hidden_size=4096, intermediate_size=11008)
    _, recording = _load(folder, _strategy(**UNPACKED), has_random_weights=has_random_weights)
    scales = 4 * 4096 * 4096 // 64
    unpacked = [scales, 33554432, -scales, -8388608, -262144]
    events = _list_events(recording, "q_proj.base_layer")
    assert events[: len(NF4_4096)] == NF4_4096
    # The codes go when the whole matrix is there, and their scales with them.
    assert sorted(events[len(NF4_4096) :]) == sorted([*unpacked, -4096])
    assert sum(events) == 33554432
    held, most = 0, 0
    for size in _list_events(recording, "base_layer"):
        held += size
        most = max(most, held)
    largest = 4096 * 11008
    beside = largest // 2 + 5 * largest // 64
    assert most == pytest.approx(held + beside, rel=1e-3)


def test_int8_takes_the_blocks_that_a_card_took(tmp_path: Path) -> None:
    folder = _make_wide(tmp_path, hidden_size=2048, head_dim=64)
    _, recording = _load(folder, _strategy(weights="int8"))
    assert _list_events(recording, "q_proj.base_layer") == INT8_2048


def test_fp8_comes_in_bf16_and_is_cast_when_all_is_there(tmp_path: Path) -> None:
    folder = _make_wide(tmp_path, hidden_size=4096, intermediate_size=11008)
    strategy = _strategy(fp8=True, fused_lora=True)
    module, recording = _load(folder, strategy)
    values = 4096 * 4096
    events = [e for e in _list_events(recording, "q_proj.base_layer") if abs(e) >= values]
    scaled = [2 * values, values, -2 * values]
    assert events == [2 * values, *scaled, -2 * values]
    kept = [p for p in module.parameters() if p.dtype is torch.float8_e4m3fn]
    assert len(kept) == 7


def test_drawn_weights_are_packed_first_and_not_warmed_up(tmp_path: Path) -> None:
    folder = make_llama(tmp_path, tie_word_embeddings=False)
    _, recording = _load(folder, _strategy(weights="nf4"), has_random_weights=True)
    modules = [_strip(a.module) for a in recording.allocations if a.module]
    order = list(dict.fromkeys(modules))
    assert order[0].endswith("layers.0.self_attn.q_proj")
    assert order.index("model.embed_tokens") > order.index("model.layers.1.mlp.down_proj")
    assert max(a.num_bytes for a in recording.allocations) < 2**20


def test_everything_arrives(tmp_path: Path) -> None:
    folder = make_llama(tmp_path, tie_word_embeddings=True)
    module, recording = _load(folder, _strategy(weights="nf4", train_embeddings=True))
    left = [t for t in [*module.parameters(), *module.buffers()] if t.is_meta]
    assert not left
    named: Any = module
    base = named.model.base_model.model
    assert base.lm_head.modules_to_save.default.weight is not None
    live = {abs(event) for event in recording.events} - {-e for e in recording.events if e < 0}
    kinds = {recording.allocations[number - 1].category for number in live}
    assert kinds <= {WEIGHTS, TEMPORARY}


@pytest.mark.parametrize(
    "fields",
    [
        {"weights": "nf4", "adapter_dtype": "fp32"},
        {"weights": "nf4", "compute": "fp16"},
        {"weights": "int8"},
        {"weights": "bf16", "adapter_dtype": "fp32", "autocast": True},
        {"weights": "bf16"},
    ],
    ids=str,
)
def test_adapters_come_in_the_dtype_that_peft_gives_them(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    folder, strategy = make_llama(tmp_path), _strategy(**fields)
    cast: Any = adapters._cast_trained
    before: list[tuple[int, str]] = []

    def note(model: nn.Module, strategy: Strategy) -> None:
        before.extend(_list_trained(model))
        cast(model, strategy)

    with patch.object(adapters, "_cast_trained", note):
        model = load_base(folder, strategy, torch.device("cpu"))
        real = prepare_model(model, strategy, make_training(strategy, folder))
    after = _list_trained(real)
    _, recording = _load(folder, strategy)
    made = [(a.num_bytes, a.dtype) for a in recording.allocations if "lora_" in a.module]
    assert made == before + (after if after != before else [])


def _list_trained(model: nn.Module) -> list[tuple[int, str]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [(p.numel() * p.element_size(), str(p.dtype).removeprefix("torch.")) for p in trained]


def _describe_job(folder: Path, **fields: Any) -> TraceJob:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    return TraceJob(config=config, strategy=_strategy(**fields), compute_capability=CARD, stages=())


def test_upcast_shows_as_the_peak_of_loading(tmp_path: Path) -> None:
    """While the embeddings are cast they are there twice, which is never the case again."""
    vocab, width = 60_000, 64
    folder = make_llama(tmp_path, vocab_size=vocab, tie_word_embeddings=True)
    load = _trace_load(folder, upcast_unquantized=True)
    assert load.peak_allocated_bytes >= vocab * width * (2 + 4)
    unraised = _trace_load(folder)
    assert unraised.peak_allocated_bytes < vocab * width * 4


def _trace_load(folder: Path, **fields: Any) -> TracedStage:
    traced = trace(_describe_job(folder, weights="nf4", **fields)).traced
    assert traced is not None
    return next(stage for stage in traced.stages if stage.name == "load")


@pytest.mark.parametrize("fields", [{"weights": "nf4"}, UNPACKED, {"weights": "int8"}], ids=str)
def test_loading_of_many_layers_follows_from_few(tmp_path: Path, fields: dict[str, Any]) -> None:
    folder = make_llama(tmp_path, num_hidden_layers=7)
    job = _describe_job(folder, **fields)
    tracer = DepthTracer(job)
    recording = tracer.record(7)
    assert (tracer.refusal, tracer.num_traced) == ("", 5)
    _, whole = _load(folder, job.strategy)
    loaded = [a for a in recording.allocations if a.stage == "load" and a.module]
    wanted = [a for a in whole.allocations if a.module]
    assert [(a.module, a.layer, a.num_bytes) for a in loaded] == [
        (a.module, a.layer, a.num_bytes) for a in wanted
    ]
    assert {a.layer for a in loaded} == {None, *range(7)}
