"""`tightfit convert`: a model in another format, predicted, made and measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tightfit.cli import choices
from tightfit.cli.flags.convert import DTYPES, FORMATS, ConvertFlags
from tightfit.cli.require import require_packages
from tightfit.cli.terminal.harmless import harmless
from tightfit.cli.terminal.json_output import show_json
from tightfit.cli.terminal.output import announce, write_err
from tightfit.cli.terminal.progress_bar import progress_bar
from tightfit.core.units import render_bytes

if TYPE_CHECKING:
    from tightfit.export.convert.convert import Forecast
    from tightfit.export.convert.source import Source


def convert(flags: ConvertFlags) -> None:
    """Convert and show."""
    to = None if flags.to is None else choices.read_word(flags.to, FORMATS, option="--to")
    dtype = (
        None if flags.dtype is None else choices.read_word(flags.dtype, DTYPES, option="--dtype")
    )
    require_packages("Converting", "torch", "transformers")
    require_packages("Converting", "gguf", extra="gguf")
    from tightfit.export.convert.convert import ConvertRequest, convert_model

    with progress_bar() as report:
        made = convert_model(
            ConvertRequest(
                source=flags.source,
                to=to,
                dtype=dtype,
                target=None if flags.out is None else Path(flags.out).expanduser(),
                force=flags.force,
                announce=_foretell,
                report=report,
            )
        )
    if flags.as_json:
        show_json(made.model_dump(mode="json"))
    else:
        from tightfit.cli.render.convert import show_conversion

        show_conversion(made)
    announce(Path(made.path))


def _foretell(source: Source, target: Path, forecast: Forecast) -> None:
    from tightfit.export.convert.source import SAID

    write_err(
        f"{harmless(source.name)} is {SAID[source.kind]}; "
        f"{harmless(target.name)} will take {render_bytes(forecast.disk_bytes)} of disk, and "
        f"making it {render_bytes(forecast.host_bytes)} of memory\n"
    )
