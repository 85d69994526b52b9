"""`tightfit plan`: the best ways to run a job on given hardware, and why."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import typer

from tightfit.cli.buy import buy
from tightfit.cli.chart import Chart, check_chart_path, make_panel, write_chart
from tightfit.cli.describe import describe_how, describe_levers
from tightfit.cli.faults import report_fault
from tightfit.cli.flags.plan import PlanFlags
from tightfit.cli.hardware_choice import choose_cluster
from tightfit.cli.job import read_job
from tightfit.cli.json_output import show_json
from tightfit.core.errors import DoesNotFitError
from tightfit.core.files import write_atomic
from tightfit.planning.plan import Plan
from tightfit.planning.search import SearchResult, search


def plan(flags: PlanFlags) -> None:
    """Search, then show, save and draw."""
    if flags.chart is not None:
        check_chart_path(flags.chart)
    job = read_job(flags)
    if flags.buy:
        buy(flags, job.request)
        return
    cluster = choose_cluster(job.on, command=_repeat(flags))
    result = search(job.request, cluster, num_plans=flags.top)
    if not result.plans:
        _refuse(flags, result)
    if flags.as_json:
        show_json(describe_result(result))
    else:
        from tightfit.cli.render_plan import show_plans

        show_plans(result, is_explained=flags.explain, notes=cluster.warnings)
    if flags.save is not None:
        save_plan(result.plans[0], flags.save)
    if flags.chart is not None:
        write_chart(_draw(result.plans[:3]), flags.chart)


def describe_result(result: SearchResult) -> dict[str, Any]:
    """The JSON of a search."""
    return {
        "plans": [found.model_dump(mode="json") for found in result.plans],
        "excluded": [exclusion.model_dump(mode="json") for exclusion in result.excluded],
        "considered": result.num_considered,
    }


def save_plan(best: Plan, path: Path) -> None:
    """The same JSON as `plans[0]`, whole or not at all."""
    write_atomic(path, best.model_dump_json(indent=2) + "\n")


def _refuse(flags: PlanFlags, result: SearchResult) -> None:
    """Nothing fits: say what is short; the search's reasons still go into the JSON."""
    remedy = f"{_repeat(flags)} --buy    (the cheapest hardware that fits it)"
    if result.shortfall is None:
        remedy = f"{_repeat(flags)} --on {flags.on} --explain    (every reason)"
    fault = DoesNotFitError(result.failure or "Nothing fits.", remedy=remedy)
    if flags.as_json:
        told = {"error": fault.problem, "remedy": fault.remedy, "exit_code": fault.exit_code}
        show_json({**describe_result(result), **told})
    elif flags.explain:
        from tightfit.cli.render_plan import show_exclusions

        show_exclusions(result)
    raise typer.Exit(report_fault(fault, as_json=False))


def _repeat(flags: PlanFlags) -> str:
    """The command line again, less its hardware, to be continued."""
    words = ["tightfit", "plan", flags.job]
    for option, value in (
        ("--method", flags.method),
        ("--seq-len", flags.seq_len),
        ("--data", flags.data),
        ("--effective-batch", flags.effective_batch),
    ):
        words += [option, str(value)] if value is not None else []
    return shlex.join(words)


def _draw(plans: tuple[Plan, ...]) -> Chart:
    return Chart(
        title=f"{plans[0].model.name}: GPU memory by stage",
        panels=tuple(
            make_panel(
                f"{number}. {describe_how(found.strategy, found.hardware.node.gpu.name)}",
                found.estimate,
                subtitle=describe_levers(found.strategy),
            )
            for number, found in enumerate(plans, start=1)
        ),
    )
