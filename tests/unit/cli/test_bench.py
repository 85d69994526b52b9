"""`tightfit bench`: sweeps with a stand-in worker, the words of each plan, refusals."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Run

from tightfit.api.training.settings import list_plan_options, read_settings
from tightfit.clusters.local import launcher
from tightfit.core.recipe import Recipe
from tightfit.core.settings import RecipeMethod, words_of
from tightfit.core.strategy import Strategy
from tightfit.hardware.resolve import resolve_hardware
from tightfit.models.resolve import resolve_model
from tightfit.planning.request import JobRequest
from tightfit.planning.search import search
from tightfit.runs.run_folder import RunFolder, RunState
from tightfit.runs.store import read_outcomes

ROOT = Path(__file__).parents[1]
SMALL = ("--seq-len", "64", "--effective-batch", "4", "--steps", "3", "--warm-up", "2")
MODEL = ("EleutherAI/pythia-14m", "--random-weights", "--on", "cpu", *SMALL)


@pytest.fixture(autouse=True)
def _own_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TIGHTFIT_LEDGER", str(tmp_path / "ledger.sqlite"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.delenv("TIGHTFIT_MEMORY_LIMIT_BYTES", raising=False)
    sys.path.insert(0, str(ROOT / "clusters"))
    yield
    sys.path.remove(str(ROOT / "clusters"))


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the stand-in worker does at each start; the last order holds for all further ones."""
    given: list[dict[str, Any]] = [{}]

    from local_cases import stand_in_command

    real = launcher.run_job

    def run_job(run: RunFolder, **more: Any) -> RunState:
        order = given.pop(0) if len(given) > 1 else given[0]
        (run.path / "behaviour.json").write_text(json.dumps({"num_steps": 5, **order}))
        if "removes" in order:
            Path(order["removes"]).rmdir()
        return real(run, command=stand_in_command(run), **more)

    monkeypatch.setattr(launcher, "run_job", run_job)
    return given


def list_left() -> list[str]:
    return [path.name for path in Path(tempfile.gettempdir()).iterdir()]


@pytest.mark.usefixtures("orders")
class TestOnePlan:
    def test_predicted_stands_beside_measured(self, run: Run) -> None:
        answer = run("bench", *MODEL, columns=200)

        assert answer.code == 0, answer.err
        assert "3 steps after 2 to warm up; random tokens, rows of 64, random weights" in answer.out
        time = next(line for line in answer.out.splitlines() if line.startswith("time per step"))
        assert "0.50 s" in time  # as the stand-in says of every step
        assert "0.50 s to 0.50 s" in time
        assert "tightfit calibrate --device cpu" in answer.out
        assert "step 5/5" in answer.err

    def test_nothing_stays_but_the_outcome(self, run: Run, tmp_path: Path) -> None:
        assert run("bench", *MODEL).code == 0
        assert list_left() == []
        assert {path.name for path in tmp_path.iterdir()} <= {
            "tmp", "cache", "ledger.sqlite", "ledger.sqlite.lock"
        }  # fmt: skip
        kept = read_outcomes()
        assert [row.status.value for row in kept] == ["finished"]
        assert kept[0].measured_seconds_per_step == 0.5

    def test_json_has_every_figure(self, run: Run) -> None:
        found = run("bench", *MODEL, "--json").json
        only = found["trials"][0]

        assert (found["num_plans"], found["is_calibrated"], only["rank"]) == (1, False, 1)
        assert only["measured"]["num_steps"] == 3
        assert only["measured"]["tokens_per_second"] == 2000.0
        assert only["measured"]["trained_tokens_per_second"] == 800.0
        named = {item["name"]: item for item in only["compared"]}
        assert set(named) == {
            "process memory", "time per step", "tokens per second", "trained tokens per second",
            "MFU",
        }  # fmt: skip
        error = 100 * (only["predicted_seconds_per_step"] - 0.5) / 0.5
        assert named["time per step"]["error_percent"] == pytest.approx(error)


class TestSweep:
    LEVERS = (*MODEL, "--method", "lora", "--all-levers", "--top", "3")

    def test_what_runs_out_of_memory_is_a_row(
        self, run: Run, orders: list[dict[str, Any]], tmp_path: Path
    ) -> None:
        orders[:] = [{"at": {"2": "oom"}}, {}]
        out, chart = tmp_path / "plans.json", tmp_path / "plans.png"
        answer = run("bench", *self.LEVERS, "--out", str(out), "--chart", str(chart))

        assert answer.code == 0, answer.err
        assert "out of memory" in answer.out
        written = json.loads(out.read_text())
        assert [row["rank"] for row in written["trials"]] == [2, 3, 1]
        assert written["trials"][2]["status"] == "out-of-memory"
        assert written["first_over_fastest"] is None
        assert len({json.dumps(row["strategy"]) for row in written["trials"]}) == 3
        assert chart.read_bytes().startswith(b"\x89PNG")
        statuses = [row.status.value for row in read_outcomes()]
        assert statuses == ["out-of-memory", "finished", "finished"]
        assert list_left() == []

    def test_a_worker_that_dies_is_a_row_with_its_last_words(
        self, run: Run, orders: list[dict[str, Any]]
    ) -> None:
        orders[:] = [{}, {"at": {"3": "die"}}, {"at": {"3": "bug"}}]
        answer = run("bench", *self.LEVERS, "--json")

        assert answer.code == 0
        rows = {row["rank"]: row for row in answer.json["trials"]}
        assert [rows[rank]["status"] for rank in (1, 2, 3)] == ["measured", "failed", "failed"]
        assert "SIGKILL" in rows[2]["problem"]
        assert any("the stand-in is broken" in line for line in rows[3]["log"])
        assert tempfile.gettempdir() not in json.dumps([rows[2]["remedy"], rows[3]["problem"]])
        assert answer.json["first_over_fastest"] == 1.0
        assert list_left() == []

    def test_nothing_measured_is_one_error(self, run: Run, orders: list[dict[str, Any]]) -> None:
        orders[:] = [{"at": {"1": "oom"}}]
        answer = run("bench", *MODEL)
        assert answer.code == 5
        assert answer.err.rstrip().endswith("--top 5    (tries others too)")
        assert answer.out.count("error") == 0

        orders[:] = [{"at": {"1": "nan"}}]
        answer = run("bench", *MODEL, "--json")
        assert (answer.code, answer.json["exit_code"]) == (4, 4)
        assert (answer.json["error"], answer.json["remedy"]) == ("loss is nan", "lower it")

    def test_a_limit_teaches_nothing_of_the_card(
        self, run: Run, orders: list[dict[str, Any]]
    ) -> None:
        orders[:] = [{"at": {"1": "oom"}}]
        assert run("bench", *MODEL, "--memory-limit", "4GiB").code == 5
        assert read_outcomes() == ()

    def test_no_plan_starts_when_the_minutes_are_over(
        self, run: Run, orders: list[dict[str, Any]]
    ) -> None:
        orders[:] = [{}]
        answer = run("bench", *self.LEVERS, "--minutes", "0.0001", "--json")
        assert answer.code == 0
        assert len(answer.json["trials"]) == 1
        assert any("--minutes" in note for note in answer.json["notes"])

    def test_ctrl_c_shows_what_was_measured_so_far(
        self, run: Run, orders: list[dict[str, Any]]
    ) -> None:
        orders[:] = [{"num_steps": 3000}]

        def interrupt() -> None:
            metrics = Path(tempfile.gettempdir())
            while not any(
                path.read_text().count('"step"') > 8 for path in metrics.glob("*/run/metrics.jsonl")
            ):
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        answer = run("bench", *MODEL, "--steps", "2998", "--json")

        assert answer.code == 130
        (only,) = answer.json["trials"]
        count = only["measured"]["num_steps"]
        assert 0 < count < 2998
        assert f"plan 1: {count:,} of 2,998 steps were taken" in answer.json["notes"]
        assert list_left() == []

    def test_one_plan_is_not_the_fastest_of_several(
        self, run: Run, orders: list[dict[str, Any]]
    ) -> None:
        orders[:] = [{}]
        assert "is the fastest" in run("bench", *self.LEVERS).out
        assert "is the fastest" not in run("bench", *self.LEVERS, "--minutes", "0.0001").out

    def test_a_file_that_cannot_be_written_costs_no_figures(
        self, run: Run, orders: list[dict[str, Any]], tmp_path: Path
    ) -> None:
        folder = tmp_path / "figures"
        folder.mkdir()
        orders[:] = [{"removes": str(folder)}, {}]
        answer = run("bench", *self.LEVERS, "--out", str(folder / "plans.json"))

        assert answer.code == 6
        assert answer.out.count("0.50 s to") == 3
        assert answer.err.count("error: ") == 1
        assert str(folder) in answer.err


@pytest.mark.usefixtures("orders")
class TestSaved:
    UNUSUAL = (
        *("--set", "lora_rank=4", "--set", "lora_targets=query_key_value,dense"),
        *("--set", "checkpointing=true", "--set", "micro_batch=1"),
    )

    @pytest.mark.parametrize("method", ["lora", "full"])
    def test_a_saved_plan_is_the_one_that_runs(self, run: Run, tmp_path: Path, method: str) -> None:
        unusual = self.UNUSUAL if method == "lora" else self.UNUSUAL[4:]
        words = ("--on", "cpu", *SMALL[:4], "--method", method, *unusual)
        assert run("plan", MODEL[0], *words, "--save", "plan.json").code == 0
        saved = json.loads((tmp_path / "plan.json").read_text())
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "plan.json").write_text(json.dumps(saved))

        for job in ("plan.json", "mine"):
            found = run("bench", job, "--random-weights", "--on", "cpu", *SMALL[4:], "--json")
            assert found.code == 0, found.err
            assert [trial["strategy"] for trial in found.json["trials"]] == [saved["strategy"]]

    def test_it_is_not_changed(self, run: Run) -> None:
        run("plan", MODEL[0], "--on", "cpu", "--save", "plan.json")
        for words in (("--set", "dora=true"), ("--top", "2"), ("--all-levers",)):
            answer = run("bench", "plan.json", "--random-weights", *words)
            assert (answer.code, answer.out) == (2, "")
            assert f"which {words[0]} cannot change" in answer.err


class TestWords:
    @pytest.mark.parametrize("on", ["4xV100-32GB", "RTX-4090", "cpu"])
    @pytest.mark.parametrize("is_exhaustive", [False, True])
    def test_the_planner_comes_to_the_same_plan(self, on: str, is_exhaustive: bool) -> None:
        cluster, spec = resolve_hardware(on), resolve_model("Llama-3.2-1B")
        request = JobRequest(spec=spec, seq_len=512)
        plans = search(request, cluster, num_plans=6, is_exhaustive=is_exhaustive).plans
        assert len(plans) >= 2
        for plan in plans:
            again = search(_read_back(list_plan_options(plan.strategy), spec), cluster).plans
            assert [found.strategy for found in again[:1]] == [plan.strategy]

    def test_every_field_is_said_or_known_not_to_be_turned(self) -> None:
        from tightfit.api.training.settings import NOT_SEARCHED

        said = {word.partition("=")[0] for word in list_plan_options(Strategy())[3::2]}
        silent = {"trainer", "quirks", "recomputed_layers"}
        assert said | set(NOT_SEARCHED) | silent == set(Strategy.model_fields)


def _read_back(words: tuple[str, ...], spec: Any) -> JobRequest:
    """As `train` reads `--method` and `--set`."""
    assert words[0] == "--method"
    assert words[1] in words_of(RecipeMethod)
    assert set(words[2::2]) == {"--set"}
    recipe = Recipe(model="m", method=RecipeMethod(words[1]))
    fixed = recipe.fixed_strategy() | read_settings(words[3::2])
    return JobRequest(spec=spec, method=words[1], seq_len=512, fixed=fixed)


class TestRefusals:
    @pytest.mark.parametrize(
        ("words", "code", "remedy"),
        [
            (("EleutherAI/pythia-14m", "--on", "cpu"), 3, "--random-weights"),
            (("7B-params", "--random-weights", "--on", "cpu"), 3, "tightfit models"),
            ((*MODEL, "--chart", "plans.html"), 2, "--chart plans.png"),
            ((*MODEL, "--out", "nowhere/plans.json"), 6, "mkdir -p nowhere"),
            (("gpt2", "--on", "slurm:gpu"), 2, "--on here"),
            ((*MODEL, "--steps", "0"), 2, "--steps 20"),
            ((*MODEL, "--data", "gone.jsonl"), 3, "gone.jsonl"),
        ],
    )
    def test_one_message_and_one_remedy(
        self, run: Run, words: tuple[str, ...], code: int, remedy: str
    ) -> None:
        answer = run("bench", *words)
        assert (answer.code, answer.out) == (code, "")
        assert answer.err.count("error: ") == 1
        assert remedy in answer.err
        assert list_left() == []


def test_a_setting_that_leaves_no_plan_is_left_out_in_a_command_that_plans(run: Run) -> None:
    """`plan` takes nothing for granted where this machine has no GPU: `--on here` is said."""
    reported = run(
        "bench", "t5-small", "--random-weights", "--method", "full", "--set", "micro_batch=9999"
    )
    assert reported.code == 5
    assert "try: tightfit plan t5-small --method full --on here    (without" in reported.err
    assert run("plan", "t5-small", "--method", "full", "--on", "here").code == 0
