"""What the command line adds to the options of preflight, stage, submit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tightfit.api.options.clusters import PreflightOptions, StageOptions, SubmitOptions
from tightfit.api.options.declare import Option
from tightfit.cli.flags.common import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitFlags(SubmitOptions):
    __doc__ = SubmitOptions.__doc__

    as_json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightFlags(PreflightOptions):
    __doc__ = PreflightOptions.__doc__

    as_json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFlags(StageOptions):
    __doc__ = StageOptions.__doc__

    list_: Annotated[bool, Option("--list", help="Show what is staged where.")] = False
    clean: Annotated[
        bool,
        Option("--clean", help="Remove MODEL's copies there, or all of yours without MODEL."),
    ] = False
    as_json: Json = False
