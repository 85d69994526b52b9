"""What a card's kernels allocate: attention by backend, cuBLAS, and the rest, on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from tightfit.trace.attention import find_default_cudnn
from tightfit.trace.gpu_emulation import GpuEmulation
from tightfit.trace.recorder import Recorder

T4, A100, H100, B200 = (7, 5), (8, 0), (9, 0), (10, 0)
MIB = 2**20


class Trace:
    """Blocks that stood or passed while something ran under the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def backward(self, output: Any, gradient: Tensor | None = None) -> None:
        """As the engine does, with `gradient` of the output."""
        gradient = torch.empty_like(output) if gradient is None else gradient
        self.recorder.stage = "backward"
        output.backward(gradient)
        self.recorder.stage = "forward"

    def blocks(self, op: str, stage: str) -> list[int]:
        drafts = self.recorder._drafts
        return [d.num_bytes for d in drafts if op in d.op and d.stage == stage]

    def live(self) -> dict[str, int]:
        """Bytes that stand now, by operation."""
        found: dict[str, int] = {}
        for index in self.recorder._live.values():
            draft = self.recorder._drafts[index]
            found[draft.op] = found.get(draft.op, 0) + draft.num_bytes
        return found

    def peak(self) -> int:
        live = peak = 0
        for event in self.recorder._events:
            size = self.recorder._drafts[abs(event) - 1].num_bytes
            live += size if event > 0 else -size
            peak = max(peak, live)
        return peak


@contextmanager
def recording(card: tuple[int, int], torch_version: str = "2.11.0") -> Iterator[Trace]:
    emulation = GpuEmulation(
        card, torch_version, find_default_cudnn((2, int(torch_version.split(".")[1])))
    )
    recorder = Recorder(emulation, vocab_size=0)
    recorder.stage = "forward"
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        yield Trace(recorder)


def make_heads(
    num_heads: int, *, tokens: int = 256, width: int = 64, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """[2, heads, tokens, width], token by token in memory, as projections leave them."""
    laid = torch.empty(2, tokens, num_heads, width, dtype=dtype)
    return laid.transpose(1, 2).requires_grad_()


def attend(*args: Any, **options: Any) -> Tensor:
    """Looked up anew: the recorder puts another in its place."""
    return functional.scaled_dot_product_attention(*args, **options)


def run_attention(trace: Trace, num_key_heads: int = 8, **options: Any) -> None:
    shape = {name: options.pop(name) for name in ("tokens", "width", "dtype") if name in options}
    query = make_heads(8, **shape)
    key, value = make_heads(num_key_heads, **shape), make_heads(num_key_heads, **shape)
    output = attend(query, key, value, **options)
    output = output.transpose(1, 2).contiguous()
    trace.backward(output)
    for tensor in (query, key, value):
        assert tensor.grad is not None
        assert tensor.grad.shape == tensor.shape


ROWS = 2 * 8 * 256
"""Batch, heads and tokens of `make_heads`."""


def test_cudnn_saves_output_and_fp32_statistics_and_sums_query_gradients_in_fp32() -> None:
    with recording(H100) as trace:
        run_attention(trace, is_causal=True)
    name = "_scaled_dot_product_cudnn_attention"
    # Output, logsumexp, and a seed and an offset of 8 bytes.
    assert trace.blocks(f"{name}.default", "forward") == [ROWS * 64 * 2, ROWS * 4, 8, 8]
    assert trace.blocks(f"{name}_backward", "backward") == [ROWS * 64 * 2] * 3 + [
        ROWS * 64 * 4 + ROWS * 4 + 16
    ]


def test_flash_sums_query_gradients_in_fp32_of_rounded_shape() -> None:
    with recording(A100) as trace:
        run_attention(trace, is_causal=True, tokens=130, width=80)
    rows, rounded = 2 * 8 * 130, 2 * 8 * 256
    name = "_scaled_dot_product_flash_attention"
    assert trace.blocks(f"{name}.default", "forward") == [rows * 80 * 2, rows * 4, 16, 8]
    assert trace.blocks(f"{name}_backward", "backward") == [rows * 80 * 2] * 3 + [
        rounded * 4,
        rounded * 96 * 4,
    ]


def test_flash_gives_grouped_keys_gradients_of_every_query_head_first() -> None:
    with recording(A100) as trace:
        run_attention(trace, num_key_heads=2, is_causal=True, enable_gqa=True)
    backward = trace.blocks("flash_attention_backward", "backward")
    assert backward[:3] == [ROWS * 64 * 2, ROWS // 4 * 64 * 2, ROWS // 4 * 64 * 2]
    assert backward[3:] == [ROWS * 4, ROWS * 64 * 4, ROWS * 64 * 2, ROWS * 64 * 2]


def test_flash_copies_what_does_not_lie_token_by_token() -> None:
    with recording(A100) as trace:
        heads = [torch.empty(2, 8, 256, 64, dtype=torch.bfloat16).requires_grad_() for _ in "qkv"]
        output = attend(*heads, is_causal=True)
        trace.backward(output)
    backward = trace.blocks("flash_attention_backward", "backward")
    assert backward.count(ROWS * 64 * 2) == 3 + 2  # three gradients, two copies


def test_heads_that_are_no_multiple_of_8_are_padded_for_flash() -> None:
    with recording(A100) as trace:
        run_attention(trace, is_causal=True, width=60)
    assert trace.blocks("constant_pad_nd", "forward") == [ROWS * 64 * 2] * 3
    assert trace.blocks("flash_attention.default", "forward")[0] == ROWS * 64 * 2


def test_the_efficient_kernel_pads_statistics_and_takes_a_workspace() -> None:
    with recording(A100) as trace:
        run_attention(trace, tokens=200, dtype=torch.float32)
    rows = 2 * 8 * 200
    name = "_scaled_dot_product_efficient_attention"
    forward = trace.blocks(f"{name}.default", "forward")
    assert forward[:2] == [rows * 64 * 4, 2 * 8 * 224 * 4]  # rows rounded to 32
    backward = trace.blocks(f"{name}_backward", "backward")
    # Four tiles of 64 by 64 numbers and a lock of 16 bytes for each head.
    assert backward == [rows * 64 * 4] * 3 + [rows * 4, 2 * 8 * 4 * (64 * 64 * 4 + 16)]


def test_wide_heads_cost_the_efficient_kernel_sums_of_output_and_keys() -> None:
    with recording(A100) as trace:
        mask = torch.ones(256, 256, dtype=torch.bool)
        run_attention(trace, width=256, attn_mask=mask)
    name = "_scaled_dot_product_efficient_attention"
    assert trace.blocks(f"{name}.default", "forward")[-1] == ROWS * 256 * 4
    # Tiles of 128 by 64: 2 by 4 of them; keys in 4 parts of 64 for keys and values.
    each = 2 * 4 * (128 * 64 + 4) + 4 * 64 * (256 + 256)
    backward = trace.blocks(f"{name}_backward", "backward")
    assert backward[3:] == [ROWS * 4, 2 * 8 * each * 4]


def test_every_layer_saves_its_own_copy_of_a_boolean_mask() -> None:
    for card, is_padded in ((H100, False), (A100, True)):
        with recording(card) as trace:
            mask = torch.ones(2, 1, 250, 250, dtype=torch.bool)
            heads = [make_heads(8, tokens=250) for _ in "qkv"]
            layers = [attend(*heads, attn_mask=mask) for _ in range(3)]
            live = trace.live()
            del layers
        # The efficient kernel wants rows of a multiple of 8 numbers.
        copies = live["aten.constant_pad_nd.default" if is_padded else "aten.where.self"]
        assert copies == 3 * 2 * 250 * (256 if is_padded else 250) * 2
        assert live["aten.ones.default"] == 2 * 250 * 250


def test_math_keeps_scores_in_fp32() -> None:
    with recording(T4) as trace:
        run_attention(trace, is_causal=True)
    scores = 2 * 8 * 256 * 256
    # The softmax that is saved; in passing, the plain one and which scores are masked.
    assert trace.blocks("_safe_softmax", "forward") == [scores * 4, scores, scores * 4]
    # The gradient, and its product with the output.
    assert trace.blocks("_softmax_backward_data", "backward") == [scores * 4] * 2
    assert trace.blocks("aten.bmm", "forward") == [scores * 4, 8519680, ROWS * 64 * 4]


def test_autocast_narrows_what_attention_gets() -> None:
    with recording(H100) as trace, torch.autocast("cpu", torch.bfloat16):
        run_attention(trace, is_causal=True, dtype=torch.float32)
    assert trace.blocks("cudnn_attention.default", "forward")[0] == ROWS * 64 * 2
    assert trace.blocks("aten._to_copy", "forward") == [ROWS * 64 * 2] * 3


def test_varlen_attention_keeps_documents_128_rows_apart() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="pip install 'torch>=2.10'")
    with recording(A100) as trace:
        heads = [torch.empty(512, 8, 64, dtype=torch.bfloat16).requires_grad_() for _ in "qkv"]
        bounds = torch.empty(5, dtype=torch.int32)
        output = varlen.varlen_attn(*heads, bounds, bounds, 128, 128)
        trace.backward(output)
    blocks = trace.blocks("_varlen_attn_backward", "backward")
    rows = 512 + 4 * 128
    assert blocks[-2:] == [8 * rows * 4, 8 * rows * 64 * 4]


# cuBLAS


def multiply(trace: Trace, *, bias: bool = False) -> None:
    layer = nn.Linear(16, 16, bias=bias)
    output = layer(torch.empty(4, 16, requires_grad=True))
    trace.backward(output)


def workspaces(trace: Trace) -> list[int]:
    return [d.num_bytes for d in trace.recorder._drafts if d.dtype == "uint8"]


@pytest.mark.parametrize(
    ("card", "version", "expected"),
    [
        (H100, "2.9.0", 32 * MIB),
        (H100, "2.13.0", 32 * MIB),
        (A100, "2.13.0", 8519680),
        (T4, "2.9.0", 8519680),
        (B200, "2.11.0", 8519680),
        (B200, "2.12.0", 32 * MIB),
    ],
)
def test_each_thread_keeps_one_workspace(
    card: tuple[int, int], version: str, expected: int
) -> None:
    with recording(card, version) as trace:
        multiply(trace)
        multiply(trace)
        live = sum(
            trace.recorder._drafts[abs(e) - 1].num_bytes * (1 if e > 0 else -1)
            for e in trace.recorder._events
            if trace.recorder._drafts[abs(e) - 1].dtype == "uint8"
        )
    assert workspaces(trace) == [expected, expected]
    assert live == 2 * expected  # they stay


def test_biases_had_a_workspace_of_their_own_until_212() -> None:
    with recording(A100, "2.11.0") as trace:
        multiply(trace, bias=True)
    assert workspaces(trace) == [8519680, MIB, 8519680]
    with recording(A100, "2.12.0") as trace:
        multiply(trace, bias=True)
    assert workspaces(trace) == [8519680, 8519680]


def test_from_214_workspaces_pass_with_the_product() -> None:
    with recording(H100, "2.14.0") as trace:
        multiply(trace)
        events = list(trace.recorder._events)
    taken = [i + 1 for i, d in enumerate(trace.recorder._drafts) if d.dtype == "uint8"]
    assert len(taken) > 2
    assert all(-number in events for number in taken)


# The rest


def test_embedding_backward_keeps_partial_sums_for_as_many_tokens_as_may_differ() -> None:
    with recording(A100) as trace:
        table = torch.empty(1000, 64, dtype=torch.bfloat16, requires_grad=True)
        tokens = torch.zeros(2, 2048, dtype=torch.long)
        output = functional.embedding(tokens, table)
        trace.backward(output)
    blocks = trace.blocks("embedding_dense_backward", "backward")
    assert blocks[0] == 1000 * 64 * 2
    assert blocks[-1] == (4096 // 10 + 1000) * 64 * 4
    with recording(A100) as trace:
        output = functional.embedding(
            torch.zeros(3072, dtype=torch.long), torch.empty(1000, 64, requires_grad=True)
        )
        trace.backward(output)
    assert trace.blocks("embedding_dense_backward", "backward") == [1000 * 64 * 4]


def test_dropout_keeps_a_byte_for_each_number() -> None:
    with recording(A100) as trace:
        hidden = torch.empty(64, 64, dtype=torch.bfloat16, requires_grad=True)
        output = nn.Dropout(0.1)(hidden)
        live = trace.live()
        trace.backward(output)
    assert live["aten.native_dropout.default"] == 64 * 64 * (2 + 1)


def test_layer_norm_keeps_statistics_of_half_precision_in_fp32() -> None:
    with recording(A100) as trace:
        hidden = torch.empty(64, 32, dtype=torch.bfloat16, requires_grad=True)
        norm = nn.LayerNorm(32, dtype=torch.bfloat16)
        output = norm(hidden)
        trace.backward(output)
    assert trace.blocks("native_layer_norm.default", "forward") == [64 * 32 * 2, 64 * 4, 64 * 4]
    assert norm.weight.grad is not None


def test_rows_that_were_picked_add_their_gradients_to_zeros_in_place() -> None:
    with recording(H100) as trace:
        hidden = torch.empty(4, 64, 256, dtype=torch.bfloat16, requires_grad=True)
        mask = torch.ones(4, 64, dtype=torch.bool)
        output = hidden[mask]
        trace.backward(output)
    rows = 4 * 64
    # The places of true values, two numbers each, stand before the rows are there.
    assert trace.blocks("aten.index.Tensor", "forward") == [rows * 2 * 8, rows * 256 * 2]
    assert trace.blocks("new_zeros", "backward") == [rows * 256 * 2]
    assert rows * 256 * 2 not in trace.blocks("index_put", "backward")


class _Curved(torch.autograd.Function):
    """A backward pass in Python that adds two intermediate results."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        (value,) = ctx.saved_tensors
        summed: Tensor = (value * 2) + (gradients[0] * 3)
        return summed


def test_only_the_engine_adds_gradients_in_place() -> None:
    with recording(H100) as trace:
        value = torch.empty(1024, requires_grad=True)
        output: Any = _Curved.apply(value)  # type: ignore[no-untyped-call]
        trace.backward(output)
    assert trace.blocks("aten.add.Tensor", "backward") == [1024 * 4]
    with recording(H100) as trace:
        value = torch.empty(1024, requires_grad=True)
        trace.backward(value * 2 + value * 3)
    assert trace.blocks("aten.add", "backward") == []


def test_a_workspace_comes_after_the_first_product() -> None:
    """As recorded on an H200 with torch 2.11; what stands between decides where gaps are."""
    with recording(H100) as trace:
        nn.Linear(64, 64, bias=False)(torch.empty(1024, 64))
    blocks = trace.blocks("aten.mm", "forward")
    assert blocks == [1024 * 64 * 4, 32 * MIB]


def test_a_card_widens_fp16_inside_its_softmax() -> None:
    with recording(A100) as trace:
        for dtype in (torch.float16, torch.bfloat16):
            functional.softmax(torch.empty(64, 64, dtype=dtype), -1, dtype=torch.float32)
    assert trace.blocks("aten._to_copy", "forward") == [64 * 64 * 4]  # bf16's alone
    assert trace.blocks("aten._softmax", "forward") == [64 * 64 * 4] * 2


def test_autocast_computes_norms_and_softmax_in_fp32_as_cuda_does() -> None:
    hidden = torch.ones(4, 8, dtype=torch.bfloat16)
    norm = nn.LayerNorm(8)

    def results() -> list[torch.dtype]:
        with torch.autocast("cpu", torch.bfloat16):
            made = (
                norm(hidden),
                hidden.softmax(-1),
                hidden.pow(2),
                hidden.sum(),
                norm(hidden) @ (hidden.T),
            )
        return [x.dtype for x in made]

    before = results()
    with recording(A100):
        inside = results()
    assert inside == [torch.float32] * 4 + [torch.bfloat16]
    assert results() == before != inside  # and nothing of it stays


def test_plain_optimizers_update_all_parameters_at_once() -> None:
    with recording(A100) as trace:
        weights = [nn.Parameter(torch.empty(64, 64)) for _ in range(4)]
        for weight in weights:
            weight.grad = torch.empty_like(weight)
        optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=0.1)
        trace.recorder.stage = "update"
        optimizer.step()
    assert trace.blocks("_foreach_add.List", "update") == [64 * 64 * 4] * 4


def test_4bit_products_unpack_the_whole_matrix_first() -> None:
    pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes")
    for tokens, scratch in ((2048, [128 * 64 * 2]), (4, [])):
        with recording(A100) as trace:
            packed = torch.empty(128 * 64 // 2, 1, dtype=torch.uint8)
            scales = torch.empty(128 * 64 // 64)
            torch.ops.bitsandbytes.gemm_4bit.default(
                torch.empty(tokens, 64, dtype=torch.bfloat16), packed, [128, 64], scales, 64, "nf4"
            )
        blocks = trace.blocks("gemm_4bit", "forward")
        assert blocks == [*scratch, tokens * 128 * 2, 8519680]


def test_int8_products_pass_through_int32_and_fp16() -> None:
    pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes")
    with recording(A100) as trace:
        tokens = torch.empty(32, 64, dtype=torch.int8)
        weight = torch.empty(128, 64, dtype=torch.int8)
        torch.ops.bitsandbytes.int8_scaled_mm.default(
            tokens, weight, torch.empty(32), torch.empty(128), dtype=torch.bfloat16
        )
    assert trace.blocks("int8_scaled_mm", "forward") == [
        32 * 128 * 4,
        32 * 128 * 2,
        32 * 128 * 2,
    ]


def test_scratch_stands_beside_the_results_at_the_peak() -> None:
    with recording(A100) as trace:
        heads = [make_heads(8) for _ in "qkv"]
        output = attend(*heads, is_causal=True)
        gradient = torch.empty_like(output)
        before = sum(trace.live().values())
        trace.backward(output, gradient)
        peak = trace.peak()
    assert peak == before + 3 * ROWS * 64 * 2 + ROWS * 4 + ROWS * 64 * 4
