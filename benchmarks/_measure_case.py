"""What one measured job is, and the readings taken of it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Everything that decides a job's memory and time; defaults are the plainest job."""

    model: str
    task: str = "train"  # train | eval | load | generate | saved
    method: str = "full"  # full | lora
    weights: str = "bf16"  # fp32 | bf16 | fp16 | nf4 | nf4-double | int8
    autocast: str | None = None  # bf16 | fp16 (with a GradScaler)
    optimizer: str = "adamw-fused"
    lora_rank: int = 16
    lora_targets: str = "all-linear"
    lora_dropout: float = 0.0
    adapters: str = "fp32"  # peft's default, whatever the base weights are
    micro_batch: int = 1
    seq_len: int = 512
    checkpointing: str = "off"  # off | non-reentrant | reentrant
    attention: str = "sdpa"
    loss: str = "plain"  # plain | fused (linear cross entropy only) | liger (all its kernels)
    accumulation: int = 1
    padding: bool = False  # a batch with an attention mask that hides the row ends
    prepare_kbit: bool = False  # peft.prepare_model_for_kbit_training
    keep_outputs: bool = False  # hold the model output (logits) through the backward pass
    clip: bool = False
    num_layers: int | None = None
    fsdp_ranks: int = 0  # per-rank memory of fully_shard on a fake process group
    offload: bool = False  # FSDP2 CPUOffloadPolicy
    expandable_segments: bool = False
    memory_cap_bytes: int = 0
    num_steps: int = 4

    @property
    def name(self) -> str:
        changed = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if field.name != "model" and getattr(self, field.name) != field.default
        ]
        return " ".join([self.model, *changed])


class Meter:
    """Allocator readings per phase; on a machine without CUDA every reading is 0."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.peak_phase = ""

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.cuda else 0

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    @contextlib.contextmanager
    def phase(self, name: str, into: dict[str, Any]) -> Iterator[None]:
        before = self.allocated()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        yield
        peak = torch.cuda.max_memory_allocated() if self.cuda else 0
        if peak > self.peak_allocated_bytes:
            self.peak_allocated_bytes, self.peak_phase = peak, name
        reserved = torch.cuda.max_memory_reserved() if self.cuda else 0
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, reserved)
        into[name] = {
            "before_bytes": before,
            "peak_bytes": peak,
            "after_bytes": self.allocated(),
            "reserved_bytes": reserved,
        }

    def outside_torch_bytes(self) -> int:
        """CUDA context, kernels and library workspaces that torch's allocator does not own."""
        if not self.cuda:
            return 0
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()
