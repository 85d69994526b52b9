"""Records of other trainers: every fact is of something there is, and plans are within them."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tightfit.api.estimate import estimate
from tightfit.api.plan import buy, list_config_files, plan
from tightfit.api.train import train
from tightfit.core.dtypes import Dtype
from tightfit.core.errors import UserError
from tightfit.core.optimizers import Optimizer
from tightfit.core.settings import Loss
from tightfit.core.strategy import Quirks, Strategy
from tightfit.core.trainers import TRAINERS, Trainer, find_trainer
from tightfit.models.spec import ModelSpec
from tightfit.planning.rules import RULES

MODEL = "meta-llama/Llama-3.2-1B"
GOLDEN = Path(__file__).parents[2] / "golden" / "trainer_configs"
of_each_trainer = pytest.mark.parametrize("trainer", TRAINERS, ids=lambda one: one.name)


@of_each_trainer
def test_facts_name_what_exists_and_where_it_is_written(trainer: Trainer) -> None:
    rules = {rule.name for rule in RULES}
    for fact in trainer.facts:
        assert len(fact.source) > 15
        assert set(fact.sets) | set(fact.only) <= set(Strategy.model_fields)
        assert set(fact.quirks) <= set(Quirks.model_fields)
        assert set(fact.model) <= set(ModelSpec.model_fields)
        assert set(fact.allows) <= rules


@of_each_trainer
def test_its_plans_and_its_own_defaults_are_within_what_it_has(trainer: Trainer) -> None:
    found = plan(MODEL, on="2xA100-80GB", trainer=trainer.name)
    current = find_trainer(trainer.name)
    for each in found.plans:
        assert each.strategy.trainer == current.spelling
        assert current.find_lacking(each.strategy, each.model.model_type) is None
    first = found.plans[0].strategy
    job: dict[str, Any] = {"method": first.method.value, "sharding": first.sharding.value}
    default = estimate(MODEL, on="2xA100-80GB", trainer=trainer.name, **job)
    assert default.estimate.verdict.value == "fits", default.estimate.reason


def test_a_version_decides_which_facts_hold() -> None:
    """trl's own history: f11b4c3fd made checkpoints non-reentrant, b58947c7e chunked the loss."""
    job: dict[str, Any] = {"on": "A100-80GB", "method": "qlora"}
    old, now = (estimate(MODEL, trainer=name, **job).strategy for name in ("trl@0.13", "trl"))
    assert (old.quirks.reentrant, now.quirks.reentrant) == (True, False)
    assert (old.loss, now.loss) == (Loss.PLAIN, Loss.FUSED)
    assert (old.adapter_dtype, now.adapter_dtype) == (Dtype.FP32, Dtype.BF16)
    assert (old.optimizer, now.optimizer) == (Optimizer.ADAMW_FOREACH, Optimizer.ADAMW)
    assert old.upcast_unquantized


def test_a_version_that_was_not_looked_at_is_said(tmp_path: Path) -> None:
    job: dict[str, Any] = {"on": "A100-80GB", "method": "lora"}
    for name, nearest in (("trl@99", "1.16"), ("trl@0.1", "0.4"), ("axolotl@0.17", "0.18")):
        said = " ".join(estimate(MODEL, trainer=name, **job).estimate.assumptions)
        assert f"was not looked at: it is taken to do as {nearest} does" in said
    for name in ("trl", "trl@0.13"):
        said = " ".join(estimate(MODEL, trainer=name, **job).estimate.assumptions)
        assert "looked at" not in said
    best = plan(MODEL, trainer="trl@0.13", **job).best
    (text,) = list_config_files(best, tmp_path / "plan.json").values()
    assert "those of 1.16" in text


def test_what_the_user_states_wins_and_what_a_trainer_lacks_is_illegal() -> None:
    stated = estimate(MODEL, on="A100-80GB", trainer="trl", weights="bf16", micro_batch=3)
    assert (stated.strategy.weights, stated.strategy.micro_batch) == (Dtype.BF16, 3)
    lacking = estimate(MODEL, on="A100-80GB", trainer="trl", fused_lora=True).estimate
    assert lacking.verdict.value == "illegal"
    assert "TRL 1.16 has no fused_lora=true" in lacking.reason


@pytest.mark.parametrize(
    "refused",
    [
        lambda: estimate(MODEL, on="A100-80GB", trainer="trlx"),
        lambda: estimate(MODEL, on="A100-80GB", trainer="trl@new"),
        lambda: estimate(MODEL, on="A100-80GB", trainer="trl", trace=True),
        lambda: plan(MODEL, on="A100-80GB", trainer="trl", trace=True),
    ],
)
def test_unknown_trainers_and_traces_of_them_are_refused(refused: Callable[[], object]) -> None:
    with pytest.raises(UserError, match="--trainer"):
        refused()


def test_train_refuses_a_plan_of_another_trainer(tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    best = plan(MODEL, on="A100-80GB", trainer="trl", method="lora").best
    saved.write_text(best.model_dump_json())
    with pytest.raises(UserError, match=r"is a plan for TRL 1\.16") as refused:
        train(str(saved), data=tmp_path / "rows.jsonl")
    command = shlex.split(refused.value.remedy, comments=False)
    assert command[:6] == ["tightfit", "plan", best.model.name, "--on", "A100-80GB", "--method"]


STATED = [
    *("micro_batch=2", "grad_accum=4", "checkpointing=true", "optimizer=adamw", "offload=none"),
    *("loss=fused", "fused_kernels=true", "compute=bf16"),
]
"""All that the search would choose: what is chosen may change, how it is written may not."""


@pytest.mark.parametrize(
    ("name", "trainer", "method", "sharding"),
    [
        ("qlora", "trl", "qlora", "single"),
        ("fsdp", "trl", "full", "fsdp"),
        ("qlora", "axolotl", "qlora", "single"),
        ("zero3", "axolotl", "full", "zero3"),
        ("fsdp", "axolotl", "lora", "fsdp"),
        ("lora", "llama-factory", "lora", "single"),
        ("fsdp", "llama-factory", "qlora", "fsdp"),
        ("zero3", "llama-factory", "full", "zero3"),
        ("zero3", "deepspeed", "full", "zero3"),
        ("ddp", "deepspeed", "lora", "ddp"),
    ],
)
def test_configurations_are_as_agreed(name: str, trainer: str, method: str, sharding: str) -> None:
    """Looked up field by field in axolotl 067b021c8 and LLaMA-Factory ff6d4d12e; TRL itself parses
    its own in tests/integration/trl. After a wanted change: TIGHTFIT_GOLDEN=write"""
    settings = [*STATED, f"sharding={sharding}"]
    found = plan(MODEL, on="4xA100-80GB", trainer=trainer, method=method, settings=settings)
    files = list_config_files(found.best, Path(f"{name}.json"))
    assert files
    for path, text in files.items():
        golden = GOLDEN / trainer / path.name
        if os.environ.get("TIGHTFIT_GOLDEN") == "write":
            golden.parent.mkdir(parents=True, exist_ok=True)
            golden.write_text(text)
        assert golden.read_text() == text


def test_trls_configuration_has_what_the_recipe_states(tmp_path: Path) -> None:
    stated = {"beta": 0.3, "label_smoothing": 0.1, "learning_rate": 3e-6}
    recipe = {"model": MODEL, "objective": "dpo", "lora": {"rank": 8, "alpha": 12}, **stated}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    best = plan(str(tmp_path / "recipe.yaml"), trainer="trl", on="A100-80GB", method="lora").best

    (text,) = list_config_files(best, Path("plan.json")).values()

    written = yaml.safe_load(text)
    assert {name: written[name] for name in stated} == stated
    assert written["lora_alpha"] == 12


@pytest.mark.parametrize("sharding", ["ddp", "zero2", "zero3"])
def test_deepspeed_reads_its_own_configuration(sharding: str) -> None:
    deepspeed_config = pytest.importorskip(
        "deepspeed.runtime.config", reason="pip install deepspeed"
    )
    settings = [*STATED, f"sharding={sharding}"]
    best = plan(MODEL, on="4xA100-80GB", trainer="deepspeed", method="full", settings=settings).best
    (text,) = list_config_files(best, Path("plan.json")).values()
    read = deepspeed_config.DeepSpeedConfig(json.loads(text))
    assert read.zero_optimization_stage == {"ddp": 0, "zero2": 2, "zero3": 3}[sharding]
    assert (read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps) == (2, 4)
    assert read.bfloat16_config.enabled
    assert not read.float16_config.enabled


def test_llama_recipes_checkpoints_twice_under_fsdp_since_it_asks_the_model_too() -> None:
    """Its own history: 0.0.3 added gradient_checkpointing_enable and a dtype to from_pretrained."""
    job: dict[str, Any] = {"on": "4xA100-80GB", "method": "full", "sharding": "fsdp"}
    old, now = (
        estimate(MODEL, trainer=name, **job).strategy
        for name in ("llama-recipes@0.0.2", "llama-recipes")
    )
    assert (old.weights, now.weights) == (Dtype.FP32, Dtype.BF16)
    assert (old.quirks.recomputes_shards, now.quirks.recomputes_shards) == (False, True)
    assert old.checkpointing
    alone = estimate(MODEL, on="A100-80GB", method="lora", trainer="llama-recipes").strategy
    assert not alone.checkpointing


def test_no_hardware_is_advised_for_what_a_trainer_lacks() -> None:
    with pytest.raises(UserError, match="has no method=lora, only full") as refused:
        buy(MODEL, method="lora", trainer="torchtitan")
    assert refused.value.remedy == "change or leave out the setting that this names"
