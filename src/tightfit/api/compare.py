"""`compare`: two models side by side on a web page of this machine."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tightfit.api.call import accepts_keywords
from tightfit.api.options.engines import engine_request, read_sampling
from tightfit.api.options.serving import CompareOptions
from tightfit.api.training.hardware import DEFAULT_CARD
from tightfit.core.errors import UsageError
from tightfit.core.html_page import MEMORY_COLOURS
from tightfit.core.text import shorten
from tightfit.engines.open import open_engine
from tightfit.engines.protocol import EngineInfo
from tightfit.hardware.nvml import read_driver
from tightfit.runtime.artefacts import Artefact, find_artefact
from tightfit.serving.compare.compare_tab import read_examples
from tightfit.serving.compare.controls import ControlDefaults
from tightfit.serving.compare.models import (
    ComparedModel,
    ComparedModels,
    probe_free_bytes,
    require_room,
)
from tightfit.serving.compare.page import ComparePage, make_compare_app, require_gradio
from tightfit.serving.compare.server import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    address_of,
    bound_socket,
    check_exposure,
    serve_app,
)
from tightfit.serving.compare.votes import VoteFile, check_votes_path

PASSWORD_VARIABLE = "TIGHTFIT_PASSWORD"
DEFAULT_VOTES = "votes.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparePageReady:
    """A page that can be opened."""

    address: str
    votes: Path
    models: tuple[str, ...]
    engines: tuple[EngineInfo, ...]
    """Of the models that are loaded."""


class CompareWatcher:
    """Receives what happens while the page is served; a subclass overrides what it shows."""

    def loading(self, model: str) -> None:
        """A model is about to be loaded."""

    def ready(self, page: ComparePageReady) -> None:
        """The page can be opened."""


@accepts_keywords(CompareOptions)
def compare(options: CompareOptions) -> None:
    """Serve the page until it is interrupted."""
    run_compare(options, CompareWatcher())


def run_compare(options: CompareOptions, watcher: CompareWatcher) -> None:
    """`compare` with a watcher. Everything that can be checked is checked before loading."""
    host = options.host or DEFAULT_HOST
    password = options.password or os.environ.get(PASSWORD_VARIABLE) or None
    check_exposure(host, password)
    require_gradio()
    named = find_both(options)
    artefacts = [artefact for _, artefact in named]
    votes = options.votes or _default_votes(artefacts)
    check_votes_path(votes)
    request = engine_request(options, artefacts[0])
    require_room(
        artefacts,
        request.weights,
        is_one_at_a_time=options.one_at_a_time,
        free_bytes=probe_free_bytes(request.device),
    )
    with bound_socket(host, DEFAULT_PORT if options.port is None else options.port) as bound:
        models = _make_models(options, named)
        try:
            models.load(watcher.loading)
            page = _make_page(options, models, artefacts, votes=votes, password=password)
            app = make_compare_app(page)
            infos = [models.info(index) for index in range(len(models.names))]
            ready = ComparePageReady(
                address=address_of(bound, host),
                votes=votes,
                models=models.names,
                engines=tuple(info for info in infos if info is not None),
            )
            with contextlib.suppress(KeyboardInterrupt):  # the usual way to end it
                serve_app(app, bound, on_ready=partial(watcher.ready, ready))
        finally:
            models.close()


def find_both(options: CompareOptions) -> list[tuple[str, Artefact]]:
    """The two artefacts with the names that the page shows."""
    first = find_artefact(options.first)
    if options.second is not None:
        second = find_artefact(options.second)
        return _with_distinct_names([(_short_name(first), first), (_short_name(second), second)])
    base = _find_base(first)
    if base is None:
        raise UsageError(
            f"{shorten(options.first)} was not tuned from another model that is known here.",
            remedy=f"tightfit compare {shorten(options.first)} B    (name what to compare it with)",
        )
    return [(f"{_base_name(base, first)} (base)", base), (f"{_short_name(first)} (tuned)", first)]


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
    return _short_name(base) if tuned.run is None else tuned.run.read_plan().model.name


def _short_name(artefact: Artefact) -> str:
    if artefact.run is not None:
        return artefact.run.path.resolve().name
    path = Path(artefact.name).expanduser()
    if not path.exists():
        return artefact.name  # a hub id
    return path.stem if path.is_file() else path.resolve().name


def _with_distinct_names(named: list[tuple[str, Artefact]]) -> list[tuple[str, Artefact]]:
    """Votes are counted by name, so that equal names would be counted as one model."""
    (first, one), (second, other) = named
    if first != second:
        return named
    if one.name != other.name:
        return [(one.name, one), (other.name, other)]
    return [(f"{first} (A)", one), (f"{second} (B)", other)]


def _default_votes(artefacts: list[Artefact]) -> Path:
    """In the last named run, which is usually the tuned one."""
    runs = [artefact.run.path for artefact in artefacts if artefact.run is not None]
    return (runs[-1] if runs else Path()) / DEFAULT_VOTES


def _make_models(options: CompareOptions, named: list[tuple[str, Artefact]]) -> ComparedModels:
    models = [
        ComparedModel(name=name, open=partial(open_engine, engine_request(options, artefact)))
        for name, artefact in named
    ]
    return ComparedModels(models, is_one_at_a_time=options.one_at_a_time)


def _make_page(
    options: CompareOptions,
    models: ComparedModels,
    artefacts: list[Artefact],
    *,
    votes: Path,
    password: str | None,
) -> ComparePage:
    runs = tuple(artefact.run for artefact in artefacts if artefact.run is not None)
    last = artefacts[-1]
    return ComparePage(
        models=models,
        votes=VoteFile(votes),
        defaults=ControlDefaults(system=options.system or "", sampling=read_sampling(options)),
        examples=read_examples(runs[-1] if runs else None),
        runs=runs,
        plan_model=str(last.base or last.path),
        plan_on="here" if read_driver().gpus else DEFAULT_CARD,
        colours=MEMORY_COLOURS,
        password=password,
    )
