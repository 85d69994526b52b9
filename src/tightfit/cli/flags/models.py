"""What `tightfit models` accepts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from tightfit.cli.completion import complete_model
from tightfit.cli.flags.options import Json, refuse_empty

EXAMPLES = """\b
Examples:
  tightfit models                    every model of the catalogue
  tightfit models qwen               those whose name contains a word
  tightfit models Llama-2-7b         one model, with the count of each part
  tightfit models ./my-model --json  a folder with config.json
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsFlags:
    """List, search or show models.

    Nothing is downloaded: names come from the catalogue inside the package, the local hub
    cache, or files you point at.
    """

    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[WORD|NAME]",
            help="A word to search for; or a catalogue name, hub id, folder or GGUF file to show.",
            autocompletion=complete_model,
            callback=refuse_empty("NAME", "Llama-2-7b"),
            show_default=False,
        ),
    ] = None
    as_json: Json = False
