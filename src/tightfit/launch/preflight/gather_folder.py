"""The rounds with the shared folder: planted by one node, found and raced for by all."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import Any

from tightfit.launch.preflight.crew import Crew
from tightfit.launch.preflight.messages import FolderStep
from tightfit.launch.preflight.seen import FolderSeen

FOLDER_SECONDS = 8.0


def look_at_folder(seen: FolderSeen, crew: Crew, left: Callable[[float], float]) -> None:
    """Fill `seen`; what was planted is removed again."""
    nodes = crew.present
    if not nodes:
        return
    nonce = uuid.uuid4().hex
    place = str(PurePosixPath(seen.path) / f".tightfit-preflight-{nonce[:12]}")

    def step(name: str, who: Sequence[str], **given: Any) -> dict[str, FolderStep]:
        wanted = {node: {"step": name, "place": place, "given": given} for node in who}
        told = crew.ask("folder", left(FOLDER_SECONDS), wanted)
        return {node: FolderStep.model_validate(answer) for node, answer in told.items()}

    first, others = nodes[0], nodes[1:]
    seen.planted = step("plant", [first], nonce=nonce).get(first)
    if seen.planted is None or not seen.planted.is_done:
        return
    seen.found = step("find", others, nonce=nonce, seconds=left(FOLDER_SECONDS))
    finders = [node for node in others if node in seen.found and seen.found[node].is_done]
    everyone = [first, *finders]
    seen.raced = step("race", everyone, nonce=nonce)
    wrote = [told.wrote for told in seen.raced.values() if told.is_done]
    seen.renamed = step(
        "see_renamed", everyone, names=wrote, nonce=nonce, seconds=left(FOLDER_SECONDS)
    )
    if finders and first in step("grow", [first], nonce=nonce):
        seen.grown = step("see_grown", finders, nonce=nonce, seconds=left(FOLDER_SECONDS))
    step("remove", [first])
