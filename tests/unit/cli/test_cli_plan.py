"""`tightfit plan`: JSON, saving, recipes, refusal, buying."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from conftest import Run

from tightfit.api.training import hardware
from tightfit.core.errors import SetupError
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
    reported = run("plan", "Llama-2-7b", "--on", "4xV100-32GB", "--seq-len", "2048", "--json").json

    assert set(reported) == {"plans", "excluded", "considered", "groups", "lengths"}
    assert reported["lengths"] == []  # without data
    assert reported["considered"] >= 500
    assert len(reported["plans"]) == 5
    for found in reported["plans"]:
        assert Plan.model_validate(found).estimate.verdict.value in ("fits", "tight")
    reasons = [Exclusion.model_validate(row).reason for row in reported["excluded"]]
    assert any("int8 needs compute capability 7.5" in reason for reason in reasons)


def test_the_shortest_command_just_works(run: Run) -> None:
    answer = run("plan", "Llama-2-7b", "--on", "4xV100-32GB")
    assert answer.code == 0
    assert "Why the first" in answer.out
    assert answer.err == ""


def test_save_writes_the_first_plan_as_it_is_printed(run: Run, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    line = ("plan", "Llama-2-7b", "--on", "A100-40GB", "--json", "--save", str(saved))

    answer = run(*line)
    reported = answer.json

    assert answer.err == f"wrote {saved}\n"
    assert json.loads(saved.read_text()) == reported["plans"][0]
    assert [path.name for path in saved.parent.iterdir()] == ["plan.json"]


def test_each_length_costs_what_a_plan_for_it_says(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "long.jsonl"
    rows = [{"prompt": "say it", "completion": "word " * (50 + 97 * i)} for i in range(30)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = ("plan", "Llama-2-7b", "--on", "A100-40GB", "--data", str(data), "--json")

    reported = run(*line, "--seq-len", "1024", "--method", "lora").json

    lengths = {row["seq_len"]: row for row in reported["lengths"]}
    assert list(lengths) == [512, 1024, 2048, 4096]
    lost = [row["num_lost_tokens"] for row in lengths.values()]
    assert lost == sorted(lost, reverse=True)
    assert lost[-1] == 0 < lost[-2]
    assert lengths[1024]["strategy"] == reported["plans"][0]["strategy"]
    # The same job planned for that length, with what the first plan has fixed.
    first = reported["plans"][0]["strategy"]
    kept = ("weights", "compute", "adapter_dtype", "optimizer", "sharding", "offload")
    fixed = [f"--set={name}={first[name]}" for name in kept]
    [alone] = run(*line, "--seq-len", "2048", "--method", "lora", "--top", "1", *fixed).json[
        "plans"
    ]
    assert lengths[2048]["strategy"] == alone["strategy"]
    assert lengths[2048]["gpu_bytes"] == alone["estimate"]["gpu"]["peak_reserved_bytes"]
    assert lengths[2048]["seconds_per_epoch"] == alone["estimate"]["time"]["seconds_per_epoch"]


def test_top_limits_the_plans(run: Run) -> None:
    assert len(run("plan", "gpt2", "--on", "T4", "--top", "2", "--json").json["plans"]) == 2


def test_explain_gives_each_reason_with_its_count(run: Run) -> None:
    plain = run("plan", "Llama-2-7b", "--on", "V100-32GB").out
    reported = run("plan", "Llama-2-7b", "--on", "V100-32GB", "--explain").out

    assert "bf16 needs compute capability 8.0" in reported
    assert "bf16 needs compute capability 8.0" not in plain
    assert "e.g. " in reported


def test_settings_hold_choices_fixed(run: Run) -> None:
    options = ("--set", "sharding=zero3", "--set", "offload=none", "--set", "seq-len=1024")
    reported = run("plan", "Llama-2-7b", "--on", "4xA100-40GB", *options, "--json").json

    assert reported["plans"]
    for found in reported["plans"]:
        strategy = found["strategy"]
        assert (strategy["sharding"], strategy["offload"]) == ("zero3", "none")
        assert strategy["seq_len"] == 1024


def test_nothing_fits_tells_what_is_short_and_what_to_run(run: Run) -> None:
    line = ("plan", "Llama-3.1-70B", "--on", "2xT4", "--method", "full", "--seq-len", "512")

    answer = run(*line)
    assert answer.code == 5
    assert "short" in answer.err
    assert "tightfit plan Llama-3.1-70B --method full --seq-len 512 --buy" in answer.err

    reported = run(*line, "--json").json
    assert reported["plans"] == []
    assert reported["excluded"]
    assert reported["exit_code"] == 5


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
    per_epoch = best["estimate"]["time"]["steps_per_epoch"]
    assert best["num_epochs"] == pytest.approx(100 / per_epoch)


def test_with_data_the_epoch_and_its_price_are_shown(run: Run, dataset: Path) -> None:
    answer = run("plan", "gpt2", "--on", "T4", "--data", str(dataset))
    text = " ".join(answer.out.split())  # long paths wrap the lines elsewhere
    assert "an epoch" in text
    assert "a run" in text
    assert "1 epoch" in text
    assert "epochs:" not in text
    assert (
        "3 epochs: "
        in run("plan", "gpt2", "--on", "T4", "--data", str(dataset), "--epochs", "3").out
    )
    assert "400 rows (alpaca)" in text
    assert "guessed" in text or "tokenizer" in text


def test_buy_lists_offers_from_cheap_to_dear(run: Run, dataset: Path) -> None:
    reported = run("plan", "Qwen2.5-0.5B", "--data", str(dataset), "--buy", "--json").json

    prices = [offer["usd_per_run"] for offer in reported["offers"]]
    assert len(prices) > 5
    assert prices == sorted(prices)
    for offer in reported["offers"]:
        Plan.model_validate(offer["plan"])
        assert offer["usd_per_month"] == pytest.approx(offer["usd_per_hour"] * 730)

    text = run("plan", "Qwen2.5-0.5B", "--buy").out
    assert "$/month" in text
    assert "$/M tokens" in text


def test_without_hardware_a_plan_asks_for_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_gpu(_text: str) -> object:
        raise SetupError("No GPU.", remedy="-")

    monkeypatch.setattr(hardware, "resolve_hardware", no_gpu)
    answer = run("plan", "gpt2", "--seq-len", "512")
    assert answer.code == 2
    assert "tightfit plan gpt2 --seq-len 512 --on 4xV100-32GB" in answer.err


def test_a_saved_plan_is_shown_again_and_not_searched(run: Run, tmp_path: Path) -> None:
    saved, all_of_them = tmp_path / "plan.json", tmp_path / "all.json"
    line = ("plan", "Llama-2-7b", "--on", "V100-32GB")
    run(*line, "--save", str(saved))
    all_of_them.write_text(run(*line, "--json").out)

    shown = run("plan", str(saved))
    assert shown.code == 0
    assert "LoRA r16, fp16, single on 1 GPU" in shown.out
    assert "A saved plan" in shown.out
    assert run("plan", str(saved), "--json").json["plans"] == [json.loads(saved.read_text())]
    assert "\n2  " in run("plan", str(all_of_them)).out

    changed = run("plan", str(saved), "--on", "T4")
    assert changed.code == 2
    assert "saved plan" in changed.err
    assert "tightfit plan meta-llama/Llama-2-7b-hf" in changed.err


def test_a_saved_plan_of_another_version_is_named_as_such(run: Run, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    run("plan", "gpt2", "--on", "T4", "--save", str(saved))
    later = json.loads(saved.read_text()) | {"tightfit_version": "9.9", "new": 1}
    saved.write_text(json.dumps(later))

    answer = run("plan", str(saved))
    assert answer.code == 4
    assert "tightfit 9.9" in answer.err


def test_a_failed_save_leaves_one_json_document(run: Run, tmp_path: Path) -> None:
    line = ("plan", "gpt2", "--on", "T4", "--save", str(tmp_path / "no" / "plan.json"), "--json")
    answer = run(*line)
    assert answer.code != 0
    assert set(answer.json) == {"error", "remedy", "exit_code"}


def test_a_refusal_repeats_the_hardware_that_was_typed_and_no_other(
    run: Run, tmp_path: Path
) -> None:
    recipe = tmp_path / "job.yaml"
    recipe.write_text("model: gpt2\non: K80\n")

    from_recipe = run("plan", str(recipe))
    assert from_recipe.code == 5
    assert f"try: tightfit plan {recipe} --explain" in from_recipe.err

    typed = run("plan", "gpt2", "--on", "2n x 2xK80", "--network", "10Gb/s", "--set", "dora=true")
    remedy = "tightfit plan gpt2 --set dora=true --on '2n x 2xK80' --network 10Gb/s --explain"
    assert remedy in typed.err


@pytest.mark.parametrize("name", ["fp8_gradients", "checkpointing"])
def test_a_setting_without_a_value_is_meant_to_be_on(run: Run, name: str) -> None:
    typed = run("plan", "gpt2", "--on", "H200", "--set", name)
    assert typed.code == 2
    assert f"--set {name}=true" in typed.err


@pytest.mark.parametrize("more", [(), ("--explain",)])
def test_a_setting_that_nothing_allows_is_left_out_and_not_shopped_for(
    run: Run, more: tuple[str, ...]
) -> None:
    """The remedy plans."""
    words = ("plan", "gpt2", "--method", "lora", "--on", "H200", "--set", "fp8_gradients=true")
    reported = run(*words, *more)
    assert reported.code == 5
    remedy = "tightfit plan gpt2 --method lora --on H200    (without --set fp8_gradients=true)"
    assert remedy in reported.err
    assert run(*words[:6]).code == 0


def test_a_setting_that_needs_too_much_memory_is_left_out_and_the_others_stay(run: Run) -> None:
    settings = ("--set", "lora-rank=8", "--set", "micro-batch=64")
    reported = run("plan", "Llama-2-7b", "--method", "lora", "--on", "RTX-4090", *settings)
    assert reported.code == 5
    remedy = "tightfit plan Llama-2-7b --method lora --set lora-rank=8 --on RTX-4090"
    assert f"try: {remedy}    (without --set micro-batch=64)" in reported.err
    assert run(*shlex.split(remedy)[1:]).code == 0


def test_every_spelling_of_what_stands_in_the_way_is_left_out(run: Run) -> None:
    settings = ("--set", "micro-batch=64", "--set", "micro_batch=64")
    reported = run("plan", "Llama-2-7b", "--method", "lora", "--on", "RTX-4090", *settings)
    assert "try: tightfit plan Llama-2-7b --method lora --on RTX-4090    (without" in reported.err


TOO_MUCH = "  micro_batch: 64\n"


@pytest.mark.parametrize(
    ("stated", "typed", "way_out"),
    [
        (TOO_MUCH, (), "leave micro_batch out of {recipe}"),
        (
            TOO_MUCH,
            ("fp8_gradients=true",),
            "leave micro_batch out of {recipe}, and --set fp8_gradients=true out of the command",
        ),
        (
            "  micro_batch: 1\n",
            ("micro_batch=64",),
            "tightfit plan {recipe}    (without --set micro_batch=64)",
        ),
        ("  fp8: false\npacking: true\n", ("fp8=true", "weights=fp16"), "tightfit plan {recipe}"),
    ],
)
def test_a_recipe_and_the_command_line_are_told_apart(
    run: Run, tmp_path: Path, stated: str, typed: tuple[str, ...], way_out: str
) -> None:
    recipe = tmp_path / "job.yaml"
    recipe.write_text(f"model: Llama-2-7b\nmethod: lora\non: RTX-4090\nstrategy:\n{stated}")
    reported = run("plan", str(recipe), *(word for text in typed for word in ("--set", text)))
    assert reported.code == 5
    assert f"try: {way_out.format(recipe=recipe)}" in reported.err


def test_packing_that_a_recipe_asks_of_the_wrong_model_is_named(run: Run, tmp_path: Path) -> None:
    recipe = tmp_path / "job.yaml"
    recipe.write_text("model: t5-small\nmethod: full\non: T4\npacking: true\n")
    assert f"try: leave packing out of {recipe}" in run("plan", str(recipe)).err


CLUSTER_FILE = """groups:
  - {name: volta, gpu: V100-32GB, gpus_per_node: 4, nodes: 2}
  - {name: turing, gpu: T4, gpus_per_node: 2}
  - {name: old, gpu: P100-16GB}
"""


def test_every_group_that_was_searched_is_named(run: Run, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(CLUSTER_FILE)
    text = run("plan", "gpt2", "--on", str(cluster), "--top", "1", columns=200).out

    heading = text.split("\n\n")[0]
    assert all(name in heading for name in ("volta", "turing", "old"))
    assert "(volta)" in text.split("\n\n")[1]


def test_an_unstated_network_is_said_to_be_assumed(run: Run) -> None:
    line = ("Llama-2-7b", "--on", "2n x 4xV100-32GB")
    alone = ("plan", *line, "--set", "num_nodes=1")
    for argv in (alone, ("plan", *line), ("estimate", *line), ("estimate", *line, "--json")):
        text = " ".join(run(*argv).out.split())
        assert text.count("network between nodes was not stated") == 1
        assert "--network 100Gb/s" in text
        stated = " ".join(run(*argv, "--network", "100Gb/s").out.split())
        assert "not stated: 10 G" not in stated


def test_a_faster_network_makes_a_faster_plan(run: Run) -> None:
    line = ("plan", "Llama-2-7b", "--on", "4n x 8xA100-80GB", "--method", "full", "--json")
    slow, fast = (run(*line, "--network", speed).json["plans"] for speed in ("1Gb/s", "400Gb/s"))

    assert fast[0]["hardware"]["network_bytes_per_second"] == 50e9
    speeds = [plans[0]["estimate"]["time"]["tokens_per_second"] for plans in (slow, fast)]
    assert speeds[0] < speeds[1]


def test_buying_says_by_what_it_is_cheapest_and_what_it_does_not_use(
    run: Run, tmp_path: Path, dataset: Path
) -> None:
    recipe = tmp_path / "job.yaml"
    recipe.write_text("model: gpt2\non: 2xT4\n")
    text = " ".join(run("plan", str(recipe), "--buy").out.split())
    assert "cheapest first by $ per million tokens" in text
    assert "2xT4) is not used" in text
    text = " ".join(run("plan", str(recipe), "--buy", "--data", str(dataset)).out.split())
    assert "cheapest first by $ per run" in text


def test_a_plan_that_is_tight_by_formula_offers_the_trace(run: Run) -> None:
    words = (
        "plan",
        "Llama-2-7b",
        "--method",
        "lora",
        "--seq-len",
        "2048",
        "--set",
        "micro-batch=1",
    )
    tight = run(*words, "--on", "T4", "--json").json["plans"][0]
    assert tight["estimate"]["verdict"] == "tight", "the case must be a close one"
    command = f"tightfit {' '.join(words)} --on T4 --trace"
    assert any(command in warning for warning in tight["warnings"])
    roomy = run(*words, "--on", "H200", "--json").json["plans"][0]
    assert roomy["estimate"]["verdict"] == "fits"
    assert not any("--trace" in warning for warning in roomy["warnings"])
