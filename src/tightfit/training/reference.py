"""The reference's log-probabilities of every answer, computed once and kept beside the data."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from tightfit.core.files import write_atomic
from tightfit.core.reading import open_regular, read_bytes
from tightfit.core.strategy import Strategy, Training
from tightfit.data.token_store import TokenStore
from tightfit.planning.plan import Plan
from tightfit.training.batches import BatchMaker, ReferenceLogProbs, split_kl, to_device
from tightfit.training.distributed import DistContext, broadcast_object
from tightfit.training.engine import evaluating
from tightfit.training.step import TrainEngine

PART_EXAMPLES = 1024
"""Examples per file: what a killed process has to compute again."""
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 1 << 16


def precompute_reference(
    engine: TrainEngine, store: TokenStore, maker: BatchMaker, plan: Plan, context: DistContext
) -> ReferenceLogProbs:
    """Of every row of the store, all ranks together; found where the same was computed before.

    The engine must hold the model as it is before training. The files lie in a folder of the
    store's, named by what decides them, each whole or not there: a process that is killed goes on
    behind its last one.
    """
    assert plan.training is not None
    name = None
    if context.is_first:
        name = f"reference-{_digest_model(plan.strategy, plan.training)}"
        (store.folder / name).mkdir(exist_ok=True)
    folder = store.folder / str(broadcast_object(name))
    micro_batch, size = plan.strategy.micro_batch, store.description.rows_per_example
    found = torch.zeros(1 + maker.needs_kl, len(store), dtype=torch.float32)
    lengths = store.example_lengths
    order = sorted(range(0, len(store), size), key=lambda row: -int(lengths[row]))
    with evaluating(engine):
        for start in range(0, len(order), PART_EXAMPLES):
            examples = order[start : start + PART_EXAMPLES]
            rows = [row + at for row in examples for at in range(size)]
            path, shape = folder / f"{start:09d}.npy", (len(found), len(rows))
            part = broadcast_object(_read_part(path, shape) if context.is_first else None)
            if part is not None:
                found[:, rows] = torch.from_numpy(part)
                continue
            batches = [
                examples[at : at + micro_batch] for at in range(0, len(examples), micro_batch)
            ]
            # All ranks run equally many batches; surplus ones repeat the last.
            for first in range(0, len(batches), context.world_size):
                number = min(first + context.rank, len(batches) - 1)
                is_own = number == first + context.rank
                batch = to_device(maker.make([(row,) for row in batches[number]]), context)
                own = [row + at for row in batches[number] for at in range(size)]
                for line, inputs in enumerate(split_kl(batch)[: len(found)]):
                    log_probs = engine.module(**inputs, is_reference=True)
                    if is_own:
                        found[line, own] = log_probs.float().cpu()
            found[:, rows] = _sum_over_ranks(found[:, rows], context)
            if context.is_first:
                _write_part(path, found[:, rows].numpy())
    values = found.numpy()
    return ReferenceLogProbs(values[0], values[1] if maker.needs_kl else None)


def _sum_over_ranks(values: Tensor, context: DistContext) -> Tensor:
    summed = values.to(context.device)
    if dist.is_initialized():
        dist.all_reduce(summed)
    return summed.cpu()


def _read_part(path: Path, shape: tuple[int, int]) -> NDArray[np.float32] | None:
    try:
        part: NDArray[np.float32] = np.load(io.BytesIO(read_bytes(path)))
    except (OSError, ValueError, EOFError):
        return None
    return part if part.shape == shape and part.dtype == np.float32 else None


def _write_part(path: Path, part: NDArray[np.float32]) -> None:
    stream = io.BytesIO()
    np.save(stream, part)
    write_atomic(path, stream.getvalue())


def _digest_model(strategy: Strategy, training: Training) -> str:
    """Of the model's files and of what changes its arithmetic.

    Of a large file samples are read. They would miss a merged adapter of a few layers, so the
    file's time counts too, which staged copies keep.
    """
    digest = hashlib.blake2b(digest_size=12)
    numerics = strategy.model_dump_json(
        include={
            *("weights", "compute", "autocast", "double_quant", "upcast_unquantized"),
            *("fp8", "fp8_gradients", "dequantized_base", "fused_kernels", "objective"),
            *("add_tokens", "add_special_tokens"),
        }
    )
    drawn = training.random_weights
    digest.update(f"{numerics} {drawn} {training.seed}".encode())
    for path in sorted(Path(training.model_path).iterdir()):
        if path.suffix in (".safetensors", ".bin", ".pth", ".gguf") or path.name == "config.json":
            facts = path.stat()
            size = facts.st_size
            digest.update(f"\n{path.name} {size} {facts.st_mtime_ns} ".encode())
            with open_regular(path) as stream:
                for number in range(_NUM_SAMPLES):
                    stream.seek(number * max(0, size - _SAMPLE_BYTES) // _NUM_SAMPLES)
                    digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
