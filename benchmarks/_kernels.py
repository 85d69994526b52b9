"""Kernels of one device by themselves: products, memory-bound kernels, a tiny layer's host time."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tightfit.training.recompute import recompute_layers

SAMPLE_SECONDS = 0.02
HEAD_DIM = 128
HOST_DEPTHS = (2, 8)
"""Their difference is time per layer, without what a model does once."""
NUM_UNCOUNTED = 5
"""Steps of the host's part until caches are warm."""
WAIT_CYCLES = 20_000_000
"""About 10 ms in which the device waits while the host queues what is timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large and how long everything is."""

    products: tuple[tuple[int, int, int], ...]
    """Tokens, values out, values in."""
    rows: tuple[int, ...]
    width: int
    scores: tuple[int, int, int, int]
    rest_seconds: float
    burst_seconds: float
    sustained_seconds: float
    num_repeats: int
    num_host_steps: int


FULL = Scale(
    products=((2048, 4096, 4096), (8192, 4096, 4096), (8192, 11008, 4096), (2048, 2048, 2048)),
    rows=(2048, 8192, 32768),
    width=4096,
    scores=(8, 32, 1024, 1024),
    rest_seconds=0.3,
    burst_seconds=0.1,
    sustained_seconds=1.5,
    num_repeats=30,
    num_host_steps=20,
)
TINY = Scale(
    products=((32, 64, 16),),
    rows=(8,),
    width=2 * HEAD_DIM,
    scores=(1, 2, 8, 8),
    rest_seconds=0.0,
    burst_seconds=0.001,
    sustained_seconds=0.01,
    num_repeats=2,
    num_host_steps=NUM_UNCOUNTED + 2,
)
"""To try everything out where there is no GPU."""

Work = Callable[[], object]


def choose_scale(device: torch.device) -> Scale:
    return FULL if device.type == "cuda" else TINY


class Meter:
    """The card's SM clock and power while something runs; nothing is read without CUDA."""

    def __init__(self, device: torch.device, *, every_seconds: float = SAMPLE_SECONDS) -> None:
        self.clock_mhz: list[int] = []
        self.power_watts: list[float] = []
        self._is_over = threading.Event()
        self._every_seconds = every_seconds
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._is_cuda = device.type == "cuda"

    def __enter__(self) -> Meter:
        if self._is_cuda:
            torch.cuda.power_draw()  # a missing nvidia-ml-py is to fail here, not in the thread
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._is_cuda:
            self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(self._every_seconds):
            self.clock_mhz.append(torch.cuda.clock_rate())
            self.power_watts.append(torch.cuda.power_draw() / 1e3)

    def read_last(self, count: int = 5) -> dict[str, float | None]:
        """Medians of the last readings, when the card has settled."""
        return {
            "clock_mhz": statistics.median(self.clock_mhz[-count:]) if self.clock_mhz else None,
            "power_watts": statistics.median(self.power_watts[-count:])
            if self.power_watts
            else None,
        }


def time_repeats(work: Work, count: int, device: torch.device, *, is_queued: bool = False) -> float:
    """Mean seconds of one run; `is_queued` has the device wait until all are queued."""
    if device.type == "cpu":
        begin = time.perf_counter()
        for _ in range(count):
            work()
        return (time.perf_counter() - begin) / count
    cuda: Any = torch.cuda  # not annotated throughout
    start, stop = (cuda.Event(enable_timing=True) for _ in range(2))
    cuda.synchronize()
    if is_queued:
        cuda._sleep(WAIT_CYCLES)
    start.record()
    for _ in range(count):
        work()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3 / count


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure_products(device: torch.device) -> list[dict[str, Any]]:
    """After a rest, and when the card has done nothing else for a while.

    The power that a product takes depends on its values: those of zeros take little.
    """
    scale = choose_scale(device)
    rows = []
    for shape in scale.products:
        for values in ("normal", "small weights", "zeros", "changing operands"):
            work = _make_product(shape, values, device)
            rows.append(describe_product(shape, values) | _time_product(work, shape, device))
    return rows


def describe_product(shape: tuple[int, int, int], values: str) -> dict[str, Any]:
    return {"tokens": shape[0], "out": shape[1], "in": shape[2], "values": values}


def _make_product(shape: tuple[int, int, int], values: str, device: torch.device) -> Work:
    tokens, num_out, num_in = shape
    num_left, num_right = (8, 16) if values == "changing operands" else (1, 1)
    spread = {"normal": 1.0, "zeros": 0.0}.get(values, 0.02)

    def draw(rows: int) -> torch.Tensor:
        return torch.randn(rows, num_in, device=device, dtype=torch.bfloat16)

    left = itertools.cycle([draw(tokens) * (spread > 0) for _ in range(num_left)])
    right = itertools.cycle([draw(num_out) * spread for _ in range(num_right)])
    return lambda: functional.linear(next(left), next(right))


def _time_product(
    work: Work, shape: tuple[int, int, int], device: torch.device
) -> dict[str, float | None]:
    scale = choose_scale(device)
    for _ in range(3):
        work()
    wait_for(device)
    time.sleep(scale.rest_seconds)
    repeats = max(4, int(scale.burst_seconds / time_repeats(work, 1, device)))
    rested = time_repeats(work, repeats, device)
    seconds = []
    with Meter(device) as meter:
        end = time.perf_counter() + scale.sustained_seconds
        while time.perf_counter() < end:
            seconds.append(time_repeats(work, repeats, device))
    flops = 2 * shape[0] * shape[1] * shape[2]
    return {
        "rested_flops_per_second": flops / rested,
        "sustained_flops_per_second": flops / statistics.median(seconds[-4:]),
        **meter.read_last(),
    }


@dataclass(frozen=True, slots=True)
class Kind:
    """A memory-bound kernel, and what it has to move at least."""

    name: str
    work: Work
    num_values: int
    """Of its largest operand or its result."""
    moved_bytes: int


def measure_traffic(device: torch.device) -> list[dict[str, Any]]:
    scale = choose_scale(device)
    rows = []
    for num_rows in scale.rows:
        shape = (num_rows, scale.width)
        rows += [_time_kind(kind, shape, device) for kind in list_kinds(shape, device)]
    scores = torch.randn(scale.scores, device=device, dtype=torch.bfloat16)
    kinds = list_softmaxes(scores)
    return rows + [_time_kind(kind, scale.scores, device) for kind in kinds]


def list_kinds(shape: tuple[int, int], device: torch.device) -> list[Kind]:
    """Kernels of a decoder layer over (tokens, width); operands change, so no cache holds them."""
    halves = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(8)]
    narrow, wide = itertools.cycle(halves), itertools.cycle([half.float() for half in halves[:4]])
    first, row = halves[0], halves[0][0]
    column = torch.randn(shape[0], 1, device=device)
    n = shape[0] * shape[1]
    middle = HEAD_DIM // 2

    def heads() -> torch.Tensor:
        return next(narrow).view(shape[0], -1, HEAD_DIM)

    def swap() -> torch.Tensor:
        return torch.cat((heads()[..., middle:], first.view_as(heads())[..., :middle]), -1)

    return [
        Kind("add", lambda: next(narrow) + first, n, 6 * n),
        Kind("times a row", lambda: next(narrow) * row, n, 4 * n),
        Kind("bf16 to fp32", lambda: next(narrow).float(), n, 6 * n),
        Kind("fp32 to bf16", lambda: next(wide).bfloat16(), n, 6 * n),
        Kind("fp32 square", lambda: next(wide).pow(2), n, 8 * n),
        Kind("fp32 mean of each row", lambda: next(wide).mean(-1, keepdim=True), n, 4 * n),
        Kind("fp32 times a column", lambda: next(wide) * column, n, 8 * n),
        Kind("sum of each column", lambda: next(narrow).sum(0), n, 2 * n),
        Kind("silu", lambda: functional.silu(next(narrow)), n, 4 * n),
        Kind("half of each head negated", lambda: -heads()[..., middle:], n // 2, 2 * n),
        Kind("halves of heads swapped", swap, n, 4 * n),
        Kind("heads first", lambda: heads().transpose(0, 1).contiguous(), n, 4 * n),
        Kind("clone", lambda: next(narrow).clone(), n, 4 * n),
        Kind("layer norm", lambda: functional.layer_norm(next(narrow), shape[1:]), n, 4 * n),
        Kind("gelu", lambda: functional.gelu(next(narrow)), n, 4 * n),
    ]


def list_softmaxes(scores: torch.Tensor) -> list[Kind]:
    n = scores.numel()
    return [
        # Two kernels for bf16, as in eager attention; only fp16 is widened by the softmax itself.
        Kind("fp32 softmax of bf16", lambda: scores.softmax(-1, dtype=torch.float32), n, 14 * n),
        Kind("softmax", lambda: scores.softmax(-1), n, 4 * n),
    ]


def _time_kind(kind: Kind, shape: tuple[int, ...], device: torch.device) -> dict[str, Any]:
    for _ in range(3):
        kind.work()
    repeats = choose_scale(device).num_repeats
    return describe_kind(kind, shape, time_repeats(kind.work, repeats, device, is_queued=True))


def describe_kind(kind: Kind, shape: tuple[int, ...], seconds: float) -> dict[str, Any]:
    return {
        "kind": kind.name,
        "shape": list(shape),
        "moved_bytes": kind.moved_bytes,
        "seconds": seconds,
        "bytes_per_second": kind.moved_bytes / seconds,
        "values_per_second": kind.num_values / seconds,
    }


def _keep(model: Any) -> None:
    """Everything is kept for the backward pass."""


def _recompute_by_transformers(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})


def _recompute_by_train(model: Any) -> None:
    recompute_layers(list(model.model.layers))


def _recompute_without_state(model: Any) -> None:
    for layer in model.model.layers:
        again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        layer.forward = partial(again, layer.forward)


VARIANTS: tuple[tuple[str, Callable[[Any], None]], ...] = (
    ("plain", _keep),
    ("checkpointed by transformers", _recompute_by_transformers),
    ("checkpointed by train", _recompute_by_train),
    ("checkpointed, random state not kept", _recompute_without_state),
    ("plain, once more", _keep),
)
"""The first comes again at the end: where the two differ, so far does the host waver."""


def measure_host(device: torch.device) -> list[dict[str, Any]]:
    """Per tiny decoder layer: its kernels take no time, so starting them does."""
    num_layers = HOST_DEPTHS[1] - HOST_DEPTHS[0]
    rows = []
    for name, prepare in VARIANTS:
        shallow, deep = (_time_model(depth, prepare, device) for depth in HOST_DEPTHS)
        rows.append(
            {
                "variant": name,
                "forward_seconds": (median_of(deep[0]) - median_of(shallow[0])) / num_layers,
                "backward_seconds": (median_of(deep[1]) - median_of(shallow[1])) / num_layers,
                "all_deep_backward_seconds": [round(seconds, 5) for seconds in deep[1]],
            }
        )
    return rows


def median_of(seconds: list[float]) -> float:
    return statistics.median(seconds[NUM_UNCOUNTED:])


def _time_model(
    depth: int, prepare: Callable[[Any], None], device: torch.device
) -> tuple[list[float], list[float]]:
    """The host's seconds of each forward pass, and those of each backward pass to its end."""
    model = _make_model(depth, device)
    prepare(model)
    ids = torch.zeros((1, 8), dtype=torch.long, device=device)
    forward, backward = [], []
    for _ in range(choose_scale(device).num_host_steps):
        wait_for(device)
        start = time.perf_counter()
        loss = model(input_ids=ids, use_cache=False).logits.float().sum()
        forward.append(time.perf_counter() - start)
        wait_for(device)
        start = time.perf_counter()
        loss.backward()
        wait_for(device)
        backward.append(time.perf_counter() - start)
        model.zero_grad(set_to_none=True)
    return forward, backward


def _make_model(depth: int, device: torch.device) -> Any:
    import transformers

    library: Any = transformers
    config = library.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=128,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        num_hidden_layers=depth,
        attn_implementation="sdpa",
    )
    return library.LlamaForCausalLM(config).to(device, torch.bfloat16).train()
