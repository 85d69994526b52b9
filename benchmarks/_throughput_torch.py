"""A plain torch loop with torchtune's settings on transformers' model.

Compiled layers, the loss in chunks, packed rows, bf16 throughout, fused AdamW. Source of the
settings: torchtune's recipes `lora_finetune_single_device` and `full_finetune_single_device`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from _throughput_clock import Clock
from _throughput_contestants import Switches
from _throughput_jobs import LEARNING_RATES, MAX_GRAD_NORM, NUM_WARM_UP, Job
from _throughput_model import cast_adapters, draw_base
from _throughput_trl import lora_config

NUM_CHUNKS = 8
UNTRAINED = -100
Batch = dict[str, Any]


def run_torch(
    job: Job,
    switches: Switches,
    *,
    rows: list[list[int]],
    folder: Path,
    device: str,
    num_steps: int,
) -> dict[str, Any]:
    model = _prepare(job, switches, folder, device)
    return train(
        job,
        switches,
        batches=list(make_batches(rows, job, switches)),
        parameters=model.parameters(),
        measure_loss=ChunkedLoss(model),
        clock=Clock(device=device, num_warm_up=NUM_WARM_UP, num_steps=num_steps),
    )


def train(
    job: Job,
    switches: Switches,
    *,
    batches: list[Batch],
    parameters: Iterable[Any],
    measure_loss: Callable[[Batch], Any],
    clock: Clock,
) -> dict[str, Any]:
    """The loop; `measure_loss` gives the sum over a batch's trained tokens."""
    import torch

    trained = [parameter for parameter in parameters if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=LEARNING_RATES[job.method], weight_decay=0.0, fused=True
    )
    supply, step_tokens, device = cycle(batches), [], trained[0].device
    clock.start()
    for _ in range(clock.num_ticks):
        step = list(islice(supply, job.num_rows // switches.micro_batch))
        num_tokens = sum(int((batch["labels"] != UNTRAINED).sum()) for batch in step)
        total = torch.zeros((), device=device)
        for batch in step:
            moved = {name: tensor.to(device) for name, tensor in batch.items()}
            loss = measure_loss(moved) / num_tokens
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(trained, MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock.losses.append(total.item())
        clock.tick()
        step_tokens.append(num_tokens)
    return clock.report(step_tokens)


def _prepare(job: Job, switches: Switches, folder: Path, device: str) -> Any:
    model = draw_base(job, folder, device=device, attention=switches.attention)
    layers = model.model.layers
    if job.has_adapters:
        from peft import get_peft_model

        made = get_peft_model(model, lora_config(), autocast_adapter_dtype=False)
        model = cast_adapters(made).base_model.model
    model.train()
    if switches.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    if switches.compile:
        for layer in layers:
            layer.compile()
    return model


class ChunkedLoss:
    """Head and cross-entropy over one eighth of the tokens at a time; the sum over the batch."""

    def __init__(self, model: Any) -> None:
        import torch

        self._model = model
        self._sum_chunk = torch.compile(_sum_chunk)

    def __call__(self, batch: Batch) -> Any:
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        hidden = self._model.model(**inputs, use_cache=False).last_hidden_state
        chunks = zip(
            hidden.flatten(0, 1).chunk(NUM_CHUNKS),
            batch["labels"].flatten().chunk(NUM_CHUNKS),
            strict=True,
        )
        return sum(self._sum_chunk(self._model.lm_head(part), labels) for part, labels in chunks)


def _sum_chunk(logits: Any, labels: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(
        logits.float(), labels, ignore_index=UNTRAINED, reduction="sum"
    )


def make_batches(rows: list[list[int]], job: Job, switches: Switches) -> Iterator[Batch]:
    """Labels are those of the next token, so that the loss needs no shift; whole batches only."""
    import torch

    packs = pack(rows, job.seq_len) if switches.packing else ([row] for row in rows)
    filled = (_fill(pack, job.seq_len) for pack in packs)
    names = ("input_ids", "labels", "position_ids")
    while len(group := list(islice(filled, switches.micro_batch))) == switches.micro_batch:
        tensors = [torch.tensor(rows) for rows in zip(*group, strict=True)]
        batch = dict(zip(names, tensors, strict=True))
        if not switches.packing:
            del batch["position_ids"]  # without them there is no mask to build
        yield batch


def pack(rows: list[list[int]], seq_len: int) -> Iterator[list[list[int]]]:
    """Rows in order until the next one does not fit, as torchtune's `PackedDataset` does."""
    held: list[list[int]] = []
    for row in rows:
        if held and sum(map(len, held)) + len(row) > seq_len:
            yield held
            held = []
        held.append(row)
    if held:
        yield held


def _fill(rows: list[list[int]], seq_len: int) -> tuple[list[int], list[int], list[int]]:
    """One row of `seq_len` tokens; positions restart with each document, and in the padding."""
    num_spare = seq_len - sum(map(len, rows))
    tokens = [token for row in rows for token in row] + [0] * num_spare
    labels = [label for row in rows for label in (*row[1:], UNTRAINED)] + [UNTRAINED] * num_spare
    positions = [place for row in rows for place in range(len(row))] + list(range(num_spare))
    return tokens, labels, positions
