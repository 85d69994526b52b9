"""One run of a lever in a process of its own: its gradients on one batch, then its loss curve."""

from __future__ import annotations

import gc
import json
import math
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from _lever_cases import Case, in_fp32, make_strategy, relate
from tightfit.core.settings import Method
from tightfit.core.strategy import Strategy, Training
from tightfit.data.packing import pack_best_fit
from tightfit.data.token_store import EncodedRow
from tightfit.runtime.libraries import silence_libraries
from tightfit.training.batches import (
    Batch,
    collate_packed,
    collate_padded,
    count_trained,
    to_device,
)
from tightfit.training.distributed import DistContext
from tightfit.training.engine import TorchEngine, build_engine
from tightfit.training.step import mix_seed, train_step

NUM_HELD_OUT = 128
"""Rows at the end of the file that no run trains on."""
WARM_UP_STEPS = 10
DRAWN_SPREAD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all runs share."""

    model: str
    tokens: str
    work: str
    """Folder of the reference's gradients."""
    device: str
    num_steps: int
    num_rows: int
    """Per step."""
    seq_len: int
    """Of a packed sequence; rows are shorter or as long."""
    learning_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One case; `is_reference` asks for the fp32 gradients that all others are held against."""

    case: Case
    setup: Setup
    is_reference: bool = False


class Rows:
    """The token file: rows to train on in an order of their own, and some held out."""

    def __init__(self, path: Path, *, vocab_size: int) -> None:
        with np.load(path) as file:
            # A tiny model has fewer words than the tokenizer.
            tokens, trained = file["tokens"].astype(np.int32) % vocab_size, file["trained"]
            ends = np.cumsum(file["lengths"])[:-1]
        pairs = zip(np.split(tokens, ends), np.split(trained, ends), strict=True)
        rows = [EncodedRow(part, mask, path.name) for part, mask in pairs]
        num_held = min(NUM_HELD_OUT, len(rows) // 4)
        self.trained, self.held_out = rows[:-num_held], rows[-num_held:]

    def of_step(self, step: int, num_rows: int, *, order_seed: int) -> list[EncodedRow]:
        order = np.random.default_rng(order_seed).permutation(len(self.trained))
        places = (step * num_rows + np.arange(num_rows)) % len(order)
        return [self.trained[int(order[place])] for place in places]


def write_rows(path: Path, rows: Sequence[EncodedRow]) -> None:
    np.savez_compressed(
        path,
        tokens=np.concatenate([row.tokens for row in rows]).astype(np.int32),
        trained=np.concatenate([row.trained for row in rows]),
        lengths=np.array([len(row.tokens) for row in rows], dtype=np.int32),
    )


def make_batches(rows: Sequence[EncodedRow], strategy: Strategy) -> list[Batch]:
    """The same rows whatever the lever: packed, or one to a sequence, the longest first."""
    by_length = sorted(rows, key=lambda row: len(row.tokens), reverse=True)
    sequences = [[row] for row in by_length]
    collate: Callable[..., Batch] = collate_padded
    if strategy.packing:
        packs = pack_best_fit([len(row.tokens) for row in by_length], strategy.seq_len)
        sequences = [[by_length[place] for place in pack] for pack in packs]
        collate = collate_packed
    size = strategy.micro_batch
    starts = range(0, len(sequences), size)
    return [collate(sequences[start : start + size], pad_token_id=0) for start in starts]


def run_case(request: Request) -> dict[str, Any]:
    """Results of one case, or the error that prevented them."""
    silence_libraries()
    torch.set_num_threads(1)
    try:
        run = CaseRun(request)
        if request.is_reference:
            return {"status": "ok", **run.write_reference()}
        has_gradients = request.case.is_lever or request.case.is_plain
        compared = run.compare_gradients() if has_gradients else {}
        return {"status": "ok", **compared, **run.train()}
    except Exception as problem:  # the other levers are worth having without this one
        return {"status": "error", "fault": repr(problem)[:600]}


class CaseRun:
    """A case on its device."""

    def __init__(self, request: Request) -> None:
        self.case, self.setup = request.case, request.setup
        config = json.loads((Path(self.setup.model) / "config.json").read_text())
        self.strategy = make_strategy(
            self.case,
            num_rows=self.setup.num_rows,
            seq_len=self.setup.seq_len,
            num_layers=int(config["num_hidden_layers"]),
        )
        device = torch.device("cuda", 0) if self.setup.device == "cuda" else torch.device("cpu")
        self.context = DistContext(
            rank=0, local_rank=0, world_size=1, local_world_size=1, device=device
        )
        self.rows = Rows(Path(self.setup.tokens), vocab_size=int(config["vocab_size"]))

    @property
    def _reference(self) -> str:
        return str(Path(self.setup.work) / f"{self.case.method.value}.safetensors")

    @property
    def _learning_rate(self) -> float:
        return self.setup.learning_rate * self.case.rate_factor

    def write_reference(self) -> dict[str, Any]:
        gradients = self._take_gradients(in_fp32(self.strategy))
        save_file(gradients, self._reference)
        return {"num_trained": sum(gradient.numel() for gradient in gradients.values())}

    def compare_gradients(self) -> dict[str, Any]:
        """Errors relative to the reference: as trained, and with all values in fp32."""
        truth = load_file(self._reference)
        error, worst = measure_error(self._take_gradients(self.strategy), truth)
        found: dict[str, Any] = {"gradient_error": error, "worst_gradient_error": worst}
        if not self.case.is_plain:
            wide = self._take_gradients(in_fp32(self.strategy))
            found["fp32_gradient_error"] = measure_error(wide, truth)[0]
        return found

    def train(self) -> dict[str, Any]:
        engine = self._build(self.strategy)
        begin = time.perf_counter()
        sums, counts = [], []
        for step in range(self.setup.num_steps):
            batches, num_trained = self._deal(step)
            outcome = train_step(
                engine,
                batches,
                divisor=num_trained,
                learning_rate=self._learning_rate * min(1.0, (step + 1) / WARM_UP_STEPS),
                seeds=tuple(mix_seed(0, step, place) for place in range(len(batches))),
            )
            if outcome.update.is_skipped:
                raise RuntimeError(f"The gradients of step {step} are not finite.")
            sums.append(outcome.loss_sum)
            counts.append(num_trained)
        losses = [float(each) / count for each, count in zip(sums, counts, strict=True)]
        return {
            "order_seed": self.case.order_seed,
            "losses": [round(loss, 6) for loss in losses],
            "held_out_loss": self._measure_held_out(engine),
            **self._measure_in_bf16(engine),
            "seconds": round(time.perf_counter() - begin, 1),
            "attention": engine.model.config._attn_implementation,
        }

    def _build(self, strategy: Strategy) -> TorchEngine:
        training = Training(
            model_path=self.setup.model,
            learning_rate=self._learning_rate,
            seed=self.case.adapter_seed,
        )
        plan: Any = SimpleNamespace(strategy=strategy, training=training)
        return cast("TorchEngine", build_engine(plan, self.context))

    def _deal(self, step: int) -> tuple[list[Batch], int]:
        rows = self.rows.of_step(step, self.setup.num_rows, order_seed=self.case.order_seed)
        batches = make_batches(rows, self.strategy)
        num_trained = sum(count_trained(batch, is_encoder_decoder=False) for batch in batches)
        return [to_device(batch, self.context) for batch in batches], num_trained

    def _measure_in_bf16(self, engine: TorchEngine) -> dict[str, float]:
        """What fp8 trained reaches in bf16, in which it is served: adapters on the base as it was
        read, or all weights."""
        if not self.strategy.fp8:
            return {}
        plain = self._build(self.strategy.model_copy(update={"fp8": False}))
        trained = dict(engine.module.named_parameters())
        with torch.no_grad():
            for name, parameter in plain.module.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(trained[name])
        return {"held_out_loss_in_bf16": self._measure_held_out(plain)}

    def _measure_held_out(self, engine: TorchEngine) -> float:
        total, num_trained = 0.0, 0
        with torch.no_grad(), engine.autocast():
            for start in range(0, len(self.rows.held_out), self.setup.num_rows):
                rows = self.rows.held_out[start : start + self.setup.num_rows]
                for batch in make_batches(rows, self.strategy):
                    total += float(engine.module(**to_device(batch, self.context)))
                    num_trained += count_trained(batch, is_encoder_decoder=False)
        return round(total / num_trained, 6)

    def _take_gradients(self, strategy: Strategy) -> dict[str, Tensor]:
        """Of the first step's rows in the first order."""
        engine = self._build(strategy)
        settle_weights(engine.module, draws=strategy.method is Method.LORA)
        rows = self.rows.of_step(0, self.setup.num_rows, order_seed=0)
        batches = make_batches(rows, strategy)
        num_trained = sum(count_trained(batch, is_encoder_decoder=False) for batch in batches)
        for batch in batches:
            with engine.autocast():
                loss = engine.module(**to_device(batch, self.context))
            engine.backward(loss / num_trained)
        found = {
            name: parameter.grad.detach().float().cpu()
            for name, parameter in engine.module.named_parameters()
            if parameter.requires_grad and parameter.grad is not None
        }
        del engine
        gc.collect()
        return found


def settle_weights(module: torch.nn.Module, *, draws: bool) -> None:
    """All in values that bf16 can hold. `draws`: adapters by name, so that all runs have the same,
    and none that are zero."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if draws and parameter.requires_grad:
                draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                values = torch.randn(parameter.shape, generator=draw) * DRAWN_SPREAD
                parameter.copy_(values.bfloat16())
            else:
                parameter.copy_(parameter.bfloat16())


def measure_error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> tuple[float, float]:
    """Of all gradients together, and of the worst matrix."""
    if found.keys() != truth.keys():
        raise RuntimeError(f"{len(found)} gradients are compared with {len(truth)} others.")
    squares = [
        (float((found[name].double() - true).square().sum()), float(true.double().square().sum()))
        for name, true in truth.items()
    ]
    error, worst = relate(squares)
    if not math.isfinite(error):
        raise RuntimeError("The gradients are not finite.")
    return float(f"{error:.4g}"), float(f"{worst:.4g}")
