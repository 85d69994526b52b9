"""The passes beside training: of the reference, and for KTO's divergence."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_stores import draw_rows, make_store
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tightfit.core.objectives import ExampleKind
from tightfit.core.strategy import Strategy, Training
from tightfit.training.batches import BatchMaker, choose_collate
from tightfit.training.engine import TorchEngine
from tightfit.training.model import build_optimizer, prepare_model
from tightfit.training.preference import PreferenceObjective
from tightfit.training.step import train_step
from tiny_configs import tiny_config

TRAINING = Training(model_path="model", learning_rate=1e-3)


def make_objective(model_type: str, strategy: Strategy, **fields: Any) -> PreferenceObjective:
    torch.manual_seed(0)
    auto: Any = AutoConfig
    library: Any = AutoModelForCausalLM
    model = library.from_config(auto.for_model(**(tiny_config(model_type) | fields)))
    return PreferenceObjective(prepare_model(model, strategy, TRAINING), strategy, TRAINING)


def plan(**fields: Any) -> Strategy:
    return Strategy(weights="fp32", compute="fp32", **fields)


def make_pair() -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, 64, (2, 12))
    labels = ids.clone()
    labels[:, :4] = -100
    return {
        "input_ids": ids,
        "position_ids": torch.arange(12).expand(2, -1),
        "labels": labels,
        "answer_ids": torch.arange(2)[:, None].expand(2, 12),
        "answer_lengths": torch.tensor([8, 8]),
    }


@pytest.mark.parametrize("settings", [{"packing": True}, {"compile": True}])
def test_a_frozen_copy_stays_as_it_is(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where forward passes were replaced: the copy's must not be those of the original."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    strategy = plan(method="full", objective="dpo", **settings)
    objective, batch = make_objective("opt", strategy), make_pair()
    before = objective(**batch, is_reference=True)
    with torch.no_grad():
        for parameter in objective.model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)

    torch.testing.assert_close(objective(**batch, is_reference=True), before, rtol=0, atol=0)


@pytest.mark.parametrize("model_type", ["gpt2", "opt", "starcoder2"])
def test_the_base_drops_nothing(model_type: str) -> None:
    names = ("dropout", "attention_dropout", "residual_dropout", "embedding_dropout", "resid_pdrop")
    strategy, fields = plan(method="full", objective="simpo"), dict.fromkeys(names, 0.5)
    objective, batch = make_objective(model_type, strategy, **fields), make_pair()

    assert objective.training
    assert objective(**batch).item() == objective(**batch).item()


def test_a_step_of_kto_depends_on_its_seeds_alone(tmp_path: Path) -> None:
    """With dropout of the adapters: a run that is resumed has another state of random numbers."""
    strategy = plan(method="lora", objective="kto", micro_batch=2, lora_dropout=0.5)
    objective = make_objective("llama", strategy)
    store = make_store(tmp_path, draw_rows(4, vocab=64))
    store.description = store.description.model_copy(update={"example": ExampleKind.LABELLED})
    store.is_good = np.array([True, False, True, False])
    maker = BatchMaker(store, choose_collate(store.description, is_packed=False), needs_kl=True)
    engine = TorchEngine(
        objective,
        build_optimizer(objective.named_parameters(), strategy.optimizer, TRAINING),
        strategy=strategy,
        device=torch.device("cpu"),
        max_grad_norm=None,
    )

    def measure(state: int) -> tuple[float, list[float]]:
        torch.manual_seed(state)
        batches = [maker.make([(0,), (1,)]), maker.make([(2,), (3,)])]
        found = train_step(engine, batches, divisor=4, learning_rate=0.0, seeds=[5, 6])
        return float(found.loss_sum), objective.take().tolist()

    def diverges(seed: int) -> bool:
        """With adapters drawn from this seed; a divergence below 0 counts as 0."""
        torch.manual_seed(seed)
        for name, parameter in objective.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
        return all(measure(state)[1][-1] > 0 for state in (1, 2))

    assert any(map(diverges, range(30)))
    assert measure(1) == measure(2)
