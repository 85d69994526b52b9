"""The command starts fast: nothing heavy is loaded before it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from machine_pace import children_seconds

HEAVY = {"torch", "transformers", "datasets", "gradio", "matplotlib", "numpy", "pyarrow"}
NOT_FOR_HELP = HEAVY | {"pydantic", "rich", "yaml", "psutil", "pynvml"}
HELP_FACTOR = 1.5
"""Of what importing typer alone takes; pydantic would be as much again."""


def loaded_by(program: str) -> set[str]:
    ending = "import sys; print('\\n' + ' '.join(sys.modules))"
    out = subprocess.check_output([sys.executable, "-c", f"{program}; {ending}"], text=True)
    return set(out.splitlines()[-1].split())


def test_cli_starts_without_heavy_imports() -> None:
    loaded = loaded_by("from tightfit.cli.command import build_app; build_app()")
    assert "tightfit.api.options.training" in loaded  # the probe really looked
    assert NOT_FOR_HELP.isdisjoint(loaded)


def test_help_needs_neither_pydantic_nor_rich() -> None:
    loaded = loaded_by("from tightfit.cli.app import main; main(['--help'])")
    assert NOT_FOR_HELP.isdisjoint(loaded)


def test_the_help_of_a_verb_loads_no_room() -> None:
    """Pydantic is typer's own doing there: newer versions read every option with it."""
    loaded = loaded_by("from tightfit.cli.app import main; main(['plan', '--help'])")
    assert (NOT_FOR_HELP - {"pydantic"}).isdisjoint(loaded)
    rooms = {"core.strategy", "models", "hardware", "data", "estimate", "planning"}
    assert {f"tightfit.{room}" for room in rooms}.isdisjoint(loaded)


@pytest.mark.parametrize(
    "argv",
    [
        ["plan", "Llama-2-7b", "--on", "4xV100-32GB"],
        ["estimate", "Llama-2-7b", "--on", "4xV100-32GB", "--json"],
        ["models"],
        ["hardware"],
        ["doctor"],
    ],
    ids=lambda argv: argv[0],
)
def test_no_verb_loads_torch(argv: list[str]) -> None:
    loaded = loaded_by(f"from tightfit.cli.app import main; main({argv!r})")
    assert "pydantic" in loaded
    assert HEAVY.isdisjoint(loaded)


def test_json_is_made_without_rich() -> None:
    argv = ["plan", "gpt2", "--on", "T4", "--json"]
    assert "rich" not in loaded_by(f"from tightfit.cli.app import main; main({argv!r})")


def test_help_costs_little_more_than_the_library_it_is_made_with() -> None:
    """In processor time of the best of five, taking turns: machines are slow now and then."""

    def spend(*words: str) -> float:
        before = children_seconds()
        subprocess.run([sys.executable, *words], capture_output=True, check=True)
        return children_seconds() - before

    ways = (("-m", "tightfit.cli.app", "--help"), ("-c", "import typer"))
    rounds = [[spend(*words) for words in ways] for _ in range(5)]
    ours, library = (min(times) for times in zip(*rounds, strict=True))
    assert ours < HELP_FACTOR * library
