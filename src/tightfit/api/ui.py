"""`ui`: a web page of this machine: plans while one types, data, runs, chat, two models."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tightfit.api.call import accepts_keywords
from tightfit.api.options.engines import engine_request, read_sampling
from tightfit.api.options.serving import PageOptions, UiOptions
from tightfit.api.options.training import PlanOptions, PrepareOptions
from tightfit.api.plan import NoPlanError, plan
from tightfit.api.prepare import prepare
from tightfit.api.training.hardware import DEFAULT_CARD
from tightfit.api.training.recipe import RECIPE_ENDINGS, read_base_recipe, read_plan_job
from tightfit.api.training.settings import repeat_plan
from tightfit.core.errors import DoesNotFitError, UsageError
from tightfit.core.options import list_given, read_given, repeat_options
from tightfit.core.text import shorten
from tightfit.data.tokenizer import load_tokenizer
from tightfit.data.view import count_lengths, find_row, pick_rows, summarize_lengths, view_row
from tightfit.engines.open import open_engine
from tightfit.engines.protocol import Engine, EngineInfo
from tightfit.hardware.machine import read_driver
from tightfit.hardware.resolve import SCHEDULERS
from tightfit.models.resolve import list_models
from tightfit.planning.buying import Offer, buying_guide
from tightfit.runs.report import DEFAULT_FOLDER
from tightfit.runtime.model_files import Artefact, find_artefact
from tightfit.serving.page.app import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    Page,
    PageVerbs,
    check_exposure,
    make_app,
    require_gradio,
    serve_app,
)
from tightfit.serving.page.compare_tab import read_examples
from tightfit.serving.page.data_tab import NUM_BARS, NUM_ROWS, DataForm, DataPreview
from tightfit.serving.page.models import PageModels, probe_free_bytes, require_room
from tightfit.serving.page.plan_tab import NUM_PLANS, PlanAnswer, PlanForm
from tightfit.serving.page.votes import VoteFile, check_votes_path
from tightfit.serving.sockets import bind_socket

PASSWORD_VARIABLE = "TIGHTFIT_PASSWORD"
DEFAULT_VOTES = "votes.jsonl"
FIRST_MODEL = "Llama-3.1-8B"
"""That the plan tab starts with where no model was named."""
EXAMPLE_DATA = "train.jsonl"
"""Stands in the training command until a data file is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageReady:
    """A page that can be opened."""

    address: str
    votes: Path
    models: tuple[str, ...]
    engines: tuple[EngineInfo, ...]
    """Of the models that are loaded."""


class PageWatcher:
    """Receives what happens while the page is served; a subclass overrides what it shows."""

    def loading(self, model: str) -> None:
        """A model is about to be loaded."""

    def ready(self, page: PageReady) -> None:
        """The page can be opened."""


@accepts_keywords(UiOptions)
def ui(options: UiOptions) -> None:
    """Serve the page until it is interrupted."""
    run_ui(options, PageWatcher())


def run_ui(options: UiOptions, watcher: PageWatcher) -> None:
    """`ui` with a watcher."""
    serve_page(
        options,
        lambda: name_apart([find_artefact(name) for name in options.models or ()]),
        watcher,
        runs_folder=options.runs or DEFAULT_FOLDER,
    )


def serve_page(
    options: PageOptions,
    find_models: Callable[[], Sequence[tuple[str, Artefact]]],
    watcher: PageWatcher,
    *,
    runs_folder: Path = DEFAULT_FOLDER,
    first_tab: str = "plan",
) -> None:
    """Serve the page with these models. What can be checked is checked before loading."""
    host = options.host or DEFAULT_HOST
    password = options.password or os.environ.get(PASSWORD_VARIABLE) or None
    check_exposure(host, password)
    require_gradio()
    named = find_models()
    artefacts = [artefact for _, artefact in named]
    runs = tuple(artefact.run for artefact in artefacts if artefact.run is not None)
    # In the last named run, which is usually the tuned one.
    votes = options.votes or (runs[-1].path if runs else Path()) / DEFAULT_VOTES
    if named or options.votes:
        check_votes_path(votes)
    openers = _make_openers(options, named)
    bound = bind_socket(host, DEFAULT_PORT if options.port is None else options.port)
    with contextlib.closing(bound.socket):
        models = PageModels(openers, is_one_at_a_time=options.one_at_a_time)
        try:
            models.load(watcher.loading)
            first = str(artefacts[-1].base or artefacts[-1].path) if artefacts else ""
            page = Page(
                models=models,
                votes=VoteFile(votes),
                sampling=read_sampling(options),
                verbs=make_verbs(options, reads_paths=bound.is_loopback),
                system=options.system or "",
                examples=read_examples(runs[-1] if runs else None),
                runs=runs,
                runs_folder=runs_folder,
                plan=PlanForm(
                    # A path is of no use in a field that takes none.
                    job=first if first and bound.is_loopback else FIRST_MODEL,
                    on="here" if read_driver().gpus else DEFAULT_CARD,
                ),
                data_model=first,
                known_models=tuple(row.model.rpartition("/")[2] for row in list_models()),
                first_tab=first_tab,
                password=password,
            )
            app = make_app(page)
            infos = [models.info(index) for index in range(len(models.names))]
            ready = PageReady(
                address=f"{bound.url}/",
                votes=votes,
                models=models.names,
                engines=tuple(info for info in infos if info is not None),
            )
            with contextlib.suppress(KeyboardInterrupt):  # the usual way to end it
                serve_app(app, bound, on_ready=partial(watcher.ready, ready))
        finally:
            models.close()


def make_verbs(options: PageOptions, *, reads_paths: bool) -> PageVerbs:
    """What the page asks for. Without `reads_paths` no file is read that a visitor names."""
    if not reads_paths:
        return PageVerbs(explore=explore_without_paths, preview=None, open_models=None)

    def open_models(names: Sequence[str]) -> Mapping[str, Callable[[], Engine]]:
        return _make_openers(options, name_apart([find_artefact(name) for name in names]))

    return PageVerbs(explore=explore, preview=preview, open_models=open_models)


def _make_openers(
    options: PageOptions, named: Sequence[tuple[str, Artefact]]
) -> dict[str, Callable[[], Engine]]:
    """What loads each model, by its name. Raises where they would not fit into the memory."""
    if not named:
        return {}
    requests = [engine_request(options, artefact) for _, artefact in named]
    require_room(
        [artefact for _, artefact in named],
        requests[0].weights,
        is_one_at_a_time=options.one_at_a_time,
        free_bytes=probe_free_bytes(requests[0].device),
    )
    names = [name for name, _ in named]
    return {
        name: partial(open_engine, request) for name, request in zip(names, requests, strict=True)
    }


def short_name(artefact: Artefact) -> str:
    """What the page calls it."""
    if artefact.run is not None:
        return artefact.run.path.resolve().name
    path = Path(artefact.name).expanduser()
    if not path.exists():
        return artefact.name  # a hub id
    return path.stem if path.is_file() else path.resolve().name


def name_apart(artefacts: Sequence[Artefact]) -> list[tuple[str, Artefact]]:
    """Votes are counted by name, so that equal names would be counted as one model."""
    if len(artefacts) > 2:
        raise UsageError(
            f"The page holds two models, and {len(artefacts)} were named.",
            remedy="--model A --model B",
        )
    for names in ([short_name(one) for one in artefacts], [one.name for one in artefacts]):
        if len(set(names)) == len(names):
            return list(zip(names, artefacts, strict=True))
    short = short_name(artefacts[0])
    return [(f"{short} ({letter})", one) for letter, one in zip("AB", artefacts, strict=True)]


# The plan tab: the options of `tightfit plan`, as they stand in the fields.

_PATH_MARKS = re.compile(r"^[./~\\]|\.\.|[\\:]|/.*/|\.(ya?ml|json|gguf)$", re.IGNORECASE)


def explore(form: PlanForm) -> PlanAnswer:
    """The plans of what was typed. Raises UserError where it means nothing."""
    typed = {
        name: value.strip() or None
        for name, value in (
            ("on", form.on),
            ("data", form.data),
            ("seq_len", form.seq_len),
            ("effective_batch", form.effective_batch),
        )
    }
    if not form.job.strip():
        raise UsageError("No model is named.", remedy="tightfit models    (lists every name)")
    # `auto` leaves the choice to a recipe, as no option does.
    method = None if form.method == "auto" else form.method
    options = read_given(
        PlanOptions(job=form.job.strip(), method=method, top=NUM_PLANS, **typed)  # type: ignore[arg-type]
    )
    recipe = read_base_recipe(options.job)
    _refuse_schedulers(options, options.on or recipe.on)
    commands = _list_commands(options, has_data=bool(recipe.data))
    try:
        return PlanAnswer(result=plan(options).search, commands=commands)
    except NoPlanError as error:
        offers: Sequence[Offer] = ()
        if error.result.shortfall is not None:
            with contextlib.suppress(DoesNotFitError):  # then the largest node does not do either
                offers = buying_guide(read_plan_job(options)[1])
        return PlanAnswer(result=error.result, commands=commands, error=error, offers=offers)


def explore_without_paths(form: PlanForm) -> PlanAnswer:
    """The same for a page that others can open: of names and words alone, never of a file."""
    fields = {"Model": form.job.strip(), "Hardware": form.on.strip(), "Data": form.data.strip()}
    for field, value in fields.items():
        is_path = field == "Data" or _PATH_MARKS.search(value) or Path(value).exists()
        if value and is_path:
            raise UsageError(
                f"{field}: `{shorten(value)}` may be a file, and this page is open to others.",
                remedy="tightfit ui    (without --host: on loopback, every path can be named)",
            )
    return explore(form)


def _refuse_schedulers(options: PlanOptions, on: str | None) -> None:
    """A scheduler is asked over its network, which is not for every key that is pressed."""
    if on is not None and on.partition(":")[0].strip().casefold() in SCHEDULERS:
        raise UsageError(
            f"`{shorten(on)}` is a scheduler, which this page does not ask.",
            remedy=f"{repeat_plan(options)} --on {shlex.quote(on)}    (in a terminal)",
        )


def _list_commands(options: PlanOptions, *, has_data: bool) -> tuple[str, ...]:
    """`tightfit plan` as it was asked here, and the training of the same job."""
    where = shlex.join(repeat_options({"--on": options.on}))
    given = list_given(options, ("data", "method", "seq_len", "effective_batch"))
    if not has_data:
        given = {"--data": EXAMPLE_DATA} | given
    train = shlex.join(["tightfit", "train", options.job, *repeat_options(given)])
    return (f"{repeat_plan(options)} {where}".rstrip(), train)


# The data tab: the options of `tightfit prepare`.


def preview(form: DataForm) -> DataPreview:
    """The encoded rows of what was typed. Raises UserError."""
    options = PrepareOptions(
        job=form.model,
        data=None if form.model.lower().endswith(RECIPE_ENDINGS) and not form.data else [form.data],
        take=form.take or None,
        seq_len=form.seq_len or None,  # type: ignore[arg-type]
        template=form.template or None,
        train_on=None if form.train_on == "answers" else form.train_on,
        skip_invalid=True,
    )
    options = read_given(options)
    found = prepare(options)
    encoded = found.encoded
    tokenizer = load_tokenizer(Path(encoded.report.tokenizer))
    if form.row:
        if not form.row.isdecimal():
            raise UsageError(
                f"`{shorten(form.row)}` is no line of a file.", remedy="a whole number"
            )
        rows = [view_row(store, at, tokenizer) for store, at in find_row(encoded, int(form.row))]
    else:
        picked = pick_rows(encoded.train, NUM_ROWS)
        rows = [view_row(encoded.train, at, tokenizer) for at in picked]
    given = list_given(options, ("data", "take", "seq_len", "template", "train_on"))
    lengths = count_lengths(encoded.train.lengths)
    return DataPreview(
        report=encoded.report,
        lengths=tuple(summarize_lengths(encoded.report.train, lengths, most=NUM_BARS)),
        packed_fraction=found.batching.packed_fraction,
        rows=tuple(rows),
        commands=(shlex.join(["tightfit", "prepare", options.job, *repeat_options(given)]),),
    )
