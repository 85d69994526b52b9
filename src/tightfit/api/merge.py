"""`merge`: add an adapter to its base model and check the result against it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tightfit.api.call import accepts_keywords
from tightfit.api.options.common import OnForecast, model_argument
from tightfit.core.dtypes import Dtype
from tightfit.core.errors import UsageError
from tightfit.core.options import switch_option, text_option, word_option
from tightfit.core.packages import require_packages
from tightfit.core.progress import Progress
from tightfit.core.units import parse_bytes

if TYPE_CHECKING:
    from tightfit.export.merge import MergeCheck, MergeResult
    from tightfit.export.verify.verdict import Verdict
    from tightfit.runtime.model_files import Artefact

CHECK_TOKENS = 512
"""Enough to see any error of a merge, quick enough to be on by default."""
DEFAULT_SHARD_SIZE = "5GB"
LEAST_SHARD_BYTES = 1_000_000


MERGE_DTYPES = ("auto", *(dtype.value for dtype in Dtype if not dtype.is_quantized))

MERGE_EXAMPLES = """\b
Examples:
  tightfit merge runs/sql
  tightfit merge runs/sql --out sql-model --dtype bf16
  tightfit merge ./my-adapter --out my-model --max-shard-size 2GB
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOptions:
    """Add a run's adapter to its base model.

    The result is one folder that any program can load. Each matrix is added to in fp32 and
    stored as the base has it; a QLoRA run is merged into the unquantized base. The model is read
    and written tensor by tensor, so that little memory is enough. Tokenizer, chat template of the
    training and generation settings go along.

    The result is checked against the adapter; one that fails is kept as NAME.rejected.
    """

    target: Annotated[
        str,
        model_argument("RUN|ADAPTER", "A run folder or an adapter folder."),
    ] = field(kw_only=False)
    out: str | None = text_option(
        "FOLDER",
        "Where the model goes. [default: RUN/merged, or ADAPTER-merged]",
        example="my-model",
    )
    dtype: str | None = word_option(
        MERGE_DTYPES, "How values are stored. [default: auto: as the base's]"
    )
    max_shard_size: str | None = text_option(
        "SIZE", "Largest weight file. [default: 5GB]", example="5GB"
    )
    verify: bool = switch_option(
        "Check the result against the adapter on a small sample.",
        has_off=True,
        show_default=True,
        default=True,
    )
    force: bool = switch_option("Replace a model that is there already.")
    on_forecast: OnForecast | None = None
    """Called with the `MergeForecast` before anything is written."""
    progress: Progress | None = None


@accepts_keywords(MergeOptions)
def merge(options: MergeOptions) -> MergeResult:
    """Merge a run's adapter. A result that fails its check has `is_accepted` False."""
    max_shard_bytes = _read_shard_size(options.max_shard_size or DEFAULT_SHARD_SIZE)
    require_packages("Merging", "torch", "transformers", "peft")
    from tightfit.export.merge import MergeRequest, merge_adapter
    from tightfit.runtime.model_files import find_artefact

    artefact = find_artefact(options.target)
    return merge_adapter(
        MergeRequest(
            artefact=artefact,
            target=Path(options.out).expanduser() if options.out else default_folder(artefact),
            dtype=None if options.dtype in (None, "auto") else Dtype(options.dtype),
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
