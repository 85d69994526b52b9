"""LoRA adapters of one model: each row of a batch uses one of them, or none."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tightfit.core.errors import InvalidInputError
from tightfit.core.reading import read_json_file
from tightfit.runtime.adapters import check_adapter_files, find_adapter_rows, load_adapter

BASE = "__base__"
"""peft's word for a row without an adapter."""
_UNSHARED = {
    "use_dora": "is DoRA, which scales whole columns",
    "modules_to_save": "holds whole modules",
    "trainable_token_indices": "has rows of new tokens",
    "target_parameters": "changes parameters of experts",
    "alora_invocation_tokens": "begins at tokens of its own",
}
"""Settings of an adapter that peft cannot apply to single rows of a batch, or that change what all
rows share."""


class RowAdapters:
    """Loads and drops adapters, and tells peft's layers which row uses which.

    Every call is made between two steps of the batch.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._adapted: Any = None
        self._rows = [BASE]
        self._hooked: set[int] = set()
        self._numbers = itertools.count()

    def select(self, keys: Sequence[str | None]) -> None:
        """The adapter of each row of the batches that follow."""
        self._rows = [key or BASE for key in keys] or [BASE]

    def load(self, folder: Path) -> tuple[str, int]:
        """The key of the loaded adapter, and its bytes."""
        import torch

        self._check(folder)
        key = f"adapter{next(self._numbers)}"  # a name of a user's may not be one of a module
        with torch.inference_mode(False):
            try:
                self._adapted = load_adapter(self._adapted or self._model, folder, name=key)
                layers = self._layers(key)
                self._check_layers(layers, folder, key)
            except BaseException:
                self.drop(key)
                raise
            finally:
                self._hook()
            num_bytes = 0
            for name, parameter in self._model.named_parameters():
                if f".{key}." in name:
                    parameter.requires_grad_(False)
                    if self._model.dtype == torch.float32:
                        # A 16-bit adapter would reduce fp32 activations to its own precision.
                        parameter.data = parameter.data.float()
                    num_bytes += parameter.numel() * parameter.element_size()
            self._model.eval()
        return key, num_bytes

    def drop(self, key: str) -> None:
        """Forget an adapter; its memory is free at once."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Adapter .* was active which is now deleted")
            for layer in self._layers(key):
                layer.delete_adapter(key)
        if self._adapted is not None:
            self._adapted.peft_config.pop(key, None)
        else:  # the first one failed, and left its settings on the model
            vars(self._model).pop("peft_config", None)

    def _check(self, folder: Path) -> None:
        check_adapter_files(folder)
        stated = read_json_file(folder / "adapter_config.json")
        if str(stated["peft_type"]).upper() != "LORA":
            raise _cannot(folder, f"is {stated['peft_type']}, not LoRA")
        for name, why in _UNSHARED.items():
            if stated.get(name):
                raise _cannot(folder, why)
        if stated.get("bias", "none") != "none":
            raise _cannot(folder, "changes biases")
        if find_adapter_rows(self._model, folder) is not None:
            raise _cannot(folder, "has its own vocabulary")

    def _check_layers(self, layers: list[Any], folder: Path, key: str) -> None:
        from torch import nn

        for layer in layers:
            is_row_wise = hasattr(layer, "_mixed_batch_forward")
            if isinstance(layer.get_base_layer(), nn.Embedding) or not is_row_wise:
                raise _cannot(folder, "changes embeddings or parameters, not only linear layers")
            if key in getattr(layer, "lora_variant", ()):
                raise _cannot(folder, "is a variant of LoRA")

    def _layers(self, key: str | None = None) -> list[Any]:
        from peft.tuners.lora import LoraLayer

        found = [module for module in self._model.modules() if isinstance(module, LoraLayer)]
        return [
            layer
            for layer in found
            if key is None or key in layer.lora_A or key in layer.lora_embedding_A
        ]

    def _hook(self) -> None:
        """Let every adapted layer know the rows: without names it would use the newest adapter."""
        for layer in self._layers():
            if id(layer) not in self._hooked:
                self._hooked.add(id(layer))
                layer.register_forward_pre_hook(self._name_rows, with_kwargs=True)

    def _name_rows(self, _layer: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        # Some families hand layers every token as a row of its own.
        each = max(1, len(args[0]) // len(self._rows))
        names = [name for name in self._rows for _ in range(each)]
        return args, {**kwargs, "adapter_names": names}


def _cannot(folder: Path, why: str) -> InvalidInputError:
    return InvalidInputError(
        f"The adapter in {folder} {why}: it cannot share a base with others.",
        remedy="merge it, and serve the result as a model of its own: tightfit merge",
    )
