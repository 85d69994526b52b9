"""Merge a LoRA adapter into its base, tensor by tensor, in the base's own precision."""

from __future__ import annotations

import contextlib
import ctypes
import json
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from tightfit.core.dtypes import MXFP4, Dtype
from tightfit.core.errors import InvalidInputError, SetupError, UsageError, first_line
from tightfit.core.files import describe_write_error, publish_folder, write_atomic
from tightfit.core.frozen import Frozen
from tightfit.core.progress import Progress
from tightfit.core.reading import read_json_file
from tightfit.core.strategy import Strategy
from tightfit.data.templates import choose_template
from tightfit.data.tokenizer import load_tokenizer
from tightfit.export.verify.verdict import Verdict
from tightfit.hardware.machine import read_peak_memory_bytes, reset_peak_memory
from tightfit.models.config import read_quant_method
from tightfit.runtime.adapters import check_adapter_config, find_new_rows, load_adapter
from tightfit.runtime.libraries import silence_libraries, torch_dtype
from tightfit.runtime.load import build_model, load_base, read_config
from tightfit.runtime.model_files import Artefact, ArtefactKind, copy_tuned_tokenizer_files
from tightfit.runtime.output_folder import (
    begin_folder,
    check_resources,
    check_target,
    reject,
)
from tightfit.runtime.tensor_files import (
    DEFAULT_SHARD_BYTES,
    Output,
    StoredWeights,
    find_weights_error,
    list_safetensors,
    load_pickle,
    read_safetensor,
    write_shards,
)
from tightfit.runtime.vocabulary import extend_rows

if TYPE_CHECKING:
    import torch


# The plan: the base without values, the adapter's changes to it, and the tensors to write.

ADAPTER = "default"
_PREFIX = "base_model.model."
_WRAPPING = ("base_layer", "token_adapter", "original_module", "modules_to_save", ADAPTER)
"""Names that peft puts between a module's name and its parameters'."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to start LoRA that also change the base weights, which the adapter's files do not hold.
Source: peft's LoraConfig, `init_lora_weights`."""
SAME_FRACTION = 1e-6
"""Of the largest value: two halves of a tie that differ by less are one matrix still."""
FP32_BYTES = 4
ALLOCATOR_BYTES = 64 << 20
"""Freed matrices that the C library keeps until `release_freed_memory`."""


@dataclass(slots=True, kw_only=True)
class MergePlan:
    """What an adapter changes, which tensors the merged model has, and where each comes from."""

    stored: StoredWeights
    """The base's files."""
    model: Any
    """The base model's modules inside peft's, base values on the meta device."""
    shapes: dict[str, tuple[int, ...]]
    """Every parameter and stored buffer of the base, by its own name."""
    ties: tuple[frozenset[str], ...]
    """Names that share one matrix in the base."""
    embeddings: frozenset[str]
    """Names of the input embeddings' matrix."""
    vocab_size: int | None
    """Where the adapter has another number of tokens than the base."""
    adapter_bytes: int
    is_dora: bool
    layers: dict[str, list[tuple[Any, str]]] = field(default_factory=dict)
    """By parameter: peft's layer and the parameter's name in its base layer."""
    saved: dict[str, Any] = field(default_factory=dict)
    """Parameters that were trained whole."""
    based: dict[str, Any] = field(default_factory=dict)
    """Base values stored in the adapter: a resized vocabulary, trained biases."""
    outputs: list[Output] = field(default_factory=list)
    """In the order of the base's files."""
    sources: dict[str, str | None] = field(default_factory=dict)
    """By output: the tensor of the base that it is made from."""
    is_untied: bool = False
    missing: list[str] = field(default_factory=list)
    """Changed parameters that the base's files hold under no name of their own."""

    @property
    def num_bytes(self) -> int:
        return sum(output.num_bytes for output in self.outputs)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """As torch names them, by stored bytes."""
        sizes: Counter[str] = Counter()
        for output in self.outputs:
            if output.dtype.is_floating_point:
                sizes[str(output.dtype).removeprefix("torch.")] += output.num_bytes
        return tuple(name for name, _ in sizes.most_common())

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know about the result."""
        notes = []
        if self.is_untied:
            notes.append(
                "The base has one matrix for embeddings and head, and the adapter changes one of "
                "them: both are stored now, and the model is larger by that matrix."
            )
        if self.vocab_size is not None:
            notes.append(f"The adapter has its own vocabulary of {self.vocab_size:,} tokens.")
        if self.missing:
            notes.append(
                "The base's files hold the adapted matrices in parts, so the model was loaded "
                "whole."
            )
        return tuple(notes)

    def estimate_bytes(self) -> int:
        """Memory on top of the process's: the adapter, and the most expensive matrix.

        Each matrix is there as stored, in fp32 with its copies while the adapter is added, and as
        written. Leaves out the page cache, which the system gives back on demand.
        """
        if self.missing:  # the model as it will be stored, and its largest matrix twice in fp32
            values = [tensor.num_values for tensor in self.stored.tensors.values()]
            width = max(output.dtype.itemsize for output in self.outputs)
            return sum(values) * width + 2 * FP32_BYTES * max(values) + 2 * self.adapter_bytes
        # A matrix and what is added to it; DoRA takes norms of the scaled sum's squares.
        copies = 4 if self.is_dora else 2
        costliest = 0
        for output in self.outputs:
            key = self.sources[output.name]
            source = self.stored.tensors[key] if key is not None else None
            is_changed = self.is_changed(output.name)
            computed = FP32_BYTES * output.num_values * copies if is_changed else 0
            is_as_stored = not is_changed and source is not None and source.dtype == output.dtype
            made = 0 if is_as_stored else output.num_bytes
            costliest = max(costliest, (source.num_bytes if source else 0) + computed + made)
        # Half-precision adapters are raised to fp32, layer by layer, and stay so.
        return 2 * self.adapter_bytes + costliest + ALLOCATOR_BYTES

    def is_changed(self, name: str) -> bool:
        return name in self.layers or name in self.saved or name in self.based

    def partners(self, name: str) -> frozenset[str]:
        """All names of this parameter's matrix, itself included."""
        return next((tie for tie in self.ties if name in tie), frozenset({name}))

    def base_value(self, name: str) -> torch.Tensor | None:
        """The base value stored in the adapter, if any."""
        return next((self.based[p] for p in sorted(self.partners(name)) if p in self.based), None)

    def read(self, name: str) -> torch.Tensor:
        """One tensor of the merged model: a changed one in fp32, another as it is stored."""
        key = self.sources[name]
        if self.is_changed(name):
            return self.apply(name, None if key is None else self.stored.read(key))
        assert key is not None
        own_value = self.base_value(name)
        return self.stored.read(key) if own_value is None else own_value

    def apply(self, name: str, stored: torch.Tensor | None) -> torch.Tensor:
        """The merged parameter in fp32. `stored` is the base's, and is overwritten."""
        if name in self.saved:
            whole: torch.Tensor = self.saved[name]
            return whole.float()
        own_value = self.base_value(name)
        value = stored if own_value is None else own_value
        if value is not None and self.vocab_size is not None and self._is_by_token(name):
            value = extend_rows(value, self.vocab_size)
        if value is None or tuple(value.shape) != self.shapes[name]:
            raise InvalidInputError(
                f"The adapter changes {name} of shape {self.shapes[name]}, and the base has "
                f"{'none' if value is None else f'one of shape {tuple(value.shape)}'}.",
                remedy="name the base model that the adapter was trained on in its "
                "adapter_config.json",
            )
        value = value.float().clone() if own_value is not None else value.float()
        for layer, attribute in self.layers.get(name, ()):
            value = _merge_layer(layer, attribute, value, name)
        return value

    def _is_by_token(self, name: str) -> bool:
        """Whether the matrix has a row for each token."""
        modules = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        return any(
            name == f"{_own_name(path)}.weight"
            for path, module in self.model.named_modules()
            if any(module is one for one in modules)
        )

    def update_config(self, config: dict[str, Any]) -> None:
        """Change the base's config for the new weights."""
        is_old = "torch_dtype" in config and "dtype" not in config
        config["torch_dtype" if is_old else "dtype"] = self.dtypes[0]
        if self.is_untied:
            config["tie_word_embeddings"] = False
        text = config.get("text_config")
        for part in (config, text) if isinstance(text, dict) else (config,):
            if self.is_untied and "tie_word_embeddings" in part:
                part["tie_word_embeddings"] = False
            if self.vocab_size is not None and "vocab_size" in part:
                part["vocab_size"] = self.vocab_size


def plan_merge(adapter: Path, base: Path, dtype: torch.dtype | None = None) -> MergePlan:
    """peft's layers with the adapter's values around a base that holds none, and the outputs.

    `dtype` of every floating-point tensor; None: as in the base.
    """
    import torch

    silence_libraries()  # before the import that prints warnings
    from peft import PeftConfig, get_peft_model, set_peft_model_state_dict

    config = _check_config(adapter, PeftConfig)
    weights = _load_weights(adapter)
    model = _build_base(adapter, base, weights)
    config_file = read_json_file(base / "config.json", allows_infinity=True)
    text = config_file.get("text_config") or {}
    num_embeddings = _num_embeddings(model)
    is_resized = num_embeddings != (config_file.get("vocab_size") or text.get("vocab_size"))
    # Parameters that are one object, or that transformers ties when it loads.
    groups: dict[int, set[str]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(value), set()).add(name)
    plan = MergePlan(
        stored=StoredWeights(base),
        model=model,
        shapes={name: tuple(value.shape) for name, value in model.state_dict().items()},
        ties=tuple(frozenset(names) for names in groups.values() if len(names) > 1),
        embeddings=frozenset(
            f"{name}.weight"
            for name, module in model.named_modules()
            if module is model.get_input_embeddings()
        ),
        vocab_size=num_embeddings if is_resized else None,
        adapter_bytes=sum(value.numel() * value.element_size() for value in weights.values()),
        is_dora=bool(getattr(config, "use_dora", False)),
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft warns about ties, which are handled below
            peft_model: Any = get_peft_model(
                model, config, autocast_adapter_dtype=False, low_cpu_mem_usage=True
            )
            for module in peft_model.modules():
                # peft would move the adapter's values to the meta device of the base layer.
                if hasattr(module, "_move_adapter_to_device_of_base_layer"):
                    module._move_adapter_to_device_of_base_layer = lambda *_, **__: None
            result: Any = set_peft_model_state_dict(peft_model, weights, low_cpu_mem_usage=True)
    except (
        RuntimeError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        NotImplementedError,
    ) as error:
        raise _mismatch_error(adapter, base, first_line(error)) from error
    if result.unexpected_keys:
        raise _mismatch_error(adapter, base, f"{result.unexpected_keys[0]} has no place in it")
    plan.model = peft_model.base_model.model
    with torch.no_grad():
        _collect_changes(plan)
        empty = [n for n, p in plan.model.named_parameters() if p.is_meta and _is_adapters(n)]
        if empty:
            raise _mismatch_error(adapter, base, f"the adapter's files lack {empty[0]}")
        _plan_outputs(plan, dtype, prefix=str(model.base_model_prefix))
    return plan


def _collect_changes(plan: MergePlan) -> None:
    from peft.tuners.lora import LoraLayer
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    for path, module in plan.model.named_modules():
        if not isinstance(module, LoraLayer | TrainableTokensLayer):
            continue
        attributes = [getattr(module, "parameter_name", "weight")]
        if getattr(module, "lora_bias", {}).get(ADAPTER):
            attributes.append("bias")
        for attribute in attributes:
            name = f"{_own_name(path)}.{attribute}"
            plan.layers.setdefault(name, []).append((module, attribute))
    for path, value in plan.model.named_parameters(remove_duplicate=False):
        if value.is_meta or _is_adapters(path):
            continue
        into = plan.saved if f".modules_to_save.{ADAPTER}." in path else plan.based
        into[_own_name(path)] = value.data


def _plan_outputs(plan: MergePlan, dtype: torch.dtype | None, *, prefix: str) -> None:
    """`prefix`: what checkpoints of the bare model leave out before a name."""
    for key, tensor in plan.stored.tensors.items():
        candidates = (key, f"{prefix}.{key}", key.removeprefix(f"{prefix}."))
        name = next((one for one in candidates if one in plan.shapes), key)
        is_known = name in plan.shapes
        for made in _tied_outputs(plan, name, key) if is_known else [name]:
            if made in plan.sources:
                continue
            is_number = tensor.dtype.is_floating_point
            has_own_shape = is_known and (plan.is_changed(made) or plan.vocab_size)
            plan.sources[made] = key
            plan.outputs.append(
                Output(
                    name=made,
                    shape=plan.shapes[made] if has_own_shape else tensor.shape,
                    dtype=dtype if dtype is not None and is_number else tensor.dtype,
                )
            )
    # Parameters that the base's files lack: whole ones can be written, others are missing.
    for name in {**plan.layers, **plan.saved, **plan.based}:
        if any(partner in plan.sources for partner in plan.partners(name)):
            continue
        whole = plan.saved.get(name, plan.based.get(name))
        if whole is None:
            plan.missing.append(name)
            continue
        plan.sources[name] = None
        plan.outputs.append(Output(name=name, shape=tuple(whole.shape), dtype=dtype or whole.dtype))


def _tied_outputs(plan: MergePlan, name: str, key: str) -> list[str]:
    """The names to write for one stored matrix: one while all that share it stay the same."""
    partners = plan.partners(name)
    touched = sorted(p for p in partners if p in plan.layers or p in plan.saved)
    written = next((p for p in partners if p in plan.sources), None) or name
    if len(partners) == 1 or not touched:
        return [written] if plan.base_value(name) is not None else [name]
    if len(touched) == len(partners):
        first, *others = (plan.apply(one, plan.stored.read(key)) for one in touched)
        limit = SAME_FRACTION * float(first.abs().max())
        if all(float((other - first).abs().max()) <= limit for other in others):
            return [written]
    # Blocks that share a matrix, and T5's two stacks, get it by one name from the files.
    if plan.model.config.is_encoder_decoder or not partners & plan.embeddings:
        raise InvalidInputError(
            f"The adapter changes {touched[0]}, and the model uses that matrix in "
            f"{len(partners)} places, which its files do not distinguish.",
            remedy="use the adapter as it is: tightfit chat ADAPTER; or train it again without "
            "that matrix: --set lora_targets=...",
        )
    plan.is_untied = True
    return [name, *sorted(partners - {name})]


def _is_adapters(path: str) -> bool:
    return "lora_" in path or "trainable_tokens_" in path


def _own_name(path: str) -> str:
    """The name a module or parameter has in the base."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPING)


def _merge_layer(layer: Any, attribute: str, value: torch.Tensor, name: str) -> torch.Tensor:
    """peft's own arithmetic for one layer, in fp32."""
    import torch

    owner = layer.get_base_layer()
    if attribute == "bias":
        added: torch.Tensor = layer.lora_B[ADAPTER].bias.data.float() * layer.scaling[ADAPTER]
        return value + added
    held = getattr(owner, attribute)
    biases = getattr(layer, "lora_bias", {})
    has_bias = biases.get(ADAPTER, False)
    layer.float()  # the adapter's own values; those of the base are not there
    try:
        setattr(owner, attribute, torch.nn.Parameter(value, requires_grad=False))
        if has_bias:
            biases[ADAPTER] = False  # merged when the bias is read
        layer.merge(adapter_names=[ADAPTER])
        merged: torch.Tensor = getattr(owner, attribute).data
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise InvalidInputError(
            f"peft cannot merge {type(layer).__name__} at {name}: {str(error).splitlines()[0]}",
            remedy="use the adapter as it is: tightfit chat ADAPTER",
        ) from error
    finally:
        setattr(owner, attribute, held)
        layer.merged_adapters.clear()
        if has_bias:
            biases[ADAPTER] = True
    return merged


def _check_config(adapter: Path, peft_config: Any) -> Any:
    """The adapter's config. Raises for kinds that cannot be merged."""
    check_adapter_config(adapter)
    try:
        config = peft_config.from_pretrained(str(adapter))
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise InvalidInputError(
            f"{adapter / 'adapter_config.json'} cannot be read: {str(error).splitlines()[0]}",
            remedy="copy the adapter again, or pip install -U peft",
        ) from error
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    start = config.to_dict().get("init_lora_weights")
    problem = None
    if kind != "LORA":
        problem = f"is of kind {kind}; only LoRA adapters are merged"
    elif isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        problem = f"was started with {start}, which changed the base weights too"
    elif config.to_dict().get("layer_replication"):
        problem = "repeats layers of its base (layer_replication)"
    if problem is not None:
        raise InvalidInputError(
            f"The adapter in {adapter} {problem}.",
            remedy="save it as a plain LoRA with peft: model.save_pretrained(FOLDER, "
            "path_initial_model_for_weight_conversion=...)"
            if start and isinstance(start, str)
            else "use the adapter as it is: tightfit chat ADAPTER",
        )
    config.inference_mode = True
    # Values come from the file: no initialisation is wanted.
    config.init_lora_weights = True
    return config


def _load_weights(adapter: Path) -> dict[str, Any]:
    path = adapter / "adapter_model.safetensors"
    problem = find_weights_error(path)
    if problem is None:
        return {tensor.name: read_safetensor(tensor) for tensor in list_safetensors(path)}
    pickled = adapter / "adapter_model.bin"
    if path.exists() or not pickled.is_file():
        raise InvalidInputError(f"{path} {problem}.", remedy="copy the adapter again")
    return load_pickle(pickled)


def _build_base(adapter: Path, base: Path, weights: dict[str, Any]) -> Any:
    import torch

    strategy = Strategy(weights=Dtype.FP32, compute=Dtype.FP32)
    config = read_config(base, strategy, attention="eager")  # which every family has
    with torch.device("meta"):
        model = build_model(config, strategy)
    rows = _adapter_rows(model, weights) or find_new_rows(model, adapter)
    if rows is not None and rows != _num_embeddings(model):
        config.get_text_config().vocab_size = rows
        with torch.device("meta"):
            model = build_model(config, strategy)
    return model


def _adapter_rows(model: Any, weights: dict[str, Any]) -> int | None:
    """Tokens that the adapter's own copy of the embeddings has."""
    wanted = {
        f"{_PREFIX}{name}"
        for name, module in model.named_modules()
        if module is model.get_input_embeddings() or module is model.get_output_embeddings()
    }
    for name, value in weights.items():
        owner = name.removesuffix(".weight").removesuffix(".base_layer")
        if name.endswith(".weight") and owner in wanted:
            return int(value.shape[0])
    return None


def _num_embeddings(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def _mismatch_error(adapter: Path, base: Path, why: str) -> InvalidInputError:
    return InvalidInputError(
        f"The adapter in {adapter} does not fit {base}: {why.rstrip('.')}.",
        remedy="merge it into the base model it was trained on: see its adapter_config.json",
    )


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
        if not self.is_accepted and self.verdict is not None:
            self.verdict.raise_if_broken(
                remedy=f"see what was made in {self.path}; please report it with the output of "
                f"tightfit verify {self.adapter} {self.path} --json"
            )


def merge_adapter(request: MergeRequest) -> MergeResult:
    """Write the merged model. With a check, only a result that passes gets the wanted name."""
    artefact, base = _check_request(request)
    start = time.monotonic()
    import torch

    dtype = None if request.dtype is None else torch_dtype(request.dtype)
    plan = plan_merge(artefact.path, base, dtype)
    # The adapter is in memory by now, and counted in the plan's estimate too.
    held = psutil.Process().memory_info().rss - plan.adapter_bytes
    forecast = MergeForecast(
        host_bytes=held + plan.estimate_bytes(),
        disk_bytes=plan.num_bytes,
        is_streamed=not plan.missing,
    )
    if request.announce is not None:
        request.announce(forecast)
    check_resources("merge", request.target, forecast.disk_bytes, forecast.host_bytes)
    work = begin_folder(request.target)
    try:
        reset_peak_memory()
        with torch.no_grad():
            _write_model(request, plan, work)
        result = MergeResult(
            path=str(request.target),
            adapter=str(artefact.path),
            base=str(base),
            dtypes=plan.dtypes,
            num_changed=sum(plan.is_changed(name) for name in plan.sources),
            num_tensors=len(plan.outputs),
            size_bytes=plan.num_bytes,
            predicted=forecast,
            peak_host_bytes=read_peak_memory_bytes(),
            seconds=time.monotonic() - start,
            notes=plan.notes,
        )
        del plan  # its memory is the check's
        return _check_result(request, work, result)
    except BaseException as error:
        shutil.rmtree(work, ignore_errors=True)
        if isinstance(error, OSError):
            raise SetupError(
                f"Cannot write {request.target}: {describe_write_error(error, request.target)}.",
                remedy="--out a folder that is writable and has free space",
            ) from error
        raise


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
    config = read_json_file(artefact.base / "config.json", allows_infinity=True)
    if read_quant_method(config) not in (None, MXFP4):
        raise InvalidInputError(
            f"The base model in {artefact.base} is quantized, and an adapter is merged into "
            "unquantized weights.",
            remedy="name the model it was made from as base_model_name_or_path in "
            f"{artefact.path / 'adapter_config.json'}",
        )
    check_target(request.target, force=request.force, sources=(artefact.path, artefact.base))
    return artefact, artefact.base


def _write_model(request: MergeRequest, plan: MergePlan, work: Path) -> None:
    artefact = request.artefact
    assert artefact.base is not None
    if plan.missing:
        _write_whole(request, plan, work)
    else:
        _write_streamed(request, plan, work)
    copy_tuned_tokenizer_files(artefact.tokenizer, artefact.base, work)
    if artefact.template is not None:
        chosen = choose_template(artefact.template, load_tokenizer(artefact.tokenizer))
        write_atomic(work / "chat_template.jinja", chosen.text)
    config = read_json_file(artefact.base / "config.json", allows_infinity=True)
    plan.update_config(config)
    if plan.missing:
        config.pop("quantization_config", None)  # what was packed is not any more
    write_atomic(work / "config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _write_streamed(request: MergeRequest, plan: MergePlan, work: Path) -> None:
    def produce(output: Output) -> torch.Tensor:
        value = plan.read(output.name)
        return _cast(value, output) if plan.is_changed(output.name) else value.to(output.dtype)

    done = released = 0

    def count(num_bytes: int) -> None:
        nonlocal done, released
        done += num_bytes
        if done - released >= RELEASE_BYTES:
            released = done
            release_freed_memory()
        if request.report is not None:
            request.report("weights", done, plan.num_bytes)

    write_shards(work, plan.outputs, produce, max_shard_bytes=request.max_shard_bytes, report=count)


RELEASE_BYTES = 64 << 20
"""Written between two calls of `release_freed_memory`."""


def release_freed_memory() -> None:
    """Return freed matrices to the system, where the C library is glibc.

    It would keep those below 32 MiB in a heap that their mixed sizes break into pieces, and a
    merge would grow with the model after all. Source: malloc_trim(3).
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


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


def _check_result(request: MergeRequest, work: Path, result: MergeResult) -> MergeResult:
    """Publish the folder, or keep it apart where the check does not pass."""
    verdict = None
    if request.check is not None:
        made = Artefact(
            name=str(request.target),
            kind=ArtefactKind.MODEL,
            path=work,
            tokenizer=work,
            run=request.artefact.run,
        )
        verdict = request.check(request.artefact, made)
        if not verdict.is_good:
            rejected = reject(work, request.target)
            update = {"path": str(rejected), "is_accepted": False, "verdict": verdict}
            return result.model_copy(update=update)
    publish_folder(work, request.target)
    return result.model_copy(update={"verdict": verdict})


def _write_whole(request: MergeRequest, plan: MergePlan, work: Path) -> None:
    """Merge with the whole model in memory, for files that hold the adapted matrices in parts.

    Mixtures of experts: transformers stacks the experts when it loads and parts them again when
    it saves; in between peft sees the stacked matrix and can add to it.
    """
    import torch
    from peft.tuners.lora import LoraLayer
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    artefact = request.artefact
    assert artefact.base is not None
    if plan.is_untied:
        raise InvalidInputError(
            f"The adapter changes both {plan.missing[0]}, which the base's files hold in parts, "
            "and a matrix that embeddings and head share.",
            remedy="use the adapter as it is: tightfit chat ADAPTER",
        )
    dtype = request.dtype or plan.stored.main_dtype() or Dtype.FP32
    strategy = Strategy(weights=dtype, compute=dtype)
    model: Any = load_base(artefact.base, strategy, torch.device("cpu"), attention="eager")
    adapted: Any = load_adapter(model, artefact.path)
    for module in adapted.modules():
        if isinstance(module, TrainableTokensLayer):
            module.merge(adapter_names=[ADAPTER])
    layers = [module for module in adapted.modules() if isinstance(module, LoraLayer)]
    for number, layer in enumerate(layers, start=1):
        _merge_in_place(layer)
        if request.report is not None:
            request.report("layers", number, len(layers))
    merged = adapted.unload()  # merged already: this only removes the wrappers
    merged.config.use_cache = True
    merged.save_pretrained(
        str(work), max_shard_size=request.max_shard_bytes, safe_serialization=True
    )


def _merge_in_place(layer: Any) -> None:
    """In fp32, and back to what it was."""
    owner = layer.get_base_layer()
    attribute = getattr(layer, "parameter_name", "weight")
    parameter = getattr(owner, attribute)
    dtype = parameter.dtype
    parameter.data = parameter.data.float()
    for name, value in layer.named_parameters(recurse=True):
        if "lora_" in name and "base_layer" not in name:
            value.data = value.data.float()
    layer.merge(adapter_names=[ADAPTER])
    parameter = getattr(owner, attribute)
    parameter.data = parameter.data.to(dtype)
