"""One process of the sharding tests, alone or under torchrun: runs its part, writes what it saw.

python shard_worker.py PART FOLDER
python -m torch.distributed.run --nproc-per-node 2 shard_worker.py PART FOLDER
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shard_cases import NUM_STEPS, Trainer, make_plan, quiet
from tightfit.core.errors import UserError
from tightfit.core.settings import Method, Sharding
from tightfit.data.token_store import TokenStore
from tightfit.runs.run_folder import RunFolder
from tightfit.runtime.layers import decoder_layers
from tightfit.runtime.packed_experts import list_packed
from tightfit.training.batches import BatchMaker, choose_collate
from tightfit.training.checkpoint import Progress, find_checkpoint, read_progress, write_checkpoint
from tightfit.training.distributed import DistContext, destroy_dist_context, init_dist_context
from tightfit.training.engine import build_engine
from tightfit.training.loop import evaluate, warm_up_step
from tightfit.training.reference import precompute_reference
from tightfit.training.sharding import Sharder

SHARDED: dict[str, dict[str, Any]] = {
    "ddp": {"sharding": "ddp"},
    "ddp-accumulated": {"sharding": "ddp", "micro_batch": 1},
    "fsdp": {"sharding": "fsdp"},
    "fsdp-accumulated": {"sharding": "fsdp", "micro_batch": 1, "checkpointing": True},
    "fsdp-grad-op": {"sharding": "fsdp-grad-op", "micro_batch": 1},
    "fsdp-hybrid": {"sharding": "fsdp-hybrid"},
    "fsdp-offload": {"sharding": "fsdp", "offload": "all", "micro_batch": 1},
}
METHODS = ("full", "lora")
CASES = [
    *(("full", name) for name in SHARDED),
    *(("lora", name) for name in ("ddp", "fsdp-accumulated", "fsdp-offload")),
    *(("rows", name) for name in ("ddp", "fsdp-accumulated")),
]
NEW_ROWS: dict[str, Any] = {"method": "lora", "add_tokens": tuple(f"<{n}>" for n in range(8))}
"""The last eight of the tokens that rows are drawn from are new to this model."""
MIXTURE: dict[str, Any] = {"micro_batch": 2, "router_loss_weight": 0.5}
"""One micro-batch a rank on two ranks, or two on one: the same micro-batches."""
SHARDED_MIXTURE: dict[str, dict[str, Any]] = {
    "ddp": {"sharding": "ddp"},
    "fsdp": {"sharding": "fsdp"},
    "fsdp-recomputed": {"sharding": "fsdp", "checkpointing": True},
}
PREFERENCES: dict[str, dict[str, Any]] = {
    "dpo": {"objective": "dpo", "method": "lora", "loss": "fused"},
    "kto": {"objective": "kto", "method": "lora"},
    "orpo": {"objective": "orpo", "method": "full", "loss": "fused"},
}
SHARDED_PREFERENCES: dict[str, dict[str, Any]] = {
    "ddp": {"sharding": "ddp", "micro_batch": 1},
    "fsdp": {"sharding": "fsdp", "checkpointing": True},
}
NUM_PREFERENCE_STEPS = 6
SHARED_ROWS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "one-key-head": ("multi-query", {}, {"sharding": "ddp"}),
    "packed": (
        "model",
        {"packing": True},
        {"sharding": "fsdp", "checkpointing": True, "micro_batch": 1},
    ),
    "windows-softcaps": (
        "gemma2",
        {"packing": True, "attention": "eager", "lora_targets": ("q_proj",), "method": "lora"},
        {"sharding": "fsdp"},
    ),
    "sinks": ("gpt_oss", {"attention": "eager"}, {"sharding": "ddp"}),
    "mixture": ("mixture", MIXTURE, {"sharding": "ddp"}),
    "zero": ("model", {"checkpointing": True}, {"sharding": "zero3"}),
}
"""Model, its settings, and those of two processes that share rows."""
NUM_SHARED_STEPS, SHARED_STOP = 4, 2
FIRST_STOP, SECOND_STOP = 8, 14


class Part:
    """What one launch does, and the notes it leaves."""

    def __init__(self, folder: Path, context: DistContext) -> None:
        self.folder = folder
        self.context = context
        self.store = TokenStore(folder / "store" / "train")
        self.notes: dict[str, Any] = {}

    def plan(self, model: str = "model", **changes: Any) -> Any:
        return make_plan(self.folder / model, gpus_per_node=self.context.world_size, **changes)

    def trainer(self, model: str = "model", **changes: Any) -> Trainer:
        return Trainer(self.plan(model, **changes), self.store, self.context)

    def keep(self, name: str, trainer: Trainer, losses: list[float]) -> None:
        state = trainer.engine.trained_state()
        assert bool(state) == self.context.is_first
        self.notes[name] = {"losses": losses}
        if self.context.is_first:
            save_file(state, self.folder / f"{name}.safetensors")

    def run(self, name: str) -> RunFolder:
        return RunFolder(path=self.folder / f"run-{name}")

    def save(self, name: str, trainer: Trainer, step: int) -> None:
        progress = Progress(
            step=step,
            num_steps=NUM_STEPS,
            world_size=self.context.world_size,
            sharding=trainer.plan.strategy.sharding,
        )
        write_checkpoint(self.run(name), trainer.engine, progress, self.context, 2)

    def resume(self, name: str, trainer: Trainer) -> int:
        folder = find_checkpoint(self.run(name))
        assert folder is not None
        trainer.engine.load_state(folder)
        return read_progress(folder).step


def single(part: Part) -> None:
    """The reference: one process, one batch per step, and two micro-batches."""
    for method in METHODS:
        for name, micro_batch in (("one-batch", 4), ("single", 2)):
            trainer = part.trainer(method=method, micro_batch=micro_batch)
            part.keep(f"{method}-{name}", trainer, trainer.train(0, NUM_STEPS))
    trainer = part.trainer("lacking", **NEW_ROWS)
    part.keep("rows-single", trainer, trainer.train(0, NUM_STEPS))
    _train_mixture(part, "mixture-single", {})
    _share_rows(part, is_alone=True)
    _train_preferences(part, "single", {})


def _share_rows(part: Part, *, is_alone: bool) -> None:
    """Losses, the norm of gradients, loads of experts, weights, and the loss of evaluation."""
    for name, (model, settings, changes) in SHARED_ROWS.items():
        shared = changes | {"context_parallel": 2}
        trainer = part.trainer(model, **(settings if is_alone else settings | shared))
        losses = trainer.train(0, SHARED_STOP)
        if name == "packed" and not is_alone:
            part.save(name, trainer, SHARED_STOP)
        losses += trainer.train(SHARED_STOP, NUM_SHARED_STEPS)
        key = f"shared-{name}"
        part.keep(f"{key}-alone" if is_alone else key, trainer, losses)
        evaluated = evaluate(
            trainer.engine,
            part.store,
            BatchMaker(part.store, choose_collate(part.store.description, is_packed=False)),
            step=0,
            micro_batch=2,
            context=trainer.context,
        )
        longest = trainer.maker.make(trainer.sampler.longest(2))
        part.notes[f"{key}-alone" if is_alone else key] |= {
            "norms": [step.grad_norm for step in trainer.metrics],
            "routing": [(step.router_loss, step.expert_load_max) for step in trainer.metrics],
            "evaluated": [evaluated.loss, evaluated.num_trained_tokens],
            "warm-up": warm_up_step(trainer.engine, longest, trainer.context),
        }


def _train_preferences(part: Part, suffix: str, changes: dict[str, Any]) -> None:
    """Steps with the reference in each; and its log-probabilities computed before."""
    for name, stated in PREFERENCES.items():
        kind = "labelled" if name == "kto" else "pairs"
        part.store = TokenStore(part.folder / kind / "train")
        trainer = part.trainer(**(stated | changes))
        key = f"{name}-{suffix}"
        if name != "orpo":
            found = precompute_reference(
                trainer.engine, trainer.store, trainer.maker, trainer.plan, part.context
            )
        losses = trainer.train(0, NUM_PREFERENCE_STEPS)
        part.keep(key, trainer, losses)
        records = [step.preference.model_dump() for step in trainer.metrics if step.preference]
        part.notes[key]["preference"] = records
        if name == "orpo":
            continue
        # The adapters have learnt, and the reference is still the base.
        again = precompute_reference(
            trainer.engine, trainer.store, trainer.maker, trainer.plan, part.context
        )
        part.notes[key]["reference"] = found.rows.tolist()
        assert (again.rows == found.rows).all()  # read, not computed
        trainer = part.trainer(**(stated | changes | {"precompute_reference": True}))
        trainer.maker.reference = found
        part.notes[key]["precomputed"] = trainer.train(0, NUM_PREFERENCE_STEPS)
    part.store = TokenStore(part.folder / "store" / "train")


def _train_mixture(part: Part, name: str, changes: dict[str, Any]) -> None:
    trainer = part.trainer("mixture", **(MIXTURE | changes))
    part.keep(name, trainer, trainer.train(0, NUM_STEPS))
    part.notes[name]["routing"] = [
        (step.router_loss, step.expert_load_max, step.idle_experts_fraction)
        for step in trainer.metrics
    ]


def many(part: Part) -> None:
    """Every sharding, some with LoRA too; a checkpoint on the way of two of them."""
    part.notes["memory"] = _load_large(part)
    for method, name in CASES:
        settings = {"model": "lacking", **NEW_ROWS} if method == "rows" else {"method": method}
        trainer = part.trainer(**settings, **SHARDED[name])
        wrapping = _describe_wrapping(trainer)
        losses = trainer.train(0, FIRST_STOP)
        if name == ("fsdp" if method == "full" else "ddp"):
            part.save(method, trainer, FIRST_STOP)
        losses += trainer.train(FIRST_STOP, NUM_STEPS)
        part.keep(f"{method}-{name}", trainer, losses)
        part.notes[f"{method}-{name}"]["wrapping"] = wrapping
    for name, changes in SHARDED_MIXTURE.items():
        _train_mixture(part, f"mixture-{name}", changes)
    for name, changes in SHARDED_PREFERENCES.items():
        _train_preferences(part, name, changes)
    _share_rows(part, is_alone=False)
    part.notes["refusal"] = _refuse_heads(part)
    part.notes["overflow"] = _overflow_on_one_rank(part)
    part.notes["packed"] = _pack(part, "model")
    part.notes["packed-mixture"] = _pack(part, "mixture")


def resume_alone(part: Part) -> None:
    """From two ranks to one."""
    for method in METHODS:
        trainer = part.trainer(method=method)
        assert part.resume(method, trainer) == FIRST_STOP
        part.notes[method] = trainer.train(FIRST_STOP, SECOND_STOP)
        part.save(method, trainer, SECOND_STOP)


def resume_on_four(part: Part) -> None:
    """From one rank to four, each method with the sharding that it did not start with; and from two
    ranks that share rows to two batches of two each."""
    for method, sharding in (("full", "ddp"), ("lora", "fsdp")):
        trainer = part.trainer(method=method, sharding=sharding)
        assert part.resume(method, trainer) == SECOND_STOP
        part.keep(f"{method}-resumed", trainer, trainer.train(SECOND_STOP, NUM_STEPS))
    trainer = part.trainer(packing=True, sharding="fsdp", context_parallel=2)
    assert part.resume("packed", trainer) == SHARED_STOP
    part.keep("shared-resumed", trainer, trainer.train(SHARED_STOP, NUM_SHARED_STEPS))


def _describe_wrapping(trainer: Trainer) -> dict[str, Any]:
    """What torch says of the module, not what the plan says."""
    module: nn.Module = trainer.engine.module
    trained = [p for p in module.parameters() if p.requires_grad]
    layers = decoder_layers(module)
    batches, _ = trainer.batches(0)
    loss = module(**batches[0])
    # After the forward pass a layer's weights are shards again, or still whole.
    is_kept = not isinstance(next(layers[0].parameters()), DTensor)
    loss.backward()
    trainer.engine.optimizer.zero_grad(set_to_none=True)
    first: Any = trained[0]
    is_sharded = isinstance(first, DTensor)
    group = getattr(module, "_get_fsdp_state", lambda: None)()
    policy = None if group is None else type(group._fsdp_param_group.offload_policy).__name__
    return {
        "is_ddp": isinstance(module, DistributedDataParallel),
        "num_fsdp_modules": sum(isinstance(part, FSDPModule) for part in module.modules()),
        "all_sharded": all(isinstance(p, DTensor) for p in module.parameters()),
        "none_sharded": not any(isinstance(p, DTensor) for p in module.parameters()),
        "placements": str(first.placements) if is_sharded else "",
        "mesh_shape": list(first.device_mesh.shape) if is_sharded else [],
        "local_share": first.to_local().numel() / first.numel() if is_sharded else 1.0,
        "keeps_gathered": is_kept,
        "offload": policy,
        "device": first.device.type,
    }


def _refuse_heads(part: Part) -> list[str]:
    """Three heads over two processes."""
    trainer = part.trainer("three-heads", sharding="ddp", context_parallel=2)
    try:
        trainer.train(0, 1)
    except UserError as error:
        return [error.problem, error.remedy]
    return []


def _overflow_on_one_rank(part: Part) -> dict[str, Any]:
    """fp16: an infinity in the last rank's shard alone; all must skip and lower their scale."""
    trainer = part.trainer(sharding="fsdp", compute="fp16")
    engine: Any = trainer.engine
    trainer.train(0, 2)
    before = engine.scaler.get_scale()
    kept = [_local(p).clone() for p in engine.module.parameters()]
    batches, _ = trainer.batches(2)
    engine.backward(engine.module(**batches[0]))
    if part.context.rank == part.context.world_size - 1:
        _local(next(engine.module.parameters()).grad)[0] = float("inf")
    update = engine.update(1e-2)
    same = [
        torch.equal(a, _local(b)) for a, b in zip(kept, engine.module.parameters(), strict=True)
    ]
    return {
        "is_skipped": bool(update.is_skipped),
        "scale_fraction": engine.scaler.get_scale() / before,
        "is_unchanged": all(same),
        "losses": trainer.train(3, 5),
    }


def _pack(part: Part, model: str) -> dict[str, Any]:
    """nf4: sharded as replicated; and refused where sharding spoils the scales."""
    packed = {"method": Method.LORA, "weights": "nf4", "lora_targets": ("q_proj", "v_proj")}
    notes: dict[str, Any] = {}
    for sharding in (Sharding.DDP, Sharding.FSDP):
        trainer = part.trainer(model, sharding=sharding, **packed)
        notes[sharding.value] = trainer.train(0, 5)
        codes = [p for p in trainer.engine.module.parameters() if p.dtype is torch.uint8]
        notes[f"{sharding.value}-codes"] = [len(codes), sum(isinstance(p, DTensor) for p in codes)]
    shard_layer: Callable[..., None] = Sharder.shard_layer

    def spoil(self: Sharder, layer: nn.Module) -> None:
        shard_layer(self, layer)
        states: list[Any] = [packed.state for _, _, packed in list_packed(layer)]
        states = states or [getattr(part, "quant_state", None) for part in layer.modules()]
        for state in filter(None, states):
            state.absmax = state.absmax.roll(1)

    Sharder.shard_layer = spoil  # type: ignore[method-assign]
    try:
        build_engine(part.plan(model, sharding=Sharding.FSDP, **packed), part.context)
        notes["refusal"] = None
    except UserError as error:
        notes["refusal"] = [error.problem, error.remedy]
    finally:
        Sharder.shard_layer = shard_layer  # type: ignore[method-assign]
    return notes


def _load_large(part: Part) -> dict[str, Any]:
    """Peak memory that loading a model of some size adds to this process."""
    # Libraries that load with the first model are no part of what the second one costs.
    build_engine(part.plan(sharding="fsdp"), part.context)
    plan = part.plan("large", sharding="fsdp")
    with _Peak() as peak:
        engine = build_engine(plan, part.context)
    whole = sum(p.numel() * p.element_size() for p in engine.module.parameters())
    peaks: list[Any] = [None] * part.context.world_size
    dist.all_gather_object(peaks, peak.num_bytes)
    return {"model_bytes": whole, "peak_bytes": peaks}


class _Peak:
    """The most memory of its own that the process has held, beyond what it held at the start.

    Pages of mapped files do not count: the system takes them back when it needs them.
    """

    def __enter__(self) -> _Peak:
        self._start = self._most = self._read()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def num_bytes(self) -> int:
        return self._most - self._start

    def _watch(self) -> None:
        while not self._is_over.wait(0.002):
            self._most = max(self._most, self._read())

    def _read(self) -> int:
        found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1]) * 1024


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


PARTS = {
    "single": single,
    "many": many,
    "resume-alone": resume_alone,
    "resume-on-four": resume_on_four,
}


def main(name: str, folder: Path) -> None:
    quiet()
    part = Part(folder, init_dist_context(on_cpu=True))
    PARTS[name](part)
    path = folder / f"{name}.{part.context.rank}.json"
    path.write_text(json.dumps(part.notes))
    part.context.barrier()
    destroy_dist_context()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)
