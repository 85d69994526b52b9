"""Records of objectives: each is complete, and a recipe may state what its loss reads, no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tightfit.core.errors import InvalidInputError
from tightfit.core.objectives import OBJECTIVE_SETTINGS, ExampleKind, Objective
from tightfit.core.optimizers import Optimizer
from tightfit.core.recipe import make_training, read_recipe
from tightfit.core.settings import Method, TrainingSettings
from tightfit.core.strategy import default_learning_rate

PREFERENCES = [one for one in Objective if one is not Objective.SFT]


@pytest.mark.parametrize("objective", PREFERENCES)
def test_a_preference_record_is_complete(objective: Objective) -> None:
    record = objective.record
    assert record.example is not ExampleKind.ANSWER
    assert record.beta is not None
    assert all([record.title, record.source, record.beta_source, record.rate_source])
    assert record.num_sequences == (2 if record.example is ExampleKind.PAIR else 1)
    assert bool(record.num_reference_sequences) is record.needs_reference
    assert record.full_rate is not None
    assert record.lora_rate is not None
    assert record.full_rate <= record.lora_rate


@pytest.mark.parametrize("objective", Objective)
@pytest.mark.parametrize("name", OBJECTIVE_SETTINGS)
def test_what_the_loss_does_not_read_is_refused(
    objective: Objective, name: str, tmp_path: Path
) -> None:
    assert name in TrainingSettings.__annotations__
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: m\nobjective: {objective.value}\n{name}: 0.25\n")
    if name in objective.record.settings:
        training = make_training(read_recipe(recipe), method=Method.LORA, model_path="m")
        assert getattr(training, name) == 0.25
    else:
        with pytest.raises(InvalidInputError, match=name):
            read_recipe(recipe)


def test_another_optimizer_keeps_the_objectives_share_of_adamws_rate() -> None:
    for method in (Method.FULL, Method.LORA):
        shares = [
            default_learning_rate(method, one, Objective.DPO) / default_learning_rate(method, one)
            for one in (Optimizer.ADAMW, Optimizer.SGD_MOMENTUM)
        ]
        assert shares[0] == pytest.approx(shares[1])
        assert shares[0] == pytest.approx(1 / 40)
