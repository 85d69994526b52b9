"""What a run leaves behind, read back by the libraries it is meant for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shard_cases import Trainer, lone_place, make_model, make_plan, make_store
from tightfit.core.dtypes import Dtype
from tightfit.core.errors import SetupError
from tightfit.runs.run_folder import RunFolder
from tightfit.training.checkpoint import choose_saved_dtype, write_artefact

IDS = torch.arange(1, 17).reshape(2, 8)


def _train(folder: Path, model: Path, **changes: Any) -> tuple[Trainer, torch.Tensor]:
    trainer = Trainer(make_plan(model, **changes), make_store(folder / "store"), lone_place())
    trainer.train(0, 4)
    trainer.engine.model.eval()
    with torch.no_grad():
        return trainer, trainer.engine.model(input_ids=IDS).logits


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_full_model_reloads_with_the_same_logits(tmp_path: Path, is_tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    base = make_model(tmp_path / "base", is_tied=is_tied)
    (base / "chat_template.jinja").write_text("{{ messages }}")
    trainer, logits = _train(tmp_path, base)
    run = RunFolder(path=tmp_path / "run")

    folder = write_artefact(run, trainer.engine, trainer.plan, lone_place())

    assert folder == run.model_path
    reloaded: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    reloaded.eval()
    assert reloaded.dtype is torch.float32
    assert reloaded.config.use_cache is True
    tied = reloaded.lm_head.weight is reloaded.model.embed_tokens.weight
    assert tied == is_tied
    with torch.no_grad():
        torch.testing.assert_close(reloaded(input_ids=IDS).logits, logits, atol=1e-6, rtol=0)
    original = AutoModelForCausalLM.from_pretrained(base)
    assert not torch.allclose(original(input_ids=IDS).logits, logits, atol=1e-4)
    for name in ("chat_template.jinja", "tokenizer_config.json", "generation_config.json"):
        assert (folder / name).read_bytes() == (base / name).read_bytes()
    assert not list(run.path.glob("*.partial"))


@pytest.mark.parametrize("train_embeddings", [False, True])
def test_an_adapter_reloads_with_the_same_logits(tmp_path: Path, train_embeddings: bool) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = make_model(tmp_path / "base")
    trainer, logits = _train(
        tmp_path, base, method="lora", train_embeddings=train_embeddings, dora=True
    )
    run = RunFolder(path=tmp_path / "run")

    folder = write_artefact(run, trainer.engine, trainer.plan, lone_place())

    assert folder == run.adapter_path
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(base)
    files = {path.name for path in folder.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer_config.json"} <= files
    model = AutoModelForCausalLM.from_pretrained(settings["base_model_name_or_path"])
    reloaded = PeftModel.from_pretrained(model, folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(reloaded(input_ids=IDS).logits, logits, atol=1e-6, rtol=0)
        with reloaded.disable_adapter():
            assert not torch.allclose(reloaded(input_ids=IDS).logits, logits, atol=1e-4)


def test_fp32_master_weights_go_back_to_the_dtype_of_the_base(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    base = make_model(tmp_path / "base")
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(base)
    trainer, _ = _train(tmp_path, base)
    assert next(trainer.engine.model.parameters()).dtype is torch.float32
    assert choose_saved_dtype(trainer.plan) is Dtype.BF16
    run = RunFolder(path=tmp_path / "run")

    folder = write_artefact(run, trainer.engine, trainer.plan, lone_place())

    reloaded = AutoModelForCausalLM.from_pretrained(folder)
    assert reloaded.dtype is torch.bfloat16
    for name, value in trainer.engine.model.named_parameters():
        assert torch.equal(reloaded.get_parameter(name), value.detach().to(torch.bfloat16))


def test_an_older_result_is_replaced_whole(tmp_path: Path) -> None:
    trainer, _ = _train(tmp_path, make_model(tmp_path / "base"), method="lora")
    run = RunFolder(path=tmp_path / "run")
    write_artefact(run, trainer.engine, trainer.plan, lone_place())
    (run.adapter_path / "stale").write_text("from before")

    write_artefact(run, trainer.engine, trainer.plan, lone_place())

    assert not (run.adapter_path / "stale").exists()
    assert sorted(path.name for path in run.path.iterdir()) == ["adapter"]


def test_a_result_that_cannot_be_written_is_the_machines_error(tmp_path: Path) -> None:
    trainer, _ = _train(tmp_path, make_model(tmp_path / "base"), method="lora")
    (tmp_path / "run").write_text("a file, not a folder")

    with pytest.raises(SetupError, match="Cannot write") as caught:
        write_artefact(RunFolder(path=tmp_path / "run"), trainer.engine, trainer.plan, lone_place())
    assert "checkpoint" in caught.value.remedy
