"""Training state through torch's distributed checkpoint, in one process."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError, SetupError
from tightfit.core.settings import Method, Sharding
from tightfit.core.strategy import Strategy
from tightfit.runs.run_folder import RunFolder
from tightfit.training.checkpoint import Progress, find_checkpoint, write_checkpoint
from tightfit.training.distributed import DistContext
from tightfit.training.engine import TorchEngine

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda groups: AdamW(groups, lr=0.1, fused=True),
    "adamw-foreach": lambda groups: AdamW(groups, lr=0.1, foreach=True),
    "sgd": lambda groups: SGD(groups, lr=0.1, momentum=0.9),
    "adafactor": lambda groups: Adafactor(groups, lr=0.1),
    "adamw-8bit": lambda groups: _8bit()(groups, lr=0.1, min_8bit_size=1),
}
CONTEXT = DistContext(
    rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu")
)


def _8bit() -> Any:
    from bitsandbytes.optim import adamw

    return adamw.AdamW8bit


class Half(nn.Module):
    """A frozen and a trained layer; a batch in, a loss out."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 1))
        self.model[0].requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.model(inputs).square().sum()
        return made


def _engine(name: str = "adamw", *, compute: Dtype = Dtype.FP32, width: int = 8) -> TorchEngine:
    module = Half(width)
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer: Optimizer = OPTIMIZERS[name](groups)
    strategy = Strategy(method=Method.LORA, weights=Dtype.FP32, compute=compute)
    return TorchEngine(module, optimizer, strategy=strategy, device=torch.device("cpu"))


def _train(engine: TorchEngine, steps: range) -> list[float]:
    losses = []
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        width = engine.model[0].in_features
        loss = engine.module(torch.randn(4, width, generator=draw))
        engine.backward(loss)
        engine.update(0.1 / (1 + step))
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_goes_on_as_if_never_stopped(tmp_path: Path, name: str) -> None:
    engine = _engine(name)
    _train(engine, range(3))
    engine.save_state(tmp_path)
    expected = _train(engine, range(3, 7))

    resumed = _engine(name)
    resumed.load_state(tmp_path)

    assert _train(resumed, range(3, 7)) == expected


def test_only_what_is_trained_is_saved(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    engine = _engine()
    _train(engine, range(1))
    engine.save_state(tmp_path)

    keys = set(FileSystemReader(tmp_path).read_metadata().state_dict_metadata)
    assert {key for key in keys if key.startswith("model.")} == {
        "model.model.1.weight",
        "model.model.1.bias",
    }
    assert not any("model.0" in key for key in keys)
    assert set(engine.trained_state()) == {"1.weight", "1.bias"}


def test_the_scale_of_fp16_is_saved(tmp_path: Path) -> None:
    engine = _engine(compute=Dtype.FP16)
    _train(engine, range(1))
    engine.scaler.update(128.0)
    engine.save_state(tmp_path)

    resumed = _engine(compute=Dtype.FP16)
    resumed.load_state(tmp_path)
    _train(resumed, range(1, 2))

    assert resumed.scaler.get_scale() == 128.0


def test_a_state_saved_before_the_first_update_does_not_count_one(tmp_path: Path) -> None:
    """torch makes an optimizer's state by a step with empty gradients, which would be counted."""
    _engine().save_state(tmp_path)
    resumed = _engine()
    resumed.load_state(tmp_path)

    assert _train(resumed, range(3)) == _train(_engine(), range(3))


def test_a_state_of_another_model_is_refused(tmp_path: Path) -> None:
    engine = _engine()
    _train(engine, range(1))
    engine.save_state(tmp_path)
    other = _engine(width=16)

    with pytest.raises(InvalidInputError, match="does not fit"):
        other.load_state(tmp_path)


def test_a_disk_that_fills_while_torch_writes_leaves_the_one_before(tmp_path: Path) -> None:
    run = RunFolder(path=tmp_path)
    engine = _engine(width=512)
    before = write_checkpoint(run, engine, _progress(1), CONTEXT, 2)
    engine.model[0].requires_grad_(True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(SetupError, match="Cannot write the checkpoint"):
            write_checkpoint(run, engine, _progress(2), CONTEXT, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)

    assert find_checkpoint(run) == before
    assert [path.name for path in run.checkpoints_path.iterdir()] == ["step-000001"]


def test_an_update_that_is_not_finite_changes_nothing() -> None:
    engine = _engine()
    before = engine.trained_state()
    engine.backward(engine.module(torch.full((1, 8), float("inf"))))

    assert engine.update(0.1).is_skipped
    after = engine.trained_state()
    assert all(torch.equal(before[name], after[name]) for name in before)


def _progress(step: int) -> Progress:
    return Progress(step=step, world_size=1, sharding=Sharding.SINGLE)
