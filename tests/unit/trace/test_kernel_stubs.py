"""Liger on fake tensors: its own Python allocates what it would on a card, and nothing stays."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tightfit.core.errors import SetupError
from tightfit.estimation.activations import count_chunk_tokens
from tightfit.models.resolve import resolve_model
from tightfit.trace.concrete_values import ConcreteValues, set_concrete_value
from tightfit.trace.kernel_stubs import liger_without_kernels, triton_without_kernels

CARD = (9, 0)
OLD_CARD = (7, 5)
TOKENS, WIDTH, VOCAB = 96, 16, 100
TARGETS = torch.ones(TOKENS, dtype=torch.long)
Made = list[tuple[tuple[int, ...], torch.dtype]]


class _Notebook(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every storage of more than one value that operations make, by shape and dtype."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: Made = []
        self._held: list[Any] = []
        self._known: set[int] = set()
        self._shadows = ConcreteValues()

    def know(self, *tensors: Tensor) -> None:
        self._known |= {t.untyped_storage()._cdata for t in tensors}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = self._shadows.run(func, args, kwargs or {})
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in self._known:
                self._held.append(leaf.untyped_storage())  # so that no address is used again
                self.know(leaf)
                if leaf.numel() > 1:
                    self.made.append((tuple(leaf.shape), leaf.dtype))
        return result


@contextmanager
def _notebook(capability: tuple[int, int] = CARD) -> Iterator[_Notebook]:
    with liger_without_kernels(capability), FakeTensorMode(allow_non_fake_inputs=True):
        notebook = _Notebook()
        with notebook:
            yield notebook


def _values(*shape: int, is_trained: bool = True) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16).requires_grad_(is_trained)


def _run_fused_loss(*, is_head_trained: bool, capability: tuple[int, int] = CARD) -> Made:
    with _notebook(capability) as notebook:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        hidden, head = _values(TOKENS, WIDTH), _values(VOCAB, WIDTH, is_trained=is_head_trained)
        targets = set_concrete_value(torch.empty(TOKENS, dtype=torch.long), TARGETS)
        notebook.know(hidden, head, targets)
        notebook.made.clear()
        loss = LigerFusedLinearCrossEntropyLoss(reduction="sum")(head, hidden, targets)
        (loss * 0.5).backward()
        assert hidden.grad is not None
        assert hidden.grad.shape == (TOKENS, WIDTH)
        assert (head.grad is not None) == is_head_trained
    return notebook.made


def _slice_size() -> int:
    """Liger: as many slices as keep the logits as small as the hidden states, rounded up."""
    num_slices = -(-VOCAB // WIDTH)
    size = -(-TOKENS // num_slices)
    while size & (size - 1):
        size += 1
    return size


def test_fused_loss_of_a_frozen_head() -> None:
    made = _run_fused_loss(is_head_trained=False)
    hidden_gradient, one_slice = (TOKENS, WIDTH), (_slice_size(), VOCAB)
    expected = [
        (hidden_gradient, torch.bfloat16),
        ((TOKENS,), torch.float32),  # a loss for each token
        ((TOKENS,), torch.bool),  # which of them count
        (one_slice, torch.bfloat16),  # logits, then their gradient, in the same place each time
    ]
    assert made == expected


@pytest.mark.parametrize("factor", [1, 2, 4, 8, 64])
@pytest.mark.parametrize(
    ("tokens", "width", "vocab"),
    [
        (8192, 4096, 128_256),
        (32_768, 2048, 128_256),
        (8192, 4096, 32_000),
        (1000, 896, 151_936),
        (1, 16, 100),
        (96, 128, 100),
    ],
)
def test_our_slices_are_ligers_own(tokens: int, width: int, vocab: int, factor: int) -> None:
    wanted = torch.ones(tokens, dtype=torch.long)
    with _notebook() as notebook:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        hidden, head = _values(tokens, width), _values(vocab, width, is_trained=False)
        targets = set_concrete_value(torch.empty(tokens, dtype=torch.long), wanted)
        notebook.know(hidden, head, targets)
        notebook.made.clear()
        liger_fused_linear_cross_entropy(hidden, head, targets, chunk_mem_const=factor)
    spec = resolve_model("Llama-2-7b").model_copy(
        update={"hidden_size": width, "vocab_size": vocab}
    )
    rows = count_chunk_tokens(
        tokens=tokens, hidden_size=spec.hidden_size, vocab_size=spec.vocab_size, factor=factor
    )
    slices = {shape for shape, dtype in notebook.made if shape[-1] == vocab}
    assert slices == {(rows, vocab)}


def test_fused_loss_of_a_trained_head() -> None:
    """The head's gradient is summed up in place: no second matrix, as on a card since Ampere."""
    made = _run_fused_loss(is_head_trained=True)
    assert made.count(((VOCAB, WIDTH), torch.bfloat16)) == 1
    assert ((VOCAB, WIDTH), torch.float32) not in made


def test_fused_loss_of_a_trained_head_on_an_old_card() -> None:
    """There Liger multiplies out of place, and sums in fp32, slice by slice."""
    made = _run_fused_loss(is_head_trained=True, capability=OLD_CARD)
    num_slices = -(-TOKENS // _slice_size())
    assert made.count(((VOCAB, WIDTH), torch.float32)) == num_slices


def test_cross_entropy_writes_its_gradient_over_the_logits() -> None:
    with _notebook() as notebook:
        from liger_kernel.transformers import LigerCrossEntropyLoss

        logits = _values(TOKENS, VOCAB)
        targets = set_concrete_value(torch.empty(TOKENS, dtype=torch.long), TARGETS)
        notebook.know(logits, targets)
        notebook.made.clear()
        LigerCrossEntropyLoss(reduction="sum")(logits, targets).backward()
        assert logits.grad is not None
    assert not [shape for shape, _ in notebook.made if shape == (TOKENS, VOCAB)]


def test_norm_keeps_a_number_for_each_row() -> None:
    with _notebook() as notebook:
        from liger_kernel.transformers import LigerRMSNorm

        norm = LigerRMSNorm(WIDTH)
        norm.weight = torch.nn.Parameter(_values(WIDTH, is_trained=False))
        x = _values(2, TOKENS, WIDTH)
        notebook.know(x, *norm.parameters())
        notebook.made.clear()
        y = norm(x)
        assert notebook.made == [
            ((2 * TOKENS, WIDTH), torch.bfloat16),
            ((2 * TOKENS,), torch.float32),
        ]
        incoming = torch.empty_like(y)
        notebook.made.clear()
        y.backward(incoming)
    # Rows are summed by the card's multiprocessors, each into a row of its own; x's gradient
    # lies where y's lay.
    partial, *rest = notebook.made
    assert partial == ((132, WIDTH), torch.float32)
    assert (2, TOKENS, WIDTH) not in [shape for shape, _ in rest]


def test_gated_mlp_makes_its_product_alone() -> None:
    with _notebook() as notebook:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        gate, up = _values(TOKENS, 32), _values(TOKENS, 32)
        notebook.know(gate, up)
        notebook.made.clear()
        product = LigerSiLUMulFunction.apply(gate, up)
        assert notebook.made == [((TOKENS, 32), torch.bfloat16)]
        incoming = torch.empty_like(product)
        notebook.made.clear()
        product.backward(incoming)
    assert notebook.made == []


def test_launch_does_nothing() -> None:
    values = torch.arange(4)
    with triton_without_kernels():
        triton: Any = importlib.import_module("triton")
        language: Any = importlib.import_module("triton.language")

        def store(pointer: Any) -> None:
            language.store(pointer, language.constexpr(7).value)

        tuned = triton.autotune(configs=[triton.Config({})], key=[])
        kernel = tuned(triton.jit(store))
        assert kernel[(1,)](values) is None
        assert triton.cdiv(7, 2) == 4
        assert [triton.next_power_of_2(n) for n in (1, 2, 3, 1000)] == [1, 2, 4, 1024]
    assert values.tolist() == [0, 1, 2, 3]


def test_nothing_stays() -> None:
    from torch.utils._triton import has_triton_package
    from transformers.models.llama import modeling_llama

    names = ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP")
    before = [getattr(modeling_llama, name) for name in names]
    has_triton = has_triton_package()
    had_liger = "liger_kernel" in sys.modules  # by another test of this process
    device_of_fakes = vars(torch._subclasses.FakeTensor)["device"]
    llama: Any = modeling_llama
    config = llama.LlamaConfig(
        num_attention_heads=2, hidden_size=16, intermediate_size=32, num_hidden_layers=1
    )
    with liger_without_kernels(CARD):
        from liger_kernel.transformers import monkey_patch

        with torch.device("meta"):
            model = llama.LlamaForCausalLM(config)
        monkey_patch._apply_liger_kernel_to_instance(
            model=model, cross_entropy=False, fused_linear_cross_entropy=False
        )
        assert modeling_llama.apply_rotary_pos_emb is not before[0]
    assert [getattr(modeling_llama, name) for name in names] == before
    assert vars(torch._subclasses.FakeTensor)["device"] is device_of_fakes
    has_triton_package.cache_clear()
    assert has_triton_package() == has_triton
    assert has_triton or had_liger or "liger_kernel" not in sys.modules


def test_without_liger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with (
        pytest.raises(SetupError, match="not installed") as caught,
        liger_without_kernels(CARD),
    ):
        pass
    assert "--no-deps liger-kernel" in caught.value.remedy
