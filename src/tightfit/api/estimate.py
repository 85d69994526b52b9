"""`estimate`: memory, disk and time of one configuration; `zero_table`: ZeRO-3 with offload."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tightfit.api.call import accepts_keywords
from tightfit.api.options import choices
from tightfit.api.options.training import EstimateOptions
from tightfit.api.training.hardware import choose_cluster_or_card, note_network, state_network
from tightfit.api.training.settings import read_settings, refuse_twice
from tightfit.core.dtypes import Dtype
from tightfit.core.errors import UsageError
from tightfit.core.strategy import (
    Attention,
    Loss,
    Method,
    Offload,
    Optimizer,
    Sharding,
    Strategy,
)
from tightfit.core.text import sanitize
from tightfit.core.units import render_count
from tightfit.estimation.result import Estimate, Verdict
from tightfit.estimation.zero_table import ZeroRow, estimate_zero_table, largest_layer_params
from tightfit.hardware.types import Cluster, NodeGroup
from tightfit.models.resolve import resolve_model
from tightfit.models.spec import ModelSpec
from tightfit.planning.judge import judge_strategy
from tightfit.planning.rules import Case, check_lora_targets
from tightfit.planning.space import choose_attention, choose_compute_dtype, must_repeat_keys

if TYPE_CHECKING:
    from tightfit.api.training.tracing import TracedEstimate

_BARE_SWITCHES = ("train_embeddings",)
"""Switches without an off side: False means that they were not given."""
DEFAULT_SEQ_LEN = int(Strategy.model_fields["seq_len"].default)


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateResult:
    """One configuration, and what it is predicted to need."""

    spec: ModelSpec
    strategy: Strategy
    cluster: Cluster
    group: NodeGroup
    """The nodes of the cluster that it is estimated on."""
    closed_form: Estimate
    traced: TracedEstimate | None
    """None: no trace was asked for, or the configuration is illegal."""
    estimate: Estimate
    """The closed form, with traced memory and time where there is a trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroTable:
    """Memory of ZeRO-3 with and without offload, as DeepSpeed's own table has it."""

    model: str | None
    total_params: int
    largest_layer_params: int
    rows: tuple[ZeroRow, ...]


@accepts_keywords(EstimateOptions)
def estimate(options: EstimateOptions) -> EstimateResult:
    """Estimate one configuration; what is not stated is chosen for the model and the GPU."""
    spec = resolve_model(_name_model(options))
    cluster, notes = choose_cluster_or_card(options.on)
    cluster = state_network(cluster, options.network)
    group = cluster.groups[0]
    if len(cluster.groups) > 1:
        others = ", ".join(sanitize(other.name) for other in cluster.groups[1:])
        notes = (*notes, f"Estimated on {sanitize(group.name)}; not on {others}.")
    strategy = choose_strategy(options, spec=spec, group=group)
    if strategy.method is Method.LORA:
        check_lora_targets(spec, strategy.lora_targets)
    judged = judge_strategy(
        spec=spec,
        strategy=strategy,
        node=group.node,
        num_nodes=group.num_nodes,
        network_bytes_per_second=cluster.network_bytes_per_second,
    )
    notes = (*notes, *cluster.warnings, *judged.assumptions)
    judged = judged.model_copy(update={"assumptions": note_network(cluster, dict.fromkeys(notes))})
    traced = None
    if options.trace and judged.verdict is not Verdict.ILLEGAL:
        from tightfit.api.training.tracing import trace_estimate

        case = Case(spec=spec, strategy=strategy, node=group.node, num_nodes=group.num_nodes)
        traced = trace_estimate(case, judged, progress=options.progress)
    return EstimateResult(
        spec=spec,
        strategy=strategy,
        cluster=cluster,
        group=group,
        closed_form=judged,
        traced=traced,
        estimate=judged if traced is None else traced.apply(judged),
    )


def _name_model(options: EstimateOptions) -> str:
    if options.model is not None:
        return options.model
    if options.total_params is not None:
        return f"{options.total_params}-params"
    raise UsageError(
        "Which model? MODEL is missing.", remedy="tightfit models    (lists the catalogue)"
    )


@accepts_keywords(EstimateOptions)
def zero_table(options: EstimateOptions) -> ZeroTable:
    """The table for `gpus_per_node` times `nodes`, from a model or from two parameter counts."""
    total, largest, name = _read_sizes(options)
    rows = estimate_zero_table(
        total_params=total,
        largest_layer_params=largest,
        gpus_per_node=options.gpus_per_node,
        num_nodes=options.nodes,
    )
    return ZeroTable(model=name, total_params=total, largest_layer_params=largest, rows=tuple(rows))


def _read_sizes(options: EstimateOptions) -> tuple[int, int, str | None]:
    """Parameters in all, in the largest layer, and the model's name where there is a model."""
    stated = (options.total_params, options.largest_layer_params)
    if options.model is not None:
        if stated != (None, None):
            raise UsageError(
                "The table is made from MODEL or from --total-params, not from both.",
                remedy=f"tightfit estimate {options.model} --zero-table",
            )
        spec = resolve_model(options.model)
        return spec.num_params, largest_layer_params(spec), spec.name
    if stated[0] is None or stated[1] is None:
        raise UsageError(
            "`--zero-table` needs MODEL, or both --total-params and --largest-layer-params.",
            remedy="tightfit estimate --zero-table --total-params 2.8B --largest-layer-params 32M",
        )
    total = choices.read_count(stated[0], option="--total-params")
    largest = choices.read_count(stated[1], option="--largest-layer-params")
    if largest > total:
        raise UsageError(
            f"The largest layer ({render_count(largest)}) is larger than the model "
            f"({render_count(total)}).",
            remedy="swap --total-params and --largest-layer-params",
        )
    return total, largest, None


def choose_strategy(options: EstimateOptions, *, spec: ModelSpec, group: NodeGroup) -> Strategy:
    """The strategy that the options state, completed for this model and GPU."""
    settings = read_settings(options.settings)
    options = _merge_settings(options, settings)
    method = choices.read_word(options.method or "lora", choices.METHODS, option="--method")
    dtypes = _choose_dtypes(
        options, method=method, card_half=choose_compute_dtype(spec, group.node.gpu)
    )
    attention = choose_attention(spec, group.node, compute=dtypes["compute"])
    is_fp8 = bool(settings.get("fp8"))
    given: dict[str, Any] = {
        **dtypes,
        "attention": attention,
        "repeat_keys": must_repeat_keys(
            spec, group.node, attention=attention, compute=dtypes["compute"]
        ),
        "seq_len": min(DEFAULT_SEQ_LEN, spec.max_positions or DEFAULT_SEQ_LEN),
        # fp8 is made of unpacked matrices, and keeps frozen ones in a form that fused LoRA
        # alone can read.
        "dequantized_base": is_fp8 and dtypes["weights"] is Dtype.NF4,
        "fused_lora": is_fp8 and method in ("lora", "qlora"),
        **_choose_layout(options, group),
        **_stated(options),
        "method": Method.LORA if method == "qlora" else Method(method),
        **settings,
    }
    return Strategy(**given)


def _merge_settings(options: EstimateOptions, settings: dict[str, Any]) -> EstimateOptions:
    """The options, with values of `--set` for fields that decide others."""
    stated = {
        name: getattr(options, name) for name in Strategy.model_fields if hasattr(options, name)
    }
    only_given = {
        name: None
        if (value is False and name in _BARE_SWITCHES) or name == "gpus_per_node"
        else value
        for name, value in stated.items()
    }
    refuse_twice(settings, only_given)
    leading = ("method", "weights", "compute", "adapter_dtype", "sharding")
    return replace(options, **{name: settings[name].value for name in leading if name in settings})


def _choose_dtypes(options: EstimateOptions, *, method: str, card_half: Dtype) -> dict[str, Any]:
    compute = _dtype(options.compute, choices.COMPUTE, "--compute")
    weights = _dtype(options.weights, choices.WEIGHTS, "--weights")
    if method == "qlora" and weights not in (None, Dtype.NF4):
        raise UsageError(
            f"`--method qlora` stores nf4 weights, not {options.weights}.",
            remedy=f"--method lora --weights {options.weights}",
        )
    if weights is None:
        weights = _default_weights(method, half=compute or card_half)
        compute = compute or card_half
    elif compute is None:
        compute = card_half if weights.is_quantized else weights
    # A gradient scaler cannot unscale fp16 gradients, so fp16 arithmetic keeps fp32 adapters.
    adapter = Dtype.BF16 if compute is Dtype.BF16 else Dtype.FP32
    return {
        "autocast": compute is Dtype.FP16 and weights is not Dtype.FP32,
        "weights": weights,
        "compute": compute,
        "adapter_dtype": _dtype(options.adapter_dtype, choices.COMPUTE, "--adapter-dtype")
        or adapter,
    }


def _default_weights(method: str, *, half: Dtype) -> Dtype:
    """fp16 arithmetic on trained weights needs an fp32 copy to step; frozen ones do not."""
    if method == "qlora":
        return Dtype.NF4
    return Dtype.FP32 if method == "full" and half is Dtype.FP16 else half


def _dtype(text: str | None, known: tuple[str, ...], option: str) -> Dtype | None:
    return None if text is None else choices.read_choice(Dtype, text, known=known, option=option)


def _choose_layout(options: EstimateOptions, group: NodeGroup) -> dict[str, Any]:
    num_gpus = group.num_nodes * group.node.num_gpus
    sharding = Sharding.SINGLE if num_gpus == 1 else Sharding.FSDP
    if options.sharding is not None:
        sharding = choices.read_choice(
            Sharding, options.sharding, known=choices.SHARDINGS, option="--sharding"
        )
    is_single = sharding is Sharding.SINGLE
    return {
        "sharding": sharding,
        "num_nodes": 1 if is_single else group.num_nodes,
        "gpus_per_node": 1 if is_single else group.node.num_gpus,
    }


def _stated(options: EstimateOptions) -> dict[str, Any]:
    """Fields that go through as given; what was not given keeps the Strategy's own default."""
    words: tuple[tuple[str, type[Any], tuple[str, ...]], ...] = (
        ("optimizer", Optimizer, choices.OPTIMIZERS),
        ("attention", Attention, choices.ATTENTIONS),
        ("loss", Loss, choices.LOSSES),
        ("offload", Offload, choices.OFFLOADS),
    )
    plain = (
        *("lora_rank", "micro_batch", "seq_len", "grad_accum", "checkpointing"),
        *("fused_kernels", "fused_lora", "dequantized_base", "double_quant", "train_embeddings"),
    )
    stated = {name: getattr(options, name) for name in plain}
    for name, kind, known in words:
        text = getattr(options, name)
        if text is not None:
            stated[name] = choices.read_choice(kind, text, known=known, option=f"--{name}")
    if options.lora_targets is not None:
        stated["lora_targets"] = _read_targets(options.lora_targets)
    return {name: value for name, value in stated.items() if value is not None}


def _read_targets(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise UsageError("`--lora-targets` names no module.", remedy="--lora-targets all-linear")
    return names
