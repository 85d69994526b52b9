"""`tightfit merge`: merge an adapter into its base, show figures and check."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tightfit.api.merge import merge as merge_model
from tightfit.cli.flags.export import MergeFlags
from tightfit.cli.terminal.output import announce, progress_bar, show_json, write_err
from tightfit.core.units import render_bytes

if TYPE_CHECKING:
    from tightfit.export.merge import MergeForecast


def merge(flags: MergeFlags) -> None:
    """Merge and show; a rejected result ends with an error."""
    with progress_bar() as report:
        merged = merge_model(replace(flags, progress=report, on_forecast=_announce_forecast))
    if flags.as_json and merged.is_accepted:
        show_json(merged.model_dump(mode="json"))
    elif not flags.as_json:
        from tightfit.cli.render.verify import show_merged

        show_merged(merged)
    announce(Path(merged.path))
    merged.raise_if_rejected()


def _announce_forecast(forecast: MergeForecast) -> None:
    write_err(
        f"merging takes {render_bytes(forecast.host_bytes)} of memory and "
        f"{render_bytes(forecast.disk_bytes)} of disk\n"
    )
