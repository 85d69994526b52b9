"""`estimate`: memory, disk and time of one configuration; `zero_table`: ZeRO-3 with offload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tightfit.api.call import accepts_keywords
from tightfit.api.options.training import EstimateOptions
from tightfit.api.training.hardware import choose_cluster_or_card, note_network, state_network
from tightfit.api.training.settings import FIELDS, read_settings, refuse_trace, refuse_twice
from tightfit.core.dtypes import Dtype
from tightfit.core.errors import UsageError
from tightfit.core.settings import Method, Sharding
from tightfit.core.strategy import Strategy
from tightfit.core.text import sanitize, shorten
from tightfit.core.trainers import TrainerVersion, find_trainer
from tightfit.core.units import render_count
from tightfit.data.new_tokens import grow_spec
from tightfit.estimation.result import Estimate, Verdict
from tightfit.estimation.state import ZeroRow, estimate_zero_table, largest_layer_params
from tightfit.hardware.types import Cluster, NodeGroup
from tightfit.models.spec import ModelSpec
from tightfit.planning.filter import judge_strategy
from tightfit.planning.request import change_model
from tightfit.planning.rules import Case, check_lora_targets
from tightfit.planning.space import choose_attention, choose_compute_dtype, must_repeat_keys
from tightfit.runtime.resolve import resolve_model

if TYPE_CHECKING:
    from tightfit.api.training.tracing import TracedEstimate

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
    refuse_trace(options.trainer, is_traced=options.trace)
    trainer = find_trainer(options.trainer) if options.trainer else None
    if trainer is not None:
        spec = change_model(spec, trainer)
    cluster, notes = choose_cluster_or_card(options.on)
    cluster = state_network(cluster, options.network)
    group = cluster.groups[0]
    if len(cluster.groups) > 1:
        others = ", ".join(sanitize(other.name) for other in cluster.groups[1:])
        notes = (*notes, f"Estimated on {sanitize(group.name)}; not on {others}.")
    strategy = choose_strategy(options, spec=spec, group=group, trainer=trainer)
    if strategy.method is Method.LORA:
        check_lora_targets(spec, strategy.lora_targets)
    spec = grow_spec(spec, _name_model(options), strategy.new_tokens)
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
    total = read_count(stated[0], option="--total-params")
    largest = read_count(stated[1], option="--largest-layer-params")
    if largest > total:
        raise UsageError(
            f"The largest layer ({render_count(largest)}) is larger than the model "
            f"({render_count(total)}).",
            remedy="swap --total-params and --largest-layer-params",
        )
    return total, largest, None


def read_count(text: str, *, option: str) -> int:
    """`2851e6`, `2.8B`, `32M` or `32000000` as a positive whole number."""
    factors = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
    stripped = text.strip().lower().replace("_", "").replace(",", "")
    factor = factors.get(stripped[-1:], 1)
    try:
        number = float(stripped[:-1] if factor > 1 else stripped) * factor
    except ValueError:
        number = float("nan")
    if not 1 <= number <= 10**15:
        raise UsageError(
            f"`{option} {shorten(text)}` is not a number of parameters.",
            remedy=f"{option} 2851e6, or 2.8B, or 32000000",
        )
    return round(number)


def choose_strategy(
    options: EstimateOptions,
    *,
    spec: ModelSpec,
    group: NodeGroup,
    trainer: TrainerVersion | None = None,
) -> Strategy:
    """The strategy that the options state, completed for this model and GPU."""
    settings = read_settings(options.settings)
    # `--gpus-per-node` is of the ZeRO table.
    names = [name for name in FIELDS if name != "gpus_per_node"]
    given = {name: getattr(options, name, None) for name in names}
    refuse_twice(settings, given)
    method = settings["method"].value if "method" in settings else given["method"] or "lora"
    stated = _read_stated(given) | settings
    half = choose_compute_dtype(spec, group.node.gpu)
    dtypes = _choose_dtypes(stated, method=method, card_half=half)
    compute = dtypes["compute"]
    attention = choose_attention(spec, group.node, compute=compute)
    is_fp8 = bool(settings.get("fp8"))
    is_one_gpu = group.num_nodes * group.node.num_gpus == 1
    sharding = stated.get("sharding", Sharding.SINGLE if is_one_gpu else Sharding.FSDP)
    is_single = sharding is Sharding.SINGLE
    chosen = Strategy(
        **{
            "attention": attention,
            "repeat_keys": must_repeat_keys(spec, group.node, attention=attention, compute=compute),
            "seq_len": min(DEFAULT_SEQ_LEN, spec.max_positions or DEFAULT_SEQ_LEN),
            # fp8 is made of unpacked matrices, and keeps frozen ones in a form that fused LoRA
            # alone can read.
            "dequantized_base": is_fp8 and dtypes["weights"] is Dtype.NF4,
            "fused_lora": is_fp8 and method in ("lora", "qlora"),
            "sharding": sharding,
            "num_nodes": 1 if is_single else group.num_nodes,
            "gpus_per_node": 1 if is_single else group.node.num_gpus,
            **dtypes,
            **stated,
            "method": Method.LORA if method == "qlora" else Method(method),
        }
    )
    if trainer is None:
        return chosen
    fixed = {*stated, "method", *(["weights"] if method == "qlora" else [])}
    return trainer.follow(chosen, spec.model_type, given=fixed)


def _read_stated(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that have an option of their own, in the Strategy's own types."""
    stated = {
        name: value for name, value in given.items() if value is not None and name != "method"
    }
    if "lora_targets" in stated:
        names = stated["lora_targets"].split(",")
        stated["lora_targets"] = tuple(name.strip() for name in names if name.strip())
        if not stated["lora_targets"]:
            raise UsageError(
                "`--lora-targets` names no module.", remedy="--lora-targets all-linear"
            )
    read = Strategy(**stated)
    return {name: getattr(read, name) for name in stated}


def _choose_dtypes(stated: Mapping[str, Any], *, method: str, card_half: Dtype) -> dict[str, Any]:
    compute, weights = stated.get("compute"), stated.get("weights")
    if method == "qlora" and weights not in (None, Dtype.NF4):
        raise UsageError(
            f"`--method qlora` stores nf4 weights, not {weights.value}.",
            remedy=f"--method lora --weights {weights.value}",
        )
    if weights is None:
        compute = compute or card_half
        weights = compute
        if method == "qlora":
            weights = Dtype.NF4
        elif method == "full" and compute is Dtype.FP16:
            # fp16 arithmetic on trained weights needs an fp32 copy to step; frozen ones do not.
            weights = Dtype.FP32
    elif compute is None:
        compute = card_half if weights.is_quantized else weights
    return {
        "autocast": compute is Dtype.FP16 and weights is not Dtype.FP32,
        "weights": weights,
        "compute": compute,
        # A gradient scaler cannot unscale fp16 gradients, so fp16 arithmetic keeps fp32 adapters.
        "adapter_dtype": Dtype.BF16 if compute is Dtype.BF16 else Dtype.FP32,
    }
