"""One process of the fused LoRA' test, alone or under torchrun: writes the losses it saw.

python fused_lora_worker.py FOLDER
python -m torch.distributed.run --nproc-per-node 2 fused_lora_worker.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from shard_cases import Trainer, make_plan, quiet
from tightfit.core.settings import Method
from tightfit.data.token_store import TokenStore
from tightfit.training.distributed import DistContext, destroy_dist_context, init_dist_context

NUM_STEPS = 6
ALONE: dict[str, dict[str, Any]] = {
    "peft": {"fused_lora": False},
    "nf4-peft": {"weights": "nf4", "fused_lora": False},
}
SHARDED: dict[str, dict[str, Any]] = {
    "ddp": {"sharding": "ddp"},
    "fsdp": {"sharding": "fsdp"},
    "fsdp-recomputed": {"sharding": "fsdp", "micro_batch": 1, "checkpointing": True},
    "fsdp-grad-op": {"sharding": "fsdp-grad-op", "micro_batch": 1},
    "nf4-unpacked-ddp": {"sharding": "ddp", "weights": "nf4", "dequantized_base": True},
    "nf4-fsdp": {"sharding": "fsdp", "weights": "nf4", "checkpointing": True},
}


def train(folder: Path, context: DistContext, changes: dict[str, Any]) -> dict[str, Any]:
    fields = {"method": Method.LORA, "fused_lora": True} | changes
    plan = make_plan(folder / "model", gpus_per_node=context.world_size, **fields)
    trainer = Trainer(plan, TokenStore(folder / "store" / "train"), context)
    layers = [m for m in trainer.engine.module.modules() if hasattr(m, "lora_A")]
    losses = trainer.train(0, NUM_STEPS)
    # B starts at zero: what it has come to is all of training.
    learned = {
        name: float(value.norm())
        for name, value in trainer.engine.trained_state().items()
        if "lora_B" in name
    }
    num_folded = sum("forward" in vars(layer) for layer in layers)
    return {"num_folded": num_folded, "losses": losses, "learned": learned}


def main(folder: Path) -> None:
    quiet()
    context = init_dist_context(on_cpu=True)
    cases = ALONE if context.world_size == 1 else SHARDED
    notes = {name: train(folder, context, changes) for name, changes in cases.items()}
    if context.is_first:
        (folder / f"{context.world_size}.json").write_text(json.dumps(notes))
    context.barrier()
    destroy_dist_context()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)
