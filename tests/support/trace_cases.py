"""A made-up training step as a recording, with sizes like a real one's, and what is told of it."""

from __future__ import annotations

from typing import Any

from tightfit.trace.caching_allocator import (
    AllocatorSettings,
    CachingAllocator,
    find_peak,
    find_smallest_capacity,
    round_block,
)
from tightfit.trace.recording import (
    Allocation,
    Recording,
    build_timeline,
    describe_peak,
    list_stage_peaks,
)
from tightfit.trace.result import TracedMemory

HIDDEN = 2048
WIDE = 5632
VOCAB = 32_000


class Scribe:
    """Writes a recording event by event."""

    def __init__(self) -> None:
        self.recording = Recording()
        self.stage, self.step = "load", 0

    def begin(self, shape: tuple[int, ...], op: str, category: str, **fields: Any) -> int:
        value_bytes = {"bfloat16": 2, "float32": 4, "int64": 8}[
            fields.setdefault("dtype", "bfloat16")
        ]
        num_bytes = value_bytes
        for size in shape:
            num_bytes *= size
        self.recording.allocations.append(
            Allocation(
                num_bytes=num_bytes,
                op=op,
                module=fields.get("module", ""),
                stage=self.stage,
                step=self.step,
                layer=fields.get("layer"),
                shape=shape,
                dtype=fields["dtype"],
                category=category,
            )
        )
        event = len(self.recording.allocations)
        self.recording.events.append(event)
        return event

    def end(self, *events: int) -> None:
        self.recording.events += [-event for event in events]


def record_full_tuning(*, num_layers: int = 16, tokens: int = 8192) -> Recording:
    """Two steps of full tuning without checkpointing, AdamW foreach; then eval and save."""
    scribe = Scribe()
    weights = _load(scribe, num_layers)
    gradients: list[int] = []
    for step in (1, 2):
        scribe.step = step
        scribe.stage = "forward"
        scribe.end(*gradients)
        rows = scribe.begin((4, tokens // 4), "", "inputs", dtype="int64")
        kept = _run_forward(scribe, num_layers, tokens)
        scribe.stage = "backward"
        gradients = _run_backward(scribe, weights, kept)
        scribe.end(rows)
        scribe.stage = "update"
        if step == 1:
            for shape in weights:
                scribe.begin(shape, "aten.zeros_like.default", "optimizer")
                scribe.begin(shape, "aten.zeros_like.default", "optimizer")
        roots = [
            scribe.begin(shape, "aten._foreach_sqrt.default", "temporary") for shape in weights
        ]
        scribe.end(*roots)
    scribe.stage, scribe.step = "eval", 0
    scribe.end(*gradients)
    for group in _run_forward(scribe, num_layers, tokens // 2):
        scribe.end(*group)
    scribe.stage = "save"
    scribe.end(scribe.begin((VOCAB, HIDDEN), "aten._to_copy.default", "temporary"))
    return scribe.recording


def trace(recording: Recording, **fields: Any) -> TracedMemory:
    """The summary of a recording, its reserve by the allocator's model."""
    settings = AllocatorSettings()
    sizes = [round_block(size) for size in recording.sizes]
    stages = list_stage_peaks(recording, CachingAllocator(settings))
    reported: dict[str, Any] = {
        "peak_allocated_bytes": find_peak(sizes, recording.events)[0],
        "peak_reserved_bytes": max(stage.peak_reserved_bytes for stage in stages),
        "smallest_capacity_bytes": find_smallest_capacity(sizes, recording.events, settings),
        "stages": stages,
        "peak": describe_peak(recording),
        "timeline": build_timeline(recording),
        "num_layers": 16,
        "num_traced_layers": 4,
        "seconds": 4.2,
        "versions": {"torch": "2.13.0", "transformers": "5.22.2"},
    }
    return TracedMemory(**(reported | fields))


def _load(scribe: Scribe, num_layers: int) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = [(VOCAB, HIDDEN)]
    scribe.begin(shapes[0], "", "weights", module="model.embed_tokens")
    for layer in range(num_layers):
        for name, shape in (
            ("self_attn.q_proj", (HIDDEN, HIDDEN)),
            ("self_attn.o_proj", (HIDDEN, HIDDEN)),
            ("mlp.gate_proj", (WIDE, HIDDEN)),
            ("mlp.up_proj", (WIDE, HIDDEN)),
            ("mlp.down_proj", (HIDDEN, WIDE)),
        ):
            scribe.begin(shape, "", "weights", module=f"model.layers.{layer}.{name}", layer=layer)
            shapes.append(shape)
    return shapes


def _run_forward(scribe: Scribe, num_layers: int, tokens: int) -> list[list[int]]:
    """What each layer keeps, and then the logits."""
    kept = []
    for layer in range(num_layers):
        at = f"model.layers.{layer}"
        group = []
        for name, op, width in (
            ("input_layernorm", "aten.mul.Tensor", HIDDEN),
            ("self_attn.q_proj", "aten.mm.default", HIDDEN),
            ("self_attn", "aten._scaled_dot_product_flash_attention.default", HIDDEN),
            ("mlp.gate_proj", "aten.mm.default", WIDE),
            ("mlp.up_proj", "aten.mm.default", WIDE),
            ("mlp.act_fn", "aten.silu.default", WIDE),
        ):
            module = f"{at}.{name}"
            scribe.end(
                scribe.begin((tokens, HIDDEN), op, "temporary", dtype="float32", module=module)
            )
            group.append(
                scribe.begin((tokens, width), op, "activations", module=module, layer=layer)
            )
        kept.append(group)
    logits = scribe.begin((tokens, VOCAB), "aten.mm.default", "logits", module="lm_head")
    copy = scribe.begin((tokens, VOCAB), "aten._to_copy.default", "logits", dtype="float32")
    return [*kept, [logits, copy]]


def _run_backward(
    scribe: Scribe, weights: list[tuple[int, ...]], kept: list[list[int]]
) -> list[int]:
    *layers, logits = kept
    tokens = scribe.recording.allocations[logits[0] - 1].shape[0]
    slope = scribe.begin(
        (tokens, VOCAB), "aten._log_softmax_backward_data.default", "logits", dtype="float32"
    )
    scribe.end(*logits, slope)
    gradients = []
    left = list(weights)
    for layer, group in reversed(list(enumerate(layers))):
        for _ in range(5):
            module = f"model.layers.{layer}.mlp"
            made = scribe.begin((tokens, WIDE), "aten.mm.default", "temporary", module=module)
            gradients.append(
                scribe.begin(left.pop(), "aten.mm.default", "gradients", module=module, layer=layer)
            )
            scribe.end(made)
        scribe.end(*group)
    gradients.append(scribe.begin(left.pop(), "aten.embedding_dense_backward.default", "gradients"))
    return gradients
