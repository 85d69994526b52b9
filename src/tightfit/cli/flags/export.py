"""What the command line adds to the options of convert, eval, merge, quantize, verify."""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.api.options.export import (
    ConvertOptions,
    EvalOptions,
    MergeOptions,
    QuantizeOptions,
    VerifyOptions,
)
from tightfit.cli.flags.common import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalFlags(EvalOptions):
    __doc__ = EvalOptions.__doc__

    as_json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeFlags(MergeOptions):
    __doc__ = MergeOptions.__doc__

    as_json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertFlags(ConvertOptions):
    __doc__ = ConvertOptions.__doc__

    as_json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeFlags(QuantizeOptions):
    __doc__ = QuantizeOptions.__doc__

    as_json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyFlags(VerifyOptions):
    __doc__ = VerifyOptions.__doc__

    as_json: Json = False
