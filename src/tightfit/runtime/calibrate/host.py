"""What Python and torch take to start work: one small operation, one small decoder layer."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Attention, Method, Strategy
from tightfit.estimation.flops import NO_ADAPTERS, sum_workload
from tightfit.estimation.step_time import count_forward_kernels
from tightfit.hardware.calibration import HostTimes
from tightfit.models.config import read_config
from tightfit.runtime.calibrate.bench import Bench

NUM_OPS = 200
"""Per measurement: fewer than the driver's queue holds."""
NUM_ROUNDS = 7
NUM_STEPS = 15
"""Steps of a whole model: host times vary, so the median needs several."""
LAYERS = (4, 32)
"""Two depths: the difference has only the layers' time. As deep as real models, whose code does not
stay in a processor's cache."""
LAYER_CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
"""So small that the host is always the bottleneck."""


NUM_LINEARS = 7
"""Linear layers of such a layer, all with LoRA."""
Variant = Callable[[Any], Any]
"""Changes a model before it is timed."""


def measure_host(bench: Bench) -> HostTimes:
    tiny = torch.ones(16, device=bench.device)
    layer: dict[str, float] = {}
    try:
        layer = _measure_layer(bench)
    except ImportError:
        bench.skipped.append("the host's time for a decoder layer: transformers is not installed")
    return HostTimes(
        op_seconds=_host_seconds(bench, lambda: _repeat(tiny), NUM_OPS),
        backward_op_seconds=_measure_backward_op(bench),
        kernel_seconds=None if bench.is_cpu else bench.seconds(lambda: tiny.add_(1.0)),
        **layer,
    )


def _repeat(tiny: torch.Tensor) -> None:
    for _ in range(NUM_OPS):
        torch.add(tiny, 1.0)


def _measure_backward_op(bench: Bench) -> float:
    leaf = torch.ones(16, device=bench.device, requires_grad=True)

    def chain() -> torch.Tensor:
        value = leaf
        for _ in range(NUM_OPS):
            value = value * 1.0
        return value.sum()

    def back() -> float:
        out = chain()
        _wait(bench)
        start = time.perf_counter()
        torch.autograd.grad(out, leaf)
        return time.perf_counter() - start

    back()
    return statistics.median(back() for _ in range(NUM_ROUNDS)) / NUM_OPS


def _host_seconds(bench: Bench, work: Callable[[], object], count: int) -> float:
    """Time until the host is free again, while the device may still work."""

    def run() -> float:
        _wait(bench)
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    run()
    return statistics.median(run() for _ in range(NUM_ROUNDS)) / count


def _wait(bench: Bench) -> None:
    if not bench.is_cpu:
        torch.cuda.synchronize()


def _measure_layer(bench: Bench) -> dict[str, float]:
    """Host seconds of one layer, forward and backward; overhead of recomputation and LoRA."""
    variants: list[Variant] = [lambda model: model, _recompute]
    if importlib.util.find_spec("peft") is not None:
        variants.append(_adapt)
    plain, recomputed, *adapted = (_time_variant(bench, variant) for variant in variants)
    if min(plain) <= 0.0:
        bench.skipped.append(
            "the host's time for a decoder layer: other work disturbed it too much"
        )
        return {}
    found = {
        "layer_forward_seconds": plain[0],
        "layer_backward_seconds": plain[1],
        "layer_checkpoint_seconds": max(0.0, sum(recomputed) - sum(plain)),
        "kernels_per_layer": _count_kernels(bench),
    }
    if not adapted:
        bench.skipped.append("the host's time for LoRA: peft is not installed")
        return found
    return found | {
        "adapter_forward_seconds": max(0.0, adapted[0][0] - plain[0]) / NUM_LINEARS,
        "adapter_backward_seconds": (adapted[0][1] - plain[1]) / NUM_LINEARS,
    }


def _recompute(model: Any) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _adapt(model: Any) -> Any:
    import peft

    library: Any = peft
    config = library.LoraConfig(r=8, target_modules="all-linear")
    return library.get_peft_model(model, config, autocast_adapter_dtype=False)


def _time_variant(bench: Bench, variant: Variant) -> tuple[float, float]:
    """One layer forward and backward; repeated if the deeper model seemed faster."""
    found = _time_layer(bench, variant)
    return found if min(found) > 0.0 else _time_layer(bench, variant)


def _time_layer(bench: Bench, variant: Variant) -> tuple[float, float]:
    """The difference of two depths."""
    import transformers

    library: Any = transformers  # its own annotations do not know all of a config's fields
    fields = {key: value for key, value in LAYER_CONFIG.items() if key != "model_type"}
    times = []
    for depth in LAYERS:
        config = library.LlamaConfig(**fields, num_hidden_layers=depth, attn_implementation="sdpa")
        model = library.LlamaForCausalLM(config).to(device=bench.device, dtype=bench.dtype)
        times.append(_time_steps(bench, variant(model.train())))
    deeper = LAYERS[1] - LAYERS[0]
    small, large = times
    return (large[0] - small[0]) / deeper, (large[1] - small[1]) / deeper


def _time_steps(bench: Bench, model: Any) -> tuple[float, float]:
    """Median forward and backward time of the host, without waiting for the device."""
    ids = torch.zeros((1, 8), dtype=torch.long, device=bench.device)
    pairs: list[tuple[float, float]] = []
    while len(pairs) < NUM_STEPS + 2 and (len(pairs) < 4 or bench.seconds_left > 0):
        _wait(bench)
        start = time.perf_counter()
        loss = model(input_ids=ids, use_cache=False).logits.float().sum()
        middle = time.perf_counter()
        _wait(bench)
        resumed = time.perf_counter()
        loss.backward()
        _wait(bench)
        pairs.append((middle - start, time.perf_counter() - resumed))
        model.zero_grad(set_to_none=True)
    forward, backward = zip(*pairs[2:], strict=True)
    return statistics.median(forward), statistics.median(backward)


def _count_kernels(bench: Bench) -> float:
    depth = LAYERS[1]
    spec = read_config({**LAYER_CONFIG, "num_hidden_layers": depth}, name="layer", source="here")
    dtype = {torch.bfloat16: Dtype.BF16, torch.float16: Dtype.FP16}.get(bench.dtype, Dtype.FP32)
    strategy = Strategy(method=Method.FULL, weights=dtype, compute=dtype, attention=Attention.SDPA)
    kernels = count_forward_kernels(
        sum_workload(spec), NO_ADAPTERS, strategy, is_rms_norm=spec.is_rms_norm
    )
    return kernels / depth
