"""`tightfit farm`: answer the prompts of a file on many machines, once each."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from tightfit.api.options.engines import engine_request
from tightfit.api.options.serving import RAY, read_engine
from tightfit.cli.flags.serving import FarmFlags, GenerateFlags
from tightfit.cli.terminal.output import announce, show_json, write_err
from tightfit.cli.terminal.screen import Cell, Column, heading, make_table, plain, show
from tightfit.core.errors import EXIT_INTERRUPTED, UsageError, UserError
from tightfit.core.text import count_of, sanitize
from tightfit.core.units import render_seconds, render_usd
from tightfit.farm.estimate import Bounds, EstimateBasis, FarmEstimate
from tightfit.farm.progress import FarmProgress
from tightfit.farm.statistics import FarmStatistics, NodeStatistics
from tightfit.farm.worker_pool import WorkerGroup

if TYPE_CHECKING:
    from tightfit.engines.open import EngineRequest
    from tightfit.farm.folder import FarmFile
    from tightfit.farm.submit import FarmJob, FarmOutcome, Submitter
    from tightfit.farm.worker_pool import WorkerBackend, WorkerStarter
    from tightfit.serve.generate.job import GenerateJob
    from tightfit.serve.generate.prediction import InferencePrediction


# A farm as text: what is expected before it, and what each node did.


def describe_estimate(
    places: Sequence[WorkerGroup], estimate: FarmEstimate, job: GenerateJob
) -> dict[str, Any]:
    return {
        "num_prompts": len(job.prompts),
        "num_answers": job.num_answers,
        "num_left": estimate.num_answers,
        "num_workers": sum(place.num_workers for place in places),
        "types": [
            {
                "partition": kind.group,
                "device": kind.name,
                "num_workers": kind.num_workers,
                "new_tokens_per_second": _as_json(kind.new_tokens_per_second),
                "start_seconds": _as_json(kind.start_seconds),
                "basis": kind.basis.value,
                "usd_per_hour": kind.usd_per_hour,
            }
            for kind in estimate.types
        ],
        **describe_expected(estimate),
    }


def describe_expected(estimate: FarmEstimate) -> dict[str, Any]:
    """The whole, without its parts."""
    return {
        "basis": estimate.basis.value,
        "new_tokens_per_second": _as_json(estimate.new_tokens_per_second),
        "start_seconds": _as_json(estimate.start_seconds),
        "predicted_seconds": _as_json(estimate.seconds),
        "predicted_usd": _as_json(estimate.usd),
    }


def _as_json(bounds: Bounds | None) -> dict[str, float] | None:
    return None if bounds is None else {"low": bounds.low, "high": bounds.high}


def render_range(bounds: Bounds | Mapping[str, float], render: Callable[[float], str]) -> str:
    """`2 min to 5 min`; once, where both read the same."""
    if isinstance(bounds, Bounds):
        bounds = {"low": bounds.low, "high": bounds.high}
    low, high = render(bounds["low"]), render(bounds["high"])
    return low if low == high else f"{low} to {high}"


def show_estimate(told: Mapping[str, Any]) -> None:
    show(_render_estimate(told))


def _render_estimate(told: Mapping[str, Any]) -> Iterator[RenderableType]:
    answers = count_of(told["num_answers"], "answer")
    if told["num_left"] != told["num_answers"]:
        answers = f"The other {told['num_left']:,} of {answers}"
    yield heading(f"{answers} by {count_of(told['num_workers'], 'worker')}")
    rows: list[list[Cell]] = [
        [
            kind["partition"],
            kind["device"],
            f"{kind['num_workers']:,}",
            _rate_range(kind["new_tokens_per_second"]),
            kind["basis"],
            "-" if kind["usd_per_hour"] is None else render_usd(kind["usd_per_hour"]),
        ]
        for kind in told["types"]
    ]
    columns = [
        Column(title="partition"),
        Column(title="device"),
        Column(title="workers", right=True),
        Column(title="new tokens/s", right=True),
        Column(title="basis"),
        Column(title="rent an hour", right=True),
    ]
    yield make_table(columns, rows)
    yield plain(_time_and_cost(told))


_BASES = {
    EstimateBasis.MEASURED: "measured: by earlier runs of this model on such devices",
    EstimateBasis.CALIBRATED: "predicted, from rates that `tightfit calibrate` measured here",
    EstimateBasis.PREDICTED: "predicted: this model has not been run on such devices yet",
    EstimateBasis.MIXED: "measured for some devices, predicted for the others",
}


def _time_and_cost(told: Mapping[str, Any]) -> str:
    seconds, usd = told["predicted_seconds"], told["predicted_usd"]
    if seconds is None:
        return "How long it takes is known after the first answers."
    cost = "" if usd is None else f", {render_range(usd, render_usd)} at the clouds' prices"
    start = render_range(told["start_seconds"], render_seconds)
    return (
        f"About {render_range(seconds, render_seconds)}{cost}, of which {start} until models are "
        "loaded, with every worker at work and every answer as long as it may be "
        f"({_BASES[EstimateBasis(told['basis'])]}). Waiting in a queue comes on top; the first "
        "chunks will tell more."
    )


def show_statistics(told: FarmStatistics) -> None:
    show(_render_statistics(told))


def _render_statistics(told: FarmStatistics) -> Iterator[RenderableType]:
    yield heading(f"{count_of(told.num_answers, 'answer')} in {render_seconds(told.seconds)}")
    yield plain(
        f"{told.num_prompt_tokens:,} prompt and {told.num_new_tokens:,} new tokens; "
        f"{told.new_tokens_per_second:,.1f} new and {told.total_tokens_per_second:,.1f} in all a "
        f"second, {told.answers_per_second:,.2f} answers a second"
    )
    yield plain(_releases(told))
    yield ""
    columns = [
        Column(title="partition"),
        Column(title="node"),
        Column(title="workers", right=True),
        Column(title="answers", right=True),
        Column(title="share", right=True),
        Column(title="new tokens", right=True),
        Column(title="a second", right=True),
        Column(title="busy", right=True),
        Column(title="idle", right=True),
        Column(title="taken over", right=True),
        Column(title="doubled", right=True),
    ]
    yield make_table(columns, [_node_row(node) for node in told.nodes])


def _releases(told: FarmStatistics) -> str:
    size = count_of(told.prompts_per_chunk, "prompt")
    parts = [f"{count_of(told.num_chunks, 'chunk')} of {size}"]
    again = ", ".join(f"{count:,} {why}" for why, count in told.released.items())
    parts.append(f"leased again: {again}" if again else "none leased again")
    parts.append(f"done twice and discarded: {told.num_discarded:,}")
    return "; ".join(parts)


def _node_row(node: NodeStatistics) -> list[Cell]:
    lost = f" ({node.num_lost_workers:,} lost)" if node.num_lost_workers else ""
    return [
        node.partition,
        node.node,
        f"{node.num_workers:,}{lost}",
        f"{node.num_answers:,}",
        f"{node.share:.0%}",
        f"{node.num_new_tokens:,}",
        _rate(node.new_tokens_per_second),
        render_seconds(node.busy_seconds),
        render_seconds(node.idle_seconds),
        f"{sum(node.taken_over.values()):,}",
        f"{node.num_discarded:,}",
    ]


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.1f}" if rate < 100 else f"{rate:,.0f}"


def _rate_range(rate: Mapping[str, float] | None) -> str:
    return "-" if rate is None else render_range(rate, _rate)


# A farm while it runs: how far it is, and what its first chunks make of the estimate.

LINE_SECONDS = 60.0
"""Between lines of progress where nobody watches."""
LEAST_CHUNKS = 3


@contextlib.contextmanager
def watching(estimate: FarmEstimate) -> Iterator[Callable[[FarmProgress], None]]:
    """A table on stderr where someone watches, a line a minute elsewhere.

    Both say once what the first chunks make of the estimate.
    """
    revision = _Revision(estimate)
    if not sys.stderr.isatty():
        lines = _Lines()

        def tell(progress: FarmProgress) -> None:
            revision.show(progress, lambda text: write_err(f"{text}\n"))
            lines.show(progress)

        yield tell
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), transient=True, refresh_per_second=2) as live:

        def draw(progress: FarmProgress) -> None:
            revision.show(progress, live.console.print)
            live.update(_render_progress(progress, estimate))

        yield draw


class _Revision:
    """Once as many chunks have come as workers are there, they say more than any estimate."""

    def __init__(self, estimate: FarmEstimate) -> None:
        self._estimate = estimate
        self._num_before: int | None = None
        self._is_told = False

    def show(self, progress: FarmProgress, tell: Callable[[str], None]) -> None:
        if self._num_before is None:
            self._num_before = progress.num_done
        num_new = progress.num_done - self._num_before
        if self._is_told or progress.is_finished or num_new < max(LEAST_CHUNKS, progress.num_alive):
            return
        self._is_told = True
        text = revise(progress, self._estimate, num_chunks=num_new)
        if text is not None:
            tell(text)


def revise(progress: FarmProgress, estimate: FarmEstimate, *, num_chunks: int) -> str | None:
    """The estimate anew, from the chunks that this command saw done."""
    if progress.seconds_left is None:
        return None
    spent = progress.seconds
    whole = progress.seconds_left + Bounds(spent, spent)
    rent = estimate.usd_per_hour
    cost = "" if rent is None else f", {render_range(whole.scaled(rent / 3600), render_usd)}"
    before = (
        ""
        if estimate.seconds is None
        else f" instead of {render_range(estimate.seconds, render_seconds)}"
    )
    return (
        f"measured by the first {count_of(num_chunks, 'chunk')}: "
        f"{render_range(whole, render_seconds)} in all{before}{cost}"
    )


class _Lines:
    def __init__(self) -> None:
        self._due_s = time.monotonic() + LINE_SECONDS

    def show(self, progress: FarmProgress) -> None:
        if time.monotonic() >= self._due_s and not progress.is_finished:
            self._due_s += LINE_SECONDS
            write_err(f"{summarize(progress)}\n")


def summarize(progress: FarmProgress, estimate: FarmEstimate | None = None) -> str:
    """One line."""
    left = ""
    if progress.seconds_left is not None:
        left = f", {render_range(progress.seconds_left, render_seconds)} left (measured)"
    elif estimate is not None and estimate.seconds is not None:
        expected = render_range(estimate.seconds, render_seconds)
        left = f", {expected} in all ({estimate.basis.value})"
    return (
        f"{progress.num_done:,} of {progress.num_chunks:,} chunks, "
        f"{progress.new_tokens_per_second:,.0f} new tokens/s by "
        f"{count_of(progress.num_alive, 'worker')}{left}"
    )


def _render_progress(progress: FarmProgress, estimate: FarmEstimate) -> RenderableType:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("partition", "node", "workers", "answers", "leases", "new tokens/s"):
        table.add_column(title, justify="left" if title in ("partition", "node") else "right")
    for node in progress.nodes:
        table.add_row(
            sanitize(node.partition),
            sanitize(node.node),
            f"{node.num_workers:,}",
            f"{node.num_answers:,}",
            f"{node.num_leases:,}",
            f"{node.new_tokens_per_second:,.0f}",
        )
    bar = ProgressBar(total=progress.num_chunks, completed=progress.num_done, width=60)
    return Group(table, bar, Text(summarize(progress, estimate)))


def farm(flags: FarmFlags) -> None:
    """Read, find places, estimate, start, watch, collect, and say how it went."""
    from tightfit.cli.generate import choose_out, read_generate_job
    from tightfit.core.files import check_writable
    from tightfit.farm.results import count_published_answers
    from tightfit.farm.submit import Submitter, open_farm
    from tightfit.runtime.artefacts import find_artefact

    asked = as_generate(flags)
    is_ray = read_engine(flags.engine) == RAY
    job = read_generate_job(asked)
    request = engine_request(asked, find_artefact(asked.model))
    places = find_places(flags, request, is_ray=is_ray)
    out = choose_out(asked)
    if flags.dry_run:
        prediction = _predict(places, request, job)
        estimate = _estimate(flags, places, prediction, job, num_answers=job.num_answers)
        _show_estimate(flags, places, estimate, job, out)
        return
    if flags.stats is not None:
        check_writable(flags.stats)
    folder, farm_file, is_finished = open_farm(_order(flags, request, job, places, out))
    if is_finished:
        _report_finished(flags, folder, out)
        return
    with _interrupts_reported(flags, folder, farm_file):
        prediction = _predict(places, request, job)
        _require_fit(flags, places, prediction, request)
        submitter = Submitter(folder, farm_file, places, make_starters(folder, places, request))
        # What comes of it is of all answers, those of earlier commands too.
        whole = _estimate(flags, places, prediction, job, num_answers=job.num_answers)
        num_left = job.num_answers - count_published_answers(folder, farm_file)
        rest = _estimate(flags, places, prediction, job, num_answers=num_left)
        if not flags.as_json:
            _show_estimate(flags, places, rest, job, out)
        end = _watch(submitter, flags, rest)
    _report(flags, end, out, whole)


def as_generate(flags: FarmFlags) -> GenerateFlags:
    """The part that `generate` has too; ray is no engine there."""
    model = flags.model or flags.model_option
    if flags.model is not None and flags.model_option is not None:
        raise UsageError("The model was named twice.", remedy="leave --model out")
    if model is None:
        raise UsageError("No model was named.", remedy="tightfit farm MODEL --prompts prompts.txt")
    if flags.prompts is None:
        raise UsageError(
            "No prompts were named.", remedy=f"tightfit farm {sanitize(model)} --prompts FILE"
        )
    names = {field.name for field in dataclasses.fields(GenerateFlags)}
    given = {
        field.name: getattr(flags, field.name)
        for field in dataclasses.fields(flags)
        if field.name in names
    }
    engine = read_engine(flags.engine)
    return GenerateFlags(**(given | {"model": model, "engine": None if engine == RAY else engine}))


def find_places(
    flags: FarmFlags, request: EngineRequest, *, is_ray: bool
) -> tuple[WorkerGroup, ...]:
    """Where workers are to run, by `--partitions`."""
    from tightfit.farm.worker_pool import KUBERNETES, LOCAL, choose_slurm_groups, read_partitions

    if is_ray:
        from tightfit.farm.backends.ray import find_ray_groups

        return find_ray_groups(most=flags.workers)
    words = read_partitions(flags.partitions)
    if words == (LOCAL,):
        return (_find_local(flags, request),)
    if words == (KUBERNETES,):
        from tightfit.farm.backends.kubernetes import find_pod_groups

        return find_pod_groups(num_workers=flags.workers)
    from tightfit.hardware.slurm import probe_slurm_inventory

    return choose_slurm_groups(probe_slurm_inventory(), words, most=flags.workers)


def make_starters(
    folder: Path, places: tuple[WorkerGroup, ...], request: EngineRequest
) -> Mapping[WorkerBackend, WorkerStarter]:
    """What starts workers in these places."""
    from tightfit.clusters.site import read_site
    from tightfit.farm.backends.local import LocalStarter
    from tightfit.farm.worker_pool import WorkerBackend, read_jobs_file

    # Those of an earlier command too, with other --partitions: they are ended with the rest.
    kinds = {place.kind for place in places} | {
        job.kind for job in read_jobs_file(folder) if job.kind is WorkerBackend.SLURM
    }
    model = [str(request.artefact.path), str(request.artefact.base or request.artefact.path)]
    starters: dict[WorkerBackend, WorkerStarter] = {WorkerBackend.LOCAL: LocalStarter(folder)}
    if WorkerBackend.SLURM in kinds:
        from tightfit.farm.backends.slurm import SlurmStarter

        starters[WorkerBackend.SLURM] = SlurmStarter(folder, read_site(), mounts=model)
    if WorkerBackend.KUBERNETES in kinds:
        from tightfit.farm.backends.kubernetes import KubernetesStarter

        starters[WorkerBackend.KUBERNETES] = KubernetesStarter(folder, read_site(), mounts=model)
    if WorkerBackend.RAY in kinds:
        from tightfit.farm.backends.ray import RayStarter

        starters[WorkerBackend.RAY] = RayStarter(folder)
    return starters


def _find_local(flags: FarmFlags, request: EngineRequest) -> WorkerGroup:
    from tightfit.farm.worker_pool import make_local_group
    from tightfit.hardware.local import probe_here
    from tightfit.hardware.nvml import read_driver

    num_gpus = 0 if request.device == "cpu" else len(read_driver().gpus)
    gpu = probe_here().groups[0].node.gpu if num_gpus else None
    is_spread = request.device.startswith("cuda")  # one worker with the cards it was told
    return make_local_group(
        num_gpus=1 if is_spread else num_gpus, num_workers=flags.workers, gpu=gpu
    )


def _order(
    flags: FarmFlags,
    request: EngineRequest,
    job: GenerateJob,
    places: tuple[WorkerGroup, ...],
    out: Path,
) -> FarmJob:
    from tightfit.farm.folder import LEASE_SECONDS
    from tightfit.farm.submit import FarmJob
    from tightfit.serve.generate.job import describe_settings

    return FarmJob(
        out=out,
        job=job,
        request=request,
        settings=describe_settings(request, job),
        num_workers=sum(place.num_workers for place in places),
        lease_seconds=flags.lease or LEASE_SECONDS,
        is_fresh=flags.fresh,
    )


def _report_finished(flags: FarmFlags, folder: Path, out: Path) -> None:
    """What is there already, with the statistics that were kept of it."""
    write_err(f"{sanitize(str(out))} is finished already; --fresh makes the answers again\n")
    told: dict[str, Any] = {"finished": True, "out": str(out)}
    if flags.stats is not None:
        from tightfit.farm.submit import read_statistics

        statistics = read_statistics(folder)
        _write_statistics(flags.stats, statistics)
        told |= statistics.model_dump(mode="json")
    if flags.as_json:
        show_json(told)


@contextlib.contextmanager
def _interrupts_reported(flags: FarmFlags, folder: Path, farm_file: FarmFile) -> Iterator[None]:
    """Ctrl-C leaves one JSON document too, where JSON was asked for."""
    try:
        yield
    except KeyboardInterrupt:
        if flags.as_json:
            from tightfit.farm.results import count_published_answers

            show_json(
                {
                    "status": "interrupted",
                    "finished": False,
                    "out": farm_file.out,
                    "num_answers": farm_file.num_answers,
                    "num_kept_answers": count_published_answers(folder, farm_file),
                    "remedy": "the same command goes on",
                    "exit_code": EXIT_INTERRUPTED,
                }
            )
        raise


def _estimate(
    flags: FarmFlags,
    places: tuple[WorkerGroup, ...],
    prediction: InferencePrediction | None,
    job: GenerateJob,
    *,
    num_answers: int,
) -> FarmEstimate:
    from tightfit.farm.estimate import FarmWorkload, estimate_farm

    most = num_answers * job.sampling.max_new_tokens
    amount = FarmWorkload(num_answers=num_answers, num_new_tokens=most, threads=flags.threads)
    return estimate_farm(places, prediction, amount)


def _require_fit(
    flags: FarmFlags,
    places: tuple[WorkerGroup, ...],
    prediction: InferencePrediction | None,
    request: EngineRequest,
) -> None:
    """What is known of this machine alone: nodes are judged by their own workers."""
    from tightfit.farm.worker_pool import WorkerBackend
    from tightfit.serve.generate.prediction import require_fit

    is_here = all(place.kind is WorkerBackend.LOCAL for place in places)
    if prediction is not None and is_here and flags.check:
        require_fit(prediction, request)


def _predict(
    places: tuple[WorkerGroup, ...], request: EngineRequest, job: GenerateJob
) -> InferencePrediction | None:
    """Of this machine; of its CPU where the work is done elsewhere."""
    from tightfit.engines.open import open_prompter
    from tightfit.farm.worker_pool import WorkerBackend
    from tightfit.serve.generate.prediction import measure_prompts, predict_inference

    is_here = all(place.kind is WorkerBackend.LOCAL for place in places)
    asked = request if is_here else replace(request, device="cpu")
    try:
        lengths = measure_prompts(job.prompts, open_prompter(request), is_raw=job.is_raw)
        return predict_inference(asked, lengths, job.sampling)
    except UserError:
        return None  # what the nodes can do need not be installed here


def _show_estimate(
    flags: FarmFlags,
    places: tuple[WorkerGroup, ...],
    estimate: FarmEstimate,
    job: GenerateJob,
    out: Path,
) -> None:

    told = describe_estimate(places, estimate, job) | {"out": str(out)}
    if flags.as_json:
        show_json(told)
    else:
        show_estimate(told)


def _watch(submitter: Submitter, flags: FarmFlags, estimate: FarmEstimate) -> FarmOutcome:

    with _stdout_kept():
        try:
            with watching(estimate) as watch:
                return submitter.run(watch, lambda text: write_err(f"{sanitize(text)}\n"))
        except KeyboardInterrupt:
            if _wants_end(flags):
                submitter.stop()
                write_err("\nstopped: what was answered is kept; the same command goes on\n")
            else:
                write_err("\nthe workers go on; the same command watches them again\n")
            raise


@contextlib.contextmanager
def _stdout_kept() -> Iterator[None]:
    """For the result alone: Ray prints there whatever befalls its workers, from a thread."""
    from tightfit.farm.backends.ray import disconnect_ray

    with contextlib.redirect_stdout(sys.stderr):
        try:
            yield
        finally:
            disconnect_ray()


def _wants_end(flags: FarmFlags) -> bool:
    """Ctrl-C again, or no one to ask: end them."""
    if flags.as_json or not (sys.stdin is not None and sys.stdin.isatty()):
        return True
    try:
        return typer.confirm("\nEnd the workers too?", default=True, err=True)
    except (KeyboardInterrupt, typer.Abort):
        return True


def _write_statistics(path: Path, statistics: FarmStatistics) -> None:
    from tightfit.core.files import write_atomic

    write_atomic(path, statistics.model_dump_json(indent=2) + "\n")
    announce(path)


def _report(flags: FarmFlags, end: FarmOutcome, out: Path, estimate: FarmEstimate) -> None:
    from tightfit.farm.estimate import record_farm_rates

    announce(out)
    record_farm_rates(estimate, end.statistics)
    failed, statistics = len(end.collected.failures), end.statistics
    if end.collected.failures_path is not None:
        announce(end.collected.failures_path)
    if flags.stats is not None:
        _write_statistics(flags.stats, statistics)
    fault = _error_of(failed, statistics.num_answers + failed, out) if failed else None
    if flags.as_json:
        told: dict[str, Any] = {"finished": fault is None, "out": str(out)}
        told |= statistics.model_dump(mode="json") | {"estimate": describe_expected(estimate)}
        if fault is not None:
            told |= {"error": fault.problem, "remedy": fault.remedy, "exit_code": fault.exit_code}
        show_json(told)
    else:
        show_statistics(statistics)
    if fault is not None and not flags.as_json:
        raise fault
    if fault is not None:
        write_err(f"error: {sanitize(fault.problem)}\n  try: {sanitize(fault.remedy)}\n")
        raise typer.Exit(fault.exit_code)


def _error_of(failed: int, total: int, out: Path) -> UserError:
    others = f"; the others are in {out}" if failed < total else ""
    return UserError(
        f"{failed:,} of {total:,} answers could not be given{others}.",
        remedy=f"{out}.failed.jsonl says why; the same command tries those again",
    )
