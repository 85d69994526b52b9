"""The result of a run: an adapter in peft's format or a model in transformers', with the
tokenizer, chat template and stop tokens it was trained with.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import SetupError, UserError
from tightfit.core.files import atomic_folder, write_atomic
from tightfit.core.strategy import Method
from tightfit.data.encode import REPORT_FILE
from tightfit.data.report import DataReport
from tightfit.data.token_store import TokenStore
from tightfit.planning.plan import Plan
from tightfit.runs.run_folder import RunFolder
from tightfit.runtime.adapters import save_adapter
from tightfit.runtime.devices import torch_dtype
from tightfit.runtime.model_files import copy_tokenizer_files
from tightfit.training.distributed import DistContext
from tightfit.training.step import TrainEngine

if TYPE_CHECKING:
    from torch import Tensor


# What a tuned model speaks with: tokenizer, the template it was trained on, where it stops.


def write_tokenizer_files(run: RunFolder, base: Path, folder: Path) -> None:
    """Copy the base's tokenizer files, with what training changed.

    The chat template that was trained on; a pad token that is not also a stop token; every trained
    stop token as `eos_token_id`.
    """
    copy_tokenizer_files(base, folder)
    try:
        store = TokenStore(Path(run.read_tokens().train))
        report = DataReport.model_validate_json((store.folder.parent / REPORT_FILE).read_bytes())
    except (UserError, OSError, ValueError):
        return  # the encoded data is gone: keep the base's files as they are
    if report.template not in ("tokenizer", "none") and report.template_text:
        write_atomic(folder / "chat_template.jinja", report.template_text)
    stops = store.description.stop_token_ids
    _fix_pad_token(folder / "tokenizer_config.json", report)
    _fix_stop_tokens(folder / "generation_config.json", stops, report.pad_token_id)


def _fix_pad_token(path: Path, report: DataReport) -> None:
    settings = _read_json(path)
    pad = settings.get("pad_token")
    named = pad.get("content") if isinstance(pad, dict) else pad
    if not settings or (named is not None and named not in report.stop_tokens):
        return
    _write_json(path, settings | {"pad_token": report.pad_token})


def _fix_stop_tokens(path: Path, stops: tuple[int, ...], pad: int) -> None:
    settings = _read_json(path)
    held = settings.get("eos_token_id", [])
    known = held if isinstance(held, list) else [held]
    merged = list(dict.fromkeys([*known, *stops]))
    is_stated = set(stops) <= set(known) and settings.get("pad_token_id") not in (None, *stops)
    if is_stated or not merged:
        return
    eos: Any = merged if len(merged) > 1 else merged[0]
    _write_json(path, settings | {"eos_token_id": eos, "pad_token_id": pad})


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_json(path: Path, settings: dict[str, Any]) -> None:
    write_atomic(path, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def write_artefact(run: RunFolder, engine: TrainEngine, plan: Plan, context: DistContext) -> Path:
    """Write `adapter/` or `model/` atomically; call on all ranks, rank 0 writes."""
    is_adapter = plan.strategy.method is Method.LORA
    folder = run.adapter_path if is_adapter else run.model_path
    state = engine.trained_state()
    if context.is_first:
        try:
            _write_whole(run, folder, engine.model, state, plan)
        except OSError as error:
            raise SetupError(
                f"Cannot write {str(folder)!r}: {error.strerror or error}.",
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


def _write_whole(
    run: RunFolder, folder: Path, model: Any, state: dict[str, Tensor], plan: Plan
) -> None:
    assert plan.training is not None
    base = Path(plan.training.model_path)
    with atomic_folder(folder) as partial:
        if plan.strategy.method is Method.LORA:
            _write_adapter(partial, model, state, base)
        else:
            _write_model(partial, model, state, choose_saved_dtype(plan))
            _fix_config(partial, base, choose_saved_dtype(plan))
        write_tokenizer_files(run, base, partial)


def _write_adapter(folder: Path, model: Any, state: dict[str, Tensor], base: Path) -> None:
    model.peft_config["default"].base_model_name_or_path = str(base)
    save_adapter(model, folder, state)
    # peft's model card is an empty form; the run's report says more.
    (folder / "README.md").unlink(missing_ok=True)


def _write_model(folder: Path, model: Any, state: dict[str, Tensor], dtype: Dtype) -> None:
    import transformers

    make_settings: Any = transformers.GenerationConfig
    wanted = torch_dtype(dtype)
    cast = {name: value.to(wanted) for name, value in state.items()}
    state.clear()
    for name, buffer in model.state_dict().items():
        # Persistent buffers, which a few families have.
        if name not in cast and name in _buffer_names(model):
            cast[name] = buffer.detach().cpu()
    # transformers refuses to write some models' generation settings; the base's file is copied.
    kept, model.generation_config = model.generation_config, make_settings()
    try:
        model.save_pretrained(str(folder), state_dict=cast, max_shard_size="5GB")
    finally:
        model.generation_config = kept
    (folder / "generation_config.json").unlink(missing_ok=True)


def _buffer_names(model: Any) -> set[str]:
    return {name for name, _ in model.named_buffers()}


def _fix_config(folder: Path, base: Path, dtype: Dtype) -> None:
    """Restore what training changed in the config: `use_cache`, and the dtype."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(torch_dtype(dtype)).removeprefix("torch.")
    config["use_cache"] = json.loads((base / "config.json").read_text()).get("use_cache", True)
    write_atomic(path, json.dumps(config, indent=2, sort_keys=True) + "\n")
