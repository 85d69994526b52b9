"""What an adapter makes of each parameter of its base, by peft, one parameter at a time."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError
from tightfit.runtime.load import LoadRequest, build_model, read_config
from tightfit.runtime.quiet import silence_libraries
from tightfit.runtime.stored_weights import list_safetensors, load_pickle, read_safetensor
from tightfit.runtime.weight_files import find_safetensors_fault

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
    """The base model without values, wearing its adapter."""

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
    """Base values that the adapter brings itself: a grown vocabulary, trained biases."""
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
        """What the adapter brings as the base's own value."""
        for partner in sorted(self.partners(name)):
            if partner in self.based:
                found: torch.Tensor = self.based[partner]
                return found
        return None

    def apply(self, name: str, stored: torch.Tensor | None) -> torch.Tensor:
        """The parameter as the adapter has it, in fp32. `stored` is the base's, and is used up."""
        if name in self.saved:
            whole: torch.Tensor = self.saved[name]
            return whole.float()
        brought = self.base_value(name)
        value = stored if brought is None else brought
        if value is None or tuple(value.shape) != self.shapes[name]:
            raise InvalidInputError(
                f"The adapter changes {name} of shape {self.shapes[name]}, and the base has "
                f"{'none' if value is None else f'one of shape {tuple(value.shape)}'}.",
                remedy="name the base model that the adapter was trained on in its "
                "adapter_config.json",
            )
        value = value.float().clone() if brought is not None else value.float()
        for layer, attribute in self.layers.get(name, ()):
            value = _merge_layer(layer, attribute, value, name)
        return value


def read_changes(adapter: Path, base: Path) -> AdapterChanges:
    """peft's layers with the adapter's values, around a base that holds none."""
    import torch

    silence_libraries()  # before the import that makes libraries talk
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
    changes.vocab_size = None if stated == _rows(model) else _rows(model)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft speaks of ties, which are settled below
            peft_model: Any = get_peft_model(
                model, config, autocast_adapter_dtype=False, low_cpu_mem_usage=True
            )
            _stay_put(peft_model)
            result: Any = set_peft_model_state_dict(peft_model, weights, low_cpu_mem_usage=True)
    except (RuntimeError, ValueError, KeyError, TypeError, NotImplementedError) as fault:
        raise _does_not_fit(adapter, base, str(fault).splitlines()[0]) from fault
    if result.unexpected_keys:
        raise _does_not_fit(adapter, base, f"{result.unexpected_keys[0]} has no place in it")
    changes.model = peft_model.base_model.model
    with torch.no_grad():
        _collect(changes)
    empty = [n for n, p in changes.model.named_parameters() if p.is_meta and _is_adapters(n)]
    if empty:
        raise _does_not_fit(adapter, base, f"the adapter's files lack {empty[0]}")
    return changes


def _stay_put(peft_model: Any) -> None:
    """peft sends an adapter's values to the device of its base layer, where here they would end."""
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
            biases[ADAPTER] = False  # its turn comes when the bias is read
        layer.merge(adapter_names=[ADAPTER])
        merged: torch.Tensor = getattr(owner, attribute).data
    except (RuntimeError, ValueError, NotImplementedError) as fault:
        raise InvalidInputError(
            f"peft cannot merge {type(layer).__name__} at {name}: {str(fault).splitlines()[0]}",
            remedy="use the adapter as it is: tightfit chat ADAPTER",
        ) from fault
    finally:
        setattr(owner, attribute, held)
        layer.merged_adapters.clear()
        if has_bias:
            biases[ADAPTER] = True
    return merged


def _check_config(adapter: Path, peft_config: Any) -> Any:
    """Adapters that can be added to a base; each other kind is refused by its name."""
    try:
        config = peft_config.from_pretrained(str(adapter))
    except (ValueError, KeyError, TypeError, OSError) as fault:
        raise InvalidInputError(
            f"{adapter / 'adapter_config.json'} cannot be read: {str(fault).splitlines()[0]}",
            remedy="copy the adapter again, or pip install -U peft",
        ) from fault
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
    # Values come from the file: whatever start was asked for is over.
    config.init_lora_weights = True
    return config


def _load_weights(adapter: Path) -> dict[str, Any]:
    path = adapter / "adapter_model.safetensors"
    problem = find_safetensors_fault(path)
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
    if rows is not None and rows != _rows(model):
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


def _rows(model: Any) -> int:
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


def _does_not_fit(adapter: Path, base: Path, why: str) -> InvalidInputError:
    return InvalidInputError(
        f"The adapter in {adapter} does not fit {base}: {why.rstrip('.')}.",
        remedy="merge it into the base model it was trained on: see its adapter_config.json",
    )
