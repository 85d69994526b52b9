"""What the command line adds to the options of bench, calibrate, estimate, plan, prepare, train."""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.api.options.training import (
    BenchOptions,
    CalibrateOptions,
    EstimateOptions,
    PlanOptions,
    PrepareOptions,
    TrainOptions,
)
from tightfit.cli.flags.common import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateFlags(EstimateOptions):
    __doc__ = EstimateOptions.__doc__

    as_json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFlags(PlanOptions):
    __doc__ = PlanOptions.__doc__

    as_json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareFlags(PrepareOptions):
    __doc__ = PrepareOptions.__doc__

    as_json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainFlags(TrainOptions):
    __doc__ = TrainOptions.__doc__

    as_json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchFlags(BenchOptions):
    __doc__ = BenchOptions.__doc__

    as_json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateFlags(CalibrateOptions):
    __doc__ = CalibrateOptions.__doc__

    as_json: Json = False
