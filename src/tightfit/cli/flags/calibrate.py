"""What `tightfit calibrate` accepts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from tightfit.cli.flags.options import Json, number_option, word_option

DEVICES = ("cuda", "cpu")
MAX_SECONDS = 3600

EXAMPLES = """\b
Examples:
  tightfit calibrate                    this machine's GPUs, or its CPU where it has none
  tightfit calibrate --show             what was measured before
  tightfit calibrate --device cpu --seconds 30
  tightfit calibrate --json > rates.json
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateFlags:
    """Measure this machine in under 2 minutes; plans made on it then use it.

    Measures matrix products, attention, memory, AdamW, launches, the CUDA context, host copies
    and, with several GPUs, collectives. Kept beside the ledger, one file per host and device, in
    place of the last one. Run it while the machine is idle: what was measured beside other work is
    not kept. Needs torch.
    """

    device: Annotated[
        str | None,
        word_option("--device", DEVICES, "What to measure. [default: cuda, or cpu without a GPU]"),
    ] = None
    seconds: Annotated[
        float | None,
        number_option(
            "--seconds",
            "About how long to measure; less of it leaves out the largest shapes. [default: 100]",
            most=MAX_SECONDS,
            example=30,
        ),
    ] = None
    show: Annotated[
        bool,
        typer.Option("--show", help="Measure nothing; print what was stored.", show_default=False),
    ] = False
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Keep what was measured on a busy machine too; plans then say so.",
            show_default=False,
        ),
    ] = False
    as_json: Json = False
