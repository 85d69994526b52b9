"""Seconds of one training step of the demo on a CPU: tightfit and trl's `SFTTrainer`.

python benchmarks/measure_demo_step.py            measure, and write results/demo_step.json
python benchmarks/measure_demo_step.py --check    the committed result; fails if tightfit is slower

Both train the demo's recipe on the demo's weights and the same packs in the same order. They take
turns in fresh processes, so that other work on the machine hits both alike.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from _provenance import provenance
from measure_demo import describe_machine, digest
from tightfit.core.yaml_text import read_yaml

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "demo_step.json"
RECIPE = ROOT / "examples" / "text_to_sql" / "recipe.yaml"
MODEL = ROOT / "demo-out" / "SmolLM2-135M-Instruct.gguf"

NUM_WARM_UP = 2
"""First steps of each run, which also allocate memory; left out of the times."""
MIN_STEPS = 20
NOISE = 0.05
"""How far under 1 a ratio may be and still count as equal."""
UNTRAINED_STEPS = 2
"""The warm-up's first step has rate 0: two losses are of the untouched model, alike but for
rounding. Later ones depend on how each side drew its adapters."""
UNTRAINED_TOLERANCE = 0.01
TRAINED_TOLERANCE = 0.05

TIGHTFIT = "tightfit"
DEFAULT = "trl-default"
BEST = "trl-best"
SWITCHES: dict[str, dict[str, bool]] = {
    DEFAULT: {"checkpointing": True, "autocast": True, "bf16_adapters": False, "grid": False},
    BEST: {"checkpointing": False, "autocast": False, "bf16_adapters": True, "grid": True},
}
"""`autocast` is trl's `bf16`; `grid`: packs as rows of a batch, not as one long row (trl's own)."""
CONTESTANTS = (TIGHTFIT, *SWITCHES)

Steps = list[dict[str, float]]
"""Of one run: `seconds` and `loss` of each step."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8, help="of each run, warm-up included")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(train_with_trl(**json.loads(options.worker))))
        return 0
    if not options.check:
        result = measure(options.model.resolve(), options.rounds, options.steps)
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    result = json.loads(RESULT.read_text())
    print(render_table(result))
    errors = find_faults(result)
    print("\n".join(f"error: {error}" for error in errors) or "time per step of the demo: all good")
    return 1 if errors else 0


def measure(model: Path, num_rounds: int, num_steps: int) -> dict[str, Any]:
    """All runs, in turns that change direction each round."""
    about = provenance("benchmarks/measure_demo_step.py") | describe_machine() | describe_threads()
    rounds: list[dict[str, Steps]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare(model, folder)
        recipe = write_recipe(model, folder, num_steps)
        for number in range(num_rounds):
            taken: dict[str, Steps] = {}
            for name in CONTESTANTS if number % 2 == 0 else reversed(CONTESTANTS):
                is_ours = name == TIGHTFIT
                taken[name] = run_tightfit(recipe, folder) if is_ours else run_trl(name, folder)
                seconds = median(take_seconds(taken[name]))
                print(f"round {number + 1}  {name:12} {seconds:.2f} s a step", flush=True)
            rounds.append(taken)
        job = json.loads((folder / "job.json").read_text())
        about["tightfit_plan"] = read_report(folder)["strategy"]
    about["recipe_sha256"] = digest(RECIPE)
    return {
        "about": about,
        "switches": SWITCHES,
        "tokens_of_step": [sum(map(len, tokens_of(step))) for step in job["steps"]],
        "total": summarise(rounds),
        "rounds": rounds,
    }


def describe_threads() -> dict[str, str]:
    """What both sides run with: the demo's wait policy, and as many threads as there are cores."""
    threads = os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    policy = os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from importlib.metadata import version

    return {"threads": threads, "wait_policy": policy, "trl": version("trl")}


def prepare(model: Path, folder: Path) -> None:
    """The demo's model and data, by the demo's own scripts."""
    for script, target in (("fetch_demo_model", model), ("make_demo_data", folder / "data")):
        subprocess.run([sys.executable, ROOT / "scripts" / f"{script}.py", target], check=True)


def write_recipe(model: Path, folder: Path, num_steps: int) -> Path:
    """The demo's recipe, stopped after a few steps, without evaluations and checkpoints."""
    recipe = read_yaml(RECIPE).value
    del recipe["epochs"]
    recipe |= {
        "model": str(model),
        "data": str(folder / "data" / "train.jsonl"),
        "max_steps": num_steps,
        "keep_checkpoints": 0,
        "log_to": [],
        "output": str(folder / "run"),
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    return path


def run_tightfit(recipe: Path, folder: Path) -> Steps:
    """`tightfit train`, as the demo calls it; afterwards trl's share of the job is written down."""
    command = [sys.executable, "-m", "tightfit", "train", str(recipe), "--fresh", "--json"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    steps = [
        {key: row[key] for key in ("seconds", "loss")} for row in lines if row["kind"] == "step"
    ]
    if not (folder / "job.json").exists():
        job = describe_job(recipe, folder / "run", len(steps))
        (folder / "job.json").write_text(json.dumps(job))
    return steps


def read_report(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "run" / "report.json").read_text())
    return report


def describe_job(recipe: Path, run: Path, num_steps: int) -> dict[str, Any]:
    """Inputs for trl: the recipe, and tightfit's packed rows as tokens and labels."""
    from tightfit.data.token_store import TokenStore
    from tightfit.runs.run_folder import RunFolder
    from tightfit.training.batches import IGNORED, BatchSampler

    stated = json.loads(recipe.read_text())
    batch, seq_len, seed = (stated[key] for key in ("effective_batch", "seq_len", "seed"))
    sampler = BatchSampler(
        TokenStore(Path(RunFolder(path=run).read_tokens().train)),
        effective_batch=batch,
        seq_len=seq_len,
        is_packed=stated["packing"],
        seed=seed,
        shuffle=True,
    )
    steps = []
    for step in range(num_steps):
        dealt = sampler.deal(step, rank=0, world_size=1, micro_batch=batch)
        packs = [[sampler.store.row(row) for row in item] for item in dealt.micro_batches[0]]
        steps.append(
            [
                {
                    "input_ids": [int(token) for row in pack for token in row.tokens],
                    "labels": [
                        int(token) if is_trained else IGNORED
                        for row in pack
                        for token, is_trained in zip(row.tokens, row.trained, strict=True)
                    ],
                    "seq_lengths": [len(row.tokens) for row in pack],
                }
                for pack in packs
            ]
        )
    plan = json.loads(RunFolder(path=run).plan_path.read_text())
    # Where tightfit has unpacked the GGUF file: transformers refuses to train from one.
    return {"recipe": stated, "model": plan["training"]["model_path"], "steps": steps}


def tokens_of(step: list[dict[str, list[int]]]) -> list[list[int]]:
    return [pack["input_ids"] for pack in step]


def run_trl(name: str, folder: Path) -> Steps:
    """A process of its own, like tightfit's; its last line is what it took."""
    task = {"job": str(folder / "job.json"), "switches": SWITCHES[name]}
    command = [sys.executable, __file__, "--worker", json.dumps(task)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    steps: Steps = json.loads(done.stdout.splitlines()[-1])
    return steps


def train_with_trl(job: str, switches: dict[str, bool]) -> Steps:
    """One `SFTTrainer.train()` on ready packs; packing itself is not timed on either side."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    described = json.loads(Path(job).read_text())
    recipe, packs = described["recipe"], [pack for step in described["steps"] for pack in step]
    source = Path(described["model"])
    steps: Steps = []
    last = time.perf_counter()

    class Ticking(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            nonlocal last
            now = time.perf_counter()
            steps.append({"seconds": now - last})
            last = now

        def on_log(self, *_: Any, **named: Any) -> None:
            if "loss" in named["logs"]:
                steps[-1]["loss"] = float(named["logs"]["loss"])

    with tempfile.TemporaryDirectory() as scratch:
        trainer = SFTTrainer(
            **load_model(source, recipe["lora"], bf16_adapters=switches["bf16_adapters"]),
            args=SFTConfig(**sft_arguments(recipe, switches, scratch)),
            train_dataset=Dataset.from_list(packs),
            processing_class=AutoTokenizer.from_pretrained(source),
            data_collator=collate_grid if switches["grid"] else None,
            callbacks=[Ticking()],
        )
        last = time.perf_counter()
        trainer.train()
    return steps


def load_model(source: Path, lora: dict[str, Any], *, bf16_adapters: bool) -> dict[str, Any]:
    """The demo's weights in bf16, and the adapters: peft's fp32, or bf16 as tightfit plans them."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    adapters = LoraConfig(
        r=lora["rank"],
        lora_alpha=lora["alpha"],
        target_modules=lora["targets"],
        task_type="CAUSAL_LM",
    )
    if bf16_adapters:
        return {"model": get_peft_model(model, adapters, autocast_adapter_dtype=False)}
    return {"model": model, "peft_config": adapters}


def sft_arguments(recipe: dict[str, Any], switches: dict[str, bool], folder: str) -> dict[str, Any]:
    """The recipe in trl's words; what equals trl's default is not set."""
    wanted: dict[str, Any] = {
        "output_dir": folder,
        "use_cpu": True,
        "max_length": recipe["seq_len"],
        "per_device_train_batch_size": recipe["effective_batch"],
        "max_steps": recipe["max_steps"],
        "learning_rate": recipe["learning_rate"],
        "lr_scheduler_type": "cosine",
        "warmup_steps": math.ceil(recipe["warmup_fraction"] * recipe["max_steps"]),
        "seed": recipe["seed"],
        "train_sampling_strategy": "sequential",
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    if not switches["grid"]:
        wanted["packing"] = True
    if not switches["checkpointing"]:
        wanted["gradient_checkpointing"] = False
    if not switches["autocast"]:
        wanted["bf16"] = False
    return wanted


def collate_grid(packs: list[dict[str, list[int]]]) -> dict[str, Any]:
    """One row per pack, where trl's own collator makes one long row of all of them."""
    import torch

    width = max(len(pack["input_ids"]) for pack in packs)

    def fill(lists: list[list[int]], padding: int) -> Any:
        return torch.tensor([values + [padding] * (width - len(values)) for values in lists])

    positions = [[at for size in pack["seq_lengths"] for at in range(size)] for pack in packs]
    labels = fill([pack["labels"] for pack in packs], -100)
    places = fill(positions, 0)
    labels[places == 0] = -100
    return {
        "input_ids": fill([pack["input_ids"] for pack in packs], 0),
        "labels": labels,
        "position_ids": torch.tensor(
            [taken + list(range(width - len(taken))) for taken in positions]
        ),
    }


def take_seconds(steps: Steps) -> list[float]:
    return [step["seconds"] for step in steps[NUM_WARM_UP:]]


def summarise(rounds: list[dict[str, Steps]]) -> dict[str, Any]:
    """Medians over all steps, and how many times longer trl takes, with the rounds' extremes.

    Beside them the fastest steps, which other work on the machine has disturbed least.
    """
    timed = {name: [take_seconds(taken[name]) for taken in rounds] for name in CONTESTANTS}
    every = {name: [each for run in runs for each in run] for name, runs in timed.items()}
    middle = {name: median(seconds) for name, seconds in every.items()}
    fastest = {name: min(seconds) for name, seconds in every.items()}
    by_round = {name: [median(run) for run in runs] for name, runs in timed.items()}
    total: dict[str, Any] = {
        "num_steps": min(map(len, every.values())),
        "seconds": {name: round(value, 3) for name, value in middle.items()},
        "fastest_seconds": {name: round(value, 3) for name, value in fastest.items()},
        "round_seconds": {
            name: [round(value, 3) for value in values] for name, values in by_round.items()
        },
    }
    for name in SWITCHES:
        ratios = [a / b for a, b in zip(by_round[name], by_round[TIGHTFIT], strict=True)]
        total[f"{name} / {TIGHTFIT}"] = {
            "ratio": round(middle[name] / middle[TIGHTFIT], 3),
            "low": round(min(ratios), 3),
            "high": round(max(ratios), 3),
            "of_fastest": round(fastest[name] / fastest[TIGHTFIT], 3),
        }
    return total


def find_faults(result: dict[str, Any]) -> list[str]:
    """Why the result does not show that a step of tightfit takes no longer than trl's."""
    total, errors = result["total"], []
    if total["num_steps"] < MIN_STEPS:
        errors.append(f"{total['num_steps']} steps were timed, and {MIN_STEPS} are needed")
    for name in SWITCHES:
        beside = total[f"{name} / {TIGHTFIT}"]
        for what, ratio in (("median", beside["ratio"]), ("fastest", beside["of_fastest"])):
            if ratio < 1 - NOISE:
                errors.append(f"the {what} step of {name} takes {ratio:.2f} of tightfit's time")
    for number, taken in enumerate(result["rounds"], start=1):
        errors += [
            f"round {number}: the losses of {name} differ, so this is another job"
            for name in SWITCHES
            if not do_losses_agree(taken[TIGHTFIT], taken[name])
        ]
    return errors


def do_losses_agree(ours: Steps, theirs: Steps) -> bool:
    """The untouched model's to rounding, later ones about."""
    return all(
        math.isclose(
            mine["loss"],
            other["loss"],
            rel_tol=UNTRAINED_TOLERANCE if step < UNTRAINED_STEPS else TRAINED_TOLERANCE,
        )
        for step, (mine, other) in enumerate(zip(ours, theirs, strict=True))
    )


def render_table(result: dict[str, Any]) -> str:
    total = result["total"]
    lines = [
        f"{'seconds a step':14} {'median':>6} {'fastest':>7}  {'rounds':23} "
        f"{'beside tightfit (rounds), fastest':36} first losses"
    ]
    for name in CONTESTANTS:
        rounds = " ".join(f"{seconds:.2f}" for seconds in total["round_seconds"][name])
        beside = total.get(f"{name} / {TIGHTFIT}")
        ratio = "{ratio:.2f} ({low:.2f} to {high:.2f}), {of_fastest:.2f}" if beside else ""
        losses = " ".join(f"{step['loss']:.3f}" for step in result["rounds"][0][name][:4])
        lines.append(
            f"{name:14} {total['seconds'][name]:6.2f} {total['fastest_seconds'][name]:7.2f}  "
            f"{rounds:23} {ratio.format_map(beside or {}):36} {losses}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
