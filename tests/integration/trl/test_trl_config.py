"""A plan's configuration for TRL: TRL and accelerate read it, and TRL trains by it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tightfit.api.plan import list_config_files, plan
from tiny_jobs import make_model

MODEL = "meta-llama/Llama-3.2-1B"
SEQ_LEN = 32
JOBS: dict[str, dict[str, Any]] = {
    "qlora": {"method": "qlora", "on": "RTX-4090"},
    "packed-lora": {"method": "lora", "on": "A100-80GB", "settings": ["packing=true", "dora=true"]},
    "fsdp": {"method": "full", "on": "4xA100-80GB", "settings": ["sharding=fsdp"]},
    "fsdp-qlora": {"method": "qlora", "on": "4xA100-80GB", "settings": ["sharding=fsdp"]},
    "zero3": {"method": "full", "on": "2n x 4xA100-80GB", "settings": ["sharding=zero3"]},
    "ddp-8bit": {
        "method": "full",
        "on": "4xA100-80GB",
        "settings": ["sharding=ddp", "optimizer=adamw-8bit"],
    },
    "old-card": {"method": "lora", "on": "V100-32GB"},
    "dpo": {"method": "lora", "on": "A100-80GB", "objective": "dpo"},
    "ipo": {"method": "full", "on": "4xA100-80GB", "objective": "ipo"},
    "kto": {"method": "qlora", "on": "RTX-4090", "objective": "kto"},
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), hidden_size=64)


@pytest.mark.parametrize("name", JOBS)
def test_trl_and_accelerate_read_every_key(name: str, tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from trl import DPOConfig, KTOConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser

    found = plan(MODEL, trainer="trl", **JOBS[name]).best
    strategy, files = found.strategy, list_config_files(found, tmp_path / "plan.json")
    for path, text in files.items():
        path.write_text(text)
    keys = yaml.safe_load((tmp_path / "plan.trl.yaml").read_text())
    configs = {"sft": SFTConfig, "kto": KTOConfig}
    types: Any = (
        ScriptArguments,
        configs.get(strategy.objective.value, DPOConfig),
        ModelConfig,
    )
    known = {field for kind in types for field in kind.__dataclass_fields__}
    assert set(keys) <= known
    # The precision is of the card, which is not here.
    here = {key: value for key, value in keys.items() if key not in ("bf16", "fp16")}
    here |= {"use_cpu": True, "bf16": False, "output_dir": str(tmp_path / "out")}
    config = tmp_path / "here.yaml"
    config.write_text(yaml.safe_dump(here))
    make_parser: Any = TrlParser
    _, training, model = make_parser(types).parse_args_and_config(
        ["--config", str(config)], fail_with_unknown_args=True
    )
    assert training.per_device_train_batch_size == strategy.micro_batch
    assert training.gradient_accumulation_steps == strategy.grad_accum
    assert training.max_length == strategy.seq_len
    assert training.gradient_checkpointing == strategy.checkpointing
    if strategy.objective.value != "sft":
        assert training.precompute_ref_log_probs == strategy.precompute_reference
        assert training.learning_rate < 1e-5
    if strategy.objective.value == "kto":
        assert training.desirable_weight == 1.0
    if strategy.objective.value == "ipo":
        assert training.loss_type == ["ipo"]
    assert model.use_peft == (strategy.method.value == "lora")
    assert model.load_in_4bit == (strategy.weights.value == "nf4")

    accelerate = tmp_path / "plan.accelerate.yaml"
    assert accelerate.exists() == (strategy.world_size > 1)
    if accelerate.exists():
        read = load_config_from_file(str(accelerate))
        assert read.num_processes == strategy.world_size
        assert read.num_machines == strategy.num_nodes
        kind = {"fsdp": "FSDP", "zero3": "DEEPSPEED", "ddp": "MULTI_GPU"}[strategy.sharding.value]
        assert read.distributed_type.value == kind


def test_trl_trains_two_steps_by_it(model_folder: Path, tmp_path: Path) -> None:
    """As the plan has it: its batch, accumulation and length, on the CPU that it is for."""
    settings = ["micro_batch=2", "checkpointing=true", "sharding=single"]
    best = plan(
        str(model_folder),
        trainer="trl",
        on="cpu",
        method="lora",
        seq_len=SEQ_LEN,
        effective_batch=4,
        settings=settings,
    ).best
    assert (best.strategy.micro_batch, best.strategy.grad_accum) == (2, 2)
    rows = [{"prompt": "how many singers", "completion": " are older " * 20} for _ in range(16)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for path, text in list_config_files(best, tmp_path / "plan.json").items():
        path.write_text(text)
    recorded = tmp_path / "shapes.json"
    script = tmp_path / "run.py"
    script.write_text(
        "import json, sys\n"
        "from trl import SFTTrainer\n"
        "from trl.scripts.sft import main, make_parser\n"
        "shapes, step = [], SFTTrainer.training_step\n"
        "def watch(self, model, inputs, *rest, **named):\n"
        "    shapes.append(list(inputs['input_ids'].shape))\n"
        "    return step(self, model, inputs, *rest, **named)\n"
        "SFTTrainer.training_step = watch\n"
        "main(*make_parser().parse_args_and_config(fail_with_unknown_args=True))\n"
        f"json.dump(shapes, open({str(recorded)!r}, 'w'))\n"
    )
    command = [sys.executable, str(script), "--config", str(tmp_path / "plan.trl.yaml")]
    command += ["--dataset_name", str(tmp_path), "--max_steps", "2", "--use_cpu", "true"]
    command += ["--output_dir", str(tmp_path / "out"), "--report_to", "none"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        command, check=False, capture_output=True, text=True, env=environment, timeout=500
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert json.loads(recorded.read_text()) == [[2, SEQ_LEN]] * 4  # 2 steps of 2 micro-batches
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
