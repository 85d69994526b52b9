"""`tightfit prepare`: encode data as `train` will, and show what becomes of it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tightfit.cli.charts.memory import check_chart_path
from tightfit.cli.describe import count_of
from tightfit.cli.faults import report_fault
from tightfit.cli.flags.prepare import PrepareFlags
from tightfit.cli.preparing.faults import is_list_of_rows, list_faults, tell_faults
from tightfit.cli.preparing.job import PrepareJob, find_next, read_prepare_job
from tightfit.cli.terminal.harmless import harmless
from tightfit.cli.terminal.json_output import show_json
from tightfit.cli.training.data import encode_for
from tightfit.core.errors import InvalidInputError, NotFoundError, UsageError
from tightfit.data.encode import Encoded
from tightfit.data.epochs import epoch_rows
from tightfit.data.lengths import estimate_padding_waste
from tightfit.data.packing import count_packed_rows
from tightfit.data.token_store import TokenStore

if TYPE_CHECKING:
    from tightfit.cli.preparing.mask_view import (
        ViewedRow,  # draws with rich, which JSON does without
    )

MICRO_BATCHES = (2, 4, 8, 16, 32)
"""What padding is told for; alone, a row is not padded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """One epoch of training rows in sequences, packed and padded."""

    num_rows: int
    num_tokens: int
    num_packed_rows: int | None
    """None: an encoder-decoder's rows are not packed."""
    packed_fraction: float | None
    """Share of slots that hold tokens."""
    padding_waste_fraction: dict[int, float]
    """By micro-batch: share of slots that padding fills."""


def prepare(flags: PrepareFlags) -> None:
    """Encode, show, draw."""
    if flags.show is not None and flags.row is not None:
        raise UsageError(
            "--show picks rows and --row names one.", remedy=f"keep one: --row {flags.row}"
        )
    if flags.chart is not None:
        check_chart_path(flags.chart)
    job = read_prepare_job(flags)
    try:
        encoded = _encode(job, skip_faulty=flags.skip_faulty)
    except InvalidInputError as fault:
        if not is_list_of_rows(fault):
            raise
        _refuse(flags, job, fault)
        return
    rows = _find_rows(flags, encoded)
    batching = measure_batches(encoded, seed=job.training.seed)
    if flags.as_json:
        _draw(flags, job, encoded)
        show_json(_describe(flags, job, encoded, batching, rows))
        return
    from tightfit.cli.preparing.render import show_prepared

    show_prepared(
        job,
        encoded,
        batching,
        rows=rows,
        is_whole=flags.row is not None,
        next_step=None if flags.skip_faulty else find_next(flags, job),
    )
    _draw(flags, job, encoded)


def _encode(job: PrepareJob, *, skip_faulty: bool) -> Encoded:
    """The very encoding that `train` asks for; less its faulty rows where that is wished."""
    return encode_for(
        job.training, model_folder=job.folder, seq_len=job.seq_len, skip_faulty=skip_faulty
    )


def _refuse(flags: PrepareFlags, job: PrepareJob, refusal: InvalidInputError) -> None:
    """Every faulty row: the first ones for a person, all of them in JSON."""
    faults = list_faults(refusal, job.training.data)
    counted = re.match(r"([\d,]+) rows?\b", refusal.problem)
    num_faults = max(len(faults), int(counted[1].replace(",", "")) if counted else 0)
    words = ["tightfit", "prepare", flags.job]
    words += [word for name in flags.data or () for word in ("--data", name)]
    remedy = f"correct these rows; the others: {shlex.join(words)} --skip-faulty"
    fault = tell_faults(faults, num_faults=num_faults, sources=job.training.data, remedy=remedy)
    if flags.as_json:
        told = {"error": fault.problem, "remedy": fault.remedy, "exit_code": fault.exit_code}
        show_json({**told, "num_faults": num_faults, "faults": faults})
    raise typer.Exit(report_fault(fault, as_json=False))


def measure_batches(encoded: Encoded, *, seed: int) -> Batching:
    """What an epoch's rows come to, each source as often as its weight says."""
    import numpy as np

    store = encoded.train
    lengths = store.lengths[epoch_rows(store, seed=seed, epoch=0, shuffle=False)]
    by_length = count_lengths(lengths)
    num_tokens, seq_len = int(np.sum(lengths)), encoded.report.seq_len
    is_pair = store.description.is_encoder_decoder
    num_packed = None if is_pair else count_packed_rows(by_length, seq_len)
    return Batching(
        num_rows=len(lengths),
        num_tokens=num_tokens,
        num_packed_rows=num_packed,
        packed_fraction=None if num_packed is None else num_tokens / (num_packed * seq_len),
        padding_waste_fraction={
            size: estimate_padding_waste(by_length.items(), size) for size in MICRO_BATCHES
        },
    )


def count_lengths(lengths: Any) -> dict[int, int]:
    """Rows by length."""
    import numpy as np

    values, counts = np.unique(lengths, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def _find_rows(flags: PrepareFlags, encoded: Encoded) -> list[ViewedRow]:
    """Rows to show: those asked for; one for a person who asked for none."""
    if flags.as_json and flags.show is None and flags.row is None:
        return []
    from tightfit.cli.preparing.mask_view import pick_rows, view_row
    from tightfit.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(Path(encoded.report.tokenizer))
    if flags.row is not None:
        return [view_row(store, at, tokenizer) for store, at in _find_row(encoded, flags.row)]
    picked = pick_rows(len(encoded.train), flags.show or 1)
    return [view_row(encoded.train, at, tokenizer) for at in picked]


def _find_row(encoded: Encoded, wanted: int) -> Iterator[tuple[TokenStore, int]]:
    """Every encoded row that comes from this line or row of a data file."""
    import numpy as np

    stores = [store for store in (encoded.train, encoded.eval) if store is not None]
    numbers = [np.load(store.folder / "numbers.npy") for store in stores]
    found = [
        (store, int(at))
        for store, held in zip(stores, numbers, strict=True)
        for at in np.flatnonzero(held == wanted)
    ]
    if not found:
        known = np.concatenate(numbers)
        nearest = int(known[np.argmin(np.abs(known - wanted))])
        raise NotFoundError(
            f"No encoded row begins at line {wanted:,}; the nearest is {nearest:,}.",
            remedy=f"--row {nearest}",
        )
    yield from found


def _draw(flags: PrepareFlags, job: PrepareJob, encoded: Encoded) -> None:
    if flags.chart is None:
        return
    from tightfit.cli.preparing.chart import LengthChart, write_length_chart

    report = encoded.report
    sides = {"to train on": count_lengths(encoded.train.lengths)}
    if encoded.eval is not None:
        sides["to evaluate on"] = count_lengths(encoded.eval.lengths)
    names = [harmless(source.name.rsplit("/", 1)[-1]) for source in report.sources]
    cut = count_of(report.num_truncated, "row")
    chart = LengthChart(
        title=f"{', '.join(names)}: row lengths",
        subtitle=f"{count_of(report.train.num_rows, 'row')} to train on, mean "
        f"{report.train.mean_tokens:,.0f} tokens, longest {report.train.max_tokens:,}; "
        f"{cut} cut at seq_len {report.seq_len:,}",
        sides=sides,
        percentiles=report.train.percentiles,
        seq_len=job.seq_len,
    )
    write_length_chart(chart, flags.chart)


def _describe(
    flags: PrepareFlags,
    job: PrepareJob,
    encoded: Encoded,
    batching: Batching,
    rows: list[ViewedRow],
) -> dict[str, Any]:
    return {
        "model": job.recipe.model,
        "folder": str(encoded.train.folder.parent),
        "is_cached": encoded.is_cached,
        "report": encoded.report.model_dump(mode="json"),
        "batching": {
            "num_rows": batching.num_rows,
            "num_tokens": batching.num_tokens,
            "num_packed_rows": batching.num_packed_rows,
            "packed_fraction": batching.packed_fraction,
            "padding_waste_fraction": {
                str(size): waste for size, waste in batching.padding_waste_fraction.items()
            },
        },
        "rows": [row.describe() for row in rows],
        "next": None if flags.skip_faulty else asdict(find_next(flags, job)),
    }
