"""`tightfit hardware`: search the GPU catalogue, show one card with sources, or read a cluster."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tightfit.cli.completion import complete_gpu
from tightfit.cli.flags import takes
from tightfit.cli.options import Json, On
from tightfit.cli.screen import show, show_json
from tightfit.core.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from tightfit.hardware.types import Gpu

EXAMPLES = """\b
Examples:
  tightfit hardware                       every GPU of the catalogue
  tightfit hardware a100                  those whose name contains a word
  tightfit hardware T4                    one card, each number with its source
  tightfit hardware --on here             this machine
  tightfit hardware --on slurm:gpu        one Slurm partition
  tightfit hardware --on '6xT4 + 2xRTX-6000' --json
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareFlags:
    """Options of `tightfit hardware`."""

    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[WORD|NAME]",
            help="A word to search for, or the name of one GPU.",
            autocompletion=complete_gpu,
            show_default=False,
        ),
    ] = None
    on: On = None
    as_json: Json = False


@takes(HardwareFlags)
def hardware(flags: HardwareFlags) -> None:
    """List, search or show GPUs; with --on, show a machine or cluster as tightfit understands it."""
    if flags.on is not None:
        if flags.name is not None:
            raise UsageError(
                "A GPU name and --on ask for two different things.",
                remedy=f"tightfit hardware {flags.name}, or tightfit hardware --on {flags.on}",
            )
        _show_cluster(flags.on, as_json=flags.as_json)
    elif flags.name is None:
        from tightfit.hardware.catalogue import list_gpus

        _show_list(list_gpus(), as_json=flags.as_json)
    else:
        _search_or_show(flags.name, as_json=flags.as_json)


def _search_or_show(word: str, *, as_json: bool) -> None:
    """One card where the word names one; else all that contain it."""
    from tightfit.hardware.catalogue import match_gpu, search_gpus

    found = search_gpus(word)
    try:
        match = match_gpu(word)
    except NotFoundError:
        inside = [gpu for gpu in found if _folded(word) in _folded(gpu.name)]
        if not inside:
            raise
        _show_list(inside, as_json=as_json)
        return
    if match.others and len(found) > 1:
        _show_list(found, as_json=as_json)
        return
    _show_gpu(match.gpu.name, as_json=as_json)


def _folded(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _show_list(gpus: list[Gpu], *, as_json: bool) -> None:
    if as_json:
        show_json({"gpus": [gpu.model_dump(mode="json") for gpu in gpus]})
        return
    from tightfit.cli.render_hardware import render_gpus

    show(*render_gpus(gpus))


def _show_gpu(name: str, *, as_json: bool) -> None:
    from tightfit.hardware.catalogue import describe_gpu

    record = describe_gpu(name)
    if as_json:
        numbers = [dataclasses.asdict(number) for number in record.numbers]
        told: dict[str, Any] = {
            **record.gpu.model_dump(mode="json"),
            "family": record.family,
            "aliases": list(record.aliases),
            "numbers": numbers,
        }
        show_json(told)
        return
    from tightfit.cli.render_hardware import render_gpu

    show(*render_gpu(record))


def _show_cluster(text: str, *, as_json: bool) -> None:
    from tightfit.hardware.resolve import resolve_hardware

    cluster = resolve_hardware(text)
    if as_json:
        show_json(cluster.model_dump(mode="json"))
        return
    from tightfit.cli.render_hardware import render_cluster

    show(*render_cluster(cluster))
