"""The router loss against transformers' own, and the count of each expert's tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tightfit.core.settings import Loss
from tightfit.core.strategy import Strategy
from tightfit.models.families.registry import find_family
from tightfit.runtime.layers import decoder_layers
from tightfit.training.batches import IGNORED
from tightfit.training.model import Objective
from tightfit.training.recompute import recompute_layers
from tightfit.training.routing import measure_loads
from tiny_configs import TINY, tiny_config

VOCAB = 64
WEIGHT = 0.5
"""Large, so that a wrong gradient shows beside that of the tokens."""
BALANCED = [name for name in TINY if find_family(name).has_router_loss]
COUNTED = [*BALANCED, "deepseek_v3", "glm4_moe", "hunyuan_v1_moe", "lfm2_moe", "nemotron_h"]


def make_model(model_type: str) -> Any:
    torch.manual_seed(0)
    auto: Any = AutoConfig
    library: Any = AutoModelForCausalLM
    model = library.from_config(auto.for_model(**tiny_config(model_type)), dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.train()


def make_batch(*lengths: int) -> dict[str, Tensor]:
    torch.manual_seed(1)
    width = max(lengths)
    ids = torch.randint(3, VOCAB, (len(lengths), width))
    is_token = torch.arange(width) < torch.tensor(lengths)[:, None]
    labels = ids.masked_fill(~is_token, IGNORED)
    labels[:, :3] = IGNORED
    return {"input_ids": ids.where(is_token, 0), "labels": labels, "lengths": torch.tensor(lengths)}


def build(model: Any, weight: float = WEIGHT) -> Objective:
    return Objective.from_strategy(model, Strategy(loss=Loss.PLAIN, router_loss_weight=weight))


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def count_trained(batch: dict[str, Tensor]) -> int:
    return int((batch["labels"][:, 1:] != IGNORED).sum())


@pytest.mark.parametrize("model_type", BALANCED)
def test_loss_and_gradients_are_transformers_own(model_type: str) -> None:
    """Also where layers are recomputed, which must not count twice."""
    model, batch = make_model(model_type), make_batch(12, 9, 5)
    inputs = {name: batch[name] for name in ("input_ids", "labels")}
    mask = (torch.arange(12) < batch["lengths"][:, None]).long()
    model.router_aux_loss_coef = WEIGHT
    theirs = model(**inputs, attention_mask=mask, output_router_logits=True, use_cache=False).loss
    theirs.backward()
    exact = gradients(model)

    for is_recomputed in (False, True):
        if is_recomputed:
            recompute_layers(decoder_layers(model))
        objective = build(model)
        ours = objective(**batch) / count_trained(batch)
        ours.backward()
        found = gradients(model)

        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-5, atol=1e-5)
        assert found.keys() == exact.keys()
        for name, wanted in exact.items():
            worst = float((found[name] - wanted).abs().max())
            assert worst <= 1e-4 * float(wanted.abs().max()) + 1e-6, name


@pytest.mark.parametrize("model_type", COUNTED)
def test_every_token_is_counted_once_for_each_expert_it_goes_to(model_type: str) -> None:
    model = make_model(model_type)
    recompute_layers(decoder_layers(model))
    objective = build(model, weight=0.0)
    assert objective.routing is not None
    for lengths in ((12, 9, 5), (7, 7)):
        objective(**make_batch(*lengths)).backward()
    objective.eval()
    objective(**make_batch(12, 9, 5))  # an evaluation counts nothing

    sums = objective.routing.take()
    assert sums is not None
    assert objective.routing.take() is None
    layers = sum(hasattr(type(part), "_apply_gate") for part in model.modules())
    assert layers
    assert sums.expert_tokens.sum(dim=1).tolist() == [2 * (12 + 9 + 5 + 7 + 7)] * layers


def test_counts_are_those_of_the_routers() -> None:
    model, batch = make_model("mixtral"), make_batch(12, 9, 5)
    objective = build(model)
    assert objective.routing is not None
    objective(**batch)
    sums = objective.routing.take()
    assert sums is not None

    with torch.no_grad():
        logits = model(
            input_ids=batch["input_ids"], output_router_logits=True, use_cache=False
        ).router_logits
    is_token = (torch.arange(12) < batch["lengths"][:, None]).reshape(-1)
    for counted, layer in zip(sums.expert_tokens, logits, strict=True):
        chosen = layer.topk(2).indices[is_token].reshape(-1)
        assert counted.tolist() == torch.bincount(chosen, minlength=6).tolist()


def test_training_with_it_evens_the_load() -> None:
    batch, found = make_batch(24, 24, 24), {}
    for weight in (0.0, 1.0):
        objective = build(make_model("mixtral"), weight=weight)
        assert objective.routing is not None
        optimizer = torch.optim.AdamW(objective.parameters(), lr=3e-3)
        for _ in range(30):
            (objective(**batch) / count_trained(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
        objective.routing.take()
        objective(**batch)
        sums = objective.routing.take()
        assert sums is not None
        found[weight] = float(measure_loads(sums.expert_tokens)[0])

    assert found[1.0] < 1.4 < found[0.0]


def test_two_equal_micro_batches_weigh_as_much_as_one() -> None:
    model, batch = make_model("qwen3_moe"), make_batch(12, 12)
    objective = build(model)
    assert objective.routing is not None
    once = objective(**batch)
    sums = objective.routing.take()
    assert sums is not None
    once = float(once.detach()), float(sums.router_loss)
    halves = sum(float(objective(**batch).detach()) for _ in range(2))
    sums = objective.routing.take()
    assert sums is not None

    assert halves == pytest.approx(2 * once[0], rel=1e-6)
    assert float(sums.router_loss) == pytest.approx(2 * once[1], rel=1e-6)


def test_micro_batches_differ_from_one_batch_by_the_covariances() -> None:
    model, batch = make_model("mixtral"), make_batch(12, 12)
    objective = build(model)
    assert objective.routing is not None

    def balance(part: slice) -> float:
        assert objective.routing is not None
        one = {name: tensor[part] for name, tensor in batch.items()}
        objective(**one)
        sums = objective.routing.take()
        assert sums is not None
        return float(sums.router_loss) / count_trained(one)

    with torch.no_grad():
        logits = torch.stack(
            model(
                input_ids=batch["input_ids"], output_router_logits=True, use_cache=False
            ).router_logits
        )
    rows = logits.view(len(logits), 2, 12, -1)  # layers, sequences, tokens, experts
    shares = torch.nn.functional.one_hot(rows.topk(2).indices, 6).sum(-2).float().mean((0, 2))
    chances = rows.softmax(-1).mean((0, 2))
    covariances = (shares * chances).mean(0) - shares.mean(0) * chances.mean(0)

    mean = (balance(slice(0, 1)) + balance(slice(1, 2))) / 2
    assert mean == pytest.approx(balance(slice(0, 2)) + 6 * float(covariances.sum()), rel=1e-5)
    assert float(covariances.sum()) > 1e-4


def test_a_micro_batch_without_trained_tokens_weighs_nothing() -> None:
    model, batch = make_model("qwen3_moe"), make_batch(12, 9)
    batch["labels"] = torch.full_like(batch["labels"], IGNORED)
    objective = build(model)
    loss = objective(**batch)
    loss.backward()

    assert objective.routing is not None
    sums = objective.routing.take()
    assert sums is not None
    assert not sums.expert_tokens.any()
    assert float(loss.detach()) == 0
    assert not any(gradient.any() for gradient in gradients(model).values())


def test_packed_documents_route_as_padded_ones() -> None:
    model = make_model("mixtral")
    batch = make_batch(7, 5)
    rows = [batch["input_ids"][0], batch["input_ids"][1, :5]]
    labels = [batch["labels"][0], batch["labels"][1, :5]]
    packed = {
        "input_ids": torch.cat([*rows, torch.zeros(2, dtype=torch.long)])[None],
        "labels": torch.cat([*labels, torch.full((2,), IGNORED)])[None],
        "position_ids": torch.cat([torch.arange(n) for n in (7, 5, 2)])[None],
        "lengths": torch.tensor([12]),
    }
    found = []
    for one in (batch, packed):
        objective = build(model)
        assert objective.routing is not None
        loss = objective(**one)
        sums = objective.routing.take()
        assert sums is not None
        found.append((float(loss.detach()), sums.expert_tokens.tolist()))

    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert found[0][1] == found[1][1]


def test_models_without_experts_are_left_alone() -> None:
    assert build(make_model("llama"), weight=0.0).routing is None
    compiled = Strategy(compile=True)
    assert Objective.from_strategy(make_model("mixtral"), compiled).routing is None


def test_loads_are_of_the_worst_layer() -> None:
    even, uneven = [4, 4, 4, 4], [10, 6, 0, 0]
    most, idle = measure_loads(torch.tensor([even, uneven])).tolist()

    assert (most, idle) == (2.5, 0.25)
