"""The chart of `bench`: for each plan a bar of its predicted speed and one of its measured."""

from __future__ import annotations

import shlex
import textwrap
from pathlib import Path
from typing import Any

from tightfit.cli.charts.memory import make_figure, save_figure, write_title
from tightfit.core.errors import UsageError
from tightfit.core.files import check_writable
from tightfit.core.packages import require_packages
from tightfit.core.text import sanitize, shorten
from tightfit.runs.bench import Bench, Trial, speed_of

PREDICTED, MEASURED = "#b0b0b0", "#4477aa"
BAR_HEIGHT = 0.38
LABEL_COLUMNS = 44


def check_bench_chart(path: Path) -> None:
    """Refuse another ending, a missing package and a file that cannot be written."""
    if path.suffix.lower() != ".png":
        instead = path.parent / f"{path.stem.strip('.') or 'plans'}.png"
        raise UsageError(
            f"`--chart {shorten(path)}` does not end in .png.",
            remedy=f"--chart {shlex.quote(str(instead))}",
        )
    require_packages("A chart", "matplotlib", extra="plot")
    check_writable(path)


def write_bench_chart(found: Bench, path: Path) -> None:
    """The plans in the order of the table, fastest on top."""
    figure = make_figure(1.9 + 0.75 * len(found.trials))
    axis = figure.subplots()
    for row, trial in enumerate(found.trials):
        _draw_trial(axis, row, trial)
    axis.set_yticks(range(len(found.trials)), [_label(trial) for trial in found.trials], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("tokens per second")
    axis.set_xlim(0, 1.15 * max(map(_widest, found.trials)))
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x", color="#dddddd", linewidth=0.7)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    _draw_legend(figure)
    write_title(figure, sanitize(f"{found.model} on {found.hardware}"), "")
    save_figure(figure, path)


def _draw_trial(axis: Any, row: int, trial: Trial) -> None:
    predicted = trial.predicted_tokens_per_second
    axis.barh(row - BAR_HEIGHT / 2, predicted, height=BAR_HEIGHT, color=PREDICTED)
    axis.barh(row + BAR_HEIGHT / 2, speed_of(trial), height=BAR_HEIGHT, color=MEASURED)
    label = f"{speed_of(trial):,.0f}" if trial.measured else trial.status.value.replace("-", " ")
    for at, width, text in (
        (row - BAR_HEIGHT / 2, predicted, f"{predicted:,.0f}"),
        (row + BAR_HEIGHT / 2, speed_of(trial), label),
    ):
        axis.annotate(
            text, (width, at), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
        )


def _label(trial: Trial) -> str:
    text = sanitize(f"ranked {trial.rank}: {trial.description}")
    return "\n".join(textwrap.wrap(text, LABEL_COLUMNS))


def _widest(trial: Trial) -> float:
    return max(trial.predicted_tokens_per_second, speed_of(trial))


def _draw_legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=PREDICTED, label="predicted"), Patch(color=MEASURED, label="measured")]
    figure.legend(handles=handles, loc="outside lower left", ncols=2, fontsize=8, frameon=False)
