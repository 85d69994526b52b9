"""`tightfit farm`: the prompts of a file over every node there is, each answered once."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tightfit.cli.engine_choice import engine_request
from tightfit.cli.exit_codes import EXIT_INTERRUPTED
from tightfit.cli.flags.farm import RAY, FarmFlags, read_engine
from tightfit.cli.flags.generate import GenerateFlags
from tightfit.cli.terminal.harmless import harmless
from tightfit.cli.terminal.json_output import show_json
from tightfit.cli.terminal.output import announce, write_err
from tightfit.core.errors import UsageError, UserError

if TYPE_CHECKING:
    from tightfit.engines.open import EngineRequest
    from tightfit.farm.crew import Starter
    from tightfit.farm.estimate import FarmEstimate
    from tightfit.farm.folder import FarmFile
    from tightfit.farm.places import Place, PlaceKind
    from tightfit.farm.statistics import FarmStatistics
    from tightfit.farm.submit import FarmEnd, FarmOrder, Submitter
    from tightfit.serve.generate.job import GenerateJob
    from tightfit.serve.generate.plan import Prediction


def farm(flags: FarmFlags) -> None:
    """Read, find places, estimate, start, watch, collect, and say how it went."""
    from tightfit.cli.generate import choose_out, read_job
    from tightfit.core.files import check_writable
    from tightfit.farm.collect import count_kept
    from tightfit.farm.submit import Submitter, open_farm
    from tightfit.runtime.artefacts import find_artefact

    asked = as_generate(flags)
    is_ray = read_engine(flags.engine) == RAY
    job = read_job(asked)
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
        _tell_finished(flags, folder, out)
        return
    with _interrupts_told(flags, folder, farm_file):
        prediction = _predict(places, request, job)
        _require_fit(flags, places, prediction, request)
        submitter = Submitter(folder, farm_file, places, make_starters(folder, places, request))
        # What comes of it is of all answers, those of earlier commands too.
        whole = _estimate(flags, places, prediction, job, num_answers=job.num_answers)
        num_left = job.num_answers - count_kept(folder, farm_file)
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
            "No prompts were named.", remedy=f"tightfit farm {harmless(model)} --prompts FILE"
        )
    names = {field.name for field in dataclasses.fields(GenerateFlags)}
    given = {
        field.name: getattr(flags, field.name)
        for field in dataclasses.fields(flags)
        if field.name in names
    }
    engine = read_engine(flags.engine)
    return GenerateFlags(**(given | {"model": model, "engine": None if engine == RAY else engine}))


def find_places(flags: FarmFlags, request: EngineRequest, *, is_ray: bool) -> tuple[Place, ...]:
    """Where workers are to run, by `--partitions`."""
    from tightfit.farm.places import KUBERNETES, LOCAL, choose_slurm_places, read_partitions

    if is_ray:
        from tightfit.farm.start_ray import find_ray_places

        return find_ray_places(most=flags.workers)
    words = read_partitions(flags.partitions)
    if words == (LOCAL,):
        return (_find_local(flags, request),)
    if words == (KUBERNETES,):
        from tightfit.farm.start_kubernetes import find_pods

        return find_pods(num_workers=flags.workers)
    from tightfit.hardware.slurm import probe_slurm_inventory

    return choose_slurm_places(probe_slurm_inventory(), words, most=flags.workers)


def make_starters(
    folder: Path, places: tuple[Place, ...], request: EngineRequest
) -> Mapping[PlaceKind, Starter]:
    """What starts workers in these places."""
    from tightfit.farm.crew import read_jobs_file
    from tightfit.farm.places import PlaceKind
    from tightfit.farm.start_local import LocalStarter
    from tightfit.launch.site import read_site

    # Those of an earlier command too, with other --partitions: they are ended with the rest.
    kinds = {place.kind for place in places} | {
        job.kind for job in read_jobs_file(folder) if job.kind is PlaceKind.SLURM
    }
    model = [str(request.artefact.path), str(request.artefact.base or request.artefact.path)]
    starters: dict[PlaceKind, Starter] = {PlaceKind.LOCAL: LocalStarter(folder)}
    if PlaceKind.SLURM in kinds:
        from tightfit.farm.start_slurm import SlurmStarter

        starters[PlaceKind.SLURM] = SlurmStarter(folder, read_site(), mounts=model)
    if PlaceKind.KUBERNETES in kinds:
        from tightfit.farm.start_kubernetes import KubernetesStarter

        starters[PlaceKind.KUBERNETES] = KubernetesStarter(folder, read_site(), mounts=model)
    if PlaceKind.RAY in kinds:
        from tightfit.farm.start_ray import RayStarter

        starters[PlaceKind.RAY] = RayStarter(folder)
    return starters


def _find_local(flags: FarmFlags, request: EngineRequest) -> Place:
    from tightfit.farm.places import local_place
    from tightfit.hardware.local import probe_here
    from tightfit.hardware.nvml import read_driver

    num_gpus = 0 if request.device == "cpu" else len(read_driver().gpus)
    gpu = probe_here().groups[0].node.gpu if num_gpus else None
    is_spread = request.device.startswith("cuda")  # one worker with the cards it was told
    return local_place(num_gpus=1 if is_spread else num_gpus, num_workers=flags.workers, gpu=gpu)


def _order(
    flags: FarmFlags,
    request: EngineRequest,
    job: GenerateJob,
    places: tuple[Place, ...],
    out: Path,
) -> FarmOrder:
    from tightfit.farm.folder import LEASE_SECONDS
    from tightfit.farm.submit import FarmOrder
    from tightfit.serve.generate.settings import describe_settings

    return FarmOrder(
        out=out,
        job=job,
        request=request,
        settings=describe_settings(request, job),
        num_workers=sum(place.num_workers for place in places),
        lease_seconds=flags.lease or LEASE_SECONDS,
        is_fresh=flags.fresh,
    )


def _tell_finished(flags: FarmFlags, folder: Path, out: Path) -> None:
    """What is there already, with the statistics that were kept of it."""
    write_err(f"{harmless(str(out))} is finished already; --fresh makes the answers again\n")
    told: dict[str, Any] = {"finished": True, "out": str(out)}
    if flags.stats is not None:
        from tightfit.farm.submit import read_statistics

        statistics = read_statistics(folder)
        _write_statistics(flags.stats, statistics)
        told |= statistics.model_dump(mode="json")
    if flags.as_json:
        show_json(told)


@contextlib.contextmanager
def _interrupts_told(flags: FarmFlags, folder: Path, farm_file: FarmFile) -> Iterator[None]:
    """Ctrl-C leaves one JSON document too, where JSON was asked for."""
    try:
        yield
    except KeyboardInterrupt:
        if flags.as_json:
            from tightfit.farm.collect import count_kept

            show_json(
                {
                    "status": "interrupted",
                    "finished": False,
                    "out": farm_file.out,
                    "num_answers": farm_file.num_answers,
                    "num_kept_answers": count_kept(folder, farm_file),
                    "remedy": "the same command goes on",
                    "exit_code": EXIT_INTERRUPTED,
                }
            )
        raise


def _estimate(
    flags: FarmFlags,
    places: tuple[Place, ...],
    prediction: Prediction | None,
    job: GenerateJob,
    *,
    num_answers: int,
) -> FarmEstimate:
    from tightfit.farm.estimate import Amount, estimate_farm

    most = num_answers * job.sampling.max_new_tokens
    amount = Amount(num_answers=num_answers, num_new_tokens=most, threads=flags.threads)
    return estimate_farm(places, prediction, amount)


def _require_fit(
    flags: FarmFlags,
    places: tuple[Place, ...],
    prediction: Prediction | None,
    request: EngineRequest,
) -> None:
    """What is known of this machine alone: nodes are judged by their own workers."""
    from tightfit.farm.places import PlaceKind
    from tightfit.serve.generate.plan import require_fit

    is_here = all(place.kind is PlaceKind.LOCAL for place in places)
    if prediction is not None and is_here and flags.check:
        require_fit(prediction, request)


def _predict(
    places: tuple[Place, ...], request: EngineRequest, job: GenerateJob
) -> Prediction | None:
    """Of this machine; of its CPU where the work is done elsewhere."""
    from tightfit.engines.open import open_prompter
    from tightfit.farm.places import PlaceKind
    from tightfit.serve.generate.plan import measure_prompts, predict

    is_here = all(place.kind is PlaceKind.LOCAL for place in places)
    asked = request if is_here else replace(request, device="cpu")
    try:
        lengths = measure_prompts(job.prompts, open_prompter(request), is_raw=job.is_raw)
        return predict(asked, lengths, job.sampling)
    except UserError:
        return None  # what the nodes can do need not be installed here


def _show_estimate(
    flags: FarmFlags,
    places: tuple[Place, ...],
    estimate: FarmEstimate,
    job: GenerateJob,
    out: Path,
) -> None:
    from tightfit.cli.render.farm import describe_estimate, show_estimate

    told = describe_estimate(places, estimate, job) | {"out": str(out)}
    if flags.as_json:
        show_json(told)
    else:
        show_estimate(told)


def _watch(submitter: Submitter, flags: FarmFlags, estimate: FarmEstimate) -> FarmEnd:
    from tightfit.cli.watch_farm import watching

    with _stdout_kept():
        try:
            with watching(estimate) as watch:
                return submitter.run(watch, lambda text: write_err(f"{harmless(text)}\n"))
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
    from tightfit.farm.start_ray import disconnect_ray

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


def _report(flags: FarmFlags, end: FarmEnd, out: Path, estimate: FarmEstimate) -> None:
    from tightfit.farm.measured import record_farm

    announce(out)
    record_farm(estimate, end.statistics)
    failed, statistics = len(end.collected.failures), end.statistics
    if end.collected.failures_path is not None:
        announce(end.collected.failures_path)
    if flags.stats is not None:
        _write_statistics(flags.stats, statistics)
    fault = _fault_of(failed, statistics.num_answers + failed, out) if failed else None
    if flags.as_json:
        from tightfit.cli.render.farm import describe_expected

        told: dict[str, Any] = {"finished": fault is None, "out": str(out)}
        told |= statistics.model_dump(mode="json") | {"estimate": describe_expected(estimate)}
        if fault is not None:
            told |= {"error": fault.problem, "remedy": fault.remedy, "exit_code": fault.exit_code}
        show_json(told)
    else:
        from tightfit.cli.render.farm import show_statistics

        show_statistics(statistics)
    if fault is not None and not flags.as_json:
        raise fault
    if fault is not None:
        write_err(f"error: {harmless(fault.problem)}\n  try: {harmless(fault.remedy)}\n")
        raise typer.Exit(fault.exit_code)


def _fault_of(failed: int, total: int, out: Path) -> UserError:
    others = f"; the others are in {out}" if failed < total else ""
    return UserError(
        f"{failed:,} of {total:,} answers could not be given{others}.",
        remedy=f"{out}.failed.jsonl says why; the same command tries those again",
    )
