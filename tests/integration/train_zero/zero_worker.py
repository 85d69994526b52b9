"""One rank of the ZeRO tests: every case in turn in one process, its facts written by rank 0."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from safetensors.torch import save_file
from zero_cases import (
    CASES,
    NUM_STEPS,
    PREFERENCES,
    RESUMED,
    SAVED_AT,
    Case,
    count_trained,
    make_batches,
    make_plan,
    make_trainer,
    run_step,
)

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import UserError
from tightfit.core.settings import Method, Offload, Sharding
from tightfit.training.distributed import DistContext, destroy_dist_context, init_dist_context
from tightfit.training.loop import warm_up_step
from tightfit.training.reference import precompute_reference
from tightfit.training.zero import ZeroEngine, build_zero_engine


class Rank:
    """The folders and the place of this process."""

    def __init__(self, model: Path, out: Path, context: DistContext) -> None:
        self.model = model
        self.out = out
        self.context = context

    def build(self, case: Case) -> ZeroEngine:
        return build_zero_engine(make_plan(self.model, case), self.context)

    def train(self, engine: ZeroEngine, case: Case, steps: range) -> dict[str, list[float]]:
        """Mean losses and gradient norms of `steps`."""
        training = make_plan(self.model, case).training
        assert training is not None
        reported: dict[str, list[float]] = {"losses": [], "norms": []}
        for step in steps:
            outcome = run_step(
                engine, step, training, rank=self.context.rank, num_ranks=self.context.world_size
            )
            total = outcome.loss_sum.double()
            dist.all_reduce(total)
            reported["losses"].append(float(total) / count_trained(make_batches(step)))
            reported["norms"].append(float(outcome.update.grad_norm))
            assert not outcome.update.is_skipped
        return reported

    def write(self, name: str, facts: dict[str, Any]) -> None:
        if self.context.is_first:
            (self.out / f"{name}.json").write_text(json.dumps(facts))


def compare(rank: Rank, case: Case, num_steps: int = NUM_STEPS) -> None:
    """Train from the start, after a rehearsal and an evaluation, and keep the result.

    Some cases leave a checkpoint half-way, for another engine to go on from.
    """
    engine = rank.build(case)
    warm_up_step(engine, make_batches(0)[rank.context.rank], rank.context)
    facts = describe(engine)
    facts["eval_before"] = evaluate(engine)
    folder = rank.out / f"checkpoint-{case.name}"
    reported = rank.train(engine, case, range(min(SAVED_AT, num_steps)))
    if case in RESUMED:
        folder.mkdir(exist_ok=True)
        rank.context.barrier()
        engine.save_state(folder)
    rest = rank.train(engine, case, range(SAVED_AT, num_steps))
    facts |= {name: reported[name] + rest[name] for name in reported}
    facts["eval_after"] = evaluate(engine)
    state = engine.trained_state()
    assert bool(state) == rank.context.is_first
    if state:
        save_file({name: t.contiguous() for name, t in state.items()}, rank.out / f"{case.name}.st")
    engine.close()
    if case in RESUMED:
        facts["resumed"] = resume(rank, case, folder)
    rank.write(case.name, facts)


def evaluate(engine: ZeroEngine) -> float:
    engine.module.eval()
    with torch.no_grad(), engine.autocast():
        summed = float(engine.module(**make_batches(3)[0]))
    engine.module.train()
    return summed


def describe(engine: ZeroEngine) -> dict[str, Any]:
    """What DeepSpeed says that it is doing."""
    optimizer = engine.optimizer
    weight = next(p for n, p in engine.model.named_parameters() if "q_proj" in n)
    is_partitioned = hasattr(weight, "ds_status")
    masters = (
        "fp32_partitioned_groups_flat" if is_partitioned else "single_partition_of_fp32_groups"
    )
    master = getattr(optimizer, masters)[0]
    return {
        "engine": type(engine.module).__name__,
        "stage": int(engine.engine.zero_optimization_stage()),
        "optimizer": type(optimizer).__name__,
        "inner": type(optimizer.optimizer).__name__,
        "is_partitioned": is_partitioned,
        "local_values": weight.numel(),
        "whole_values": int(getattr(weight, "ds_numel", weight.numel())),
        "shard_values": int(weight.ds_tensor.ds_numel) if hasattr(weight, "ds_tensor") else 0,
        "offloads_optimizer": bool(
            getattr(optimizer, "offload_optimizer", getattr(optimizer, "cpu_offload", False))
        ),
        "optimizer_device": device_of(engine.engine.zero_offload_optimizer()),
        "param_device": device_of(engine.engine.zero_offload_param()),
        "master_device": master.device.type,
        "master_dtype": str(master.dtype),
        "weight_dtype": str(weight.dtype),
        "num_groups": len(optimizer.optimizer.param_groups),
    }


def device_of(offload: Any) -> str:
    return "none" if offload is None else str(getattr(offload.device, "value", offload.device))


def resume(rank: Rank, case: Case, folder: Path) -> dict[str, Any]:
    """Another engine goes on where the checkpoint was written."""
    gc.collect()
    engine = rank.build(case)
    engine.load_state(folder)
    facts: dict[str, Any] = rank.train(engine, case, range(SAVED_AT, NUM_STEPS))
    files = [path for path in folder.rglob("*") if path.is_file()]
    facts |= {
        "checkpoint_bytes": sum(path.stat().st_size for path in files),
        "error_of_three": error_of(lambda: on_ranks(engine, 3).load_state(folder)),
        "error_of_foreign": error_of(lambda: engine.load_state(rank.model)),
    }
    engine.close()
    return facts


def on_ranks(engine: ZeroEngine, world_size: int) -> ZeroEngine:
    context = DistContext(
        rank=0,
        local_rank=0,
        world_size=world_size,
        local_world_size=world_size,
        device=torch.device("cpu"),
    )
    return ZeroEngine(engine.engine, strategy=engine.strategy, context=context, loading=None)


def error_of(action: Callable[[], None]) -> list[str]:
    try:
        action()
    except UserError as error:
        return [error.problem, error.remedy]
    return []


def overflow(rank: Rank) -> None:
    """fp16: gradients that overflow are left out, and the scale falls.

    torch multiplies fp16 on any CPU; DeepSpeed refuses those without instructions for it.
    """
    accelerator: Any = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    case = Case(sharding=Sharding.ZERO2, method=Method.LORA, compute=Dtype.FP16)
    engine = rank.build(case)
    name, weight = next((n, p) for n, p in engine.model.named_parameters() if p.requires_grad)
    before, scale = weight.detach().clone(), engine.optimizer.loss_scale
    with engine.accumulate(is_last=True):
        engine.backward(engine.module(**make_batches(0)[0]) * 1e30)
    update = engine.update(1e-2)
    facts = {
        "name": name,
        "is_skipped": update.is_skipped,
        "is_unchanged": bool(torch.equal(before, weight)),
        "scale": [scale, engine.optimizer.loss_scale],
    }
    facts |= rank.train(engine, case, range(4))
    rank.write("overflow", facts)
    engine.close()


def prefer(rank: Rank) -> None:
    """Pairs, with the adapters off for the reference in each step or computed before."""
    for name, changes in PREFERENCES.items():
        trainer = make_trainer(rank.model, rank.context, **changes)
        if trainer.plan.strategy.precompute_reference:
            trainer.maker.reference = precompute_reference(
                trainer.engine, trainer.store, trainer.maker, trainer.plan, rank.context
            )
        losses = trainer.train(0, NUM_STEPS)
        records = [step.preference.model_dump() for step in trainer.metrics if step.preference]
        rank.write(f"preference-{name}", {"losses": losses, "records": records})
        assert isinstance(trainer.engine, ZeroEngine)
        trainer.engine.close()


def main(model: Path, out: Path) -> None:
    rank = Rank(model, out, init_dist_context(on_cpu=True))
    prefer(rank)
    for case in CASES:
        compare(rank, case)
    for sharding in (Sharding.ZERO1, Sharding.ZERO3):
        compare(rank, Case(sharding=sharding, method=Method.FULL, compute=Dtype.BF16), 4)
    overflow(rank)
    destroy_dist_context()


def alone(model: Path, out: Path) -> None:
    """A single process without torchrun."""
    rank = Rank(model, out, init_dist_context(on_cpu=True))
    compare(
        rank,
        Case(sharding=Sharding.ZERO2, method=Method.LORA, offload=Offload.OPTIMIZER, num_ranks=1),
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"many": main, "alone": alone}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
