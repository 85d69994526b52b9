"""`tightfit init`: Ask for model, data and hardware, and write a commented recipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tightfit.api import init as api
from tightfit.api.init import Candidate, InitOptions, InitResult
from tightfit.api.options.common import Output
from tightfit.cli.plan import describe_data
from tightfit.cli.terminal.error_report import end_with
from tightfit.cli.terminal.output import announce, progress_bar, show_json, write_err
from tightfit.cli.terminal.screen import VERDICT_STYLES, Cell, plain, render_pairs, show, styled
from tightfit.core.errors import UserError
from tightfit.core.options import read_word
from tightfit.core.settings import RecipeMethod, words_of
from tightfit.core.text import sanitize
from tightfit.core.units import render_bytes
from tightfit.planning.describe import describe_how
from tightfit.planning.plan import Plan

if TYPE_CHECKING:
    from rich.console import RenderableType

NO_EVAL = "none"
_METHODS = {
    RecipeMethod.AUTO: "the planner chooses",
    RecipeMethod.FULL: "every weight",
    RecipeMethod.LORA: "adapters",
    RecipeMethod.QLORA: "adapters, over 4-bit weights",
}


def init(options: InitOptions, output: Output) -> None:
    """Ask for what is missing where somebody can answer, write the recipe, show its plan."""
    api.check_free(options)
    if api.list_missing(options) and sys.stdin is not None and sys.stdin.isatty():
        options = ask(options)
    with progress_bar() as progress:
        result = api.init(replace(options, progress=progress))
    announce(result.path)
    document = _describe(result)
    if result.error is not None:
        raise end_with(result.error, document, as_json=output.as_json)
    if output.as_json:
        show_json(document)
    elif result.plan is not None:
        show(_render(result, result.plan))


def ask(options: InitOptions) -> InitOptions:
    """The options with an answer for each that was not given. Questions go to stderr."""
    found = api.find_candidates(Path())
    given: dict[str, Any] = {}
    if options.model is None:
        what = "Model (a catalogue name, cached hub id, folder or GGUF file)"
        given["model"] = _ask_one(what, found.models, api.check_model)
    if options.data is None:
        given["data"] = _ask_one("Rows to train on", found.data, api.check_data)
    if options.eval is None:
        nothing = Candidate(value=NO_EVAL, about="no evaluation")
        answer = _ask_one(
            "Rows to evaluate on (a file, or a share held back, like 0.05)",
            (*found.held_out, nothing),
            lambda text: None if text == NO_EVAL else api.check_eval(text),
        )
        given["eval"] = None if answer == NO_EVAL else answer
    if options.on is None:
        what = "Hardware (or words, like 4xV100-32GB)"
        given["on"] = _ask_one(what, found.hardware, api.check_hardware)
    if options.method is None:
        words = words_of(RecipeMethod)
        known = [Candidate(value=word.value, about=about) for word, about in _METHODS.items()]
        words = words_of(RecipeMethod)
        given["method"] = _ask_one(
            "What is trained", known, lambda text: read_word(text, words, option="--method")
        ).lower()
    return replace(options, **given)


def _ask_one(question: str, candidates: Sequence[Candidate], check: Callable[[str], object]) -> str:
    """An answer that passes its check: a number of the list, or what is typed."""
    write_err(f"\n{question}:\n")
    width = max((len(candidate.value) for candidate in candidates), default=0)
    for number, candidate in enumerate(candidates, start=1):
        value = sanitize(candidate.value).ljust(width)
        write_err(f"  {number}  {value}  {sanitize(candidate.about)}\n")
    while True:
        answer = _read_line("> [1] " if candidates else "> ") or ("1" if candidates else "")
        if not answer:
            continue
        if answer.isdecimal() and 1 <= int(answer) <= len(candidates):
            answer = candidates[int(answer) - 1].value
        try:
            check(answer)
        except UserError as error:
            write_err(f"{error.problem}\n  try: {error.remedy}\n")
        else:
            return answer


def _read_line(prompt: str) -> str:
    """Not `input` nor typer's own question: both write to stdout, which is the answer's."""
    write_err(prompt)
    typed = sys.stdin.readline()
    if not typed:
        raise typer.Abort
    return typed.strip()


def _describe(result: InitResult) -> dict[str, Any]:
    return {
        "path": str(result.path),
        "recipe": result.recipe.model_dump(mode="json", exclude_none=True),
        "plan": None if result.plan is None else result.plan.model_dump(mode="json"),
        "next": list(result.next_commands),
    }


def _render(result: InitResult, best: Plan) -> Iterator[RenderableType]:
    gpu, verdict = best.estimate.gpu, best.estimate.verdict.value
    memory = styled(verdict.replace("_", " "), VERDICT_STYLES[verdict])
    memory.append(
        f", {render_bytes(gpu.peak_reserved_bytes)} of {render_bytes(gpu.capacity_bytes)}",
        style="not bold default",
    )
    rows: list[tuple[str, Cell]] = [
        ("plan", describe_how(best.strategy, best.hardware.node.gpu.name)),
        ("memory", memory),
        ("next", "\n".join(result.next_commands)),
    ]
    if best.data is not None:
        yield plain(describe_data(best.data))
        yield ""
    yield render_pairs(rows)
