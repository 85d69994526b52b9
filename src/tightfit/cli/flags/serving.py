"""What the command line adds to the options of chat, compare, farm, generate, serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tightfit.api.options.common import switch_option
from tightfit.api.options.declare import Option
from tightfit.api.options.serving import (
    ChatOptions,
    CompareOptions,
    FarmOptions,
    GenerateOptions,
    ServeOptions,
)
from tightfit.cli.flags.common import Json


@dataclass(frozen=True, kw_only=True)
class ChatFlags(ChatOptions):
    __doc__ = ChatOptions.__doc__

    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class GenerateFlags(GenerateOptions):
    __doc__ = GenerateOptions.__doc__

    dry_run: Annotated[
        bool,
        switch_option("--dry-run", "Show the first prompts as they are sent, and the prediction."),
    ] = False
    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class FarmFlags(FarmOptions):
    __doc__ = FarmOptions.__doc__

    dry_run: Annotated[
        bool,
        switch_option("--dry-run", "Show where workers would run and what is expected of them."),
    ] = False
    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class ServeFlags(ServeOptions):
    __doc__ = ServeOptions.__doc__

    as_json: Annotated[
        bool,
        Option(
            "--json", help="Print one line of JSON when requests are answered, and nothing else."
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class CompareFlags(CompareOptions):
    __doc__ = CompareOptions.__doc__

    as_json: Json = False
