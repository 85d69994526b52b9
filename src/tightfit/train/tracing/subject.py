"""The engine that `train` would build, without values: every tensor is fake."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tightfit.core.strategy import Method, Strategy
from tightfit.core.training import DEFAULT_LEARNING_RATES, Training
from tightfit.estimate.trace.recorder import Recorder
from tightfit.estimate.trace.recording import GRADIENTS, OPTIMIZER
from tightfit.runtime.attention import choose_attention_name
from tightfit.runtime.load import LoadRequest, load_meta
from tightfit.train.engine import TorchEngine
from tightfit.train.finish import finish_model
from tightfit.train.objective import Objective
from tightfit.train.optimizers import build_optimizer
from tightfit.train.scaler import AgreedScaler
from tightfit.train.step import Update
from tightfit.train.tracing.loading import load_fake
from tightfit.train.tracing.packed import pack_skeleton_fake

FAKE_DEVICE = torch.device("cpu")
"""Fake tensors of a card need a torch built for it; the sizes are the same."""


def make_training(strategy: Strategy, folder: Path, *, random_weights: bool = False) -> Training:
    method = strategy.method if strategy.method in DEFAULT_LEARNING_RATES else Method.LORA
    return Training(
        model_path=str(folder),
        learning_rate=DEFAULT_LEARNING_RATES[method],
        random_weights=random_weights,
    )


def build_skeleton(
    folder: Path, strategy: Strategy, training: Training, *, has_varlen: bool
) -> Objective:
    """The plan's Objective with every tensor on the meta device."""
    request = LoadRequest.from_strategy(strategy, is_packed=strategy.packing)
    name = choose_attention_name(strategy, is_packed=strategy.packing, has_varlen=has_varlen)
    model = load_meta(folder, replace(request, attention=name))
    pack_skeleton_fake(model, request)
    return Objective.from_strategy(finish_model(model, strategy, training), strategy)


def build_fake_engine(
    module: Objective, strategy: Strategy, training: Training, recorder: Recorder
) -> TorchEngine:
    """The engine of one card. Call inside the fake mode, with the recorder watching."""
    is_drawn = training.random_weights
    load_fake(module, strategy, FAKE_DEVICE, recorder=recorder, is_drawn=is_drawn)
    optimizer = build_optimizer(module.named_parameters(), strategy.optimizer, training)
    return TorchEngine(
        module,
        optimizer,
        strategy=strategy,
        device=FAKE_DEVICE,
        max_grad_norm=training.max_grad_norm,
    )


class SoundScaler(AgreedScaler):
    """Fake gradients have no values, and an update that is skipped makes no optimizer state."""

    def has_overflowed(self, _optimizer: Optimizer) -> bool:
        return False


class UnlikeMicroBatchesError(Exception):
    """A micro-batch that was to stand for others leaves something else than it found."""


class StagedEngine:
    """An engine that tells the recorder which part of the step is running.

    `num_repeated` micro-batches of a step are not run: they are noted as the second was. The
    first finds no gradients yet.
    """

    def __init__(self, engine: Any, recorder: Recorder, num_repeated: int = 0) -> None:
        self._engine: Any = engine
        if isinstance(engine, TorchEngine):
            engine.scaler = SoundScaler(engine.device.type, enabled=engine.scaler.is_enabled())
        self._recorder = recorder
        self._num_repeated = num_repeated
        self._num_run = 0
        self.module = engine.module
        self.world_size = engine.world_size

    def autocast(self) -> AbstractContextManager[object]:
        self._recorder.stage = "forward"
        inside: AbstractContextManager[object] = self._engine.autocast()
        return inside

    @contextmanager
    def accumulate(self, *, is_last: bool) -> Iterator[None]:
        since = self._recorder.find_place()
        with self._engine.accumulate(is_last=is_last):
            yield
        self._num_run += 1
        if (
            self._num_run == 2
            and self._num_repeated
            and not self._recorder.repeat_micro_batch(since, self._num_repeated)
        ):
            raise UnlikeMicroBatchesError

    def backward(self, loss: Tensor) -> None:
        self._recorder.stage = "backward"
        self._engine.backward(loss)
        self._recorder.layer = None

    def update(self, learning_rate: float) -> Update:
        self._num_run = 0
        recorder = self._recorder
        recorder.stage = "update"
        recorder.mark(list_local(p.grad for p in self.module.parameters()), GRADIENTS)
        update: Update = self._engine.update(learning_rate)
        states = self._engine.optimizer.state.values()
        recorder.mark(list_local(value for state in states for value in state.values()), OPTIMIZER)
        return update


def list_local(values: Any) -> list[Tensor]:
    """This rank's tensors among `values`."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
