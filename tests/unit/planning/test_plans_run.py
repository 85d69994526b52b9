"""What the planner can put first, the runtime accepts: every family on every kind of card.

The runtime's own checks are called as a worker calls them, without a GPU: which attention the
strategy means, whether the family has it, whether packed rows stay apart, whether Liger has its
kernels.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from planning_cases import SHORT_ROWS, make_cluster
from transformers import AutoConfig

from tightfit.core.attention import Attention
from tightfit.core.errors import UserError
from tightfit.core.objectives import Objective
from tightfit.core.profiles import DataProfile
from tightfit.core.settings import Offload, Sharding
from tightfit.core.strategy import Strategy
from tightfit.hardware.local import CpuReading, probe_cpu
from tightfit.hardware.types import NodeGroup
from tightfit.models.catalogue import CatalogueRow, list_models, load_row, read_row
from tightfit.models.spec import ModelSpec
from tightfit.planning.request import JobRequest
from tightfit.planning.rules import Case, find_first_violation
from tightfit.planning.search import search
from tightfit.planning.space import Layout, enumerate_strategies
from tightfit.runtime import attention
from tightfit.runtime.attention import VarlenKernel, check_packing, resolve_attention
from tightfit.runtime.kernels.liger import check_liger
from tightfit.training.distributed import DistContext
from tightfit.training.engine import _check_plan
from tightfit.training.tracing.engine import FAKE_DEVICE

CARDS = ("CPU", "T4", "V100-32GB", "A100-80GB", "RTX 4090", "H100-80GB")
TYPES_WITHOUT_A_CLASS = {"baichuan", "chatglm", "qwen", "RefinedWeb", "RefinedWebModel"}
"""Code on the hub only: transformers cannot load them, so the runtime has no word on them."""


@cache
def list_examples() -> tuple[CatalogueRow, ...]:
    """One model of the catalogue for each family and kind of attention in it."""
    found: dict[str, CatalogueRow] = {}
    for row in list_models():
        spec = load_row(row)
        features = (spec.num_sliding_layers > 0, spec.has_attention_softcap, spec.attention_extras)
        key = f"{spec.model_type} {features} {spec.head_dim} {spec.num_kv_heads < spec.num_heads}"
        found.setdefault(key, row)
    return tuple(found.values())


@cache
def read_transformers_config(row: CatalogueRow) -> Any:
    values = json.loads(read_row(row))
    return AutoConfig.for_model(values.pop("model_type"), **values)


@cache
def make_group(card: str) -> NodeGroup:
    if card == "CPU":
        chip = CpuReading(model="CPU", hz=2e9, flags=frozenset({"avx512f", "avx512_bf16"}))
        return probe_cpu(1, read_chip=lambda: chip).groups[0]
    return make_cluster((1, card)).groups[0]


def list_legal(spec: ModelSpec, group: NodeGroup) -> Iterator[Strategy]:
    """Legal strategies on one card, each combination that the runtime looks at once."""
    # Sharding and offload change nothing in what is checked here, and much in the time it takes.
    fixed = {"sharding": Sharding.SINGLE, "offload": Offload.NONE, "checkpointing": False}
    layout = Layout(group=group, num_nodes=1, gpus_per_node=1)
    seen = set()
    request = JobRequest(spec=spec, method="lora", profile=SHORT_ROWS, seq_len=512, fixed=fixed)
    for strategy in enumerate_strategies(request, layout):
        s = strategy
        key = (s.attention, s.packing, s.compute, s.repeat_keys, s.fused_kernels, s.loss)
        case = Case(spec=spec, strategy=strategy, node=group.node, num_nodes=1)
        if key not in seen and find_first_violation(case) is None:
            seen.add(key)
            yield strategy


def check(row: CatalogueRow, strategy: Strategy, group: NodeGroup) -> None:
    """As `read_config` and `prepare_model` do it."""
    gpu, config = group.node.gpu, read_transformers_config(row)
    capability = gpu.compute_capability or (0, 0)
    name = attention.choose_attention_name(
        strategy,
        has_varlen=not gpu.is_cpu and capability >= Attention.FLASH.record.min_capability,
    )
    resolve_attention(config, name)
    if strategy.packing:
        check_packing(config)
    if strategy.fused_kernels:
        check_liger(config)


@pytest.fixture(params=[False, True], ids=["without flash-attn", "with flash-attn"], autouse=True)
def flash_attn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed here or not."""
    kernel = VarlenKernel(
        run=lambda *_, **__: None,
        is_flash_attn=True,
        has_scale=True,
        has_grouped_heads=True,
        features=Attention.FLASH.record.package_features,
    )
    is_installed: bool = request.param
    monkeypatch.setattr(attention, "_has_flash_attn", lambda: is_installed)
    monkeypatch.setattr(attention, "_find_flash_attn", lambda: kernel if is_installed else None)


@pytest.mark.parametrize("card", CARDS)
def test_no_legal_strategy_is_refused(card: str) -> None:
    group = make_group(card)
    refused, families = [], set()
    for row in list_examples():
        spec = load_row(row)
        if spec.model_type in TYPES_WITHOUT_A_CLASS:
            continue
        strategies = list(list_legal(spec, group))
        assert strategies, f"{row.model} has no legal strategy on {card}"
        families.add(spec.model_type)
        for strategy in strategies:
            try:
                check(row, strategy, group)
            except UserError as error:
                refused.append(f"{row.model} ({spec.model_type}): {error.problem} {strategy}")
    assert not refused
    assert len(families) >= 20, families


@pytest.mark.parametrize("model", ["gemma-2-2b", "gpt-oss-20b"])
@pytest.mark.parametrize("profile", [None, SHORT_ROWS], ids=["rows", "packed"])
def test_the_first_plan_runs(model: str, profile: DataProfile | None) -> None:
    """Families whose first plan was refused at the start once."""
    row = next(row for row in list_models() if row.model.lower().endswith(model))
    group = make_group("H100-80GB")
    request = JobRequest(spec=load_row(row), profile=profile)
    plan = search(request, make_cluster((1, group.node.gpu)), num_plans=1).plans[0]
    check(row, plan.strategy, group)


@pytest.mark.parametrize("objective", [one for one in Objective if one is not Objective.SFT])
def test_no_legal_way_to_learn_preferences_is_refused(objective: Objective) -> None:
    """Asked as a worker asks it, on four cards, of every sharding, method and kind of reference."""
    row = next(row for row in list_models() if row.model.endswith("Llama-3.2-1B"))
    spec, group = load_row(row), make_cluster((4, "A100-80GB")).groups[0]
    request = JobRequest(spec=spec, profile=SHORT_ROWS, fixed={"objective": objective})
    context = DistContext(
        rank=0, local_rank=0, world_size=4, local_world_size=4, device=FAKE_DEVICE
    )
    layout = Layout(group=group, num_nodes=1, gpus_per_node=4)
    found = set()
    for strategy in enumerate_strategies(request, layout):
        case = Case(spec=spec, strategy=strategy, node=group.node, num_nodes=1)
        if find_first_violation(case) is None:
            _check_plan(strategy, context)
            found.add((strategy.sharding, strategy.method, strategy.runs_reference))
    kinds = {(method, runs) for _, method, runs in found}
    assert len({sharding for sharding, _, _ in found}) >= 5
    assert len(kinds) == (4 if objective.record.needs_reference else 2)
