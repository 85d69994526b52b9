"""Runs on preferences from data to metrics, stopped and resumed, in this process."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from shard_cases import lone_place, make_plan
from tightfit.core.strategy import DataSource
from tightfit.data.encode import EncodedDataset, EncodeRequest, encode_dataset
from tightfit.planning.plan import Plan
from tightfit.runs.metrics import EvalRecord, PreferenceRecord, StepRecord, read_records
from tightfit.runs.report import make_report
from tightfit.runs.run_folder import RunFolder, TokenFolders
from tightfit.training.loop import TrainLoop
from tiny_jobs import WORDS, make_model

NUM_STEPS, FIRST_STOP = 6, 3
CASES: dict[str, dict[str, Any]] = {
    "dpo": {"objective": "dpo", "method": "lora", "precompute_reference": True},
    "ipo-full": {"objective": "ipo", "method": "full", "precompute_reference": True},
    "dpo-copied": {"objective": "dpo", "method": "full", "loss": "fused"},
    "kto": {"objective": "kto", "method": "lora"},
    "simpo-packed": {"objective": "simpo", "method": "lora", "packing": True},
    "dpo-fp16": {
        **{"objective": "dpo", "method": "lora", "weights": "fp16", "compute": "fp16"},
        **{"autocast": True, "loss": "fused"},
    },
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("preferences")
    make_model(home / "model", hidden_size=64)
    rng = random.Random(0)

    def text(most: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))

    rows = [
        {"prompt": text(4), "chosen": text(5), "rejected": f"{text(3)} town"} for _ in range(24)
    ]
    (home / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return home


def make_case(home: Path, name: str) -> tuple[Plan, EncodedDataset]:
    plan = make_plan(home / "model", **(CASES[name] | {"seq_len": 96, "micro_batch": 2}))
    assert plan.training is not None
    training = plan.training.model_copy(update={"max_steps": NUM_STEPS, "log_to": ()})
    plan = plan.model_copy(update={"training": training})
    request = EncodeRequest(
        sources=[DataSource(path=str(home / "pairs.jsonl"))],
        model_folder=home / "model",
        objective=plan.strategy.objective,
        seq_len=96,
        eval_fraction=0.2,
        cache=home / f"cache-{name}",
    )
    return plan, encode_dataset(request)


class Start:
    """One start of a run, in the folder that it is given."""

    def __init__(self, folder: Path, plan: Plan, encoded: EncodedDataset) -> None:
        self.run = RunFolder(path=folder)
        folder.mkdir(exist_ok=True)
        self.run.write_plan(plan)
        assert encoded.eval is not None
        folders = TokenFolders(train=str(encoded.train.folder), eval=str(encoded.eval.folder))
        self.run.write_tokens(folders)
        self.plan = plan

    def go(self, *, stop_after: int | None = None) -> None:
        def is_stop_requested() -> bool:
            return stop_after is not None and loop.step + 1 >= stop_after

        loop = TrainLoop(self.run, self.plan, lone_place(), is_stop_requested)
        assert loop.train() is (stop_after is None)

    def steps(self) -> list[StepRecord]:
        records = read_records(self.run.metrics_path)
        return [record for record in records if isinstance(record, StepRecord)]


def values(record: StepRecord) -> dict[str, float | None]:
    assert isinstance(record.preference, PreferenceRecord)
    return {"loss": record.loss, **record.preference.model_dump()}


@pytest.mark.parametrize("name", CASES)
def test_a_stopped_run_goes_on_as_if_it_had_not_been(home: Path, name: str) -> None:
    """Even where the reference must be computed again: it is the model before its first step."""
    plan, encoded = make_case(home, name)
    whole = Start(home / f"{name}-whole", plan, encoded)
    whole.go()
    stopped = Start(home / f"{name}-stopped", plan, encoded)
    stopped.go(stop_after=FIRST_STOP)
    found = list(encoded.train.folder.glob("reference-*"))
    assert bool(found) is plan.strategy.precompute_reference
    for folder in found:
        shutil.rmtree(folder)
    stopped.go()

    assert len(stopped.steps()) == len(whole.steps()) == NUM_STEPS
    for one, other in zip(stopped.steps(), whole.steps(), strict=True):
        assert values(one) == pytest.approx(values(other), abs=1e-6)
    last = values(whole.steps()[-1])
    assert last["reward_margin"] != 0
    assert (last["kl"] is not None) is (name == "kto")
    assert (last["reward_accuracy"] is None) is (name == "kto")
    evals = [r for r in read_records(whole.run.metrics_path) if isinstance(r, EvalRecord)]
    assert evals
    assert all(one.preference is not None and one.perplexity is None for one in evals)
    report = make_report(whole.run)
    assert report.last_preference is not None
    assert report.last_preference.preference_loss is not None
