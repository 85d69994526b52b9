"""Prompts to try, from the data that a run was trained or evaluated on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from tightfit.core.errors import UserError
from tightfit.core.training import DataSource
from tightfit.data.formats import ASSISTANT, SYSTEM, USER, to_messages
from tightfit.data.meter import Meter
from tightfit.data.sources import open_source, read_source
from tightfit.ledger.run_folder import RunFolder

NUM_EXAMPLES = 12
MOST_CHARACTERS = 4000
"""A longer prompt is no example to look at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One question of the data."""

    prompt: str
    system: str = ""


def read_examples(run: RunFolder | None, *, most: int = NUM_EXAMPLES) -> tuple[Example, ...]:
    """The first questions of the run's data, held-out rows first; none where it cannot be read.

    The data may long be gone from where the run read it, and the page does without.
    """
    if run is None:
        return ()
    try:
        training = run.read_plan().training
    except UserError:
        return ()
    sources = training.data if training is not None else ()
    for source in sorted(sources, key=lambda found: found.split != "eval"):
        found = tuple(dict.fromkeys(itertools.islice(_read(source), most)))
        if found:
            return found
    return ()


def _read(source: DataSource) -> Iterator[Example]:
    try:
        for row, row_format in read_source(open_source(source), Meter()):
            if row_format.name == "text":
                return
            messages = to_messages(row, row_format)
            before = list(itertools.takewhile(lambda said: said.role != ASSISTANT, messages))
            asked = "\n\n".join(said.content for said in before if said.role == USER)
            if asked.strip() and len(asked) <= MOST_CHARACTERS:
                system = "\n\n".join(said.content for said in before if said.role == SYSTEM)
                yield Example(prompt=asked, system=system)
    except (UserError, OSError):
        return
