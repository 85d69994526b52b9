"""TracedTime: what the operations of a traced step say of its time. The shape under `--json`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, NonNegativeFloat


class TracedTime(BaseModel):
    """One steady step of one rank, without what travels between ranks."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    seconds_per_step: NonNegativeFloat
    stages: dict[str, float]
    """`forward`, `recompute`, `backward`, `update`: until the device has done what was asked for,
    summing to `seconds_per_step`."""
    components: dict[str, float]
    """By cause, as in `StepTime.components`, likewise."""
    host_seconds: NonNegativeFloat
    """What the host needs by itself."""
    device_seconds: NonNegativeFloat
    """What the device needs by itself, gaps between kernels included."""
    flops: NonNegativeFloat
    """Of products and attention; masked pairs and recomputed layers are in it."""
