"""Merge a LoRA adapter into its base, tensor by tensor, in the base's own precision."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import CheckFailedError, InvalidInputError, SetupError, UsageError
from tightfit.core.files import publish_folder, write_atomic
from tightfit.core.frozen import Frozen
from tightfit.core.progress import Progress
from tightfit.core.units import render_bytes
from tightfit.export.adapter_changes import (
    ADAPTER,
    RELEASE_BYTES,
    AdapterChanges,
    MergePlan,
    estimate_merge_bytes,
    estimate_whole_bytes,
    plan_merge,
    read_changes,
    release_freed_memory,
)
from tightfit.export.verify.verdict import Level, Verdict
from tightfit.hardware.machine import read_peak_memory_bytes, reset_peak_memory
from tightfit.runtime.adapters import load_adapter
from tightfit.runtime.artefacts import Artefact, ArtefactKind
from tightfit.runtime.devices import torch_dtype
from tightfit.runtime.load import LoadRequest, load_base
from tightfit.runtime.model_files import copy_tuned_tokenizer_files
from tightfit.runtime.output_folder import (
    begin_folder,
    check_room,
    check_target,
    reject_folder,
)
from tightfit.runtime.tensor_files import DEFAULT_SHARD_BYTES, Output, StoredWeights, write_shards

if TYPE_CHECKING:
    import torch


WEIGHTS = "weights"
MergeCheck = Callable[[Artefact, Artefact], Verdict]
"""Compares the adapter with the merged model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeRequest:
    """What to merge, and into what."""

    artefact: Artefact
    """An adapter."""
    target: Path
    """The new folder."""
    dtype: Dtype | None = None
    """None: each tensor as the base has it."""
    max_shard_bytes: int = DEFAULT_SHARD_BYTES
    force: bool = False
    check: MergeCheck | None = None
    """The result gets its final name only if this passes. None: no check."""
    announce: Callable[[MergeForecast], None] | None = None
    """Called with the forecast before anything is written."""
    report: Progress | None = None


class MergeForecast(Frozen):
    """What a merge will take."""

    host_bytes: PositiveInt
    """Peak memory of this process."""
    disk_bytes: PositiveInt
    is_streamed: bool
    """False: the whole model is loaded, because its files hold adapted matrices in parts."""


class MergeResult(Frozen):
    """What a merge made."""

    path: str
    adapter: str
    base: str
    dtypes: tuple[str, ...]
    """Of the stored values, the most frequent first."""
    num_changed: NonNegativeInt
    """Tensors that the adapter changed."""
    num_tensors: PositiveInt
    size_bytes: PositiveInt
    predicted: MergeForecast
    peak_host_bytes: PositiveInt
    seconds: NonNegativeFloat
    notes: tuple[str, ...] = ()
    is_accepted: bool = True
    """False: the check did not pass, and `path` ends in `.rejected`."""
    verdict: Verdict | None = None

    def raise_if_rejected(self) -> None:
        """`CheckFailedError` where the check did not pass."""
        if self.is_accepted or self.verdict is None:
            return
        failures = [
            finding.text
            for row in self.verdict.rows
            for finding in row.findings
            if finding.level is Level.FAIL
        ]
        raise CheckFailedError(
            f"The merged model is not what the adapter is: {failures[0]}",
            remedy=f"see what was made in {self.path}; please report it with the output of "
            f"tightfit verify {self.adapter} {self.path} --json",
        )


def merge_adapter(request: MergeRequest) -> MergeResult:
    """Write the merged model. With a check, only a result that passes gets the wanted name."""
    artefact, base = _check_request(request)
    start = time.monotonic()
    import torch

    changes = read_changes(artefact.path, base)
    stored = StoredWeights(base)
    with torch.no_grad():
        dtype = None if request.dtype is None else torch_dtype(request.dtype)
        plan = plan_merge(changes, stored, dtype)
        forecast = _forecast(changes, stored, plan)
        _check_resources(request, forecast)
        work = begin_folder(request.target)
        reset_peak_memory()
        try:
            _write_model(request, work, changes, stored, plan)
        except BaseException as error:
            shutil.rmtree(work, ignore_errors=True)
            if isinstance(error, OSError):
                raise SetupError(
                    f"Cannot write {request.target}: {error.strerror or error}.",
                    remedy="--out a folder that is writable and has free space",
                ) from error
            raise
    peak = read_peak_memory_bytes()
    seconds = time.monotonic() - start
    num_changed = sum(changes.is_changed(name) for name in plan.sources)
    notes = _notes(changes, plan)
    del changes, stored
    verdict, path = _check_result(request, work)
    return MergeResult(
        path=str(path),
        adapter=str(artefact.path),
        base=str(base),
        dtypes=_name_dtypes(plan),
        num_changed=num_changed,
        num_tensors=len(plan.outputs),
        size_bytes=plan.num_bytes,
        predicted=forecast,
        peak_host_bytes=peak,
        seconds=seconds,
        notes=notes,
        is_accepted=path == request.target,
        verdict=verdict,
    )


def _check_request(request: MergeRequest) -> tuple[Artefact, Path]:
    artefact = request.artefact
    if artefact.kind is not ArtefactKind.ADAPTER or artefact.base is None:
        raise UsageError(
            f"{artefact.name} is a whole model already; there is no adapter to merge.",
            remedy=f"use it as it is: {artefact.path}",
        )
    if request.dtype is not None and request.dtype.is_quantized:
        raise UsageError(
            f"A merged model is not stored in {request.dtype.value}.",
            remedy=f"merge it first, then: tightfit quantize {request.target} "
            f"--to {request.dtype.value}",
        )
    config = json.loads((artefact.base / "config.json").read_bytes())
    if config.get("quantization_config"):
        raise InvalidInputError(
            f"The base model in {artefact.base} is quantized, and an adapter is merged into "
            "unquantized weights.",
            remedy="name the model it was made from as base_model_name_or_path in "
            f"{artefact.path / 'adapter_config.json'}",
        )
    check_target(request.target, force=request.force, sources=(artefact.path, artefact.base))
    return artefact, artefact.base


def _forecast(changes: AdapterChanges, stored: StoredWeights, plan: MergePlan) -> MergeForecast:
    extra = (
        estimate_whole_bytes(stored, plan, changes.num_bytes)
        if plan.missing
        else estimate_merge_bytes(changes, stored, plan)
    )
    # The adapter is in memory by now, and counted in `extra` too.
    held = psutil.Process().memory_info().rss - changes.num_bytes
    return MergeForecast(
        host_bytes=held + extra, disk_bytes=plan.num_bytes, is_streamed=not plan.missing
    )


def _check_resources(request: MergeRequest, forecast: MergeForecast) -> None:
    if request.announce is not None:
        request.announce(forecast)
    check_room(request.target, forecast.disk_bytes)
    needed = forecast.host_bytes - psutil.Process().memory_info().rss
    free = psutil.virtual_memory().available
    if needed > free:
        raise SetupError(
            f"The merge needs {render_bytes(needed)} more memory; {render_bytes(free)} is free.",
            remedy="end other programs, or merge on a machine with more memory",
        )


def _write_model(
    request: MergeRequest,
    work: Path,
    changes: AdapterChanges,
    stored: StoredWeights,
    plan: MergePlan,
) -> None:
    artefact = request.artefact
    assert artefact.base is not None
    if plan.missing:
        write_whole(request, work, plan.missing, is_tied_changed=plan.is_untied)
    else:
        _write_streamed(request, work, changes, stored, plan)
    copy_tuned_tokenizer_files(artefact.tokenizer, artefact.base, work)
    if artefact.template is not None:
        _write_template(artefact, work)
    config = json.loads((artefact.base / "config.json").read_bytes())
    write_atomic(
        work / "config.json",
        json.dumps(_settle_config(config, changes, plan), indent=2, ensure_ascii=False) + "\n",
    )


def _write_streamed(
    request: MergeRequest,
    work: Path,
    changes: AdapterChanges,
    stored: StoredWeights,
    plan: MergePlan,
) -> None:
    def produce(output: Output) -> torch.Tensor:
        key = plan.sources[output.name]
        if changes.is_changed(output.name):
            held = stored.read(key) if key is not None else None
            return _cast(changes.apply(output.name, held), output)
        assert key is not None
        brought = changes.base_value(output.name)
        return (stored.read(key) if brought is None else brought).to(output.dtype)

    done = released = 0

    def count(num_bytes: int) -> None:
        nonlocal done, released
        done += num_bytes
        if done - released >= RELEASE_BYTES:
            released = done
            release_freed_memory()
        if request.report is not None:
            request.report(WEIGHTS, done, plan.num_bytes)

    write_shards(work, plan.outputs, produce, max_shard_bytes=request.max_shard_bytes, report=count)


def _cast(value: torch.Tensor, output: Output) -> torch.Tensor:
    """Cast once, at the end, and raise for values that the dtype cannot hold."""
    made = value.to(output.dtype)
    if bool(made.isfinite().all()):
        return made
    if bool(value.isfinite().all()):
        raise InvalidInputError(
            f"{output.name} has values beyond {output.dtype}'s range once the adapter is added.",
            remedy="--dtype bf16, or --dtype fp32",
        )
    raise InvalidInputError(
        f"{output.name} has NaN or infinity: the adapter or its base is damaged.",
        remedy="merge an earlier checkpoint, or train again with a lower learning rate",
    )


def _write_template(artefact: Artefact, work: Path) -> None:
    from tightfit.data.templates import choose_template
    from tightfit.data.tokenizer import load_tokenizer

    chosen = choose_template(artefact.template, load_tokenizer(artefact.tokenizer))
    write_atomic(work / "chat_template.jinja", chosen.text)


def _settle_config(
    config: dict[str, Any], changes: AdapterChanges, plan: MergePlan
) -> dict[str, Any]:
    """The base's config, updated for the new weights."""
    stored = _name_dtypes(plan)[0]
    settled = dict(config)
    field = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    settled[field] = stored
    parts = [settled]
    if isinstance(config.get("text_config"), dict):
        settled["text_config"] = dict(config["text_config"])
        parts.append(settled["text_config"])
    for part in parts:
        if plan.is_untied and (part is settled or "tie_word_embeddings" in part):
            part["tie_word_embeddings"] = False
        if changes.vocab_size is not None and "vocab_size" in part:
            part["vocab_size"] = changes.vocab_size
    return settled


def _name_dtypes(plan: MergePlan) -> tuple[str, ...]:
    """As torch names them, by stored bytes."""
    sizes: dict[str, int] = {}
    for output in plan.outputs:
        if output.dtype.is_floating_point:
            name = str(output.dtype).removeprefix("torch.")
            sizes[name] = sizes.get(name, 0) + output.num_bytes
    return tuple(sorted(sizes, key=lambda name: -sizes[name]))


def _notes(changes: AdapterChanges, plan: MergePlan) -> tuple[str, ...]:
    notes = []
    if plan.is_untied:
        notes.append(
            "The base has one matrix for embeddings and head, and the adapter changes one of "
            "them: both are stored now, and the model is larger by that matrix."
        )
    if changes.vocab_size is not None:
        notes.append(f"The adapter has its own vocabulary of {changes.vocab_size:,} tokens.")
    if plan.missing:
        notes.append(
            "The base's files hold the adapted matrices in parts, so the model was loaded whole."
        )
    return tuple(notes)


def _check_result(request: MergeRequest, work: Path) -> tuple[Verdict | None, Path]:
    if request.check is None:
        publish_folder(work, request.target)
        return None, request.target
    made = Artefact(
        name=str(request.target),
        kind=ArtefactKind.MODEL,
        path=work,
        tokenizer=work,
        run=request.artefact.run,
    )
    try:
        verdict = request.check(request.artefact, made)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    if not verdict.is_good:
        return verdict, reject_folder(work, request.target)
    publish_folder(work, request.target)
    return verdict, request.target


# Merging with the whole model in memory, for files that hold the adapted matrices in parts.


def write_whole(
    request: MergeRequest, work: Path, missing: tuple[str, ...], *, is_tied_changed: bool
) -> None:
    """Mixtures of experts: transformers stacks the experts when it loads and parts them again
    when it saves; in between peft sees the stacked matrix and can add to it."""
    import torch
    from peft.tuners.lora import LoraLayer

    artefact = request.artefact
    assert artefact.base is not None
    if is_tied_changed:
        raise InvalidInputError(
            f"The adapter changes both {missing[0]}, which the base's files hold in parts, and a "
            "matrix that embeddings and head share.",
            remedy="use the adapter as it is: tightfit chat ADAPTER",
        )
    dtype = request.dtype or _stored_dtype(artefact.base)
    model: Any = load_base(
        artefact.base, LoadRequest(weights=dtype, compute=dtype), torch.device("cpu")
    )
    adapted: Any = load_adapter(model, artefact.path)
    layers = [module for module in adapted.modules() if isinstance(module, LoraLayer)]
    for number, layer in enumerate(layers, start=1):
        _merge_in_place(layer)
        if request.report is not None:
            request.report("layers", number, len(layers))
    merged = adapted.merge_and_unload()  # merged already: this only removes peft's wrappers
    merged.config.use_cache = True
    merged.save_pretrained(
        str(work), max_shard_size=request.max_shard_bytes, safe_serialization=True
    )


def _merge_in_place(layer: Any) -> None:
    """In fp32, and back to what it was."""
    import torch

    owner = layer.get_base_layer()
    attribute = getattr(layer, "parameter_name", "weight")
    parameter = getattr(owner, attribute)
    dtype = parameter.dtype
    with torch.no_grad():
        parameter.data = parameter.data.float()
        for name, value in layer.named_parameters(recurse=True):
            if "lora_" in name and "base_layer" not in name:
                value.data = value.data.float()
        layer.merge(adapter_names=[ADAPTER])
        parameter = getattr(owner, attribute)
        parameter.data = parameter.data.to(dtype)


def _stored_dtype(base: Path) -> Dtype:
    """What most of the base's bytes are."""
    import torch

    from tightfit.runtime.tensor_files import StoredWeights

    names = {torch.float32: Dtype.FP32, torch.bfloat16: Dtype.BF16, torch.float16: Dtype.FP16}
    sizes: dict[Dtype, int] = {}
    for tensor in StoredWeights(base).tensors.values():
        if tensor.dtype in names:
            found = names[tensor.dtype]
            sizes[found] = sizes.get(found, 0) + tensor.num_bytes
    return max(sizes, key=lambda dtype: sizes[dtype], default=Dtype.FP32)
