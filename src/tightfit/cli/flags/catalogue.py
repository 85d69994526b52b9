"""What the command line adds to the options of doctor, hardware, models, runs, version."""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.api.options.catalogue import (
    DoctorOptions,
    HardwareOptions,
    ModelsOptions,
    RunsOptions,
    VersionOptions,
)
from tightfit.cli.flags.common import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFlags(DoctorOptions):
    __doc__ = DoctorOptions.__doc__

    as_json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsFlags(ModelsOptions):
    __doc__ = ModelsOptions.__doc__

    as_json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareFlags(HardwareOptions):
    __doc__ = HardwareOptions.__doc__

    as_json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsFlags(RunsOptions):
    __doc__ = RunsOptions.__doc__

    as_json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFlags(VersionOptions):
    __doc__ = VersionOptions.__doc__

    as_json: Json = False
