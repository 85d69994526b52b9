"""`tightfit plan`: JSON, saving, recipes, refusal, buying."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Run

from tightfit.cli import hardware_choice
from tightfit.core.errors import EnvironmentFaultError
from tightfit.planning.plan import Exclusion, Plan


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    rows = [
        {"instruction": "say it", "input": "", "output": "word " * (10 + i % 90)}
        for i in range(400)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_json_holds_plans_best_first_and_what_was_left_out(run: Run) -> None:
    told = run("plan", "Llama-2-7b", "--on", "4xV100-32GB", "--seq-len", "2048", "--json").json

    assert set(told) == {"plans", "excluded", "considered"}
    assert told["considered"] >= 500
    assert len(told["plans"]) == 5
    for found in told["plans"]:
        assert Plan.model_validate(found).estimate.verdict.value in ("fits", "tight")
    reasons = [Exclusion.model_validate(row).reason for row in told["excluded"]]
    assert any("int8 needs compute capability 7.5" in reason for reason in reasons)


def test_the_shortest_command_just_works(run: Run) -> None:
    answer = run("plan", "Llama-2-7b", "--on", "4xV100-32GB")
    assert answer.code == 0
    assert "Why the first" in answer.out
    assert answer.err == ""


def test_save_writes_the_first_plan_as_it_is_printed(run: Run, tmp_path: Path) -> None:
    saved = tmp_path / "deep" / "plan.json"
    line = ("plan", "Llama-2-7b", "--on", "A100-40GB", "--json", "--save", str(saved))

    told = run(*line).json

    assert json.loads(saved.read_text()) == told["plans"][0]
    assert [path.name for path in saved.parent.iterdir()] == ["plan.json"]


def test_top_limits_the_plans(run: Run) -> None:
    assert len(run("plan", "gpt2", "--on", "T4", "--top", "2", "--json").json["plans"]) == 2


def test_explain_gives_each_reason_with_its_count(run: Run) -> None:
    plain = run("plan", "Llama-2-7b", "--on", "V100-32GB").out
    told = run("plan", "Llama-2-7b", "--on", "V100-32GB", "--explain").out

    assert "bf16 needs compute capability 8.0" in told
    assert "bf16 needs compute capability 8.0" not in plain
    assert "e.g. " in told


def test_settings_hold_choices_fixed(run: Run) -> None:
    options = ("--set", "sharding=zero3", "--set", "offload=none", "--set", "seq-len=1024")
    told = run("plan", "Llama-2-7b", "--on", "4xA100-40GB", *options, "--json").json

    assert told["plans"]
    for found in told["plans"]:
        strategy = found["strategy"]
        assert (strategy["sharding"], strategy["offload"]) == ("zero3", "none")
        assert strategy["seq_len"] == 1024


def test_nothing_fits_tells_what_is_short_and_what_to_run(run: Run) -> None:
    line = ("plan", "Llama-3.1-70B", "--on", "2xT4", "--method", "full", "--seq-len", "512")

    answer = run(*line)
    assert answer.code == 5
    assert "short" in answer.err
    assert "tightfit plan Llama-3.1-70B --method full --seq-len 512 --buy" in answer.err

    told = run(*line, "--json").json
    assert told["plans"] == []
    assert told["excluded"]
    assert told["exit_code"] == 5


def test_a_recipe_says_it_all_and_flags_win(run: Run, tmp_path: Path, dataset: Path) -> None:
    recipe = tmp_path / "job.yaml"
    recipe.write_text(
        f"model: gpt2\ndata: {dataset}\nmethod: lora\non: 2xT4\nseq_len: 256\nepochs: 3\n"
        "effective_batch: 8\nlora:\n  rank: 4\n"
    )

    best = run("plan", str(recipe), "--json").json["plans"][0]
    assert best["strategy"]["method"] == "lora"
    assert best["strategy"]["lora_rank"] == 4
    assert best["strategy"]["seq_len"] == 256
    assert (best["num_epochs"], best["effective_batch"]) == (3, 8)
    assert best["hardware"]["group"] == "2xT4"
    assert best["data"]["num_rows"] == 400

    flags = ("--method", "full", "--on", "A100-40GB", "--epochs", "1.5", "--seq-len", "128")
    other = run("plan", str(recipe), *flags, "--json").json["plans"][0]
    assert other["strategy"]["method"] == "full"
    assert (other["num_epochs"], other["strategy"]["seq_len"]) == (1.5, 128)
    assert other["hardware"]["group"] == "A100-40GB"


def test_steps_become_epochs_where_the_rows_are_known(
    run: Run, tmp_path: Path, dataset: Path
) -> None:
    recipe = tmp_path / "job.yaml"
    recipe.write_text(f"model: gpt2\ndata: {dataset}\nmax_steps: 100\neffective_batch: 8\n")
    best = run("plan", str(recipe), "--on", "T4", "--json").json["plans"][0]
    assert best["num_epochs"] == pytest.approx(2.0)


def test_with_data_the_epoch_and_its_price_are_shown(run: Run, dataset: Path) -> None:
    answer = run("plan", "gpt2", "--on", "T4", "--data", str(dataset))
    text = " ".join(answer.out.split())  # long paths wrap the lines elsewhere
    assert "an epoch" in text
    assert "400 rows (alpaca)" in text
    assert "guessed" in text or "tokenizer" in text


def test_buy_lists_offers_from_cheap_to_dear(run: Run, dataset: Path) -> None:
    told = run("plan", "Qwen2.5-0.5B", "--data", str(dataset), "--buy", "--json").json

    prices = [offer["usd_per_run"] for offer in told["offers"]]
    assert len(prices) > 5
    assert prices == sorted(prices)
    for offer in told["offers"]:
        Plan.model_validate(offer["plan"])
        assert offer["usd_per_month"] == pytest.approx(offer["usd_per_hour"] * 730)

    text = run("plan", "Qwen2.5-0.5B", "--buy").out
    assert "$/month" in text
    assert "$/M tokens" in text


def test_without_hardware_a_plan_asks_for_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_gpu(_text: str) -> object:
        raise EnvironmentFaultError("No GPU.", remedy="-")

    monkeypatch.setattr(hardware_choice, "resolve_hardware", no_gpu)
    answer = run("plan", "gpt2", "--seq-len", "512")
    assert answer.code == 2
    assert "tightfit plan gpt2 --seq-len 512 --on 4xV100-32GB" in answer.err
