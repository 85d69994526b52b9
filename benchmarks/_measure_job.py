"""One measured job: build the model a case describes, run it, record what the allocator saw."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from _measure_case import Case, Meter
from _measure_model import autocast_for, build_model, build_optimizer, draw_batch
from _measure_saved import measure_saved


def train_step(case: Case, job: dict[str, Any], meter: Meter) -> dict[str, Any]:
    """One optimizer step as training loops write it; only the loss outlives the forward pass."""
    model, optimizer, scaler, device = (job[k] for k in ("model", "optimizer", "scaler", "device"))
    phases: dict[str, Any] = {}
    batches = [draw_batch(case, model, device) for _ in range(case.accumulation)]
    meter.synchronize()
    start = time.perf_counter()
    for index, batch in enumerate(batches):
        suffix = f"_{index + 1}" if case.accumulation > 1 else ""
        with meter.phase(f"forward{suffix}", phases), autocast_for(case, device):
            outputs = model(**batch)
            loss = outputs.loss / case.accumulation
            if not case.keep_outputs:
                del outputs
        with meter.phase(f"backward{suffix}", phases):
            scaler.scale(loss).backward()
            del loss
    outputs = None
    with meter.phase("optimizer", phases):
        if case.clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(job["trainable"], 1.0)
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad(set_to_none=True)
    meter.synchronize()
    return {"seconds": time.perf_counter() - start, "phases": phases}


def measure_train(case: Case, model: nn.Module, meter: Meter, device: str) -> dict[str, Any]:
    trainable = [p for p in model.parameters() if p.requires_grad]
    job = {
        "model": model,
        "optimizer": build_optimizer(case, trainable),
        "scaler": torch.amp.GradScaler(device, enabled=case.autocast == "fp16"),
        "device": device,
        "trainable": trainable,
    }
    steps = [train_step(case, job, meter) for _ in range(case.num_steps)]
    return {"first_step": steps[0], "steady_step": steps[-1], **pace(case, steps)}


def pace(case: Case, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Median of the later half: the first steps pay for kernel loading and allocator growth."""
    seconds = statistics.median(step["seconds"] for step in steps[len(steps) // 2 :])
    tokens = case.micro_batch * case.seq_len * case.accumulation
    return {
        "all_step_seconds": [round(step["seconds"], 5) for step in steps],
        "step_seconds": seconds,
        "tokens_per_second": tokens / seconds,
    }


def measure_eval(case: Case, model: nn.Module, meter: Meter, device: str) -> dict[str, Any]:
    model.eval()
    steps = []
    for _ in range(case.num_steps):
        batch = draw_batch(case, model, device)
        phases: dict[str, Any] = {}
        meter.synchronize()
        start = time.perf_counter()
        with meter.phase("eval_forward", phases), torch.no_grad(), autocast_for(case, device):
            float(model(**batch).loss)
        steps.append({"seconds": time.perf_counter() - start, "phases": phases})
    return {"first_step": steps[0], "steady_step": steps[-1], **pace(case, steps)}


def measure_generate(case: Case, model: Any, meter: Meter, device: str) -> dict[str, Any]:
    """Prefill alone, then prompt plus new tokens: cache size and decode pace by difference."""
    model.eval()
    num_new = 8 if device == "cpu" else 128
    phases: dict[str, Any] = {}
    ids = draw_batch(case, model, device)["input_ids"]
    seconds = {}
    with torch.no_grad():
        before = meter.allocated()
        with meter.phase("prefill", phases):
            outputs = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        cache_bytes = meter.allocated() - before
        del outputs
        for count in (1, num_new):
            meter.synchronize()
            start = time.perf_counter()
            with meter.phase(f"generate_{count}", phases):
                model.generate(
                    ids,
                    max_new_tokens=count,
                    min_new_tokens=count,
                    do_sample=False,
                    attention_mask=torch.ones_like(ids),
                    pad_token_id=0,
                )
            meter.synchronize()
            seconds[f"generate_{count}_seconds"] = time.perf_counter() - start
    return {"steady_step": {"phases": phases}, "prefill_cache_bytes": cache_bytes, **seconds}


def measure_case(case: Case, *, device: str, dry_run: bool) -> dict[str, Any]:
    if dry_run:
        case = dataclasses.replace(case, seq_len=32, num_layers=case.num_layers and 2)
    if case.expandable_segments and device == "cuda":
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    meter = Meter(device)
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    report: dict[str, Any] = {}
    if device == "cuda":
        torch.cuda.init()
        report["context_before_load_bytes"] = meter.outside_torch_bytes()
        if case.memory_cap_bytes:
            total = torch.cuda.mem_get_info()[1]
            torch.cuda.set_per_process_memory_fraction(case.memory_cap_bytes / total)
    if case.task == "saved":
        return report | measure_saved(case, meter, device=device, dry_run=dry_run)
    phases: dict[str, Any] = {}
    with meter.phase("load", phases):
        model, report["parameters"] = build_model(case, device=device, dry_run=dry_run)
    gc.collect()
    if device == "cuda":
        # What loading left cached would hide how much the steps themselves reserve.
        torch.cuda.empty_cache()
    report |= {"load": phases["load"], "allocated_after_load_bytes": meter.allocated()}
    meter.peak_allocated_bytes = meter.peak_reserved_bytes = 0
    measures: dict[str, Callable[..., dict[str, Any]]] = {
        "train": measure_train,
        "eval": measure_eval,
        "generate": measure_generate,
        "load": lambda *_: {},
    }
    report |= measures[case.task](case, model, meter, device)
    stats = torch.cuda.memory_stats() if device == "cuda" else {}
    return report | {
        "peak_allocated_bytes": meter.peak_allocated_bytes,
        "peak_reserved_bytes": meter.peak_reserved_bytes,
        "peak_phase": meter.peak_phase,
        "outside_torch_bytes": meter.outside_torch_bytes(),
        "num_alloc_retries": stats.get("num_alloc_retries", 0),
    }
