"""The whole calibration of one machine, part by part, within a time budget; and what Python and
torch take to start work: one small operation, one small decoder layer.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import platform
import socket
import statistics
import time
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from typing import Any

import torch

from tightfit.core.attention import Attention
from tightfit.core.dtypes import Dtype
from tightfit.core.errors import SetupError
from tightfit.core.packages import __version__
from tightfit.core.progress import Progress
from tightfit.core.settings import Method
from tightfit.core.strategy import Strategy
from tightfit.estimation.flops import NO_ADAPTERS, sum_workload
from tightfit.estimation.step_time import count_forward_kernels
from tightfit.hardware.calibration import Calibration, HostTimes
from tightfit.hardware.local import read_cpu
from tightfit.hardware.machine import read_driver, read_version
from tightfit.hardware.types import Node
from tightfit.models.config import read_config
from tightfit.runtime.calibrate.bench import Bench, Disturbance, warm_up
from tightfit.runtime.calibrate.kernels import (
    measure_attention,
    measure_matmuls,
    measure_nf4,
    measure_optimizers,
    measure_sustained,
    measure_traffic,
)
from tightfit.runtime.calibrate.links import (
    measure_collectives,
    measure_context,
    measure_host_link,
)
from tightfit.runtime.libraries import silence_libraries

# What Python and torch take to start work: one small operation, one small decoder layer.

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
    leaf = torch.ones(16, device=bench.device, requires_grad=True)

    def add() -> None:
        for _ in range(NUM_OPS):
            torch.add(tiny, 1.0)

    def prepare_backward() -> Callable[[], object]:
        value = leaf
        for _ in range(NUM_OPS):
            value = value * 1.0
        return partial(torch.autograd.grad, value.sum(), leaf)

    layer: dict[str, float] = {}
    try:
        layer = _measure_layer(bench)
    except ImportError:
        bench.skipped.append("the host's time for a decoder layer: transformers is not installed")
    return HostTimes(
        op_seconds=_time_ops(bench, lambda: add),
        backward_op_seconds=_time_ops(bench, prepare_backward),
        kernel_seconds=None if bench.is_cpu else bench.seconds(lambda: tiny.add_(1.0)),
        **layer,
    )


def _time_ops(bench: Bench, start: Callable[[], Callable[[], object]]) -> float:
    """Host seconds per operation: `start` prepares NUM_OPS, its result runs them unwaited for."""

    def run() -> float:
        work = start()
        _wait(bench)
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    run()
    return statistics.median(run() for _ in range(NUM_ROUNDS)) / NUM_OPS


def _wait(bench: Bench) -> None:
    if not bench.is_cpu:
        torch.cuda.synchronize()


def _measure_layer(bench: Bench) -> dict[str, float]:
    """Host seconds of one layer, forward and backward; overhead of recomputation and LoRA."""

    def recompute(model: Any) -> Any:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def adapt(model: Any) -> Any:
        import peft

        library: Any = peft
        config = library.LoraConfig(r=8, target_modules="all-linear")
        return library.get_peft_model(model, config, autocast_adapter_dtype=False)

    variants: list[Variant] = [lambda model: model, recompute]
    if importlib.util.find_spec("peft") is not None:
        variants.append(adapt)
    times = []
    for variant in variants:
        found = _time_layer(bench, variant)
        # Once more if the deeper model seemed faster.
        times.append(found if min(found) > 0.0 else _time_layer(bench, variant))
    plain, recomputed, *adapted = times
    if min(plain) <= 0.0:
        bench.skipped.append(
            "the host's time for a decoder layer: other work disturbed it too much"
        )
        return {}
    seconds = {
        "layer_forward_seconds": plain[0],
        "layer_backward_seconds": plain[1],
        "layer_checkpoint_seconds": max(0.0, sum(recomputed) - sum(plain)),
        "kernels_per_layer": _count_kernels(bench),
    }
    if not adapted:
        bench.skipped.append("the host's time for LoRA: peft is not installed")
        return seconds
    return seconds | {
        "adapter_forward_seconds": max(0.0, adapted[0][0] - plain[0]) / NUM_LINEARS,
        "adapter_backward_seconds": (adapted[0][1] - plain[1]) / NUM_LINEARS,
    }


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


DEFAULT_SECONDS = 100.0
"""Time of the measurements; starting torch and processes comes on top."""
WARM_UP_FRACTION = 0.02
PACKAGES = ("torch", "transformers", "bitsandbytes", "triton")


def measure_machine(
    node: Node, *, budget_seconds: float = DEFAULT_SECONDS, report: Progress | None = None
) -> Calibration:
    """Measure the device that `node` describes, on this machine.

    Several GPUs: rates are the first one's, collectives run over all. Nothing is written.
    """
    began = time.monotonic()
    driver = read_driver()
    disturbance = Disturbance(is_cpu=node.gpu.is_cpu)
    bench = _open_bench(node, budget_seconds)
    found: dict[str, Any] = {}
    parts = _list_parts(bench, node)
    for number, (name, share, measure) in enumerate(parts):
        if report is not None:
            report(f"measuring {name}", number, len(parts))
        later = sum(weight for _, weight, _ in parts[number:])
        with bench.part(share / later):
            found |= measure()
    if report is not None:
        report("measuring", len(parts), len(parts))
    versions = {"tightfit": __version__, "python": platform.python_version()}
    if torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
    versions |= {name: known for name in PACKAGES if (known := read_version(name)) is not None}
    return Calibration(
        gpu_name=node.gpu.name,
        host=socket.gethostname(),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        num_gpus=node.num_gpus,
        is_cpu=bench.is_cpu,
        device=read_cpu().model if bench.is_cpu else torch.cuda.get_device_name(bench.device),
        driver_version=None if bench.is_cpu else driver.driver_version,
        versions=versions,
        seconds=round(time.monotonic() - began, 1),
        skipped=tuple(bench.skipped),
        warnings=disturbance.find(bench.spreads),
        **found,
    )


def _open_bench(node: Node, budget_seconds: float) -> Bench:
    # Import what is installed before the time runs; what is missing is reported where it is needed.
    with contextlib.suppress(ImportError, RuntimeError, OSError):
        silence_libraries()
        importlib.import_module("transformers").LlamaForCausalLM  # noqa: B018 (loads it)
    with contextlib.suppress(ImportError, RuntimeError, OSError):
        importlib.import_module("bitsandbytes")
    gpu = node.gpu
    if not gpu.is_cpu and not torch.cuda.is_available():
        raise SetupError(
            f"torch {torch.__version__} cannot use the {gpu.name} of this machine.",
            remedy="tightfit doctor    (names what is wrong; --device cpu measures the CPU)",
        )
    if gpu.is_cpu and node.num_cores:
        torch.set_num_threads(node.num_cores)  # as a run's worker has them
    dtype = torch.bfloat16 if gpu.supports_bf16 else torch.float16
    return Bench(
        device=torch.device("cpu") if gpu.is_cpu else torch.device("cuda", 0),
        dtype=torch.float32 if gpu.is_cpu else dtype,
        supports_bf16=gpu.supports_bf16,
        deadline=time.monotonic() + budget_seconds,
    )


Part = tuple[str, float, Callable[[], dict[str, Any]]]
"""A name to show, a share of the time, and the measurement."""


def _list_parts(bench: Bench, node: Node) -> list[Part]:
    def measure_products() -> dict[str, Any]:
        warm_up(bench, seconds=WARM_UP_FRACTION * max(bench.seconds_left, 0.0))
        sustained = measure_sustained(bench)
        return {"matmuls": tuple(measure_matmuls(bench)), "sustained": sustained}

    def measure_cuda_context() -> dict[str, Any]:
        size, why = measure_context()
        bench.skipped += [why] if size is None else []
        return {"context_bytes": size}

    def measure_gpu_links() -> dict[str, Any]:
        count = min(node.num_gpus, torch.cuda.device_count())
        rows, why = measure_collectives(count, timeout_seconds=max(bench.seconds_left, 20.0))
        bench.skipped += [why] if why else []
        return {"collectives": tuple(rows)}

    parts: list[Part] = [
        ("the host's launches", 10.0, lambda: {"host_times": measure_host(bench)}),
        ("matrix products", 40.0, measure_products),
        ("attention", 40.0, lambda: {"attention": tuple(measure_attention(bench))}),
        ("memory", 15.0, lambda: {"traffic": tuple(measure_traffic(bench))}),
        ("AdamW", 5.0, lambda: {"optimizers": tuple(measure_optimizers(bench))}),
        ("nf4", 3.0, lambda: {"nf4_weights_per_second": measure_nf4(bench)}),
    ]
    if not bench.is_cpu:
        parts.insert(0, ("the CUDA context", 5.0, measure_cuda_context))
        parts.append(("host copies", 3.0, lambda: {"host_link": measure_host_link(bench)}))
        if node.num_gpus > 1:
            parts.append(("collectives", 20.0, measure_gpu_links))
    return parts
