"""Following a job on Kubernetes: pods, then steps as `train` shows them, then the report."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from tightfit.cli.exit_codes import EXIT_INTERRUPTED
from tightfit.cli.terminal.output import show_json, write_err
from tightfit.cli.terminal.run_display import Progress, open_display
from tightfit.cli.training.finish import find_artefact
from tightfit.clusters.kubernetes.client import KubernetesApi, cancel_job
from tightfit.clusters.kubernetes.follow import (
    JobPhase,
    JobSnapshot,
    KubernetesFollower,
    describe_pod,
)
from tightfit.clusters.kubernetes.pod import Document
from tightfit.core.errors import UserError
from tightfit.runs.run_folder import RunFolder, RunState, RunStatus


def follow_pods(
    cluster: KubernetesApi, leader: Document, *, run: RunFolder | None, as_json: bool
) -> None:
    """Watch to the end and leave with the run's exit code; Ctrl-C asks what is to become of it."""
    is_cancelled = False
    while True:
        try:
            view = _watch(cluster, leader, run, as_json=as_json)
            break
        except KeyboardInterrupt:
            if is_cancelled or not _ask_to_cancel(leader):
                _leave(leader)
            is_cancelled = True
            cancel_job(cluster, leader)
    _end(leader, view, run, as_json=as_json, is_cancelled=is_cancelled)


def _watch(
    cluster: KubernetesApi, leader: Document, run: RunFolder | None, *, as_json: bool
) -> JobSnapshot:
    def read_num_steps() -> int:
        state = None if run is None else _read_state(run)
        return state.num_steps if state is not None else 0

    capacity = 0 if run is None else run.read_plan().estimate.gpu.capacity_bytes
    progress = Progress(num_steps=read_num_steps(), capacity_bytes=capacity)
    with open_display(progress, read_num_steps=read_num_steps, is_silent=as_json) as display:
        return KubernetesFollower(cluster, leader, display, run=run).wait()


def _ask_to_cancel(leader: Document) -> bool:
    """Only a clear yes; where nobody can answer, the job is left alone."""
    if sys.stdin is None or not sys.stdin.isatty():
        return False
    write_err(f"\nDelete {_name(leader)} with its pods? They save first. [y/N] ")
    try:
        return input().strip().casefold() in ("y", "yes")
    except (EOFError, KeyboardInterrupt):
        return False


def _leave(leader: Document) -> None:
    write_err(
        f"\n{_name(leader)} goes on without being watched; the same command follows it again; "
        f"{delete_command(leader)} ends it\n"
    )
    raise typer.Exit(EXIT_INTERRUPTED)


def _name(leader: Document) -> str:
    return f"{leader['kind']} {leader['metadata']['name']}"


def delete_command(leader: Document) -> str:
    meta = leader["metadata"]
    return f"kubectl delete {leader['kind'].lower()} {meta['name']} -n {meta['namespace']}"


def log_command(leader: Document) -> str:
    meta = leader["metadata"]
    label = f"app.kubernetes.io/instance={meta['name']}"
    if leader["kind"] == "TrainJob":
        label = f"jobset.sigs.k8s.io/jobset-name={meta['name']}"
    return f"kubectl logs -f --prefix -l {label} -n {meta['namespace']}"


def _end(
    leader: Document, view: JobSnapshot, run: RunFolder | None, *, as_json: bool, is_cancelled: bool
) -> None:
    state = None if run is None else _read_state(run)
    fault = None if is_cancelled else _find_error(leader, view, state)
    code = EXIT_INTERRUPTED if is_cancelled else fault.exit_code if fault is not None else 0
    if fault is None or not as_json:
        _show(leader, view, run, code=code, as_json=as_json)
    if fault is not None:
        raise fault
    if code:
        raise typer.Exit(code)


def _find_error(leader: Document, view: JobSnapshot, state: RunState | None) -> UserError | None:
    """The run's own words where it has any, else those of its pods, else the cluster's."""
    if view.phase is JobPhase.COMPLETE:
        return None
    if state is not None and state.status is RunStatus.FINISHED:
        return None
    if state is not None and state.status is RunStatus.FAILED and state.problem:
        fault = UserError(state.problem, remedy=state.remedy or log_command(leader))
        fault.exit_code = state.exit_code or UserError.exit_code
        return fault
    if view.phase is JobPhase.GONE:
        return UserError(
            f"{_name(leader)} was deleted before it was over.",
            remedy="start the same command again    (it goes on from the last checkpoint)",
        )
    ended = [pod for pod in view.pods if pod.phase == "Failed"]
    said = describe_pod(ended[-1]) if ended else ""
    fault = UserError(
        f"{_name(leader)} failed ({view.why})." + (f" {said}" if said else ""),
        remedy=log_command(leader),
    )
    codes = [pod.exit_code for pod in ended if pod.exit_code]
    fault.exit_code = codes[-1] if codes and codes[-1] < 9 else UserError.exit_code
    return fault


def _show(
    leader: Document, view: JobSnapshot, run: RunFolder | None, *, code: int, as_json: bool
) -> None:
    from tightfit.runs.report import make_report

    try:
        report = None if run is None else make_report(run)
    except UserError:
        report = None
    artefact = None if run is None else find_artefact(run)
    if as_json:
        show_json(
            {
                "run": None if run is None else str(run.path),
                "job": leader["metadata"]["name"],
                "job_state": view.phase.value,
                "artefact": None if artefact is None else str(artefact),
                "exit_code": code,
                "report": None if report is None else report.model_dump(mode="json"),
            }
        )
    elif report is not None and run is not None:
        from tightfit.cli.render.train import show_end

        show_end(report, folder=_short(run.path), artefact=artefact, notes=[])


def _short(path: Path) -> Path:
    """As it is typed from here."""
    try:
        return path.relative_to(Path.cwd())
    except ValueError:
        return path


def _read_state(run: RunFolder) -> RunState | None:
    try:
        return run.read_state()
    except UserError:
        return None
