"""Who takes part, and the switches each tries in turn: the first that runs is measured."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from _throughput_jobs import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """What a user would set by hand. The defaults are those of trl's `SFTConfig`."""

    checkpointing: bool = True
    liger: bool = False
    compile: bool = False
    packing: bool = False
    grouped: bool = False
    """Rows of like length in one batch."""
    precompute: bool = False
    """The reference's log-probabilities, before the first step."""
    bf16_adapters: bool = False
    """trl keeps adapters in fp32; a PeftModel made by hand can have them in bf16."""
    attention: str = "sdpa"
    micro_batch: int
    expandable_segments: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    name: str
    kind: str
    """Which code runs it, and whose packages it needs: trl, torch, torchtune, unsloth, tightfit."""
    attempts: tuple[Switches, ...] = ()
    """Empty for tightfit, whose planner chooses."""
    asked: dict[str, bool] = field(default_factory=dict)
    """Of tightfit, as a user starts it who asks for fp8, which it never chooses by itself."""


def list_contestants(job: Job, *, device: str) -> list[Contestant]:
    """In the order in which they run: those that every job is judged by come first."""
    if job.memory_limit:
        return [Contestant(name="tightfit", kind="tightfit")]
    if job.objective != "sft":
        best = _both(liger=device != "cpu", precompute=True, micro_batch=job.micro_batch)
        default = (Switches(micro_batch=job.micro_batch),)
        return [
            Contestant(name="trl-default", kind="trl", attempts=default),
            Contestant(name="trl-best", kind="trl", attempts=best),
            Contestant(name="tightfit", kind="tightfit"),
        ]
    default = (Switches(micro_batch=job.micro_batch, attention=job.attentions[-1]),)
    found = [
        Contestant(name="trl-default", kind="trl", attempts=default),
        Contestant(name="trl-best", kind="trl", attempts=_trl_best(job, device)),
        Contestant(name="tightfit", kind="tightfit"),
        Contestant(name="tightfit-fp8", kind="tightfit", asked={"fp8": True}),
        Contestant(name="torchtune-style", kind="torch", attempts=_torchtune_style(job)),
    ]
    if job.method == "full":
        asked = {"fp8_gradients": True}
        found.append(Contestant(name="tightfit-fp8-gradients", kind="tightfit", asked=asked))
    if job.method == "lora":
        by_hand = _trl_best(job, device, bf16_adapters=True)
        found.append(Contestant(name="trl-bf16-adapters", kind="trl", attempts=by_hand))
    if job.is_alpaca:
        found += _trl_ways_with_lengths(job, device)
    if job.method != "qlora":  # its nf4 is torchao's, of other rounding
        torchtune = _both(
            compile=True, packing=job.is_alpaca, micro_batch=4 if job.is_alpaca else job.micro_batch
        )
        found.append(Contestant(name="torchtune", kind="torchtune", attempts=torchtune))
    return [*found, Contestant(name="unsloth", kind="unsloth", attempts=_unsloth(job))]


def _both(**switches: Any) -> tuple[Switches, ...]:
    """Without checkpointing, and with it where that does not run."""
    return tuple(
        Switches(checkpointing=on, expandable_segments=True, **switches) for on in (False, True)
    )


def _with_each_attention(
    job: Job, attempts: tuple[Switches, ...], device: str
) -> tuple[Switches, ...]:
    names = job.attentions[-1:] if device == "cpu" else job.attentions  # no flex backward there
    return tuple(replace(one, attention=name) for name in names for one in attempts)


def _trl_best(job: Job, device: str, **more: Any) -> tuple[Switches, ...]:
    """SDPA knows packed rows only by a mask over the whole batch: one row at a time is cheapest."""
    attempts = _both(
        liger=device != "cpu",
        packing=job.is_alpaca,
        micro_batch=1 if job.is_alpaca else job.micro_batch,
        **more,
    )
    return _with_each_attention(job, attempts, device)


def _trl_ways_with_lengths(job: Job, device: str) -> list[Contestant]:
    has_liger = device != "cpu"
    flex = _both(liger=has_liger, packing=True, attention="flex_attention", micro_batch=4)
    grouped = _both(liger=has_liger, grouped=True, micro_batch=job.num_rows)
    return [
        Contestant(name="trl-flex", kind="trl", attempts=flex),
        Contestant(name="trl-grouped", kind="trl", attempts=grouped),
    ]


def _torchtune_style(job: Job) -> tuple[Switches, ...]:
    switches: dict[str, Any] = {"compile": True, "bf16_adapters": job.has_adapters}
    if not job.is_alpaca:
        return _both(micro_batch=job.micro_batch, **switches)
    packed = switches | {"packing": True, "micro_batch": 4}
    return _both(attention="flex_attention", **packed) + _both(**packed)


def _unsloth(job: Job) -> tuple[Switches, ...]:
    """Its own checkpointing is part of what it offers; without it where memory allows."""
    micro_batch = 4 if job.is_alpaca else job.micro_batch
    return _both(packing=job.is_alpaca, micro_batch=micro_batch)
