"""What the page asks of the API: plans of typed words, previews of data, and what it refuses."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import tightfit
from page_data import write_examples
from small_models import make_tokenizer
from tightfit.api.options.serving import UiOptions
from tightfit.api.options.training import PlanOptions, TrainOptions
from tightfit.api.ui import explore, explore_without_paths, make_verbs, preview
from tightfit.cli.command import load_options
from tightfit.core.errors import NotFoundError, UsageError, UserError
from tightfit.core.options import list_declared
from tightfit.hardware.resolve import resolve_hardware
from tightfit.serving.page.components import escape_html
from tightfit.serving.page.data_tab import DataForm
from tightfit.serving.page.plan_tab import PlanForm, render_answer

CONFIG = (
    '{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,'
    ' "num_attention_heads": 4, "vocab_size": 400, "max_position_embeddings": 512}'
)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "my model"
    make_tokenizer(folder)
    (folder / "config.json").write_text(CONFIG)
    return folder


def test_the_verb_is_offered_to_python() -> None:
    assert callable(tightfit.ui)
    with pytest.raises(UsageError, match="no password"):
        tightfit.ui(host="0.0.0.0")


def test_the_plans_are_those_of_the_command_that_is_shown(model: Path) -> None:
    data = write_examples(model.parent / "rows.jsonl", num_rows=2, has_faults=False)
    form = PlanForm(
        job=str(model), on="T4", data=str(data), seq_len="256", effective_batch="8", method="lora"
    )
    answer = explore(form)

    planning, training = map(shlex.split, answer.commands)
    assert planning[:3] == ["tightfit", "plan", str(model)]
    assert training[:3] == ["tightfit", "train", str(model)]
    typed = dict(zip(planning[3::2], planning[4::2], strict=True))
    given: dict[str, Any] = {_field(name): value for name, value in typed.items()}
    again = tightfit.plan(str(model), **given)
    assert [plan.strategy for plan in answer.result.plans] == [
        plan.strategy for plan in again.plans
    ]
    known = {option.name for option in list_declared(TrainOptions).values()}
    assert {word for word in training if word.startswith("--")} <= known


def _field(option: str) -> str:
    return next(
        name for name, declared in list_declared(PlanOptions).items() if declared.name == option
    )


def test_what_would_fit_can_be_planned_by_its_words() -> None:
    answer = explore(PlanForm(job="Llama-3.1-70B", on="RTX-4090", method="full"))
    assert answer.error is not None
    shown = render_answer(answer)
    assert escape_html(answer.error.problem) in shown
    words = re.findall(r'data-value="([^"]+)"', shown)
    assert words
    for word, offer in zip(words, answer.offers, strict=False):
        (group,) = resolve_hardware(word).groups
        assert (group.node.num_gpus, group.node.gpu.name) == (offer.num_gpus, offer.gpu.name)


def test_a_scheduler_is_not_asked_at_every_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tightfit.hardware.slurm.probe_slurm_inventory", pytest.fail)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: Llama-2-7b\non: slurm:gpu\n")
    for form in (PlanForm(job="Llama-2-7b", on="slurm"), PlanForm(job=str(recipe))):
        with pytest.raises(UsageError, match="scheduler") as caught:
            explore(form)
        assert caught.value.remedy.startswith("tightfit plan ")


def test_data_is_read_once_while_its_file_stays_as_it_is(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_examples(model.parent / "rows.jsonl", num_rows=2, has_faults=False)
    form = PlanForm(job="Llama-2-7b", on="T4", data=str(data))
    first = explore(form).result.plans[0].data
    with monkeypatch.context() as patch:
        patch.setattr("tightfit.data.profile.profile_dataset", pytest.fail)
        assert explore(form).result.plans[0].data == first
    data.write_text(data.read_text() * 2)
    changed = explore(form).result.plans[0].data
    assert first is not None
    assert changed is not None
    assert changed.num_rows == 2 * first.num_rows


def test_a_preview_shows_rows_and_findings(model: Path, tmp_path: Path) -> None:
    data = write_examples(tmp_path / "rows.jsonl")
    found = preview(DataForm(data=str(data), model=str(model)))
    assert {finding.kind for finding in found.report.findings} == {
        "unreadable", "empty-answer", "duplicate",
    }  # fmt: skip
    assert sum(item.num_rows for item in found.lengths) == found.report.train.num_rows
    (row,) = preview(DataForm(data=str(data), model=str(model), row="2")).rows
    learnt = "".join(piece.text for piece in row.pieces if piece.is_trained)
    assert learnt == "SELECT name FROM band ORDER BY name;<|im_end|>"
    with pytest.raises(NotFoundError, match="line 3"):
        preview(DataForm(data=str(data), model=str(model), row="3"))


@pytest.mark.parametrize(
    "fields",
    [
        {"job": "/etc"},
        {"job": "~"},
        {"job": "./here"},
        {"job": "a/../../b"},
        {"job": "recipe.yaml"},
        {"job": "config.json"},
        {"job": "folder"},
        {"job": "folder/inside"},
        {"job": "Llama-2-7b", "data": "rows.jsonl"},
        {"job": "Llama-2-7b", "on": "cluster.yaml"},
        {"job": "Llama-2-7b", "on": "folder"},
    ],
)
def test_a_page_that_others_can_open_reads_no_path(
    fields: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="may be a file"):
        explore_without_paths(PlanForm(**{"on": "RTX-4090", **fields}))


def test_a_page_that_others_can_open_still_plans_by_name() -> None:
    verbs = make_verbs(UiOptions(), reads_paths=False)
    assert verbs.preview is None
    assert verbs.open_models is None
    for job, on in (("meta-llama/Llama-3.1-8B", "2n x 4xA100-40GB"), ("7B-params", "RTX-4090")):
        assert verbs.explore(PlanForm(job=job, on=on)).result.plans
    with pytest.raises(UserError):
        verbs.explore(PlanForm(job="", on="RTX-4090"))


def test_help_says_who_can_open_it() -> None:
    options, _, examples = load_options("ui")
    assert "reads no paths" in " ".join((options.__doc__ or "").split())
    assert "ssh -L" in examples


def test_an_empty_model_field_is_named() -> None:
    with pytest.raises(UserError, match="No model is named"):
        explore(PlanForm(job=" ", on="T4"))
