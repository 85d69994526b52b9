"""`tightfit hardware`: search the GPU catalogue, show one card with sources, or read a cluster."""

from __future__ import annotations

import dataclasses

from tightfit.cli.flags.hardware import HardwareFlags
from tightfit.cli.json_output import show_json
from tightfit.core.errors import NotFoundError, UsageError
from tightfit.hardware.catalogue import describe_gpu, list_gpus, match_gpu, search_gpus
from tightfit.hardware.resolve import resolve_hardware
from tightfit.hardware.types import Gpu


def hardware(flags: HardwareFlags) -> None:
    """Show the catalogue, one card, or what `--on` means."""
    if flags.on is not None:
        if flags.name is not None:
            raise UsageError(
                "A GPU name and --on ask for two different things.",
                remedy=f"tightfit hardware {flags.name}, or tightfit hardware --on {flags.on}",
            )
        _show_cluster(flags.on, as_json=flags.as_json)
    elif flags.name is None:
        _show_list(list_gpus(), as_json=flags.as_json)
    else:
        _search_or_show(flags.name, as_json=flags.as_json)


def _search_or_show(word: str, *, as_json: bool) -> None:
    """One card where the word names one; else all that contain it."""
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
    else:
        _show_gpu(match.gpu.name, as_json=as_json)


def _folded(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _show_list(gpus: list[Gpu], *, as_json: bool) -> None:
    if as_json:
        show_json({"gpus": [gpu.model_dump(mode="json") for gpu in gpus]})
        return
    from tightfit.cli.render_hardware import show_gpus

    show_gpus(gpus)


def _show_gpu(name: str, *, as_json: bool) -> None:
    record = describe_gpu(name)
    if as_json:
        show_json(
            {
                **record.gpu.model_dump(mode="json"),
                "family": record.family,
                "aliases": list(record.aliases),
                "numbers": [dataclasses.asdict(number) for number in record.numbers],
            }
        )
        return
    from tightfit.cli.render_hardware import show_gpu

    show_gpu(record)


def _show_cluster(text: str, *, as_json: bool) -> None:
    cluster = resolve_hardware(text)
    if as_json:
        show_json(cluster.model_dump(mode="json"))
        return
    from tightfit.cli.render_hardware import show_cluster

    show_cluster(cluster)
