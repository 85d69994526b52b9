"""What an adapter changes: each parameter with LoRA merged by peft, one at a time.

Also which tensors a merged model has, and the host memory that a merge needs.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError
from tightfit.runtime.libraries import silence_libraries
from tightfit.runtime.load import LoadRequest, build_model, read_config
from tightfit.runtime.model_files import find_safetensors_error
from tightfit.runtime.tensor_files import (
    Output,
    StoredWeights,
    list_safetensors,
    load_pickle,
    read_safetensor,
)

if TYPE_CHECKING:
    import torch


ADAPTER = "default"
_PREFIX = "base_model.model."
_WRAPPING = ("base_layer", "token_adapter", "original_module", "modules_to_save", ADAPTER)
"""Names that peft puts between a module's name and its parameters'."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to start LoRA that also change the base weights, which the adapter's files do not hold.
Source: peft's LoraConfig, `init_lora_weights`."""


@dataclass(slots=True, kw_only=True)
class AdapterChanges:
    """The base model without values, with the adapter loaded."""

    model: Any
    """The base model's modules inside peft's, base values on the meta device."""
    shapes: dict[str, tuple[int, ...]]
    """Every parameter and stored buffer of the base, by its own name."""
    prefix: str
    """What some checkpoints leave out before a name."""
    layers: dict[str, list[tuple[Any, str]]] = field(default_factory=dict)
    """By parameter: peft's layer and the parameter's name in its base layer."""
    saved: dict[str, Any] = field(default_factory=dict)
    """Parameters that were trained whole."""
    based: dict[str, Any] = field(default_factory=dict)
    """Base values stored in the adapter: a resized vocabulary, trained biases."""
    ties: tuple[frozenset[str], ...] = ()
    """Names that share one matrix in the base."""
    vocab_size: int | None = None
    """Where the adapter has another number of tokens than the base."""
    num_bytes: int = 0
    is_dora: bool = False

    def is_changed(self, name: str) -> bool:
        return name in self.layers or name in self.saved or name in self.based

    def partners(self, name: str) -> frozenset[str]:
        """All names of this parameter's matrix, itself included."""
        return next((tie for tie in self.ties if name in tie), frozenset({name}))

    def base_value(self, name: str) -> torch.Tensor | None:
        """The base value stored in the adapter, if any."""
        for partner in sorted(self.partners(name)):
            if partner in self.based:
                found: torch.Tensor = self.based[partner]
                return found
        return None

    def apply(self, name: str, stored: torch.Tensor | None) -> torch.Tensor:
        """The merged parameter in fp32. `stored` is the base's, and is overwritten."""
        if name in self.saved:
            whole: torch.Tensor = self.saved[name]
            return whole.float()
        own_value = self.base_value(name)
        value = stored if own_value is None else own_value
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


def read_changes(adapter: Path, base: Path) -> AdapterChanges:
    """peft's layers with the adapter's values, around a base that holds none."""
    import torch

    silence_libraries()  # before the import that prints warnings
    from peft import PeftConfig, get_peft_model, set_peft_model_state_dict

    config = _check_config(adapter, PeftConfig)
    weights = _load_weights(adapter)
    model = _build_base(base, weights)
    changes = AdapterChanges(
        model=model,
        shapes={name: tuple(value.shape) for name, value in model.state_dict().items()},
        prefix=str(model.base_model_prefix),
        ties=_find_ties(model),
        num_bytes=sum(value.numel() * value.element_size() for value in weights.values()),
        is_dora=bool(getattr(config, "use_dora", False)),
    )
    stated = _vocab_size(base)
    changes.vocab_size = None if stated == _num_embeddings(model) else _num_embeddings(model)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft warns about ties, which are handled below
            peft_model: Any = get_peft_model(
                model, config, autocast_adapter_dtype=False, low_cpu_mem_usage=True
            )
            _keep_adapter_values(peft_model)
            result: Any = set_peft_model_state_dict(peft_model, weights, low_cpu_mem_usage=True)
    except (RuntimeError, ValueError, KeyError, TypeError, NotImplementedError) as error:
        raise _mismatch_error(adapter, base, str(error).splitlines()[0]) from error
    if result.unexpected_keys:
        raise _mismatch_error(adapter, base, f"{result.unexpected_keys[0]} has no place in it")
    changes.model = peft_model.base_model.model
    with torch.no_grad():
        _collect(changes)
    empty = [n for n, p in changes.model.named_parameters() if p.is_meta and _is_adapters(n)]
    if empty:
        raise _mismatch_error(adapter, base, f"the adapter's files lack {empty[0]}")
    return changes


def _keep_adapter_values(peft_model: Any) -> None:
    """Keep the adapter's values: peft would move them to the meta device of the base layer."""
    for module in peft_model.modules():
        if hasattr(module, "_move_adapter_to_device_of_base_layer"):
            module._move_adapter_to_device_of_base_layer = lambda *_, **__: None


def _collect(changes: AdapterChanges) -> None:
    from peft.tuners.lora import LoraLayer
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    for path, module in changes.model.named_modules():
        if isinstance(module, LoraLayer):
            attribute = getattr(module, "parameter_name", "weight")
            name = f"{_own_name(path)}.{attribute}"
            changes.layers.setdefault(name, []).append((module, attribute))
            if getattr(module, "lora_bias", {}).get(ADAPTER):
                changes.layers.setdefault(f"{_own_name(path)}.bias", []).append((module, "bias"))
        elif isinstance(module, TrainableTokensLayer):
            name = f"{_own_name(path)}.weight"
            changes.layers.setdefault(name, []).append((module, "weight"))
    for path, value in changes.model.named_parameters(remove_duplicate=False):
        if value.is_meta or _is_adapters(path):
            continue
        into = changes.saved if f".modules_to_save.{ADAPTER}." in path else changes.based
        into[_own_name(path)] = value.data


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
    try:
        config = peft_config.from_pretrained(str(adapter))
    except (ValueError, KeyError, TypeError, OSError) as error:
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
    problem = find_safetensors_error(path)
    if problem is None:
        return {tensor.name: read_safetensor(tensor) for tensor in list_safetensors(path)}
    pickled = adapter / "adapter_model.bin"
    if path.exists() or not pickled.is_file():
        raise InvalidInputError(f"{path} {problem}.", remedy="copy the adapter again")
    return load_pickle(pickled)


def _build_base(base: Path, weights: dict[str, Any]) -> Any:
    import torch

    request = LoadRequest(weights=Dtype.FP32, compute=Dtype.FP32)
    config = read_config(base, request)
    with torch.device("meta"):
        model = build_model(config, request)
    rows = _adapter_rows(model, weights)
    if rows is not None and rows != _num_embeddings(model):
        config.get_text_config().vocab_size = rows
        with torch.device("meta"):
            model = build_model(config, request)
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


def _vocab_size(base: Path) -> int | None:
    stated = json.loads((base / "config.json").read_bytes())
    found = stated.get("vocab_size") or (stated.get("text_config") or {}).get("vocab_size")
    return int(found) if found else None


def _find_ties(model: Any) -> tuple[frozenset[str], ...]:
    """Of parameters that are one object, or that transformers ties when it loads."""
    groups: dict[int, set[str]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(value), set()).add(name)
    return tuple(frozenset(names) for names in groups.values() if len(names) > 1)


def _mismatch_error(adapter: Path, base: Path, why: str) -> InvalidInputError:
    return InvalidInputError(
        f"The adapter in {adapter} does not fit {base}: {why.rstrip('.')}.",
        remedy="merge it into the base model it was trained on: see its adapter_config.json",
    )


# The plan: which tensors the merged model has, where each comes from, and ties.

SAME_FRACTION = 1e-6
"""Of the largest value: two halves of a tie that differ by less are one matrix still."""


@dataclass(slots=True, kw_only=True)
class MergePlan:
    """Outputs in the order of the base's files."""

    outputs: list[Output] = field(default_factory=list)
    sources: dict[str, str | None] = field(default_factory=dict)
    """By output: the tensor of the base that it is made from."""
    is_untied: bool = False
    missing: tuple[str, ...] = ()
    """Changed parameters that the base's files hold under no name of their own."""

    @property
    def num_bytes(self) -> int:
        return sum(output.num_bytes for output in self.outputs)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.sources)


def plan_merge(
    changes: AdapterChanges, stored: StoredWeights, dtype: torch.dtype | None
) -> MergePlan:
    """`dtype` of every floating-point tensor; None: as in the base."""
    plan = MergePlan()
    for key, tensor in stored.tensors.items():
        name = resolve_name(key, changes)
        is_known = name in changes.shapes
        names = _tied_outputs(name, key, changes, stored, plan) if is_known else [name]
        for made in names:
            if made in plan.sources:
                continue
            is_number = tensor.dtype.is_floating_point
            has_own_shape = is_known and (changes.is_changed(made) or changes.vocab_size)
            plan.sources[made] = key
            plan.outputs.append(
                Output(
                    name=made,
                    shape=changes.shapes[made] if has_own_shape else tensor.shape,
                    dtype=dtype if dtype is not None and is_number else tensor.dtype,
                )
            )
    _add_unstored(plan, changes, dtype)
    return plan


def resolve_name(key: str, changes: AdapterChanges) -> str:
    """A stored name as the model has it: checkpoints of the bare model lack the prefix."""
    candidates = (key, f"{changes.prefix}.{key}", key.removeprefix(f"{changes.prefix}."))
    return next((name for name in candidates if name in changes.shapes), key)


def _tied_outputs(
    name: str, key: str, changes: AdapterChanges, stored: StoredWeights, plan: MergePlan
) -> list[str]:
    """The names to write for one stored matrix: one while all that share it stay the same."""
    partners = changes.partners(name)
    touched = sorted(p for p in partners if p in changes.layers or p in changes.saved)
    if len(partners) == 1 or not touched:
        written = next((p for p in partners if p in plan.sources), None)
        return [written or name] if changes.base_value(name) is not None else [name]
    if len(touched) == len(partners) and _come_out_same(touched, key, changes, stored):
        return [next((p for p in partners if p in plan.sources), name)]
    if changes.model.config.is_encoder_decoder:
        raise InvalidInputError(
            f"The adapter changes {touched[0]}, and the model uses that matrix in "
            f"{len(partners)} places, which its files do not distinguish.",
            remedy="use the adapter as it is: tightfit chat ADAPTER; or train it again without "
            "embeddings",
        )
    plan.is_untied = True
    return [name, *sorted(partners - {name})]


def _come_out_same(
    names: list[str], key: str, changes: AdapterChanges, stored: StoredWeights
) -> bool:
    first = changes.apply(names[0], stored.read(key))
    most = float(first.abs().max())
    for name in names[1:]:
        other = changes.apply(name, stored.read(key))
        if float((other - first).abs().max()) > SAME_FRACTION * most:
            return False
    return True


def _add_unstored(plan: MergePlan, changes: AdapterChanges, dtype: torch.dtype | None) -> None:
    """Parameters that the base's files lack: whole ones can be written, others are missing."""
    missing = []
    for name in {**changes.layers, **changes.saved, **changes.based}:
        if any(partner in plan.sources for partner in changes.partners(name)):
            continue
        whole = changes.saved.get(name, changes.based.get(name))
        if whole is None:
            missing.append(name)
            continue
        plan.sources[name] = None
        plan.outputs.append(Output(name=name, shape=tuple(whole.shape), dtype=dtype or whole.dtype))
    plan.missing = tuple(missing)


# Host memory of a merge.

FP32_BYTES = 4
_COPIES = 2
"""A matrix and what is added to it."""
_DORA_COPIES = 4
"""Beside those the scaled sum and its squares, whose rows' norms are taken."""


ALLOCATOR_BYTES = 64 << 20
"""Freed matrices that the C library keeps until `release_freed_memory`."""
RELEASE_BYTES = 64 << 20
"""Written between two such calls."""


def estimate_merge_bytes(changes: AdapterChanges, stored: StoredWeights, plan: MergePlan) -> int:
    """On top of the process's memory: the adapter, and the most expensive matrix.

    Each matrix is there as stored, in fp32 with its copies while the adapter is added, and as
    written. Leaves out the page cache, which the system gives back on demand.
    """
    copies = _DORA_COPIES if changes.is_dora else _COPIES
    costliest = 0
    for output in plan.outputs:
        key = plan.sources[output.name]
        held = stored.tensors[key].num_bytes if key is not None else 0
        num_values = output.num_bytes // output.dtype.itemsize
        computed = FP32_BYTES * num_values * copies if changes.is_changed(output.name) else 0
        is_as_stored = (
            not computed and key is not None and (stored.tensors[key].dtype == output.dtype)
        )
        made = 0 if is_as_stored else output.num_bytes
        costliest = max(costliest, held + computed + made)
    # Half-precision adapters are raised to fp32, layer by layer, and stay so.
    return 2 * changes.num_bytes + costliest + ALLOCATOR_BYTES


def estimate_whole_bytes(stored: StoredWeights, plan: MergePlan, adapter_bytes: int) -> int:
    """The model as it will be stored, its largest matrix twice in fp32, and the adapter."""
    values = [tensor.num_values for tensor in stored.tensors.values()]
    width = max(output.dtype.itemsize for output in plan.outputs)
    return sum(values) * width + 2 * FP32_BYTES * max(values) + 2 * adapter_bytes


def release_freed_memory() -> None:
    """Return freed matrices to the system, where the C library is glibc.

    It would keep those below 32 MiB in a heap that their mixed sizes break into pieces, and a
    merge would grow with the model after all. Source: malloc_trim(3).
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
