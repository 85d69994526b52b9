"""What a run saves: checkpoints while it trains (folders written atomically, `step-000040` for the
state after step 40), and at its end an adapter in peft's format or a model in transformers', with
the tokenizer, chat template and stop tokens it was trained with.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError
from torch.distributed.checkpoint.api import CheckpointException

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError, SetupError, UserError
from tightfit.core.files import (
    PARTIAL,
    atomic_folder,
    describe_write_error,
    partial_path,
    write_atomic,
)
from tightfit.core.frozen import Frozen
from tightfit.core.new_tokens import NewTokens
from tightfit.core.reading import read_bytes, read_json_file
from tightfit.core.settings import Method, Sharding
from tightfit.data.encode import REPORT_FILE
from tightfit.data.new_tokens import write_new_tokens
from tightfit.data.report import DataReport
from tightfit.data.token_store import TokenStore
from tightfit.planning.plan import Plan
from tightfit.runs.run_folder import RunFolder
from tightfit.runtime.adapters import save_adapter
from tightfit.runtime.libraries import torch_dtype
from tightfit.runtime.model_files import copy_tokenizer_files, read_json
from tightfit.training.distributed import DistContext, broadcast_object
from tightfit.training.step import TrainEngine

if TYPE_CHECKING:
    from torch import Tensor


_WHOLE_NAME = re.compile(r"step-(\d{6,})")
_PROGRESS = "progress.json"
_STREAM_ERROR = "inline_container"
"""torch's zip writer, which reports a short write without its cause."""
_DISK_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO}


class Progress(Frozen):
    """The progress of the run; the last file written into a checkpoint."""

    step: NonNegativeInt
    """Optimizer steps done."""
    num_steps: NonNegativeInt = 0
    world_size: PositiveInt
    sharding: Sharding
    files: dict[str, int] = Field(default_factory=dict)
    """Bytes of every other file, to notice one that is truncated later."""


def write_checkpoint(
    run: RunFolder,
    engine: TrainEngine,
    progress: Progress,
    context: DistContext,
    keep: int,
    *,
    alone: bool = False,
) -> Path:
    """Save the engine's state as the newest checkpoint, then drop all but the `keep` newest.

    All ranks together, unless `alone`: then by this rank, while the others may hang or be dead.
    If the process is killed meanwhile, the checkpoint before it stays intact.
    """
    folder = run.checkpoints_path / f"step-{progress.step:06d}"
    writes = alone or context.is_first
    is_needed = writes and not _is_complete(folder)
    if not (is_needed if alone else broadcast_object(is_needed)):
        return folder
    try:
        # Several ranks may write alone at once: each fills a folder of its own.
        opened = atomic_folder(folder, is_shared=alone, is_whole=_is_complete)
        with opened if writes else nullcontext(partial_path(folder)) as partial:
            if not alone:
                context.barrier()
            engine.save_state(partial, alone=alone)
            if writes:
                paths = [path for path in sorted(partial.rglob("*")) if path.is_file()]
                files = {str(path.relative_to(partial)): path.stat().st_size for path in paths}
                whole = progress.model_copy(update={"files": files})
                (partial / _PROGRESS).write_text(whole.model_dump_json(indent=2) + "\n")
    except BaseException as error:
        cause = find_disk_error(error)
        if cause is None:
            raise
        before = "The one before it is intact." if _list_newest_first(run) else "It is the first."
        raise SetupError(
            f"Cannot write the checkpoint {str(folder)!r}: "
            f"{describe_write_error(cause, folder)}. {before}",
            remedy=f"make room (df -h {run.path}), then start the same command again",
        ) from error
    if writes:
        prune_checkpoints(run, keep=keep)
    if not alone:
        context.barrier()
    return folder


def find_checkpoint(run: RunFolder) -> Path | None:
    """The newest complete checkpoint; None before the first."""
    found = _list_newest_first(run)
    whole = next((folder for folder in found if _is_complete(folder)), None)
    if whole is None and found:
        # Damaged after they were saved: starting over would delete what may be repairable.
        raise InvalidInputError(
            f"No checkpoint in {run.checkpoints_path} is complete: {found[0].name} lacks "
            "files, or they have another size than when it was saved.",
            remedy="bring the files back from a copy, or start over with --fresh",
        )
    return whole


def list_damaged(run: RunFolder, *, after_step: int) -> list[str]:
    """Incomplete checkpoints of later steps, newest first."""
    names = [folder.name for folder in _list_newest_first(run)]
    return [name for name in names if int(name.removeprefix("step-")) > after_step]


def read_progress(folder: Path) -> Progress:
    path = folder / _PROGRESS
    try:
        return Progress.model_validate_json(read_bytes(path))
    except (OSError, ValidationError) as error:
        raise InvalidInputError(
            f"{path} cannot be read: {str(error).splitlines()[0]}.",
            remedy=f"remove {folder}; the checkpoint before it is used then",
        ) from error


def prune_checkpoints(run: RunFolder, *, keep: int) -> None:
    """Remove all but the `keep` newest complete ones, and partial folders."""
    found = _list_newest_first(run)
    kept = [folder for folder in found if _is_complete(folder)][:keep]
    for partial in run.checkpoints_path.glob(f"*{PARTIAL}"):
        shutil.rmtree(partial, ignore_errors=True)
    for folder in found:
        if folder not in kept:
            # Renamed first: an interrupted removal must not leave half a checkpoint.
            shutil.rmtree(folder.rename(partial_path(folder)), ignore_errors=True)


def _list_newest_first(run: RunFolder) -> list[Path]:
    try:
        names = [path.name for path in run.checkpoints_path.iterdir()]
    except FileNotFoundError:
        return []
    steps = {int(match[1]): name for name in names if (match := _WHOLE_NAME.fullmatch(name))}
    return [run.checkpoints_path / steps[step] for step in sorted(steps, reverse=True)]


def _is_complete(folder: Path) -> bool:
    try:
        progress = read_progress(folder)
        return all((folder / name).stat().st_size == size for name, size in progress.files.items())
    except (InvalidInputError, OSError):
        return False


def find_disk_error(error: BaseException) -> OSError | None:
    """The OSError inside what torch raises: CheckpointException holds one error per rank."""
    if isinstance(error, CheckpointException):
        inner = [failure[0] for failure in error.failures.values()]
        return next((found for each in inner if (found := find_disk_error(each))), None)
    if isinstance(error, OSError):
        return error if error.errno in _DISK_ERRNOS else None
    before = error.__cause__ or error.__context__
    found = None if before is None else find_disk_error(before)
    if found is None and isinstance(error, RuntimeError) and _STREAM_ERROR in str(error):
        return OSError(errno.ENOSPC, "torch could not write all of it, as on a full disk")
    if found is None and os.strerror(errno.ENOSPC) in str(error):  # safetensors raises its own type
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return found


# The result of a run: an adapter in peft's format or a model in transformers', with the
# tokenizer, chat template and stop tokens it was trained with.


def write_artefact(run: RunFolder, engine: TrainEngine, plan: Plan, context: DistContext) -> Path:
    """Write `adapter/` or `model/` atomically; call on all ranks, rank 0 writes."""
    assert plan.training is not None
    base = Path(plan.training.model_path)
    is_adapter = plan.strategy.method is Method.LORA
    folder = run.adapter_path if is_adapter else run.model_path
    state = engine.trained_state()
    if context.is_first:
        try:
            with atomic_folder(folder) as partial:
                if is_adapter:
                    config: Any = engine.model.peft_config["default"]
                    config.base_model_name_or_path = str(base)
                    save_adapter(engine.model, partial, state)
                    # peft's model card is an empty form; the run's report says more.
                    (partial / "README.md").unlink(missing_ok=True)
                else:
                    _write_model(partial, engine.model, state, base, choose_saved_dtype(plan))
                write_tokenizer_files(run, base, partial, plan.strategy.new_tokens)
        except OSError as error:
            raise SetupError(
                f"Cannot write {str(folder)!r}: {describe_write_error(error, folder)}.",
                remedy="make room, then start the same command again: it continues from "
                "the last checkpoint",
            ) from error
    context.barrier()
    return folder


def choose_saved_dtype(plan: Plan) -> Dtype:
    """The dtype of a saved model: as trained, but fp32 master weights are cast to the base's."""
    weights = plan.strategy.weights
    if weights is not Dtype.FP32:
        return weights
    stored = plan.model.stored_dtype
    return Dtype.BF16 if stored is None or stored.is_quantized else stored


def _write_model(
    folder: Path, model: Any, state: dict[str, Tensor], base: Path, dtype: Dtype
) -> None:
    import transformers

    make_settings: Any = transformers.GenerationConfig
    wanted = torch_dtype(dtype)
    cast = {name: value.to(wanted) for name, value in state.items()}
    state.clear()
    buffers = {name for name, _ in model.named_buffers()}
    for name, buffer in model.state_dict().items():
        # Persistent buffers, which a few families have.
        if name not in cast and name in buffers:
            cast[name] = buffer.detach().cpu()
    # transformers refuses to write some models' generation settings; the base's file is copied.
    kept, model.generation_config = model.generation_config, make_settings()
    try:
        model.save_pretrained(str(folder), state_dict=cast, max_shard_size="5GB")
    finally:
        model.generation_config = kept
    (folder / "generation_config.json").unlink(missing_ok=True)
    # Restore what training changed in the config.
    path = folder / "config.json"
    config = read_json_file(path, allows_infinity=True)
    config.pop("torch_dtype", None)
    config["dtype"] = str(wanted).removeprefix("torch.")
    config["use_cache"] = read_json_file(base / "config.json", allows_infinity=True).get(
        "use_cache", True
    )
    write_atomic(path, json.dumps(config, indent=2, sort_keys=True) + "\n")


def write_tokenizer_files(run: RunFolder, base: Path, folder: Path, new_tokens: NewTokens) -> None:
    """Copy the base's tokenizer files, with what training changed.

    New tokens; the chat template that was trained on; a pad token that is not also a stop token;
    every trained stop token as `eos_token_id`.
    """
    copy_tokenizer_files(base, folder)
    write_new_tokens(folder, new_tokens)
    try:
        store = TokenStore(Path(run.read_tokens().train))
        report = DataReport.model_validate_json(read_bytes(store.folder.parent / REPORT_FILE))
    except (UserError, OSError, ValueError):
        return  # the encoded data is gone: keep the base's files as they are
    if report.template not in ("tokenizer", "none") and report.template_text:
        write_atomic(folder / "chat_template.jinja", report.template_text)
    pad, stops = report.pad_token_id, store.description.stop_token_ids
    path = folder / "tokenizer_config.json"
    settings = read_json(path)
    named = settings.get("pad_token")
    named = named.get("content") if isinstance(named, dict) else named
    if settings and (named is None or named in report.stop_tokens):
        _write_json(path, settings | {"pad_token": report.pad_token})
    path = folder / "generation_config.json"
    settings = read_json(path)
    known = settings.get("eos_token_id", [])
    known = known if isinstance(known, list) else [known]
    merged = list(dict.fromkeys([*known, *stops]))
    is_stated = set(stops) <= set(known) and settings.get("pad_token_id") not in (None, *stops)
    if merged and not is_stated:
        eos = merged if len(merged) > 1 else merged[0]
        _write_json(path, settings | {"eos_token_id": eos, "pad_token_id": pad})


def _write_json(path: Path, settings: dict[str, Any]) -> None:
    write_atomic(path, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
