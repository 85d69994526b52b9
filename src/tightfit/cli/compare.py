"""`tightfit compare`: two models side by side on a web page of this machine."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tightfit.api.options.engines import engine_request, read_sampling
from tightfit.api.training.hardware import DEFAULT_CARD
from tightfit.cli.charts.memory import NAMED_COLOURS
from tightfit.cli.flags.serving import CompareFlags
from tightfit.cli.terminal.output import write_err, write_out
from tightfit.core.errors import UsageError
from tightfit.core.text import sanitize, shorten
from tightfit.serve.compare.server import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    address_of,
    bound_socket,
    check_exposure,
    serve_app,
)

if TYPE_CHECKING:
    from tightfit.runtime.artefacts import Artefact
    from tightfit.serve.compare.models import ComparedModels
    from tightfit.serve.compare.page import ComparePage

PASSWORD_VARIABLE = "TIGHTFIT_PASSWORD"
DEFAULT_VOTES = "votes.jsonl"


def compare(flags: CompareFlags) -> None:
    """Check all that can be checked, load, serve until interrupted."""
    from tightfit.serve.compare.page import make_compare_app, require_gradio
    from tightfit.serve.compare.votes import check_votes_path

    host = flags.host or DEFAULT_HOST
    password = flags.password or os.environ.get(PASSWORD_VARIABLE) or None
    check_exposure(host, password)
    require_gradio()
    named = _find_both(flags)
    votes = flags.votes or _default_votes([artefact for _, artefact in named])
    check_votes_path(votes)
    _check_room(flags, [artefact for _, artefact in named])
    with bound_socket(host, DEFAULT_PORT if flags.port is None else flags.port) as held:
        models = _make_models(flags, named)
        try:
            models.load(lambda name: write_err(f"loading {sanitize(name)}\n"))
            app = make_compare_app(_make_page(flags, models, named, votes=votes, password=password))
            address = address_of(held, host)
            ready = partial(_announce_page, address, votes, models, as_json=flags.as_json)
            with contextlib.suppress(KeyboardInterrupt):  # the way to end it
                serve_app(app, held, on_ready=ready)
        finally:
            models.close()


def _find_both(flags: CompareFlags) -> list[tuple[str, Artefact]]:
    """Two artefacts, each by the name that the page shows."""
    from tightfit.runtime.artefacts import find_artefact

    first = find_artefact(flags.first)
    if flags.second is not None:
        second = find_artefact(flags.second)
        return _distinguish([(_short_name(first), first), (_short_name(second), second)])
    base = _find_base(first)
    if base is None:
        raise UsageError(
            f"{shorten(flags.first)} was not tuned from another model that is known here.",
            remedy=f"tightfit compare {shorten(flags.first)} B    (name what to compare it with)",
        )
    return [(f"{_base_name(base, first)} (base)", base), (f"{_short_name(first)} (tuned)", first)]


def _find_base(tuned: Artefact) -> Artefact | None:
    """What it was tuned from, asked with the template it was tuned with."""
    from tightfit.runtime.artefacts import find_artefact

    training = tuned.run.read_plan().training if tuned.run is not None else None
    path = tuned.base or (None if training is None else training.model_path)
    if path is None:
        return None
    base = find_artefact(str(path))
    return base if training is None else replace(base, template=training.template)


def _base_name(base: Artefact, tuned: Artefact) -> str:
    """As the plan has it: the folder may be one of the cache, with a name for machines."""
    return _short_name(base) if tuned.run is None else tuned.run.read_plan().model.name


def _short_name(artefact: Artefact) -> str:
    if artefact.run is not None:
        return artefact.run.path.resolve().name
    path = Path(artefact.name).expanduser()
    if not path.exists():
        return artefact.name  # a hub id
    return path.stem if path.is_file() else path.resolve().name


def _distinguish(named: list[tuple[str, Artefact]]) -> list[tuple[str, Artefact]]:
    """Votes are counted by name: two of the same would become one."""
    (first, one), (second, other) = named
    if first != second:
        return named
    if one.name != other.name:
        return [(one.name, one), (other.name, other)]
    return [(f"{first} (A)", one), (f"{second} (B)", other)]


def _default_votes(artefacts: list[Artefact]) -> Path:
    """With the run that is judged: the last named, as a rule the tuned one."""
    runs = [artefact.run.path for artefact in artefacts if artefact.run is not None]
    return (runs[-1] if runs else Path()) / DEFAULT_VOTES


def _check_room(flags: CompareFlags, artefacts: list[Artefact]) -> None:
    from tightfit.serve.compare.models import probe_free_bytes, require_room

    request = engine_request(flags, artefacts[0])
    require_room(
        artefacts,
        request.weights,
        is_one_at_a_time=flags.one_at_a_time,
        free_bytes=probe_free_bytes(request.device),
    )


def _make_models(flags: CompareFlags, named: list[tuple[str, Artefact]]) -> ComparedModels:
    from tightfit.engines.open import open_engine
    from tightfit.serve.compare.models import ComparedModel, ComparedModels

    contestants = [
        ComparedModel(name=name, open=partial(open_engine, engine_request(flags, artefact)))
        for name, artefact in named
    ]
    return ComparedModels(contestants, is_one_at_a_time=flags.one_at_a_time)


def _make_page(
    flags: CompareFlags,
    models: ComparedModels,
    named: list[tuple[str, Artefact]],
    *,
    votes: Path,
    password: str | None,
) -> ComparePage:
    from tightfit.hardware.nvml import read_driver
    from tightfit.serve.compare.compare_tab import read_examples
    from tightfit.serve.compare.controls import ControlDefaults
    from tightfit.serve.compare.page import ComparePage
    from tightfit.serve.compare.votes import VoteFile

    artefacts = [artefact for _, artefact in named]
    runs = tuple(artefact.run for artefact in artefacts if artefact.run is not None)
    last = artefacts[-1]
    return ComparePage(
        models=models,
        votes=VoteFile(votes),
        defaults=ControlDefaults(system=flags.system or "", sampling=read_sampling(flags)),
        examples=read_examples(runs[-1] if runs else None),
        runs=runs,
        plan_model=str(last.base or last.path),
        plan_on="here" if read_driver().gpus else DEFAULT_CARD,
        colours=NAMED_COLOURS,
        password=password,
    )


def _announce_page(address: str, votes: Path, models: ComparedModels, *, as_json: bool) -> None:
    """Where the page is; one line of JSON for a program that waits for it."""
    if as_json:
        told = {"address": address, "votes": str(votes), "models": list(models.names)}
        write_out(json.dumps(told) + "\n")
        return
    infos = [info for place in (0, 1) if (info := models.info(place)) is not None]
    for name, info in zip(models.names, infos, strict=False):
        write_out(f"{sanitize(name)}: {sanitize(info.why)}\n")
    write_out(f"votes go to {sanitize(str(votes))}\nopen {address}    (Ctrl+C ends it)\n")
