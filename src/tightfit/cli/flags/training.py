"""What the command line adds to the options of bench, calibrate, estimate, plan, prepare, train."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tightfit.api.options.common import count_option, path_option
from tightfit.api.options.declare import Option
from tightfit.api.options.training import (
    MAX_ROW,
    MAX_SHOWN,
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

    zero_table: Annotated[
        bool,
        Option("--zero-table", help="Print the six-row ZeRO-3 offload table instead."),
    ] = False
    chart: Annotated[
        Path | None,
        path_option(
            "--chart",
            "With --trace: draw memory over the step into a .png or .html file.",
            example="step.html",
        ),
    ] = None
    check: Annotated[
        bool, Option("--check", help="Exit with 5 where it does not fit or cannot work.")
    ] = False
    as_json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFlags(PlanOptions):
    __doc__ = PlanOptions.__doc__

    save: Annotated[
        Path | None, path_option("--save", "Write the best plan as JSON.", example="plan.json")
    ] = None
    buy: Annotated[bool, Option("--buy", help="The cheapest hardware that does the job.")] = False
    chart: Annotated[
        Path | None,
        path_option(
            "--chart", "Draw memory by phase into a .png or .html file.", example="memory.html"
        ),
    ] = None
    as_json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareFlags(PrepareOptions):
    __doc__ = PrepareOptions.__doc__

    show: Annotated[
        int | None,
        count_option(
            "--show",
            "Rows to show with their mask, spread over the data. [default: 1]",
            most=MAX_SHOWN,
            example=3,
        ),
    ] = None
    row: Annotated[
        int | None,
        count_option(
            "--row", "Show the row at this line, as messages count.", most=MAX_ROW, example=812
        ),
    ] = None
    chart: Annotated[
        Path | None,
        path_option(
            "--chart", "Draw the lengths into a .png or .html file.", example="lengths.png"
        ),
    ] = None
    as_json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainFlags(TrainOptions):
    __doc__ = TrainOptions.__doc__

    as_json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchFlags(BenchOptions):
    __doc__ = BenchOptions.__doc__

    chart: Annotated[
        Path | None,
        path_option(
            "--chart", "Draw predicted and measured speeds into a .png file.", example="plans.png"
        ),
    ] = None
    as_json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateFlags(CalibrateOptions):
    __doc__ = CalibrateOptions.__doc__

    show: Annotated[
        bool,
        Option("--show", help="Measure nothing; print what was stored.", show_default=False),
    ] = False
    as_json: Json = False
