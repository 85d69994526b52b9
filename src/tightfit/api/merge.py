"""`merge`: add an adapter to its base model and check the result against it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tightfit.api.call import accepts_keywords
from tightfit.api.options import choices
from tightfit.api.options.export import MERGE_DTYPES, MergeOptions
from tightfit.core.dtypes import Dtype
from tightfit.core.errors import UsageError
from tightfit.core.packages import require_packages
from tightfit.core.units import parse_bytes

if TYPE_CHECKING:
    from tightfit.core.progress import Progress
    from tightfit.export.merge import MergeCheck, MergeResult
    from tightfit.export.verify.verdict import Verdict
    from tightfit.runtime.artefacts import Artefact

CHECK_TOKENS = 512
"""Enough to see any error of a merge, quick enough to be on by default."""
DEFAULT_SHARD_SIZE = "5GB"
LEAST_SHARD_BYTES = 1_000_000


@accepts_keywords(MergeOptions)
def merge(options: MergeOptions) -> MergeResult:
    """Merge a run's adapter. A result that fails its check has `is_accepted` False."""
    word = choices.read_word(options.dtype or "auto", MERGE_DTYPES, option="--dtype")
    max_shard_bytes = _read_shard_size(options.max_shard_size or DEFAULT_SHARD_SIZE)
    require_packages("Merging", "torch", "transformers", "peft")
    from tightfit.export.merge import MergeRequest, merge_adapter
    from tightfit.runtime.artefacts import find_artefact

    artefact = find_artefact(options.target)
    return merge_adapter(
        MergeRequest(
            artefact=artefact,
            target=Path(options.out).expanduser() if options.out else default_folder(artefact),
            dtype=None if word == "auto" else Dtype(word),
            max_shard_bytes=max_shard_bytes,
            force=options.force,
            check=_make_check(options.progress) if options.verify else None,
            announce=options.on_forecast,
            report=options.progress,
        )
    )


def default_folder(artefact: Artefact) -> Path:
    """`RUN/merged`; next to an adapter that belongs to no run."""
    if artefact.run is not None:
        return artefact.run.path / "merged"
    folder = artefact.path.absolute()
    return folder.with_name(f"{folder.name}-merged")


def _read_shard_size(text: str) -> int:
    size = parse_bytes(text)
    if size < LEAST_SHARD_BYTES:
        raise UsageError(
            f"`--max-shard-size {text}` would make a file of almost every tensor.",
            remedy=f"--max-shard-size {DEFAULT_SHARD_SIZE}",
        )
    return size


def _make_check(progress: Progress | None) -> MergeCheck:
    from tightfit.export.verify.verify import VerifyRequest, verify_models

    def check(adapter: Artefact, merged: Artefact) -> Verdict:
        return verify_models(
            VerifyRequest(
                reference=adapter, others=(merged,), num_tokens=CHECK_TOKENS, report=progress
            )
        )

    return check
