"""`farm`: answer the prompts of a file on many machines, once each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tightfit.api.call import accepts_keywords
from tightfit.api.generate import (
    AnswersResult,
    choose_out,
    predict_job,
    read_generate_job,
)
from tightfit.api.options.engines import engine_request
from tightfit.api.options.serving import RAY, FarmOptions
from tightfit.clusters.site import read_site
from tightfit.core.errors import UsageError, UserError
from tightfit.core.files import check_writable, write_atomic
from tightfit.core.progress import Progress
from tightfit.engines.open import EngineRequest
from tightfit.farming.backends.local import LocalStarter
from tightfit.farming.estimate import FarmEstimate, FarmWorkload, estimate_farm, record_farm_rates
from tightfit.farming.folder import LEASE_SECONDS, FarmFile
from tightfit.farming.results import count_published_answers
from tightfit.farming.statistics import FarmProgress, FarmStatistics
from tightfit.farming.submit import (
    FarmJob,
    FarmOutcome,
    Submitter,
    count_left,
    open_farm,
    read_statistics,
)
from tightfit.farming.worker_pool import (
    KUBERNETES,
    LOCAL,
    WorkerBackend,
    WorkerGroup,
    WorkerStarter,
    choose_slurm_groups,
    make_local_group,
    read_jobs_file,
    read_partitions,
)
from tightfit.hardware.local import probe_here
from tightfit.hardware.machine import read_driver
from tightfit.runtime.model_files import find_artefact
from tightfit.serving.generate.prediction import InferencePrediction, require_fit
from tightfit.serving.generate.run import GenerateJob, describe_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class FarmPreview:
    """A farm before it starts: where workers run, and what is expected of them."""

    out: Path
    job: GenerateJob
    groups: tuple[WorkerGroup, ...]
    estimate: FarmEstimate
    """Of the answers that are left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FarmResult(AnswersResult):
    """What a farm wrote."""

    statistics: FarmStatistics | None = None
    """None where an earlier call finished it and `stats` was not given."""
    estimate: FarmEstimate | None = None
    """Of all answers, as it was before the workers started."""


class FarmWatcher:
    """Receives what happens during a farm; a subclass overrides what it wants to show."""

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress

    def estimated(self, preview: FarmPreview) -> None:
        """What is left to do, and how long it is expected to take."""

    @contextlib.contextmanager
    def watching(
        self,
        preview: FarmPreview,  # noqa: ARG002  (for subclasses)
    ) -> Iterator[Callable[[FarmProgress], None]]:
        """Entered while workers run; yields what is called about once a second."""
        progress = self._progress

        def report(seen: FarmProgress) -> None:
            if progress is not None:
                progress("chunks", seen.num_done, seen.num_chunks)

        yield report

    def message(self, text: str) -> None:
        """Workers were started, in one line."""

    def stops_workers(self) -> bool:
        """Asked when the call is interrupted: whether the workers end too. Otherwise they go on."""
        return True

    def left_running(self, cancel_commands: tuple[str, ...]) -> None:
        """The workers go on, or stay in the queue; the commands that end them from a shell."""

    def interrupted(self, file: FarmFile, num_kept: int) -> None:
        """The call was interrupted; a later one resumes the farm."""


@accepts_keywords(FarmOptions)
def farm(options: FarmOptions) -> FarmResult:
    """Answer every prompt of a file. A farm that was interrupted is resumed by the same call."""
    return run_farm(options, FarmWatcher(options.progress))


@accepts_keywords(FarmOptions)
def preview_farm(options: FarmOptions) -> FarmPreview:
    """Where workers would run, and the expected time and cost."""
    plan = _FarmPlan(options)
    num_left = count_left(plan.describe_job())
    return plan.preview(plan.predict() if num_left else None, num_answers=num_left)


def run_farm(options: FarmOptions, watcher: FarmWatcher) -> FarmResult:
    """`farm` with a watcher."""
    plan = _FarmPlan(options)
    if options.stats is not None:
        check_writable(options.stats)
    folder, file, is_finished = open_farm(plan.describe_job())
    if is_finished:
        statistics = None if options.stats is None else read_statistics(folder)
        _write_statistics(options.stats, statistics)
        return FarmResult(
            out=plan.out, num_answers=file.num_answers, statistics=statistics, was_finished=True
        )
    try:
        prediction = plan.predict()
        plan.require_fit(prediction)
        starters = make_starters(folder, plan.groups, plan.request)
        submitter = Submitter(folder, file, plan.groups, starters)
        # Rates are recorded for all answers, those of earlier commands too.
        whole = plan.preview(prediction, num_answers=plan.job.num_answers).estimate
        num_left = plan.job.num_answers - count_published_answers(folder, file)
        preview = plan.preview(prediction, num_answers=num_left)
        watcher.estimated(preview)
        outcome = _watch(submitter, preview, watcher)
    except KeyboardInterrupt:
        watcher.interrupted(file, count_published_answers(folder, file))
        raise
    record_farm_rates(whole, outcome.statistics)
    _write_statistics(options.stats, outcome.statistics)
    num_failed = len(outcome.collected.failures)
    return FarmResult(
        out=plan.out,
        num_answers=outcome.statistics.num_answers + num_failed,
        num_failed=num_failed,
        failures_path=outcome.collected.failures_path,
        statistics=outcome.statistics,
        estimate=whole if num_left else preview.estimate,
    )


def make_starters(
    folder: Path, groups: tuple[WorkerGroup, ...], request: EngineRequest
) -> Mapping[WorkerBackend, WorkerStarter]:
    """What starts the workers of each backend."""
    # Also for the workers of an earlier command with other --partitions: they end with the rest.
    kinds = {group.kind for group in groups} | {
        job.kind for job in read_jobs_file(folder) if job.kind is WorkerBackend.SLURM
    }
    model = [str(request.artefact.path), str(request.artefact.base or request.artefact.path)]
    starters: dict[WorkerBackend, WorkerStarter] = {WorkerBackend.LOCAL: LocalStarter(folder)}
    if WorkerBackend.SLURM in kinds:
        from tightfit.farming.backends.slurm import SlurmStarter

        starters[WorkerBackend.SLURM] = SlurmStarter(folder, read_site(), mounts=model)
    if WorkerBackend.KUBERNETES in kinds:
        from tightfit.farming.backends.kubernetes import KubernetesStarter

        starters[WorkerBackend.KUBERNETES] = KubernetesStarter(folder, read_site(), mounts=model)
    if WorkerBackend.RAY in kinds:
        from tightfit.farming.backends.ray import RayStarter

        starters[WorkerBackend.RAY] = RayStarter(folder)
    return starters


class _FarmPlan:
    """Everything that the options say, read and found."""

    def __init__(self, options: FarmOptions) -> None:
        model = options.model or options.model_option
        if options.model is not None and options.model_option is not None:
            raise UsageError("The model was named twice.", remedy="leave --model out")
        if model is None:
            raise UsageError(
                "No model was named.", remedy="tightfit farm MODEL --prompts prompts.txt"
            )
        engine = options.engine
        self._options = options
        self.job = read_generate_job(options, options, verb="farm", model=model)
        self.out = choose_out(options)
        # Ray starts the workers; their engine is then chosen by each of them.
        plain = replace(options, engine=None if engine == RAY else engine)
        self.request = engine_request(plain, find_artefact(model))
        self.groups = self._find_groups(is_ray=engine == RAY)

    @property
    def _is_local(self) -> bool:
        return all(group.kind is WorkerBackend.LOCAL for group in self.groups)

    def describe_job(self) -> FarmJob:
        return FarmJob(
            out=self.out,
            job=self.job,
            request=self.request,
            settings=describe_settings(self.request, self.job),
            num_workers=sum(group.num_workers for group in self.groups),
            lease_seconds=self._options.lease or LEASE_SECONDS,
            is_fresh=self._options.fresh,
        )

    def predict(self) -> InferencePrediction | None:
        """For this machine; for its CPU where the workers run elsewhere."""
        try:
            local = self.request if self._is_local else replace(self.request, device="cpu")
            return predict_job(local, self.job)
        except UserError:
            return None  # what the nodes have need not be installed here

    def require_fit(self, prediction: InferencePrediction | None) -> None:
        """Checked for this machine only: workers elsewhere check their own."""
        if prediction is not None and self._is_local and self._options.check:
            require_fit(prediction, self.request)

    def preview(self, prediction: InferencePrediction | None, *, num_answers: int) -> FarmPreview:
        workload = FarmWorkload(
            num_answers=num_answers,
            num_new_tokens=num_answers * self.job.sampling.max_new_tokens,
            threads=self._options.threads,
        )
        estimate = estimate_farm(self.groups, prediction, workload)
        return FarmPreview(out=self.out, job=self.job, groups=self.groups, estimate=estimate)

    def _find_groups(self, *, is_ray: bool) -> tuple[WorkerGroup, ...]:
        most = self._options.workers
        if is_ray:
            from tightfit.farming.backends.ray import find_ray_groups

            return find_ray_groups(most=most)
        words = read_partitions(self._options.partitions)
        if words == (LOCAL,):
            return (self._find_local_group(),)
        if words == (KUBERNETES,):
            from tightfit.farming.backends.kubernetes import find_pod_groups

            return find_pod_groups(num_workers=most)
        from tightfit.hardware.slurm import probe_slurm_inventory

        return choose_slurm_groups(probe_slurm_inventory(), words, most=most)

    def _find_local_group(self) -> WorkerGroup:
        num_gpus = 0 if self.request.device == "cpu" else len(read_driver().gpus)
        gpu = probe_here().groups[0].node.gpu if num_gpus else None
        is_spread = self.request.device.startswith("cuda")  # one worker with the GPUs it was given
        return make_local_group(
            num_gpus=1 if is_spread else num_gpus, num_workers=self._options.workers, gpu=gpu
        )


def _watch(submitter: Submitter, preview: FarmPreview, watcher: FarmWatcher) -> FarmOutcome:
    from tightfit.farming.backends.ray import disconnect_ray

    with watcher.watching(preview) as on_progress:
        try:
            return submitter.run(on_progress, watcher.message)
        except KeyboardInterrupt:
            if watcher.stops_workers():
                submitter.stop()
            else:
                watcher.left_running(submitter.list_cancel_commands())
            raise
        finally:
            disconnect_ray()


def _write_statistics(path: Path | None, statistics: FarmStatistics | None) -> None:
    if path is not None and statistics is not None:
        write_atomic(path, statistics.model_dump_json(indent=2) + "\n")
