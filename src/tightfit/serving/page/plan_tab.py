"""The plan tab: what fits, how fast and why, answered while the job is typed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tightfit.core.errors import UserError
from tightfit.core.figures import MEMORY_COLOURS
from tightfit.core.text import count_of
from tightfit.core.units import render_bytes, render_count, render_seconds, render_usd
from tightfit.estimation.result import Phase, Verdict
from tightfit.planning.buying import Offer
from tightfit.planning.describe import (
    describe_gpus,
    describe_how,
    describe_levers,
    describe_method,
    shorten_gpu,
)
from tightfit.planning.plan import STAGES, Plan, fullest_phases
from tightfit.planning.ranking import explain_order
from tightfit.planning.request import METHODS
from tightfit.planning.search import SearchResult
from tightfit.serving.page.components import (
    LIVE_EVENT,
    build_hidden_button,
    build_line,
    escape_html,
    render_commands,
    render_error,
    render_folded,
    render_list,
    render_note,
    render_table,
    render_tiles,
)

NUM_PLANS = 5
NUM_OFFERS = 6
_VERDICTS = {Verdict.FITS: ("fits", "tf-fits"), Verdict.TIGHT: ("tight", "tf-tight")}
_PLAIN_COLOUR = "#8899aa"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanForm:
    """What stands in the fields, as it was typed."""

    job: str
    on: str = ""
    data: str = ""
    seq_len: str = ""
    effective_batch: str = ""
    method: str = METHODS[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """Plans, best first; without any, the reason, and the cheapest hardware that would do."""

    result: SearchResult
    commands: tuple[str, ...]
    """For a terminal: this search again, and the training."""
    error: UserError | None = None
    offers: Sequence[Offer] = ()


Explore = Callable[[PlanForm], PlanAnswer]
"""Raises UserError for fields that mean nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTab:
    """The components that a page fills in when it is opened."""

    inputs: tuple[Any, ...]
    shown: Any
    run: Callable[..., str]


def build_plan_tab(
    explore: Explore, first: PlanForm, models: Sequence[str], *, reads_paths: bool
) -> PlanTab:
    """Draw the tab, with `first` filled in, and connect it. `models` are offered while typing."""
    import gradio as gr

    names = "Catalogue name, folder, GGUF or recipe" if reads_paths else "A name of the catalogue"
    with gr.Row(elem_classes="tf-split"):
        with gr.Column(scale=1, min_width=270, elem_id="tf-ask-plan", elem_classes="tf-form"):
            name = build_line(
                "Model", first.job, names,
                elem_id="tf-plan-model", offers="tf-known-models",
            )  # fmt: skip
            hardware = build_line(
                "Hardware", first.on, "4xV100-32GB, 2n x 4xA100-40GB, here, cpu",
                elem_id="tf-plan-hardware",
            )  # fmt: skip
            method = gr.Radio(
                list(METHODS), value=first.method, label="Method", elem_id="tf-plan-method",
                elem_classes="tf-choice",
            )  # fmt: skip
            with gr.Row(elem_classes="tf-twins"):
                length = build_line("Sequence length", first.seq_len, "", hint="2048")
                batch = build_line("Batch size", first.effective_batch, "", hint="16")
            data = build_line(
                "Data", first.data, "Optional: its lengths set packing and time",
                hint="train.jsonl", elem_id="tf-plan-data",
            )  # fmt: skip
            data.visible = reads_paths
            go = build_hidden_button("tf-go-plan", "Plan")
            offered = "".join(f'<option value="{escape_html(model)}">' for model in models)
            gr.HTML(f'<datalist id="tf-known-models">{offered}</datalist>', padding=False)
        with gr.Column(scale=3, min_width=320):
            shown = gr.HTML("", apply_default_css=False, elem_id="tf-plans", elem_classes="tf-out")

    def run(job: str, on: str, method: str, seq_len: str, batch: str, data: str) -> str:
        form = PlanForm(
            job=job or "", on=on or "", method=method, seq_len=seq_len or "",
            effective_batch=batch or "", data=data or "",
        )  # fmt: skip
        try:
            return render_answer(explore(form))
        except UserError as error:
            return render_error(error)

    inputs = (name, hardware, method, length, batch, data)
    gr.on([go.click, *(line.submit for line in inputs if line is not method)], run, inputs, shown,
          **LIVE_EVENT)  # fmt: skip
    return PlanTab(inputs=inputs, shown=shown, run=run)


def render_answer(answer: PlanAnswer) -> str:
    """The plans; or the reason that there is none, and what would do."""
    if answer.error is None:
        return _render_plans(answer)
    excluded = _render_excluded(answer.result, is_open=True)
    above = render_error(answer.error)
    offers = _render_offers(answer.offers) if answer.offers else ""
    return above + offers + excluded


def _render_plans(answer: PlanAnswer) -> str:
    result = answer.result
    best = result.plans[0]
    drawn = {
        name.replace("_", " ")
        for plan in result.plans
        for phase in fullest_phases(plan.estimate).values()
        for name, size in phase.components.items()
        if size
    }
    legend = "".join(
        f'<li><span style="background:{_colour(part)}"></span>{escape_html(part)}</li>'
        for part in sorted(drawn, key=_order)
    )
    is_one_kind = len({plan.hardware.node.gpu.name for plan in result.plans}) == 1
    plans = "".join(
        _render_plan(number, plan, names_gpu=not is_one_kind)
        for number, plan in enumerate(result.plans, start=1)
    )
    order = explain_order(result.plans)
    why = [*best.why, *([f"plan {order}"] if order else [])]
    assumed = dict.fromkeys((*best.warnings, *best.estimate.assumptions))
    return "".join(
        (
            _render_head(best),
            render_commands(answer.commands),
            f'<h3>Plans, best first</h3><ul class="tf-legend">{legend}'
            '<li><span class="tf-dash"></span>memory of the GPU</li></ul>',
            plans,
            f"<h3>Why the first</h3>{render_list(why)}" if why else "",
            _render_excluded(result, is_open=False),
            render_folded("Assumed, and beware", render_list(assumed)) if assumed else "",
        )
    )


def _render_head(best: Plan) -> str:
    spec, estimate = best.model, best.estimate
    word, kind = _VERDICTS.get(estimate.verdict, (estimate.verdict.value, "tf-tight"))
    gpu, time, cost = estimate.gpu, estimate.time, best.cost
    run_seconds = estimate.time.run_seconds(best.num_epochs)
    of_host = (
        f"of {render_bytes(estimate.host.capacity_bytes)}" if estimate.host.capacity_bytes else ""
    )
    tiles = [
        ("Method", describe_method(best.strategy), word),
        (
            "Memory per process" if best.hardware.node.gpu.is_cpu else "Memory per GPU",
            render_bytes(gpu.peak_reserved_bytes),
            f"of {render_bytes(gpu.capacity_bytes)}",
        ),
        (
            "Speed",
            f"{time.tokens_per_second:,.0f}",
            "tokens/s",
        ),
    ]
    if run_seconds is not None:
        rows = best.data.num_rows if best.data is not None else 0
        tiles.append(("Run", render_seconds(run_seconds), count_of(rows, "row")))
    tiles.append(("Host RAM", render_bytes(estimate.host.peak_bytes), of_host))
    if cost is not None:
        of_run = "" if cost.usd_per_run is None else f"{render_usd(cost.usd_per_run)} a run"
        tiles.append(("Rent", f"{render_usd(cost.usd_per_hour)}/h", of_run))
    cards = describe_gpus(
        best.hardware.node.gpu.name,
        num_nodes=best.strategy.num_nodes,
        gpus_per_node=best.strategy.gpus_per_node,
    )
    subject = (
        f"{render_count(spec.num_params)} parameters · {best.strategy.seq_len:,} tokens a "
        f"sequence · {count_of(best.effective_batch, 'sequence')} a step"
    )
    badge = f'<span class="tf-badge {kind}">{escape_html(word)}</span>'
    return (
        f"<h2>{escape_html(spec.name)} on {escape_html(cards)} {badge}</h2>"
        f"{render_note(subject)}{render_tiles(tiles)}"
    )


def _render_plan(number: int, plan: Plan, *, names_gpu: bool) -> str:
    word, kind = _VERDICTS.get(plan.estimate.verdict, (plan.estimate.verdict.value, "tf-tight"))
    gpu = plan.hardware.node.gpu
    how = describe_how(plan.strategy, gpu.name if names_gpu else None, is_cpu=gpu.is_cpu)
    time, cost = plan.estimate.time, plan.cost
    pace = [
        f"{time.tokens_per_second:,.0f} tokens/s",
        f"{render_seconds(time.seconds_per_step)} a step",
    ]
    run_seconds = plan.estimate.time.run_seconds(plan.num_epochs)
    if run_seconds is not None:
        pace.append(f"{render_seconds(run_seconds)} the run")
    if cost is not None:
        pace.append(
            f"{render_usd(cost.usd_per_hour)}/h"
            if cost.usd_per_run is None
            else f"{render_usd(cost.usd_per_run)} the run"
        )
    return (
        f'<article class="tf-plan"><h4><span class="tf-place">{number}</span>'
        f'<span class="tf-how">{escape_html(how)}</span>'
        f'<span class="tf-badge {kind}">{escape_html(word)}</span>'
        f'<span class="tf-pace">{escape_html(" · ".join(pace))}</span></h4>'
        f"{render_note(describe_levers(plan.strategy))}"
        f"{_render_memory(plan, is_open=number == 1)}</article>"
    )


def _render_memory(plan: Plan, *, is_open: bool) -> str:
    """The job's fullest phase, and the others behind it, which are open for the best plan."""
    stages = fullest_phases(plan.estimate)
    capacity = plan.estimate.gpu.capacity_bytes
    top = max([capacity, *(phase.peak_reserved_bytes for phase in stages.values())]) * 1.03
    bars = {
        stage: _render_bar(stage, phase, capacity=capacity, top=top)
        for stage, phase in stages.items()
    }
    if is_open:
        return f'<div class="tf-bars">{"".join(bars.values())}</div>'
    peak = plan.estimate.gpu.peak_phase
    fullest = STAGES.get(peak, peak)
    others = "".join(bar for stage, bar in bars.items() if stage != fullest)
    return f'<div class="tf-bars">{bars[fullest]}</div>' + render_folded(
        "Other phases", f'<div class="tf-bars">{others}</div>'
    )


def _render_bar(stage: str, phase: Phase, *, capacity: int, top: float) -> str:
    parts = sorted(
        ((name.replace("_", " "), size) for name, size in phase.components.items() if size > 0),
        key=lambda part: _order(part[0]),
    )
    drawn = "".join(
        f'<i style="width:{100 * size / top:.3f}%;background:{_colour(name)}" '
        f'title="{escape_html(f"{name} {render_bytes(size)}")}"></i>'
        for name, size in parts
    )
    size = render_bytes(phase.peak_reserved_bytes)
    text = ", ".join(f"{name} {render_bytes(part)}" for name, part in parts)
    return (
        f"<span>{escape_html(stage)}</span>"
        f'<div class="tf-track" role="img" aria-label="{escape_html(f"{stage}: {size}: {text}")}">'
        f'{drawn}<u style="left:{100 * capacity / top:.2f}%"></u></div>'
        f'<span class="tf-size">{escape_html(size)}</span>'
    )


def _render_excluded(result: SearchResult, *, is_open: bool) -> str:
    """Each reason once, the commonest first."""
    if not result.excluded:
        return ""
    listed = sorted(result.excluded, key=lambda found: -found.num_strategies)
    rows = [
        (f"{found.num_strategies:,}", f"{found.reason}\ne.g. {found.example}") for found in listed
    ]
    left_out = sum(found.num_strategies for found in listed)
    title = f"Why others lose: {left_out:,} of {result.num_considered:,} strategies left out"
    return render_folded(title, render_table((">left out", "because"), rows), is_open=is_open)


def _render_offers(offers: Sequence[Offer]) -> str:
    has_run = offers[0].usd_per_run is not None
    rows, words = [], []
    for offer in offers[:NUM_OFFERS]:
        estimate, run = offer.plan.estimate, offer.usd_per_run
        speed = f"{estimate.time.tokens_per_second:,.0f} tokens/s"
        seconds = estimate.time.run_seconds(offer.plan.num_epochs)
        rows.append(
            (
                f"{offer.num_gpus} x {shorten_gpu(offer.gpu.name)}",
                describe_method(offer.plan.strategy),
                f"{render_bytes(estimate.gpu.peak_reserved_bytes)} of "
                f"{render_bytes(estimate.gpu.capacity_bytes)}",
                speed if seconds is None else render_seconds(seconds),
                f"{render_usd(offer.usd_per_hour)}/h",
                f"${offer.usd_per_million_tokens:.2g}" if run is None else render_usd(run),
            )
        )
        words.append(f"{offer.num_gpus}x{offer.gpu.name}")
    heads = ("hardware", "method", ">memory per GPU", ">time" if has_run else ">speed", ">rent",
             ">a run" if has_run else ">a million tokens")  # fmt: skip
    table = render_table(heads, rows, fills=[("tf-plan-hardware", word) for word in words])
    return f"<h3>What would fit, cheapest first</h3>{table}" + render_note(
        "Choose one to see its plans. Prices: the cheapest cloud's median on demand, without host, "
        "disk and traffic."
    )


def _colour(part: str) -> str:
    return MEMORY_COLOURS.get(part, _PLAIN_COLOUR)


def _order(part: str) -> int:
    """As the charts of the command line have them."""
    names = list(MEMORY_COLOURS)
    return names.index(part) if part in names else len(names)
