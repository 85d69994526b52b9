"""100 steps of DPO and KTO by trl and by tightfit: the same model, rows, order and rates, in fp32.

python benchmarks/preference_curves.py --out OUT.json

A Llama of two layers and drawn rows; all weights are trained, and a frozen copy is the reference.
Each trainer reads the rows and renders the template by itself. KTO's mismatched rows differ: trl
draws them within a batch, tightfit among all rows.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from _provenance import write_result

NUM_STEPS = 100
NUM_ROWS = 160
BATCH = 8
RATE = 1e-3
WORDS = [
    "how",
    "many",
    "singers",
    "are",
    "older",
    "than",
    "the",
    "album",
    "of",
    "every",
    "band",
    "in",
    "this",
    "town",
]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Nothing is written behind an answer's stop token, where trl has loss and tightfit has none."""


def make_model(folder: Path) -> None:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    library: Any = transformers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)], trainer)
    fast = library.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<pad>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    library.set_seed(3)
    config = library.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(fast),
        eos_token_id=2,
        pad_token_id=0,
    )
    library.LlamaForCausalLM(config).save_pretrained(folder)


def draw_rows(objective: str) -> list[dict[str, Any]]:
    rng = random.Random(1)

    def answer(words: list[str], role: str = "assistant") -> list[dict[str, str]]:
        return [{"role": role, "content": " ".join(words)}]

    rows: list[dict[str, Any]] = []
    for _ in range(NUM_ROWS):
        prompt = rng.choices(WORDS, k=rng.randint(2, 6))
        row: dict[str, Any] = {"prompt": answer(prompt, "user")}
        good, bad = prompt[::-1], rng.choices(WORDS, k=rng.randint(2, 6))
        if objective == "dpo":
            row |= {"chosen": answer(good), "rejected": answer([*bad, "town"])}
        else:
            is_good = rng.random() < 0.5
            row |= {"completion": answer(good if is_good else bad), "label": is_good}
        rows.append(row)
    return rows


def train_with_trl(objective: str, model: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    library: Any = trl
    name = objective.upper()
    auto: Any = AutoModelForCausalLM
    config = getattr(library, f"{name}Config")(
        output_dir=str(model.parent / "trl"),
        max_steps=NUM_STEPS,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        per_device_train_batch_size=BATCH,
        train_sampling_strategy="sequential",
        gradient_checkpointing=False,
        max_grad_norm=1.0,
        weight_decay=0.0,
        optim="adamw_torch_fused",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = getattr(library, f"{name}Trainer")(
        model=auto.from_pretrained(model, attn_implementation="sdpa", dtype="float32"),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.train()
    return [
        {"loss": entry["loss"], "margin": entry["rewards/margins"]}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]


def train_with_tightfit(
    objective: str, model: Path, data: Path, folder: Path
) -> list[dict[str, Any]]:
    recipe = folder / f"{objective}.yaml"
    recipe.write_text(
        json.dumps(
            {
                **{"model": str(model), "data": str(data), "on": "cpu", "method": "full"},
                **{"objective": objective, "seq_len": 64, "max_steps": NUM_STEPS},
                **{"effective_batch": BATCH, "packing": False, "learning_rate": RATE},
                **{"schedule": "constant", "warmup_fraction": 0.0, "shuffle": False},
                **{"log_to": [], "output": str(folder / objective)},
                "strategy": {
                    **{"weights": "fp32", "compute": "fp32", "checkpointing": False},
                    **{"micro_batch": BATCH, "precompute_reference": False},
                },
            }
        )
    )
    command = [sys.executable, "-m", "tightfit", "train", str(recipe), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    lines = (folder / objective / "metrics.jsonl").read_text().splitlines()
    steps = [record for line in lines if (record := json.loads(line))["kind"] == "step"]
    return [{"loss": step["loss"], "margin": step["preference"]["reward_margin"]} for step in steps]


def compare(theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, Any]:
    differences = [abs(a["loss"] - b["loss"]) for a, b in zip(theirs, ours, strict=True)]
    found: dict[str, Any] = {
        "num_steps": len(ours),
        "largest_loss_difference": max(differences),
        "mean_loss_difference": fmean(differences),
    }
    for name, curve in (("trl", theirs), ("tightfit", ours)):
        found[name] = {
            "first_loss": curve[0]["loss"],
            "last_10_losses_mean": fmean(step["loss"] for step in curve[-10:]),
            "last_10_margins_mean": fmean(step["margin"] for step in curve[-10:]),
            "losses": [round(step["loss"], 5) for step in curve],
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        for objective in ("dpo", "kto"):
            rows = draw_rows(objective)
            data = folder / f"{objective}.jsonl"
            data.write_text("".join(json.dumps(row) + "\n" for row in rows))
            theirs = train_with_trl(objective, folder / "model", rows)
            ours = train_with_tightfit(objective, folder / "model", data, folder)
            found[objective] = compare(theirs, ours)
    write_result(out, "benchmarks/preference_curves.py", curves=found)


if __name__ == "__main__":
    main()
