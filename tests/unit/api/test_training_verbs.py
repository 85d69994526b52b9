"""The training verbs as a Python program calls them: keywords in, typed results out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tightfit.api.calibrate import stored_calibration
from tightfit.api.estimate import estimate, zero_table
from tightfit.api.options.training import PlanOptions
from tightfit.api.plan import NoPlanError, buy, plan
from tightfit.api.prepare import InvalidRowsError, prepare
from tightfit.api.train import train
from tightfit.core.errors import NotFoundError, UsageError, UserError
from tightfit.core.settings import Method
from tightfit.estimation.result import Verdict
from word_model import ROWS, plant_model


def test_estimate_of_a_catalogue_model() -> None:
    found = estimate("Llama-2-7b", on="V100-32GB", method="lora", seq_len=1024)

    assert found.estimate.verdict is Verdict.FITS
    assert found.strategy.method is Method.LORA
    assert found.strategy.seq_len == 1024
    assert found.estimate.gpu.peak_reserved_bytes > found.spec.num_params * 2
    assert found.traced is None


def test_zero_table_from_two_numbers() -> None:
    table = zero_table(total_params="2851e6", largest_layer_params="32e6", gpus_per_node=8)

    assert (table.total_params, len(table.rows)) == (2_851_000_000, 6)


def test_plans_are_ordered_and_can_be_saved_and_read(tmp_path: Path) -> None:
    found = plan("gpt2", on="T4", top=3)
    saved = tmp_path / "plan.json"
    saved.write_text(found.best.model_dump_json())

    assert len(found.plans) == 3
    assert plan(str(saved)).plans == (found.best,)
    with pytest.raises(UsageError, match="saved plan"):
        plan(str(saved), on="T4")


def test_options_object_and_keywords_mean_the_same() -> None:
    options = PlanOptions("gpt2", on="T4", top=1)

    assert plan(options).best == plan("gpt2", on="T4", top=1).best


def test_no_plan_says_what_was_excluded_and_what_to_try() -> None:
    with pytest.raises(NoPlanError, match="GiB short") as caught:
        plan("Llama-3.1-70B", on="T4")

    assert caught.value.exit_code == 5
    assert "--buy" in caught.value.remedy
    assert caught.value.result.num_considered > 0


def test_buy_is_cheapest_first() -> None:
    prices = [offer.usd_per_hour for offer in buy("gpt2").offers]

    assert len(prices) > 3
    assert min(prices) > 0


@pytest.mark.parametrize("verb", [estimate, plan, prepare, train])
def test_a_name_that_is_no_model_is_a_user_error(verb: object, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n')
    more: dict[str, object] = {"on": "T4"} if verb in (estimate, plan) else {}
    if verb is prepare:
        more = {"data": [str(rows)]}
    elif verb is train:
        more = {"data": rows}

    with pytest.raises(UserError) as caught:
        verb("no-such-model-at-all", **more)  # type: ignore[operator]

    assert caught.value.remedy


def test_keywords_are_checked_as_options_are() -> None:
    with pytest.raises(UsageError, match="--seq-len"):
        plan("gpt2", on="T4", seq_len=-1)


def test_no_calibration_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGHTFIT_LEDGER", str(tmp_path / "ledger.sqlite"))

    with pytest.raises(NotFoundError) as caught:
        stored_calibration(device="cpu")

    assert caught.value.remedy == "tightfit calibrate --device cpu"


def test_data_without_a_recipe_reports_progress_and_bad_rows(tmp_path: Path) -> None:
    plant_model(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    seen: list[str] = []
    found = prepare(
        str(tmp_path / "model"),
        data=[str(rows)],
        seq_len=64,
        progress=lambda what, _done, _of: seen.append(what),
    )

    assert found.encoded.report.train.num_rows == found.batching.num_rows == len(ROWS)
    assert set(seen) <= {"encoding data"}
    rows.write_text(json.dumps(ROWS[0]) + '\n{"instruction": 3, "output": "x"}\n')
    with pytest.raises(InvalidRowsError) as caught:
        prepare(str(tmp_path / "model"), data=[str(rows)], seq_len=64)
    assert caught.value.num_rows == len(caught.value.rows) == 1


def test_runs_are_listed_under_a_name_that_no_package_has(tmp_path: Path) -> None:
    import tightfit

    assert tightfit.list_runs(tmp_path) == []
    with pytest.raises(UserError):
        tightfit.read_runs("no-such-run")
