"""Options that most verbs have on the command line alone."""

from __future__ import annotations

from typing import Annotated

from tightfit.api.options.declare import Option

Json = Annotated[bool, Option("--json", help="Print one JSON document and nothing else.")]
