"""Who is running: names of modules and numbers of layers for the recorder, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tightfit.estimate.trace.recorder import Recorder


def watch_modules(root: nn.Module, layers: Sequence[nn.Module], recorder: Recorder) -> None:
    """Tell `recorder` which module runs, and in which decoder layer.

    In the backward pass a layer begins when the gradient of its output is there.
    """
    number_of = {id(layer): number for number, layer in enumerate(layers)}
    for name, module in root.named_modules():
        _watch_name(module, name, recorder)
    for layer in layers:
        _watch_layer(layer, number_of[id(layer)], recorder)


def _watch_name(module: nn.Module, name: str, recorder: Recorder) -> None:
    def enter(_module: nn.Module, _args: Any) -> None:
        recorder.module_names.append(name)

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        recorder.module_names.pop()

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


def _watch_layer(layer: nn.Module, number: int, recorder: Recorder) -> None:
    def enter(_module: nn.Module, _args: Any) -> None:
        recorder.layer = number

    def leave(_module: nn.Module, _args: Any, output: Any) -> None:
        recorder.layer = None
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(begin_backward)  # type: ignore[no-untyped-call]

    def begin_backward(_gradient: torch.Tensor) -> None:
        recorder.layer = number

    layer.register_forward_pre_hook(enter)
    layer.register_forward_hook(leave)
