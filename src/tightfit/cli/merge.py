"""`tightfit merge`: an adapter into its base, predicted, done, measured and checked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tightfit.api.options import choices
from tightfit.api.options.export import MERGE_DTYPES
from tightfit.cli.flags.export import MergeFlags
from tightfit.cli.packages import require_packages
from tightfit.cli.terminal.output import announce, progress_bar, show_json, write_err
from tightfit.core.dtypes import Dtype
from tightfit.core.errors import CheckFailedError
from tightfit.core.progress import Progress
from tightfit.core.units import parse_bytes, render_bytes

if TYPE_CHECKING:
    from tightfit.export.merge import MergeCheck, MergeForecast, MergeResult
    from tightfit.export.verify.verdict import Verdict
    from tightfit.runtime.artefacts import Artefact

CHECK_TOKENS = 512
"""Of the check after a merge: enough to see any fault, quick enough to be on by default."""
LEAST_SHARD_BYTES = 1_000_000


def merge(flags: MergeFlags) -> None:
    """Find, merge, check, show."""
    word = choices.read_word(flags.dtype or "auto", MERGE_DTYPES, option="--dtype")
    shard_bytes = _read_shard_size(flags.max_shard_size)
    require_packages("Merging", "torch", "transformers", "peft")
    from tightfit.export.merge import MergeRequest, merge_adapter
    from tightfit.runtime.artefacts import find_artefact

    artefact = find_artefact(flags.target)
    target = Path(flags.out).expanduser() if flags.out else default_target(artefact)
    with progress_bar() as report:
        merged = merge_adapter(
            MergeRequest(
                artefact=artefact,
                target=target,
                dtype=None if word == "auto" else Dtype(word),
                max_shard_bytes=shard_bytes,
                force=flags.force,
                check=_make_check(report) if flags.verify else None,
                announce=_announce_forecast,
                report=report,
            )
        )
    _show(merged, as_json=flags.as_json)


def default_target(artefact: Artefact) -> Path:
    """`RUN/merged`; beside an adapter that belongs to no run."""
    if artefact.run is not None:
        return artefact.run.path / "merged"
    folder = artefact.path.absolute()
    return folder.with_name(f"{folder.name}-merged")


def _read_shard_size(text: str | None) -> int:
    from tightfit.core.errors import UsageError

    size = parse_bytes(text or "5GB")
    if size < LEAST_SHARD_BYTES:
        raise UsageError(
            f"`--max-shard-size {text}` would make a file of almost every tensor.",
            remedy="--max-shard-size 5GB",
        )
    return size


def _announce_forecast(forecast: MergeForecast) -> None:
    write_err(
        f"merging takes {render_bytes(forecast.host_bytes)} of memory and "
        f"{render_bytes(forecast.disk_bytes)} of disk\n"
    )


def _make_check(report: Progress | None) -> MergeCheck:
    from tightfit.export.verify.verify import VerifyRequest, verify_models

    def check(adapter: Artefact, made: Artefact) -> Verdict:
        return verify_models(
            VerifyRequest(reference=adapter, others=(made,), num_tokens=CHECK_TOKENS, report=report)
        )

    return check


def _show(merged: MergeResult, *, as_json: bool) -> None:
    if as_json and merged.is_accepted:
        show_json(merged.model_dump(mode="json"))
    elif not as_json:
        from tightfit.cli.render.verify import show_merged

        show_merged(merged)
    announce(Path(merged.path))
    if not merged.is_accepted:
        assert merged.verdict is not None
        _raise_rejected(merged)


def _raise_rejected(merged: MergeResult) -> None:
    verdict = merged.verdict
    assert verdict is not None
    faults = [f.text for row in verdict.rows for f in row.findings if f.level.value == "fail"]
    raise CheckFailedError(
        f"The merged model is not what the adapter is: {faults[0]}",
        remedy=f"see what was made in {merged.path}; please report it with the output of "
        f"tightfit verify {merged.adapter} {merged.path} --json",
    )
