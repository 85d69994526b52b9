"""Build one job's engine with tightfit's own training code; sharded ones as a rank of a fake group.

The fake group's collectives move nothing, so one card shows what a rank of any number holds.
Loading differs from `load_sharded` in one thing: values are drawn on the device, tensor by tensor,
where rank 0 would bring them from host memory. What the device holds meanwhile is the same, packed
weights apart, of which one matrix at a time is drawn whole.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

from _trace_jobs import Job, list_micro_batches
from tightfit.core.dtypes import Dtype
from tightfit.core.optimizers import Optimizer
from tightfit.core.settings import Loss
from tightfit.core.strategy import Strategy, Training, default_learning_rate
from tightfit.data.token_store import EncodedRow
from tightfit.runtime.layers import decoder_layers
from tightfit.runtime.load import (
    _make_random_quantized,
    list_quantizable,
    load_meta,
)
from tightfit.training.batches import Batch, collate_packed, collate_padded
from tightfit.training.distributed import DistContext
from tightfit.training.engine import TorchEngine, build_engine
from tightfit.training.model import Objective, build_optimizer, prepare_model
from tightfit.training.sharding import (
    SentTensor,
    Sharder,
    WeightReceiver,
    quantize_meta_model,
    split_quantized,
)

CATALOGUE = Path(__file__).resolve().parents[1] / "src" / "tightfit" / "catalogue" / "models"
TINY = {
    **{"hidden_size": 64, "n_embd": 64, "intermediate_size": 128, "head_dim": 16},
    **{"num_hidden_layers": 2, "n_layer": 2, "num_attention_heads": 4, "n_head": 4},
    **{"num_key_value_heads": 2, "num_kv_heads": 4, "vocab_size": 512, "sliding_window": 32},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "query_pre_attn_scalar": 16},
}
"""Sizes of a smoke run without a GPU: every family keeps its shape, nothing keeps its size."""
TINY_TOKENS = 32
DRAWN_SPREAD = 0.02
FIRST_TOKEN = 5
"""Lower ones mean something to some families."""


def shrink_job(strategy: Strategy) -> dict[str, Any]:
    """Changes that let a job run on a CPU: short rows, and nothing that needs a GPU's kernels."""
    changes: dict[str, Any] = {"seq_len": TINY_TOKENS, "fused_kernels": False}
    changes["recomputed_layers"] = strategy.recomputed_layers and 1
    if strategy.loss in (Loss.FUSED, Loss.KERNEL):
        changes["loss"] = Loss.CHUNKED
    if strategy.optimizer is Optimizer.ADAMW_8BIT:
        changes["optimizer"] = Optimizer.ADAMW
    return changes


def write_config(job: Job, folder: Path, *, is_tiny: bool) -> None:
    (path,) = CATALOGUE.glob(f"*--{job.model}.json")
    fields = json.loads(path.read_text())
    if is_tiny:
        fields |= {key: size for key, size in TINY.items() if fields.get(key) is not None}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))


def make_training(job: Job, folder: Path) -> Training:
    return Training(
        model_path=str(folder),
        learning_rate=default_learning_rate(job.strategy.method, job.strategy.optimizer),
        random_weights=True,
    )


def join_fake_group(num_ranks: int) -> None:
    """A group whose other ranks are all like this one: what is gathered is finite, and as large."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if num_ranks == 1 or dist.is_initialized():
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    # torch 2.13 has newer names for both.
    for name in ("all_gather_into_tensor", "all_gather_single"):
        _follow(name, _repeat_own)
    for name in ("reduce_scatter_tensor", "reduce_scatter_single"):
        _follow(name, _take_own)


def _follow(name: str, fill: Callable[[Tensor, Tensor], None]) -> None:
    """Let `fill` write what the fake collective leaves unwritten, which could be any bits."""
    collective = getattr(dist, name, None)
    if collective is None:
        return
    signature = inspect.signature(collective)

    def filled(*args: Any, **kwargs: Any) -> Any:
        work = collective(*args, **kwargs)
        output, given = list(signature.bind(*args, **kwargs).arguments.values())[:2]
        fill(output, given)
        return work

    setattr(dist, name, filled)


def _repeat_own(output: Tensor, given: Tensor) -> None:
    parts = output.detach().view(-1, given.numel())
    parts[0].copy_(given.detach().view(-1))  # the very same memory, with FSDP2
    parts[1:].copy_(parts[0])


def _take_own(output: Tensor, given: Tensor) -> None:
    output.detach().view(-1).copy_(given.detach().view(-1)[: output.numel()])


class KeptGather(AllGather):
    """Returns buffers that already contain the other ranks' values.

    Gathering then takes no time, as on a network without limits: what a step takes is the rank's
    own. Costs memory that a real group does not, so peaks are read before.
    """

    NUM_IN_FLIGHT = 4
    """Buffers of one size that FSDP2 may hold at a time: it fetches one layer ahead."""

    def __init__(self) -> None:
        self._kept: dict[tuple[tuple[int, ...], torch.dtype], Iterator[Tensor]] = {}

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        key = (tuple(int(each) for each in size), dtype)
        if key not in self._kept:
            drawn = [
                torch.randn(key[0], device=device, dtype=dtype).mul_(DRAWN_SPREAD)
                for _ in range(self.NUM_IN_FLIGHT)
            ]
            self._kept[key] = cycle(drawn)
        return next(self._kept[key])

    def __call__(self, *_args: Any, **_kwargs: Any) -> None:
        """The rank's own values were copied in before."""


def keep_gathered(module: nn.Module) -> None:
    """Let all of a sharded module's layers gather from buffers that are filled already."""
    gather = KeptGather()
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_custom_all_gather(gather)


def make_context(job: Job, device: torch.device) -> DistContext:
    size = job.num_ranks
    return DistContext(rank=0, local_rank=0, world_size=size, local_world_size=size, device=device)


def build(job: Job, training: Training, context: DistContext) -> TorchEngine:
    """The engine before its first step."""
    join_fake_group(job.num_ranks)
    if not job.strategy.sharding.is_fsdp:
        plan: Any = SimpleNamespace(strategy=job.strategy, training=training)
        return cast("TorchEngine", build_engine(plan, context))
    return give_optimizer(job, training, context, draw_sharded(job, training, context))


def give_optimizer(
    job: Job, training: Training, context: DistContext, module: nn.Module
) -> TorchEngine:
    """A fresh optimizer, without state, and the engine around it."""
    return TorchEngine(
        module,
        build_optimizer(module.named_parameters(), job.strategy.optimizer, training),
        strategy=job.strategy,
        device=context.device,
        world_size=context.world_size,
        max_grad_norm=training.max_grad_norm,
    )


def draw_sharded(job: Job, training: Training, context: DistContext) -> Objective:
    """As `load_sharded`, with values drawn where they are needed.

    The check of packed weights is left out: what a fake group gathers is not what was packed.
    """
    torch.manual_seed(training.seed)
    skeleton: Any = load_meta(Path(training.model_path), job.strategy)
    if job.strategy.weights is Dtype.NF4:
        names = [name for name, _ in list_quantizable(skeleton)]
        quantize_meta_model(skeleton, names, job.strategy)
    module = Objective.from_strategy(prepare_model(skeleton, job.strategy, training), job.strategy)
    source: Any = DrawnSource(module, job.strategy, context.device)
    filler, sharder = WeightReceiver(module, source, context.device), Sharder(job.strategy, context)
    for layer in decoder_layers(module):
        filler.fill(layer)
        sharder.shard_layer(layer)
    filler.fill(module)
    sharder.shard_rest(module)
    return module


class DrawnSource:
    """Replaces rank 0's tensors: each is drawn on access."""

    def __init__(self, module: nn.Module, strategy: Strategy, device: torch.device) -> None:
        self._module = module
        self._strategy = strategy
        self._device = device
        self._tensors = dict([*module.named_parameters(), *module.named_buffers()])
        self._packed: dict[tuple[int, int], SentTensor] = {}

    def items(self) -> Iterator[tuple[str, SentTensor]]:
        """Names and shapes; the values of packed matrices are those of the first of a shape."""
        for name, tensor in self._tensors.items():
            owner: Any = self._module.get_submodule(name.rpartition(".")[0])
            if type(tensor).__name__ != "Params4bit":
                yield name, (tensor.detach(), {})
                continue
            shape = (owner.in_features, owner.out_features)
            if shape not in self._packed:
                self._packed[shape] = self._pack(owner)
            yield name, self._packed[shape]

    def pop(self, name: str) -> SentTensor:
        self._packed.clear()
        tensor = self._tensors.pop(name)
        if type(tensor).__name__ == "Params4bit":
            return self._pack(self._module.get_submodule(name.rpartition(".")[0]))
        values = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        if values.is_floating_point():
            values.normal_(0.0, DRAWN_SPREAD)
        else:
            values.zero_()
        return (values, {})

    def _pack(self, owner: Any) -> SentTensor:
        plain = nn.Linear(owner.in_features, owner.out_features, bias=False, device="meta")
        drawn: Any = _make_random_quantized(plain, self._strategy, self._device)
        return split_quantized(drawn.weight)


def make_batches(job: Job, vocab_size: int) -> list[Batch]:
    """The step's micro-batches in host memory, collated as in training."""
    import numpy as np

    draw = np.random.default_rng(0)
    collate = collate_packed if job.strategy.packing else collate_padded
    batches = []
    for sequences in list_micro_batches(job):
        rows = []
        for sequence in sequences:
            encoded = []
            for row in sequence:
                tokens = draw.integers(FIRST_TOKEN, vocab_size, row.num_tokens, dtype=np.int32)
                trained = np.arange(row.num_tokens) >= row.num_prompt
                encoded.append(EncodedRow(tokens, trained, job.name))
            rows.append(encoded)
        batches.append(collate(rows, pad_token_id=0))
    return batches
