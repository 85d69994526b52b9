"""Tasks of lm-eval before a model is loaded: names, files, code, network; and what is compared."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from tightfit.core.errors import UserError
from tightfit.core.findings import Interval
from tightfit.evaluation.suite import _TaskRows, compare_rows
from tightfit.evaluation.suite_tasks import contained, find_data, find_tasks, offline, open_task

OWN = """
task: own
dataset_path: json
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: ["a", "b"]
doc_to_target: right
"""


def write_task(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "own.yaml").write_text(text)
    return folder


def test_a_missing_file_is_named_with_its_fields(tmp_path: Path) -> None:
    [task] = find_tasks(["arc_easy"], None, allows_code=False)
    with pytest.raises(UserError) as found:
        find_data(task, tmp_path, 0)
    for part in ("arc_easy", "allenai/ai2_arc (ARC-Easy)", "question, choices", "test.jsonl"):
        assert part in found.value.problem
    assert [one.name for one in find_tasks(["ai2_arc"], None, allows_code=False)] == [
        "arc_challenge",
        "arc_easy",
    ]
    with pytest.raises(UserError, match="arc_easy"):
        find_tasks(["arc_eazy"], None, allows_code=False)


@pytest.mark.parametrize(
    "place",
    [
        "openai/gsm8k/main/test.jsonl",
        "openai/gsm8k/main/test-00000-of-00001.parquet",
        "openai/gsm8k/main/data/test.csv",
        "openai__gsm8k/main/test.json",
        "gsm8k/main/test.jsonl",
        "gsm8k/test.jsonl",
        "gsm8k.jsonl",
    ],
)
def test_rows_are_found_where_the_documentation_says(tmp_path: Path, place: str) -> None:
    [task] = find_tasks(["gsm8k"], None, allows_code=False)
    path = tmp_path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    assert find_data(task, tmp_path, 0).splits == {"test": (path,)}


@pytest.mark.parametrize(
    "line",
    [
        "process_docs: !function code.run",
        "process_docs: !<!function> code.run",
        "fewshot_config: {samples: !function code.run}",
        "include: base.yaml",
        "unsafe_code: true",
        "class: !function code.Task",
    ],
)
def test_code_of_a_task_file_is_refused(tmp_path: Path, line: str) -> None:
    folder = write_task(tmp_path / "own", OWN + line + "\n")
    (folder / "base.yaml").write_text("process_docs: !function code.run\n")
    (folder / "code.py").write_text("raise SystemExit('code was run')\n")
    with pytest.raises(UserError):
        find_tasks(["own"], folder, allows_code=False)


def test_objects_of_python_are_refused(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "own", OWN + "x: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(UserError, match="no task file"):
        find_tasks(["own"], folder, allows_code=True)


def test_templates_reach_no_python(tmp_path: Path) -> None:
    text = OWN.replace("{{question}}", "{{question.__class__.__mro__[1].__subclasses__()}}")
    [task] = find_tasks(["own"], write_task(tmp_path / "own", text), allows_code=False)
    (tmp_path / "own.jsonl").write_text(json.dumps({"question": "q", "right": 0}) + "\n")
    with contained(), pytest.raises(UserError, match="unsafe"):
        open_task(find_data(task, tmp_path, 0), 0)


def test_rows_without_a_field_are_one_error(tmp_path: Path) -> None:
    [task] = find_tasks(["own"], write_task(tmp_path / "own", OWN), allows_code=False)
    (tmp_path / "own.jsonl").write_text(json.dumps({"text": "q"}) + "\n")
    with contained(), pytest.raises(UserError) as found:
        open_task(find_data(task, tmp_path, 0), 0)
    assert "own.jsonl" in found.value.problem
    assert "question, right" in found.value.remedy


def test_metrics_of_the_network_are_refused(tmp_path: Path) -> None:
    text = OWN + "metric_list: [{metric: ../evil}]\n"
    [task] = find_tasks(["own"], write_task(tmp_path / "own", text), allows_code=False)
    (tmp_path / "own.jsonl").write_text(json.dumps({"question": "q", "right": 0}) + "\n")
    with contained(), pytest.raises(UserError, match="network"):
        open_task(find_data(task, tmp_path, 0), 0)


def test_offline_holds_for_libraries_that_were_imported_before() -> None:
    import datasets
    import huggingface_hub.constants as hub

    before = (hub.HF_HUB_OFFLINE, os.environ.get("HF_HUB_OFFLINE"))
    with offline():
        assert hub.HF_HUB_OFFLINE
        assert os.environ["HF_DATASETS_OFFLINE"] == "1"
        with pytest.raises(Exception, match=r"(?i)offline|couldn't reach|cannot reach|Hub"):
            datasets.load_dataset("openai/gsm8k-that-is-nowhere", "main")
    assert (hub.HF_HUB_OFFLINE, os.environ.get("HF_HUB_OFFLINE")) == before


def test_lm_eval_is_left_as_it_was() -> None:
    import lm_eval.api.task
    import lm_eval.utils

    before = (lm_eval.utils.env, lm_eval.api.task.tqdm)
    with contained():
        assert lm_eval.utils.env is not before[0]
        assert list(lm_eval.api.task.tqdm([1], disable=False)) == [1]
    assert (lm_eval.utils.env, lm_eval.api.task.tqdm) == before


def rows_of(name: str, values: list[object], *, is_lower_better: bool = False) -> _TaskRows:
    return _TaskRows(
        key="",
        engine="",
        num_fewshot=0,
        rows=tuple(str(n) for n in range(len(values))),
        values={name: tuple(values)},
        scores={name: 0.5},
        is_lower_better={name: is_lower_better},
    )


def test_differences_are_of_pairs() -> None:
    base = [1.0] * 60 + [0.0] * 40
    tuned = [1.0] * 40 + [0.0] * 60
    [score] = compare_rows(
        "t", {"base": rows_of("acc,none", [*base]), "tuned": rows_of("acc,none", [*tuned])}
    )
    change = score.differences["tuned"]
    # McNemar's 20 against 0 of 100 pairs: -0.2, and surely not chance.
    assert change.value == pytest.approx(-0.2)
    assert change.high < 0
    assert score.scores["base"].error == pytest.approx(math.sqrt(0.24 / 99))
    with pytest.raises(UserError, match="different rows"):
        compare_rows(
            "t", {"base": rows_of("acc,none", [1.0]), "tuned": rows_of("acc,none", [1.0, 0.0])}
        )


def test_perplexities_are_compared_by_weight() -> None:
    base = [(-10.0 - n % 3, 5) for n in range(30)]
    same = compare_rows(
        "t",
        {
            name: rows_of("word_perplexity,none", [*base], is_lower_better=True)
            for name in ("base", "tuned")
        },
    )[0]
    assert same.differences["tuned"] == Interval(value=0.0, low=0.0, high=0.0)
    worse = [(value - 1, weight) for value, weight in base]
    changed = compare_rows(
        "t",
        {
            "base": rows_of("word_perplexity,none", [*base], is_lower_better=True),
            "tuned": rows_of("word_perplexity,none", [*worse], is_lower_better=True),
        },
    )[0].differences["tuned"]
    assert changed.value == pytest.approx(math.exp(12 / 5) - math.exp(11 / 5))
    assert changed.low > 0
