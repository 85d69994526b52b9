"""An nf4 base unpacked once: the same losses, the same adapter, the same checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shard_cases import Trainer, lone_place, make_model, make_plan, make_store
from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Strategy
from tightfit.data.token_store import TokenStore
from tightfit.runs.run_folder import RunFolder
from tightfit.runtime.adapters import load_adapter
from tightfit.runtime.layers import is_dequantized
from tightfit.runtime.load import load_base
from tightfit.training.checkpoint import write_artefact

IDS = torch.arange(1, 17).reshape(2, 8)
NUM_PACKED = 4 * 7
PLAIN: dict[str, Any] = {"method": "lora", "weights": "nf4", "lora_targets": ("all-linear",)}
BF16: dict[str, Any] = {"compute": "bf16", "adapter_dtype": "bf16"}
FP8: dict[str, Any] = BF16 | {"dequantized_base": True, "fused_lora": True, "fp8": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("base") / "model", initializer_range=0.2)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return make_store(tmp_path_factory.mktemp("rows") / "store")


def _trainer(model: Path, store: TokenStore, **changes: Any) -> Trainer:
    return Trainer(make_plan(model, **(PLAIN | changes)), store, lone_place())


def _count_unpacked(trainer: Trainer) -> int:
    return sum(is_dequantized(module) for module in trainer.engine.module.modules())


@pytest.mark.parametrize(
    ("fields", "within"),
    [
        ({}, 1e-5),
        ({"fused_lora": True}, 1e-5),
        ({"checkpointing": True, "double_quant": False}, 1e-5),
        ({"dora": True}, 1e-4),
        (BF16, 0.01),
        (BF16 | {"fused_lora": True}, 0.01),
    ],
    ids=str,
)
def test_ten_steps_have_the_losses_of_the_packed_base(
    model: Path, store: TokenStore, fields: dict[str, Any], within: float
) -> None:
    packed = _trainer(model, store, **fields)
    unpacked = _trainer(model, store, dequantized_base=True, **fields)
    assert (_count_unpacked(packed), _count_unpacked(unpacked)) == (0, NUM_PACKED)
    losses = packed.train(0, 10)
    assert abs(losses[-1] - losses[0]) > 0.05  # something is learnt
    assert unpacked.train(0, 10) == pytest.approx(losses, rel=within)


def test_in_fp8_losses_stay_near(model: Path, store: TokenStore) -> None:
    """Less far off than packing itself has them."""
    wide, exact = (
        _trainer(model, store, **(FP8 | fields | {"fp8": False})).train(0, 20)
        for fields in ({}, {"weights": "bf16", "dequantized_base": False})
    )
    trainer = _trainer(model, store, **FP8)
    assert _count_unpacked(trainer) == NUM_PACKED
    narrow = trainer.train(0, 20)
    assert 0 < _apart(narrow, wide) < _apart(wide, exact)


def _apart(losses: list[float], others: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(losses, others, strict=True)) / len(losses)


def test_plain_weights_would_have_other_losses(model: Path, store: TokenStore) -> None:
    """What packing rounds away is far above what the comparison allows."""
    rounded = _trainer(model, store, dequantized_base=True).train(0, 3)
    exact = _trainer(model, store, weights="fp32").train(0, 3)
    assert rounded != pytest.approx(exact, rel=1e-3)


def test_the_adapter_is_one_for_the_packed_base(
    tmp_path: Path, model: Path, store: TokenStore
) -> None:
    files = {}
    for name, is_unpacked_once in (("packed", False), ("unpacked", True)):
        trainer = _trainer(model, store, dequantized_base=is_unpacked_once)
        trainer.train(0, 4)
        run = RunFolder(path=tmp_path / name)
        folder = write_artefact(run, trainer.engine, trainer.plan, lone_place())
        settings = (folder / "adapter_config.json").read_text("utf-8")
        files[name] = (settings, sorted(path.name for path in folder.iterdir()))
        trainer.engine.model.eval()
        with torch.no_grad():
            logits = trainer.engine.model(input_ids=IDS).logits
    assert files["unpacked"] == files["packed"]

    strategy = Strategy(weights=Dtype.NF4, compute=Dtype.FP32)
    base = load_base(model, strategy, torch.device("cpu"))
    reloaded = load_adapter(base, tmp_path / "unpacked" / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(reloaded(input_ids=IDS).logits, logits, atol=1e-4, rtol=0)
        with reloaded.disable_adapter():
            assert not torch.allclose(reloaded(input_ids=IDS).logits, logits, atol=1e-2)


def test_an_adapter_that_fp8_trained_is_one_for_the_packed_base(
    tmp_path: Path, model: Path, store: TokenStore
) -> None:
    files = {}
    for name, fields in (("packed", BF16 | {"fused_lora": True}), ("fp8", FP8)):
        trainer = _trainer(model, store, **fields)
        trainer.train(0, 10)
        folder = write_artefact(
            RunFolder(path=tmp_path / name), trainer.engine, trainer.plan, lone_place()
        )
        settings = (folder / "adapter_config.json").read_text("utf-8")
        files[name] = (settings, sorted(path.name for path in folder.iterdir()))
        trained = _adapter_of(trainer.engine.model)
    assert files["fp8"] == files["packed"]

    strategy = Strategy(weights=Dtype.NF4, compute=Dtype.BF16)
    base = load_base(model, strategy, torch.device("cpu"))
    reloaded = _adapter_of(load_adapter(base, tmp_path / "fp8" / "adapter"))
    assert len(trained) == 2 * NUM_PACKED
    assert reloaded.keys() == trained.keys()
    assert all(torch.equal(reloaded[name], trained[name]) for name in trained)


def _adapter_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if "lora_" in name}


@pytest.mark.parametrize("goes_on_unpacked", [True, False])
def test_a_checkpoint_goes_on_with_either_base(
    tmp_path: Path, model: Path, store: TokenStore, goes_on_unpacked: bool
) -> None:
    whole = _trainer(model, store, dequantized_base=True)
    losses = whole.train(0, 8)
    begun = _trainer(model, store, dequantized_base=True)
    begun.train(0, 4)
    begun.engine.save_state(tmp_path / "state")
    resumed = _trainer(model, store, dequantized_base=goes_on_unpacked)
    resumed.engine.load_state(tmp_path / "state")
    assert resumed.train(4, 8) == pytest.approx(losses[4:], rel=1e-5)


def test_a_base_that_is_drawn_is_unpacked_too(model: Path, store: TokenStore) -> None:
    plans = [make_plan(model, **(PLAIN | {"dequantized_base": flag})) for flag in (False, True)]
    curves = []
    for plan in plans:
        assert plan.training is not None
        training = plan.training.model_copy(update={"random_weights": True})
        drawn = Trainer(plan.model_copy(update={"training": training}), store, lone_place())
        curves.append(drawn.train(0, 3))
        layer: nn.Module = drawn.engine.model.get_submodule(
            "base_model.model.model.layers.0.mlp.up_proj.base_layer"
        )
        assert is_dequantized(layer) is plan.strategy.dequantized_base
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
