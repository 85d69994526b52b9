"""Operations of a traced step: their FLOPs are torch's own count, few layers tell of many."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from small_models import make_llama
from tightfit.core.strategy import Strategy
from tightfit.estimation.flops import NO_ADAPTERS, sum_workload
from tightfit.estimation.step_time import count_forward_kernels
from tightfit.hardware.catalogue import find_gpu
from tightfit.models.config import read_config
from tightfit.runtime.calibrate.measure import LAYER_CONFIG
from tightfit.trace import traced_time
from tightfit.trace.depth import CannotExtend, extend_operation_log, plan_depths, with_depth
from tightfit.trace.operation_work import OperationCollector, OperationContext, describe_operation
from tightfit.trace.recorder import Recorder
from tightfit.trace.recording import Recording
from tightfit.trace.result import (
    ATTENTION,
    BACKWARD,
    FORWARD,
    MATMUL,
    OPTIMIZER,
    UPDATE,
    Operation,
    OperationLog,
    list_totals,
)
from tightfit.trace.traced_time import HostCosts, estimate_traced_time
from tightfit.training.tracing.job import TraceJob
from tightfit.training.tracing.trace import record_job

CARD = (9, 0)
DEPTH = 7


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = make_llama(tmp_path_factory.mktemp("llama"))
    found: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    return found


def _strategy(**fields: Any) -> Strategy:
    plain = {"micro_batch": 2, "seq_len": 32, "checkpointing": False, "method": "full"}
    return Strategy.model_validate(plain | fields)


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A job's log, whole."""
    made: list[Recorder] = []
    finish = Recorder.finish

    def keep(self: Recorder) -> Recording:
        made.append(self)
        return finish(self)

    monkeypatch.setattr(Recorder, "finish", keep)

    def record(config: dict[str, Any], strategy: Strategy, depth: int) -> OperationLog:
        job = TraceJob(config=config, strategy=strategy, compute_capability=CARD, stages=())
        record_job(job.model_copy(update={"config": with_depth(config, depth)}))
        log = made[-1].notes.finish()
        assert log is not None, made[-1].notes.problem
        return log

    return record


KINDS: dict[str, dict[str, Any]] = {
    "lora": {"method": "lora", "grad_accum": 2},
    "eager": {
        "attention": "eager",
        "weights": "fp32",
        "compute": "bf16",
        "checkpointing": True,
        "optimizer": "adamw-foreach",
    },
    "nf4": {"method": "lora", "weights": "nf4", "checkpointing": True},
    "8bit": {"optimizer": "adamw-8bit"},
    "fsdp": {"sharding": "fsdp", "gpus_per_node": 2},
}


@pytest.mark.parametrize("name", ["lora", "eager", "8bit"])
def test_flops_are_those_that_torch_counts(
    name: str, config: dict[str, Any], trace: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: Counter[int] = Counter()
    note = OperationCollector.note

    def count(
        self: OperationCollector, moment: OperationContext, call: tuple[Any, Any, Any, Any]
    ) -> None:
        func, args, kwargs, result = call
        formula = flop_registry.get(func.overloadpacket if hasattr(func, "overloadpacket") else 0)
        if formula is not None and moment.step:
            counted[moment.step] += formula(*args, **kwargs, out_val=result)
        note(self, moment, call)

    monkeypatch.setattr(OperationCollector, "note", count)
    log = trace(config, _strategy(**KINDS[name]), 3)
    assert counted[2] > 0
    assert log.sum_flops() == counted[2]
    has_fused = any(one.kind == ATTENTION for one in log.operations)
    assert has_fused is (name != "eager")


@pytest.mark.parametrize("name", list(KINDS))
def test_few_layers_tell_of_many(name: str, config: dict[str, Any], trace: Any) -> None:
    strategy = _strategy(**KINDS[name])
    plan = plan_depths((DEPTH,))
    base = trace(config, strategy, sum(plan.base))
    grown = [trace(config, strategy, sum(depth)) for depth in plan.grown]
    _compare(
        extend_operation_log(base, grown, plan),
        trace(config, strategy, DEPTH),
        strategy,
    )


def test_two_kinds_of_layers_grow_each_by_itself(config: dict[str, Any], trace: Any) -> None:
    wanted = (7, 8)
    plan = plan_depths(wanted)

    def record(kinds: tuple[int, ...]) -> OperationLog:
        strategy = _strategy(checkpointing=True, recomputed_layers=kinds[0])
        found: OperationLog = trace(config, strategy, sum(kinds))
        return found

    extended = extend_operation_log(record(plan.base), [record(k) for k in plan.grown], plan)
    _compare(extended, record(wanted), _strategy(checkpointing=True, recomputed_layers=7))


def _compare(extended: OperationLog, whole: OperationLog, strategy: Strategy) -> None:
    here, there = list(extended.walk()), list(whole.walk())
    assert [one for one in here if one.stage != UPDATE] == [
        one for one in there if one.stage != UPDATE
    ]
    for one, other in zip(_list_update(here), _list_update(there), strict=True):
        assert one.name == other.name
        assert list_totals(one) == pytest.approx(list_totals(other), rel=1e-3)
    gpu = find_gpu("H200-SXM")
    seconds = [estimate_traced_time(log, gpu, strategy) for log in (extended, whole)]
    assert seconds[0].seconds_per_step == pytest.approx(seconds[1].seconds_per_step, rel=1e-4)


def _list_update(calls: list[Operation]) -> list[Operation]:
    return sorted((one for one in calls if one.stage == UPDATE), key=lambda one: one.name)


def test_a_deeper_model_that_does_otherwise_is_refused(config: dict[str, Any], trace: Any) -> None:
    plan = plan_depths((DEPTH,))
    base = trace(config, _strategy(), 3)
    other = trace(config, _strategy(seq_len=40), 5)
    with pytest.raises(CannotExtend):
        extend_operation_log(base, [other], plan)


def test_a_log_survives_the_disk_and_shortening(config: dict[str, Any], trace: Any) -> None:
    log: OperationLog = trace(config, _strategy(checkpointing=True), DEPTH)
    short = OperationLog.model_validate_json(log.shortened().model_dump_json())
    assert list(short.walk()) == list(log.walk())
    assert len(short.stretches) < len(log.stretches) / 2


def test_what_the_optimizer_and_the_weights_hold(config: dict[str, Any], trace: Any) -> None:
    log: OperationLog = trace(config, _strategy(), 2)
    num_params = sum(one.count * one.shape[0] for one in log.operations if one.kind == OPTIMIZER)
    width, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    layer = 2 * width * width + 2 * width * width // 2 + 3 * width * inner + 2 * width
    heads = 1 if config.get("tie_word_embeddings") else 2
    assert num_params == 2 * layer + heads * vocab * width + width
    forward = [one for one in log.walk() if one.kind == MATMUL and one.stage == FORWARD]
    assert forward[0].shape == (64, 64, 64, 1)  # tokens, outputs, inputs of the first projection


def test_bytes_of_plain_operations() -> None:
    def moved(func: Any, *args: Any) -> float:
        return describe_operation(func, args, {}, func(*args)).num_bytes

    aten = torch.ops.aten
    some, row = torch.ones(8, 4), torch.ones(4)
    assert moved(aten.add.Tensor, some, some) == 3 * 128
    assert moved(aten.add.Tensor, some, row.expand(8, 4)) == 2 * 128 + 16
    assert moved(aten.mul_.Tensor, some, row) == 2 * 128 + 16
    assert moved(aten.copy_.default, some, some.half()) == 128 + 64
    assert moved(aten.embedding.default, some, torch.tensor([1, 2])) == 2 * 32
    assert describe_operation(aten.t.default, (some,), {}, some.t()).num_kernels == 0


def test_products_whose_rows_begin_at_odd_places_are_marked() -> None:
    def crooked(rows: int, inner: int, columns: int) -> float:
        left = torch.ones(rows, inner, dtype=torch.bfloat16)
        right = torch.ones(columns, inner, dtype=torch.bfloat16).t()
        aten = torch.ops.aten.mm.default
        return describe_operation(aten, (left, right), {}, aten(left, right)).num_indexed

    assert crooked(5, 16, 24) == 0  # a token more or less moves no row
    assert crooked(4, 16, 23) == 4 * 23  # gpt2's vocabulary: the result's rows
    assert crooked(4, 13, 24) == 4 * 13 + 24 * 13


def test_the_layer_that_calibration_times_has_the_weight_it_is_given(trace: Any) -> None:
    config = {**LAYER_CONFIG, "num_hidden_layers": 4, "rms_norm_eps": 1e-6}
    fields = {"micro_batch": 1, "seq_len": 8, "weights": "bf16", "compute": "bf16"}
    found = {}
    for method, extra in (("full", {}), ("lora", {"lora_rank": 8, "adapter_dtype": "bf16"})):
        logs = [
            trace(config, _strategy(method=method, **fields, **extra), depth) for depth in (3, 5)
        ]
        found[method] = [_weigh(logs[1], s) - _weigh(logs[0], s) for s in (FORWARD, BACKWARD)]
    forward, backward = (weight / 2 for weight in found["full"])
    assert forward == pytest.approx(traced_time.LAYER_FORWARD_WEIGHT, rel=0.03)
    assert backward == pytest.approx(traced_time.LAYER_BACKWARD_WEIGHT, rel=0.03)
    adapter = (found["lora"][0] - found["full"][0]) / 2 / 7
    assert adapter == pytest.approx(traced_time.ADAPTER_FORWARD_WEIGHT, rel=0.05)
    adapter_backward = (found["lora"][1] - found["full"][1]) / 2 / 7
    assert adapter_backward == pytest.approx(traced_time.ADAPTER_BACKWARD_WEIGHT, rel=0.05)
    spec = read_config({**config, "num_hidden_layers": 1}, name="layer", source="here")
    kernels = count_forward_kernels(
        sum_workload(spec), NO_ADAPTERS, _strategy(**fields), is_rms_norm=True
    )
    assert kernels == traced_time.LAYER_KERNELS


def _weigh(log: OperationLog, stage: str) -> float:
    pace = HostCosts(forward=1.0, backward=1.0, gap=0.0)
    return sum(pace.seconds(one) for one in log.walk() if one.stage == stage)
