"""Our loss against the libraries' own, family by family."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny_sizes import SIZES, VOCAB
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from tightfit.core.settings import Loss
from tightfit.core.strategy import Strategy
from tightfit.training.batches import IGNORED
from tightfit.training.model import Objective, has_plain_head

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "mistral": {},
    "gemma2": {"final_logit_softcapping": 3.0},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": {},
    "phi": {"num_key_value_heads": 4},
}


def make_model(family: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(SIZES | FAMILIES[family]))
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config)
    # Small drawn weights give near-uniform logits, where a wrong scale would hardly show.
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
    return model.eval()


def make_batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, VOCAB, (3, 12))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    mask[2, 5:] = 0
    labels = ids.masked_fill(mask == 0, IGNORED)
    labels[:, :4] = IGNORED
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("loss", [Loss.PLAIN, Loss.CHUNKED])
def test_the_sum_is_the_librarys_mean_times_its_tokens(family: str, loss: Loss) -> None:
    model, batch = make_model(family), make_batch()
    num_trained = int((batch["labels"][:, 1:] != IGNORED).sum())

    with torch.no_grad():
        ours = Objective(model, loss)(**batch)
        theirs = model(**batch).loss * num_trained

    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


def test_families_that_change_their_logits_take_their_own_way() -> None:
    """Otherwise the parametrized test above would prove nothing about them."""
    ways = {family: has_plain_head(make_model(family)) for family in ("llama", "cohere", "granite")}

    assert ways == {"llama": True, "cohere": False, "granite": False}


def test_encoder_decoder_sums_the_librarys_loss() -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "t5",
        vocab_size=VOCAB,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    auto: Any = AutoModelForSeq2SeqLM
    model = auto.from_config(config).eval()
    batch = make_batch()
    batch["labels"] = torch.randint(3, VOCAB, (3, 6))
    batch["labels"][0, 4:] = IGNORED

    with torch.no_grad():
        ours = Objective(model, Loss.PLAIN)(**batch)
        theirs = model(**batch).loss * int((batch["labels"] != IGNORED).sum())

    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("loss", [Loss.PLAIN, Loss.CHUNKED])
def test_a_batch_without_loss_still_reaches_every_parameter(loss: Loss) -> None:
    """DDP and FSDP wait for every gradient, also from a rank that has no rows left."""
    model, batch = make_model("llama"), make_batch()
    batch["labels"] = torch.full_like(batch["labels"], IGNORED)

    total = Objective(model, loss)(**batch)
    total.backward()

    assert float(total.detach()) == 0
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


CHUNKED = Strategy(loss=Loss.FUSED, loss_chunk_factor=4)


def _old_liger(**_given: Any) -> Tensor:
    raise AssertionError("it cannot take the factor")


def _put_liger(monkeypatch: pytest.MonkeyPatch, loss: Callable[..., Tensor]) -> None:
    names = ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.functional")
    for name in names:
        module: Any = ModuleType(name)
        module.liger_fused_linear_cross_entropy = loss
        monkeypatch.setitem(sys.modules, name, module)
    transformers: Any = sys.modules[names[1]]
    transformers.functional = sys.modules[names[2]]


def test_the_fused_loss_takes_the_chunk_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[int] = []

    def loss(
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        bias: Any,
        *,
        chunk_mem_const: int,
        **how: Any,
    ) -> Tensor:
        reported.append(chunk_mem_const)
        logits, softcap = torch.nn.functional.linear(hidden, weight, bias), how["softcap"]
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        return torch.nn.functional.cross_entropy(logits, targets, reduction=how["reduction"])

    _put_liger(monkeypatch, loss)
    for family in ("llama", "gemma2", "phi"):
        model, batch = make_model(family), make_batch()
        with torch.no_grad():
            ours = Objective.from_strategy(model, CHUNKED)(**batch)
            plain = Objective(model, Loss.PLAIN)(**batch)
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-4)
    assert reported == [4, 4, 4]


def test_an_older_liger_has_a_fixed_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    class OldLoss:
        def __init__(self, *, reduction: str, softcap: float | None) -> None:
            assert (reduction, softcap) == ("sum", None)

        def __call__(self, weight: Tensor, hidden: Tensor, targets: Tensor, bias: Any) -> Tensor:
            logits = torch.nn.functional.linear(hidden, weight, bias)
            return torch.nn.functional.cross_entropy(logits, targets, reduction="sum")

    _put_liger(monkeypatch, _old_liger)
    module: Any = sys.modules["liger_kernel.transformers"]
    module.LigerFusedLinearCrossEntropyLoss = OldLoss
    model, batch = make_model("llama"), make_batch()
    with torch.no_grad():
        ours = Objective.from_strategy(model, CHUNKED)(**batch)
        plain = Objective(model, Loss.PLAIN)(**batch)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-4)
