"""`compare`: the page of `ui`, opened where two models stand side by side."""

from __future__ import annotations

from dataclasses import replace

from tightfit.api.call import accepts_keywords
from tightfit.api.options.serving import CompareOptions
from tightfit.api.ui import PageWatcher, name_apart, serve_page, short_name
from tightfit.core.errors import UsageError
from tightfit.core.text import shorten
from tightfit.runtime.model_files import Artefact, find_artefact


@accepts_keywords(CompareOptions)
def compare(options: CompareOptions) -> None:
    """Serve the page until it is interrupted."""
    run_compare(options, PageWatcher())


def run_compare(options: CompareOptions, watcher: PageWatcher) -> None:
    """`compare` with a watcher."""
    serve_page(options, lambda: find_both(options), watcher, first_tab="compare")


def find_both(options: CompareOptions) -> list[tuple[str, Artefact]]:
    """The two artefacts with the names that the page shows."""
    first = find_artefact(options.first)
    if options.second is not None:
        second = find_artefact(options.second)
        return name_apart([first, second])
    base = _find_base(first)
    if base is None:
        raise UsageError(
            f"{shorten(options.first)} was not tuned from another model that is known here.",
            remedy=f"tightfit compare {shorten(options.first)} B    (name what to compare it with)",
        )
    return [(f"{_base_name(base, first)} (base)", base), (f"{short_name(first)} (tuned)", first)]


def _find_base(tuned: Artefact) -> Artefact | None:
    """The model it was tuned from, with the chat template of the training."""
    training = tuned.run.read_plan().training if tuned.run is not None else None
    path = tuned.base or (None if training is None else training.model_path)
    if path is None:
        return None
    base = find_artefact(str(path))
    return base if training is None else replace(base, template=training.template)


def _base_name(base: Artefact, tuned: Artefact) -> str:
    """The plan's name for it: its folder may be one of the cache, named by a digest."""
    return short_name(base) if tuned.run is None else tuned.run.read_plan().model.name
