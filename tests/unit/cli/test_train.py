"""`tightfit train`: wishes, folders, display, refusals, and whole runs with a stand-in worker."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Run

from tightfit.api.options.training import TrainOptions
from tightfit.api.training.hardware import find_hardware, read_limit, read_rendezvous
from tightfit.api.training.recipe import (
    RUN_RECIPE_FILE,
    RunRecipe,
    read_run_recipe,
    read_run_recipe_file,
)
from tightfit.api.training.run_folder import (
    RunStage,
    find_run_location,
    move_aside,
    name_folder,
)
from tightfit.cli.terminal.run_display import (
    PlainDisplay,
    Progress,
    list_numbers,
    open_display,
    render_eval,
    render_live,
    render_step,
)
from tightfit.clusters.local import launcher
from tightfit.clusters.requirements import check_space, estimate_run_bytes
from tightfit.core.errors import SetupError, UsageError
from tightfit.core.settings import Method
from tightfit.core.units import GIB
from tightfit.data.token_store import TokenStore
from tightfit.planning.plan import Plan
from tightfit.runs.metrics import EvalRecord, EventRecord, StepRecord
from tightfit.runs.run_folder import RunFolder, RunState, RunStatus
from word_model import ROWS, plant_model

CLUSTER_TESTS = Path(__file__).parents[1] / "clusters"


@pytest.fixture(autouse=True)
def _own_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TIGHTFIT_LEDGER", str(tmp_path / "ledger.sqlite"))
    monkeypatch.delenv("TIGHTFIT_MEMORY_LIMIT_BYTES", raising=False)
    sys.path.insert(0, str(CLUSTER_TESTS))
    yield
    sys.path.remove(str(CLUSTER_TESTS))


def flags(job: str = "gpt2", **given: Any) -> TrainOptions:
    return TrainOptions(job=job, **{"data": Path("train.jsonl"), **given})


def make_step(step: int, **changed: Any) -> StepRecord:
    values: dict[str, Any] = {
        "step": step, "epoch": 0.1, "loss": 1.23456, "learning_rate": 1.8e-4, "grad_norm": 1.0,
        "num_tokens": 5210, "num_trained_tokens": 900, "seconds": 1.0, "data_wait_seconds": 0.004,
        "tokens_per_second": 5210.4, "mfu_fraction": 0.312, "gpu_allocated_bytes": 17 * GIB,
        "gpu_reserved_bytes": int(18.2 * GIB), "host_bytes": GIB,
    }  # fmt: skip
    return StepRecord(**{**values, **changed})


class TestWish:
    def test_flags_are_laid_over_the_recipe(self, tmp_path: Path) -> None:
        recipe = tmp_path / "job.yaml"
        recipe.write_text(
            "model: gpt2\ndata: rows.jsonl\nepochs: 3\nlearning_rate: 1e-5\nseed: 4\n"
        )
        wanted = read_run_recipe(
            flags("job.yaml", data=None, max_steps=7, lr=0.5, seed=9, eval="5%", method="full",
                  log_to="none", settings=["micro_batch=2"])
        )  # fmt: skip

        found = wanted.recipe
        assert (found.epochs, found.max_steps, found.learning_rate, found.seed) == (None, 7, 0.5, 9)
        assert (found.eval_fraction, found.log_to) == (0.05, ())
        assert [source.path for source in found.data] == [str(tmp_path / "rows.jsonl")]
        assert wanted.fixed_strategy() == {"method": Method.FULL, "micro_batch": 2}

    def test_a_long_list_of_settings_is_kept_whole(self) -> None:
        targets = tuple(f"experts.{number}.down_proj" for number in range(8))
        wanted = read_run_recipe(flags("gpt2", settings=[f"lora_targets={','.join(targets)}"]))
        assert wanted.fixed_strategy()["lora_targets"] == targets

    def test_a_model_folder_is_found_from_anywhere(self, tmp_path: Path) -> None:
        (tmp_path / "mine").mkdir()
        assert read_run_recipe(flags("mine")).recipe.model == str(tmp_path / "mine")
        assert read_run_recipe(flags("./mine")).recipe.model == str(tmp_path / "mine")
        assert read_run_recipe(flags("gpt2")).recipe.model == "gpt2"

    def test_an_eval_file_stands_beside_the_training_file(self, tmp_path: Path) -> None:
        sources = read_run_recipe(flags(eval="held.jsonl")).recipe.data
        assert [(source.path, source.split) for source in sources] == [
            (str(tmp_path / "train.jsonl"), "train"),
            (str(tmp_path / "held.jsonl"), "eval"),
        ]

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"data": None}, "No data"),
            ({"epochs": 1.0, "max_steps": 3}, "both say how long"),
            ({"eval": "0.9"}, "neither a file nor a share"),
            ({"log_to": "wanbd"}, "wandb"),
            ({"method": "qlora", "settings": ["weights=bf16"]}, "quantized"),
        ],
    )
    def test_contradictions_are_named(self, given: dict[str, Any], said: str) -> None:
        with pytest.raises(UsageError, match=said):
            read_run_recipe(flags(**given))

    def test_only_place_and_hardware_leave_a_wish_the_same(self) -> None:
        wanted = read_run_recipe(flags())
        assert wanted.is_same(read_run_recipe(flags(output=Path("x"), on="2xcpu")))
        assert not wanted.is_same(read_run_recipe(flags(lr=1e-3)))
        other = read_run_recipe(flags(lr=1e-3, settings=["packing=true"]))
        assert wanted.list_differences(other) == ["learning_rate", "--set"]

    def test_a_wish_survives_the_disk(self, tmp_path: Path) -> None:
        wanted = read_run_recipe(
            flags(eval="0.1", settings=["lora_targets=q_proj,v_proj"], method="lora")
        )
        (tmp_path / RUN_RECIPE_FILE).write_text(wanted.model_dump_json())
        held = read_run_recipe_file(tmp_path)
        assert held is not None
        assert held.is_same(wanted)


def plant_run(folder: Path, wanted: RunRecipe, status: RunStatus) -> RunFolder:
    folder.mkdir(parents=True)
    run = RunFolder(path=folder)
    run.plan_path.write_text("{}")
    (folder / RUN_RECIPE_FILE).write_text(wanted.model_dump_json())
    run.write_state(RunState(status=status, updated_at="2026-01-01T00:00:00+00:00"))
    return run


class TestPlace:
    def test_a_new_wish_has_no_folder_yet(self) -> None:
        assert find_run_location(read_run_recipe(flags()), flags()).stage is RunStage.NEW

    def test_the_same_wish_finds_its_default_folder(self) -> None:
        wanted = read_run_recipe(flags())
        plant_run(Path("runs/gpt2-lora-1"), read_run_recipe(flags(lr=0.1)), RunStatus.STOPPED)
        plant_run(Path("runs/gpt2-lora-2"), wanted, RunStatus.STOPPED)

        place = find_run_location(wanted, flags())
        assert (place.folder, place.stage) == (Path("runs/gpt2-lora-2"), RunStage.BEGUN)
        assert find_run_location(wanted, flags(fresh=True)).folder is None
        assert name_folder(wanted, "lora") == Path("runs/gpt2-lora-3")

    def test_a_finished_run_is_repeated_only_again(self) -> None:
        wanted = read_run_recipe(flags())
        plant_run(Path("runs/gpt2-lora-1"), wanted, RunStatus.FINISHED)
        assert find_run_location(wanted, flags()).stage is RunStage.FINISHED
        assert find_run_location(wanted, flags(again=True)).folder is None

    def test_an_own_folder_goes_on_or_is_numbered(self) -> None:
        asked = flags(output=Path("out"))
        plant_run(Path("out"), read_run_recipe(asked), RunStatus.FINISHED)
        assert find_run_location(read_run_recipe(asked), asked).stage is RunStage.FINISHED
        again = flags(output=Path("out"), again=True)
        assert find_run_location(read_run_recipe(again), again).folder == Path("out-2")

    def test_another_recipe_in_the_folder_is_refused(self) -> None:
        asked = flags(output=Path("out"), lr=0.1)
        plant_run(Path("out"), read_run_recipe(flags(output=Path("out"))), RunStatus.STOPPED)
        with pytest.raises(UsageError, match="learning_rate"):
            find_run_location(read_run_recipe(asked), asked)

    def test_other_peoples_files_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.tex").write_text("!")
        with pytest.raises(UsageError, match="holds no run"):
            find_run_location(read_run_recipe(flags(output=Path("out"))), flags(output=Path("out")))

    def test_what_is_started_over_is_kept(self) -> None:
        plant_run(Path("out"), read_run_recipe(flags()), RunStatus.FINISHED)
        plant_run(Path("out.before-1"), read_run_recipe(flags()), RunStatus.FINISHED)
        assert move_aside(Path("out")) == Path("out.before-2")
        assert (Path("out.before-2") / "recipe.json").is_file()

    def test_names_of_models_become_names_of_folders(self) -> None:
        wanted = read_run_recipe(flags("org/a model:v1.gguf"))
        assert name_folder(wanted, "qlora") == Path("runs/a-model-v1-qlora-1")


class TestHardware:
    def test_words_that_are_not_here_are_refused(self) -> None:
        with pytest.raises(SetupError, match="not what this machine has"):
            find_hardware(flags(), "8xH100-SXM")

    @pytest.mark.parametrize("on", ["slurm", "slurm:gpu", "k8s"])
    def test_clusters_are_for_submitting(self, on: str) -> None:
        with pytest.raises(UsageError, match="is a cluster"):
            find_hardware(flags(), on)

    def test_a_limit_lowers_what_is_planned_with(self) -> None:
        (group,) = find_hardware(flags(memory_limit="1GiB"), "2xcpu").groups
        assert group.node.gpu.memory_bytes == GIB
        assert group.node.num_gpus == 2

    def test_the_variable_is_a_limit_too(self) -> None:
        assert read_limit(flags(), {"TIGHTFIT_MEMORY_LIMIT_BYTES": "123"}) == 123
        assert read_limit(flags(memory_limit="1KiB"), {"TIGHTFIT_MEMORY_LIMIT_BYTES": "9"}) == 1024
        assert read_limit(flags(), {}) is None

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"nodes": 2}, "needs an address"),
            ({"nodes": 2, "rendezvous": "a:b:c"}, "HOST:PORT"),
            ({"nodes": 2, "rendezvous": "a:1", "node_rank": "2"}, "between 0 and 1"),
        ],
    )
    def test_nodes_must_know_where_to_meet(self, given: dict[str, Any], said: str) -> None:
        with pytest.raises(UsageError, match=said):
            read_rendezvous(flags(**given))

    def test_every_node_of_the_job_is_planned_with(self) -> None:
        (group,) = find_hardware(flags(nodes=3), "cpu").groups
        assert group.num_nodes == 3


class TestLines:
    def test_a_step_in_one_line(self) -> None:
        progress = Progress(num_steps=120, capacity_bytes=24 * GIB)
        for step in (39, 40):
            progress.add(make_step(step))

        assert render_step(make_step(40), progress) == (
            "step 40/120  loss 1.2346  lr 1.80e-04  5,210 tok/s  31% MFU  18.2/24.0 GiB  "
            "left 1 min 20 s"
        )

    def test_what_is_not_known_is_left_out_and_what_is_odd_is_said(self) -> None:
        progress = Progress(num_steps=0, capacity_bytes=24 * GIB)
        record = make_step(3, mfu_fraction=None, grad_norm=None, data_wait_seconds=0.25)
        assert render_step(record, progress) == (
            "step 3  loss 1.2346  lr 1.80e-04  5,210 tok/s  18.2/24.0 GiB  data wait 25%  "
            "step skipped (overflow)"
        )

    def test_an_evaluation_in_one_line(self) -> None:
        record = EvalRecord(step=40, loss=1.5, perplexity=4.48, num_trained_tokens=9, seconds=12.0)
        assert render_eval(record) == "eval at step 40  loss 1.5000  perplexity 4.48  12 s"

    def test_plain_lines_come_at_a_sensible_rate(self) -> None:
        reported: list[str] = []
        now = [0.0]
        progress = Progress(num_steps=101, capacity_bytes=24 * GIB)
        display = PlainDisplay(progress, write=reported.append, clock=lambda: now[0])
        for step in range(1, 102):  # one step a second
            now[0] += 1.0
            display.record(make_step(step))
        steps = [int(line.split()[1].split("/")[0]) for line in reported]

        assert steps[:5] == [1, 2, 3, 4, 5]
        assert steps[5:-1] == list(range(15, 100, 10))
        assert steps[-1] == 101

    def test_evaluations_and_events_are_always_told(self) -> None:
        reported: list[str] = []
        progress = Progress(num_steps=9, capacity_bytes=GIB)
        display = PlainDisplay(progress, write=reported.append, clock=lambda: 0.0)
        display.record(EventRecord(step=2, text="resumed \x1b[31m here"))
        display.record(EvalRecord(step=2, loss=1, perplexity=2.7, num_trained_tokens=1, seconds=1))
        assert reported[0] == "step 2: resumed ?[31m here\n"
        assert reported[1].startswith("eval at step 2")

    def test_a_terminal_without_cursor_gets_lines(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("TERM", "dumb")
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        with open_display(GIB, lambda: 9, is_silent=False) as display:
            display.record(make_step(1))
        assert "step 1/9" in capsys.readouterr().err

    def test_the_live_panel_says_what_the_records_say(self) -> None:
        from rich.console import Console

        progress = Progress(num_steps=120, capacity_bytes=24 * GIB)
        waiting = Console(width=90, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
        waiting.print(render_live(progress, "loading weights"))
        progress.add(make_step(59))
        progress.add(make_step(60, loss=2.23456))
        progress.add(EvalRecord(step=60, loss=1.5, perplexity=4, num_trained_tokens=1, seconds=1))
        waiting.print(render_live(progress, "ignored"))
        shown = waiting.export_text()
        waiting.file.close()

        assert "step 0/120" in shown
        assert "loading weights" in shown
        assert "step 60/120" in shown
        assert list_numbers(progress) == [
            "loss 1.3346", "lr 1.80e-04", "5,210 tok/s", "31% MFU", "peak 18.2/24.0 GiB",
            "data wait 0%", "eval 1.5000 (step 60)",
        ]  # fmt: skip

    def test_a_resumed_run_does_not_guess_from_the_old_pace(self) -> None:
        progress = Progress(num_steps=100, capacity_bytes=GIB)
        progress.add(make_step(49, seconds=10.0))
        progress.add(make_step(50, seconds=10.0))
        progress.add(make_step(41, seconds=1.0))
        assert progress.seconds_left == pytest.approx(59.0)


def test_a_disk_that_is_too_small_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from local_cases import make_plan

    plan = make_plan()
    needed = estimate_run_bytes(plan)
    base = plan.estimate.disk.components["base_model"]
    assert 0 < needed <= (plan.estimate.disk.bytes - base) * 1.06
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": needed - 1}))
    with pytest.raises(SetupError, match="free"):
        check_space(tmp_path / "not" / "there", plan)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe whose worker is the stand-in; what it does stands in STAND_IN."""
    plant_model(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    path = tmp_path / "job.yaml"
    path.write_text(
        "model: ./model\ndata: rows.jsonl\nmethod: lora\nseq_len: 64\nmax_steps: 6\n"
        "effective_batch: 8\non: cpu\noutput: out\n"
    )
    from local_cases import stand_in_command

    monkeypatch.setattr(
        "tightfit.clusters.local.launcher.worker_command",
        lambda _plan, run, *_, **__: stand_in_command(RunFolder(path=run)),
    )
    return path


def behave(folder: Path, **behaviour: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "behaviour.lock").unlink(missing_ok=True)
    (folder / "behaviour.json").write_text(json.dumps({"num_steps": 6, **behaviour}))


class TestWholeRuns:
    @pytest.fixture(autouse=True)
    def _behave_before_the_folder_is_made(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The stand-in's orders lie in the run folder, which must be empty until then."""
        self.orders: dict[str, Any] = {}

        def run_job(run: RunFolder, **more: Any) -> RunState:
            behave(run.path, **self.orders)
            return launcher.run_job(run, **more)

        monkeypatch.setattr("tightfit.api.train.run_job", run_job)

    def test_a_run_from_recipe_to_report(self, run: Run, job: Path, tmp_path: Path) -> None:
        answer = run("train", str(job))

        assert answer.code == 0, answer.err
        assert "LoRA" in answer.out
        assert "6 steps of 8 sequences" in answer.out
        assert "tightfit eval out" in answer.out
        assert "step 6/6" in answer.err
        folder = RunFolder(path=tmp_path / "out")
        plan = folder.read_plan()
        assert plan.training is not None
        assert plan.training.model_path == str(tmp_path / "model")
        assert plan.data is not None
        assert plan.data.num_rows == 40
        assert len(TokenStore(Path(folder.read_tokens().train))) == 40
        for path in (folder.report_path, folder.html_path, folder.environment_path):
            assert path.is_file()

    def test_a_finished_run_is_said_and_left_alone(self, run: Run, job: Path) -> None:
        run("train", str(job))
        again = run("train", str(job))
        assert again.code == 0
        assert "is finished" in again.out
        reported = run("train", str(job), "--json").json
        assert (reported["exit_code"], reported["report"]["status"]) == (0, "finished")

    def test_a_run_whose_command_died_after_the_last_step_is_concluded_once(
        self, run: Run, job: Path, tmp_path: Path
    ) -> None:
        from tightfit.runs.store import ledger_path, read_outcomes

        assert run("train", str(job)).code == 0
        folder, rows = RunFolder(path=tmp_path / "out"), read_outcomes()
        assert len(rows) == 1
        for is_stored in (True, False):
            folder.html_path.unlink()
            folder.report_path.unlink(missing_ok=True)
            if not is_stored:
                ledger = ledger_path()
                assert ledger is not None
                ledger.unlink()
            assert run("train", str(job)).code == 0
            assert folder.html_path.is_file()
            assert folder.report_path.is_file()
            assert read_outcomes() == rows

    def test_the_same_command_goes_on_after_a_death(
        self, run: Run, job: Path, tmp_path: Path
    ) -> None:
        self.orders = {"at": {"4": "once:die"}}
        first = run("train", str(job))
        assert first.code == 1
        assert "SIGKILL" in first.err
        assert first.err.count("error:") == 1

        second = run("train", str(job))
        assert second.code == 0, second.err
        assert "resumed at step 2" in second.err
        assert (tmp_path / "out" / "starts").read_text() == "2"

    def test_a_run_goes_on_by_its_folder(self, run: Run, job: Path) -> None:
        self.orders = {"at": {"4": "once:die"}}
        run("train", str(job))
        assert run("train", "out").code == 0
        refused = run("train", "out", "--lr", "1")
        assert (refused.code, "--lr cannot change" in refused.err) == (2, True)

    def test_out_of_memory_goes_on_and_is_remembered(
        self, run: Run, job: Path, tmp_path: Path
    ) -> None:
        from tightfit.runs.store import read_outcomes

        self.orders = {"at": {"3": "once:oom"}}
        answer = run("train", str(job))

        assert answer.code == 0, answer.err
        assert "Plan changed" in answer.out
        kept = Plan.model_validate_json((tmp_path / "out" / "plan.1.json").read_bytes())
        now = RunFolder(path=tmp_path / "out").read_plan()
        assert now.strategy != kept.strategy
        assert now.effective_batch == kept.effective_batch
        outcomes = read_outcomes()
        assert [outcome.status.value for outcome in outcomes] == ["out-of-memory", "finished"]
        assert outcomes[0].strategy == kept.strategy

    def test_a_failure_of_the_worker_is_one_message(self, run: Run, job: Path) -> None:
        self.orders = {"at": {"2": "nan"}}
        answer = run("train", str(job), "--json")
        assert answer.code == 4
        assert answer.json == {"error": "loss is nan", "remedy": "lower it", "exit_code": 4}

    def test_changed_data_is_not_gone_on_with(self, run: Run, job: Path, tmp_path: Path) -> None:
        self.orders = {"at": {"4": "once:die"}}
        run("train", str(job))
        with (tmp_path / "rows.jsonl").open("a") as stream:
            stream.write(json.dumps(ROWS[0]) + "\n")
        answer = run("train", str(job))
        assert answer.code == 2
        assert "data has changed" in answer.err
        self.orders = {}
        assert run("train", str(job), "--fresh").code == 0
        assert (tmp_path / "out.before-1" / "plan.json").is_file()

    def test_rows_that_are_left_out_are_told(self, run: Run, job: Path, tmp_path: Path) -> None:
        with (tmp_path / "rows.jsonl").open("a") as stream:
            stream.write(json.dumps({**ROWS[0], list(ROWS[0])[-1]: ""}) + "\n")
        assert "1 row: no answer to learn; left out" in run("train", str(job), "--dry-run").out

    def test_a_dry_run_starts_nothing(self, run: Run, job: Path, tmp_path: Path) -> None:
        reported = run("train", str(job), "--dry-run", "--json").json
        assert Plan.model_validate(reported["plan"]).training is not None
        assert not (tmp_path / "out").exists()

    def test_a_saved_plan_is_run_as_it_is(self, run: Run, job: Path, tmp_path: Path) -> None:
        reported = run("train", str(job), "--dry-run", "--json", "--set", "micro_batch=2").json
        (tmp_path / "plan.json").write_text(json.dumps(reported["plan"]))
        answer = run("train", "plan.json", "--output", "other", "--max-steps", "6")
        assert answer.code == 0, answer.err
        saved = Plan.model_validate(reported["plan"])
        assert RunFolder(path=tmp_path / "other").read_plan().strategy == saved.strategy

    def test_nothing_that_fits_is_refused_before_anything_starts(
        self, run: Run, job: Path, tmp_path: Path
    ) -> None:
        answer = run("train", str(job), "--memory-limit", "1MiB")
        assert answer.code == 5
        assert "--buy" in answer.err
        assert not (tmp_path / "out").exists()

    def test_what_a_rule_forbids_is_not_a_matter_of_hardware(self, run: Run, job: Path) -> None:
        answer = run("train", str(job), "--set", "fp8=true")
        assert answer.code == 5
        remedy = f"tightfit plan {job}    (without --set fp8=true)"
        assert remedy in answer.err
