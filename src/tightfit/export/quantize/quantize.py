"""`quantize_model`: make the wanted formats one after another and check each."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from tightfit.core.errors import InvalidInputError, UsageError, UserError
from tightfit.core.progress import Progress
from tightfit.core.version import __version__
from tightfit.export.formats import LIMITS, ExportFormat
from tightfit.export.quantize.job import (
    OutputPaths,
    QuantizeJob,
    QuantizeSettings,
    QuantizeSource,
    choose_output_paths,
    find_quantize_source,
    weight_bytes,
)
from tightfit.export.quantize.summary import (
    PLOT_FILE,
    QuantizedModel,
    QuantizeForecast,
    QuantizeStatus,
    QuantizeSummary,
    read_summary,
    write_plot,
    write_summary,
)
from tightfit.export.verify.verdict import Comparison, Verdict
from tightfit.runtime.artefacts import Artefact, find_artefact
from tightfit.runtime.output_folder import REJECTED, check_room
from tightfit.runtime.output_folder import check_target as check_folder

QuantizeCheck = Callable[[Artefact, Sequence[Artefact]], Verdict]
"""Compares the original with its quantized versions; the verdict has a row for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeRequest:
    """A model, the formats to make from it, and how."""

    model: str
    formats: Sequence[ExportFormat]
    out: Path | None = None
    options: QuantizeSettings = field(default_factory=QuantizeSettings)
    check: QuantizeCheck | None = None
    """None: results are not checked."""
    force: bool = False
    """Replace existing results."""
    announce: Callable[[Mapping[ExportFormat, QuantizeForecast]], None] | None = None
    """Called with the forecasts of what is left to make, before anything is written."""
    report: Progress | None = None


def quantize_model(request: QuantizeRequest) -> QuantizeSummary:
    """Make and check every format.

    With several formats, one that cannot be made does not stop the others, and what an
    interrupted call has finished is not made again.
    """
    source = find_quantize_source(request.model, request.formats)
    paths = choose_output_paths(source, request.formats, request.out)
    summary = _open_summary(request, source, paths)
    key = _settings_key(request.options)
    left = [
        target
        for target in request.formats
        if request.force or not _is_done(summary.find(target), paths.of[target], key)
    ]
    for target in left:
        _check_place(paths.of[target], target, source, force=request.force)
    job = QuantizeJob(source, paths.home, request.options, request.report)
    forecasts = {target: job.forecast(target) for target in left}
    _check_disk(paths, forecasts, job)
    if request.announce is not None:
        request.announce(forecasts)
    try:
        for target in left:
            row = _make(job, source, target, paths, request)
            row = row.model_copy(update={"key": key, "predicted": forecasts[target]})
            summary = _save_summary(paths, summary.with_row(row))
    finally:
        job.close()
    summary = _note_calibration(summary, job)
    if request.check is not None:
        summary = _check(request.check, source, summary)
    return _save_summary(paths, _plot_summary(paths, summary))


def _open_summary(
    request: QuantizeRequest, source: QuantizeSource, paths: OutputPaths
) -> QuantizeSummary:
    """The summary of earlier calls on the same weights, or a new one."""
    key = source.stamp
    found = _read_earlier(paths, force=request.force)
    if found is not None and found.key == key:
        return found
    if found is not None and _has_several_formats(request) and not request.force:
        raise UsageError(
            f"{paths.home} holds results of other weights.",
            remedy="--force to replace them, or --out another folder",
        )
    return QuantizeSummary(
        model=str(source.path),
        key=key,
        size_bytes=source.size_bytes,
        num_params=source.spec.num_params,
        updated_at=_now(),
        tightfit=__version__,
    )


def _read_earlier(paths: OutputPaths, *, force: bool) -> QuantizeSummary | None:
    if paths.summary is None:
        return None
    try:
        return read_summary(paths.summary)
    except InvalidInputError:
        if force:
            return None
        raise


def _has_several_formats(request: QuantizeRequest) -> bool:
    return len(request.formats) > 1


def _settings_key(options: QuantizeSettings) -> str:
    """A digest of the settings; a result with the same one need not be made again."""
    parts = [str(options.num_rows), str(options.iters), options.tool, str(options.with_importance)]
    if options.calibrate is not None:
        try:
            stat = options.calibrate.stat()
        except OSError as error:
            raise InvalidInputError(
                f"Cannot read {options.calibrate}: {error.strerror or error}.",
                remedy="--calibrate a file with rows as `train` reads them, or plain text",
            ) from error
        parts.append(f"{options.calibrate.resolve()} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.blake2b("\x1e".join(parts).encode(), digest_size=8).hexdigest()


def _is_done(row: QuantizedModel | None, path: Path, key: str) -> bool:
    return row is not None and row.key == key and row.standing.is_done and path.exists()


def _check_place(path: Path, target: ExportFormat, source: QuantizeSource, *, force: bool) -> None:
    if not target.is_file:
        check_folder(path, force=force, sources=(source.path,))
        return
    if path.resolve() == source.path.resolve() or path.is_dir():
        raise UsageError(f"{path} cannot be the result.", remedy="--out another name")
    if path.exists() and not force:
        raise UsageError(
            f"{path} is there already.", remedy="--out another name, or --force to replace it"
        )


def _check_disk(
    paths: OutputPaths, forecasts: Mapping[ExportFormat, QuantizeForecast], job: QuantizeJob
) -> None:
    needed = sum(forecast.disk_bytes for forecast in forecasts.values())
    if forecasts:
        needed += job.scratch_bytes()
    if needed:
        check_room(paths.home, needed)


def _make(
    job: QuantizeJob,
    source: QuantizeSource,
    target: ExportFormat,
    paths: OutputPaths,
    request: QuantizeRequest,
) -> QuantizedModel:
    path = paths.of[target]
    try:
        made = job.write(target, path)
    except UserError as error:
        if not _has_several_formats(request):
            raise
        return QuantizedModel(
            target=target,
            key="",
            path=str(path),
            standing=QuantizeStatus.FAILED,
            problem=error.problem,
            remedy=error.remedy,
        )
    size = weight_bytes(path)
    return QuantizedModel(
        target=target,
        key="",
        path=str(path),
        standing=QuantizeStatus.MADE,
        size_bytes=size,
        bits_per_weight=8 * size / source.spec.num_params,
        of_original_fraction=size / source.size_bytes,
        seconds=made.seconds,
        peak_host_bytes=made.peak_host_bytes,
        importance=made.importance,
        notes=made.notes,
    )


def _note_calibration(summary: QuantizeSummary, job: QuantizeJob) -> QuantizeSummary:
    if not job.has_calibration:
        return summary
    found = job.calibration
    return summary.model_copy(
        update={"calibration": found.source, "num_calibration_tokens": found.num_tokens}
    )


def _check(
    check: QuantizeCheck, source: QuantizeSource, summary: QuantizeSummary
) -> QuantizeSummary:
    """Check all new results at once, so that the original is loaded once."""
    open_rows = [
        row
        for row in summary.rows
        if row.standing is QuantizeStatus.MADE and Path(row.path).exists()
    ]
    if not open_rows:
        return summary
    others = [find_artefact(row.path) for row in open_rows]
    verdict = check(source.artefact, others)
    for row, comparison in zip(open_rows, verdict.rows, strict=True):
        summary = summary.with_row(_apply_comparison(row, comparison))
    return summary.model_copy(
        update={"text": verdict.text, "reference_perplexity": verdict.reference_perplexity}
    )


def _apply_comparison(row: QuantizedModel, comparison: Comparison) -> QuantizedModel:
    """A result that failed is renamed, so that it is not taken for a good model."""
    if comparison.is_good:
        has_limit = comparison.kind is not None and LIMITS[comparison.kind].top1 is not None
        standing = QuantizeStatus.GOOD if has_limit else QuantizeStatus.REPORTED
        return row.model_copy(update={"standing": standing, "check": comparison})
    path = Path(row.path)
    rejected = path.with_name(path.name + REJECTED)
    if rejected.is_dir():
        shutil.rmtree(rejected)
    path.replace(rejected)
    return row.model_copy(
        update={"standing": QuantizeStatus.REJECTED, "check": comparison, "path": str(rejected)}
    )


def _plot_summary(paths: OutputPaths, summary: QuantizeSummary) -> QuantizeSummary:
    """Plot size against quality where there are several results."""
    scored = [row for row in summary.rows if row.check and row.check.perplexity is not None]
    if paths.summary is None or len(scored) < 2:
        return summary
    path = paths.home / PLOT_FILE
    if not write_plot(summary, path):
        return summary
    return summary.model_copy(update={"plot": str(path)})


def _save_summary(paths: OutputPaths, summary: QuantizeSummary) -> QuantizeSummary:
    stamped = summary.model_copy(update={"updated_at": _now()})
    if paths.summary is not None:
        paths.home.mkdir(parents=True, exist_ok=True)
        write_summary(paths.summary, stamped)
    return stamped


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
