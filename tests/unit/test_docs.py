"""What the documentation names: every constant, every result file, and figures as the files say."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from tightfit.cli.command import VERBS, build_app
from tightfit.core.attention import Attention
from tightfit.core.recipe import read_recipe
from tightfit.core.settings import Method, Sharding
from tightfit.core.strategy import Strategy
from tightfit.data.formats import FORMATS
from tightfit.data.templates import list_templates
from tightfit.estimation.activations import estimate_layer_bytes
from tightfit.models.resolve import resolve_model
from tightfit.runs.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
FORMULAS = ROOT / "docs" / "formulas.md"
TRAINING = ROOT / "docs" / "training.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def holds_number(value: ast.expr) -> bool:
    return any(
        isinstance(node, ast.Constant) and type(node.value) in (int, float)
        for node in ast.walk(value)
    )


def numeric_constants(body: list[ast.stmt]) -> Iterator[str]:
    """Names in capitals that a module gives a number, or a table of numbers."""
    for node in body:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            continue
        names = (target.id for target in targets if isinstance(target, ast.Name))
        yield from (name for name in names if name.isupper() and holds_number(value))


def undocumented_constants(path: Path) -> Iterator[str]:
    """Numbers without a string below them; neighbours in a row may share one."""
    waiting: list[str] = []
    for node in ast.parse(path.read_text()).body:
        constants = list(numeric_constants([node]))
        is_string = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if constants:
            waiting += constants
        elif is_string:
            waiting = []
        else:
            yield from waiting
            waiting = []


def test_every_constant_of_the_formulas_states_its_source() -> None:
    package = ROOT / "src" / "tightfit"
    modules = [*sorted((package / "estimation").glob("*.py")), package / "hardware" / "rates.py"]
    found = [
        name for path in modules for name in numeric_constants(ast.parse(path.read_text()).body)
    ]
    bare = {name for path in modules for name in undocumented_constants(path)}

    assert len(found) > 60, "the scan lost its constants"
    assert bare == {"NO_ADAPTERS"}


def test_constants_that_the_formulas_page_names_exist() -> None:
    named = set(re.findall(r"`([A-Z][A-Z0-9_]*_[A-Z0-9_]+)`", FORMULAS.read_text()))
    source = "".join(path.read_text() for path in (ROOT / "src" / "tightfit").rglob("*.py"))

    assert len(named) > 30, "the scan lost its names"
    assert {name for name in named if not re.search(rf"^{name}\b", source, re.M)} == set()


def test_result_files_that_documents_mention_exist() -> None:
    mentioned = {
        (page.name, name)
        for page in PAGES
        for name in re.findall(r"benchmarks/results/([\w-]+\.json)", page.read_text())
    }

    assert len(mentioned) >= 5, "the scan lost its mentions"
    assert {pair for pair in mentioned if not (RESULTS / pair[1]).exists()} == set()


def test_worked_layer_is_what_the_estimator_counts_and_the_gpu_held() -> None:
    text = FORMULAS.read_text()
    written = int(re.findall(r"\*\*sum\*\* \| \| \*\*([\d,]+)\*\*", text)[0].replace(",", ""))
    section = text.split("### A Llama layer, worked")[1].split("**sum**")[0]
    terms = [int(cell.replace(",", "")) for cell in re.findall(r"\| ([\d,]+) \|\n", section)]
    spec = resolve_model("Llama-3.2-1B")
    strategy = Strategy(method=Method.FULL, checkpointing=False, attention=Attention.SDPA)
    cases = json.loads((RESULTS / "h200_steps.json").read_text())["cases"]
    (row,) = (case for case in cases if case["name"].startswith("Llama-3.2-1B task=saved"))
    measured = row["saved"]["full"]["bytes_per_token_per_layer"]

    assert sum(terms) == written
    assert estimate_layer_bytes(spec, spec.blocks[0], strategy).saved == written
    assert f"{measured:,}" in text
    assert written == pytest.approx(measured, rel=0.005)


def accuracy_figures() -> list[tuple[str, int, float, float]]:
    """Start of the row, count, median and 90th percentile, as the result files have them."""

    def read(name: str) -> Any:
        return json.loads((RESULTS / name).read_text())

    steps, others = read("h200_memory.json")["total"], read("published_memory.json")["total"]
    speed = read("published_time.json")["groups"]
    return [
        ("allocated", steps["cases"], steps["median_error"], steps["p90_error"]),
        ("reserved", steps["cases"], steps["median_reserved_error"], steps["p90_reserved_error"]),
        ("memory that", others["memory_rows"], others["median_error"], others["p90_error"]),
        *(
            (start, speed[group]["jobs"], speed[group]["median_error"], speed[group]["p90_error"])
            for start, group in (
                ("speed, our own table", "our own table, H200"),
                ("speed, training steps", "measured steps, H200"),
                ("speed that", "all published"),
            )
        ),
    ]


@pytest.mark.parametrize(("start", "count", "median", "p90"), accuracy_figures())
def test_accuracy_is_what_the_result_files_say(
    start: str, count: int, median: float, p90: float
) -> None:
    (line,) = re.findall(rf"^\| {start}.*$", FORMULAS.read_text(), re.M)

    assert f"| {count} | {100 * median:.1f}% | {100 * p90:.1f}% |" in line


def _find_target(page: Path, target: str) -> Path:
    """A bare heading is one of the page itself."""
    name = target.partition("#")[0]
    return page.parent / name if name else page


def test_links_lead_somewhere() -> None:
    links = [
        (page.name, _find_target(page, target), target.partition("#")[2])
        for page in PAGES
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text())
    ]

    assert len(links) > 15, "the scan lost its links"
    assert [link for link in links if not link[1].exists()] == []
    for page, target, heading in links:
        if heading:
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.M)
            assert heading in {title.lower().replace(" ", "-") for title in headings}, page


def test_commands_in_the_pages_exist() -> None:
    """The generated page of commands is compared with --help elsewhere."""
    verbs = typer.main.get_command(build_app()).commands  # type: ignore[attr-defined]
    num_options = 0
    for page in PAGES:
        if page.name == "cli.md":
            continue
        for verb, rest in re.findall(r"tightfit ([a-z]+)\b([^\n`|]*)", page.read_text()):
            if verb not in VERBS:
                continue
            known = {name for p in verbs[verb].params for name in (*p.opts, *p.secondary_opts)}
            used = set(re.findall(r"(?<!\S)--[a-z-]+", rest.partition("#")[0]))
            num_options += len(used)
            assert used <= known | {"--help"}, f"{page.name}: tightfit {verb}{rest}"
    assert num_options > 20, "the scan lost its commands"


def test_recipes_in_the_training_page_are_recipes(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", TRAINING.read_text(), re.S)
    path = tmp_path / "recipe.yaml"

    assert len(blocks) == 4
    for block in blocks:
        path.write_text(block)
        assert read_recipe(path).data


def test_the_training_page_lists_what_there_is() -> None:
    text = TRAINING.read_text()
    paths = [
        getattr(RunFolder(path=Path()), name)
        for name in dir(RunFolder)
        if name.endswith("_path") and not name.startswith("_")
    ]

    assert len(paths) == 13, "the scan lost the run folder's files"
    assert [str(path) for path in paths if f"`{path}" not in text] == []
    assert [name for name in FORMATS if f"| {name} |" not in text] == []
    assert [name for name in list_templates() if f"`{name}`" not in text] == []
    table = text.split("## Methods and precision")[1].split("## ")[0]
    (header,) = re.findall(r"^\| \| (single.*) \|$", table, re.M)
    assert set(re.split(r"[,|]\s*|\s+\|\s*", header)) - {""} == {kind.value for kind in Sharding}


def test_rooms_are_those_that_are_enforced() -> None:
    """pyproject.toml is read as text: tomllib came with Python 3.11."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    layers = (ROOT / "pyproject.toml").read_text().split("layers = [")[1].split("]")[0]
    enforced = [line.replace("tightfit.", "") for line in re.findall(r'"(.+)"', layers)]
    (written,) = re.findall(r"^`(cli > .+)`$", text, re.M)
    folders = {path.parent.name for path in (ROOT / "src" / "tightfit").glob("*/__init__.py")}

    assert written.split(" > ") == enforced
    assert set(re.findall(r"^\| `(\w+)/` \|", text, re.M)) == folders


def load_readme_writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "write_readme", ROOT / "scripts" / "write_readme.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_training_figures_name_what_failed() -> None:
    compared = [
        {"name": "GPU memory, reserved", "measured": 2.0**31, "error_percent": 7.75},
        {"name": "tokens per second", "measured": 12345.6, "error_percent": -4.63},
    ]
    jobs = {
        "lora": {"exit_code": 0, "report": {"compared": compared}},
        "full": {"exit_code": 6, "said": "error: no room"},
    }

    lines = load_readme_writer().make_training_figures({"jobs": jobs})

    assert "| lora | 2.0 GiB | +7.8% | 12,346 | -4.6% |" in lines
    assert lines[-1] == "Did not finish: full."


def test_missing_training_figures_fail_the_check_with_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = load_readme_writer()
    monkeypatch.setattr(writer, "TRAINING", ROOT / "benchmarks" / "results" / "gone.json")
    monkeypatch.setattr(sys, "argv", ["write_readme.py", "--check"])

    assert writer.main() == 1
    assert "gone.json is missing" in capsys.readouterr().err
