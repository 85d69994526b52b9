"""What requests call a served model: its alias, its folder's name, its hub id."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tightfit.core.errors import UsageError
from tightfit.runtime.artefacts import Artefact, ArtefactKind


def name_models(
    artefacts: Sequence[Artefact], aliases: Sequence[str]
) -> tuple[tuple[str, ...], ...]:
    """Names for each artefact, its id first. A name that would mean two of them means none."""
    if len(aliases) > len(artefacts):
        raise UsageError(
            f"There are {len(aliases)} names for {len(artefacts)} models.",
            remedy="one --name for each model, in the same order",
        )
    given = [*aliases, *([None] * (len(artefacts) - len(aliases)))]
    all_names = [
        tuple(dict.fromkeys(filter(None, (alias, _own_name(artefact), _hub_id(artefact)))))
        for alias, artefact in zip(given, artefacts, strict=True)
    ]
    ids = [names[0] for names in all_names]
    for name, count in Counter(ids).items():
        if count > 1:
            raise UsageError(
                f"{count} of the models would be called `{name}`.",
                remedy="--name ONE --name OTHER, in the order of the models",
            )
    uses = Counter(name for names in all_names for name in names)
    return tuple(
        (names[0], *(n for n in names[1:] if uses[n] == 1 and n not in ids)) for names in all_names
    )


def _own_name(artefact: Artefact) -> str:
    if artefact.run is not None:
        return artefact.run.path.resolve().name
    if artefact.kind is ArtefactKind.GGUF:
        return artefact.path.stem
    folder = Path(artefact.name).expanduser()
    return folder.resolve().name if folder.is_dir() else Path(artefact.name).name


def _hub_id(artefact: Artefact) -> str | None:
    """What the user typed, unless it is a path: those are nobody else's business."""
    return None if Path(artefact.name).expanduser().exists() else artefact.name
