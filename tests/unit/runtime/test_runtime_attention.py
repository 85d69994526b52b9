"""Packed rows answer as separate rows do, for every attention and family; and the varlen path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import make_config, make_model
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from tightfit.core.attention import Attention
from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError, UsageError
from tightfit.core.strategy import Strategy
from tightfit.runtime import attention
from tightfit.runtime.attention import (
    CAUSAL,
    CAUSAL_REPEAT,
    PACKED,
    REPEAT,
    VARLEN,
    WINDOW,
    VarlenKernel,
    check_packable,
    choose_attention_name,
    find_bounds,
    find_varlen_obstacle,
    register_attention,
    resolve_attention,
)

LENGTHS = ([7, 3, 9], [5, 14], [19])
"""Documents of three packed rows; some longer than the windows of four tokens."""
TOLERANCE = 1e-5


FLEX = Attention.FLEX.implementation_name


def lay_out(num_rows: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Packed ids and positions `[rows, 19]`, and the documents one by one."""
    torch.manual_seed(1)
    rows = [[torch.randint(3, 60, (n,)) for n in lengths] for lengths in LENGTHS[:num_rows]]
    ids = torch.stack([torch.cat(row) for row in rows])
    positions = torch.stack([torch.cat([torch.arange(len(d)) for d in row]) for row in rows])
    return ids, positions, [document for row in rows for document in row]


def answer_apart(model: Any, documents: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([model(input_ids=d[None]).logits[0] for d in documents])


def differences(family: str, name: str, num_rows: int, **changes: Any) -> tuple[float, float]:
    """Largest logit difference of packed from separate rows: with boundaries, and without."""
    register_attention()
    model = make_model(family, attention=name, **changes).eval()
    ids, positions, documents = lay_out(num_rows)
    with torch.no_grad():
        apart = answer_apart(model, documents)
        packed = model(input_ids=ids, position_ids=positions).logits.flatten(0, 1)
        one_document = model(input_ids=ids).logits.flatten(0, 1)
    return float((packed - apart).abs().max()), float((one_document - apart).abs().max())


FAMILIES = ("llama", "qwen2", "qwen2-window", "qwen3", "mistral-window", "gemma3", "gpt2")


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("name", ["sdpa", "eager", REPEAT])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_equal_separate_rows(family: str, name: str, num_rows: int) -> None:
    with_bounds, without = differences(family, name, num_rows)

    assert with_bounds < TOLERANCE
    assert without > 1e-2, "the boundaries must matter, or this test proves nothing"


@pytest.mark.parametrize("num_rows", [1, 3])
def test_packed_rows_with_capped_logits(num_rows: int) -> None:
    """gemma2 has eager attention alone: sdpa cannot cap."""
    with_bounds, without = differences("gemma2", "eager", num_rows)

    assert with_bounds < TOLERANCE
    assert without > 1e-2


def test_repeated_keys_never_ask_for_grouped_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    register_attention()
    seen: list[tuple[int, int, bool]] = []
    real = functional.scaled_dot_product_attention

    def spy(query: Any, key: Any, value: Any, **options: Any) -> torch.Tensor:
        seen.append((query.shape[1], key.shape[1], options.get("enable_gqa", False)))
        return real(query, key, value, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)
    ids = torch.arange(3, 20)[None]
    grouped = make_model("llama", attention="sdpa").eval()(input_ids=ids).logits
    repeated = make_model("llama", attention=REPEAT).eval()(input_ids=ids).logits

    assert seen[0] == (4, 2, True)
    assert seen[-1] == (4, 4, False)
    assert torch.allclose(grouped, repeated, atol=TOLERANCE)


def exact_kernel(*, has_grouped_heads: bool, seen: list[dict[str, Any]]) -> VarlenKernel:
    """torch's calling convention, computed document by document with a plain softmax."""

    def run(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        *rest: Any,
        **options: Any,
    ) -> torch.Tensor:
        cu_seq_k, max_q, max_k = rest
        seen.append({"offsets": cu_seq_q.tolist(), "longest": max_q, **options})
        assert torch.equal(cu_seq_q, cu_seq_k)
        assert max_q == max_k == int(cu_seq_q.diff().max())
        groups = query.shape[1] // key.shape[1]
        left = options["window_size"][0]
        parts = []
        for start, end in zip(cu_seq_q.tolist(), cu_seq_q.tolist()[1:], strict=False):
            q = query[start:end].transpose(0, 1)
            k = key[start:end].transpose(0, 1).repeat_interleave(groups, 0)
            v = value[start:end].transpose(0, 1).repeat_interleave(groups, 0)
            back = torch.arange(end - start)[:, None] - torch.arange(end - start)
            hidden = (back < 0) | ((back > left) if left >= 0 else False)
            scores = q @ k.transpose(1, 2) * options["scale"]
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            parts.append((weights @ v).transpose(0, 1))
        return torch.cat(parts)

    return VarlenKernel(
        run=run,
        is_flash_attn=False,
        has_scale=True,
        features=Attention.FLASH.record.features,
        has_grouped_heads=has_grouped_heads,
    )


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The exact kernel in place of the GPU's, and what it was called with."""
    calls: list[dict[str, Any]] = []
    kernel = exact_kernel(has_grouped_heads=True, seen=calls)
    monkeypatch.setattr(attention, "require_varlen_kernel", lambda *_: kernel)
    return calls


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_varlen_equals_separate_rows(
    family: str, num_rows: int, seen: list[dict[str, Any]]
) -> None:
    """In fp64, since two orders of fp32's sums are further apart on some processors."""
    register_attention()
    model = make_model(family, attention=VARLEN).double().eval()
    plain = make_model(family, attention="sdpa").double().eval()
    ids, positions, documents = lay_out(num_rows)
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=positions).logits.flatten(0, 1)
        apart = answer_apart(plain, documents)

    assert float((packed - apart).abs().max()) < TOLERANCE
    assert len(seen) == 2, "one call per layer"


def test_varlen_finds_the_bounds_and_reaches_gradients(seen: list[dict[str, Any]]) -> None:
    register_attention()
    model = make_model("llama", attention=VARLEN)
    plain = make_model("llama", attention="eager")
    ids, positions, _ = lay_out(3)
    model(input_ids=ids, position_ids=positions, labels=ids).loss.backward()
    plain(input_ids=ids, position_ids=positions, labels=ids).loss.backward()

    assert seen[0]["offsets"] == [0, 7, 10, 19, 24, 38, 57]
    assert seen[0]["longest"] == 19
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-4)


def test_bounds_are_found_once_a_batch(
    seen: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    register_attention()
    found = []

    def count(positions: torch.Tensor) -> Any:
        found.append(positions)
        return find_bounds(positions)

    monkeypatch.setattr(attention, "find_bounds", count)
    model = make_model("llama", attention=VARLEN).eval()
    ids, positions, _ = lay_out(1)
    model(input_ids=ids, position_ids=positions)

    assert len(found) == 1
    assert len(seen) == 2


def test_padding_at_the_end_changes_nothing(seen: list[dict[str, Any]]) -> None:
    register_attention()
    model = make_model("llama", attention=VARLEN).eval()
    ids = torch.arange(3, 13).reshape(2, 5)
    padded = functional.pad(ids, [0, 3])
    mask = functional.pad(torch.ones_like(ids), [0, 3])
    with torch.no_grad():
        kept = model(input_ids=padded, attention_mask=mask).logits[:, :5]
        plain = model(input_ids=ids).logits

    assert torch.allclose(kept, plain, atol=TOLERANCE)
    assert seen[0]["offsets"] == [0, 8, 16]


def test_padding_at_the_start_is_refused(seen: list[dict[str, Any]]) -> None:
    register_attention()
    model = make_model("llama", attention=VARLEN).eval()
    ids = torch.arange(3, 13).reshape(2, 5)
    mask = torch.ones_like(ids)
    mask[1, 0] = 0
    with pytest.raises(InvalidInputError, match="padded on the left"):
        model(input_ids=ids, attention_mask=mask)
    assert not seen


CONVENTIONS: dict[str, dict[str, Any]] = {
    "2.10": {"is_causal": True},
    "2.11": {"scale": 0.5, "window_size": (3, 0)},
    "2.12": {"scale": 0.5, "window_size": (3, 0), "enable_gqa": True},
}
"""docs.pytorch.org/docs/2.12/nn.attention.varlen.html, and the same page of 2.10 and 2.11."""


@pytest.mark.parametrize("version", CONVENTIONS)
def test_each_torch_is_called_by_its_own_convention(version: str) -> None:
    expected = CONVENTIONS[version]
    calls: list[dict[str, Any]] = []
    given: list[torch.Tensor] = []

    def run(query: torch.Tensor, key: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
        given.append(query)
        calls.append({"heads": (query.shape[1], key.shape[1]), **options})
        return query

    kernel = VarlenKernel(
        run=run,
        is_flash_attn=False,
        has_scale="scale" in expected,
        has_grouped_heads="enable_gqa" in expected,
        features=Attention.FLASH.record.features if "window_size" in expected else frozenset(),
    )
    call = attention.VarlenCall(
        bounds=find_bounds(torch.arange(6)[None]), scale=0.5, window=4, softcap=None, dropout=0.0
    )
    query, key = torch.randn(6, 4, 16), torch.randn(6, 2, 16)
    attention.run_varlen_kernel(kernel, query, key, key, call)

    heads = (4, 2) if kernel.has_grouped_heads else (4, 4)
    assert calls == [{"heads": heads, **expected}]
    # Without an argument for it, half of a width of 16 is twice what the kernel does by itself.
    assert torch.allclose(given[0], query if kernel.has_scale else 2 * query)


def test_the_installed_torch_takes_our_call() -> None:
    """Arguments bind to the real signature, and its fake kernel gives the right shape."""
    kernel = attention.find_varlen_kernel()
    assert kernel is not None, "needs torch >= 2.10: pip install -U torch"
    from torch._subclasses.fake_tensor import FakeTensorMode

    call = attention.VarlenCall(
        bounds=find_bounds(torch.arange(6)[None]), scale=0.5, window=4, softcap=None, dropout=0.0
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        query = torch.empty(6, 4, 8, dtype=torch.bfloat16)
        key = torch.empty(6, 2, 8, dtype=torch.bfloat16)
        output = attention.run_varlen_kernel(kernel, query, key, key, call)
    assert output.shape == (6, 4, 8)


def test_bounds_of_positions() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    bounds = find_bounds(positions)

    assert bounds.offsets.tolist() == [0, 3, 5, 6, 12]
    assert bounds.offsets.dtype is torch.int32
    assert bounds.longest == 6
    assert find_bounds(positions + 5).offsets.tolist() == bounds.offsets.tolist()


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gemma2", {}, "caps attention logits"),
        ("gpt2", {}, "drops attention weights"),
        ("t5", {}, "an encoder and a decoder"),
        ("llama", {"head_dim": 264}, "264 wide"),
        ("llama", {"attention_dropout": 0.1}, "drops attention weights"),
    ],
)
def test_what_varlen_cannot_do(family: str, changes: dict[str, Any], reason: str) -> None:
    config = make_config(family, **changes)
    kernel = exact_kernel(has_grouped_heads=True, seen=[])
    found = find_varlen_obstacle(config, kernel)

    assert found is not None
    assert reason in found


def test_a_family_that_cannot_falls_back_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = exact_kernel(has_grouped_heads=True, seen=[])
    monkeypatch.setattr(attention, "find_varlen_kernel", lambda *_: kernel)

    assert resolve_attention(make_config("llama"), PACKED) == VARLEN
    assert resolve_attention(make_config("gpt2"), PACKED) == "sdpa"
    assert resolve_attention(make_config("gpt2", attn_pdrop=0.0), PACKED) == VARLEN
    assert resolve_attention(make_config("gemma2"), PACKED) == "eager"
    assert resolve_attention(make_config("llama"), "sdpa") == "sdpa"
    for name in ("sdpa", REPEAT):
        with pytest.raises(UsageError, match="sdpa attention cannot run gemma2"):
            resolve_attention(make_config("gemma2"), name)
    with pytest.raises(UsageError, match="caps attention logits"):
        resolve_attention(make_config("gemma2"), VARLEN)


def test_names_by_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    def name(**fields: Any) -> str:
        return choose_attention_name(Strategy(**fields))

    monkeypatch.setattr(attention, "_has_flash_attn", lambda: False)
    monkeypatch.setattr(attention, "_has_varlen_device", lambda: False)
    assert name() == "sdpa"
    assert name(packing=True) == "sdpa"
    assert name(repeat_keys=True, packing=True) == REPEAT
    assert name(attention=Attention.EAGER, packing=True) == "eager"
    assert name(attention=Attention.FLASH) == WINDOW
    monkeypatch.setattr(attention, "_has_flash_attn", lambda: True)
    assert name(attention=Attention.FLASH) == "flash_attention_2"
    assert name(attention=Attention.FLASH, packing=True) == VARLEN
    monkeypatch.setattr(attention, "_has_varlen_device", lambda: True)
    assert name(packing=True) == PACKED
    assert name(packing=True, compute=Dtype.FP32) == "sdpa"


def test_families_without_positions_cannot_pack() -> None:
    check_packable(make_model("llama"))
    with pytest.raises(UsageError, match="t5"):
        check_packable(make_model("t5"))


_SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
_BLIND: dict[str, dict[str, Any]] = {
    "falcon": _SMALL | {"alibi": False},
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 64},
}


def make_blind(family: str, *, attention: str) -> Any:
    config = AutoConfig.for_model(family, **_BLIND[family], use_cache=False, initializer_range=0.3)
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM  # not annotated
    return auto.from_config(config, attn_implementation=attention).eval()


def test_a_family_with_attention_of_its_own_gets_kernels_through_ours() -> None:
    config = make_blind("falcon", attention="eager").config

    assert resolve_attention(config, "sdpa") == CAUSAL
    assert resolve_attention(config, REPEAT) == CAUSAL_REPEAT
    assert resolve_attention(make_blind("bloom", attention="eager").config, FLEX) == CAUSAL
    config.alibi, config.multi_query = True, False
    assert resolve_attention(config, "sdpa") == "sdpa"
    assert resolve_attention(config, FLEX) == CAUSAL
