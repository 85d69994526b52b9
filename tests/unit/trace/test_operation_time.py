"""Seconds of a traced step: faster hardware is never slower, and everything adds up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tightfit.core.attention import Attention
from tightfit.core.strategy import Strategy
from tightfit.estimation.result import StepTime
from tightfit.hardware.catalogue import find_gpu
from tightfit.hardware.types import MeasuredRates
from tightfit.planning.traced import with_traced_time
from tightfit.trace import kernel_stubs
from tightfit.trace.result import (
    ADAPTER,
    ATTENTION,
    BACKWARD,
    DEQUANTIZE,
    FORWARD,
    HOST,
    MATMUL,
    MEMORY_BOUND,
    OPTIMIZER,
    UPDATE,
    Operation,
    OperationLog,
    RepeatedOperations,
)
from tightfit.trace.traced_time import (
    DeviceSeconds,
    HostCosts,
    estimate_traced_time,
    find_host_costs,
)

GPU = find_gpu("H200-SXM")
STRATEGY = Strategy(method="lora", micro_batch=1, seq_len=1024)
TOKENS, WIDTH = 1024, 2048
PRODUCT = Operation(
    name="aten::mm",
    kind=MATMUL,
    stage=FORWARD,
    dtype="bf16",
    shape=(TOKENS, WIDTH, WIDTH, 1),
    flops=2.0 * TOKENS * WIDTH * WIDTH,
    num_bytes=2.0 * (2 * TOKENS * WIDTH + WIDTH * WIDTH),
    num_kernels=1,
)
MOVE = Operation(name="aten::add", kind=MEMORY_BOUND, stage=FORWARD, num_bytes=3e8, num_kernels=1)
VIEW = Operation(name="aten::view", kind=HOST, stage=FORWARD)
SCORES = Operation(
    name="aten::sdpa",
    kind=ATTENTION,
    stage=BACKWARD,
    dtype="bf16",
    shape=(64, 1024, 1, 1),
    flops=10.0 * 32 * 1024**2 * 64,
    num_kernels=3,
)
READ = Operation(name="aten::item", kind=HOST, stage=FORWARD, waits=True)
UNPACK = Operation(
    name="nf4",
    kind=DEQUANTIZE,
    stage=BACKWARD,
    shape=(WIDTH * WIDTH,),
    num_bytes=1e7,
    num_kernels=1,
)
ADAM = Operation(
    name="aten::_fused_adamw_",
    kind=OPTIMIZER,
    stage=UPDATE,
    dtype="bf16",
    shape=(10**8,),
    num_bytes=1.4e9,
    num_kernels=3,
    num_tensors=100,
)


def _log(*operations: Operation, count: int = 4) -> OperationLog:
    places = tuple(range(len(operations)))
    return OperationLog(
        operations=operations, stretches=(RepeatedOperations(operations=places, count=count),)
    )


EVERYTHING = _log(PRODUCT, MOVE, VIEW, SCORES, UNPACK, ADAM)


def _measured(faster: float = 1.0) -> MeasuredRates:
    return MeasuredRates(
        date="2026-01-01",
        matmuls={
            "bf16": ((TOKENS, WIDTH, WIDTH, 2e-5 / faster), (4096, 4096, 4096, 2e-4 / faster))
        },
        attention=((64, 1024, 2e14 * faster, 1e14 * faster),),
        copies=((2**20, 2e12 * faster), (2**30, 4e12 * faster)),
        elementwise=((2**20, 1e12 * faster), (2**30, 3e12 * faster)),
        adamw_seconds_per_param={"bf16": 6e-12 / faster},
        nf4_weights_per_second=4e11 * faster,
    )


def test_components_and_stages_add_up() -> None:
    traced = estimate_traced_time(EVERYTHING, GPU, STRATEGY)
    assert sum(traced.components.values()) == pytest.approx(traced.seconds_per_step)
    assert sum(traced.stages.values()) == pytest.approx(traced.seconds_per_step)
    assert traced.flops == 4 * (PRODUCT.flops + SCORES.flops)
    longest = max(traced.host_seconds, traced.device_seconds)
    assert longest <= traced.seconds_per_step <= traced.host_seconds + traced.device_seconds


@pytest.mark.parametrize("one", [PRODUCT, MOVE, SCORES, UNPACK, ADAM])
def test_a_faster_device_is_faster_at_everything(one: Operation) -> None:
    seconds = [
        DeviceSeconds(GPU.model_copy(update={"measured": rates}), STRATEGY).of(one)
        for rates in (_measured(), _measured(2.0))
    ]
    assert seconds[1] == pytest.approx(seconds[0] / 2, rel=1e-3)


def test_a_measured_product_takes_what_it_took() -> None:
    gpu = GPU.model_copy(update={"measured": _measured()})
    assert DeviceSeconds(gpu, STRATEGY).of(PRODUCT) == pytest.approx(2e-5, rel=0.01)


@pytest.mark.parametrize("part", ["forward", "backward", "gap"])
def test_a_slower_host_is_never_faster(part: str) -> None:
    plain = HostCosts(forward=1e-5, backward=1e-5, gap=1e-6)
    slower = replace(plain, **{part: 50 * getattr(plain, part)})
    fast, slow = (
        estimate_traced_time(EVERYTHING, GPU, STRATEGY, host=pace) for pace in (plain, slower)
    )
    assert slow.seconds_per_step > fast.seconds_per_step


@pytest.mark.parametrize("slowness", [0.0, 0.3, 1.0, 3.0, 30.0])
@pytest.mark.parametrize(
    "layer", [(VIEW, PRODUCT, SCORES), (PRODUCT, READ, VIEW), (VIEW,) * 40 + (MOVE, UNPACK)]
)
def test_layers_that_take_alike_are_not_walked_one_by_one(
    slowness: float, layer: tuple[Operation, ...]
) -> None:
    """The host ahead, just behind and far behind, from a start where it is neither."""
    operations = (VIEW, MOVE, *layer, ADAM)
    first, layers, last = (0, 1), tuple(range(2, 2 + len(layer))), (2 + len(layer),)
    at_once = RepeatedOperations(operations=layers, count=24)
    one_by_one = [RepeatedOperations(operations=layers)] * 24
    pace = HostCosts(forward=slowness * 1e-5, backward=slowness * 1e-5, gap=1e-6)
    quick, slow = (
        estimate_traced_time(
            OperationLog(
                operations=operations,
                stretches=(
                    RepeatedOperations(operations=first),
                    *middle,
                    RepeatedOperations(operations=last),
                ),
            ),
            GPU,
            STRATEGY,
            host=pace,
        )
        for middle in ([at_once], one_by_one)
    )
    assert quick.seconds_per_step == pytest.approx(slow.seconds_per_step, rel=1e-9)
    assert quick.stages == pytest.approx(slow.stages, rel=1e-9)
    assert quick.components == pytest.approx(slow.components, rel=1e-6)


def test_a_host_that_reads_a_value_waits_for_the_device() -> None:
    pace = HostCosts(forward=1e-4, backward=1e-4, gap=0.0)
    read = MOVE.model_copy(update={"num_bytes": 0.0, "waits": True})
    work = DeviceSeconds(GPU, STRATEGY).of(MOVE)
    assert work < 1e-4
    big = MOVE.model_copy(update={"num_bytes": 3e10})
    ahead = estimate_traced_time(_log(big, PRODUCT, PRODUCT), GPU, STRATEGY, host=pace)
    waited = estimate_traced_time(_log(big, read, PRODUCT), GPU, STRATEGY, host=pace)
    assert ahead.seconds_per_step == pytest.approx(1e-4 + ahead.device_seconds)
    # Each of four rounds is idle while the host issues two operations anew, but the first one.
    assert waited.seconds_per_step > waited.device_seconds + 4 * 1e-4


def test_measured_hosts_set_the_pace() -> None:
    rates = _measured().model_copy(
        update={"host_forward_seconds": 7e-5, "host_adapter_forward_seconds": 1e-3}
    )
    slow = find_host_costs(
        DeviceSeconds(GPU.model_copy(update={"measured": rates}), STRATEGY).rates
    )
    usual = find_host_costs(DeviceSeconds(GPU, STRATEGY).rates)
    assert slow.forward == pytest.approx(2 * usual.forward)
    assert slow.backward == usual.backward
    assert slow.around["adapter"] > usual.around["adapter"]


def _closed(**components: float) -> StepTime:
    seconds = sum(components.values())
    return StepTime(
        seconds_per_step=seconds,
        seconds_per_step_low=0.8 * seconds,
        seconds_per_step_high=1.5 * seconds,
        tokens_per_second=100.0 / seconds,
        flops_per_step=1e12,
        mfu_fraction=0.5 / seconds,
        components=components,
        seconds_per_epoch=10 * seconds,
        steps_per_epoch=10,
    )


def test_a_step_time_takes_transfers_from_the_closed_form() -> None:
    closed = _closed(matmul=0.7, communication=0.3)
    report = with_traced_time(closed, EVERYTHING, GPU, STRATEGY)
    traced = estimate_traced_time(EVERYTHING, GPU, STRATEGY)
    assert report.seconds_per_step == pytest.approx(traced.seconds_per_step + 0.3)
    assert sum(report.components.values()) == pytest.approx(report.seconds_per_step)
    assert report.tokens_per_second * report.seconds_per_step == pytest.approx(100.0)
    assert report.seconds_per_step_high == pytest.approx(1.5 * report.seconds_per_step)
    assert report.seconds_per_epoch == pytest.approx(10 * report.seconds_per_step)
    assert (closed.tier, report.tier) == ("closed-form", "traced")


def test_what_no_operation_tells_of_is_not_lost() -> None:
    apart = {"communication": 0.3, "offload": 0.2, "hooks": 0.1}
    report = with_traced_time(_closed(matmul=0.7, **apart), EVERYTHING, GPU, STRATEGY)
    traced = estimate_traced_time(EVERYTHING, GPU, STRATEGY)
    assert {name: report.components[name] for name in apart} == apart
    assert report.seconds_per_step == pytest.approx(traced.seconds_per_step + 0.6)


def test_rows_shorter_than_the_traced_ones_take_less_but_for_update_and_transfers() -> None:
    short = _closed(matmul=0.2, memory_bound=0.1, optimizer=0.4, communication=0.5)
    long = _closed(matmul=0.5, memory_bound=0.1, optimizer=0.4, communication=0.6)
    report = with_traced_time(short, EVERYTHING, GPU, STRATEGY, of_traced_batch=long)
    whole = with_traced_time(short, EVERYTHING, GPU, STRATEGY)
    for name, seconds in whole.components.items():
        is_fixed = name in ("optimizer", "communication")
        assert report.components[name] == pytest.approx(seconds * (1.0 if is_fixed else 0.5))
    assert sum(report.components.values()) == pytest.approx(report.seconds_per_step)
    assert report.tokens_per_second * report.seconds_per_step == pytest.approx(100.0)


def test_launches_that_do_nothing_are_heard() -> None:
    received: list[tuple[object, ...]] = []

    def listen(args: tuple[object, ...], _kwargs: dict[str, object]) -> None:
        received.append(args)

    kernel_stubs.LAUNCH_LISTENERS.append(listen)
    try:
        kernel_stubs._Kernel(print)[(1,)]("a", "b")
    finally:
        kernel_stubs.LAUNCH_LISTENERS.remove(listen)
    assert received == [("a", "b")]


def _hot(**update: object) -> MeasuredRates:
    return _measured().model_copy(update=update)


def _seconds(log: OperationLog, rates: MeasuredRates) -> float:
    gpu = GPU.model_copy(update={"measured": rates})
    return estimate_traced_time(log, gpu, STRATEGY).device_seconds


def test_products_fall_to_the_power_limit_by_their_share_of_the_step() -> None:
    """Alone by all of it, beside memory traffic by less."""
    gaps = 1e3 * PRODUCT.num_kernels * find_host_costs(DeviceSeconds(GPU, STRATEGY).rates).gap
    alone = _log(PRODUCT, count=1000)
    rested, limited = _seconds(alone, _hot()) - gaps, _seconds(alone, _hot(sustained_fraction=0.8))
    assert limited - gaps == pytest.approx(rested / 0.8, rel=0.01)

    gpu = GPU.model_copy(update={"measured": _hot()})
    product, move = (DeviceSeconds(gpu, STRATEGY).of(one) for one in (PRODUCT, MOVE))
    mixed = _log(PRODUCT, MOVE, count=1000)
    slower = _seconds(mixed, _hot(sustained_fraction=0.8)) - _seconds(mixed, _hot())
    share = product / (product + move)
    assert slower == pytest.approx(1000 * product * share * 0.25, rel=0.01)


def test_rows_that_begin_at_odd_places_slow_a_product_down() -> None:
    gpu = GPU.model_copy(update={"measured": _measured()})
    crooked = PRODUCT.model_copy(update={"num_indexed": 1.0})
    assert DeviceSeconds(gpu, STRATEGY).of(crooked) > 4 * DeviceSeconds(gpu, STRATEGY).of(PRODUCT)


def test_masks_and_documents_have_rates_of_their_own() -> None:
    rates = _hot(masked_attention=((64, 1024, 1e14, 5e13),))
    gpu = GPU.model_copy(update={"measured": rates})
    masked = SCORES.model_copy(update={"shape": (64, 1024, 0, 1)})
    causal, whole = (DeviceSeconds(gpu, STRATEGY).of(one) for one in (SCORES, masked))
    assert whole == pytest.approx(4 * causal)  # twice the pairs at half the rate

    packed = STRATEGY.model_copy(update={"packing": True})
    short = gpu.model_copy(
        update={"measured": _hot(document_attention=((64, 1024, 2e14, 2.5e13),))}
    )
    assert DeviceSeconds(short, packed).of(SCORES) == pytest.approx(4 * causal)


def test_an_optimizer_that_waits_for_every_tensor_hides_nothing() -> None:
    each = ADAM.model_copy(update={"count": 50, "shape": (10**6,), "num_bytes": 1.4e7})
    pace = HostCosts(forward=1e-3, backward=1e-3, gap=0.0)
    flows, stops = (
        estimate_traced_time(
            _log(each.model_copy(update={"waits": waits}), count=1), GPU, STRATEGY, host=pace
        )
        for waits in (False, True)
    )
    assert flows.seconds_per_step < 1.05 * flows.host_seconds
    both = stops.host_seconds + stops.device_seconds
    assert stops.seconds_per_step == pytest.approx(both, rel=0.01)


def _lora_log(*, backward_around: str = "") -> OperationLog:
    forward = PRODUCT.model_copy(update={"around": ADAPTER, "count": 2})
    back = PRODUCT.model_copy(update={"stage": BACKWARD, "around": backward_around})
    return _log(forward, MOVE, back, count=10)


def test_the_engines_time_for_adapters_is_spread_over_its_calls() -> None:
    """Two adapters in each of ten rounds: all of their time, over ten calls of the engine."""
    pace = HostCosts(forward=1e-5, backward=2e-5, gap=0.0, adapter_backward=3e-5)

    slower = pace.with_adapters(_lora_log())

    assert slower.backward == pytest.approx((10 * 2e-5 + 20 * 3e-5) / 10)
    assert replace(slower, backward=pace.backward) == pace


def test_fused_lora_and_none_leave_the_engine_as_it_is() -> None:
    pace = HostCosts(forward=1e-5, backward=2e-5, gap=0.0, adapter_backward=3e-5)

    assert pace.with_adapters(_lora_log(backward_around=ADAPTER)) == pace
    assert pace.with_adapters(EVERYTHING) == pace


def test_flash_over_packed_rows_is_the_kernel_for_documents() -> None:
    gpu = GPU.model_copy(update={"measured": _hot(document_attention=((64, 1024, 2e14, 2.5e13),))})
    packed = {"packing": True, "attention": Attention.FLASH}
    sdpa, flash = (
        DeviceSeconds(gpu, STRATEGY.model_copy(update=packed | more)).of(SCORES)
        for more in ({"attention": Attention.SDPA}, {})
    )
    assert flash == sdpa
