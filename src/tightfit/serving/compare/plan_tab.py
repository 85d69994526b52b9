"""The plan tab: whether a model fits, with which method, and how fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tightfit.core.errors import InvalidInputError, UserError
from tightfit.core.units import render_bytes, render_count, render_seconds, render_usd
from tightfit.estimation.result import Phase, Verdict
from tightfit.hardware.resolve import resolve_hardware
from tightfit.models.resolve import resolve_model
from tightfit.planning.plan import STAGES, Plan, fullest_phases
from tightfit.planning.request import (
    DEFAULT_EFFECTIVE_BATCH,
    METHODS,
    JobRequest,
    name_method,
)
from tightfit.planning.search import SearchResult, search
from tightfit.serving.compare.controls import BUSY_EVENT
from tightfit.serving.compare.html import escape_html, render_error, render_note

NUM_PLANS = 3
MAX_SEQ_LEN = 16_777_216
MAX_BATCH = 10_000_000
_VERDICTS = {Verdict.FITS: ("fits", "tf-fits"), Verdict.TIGHT: ("tight", "tf-tight")}
_PLAIN_COLOUR = "#8899aa"


def build_plan_tab(model: str, on: str, colours: Mapping[str, str]) -> None:
    """Draw the tab, with a model and hardware filled in, and connect it.

    `colours`: of the memory's parts, as the charts of the command line have them.
    """
    import gradio as gr

    with gr.Row():
        name = gr.Textbox(
            label="Model", value=model, info="A catalogue name, a folder or a GGUF file",
            elem_id="tf-ask-plan", min_width=240, max_lines=1,
        )  # fmt: skip
        hardware = gr.Textbox(
            label="Hardware", value=on, info="here, cpu, 4xV100-32GB, 2n x 4xA100-40GB",
            elem_id="tf-plan-hardware", min_width=240, max_lines=1,
        )  # fmt: skip
    with gr.Row():
        method = gr.Dropdown(list(METHODS), value=METHODS[0], label="Method", min_width=140)
        length = gr.Number(
            value=2048, precision=0, minimum=1, label="Tokens per sequence", min_width=140
        )
        batch = gr.Number(
            value=DEFAULT_EFFECTIVE_BATCH, precision=0, minimum=1, label="Sequences per step",
            min_width=140,
        )  # fmt: skip
    go = gr.Button("Will it fit?", variant="primary", elem_id="tf-go-plan")
    shown = gr.HTML(
        render_note("Nothing is loaded or run for this."),
        apply_default_css=False,
        elem_id="tf-plans",
    )

    def run(name: str, hardware: str, method: str, length: float, batch: float) -> str:
        try:
            result = plan_job(name or "", hardware or "", method, length, batch)
        except UserError as error:
            return render_error(error)
        return render_result(result, colours)

    inputs = [name, hardware, method, length, batch]
    gr.on([go.click, name.submit, hardware.submit], run, inputs, shown, **BUSY_EVENT)


def plan_job(
    name: str, hardware: str, method: str, seq_len: float | None, batch: float | None
) -> SearchResult:
    """Search the plans of one job as the tab states it."""
    if not name.strip():
        raise InvalidInputError("No model is named.", remedy="name one, like Llama-2-7b")
    request = JobRequest(
        spec=resolve_model(name.strip()),
        method=method,
        seq_len=_read_count("Tokens per sequence", seq_len, MAX_SEQ_LEN),
        effective_batch=_read_count("Sequences per step", batch, MAX_BATCH),
    )
    return search(request, resolve_hardware(hardware), num_plans=NUM_PLANS)


def render_result(result: SearchResult, colours: Mapping[str, str]) -> str:
    """The top plans, or the reason that there is none."""
    if not result.plans:
        error = InvalidInputError(
            result.failure or "Nothing fits.",
            remedy="a smaller method (qlora), shorter sequences or more hardware",
        )
        return render_error(error)
    best = result.plans[0]
    spec = best.model
    text = (
        f"{spec.name} ({render_count(spec.num_params)} parameters), "
        f"{best.strategy.seq_len:,} tokens a sequence, {best.effective_batch:,} sequences a step; "
        f"{result.num_considered:,} strategies considered."
    )
    drawn = {part for plan in result.plans for part in _parts(plan)}
    legend = "".join(
        f'<li><span style="background:{_colour(part, colours)}"></span>{escape_html(part)}</li>'
        for part in sorted(drawn, key=list(colours).index if drawn <= set(colours) else str)
    )
    plans = "".join(
        _render_plan(number, plan, colours) for number, plan in enumerate(result.plans, start=1)
    )
    return (
        f'{render_note(text)}<ul class="tf-legend">{legend}</ul>{plans}'
        f"{render_note('Bars: memory of the fullest GPU by stage. Dashed: what the card has.')}"
    )


def _render_plan(number: int, plan: Plan, colours: Mapping[str, str]) -> str:
    word, kind = _VERDICTS.get(plan.estimate.verdict, (plan.estimate.verdict.value, "tf-tight"))
    why = "".join(f"<li>{escape_html(reason)}</li>" for reason in plan.why)
    folded = f"<details><summary>Why</summary><ul>{why}</ul></details>" if why else ""
    return (
        f'<article class="tf-plan"><h3>{number}. {escape_html(name_method(plan.strategy))}'
        f'<span class="tf-badge {kind}">{escape_html(word)}</span></h3>'
        f"{render_note(plan.summary)}"
        f"{_render_memory(plan, colours, is_open=number == 1)}"
        f"{render_note(_describe_pace(plan))}{folded}</article>"
    )


def _describe_pace(plan: Plan) -> str:
    time, estimate = plan.estimate.time, plan.estimate
    parts = [
        f"{time.tokens_per_second:,.0f} tokens/s",
        f"{render_seconds(time.seconds_per_step)} a step",
        f"{render_bytes(estimate.gpu.peak_reserved_bytes)} of "
        f"{render_bytes(estimate.gpu.capacity_bytes)} per GPU",
        f"{render_bytes(estimate.host.peak_bytes)} host RAM",
        f"{render_bytes(estimate.disk.bytes)} disk",
    ]
    if plan.cost is not None:
        parts.append(f"{render_usd(plan.cost.usd_per_hour)}/h")
    return " · ".join(parts)


def _render_memory(plan: Plan, colours: Mapping[str, str], *, is_open: bool) -> str:
    """The step's fullest stage, and the others behind it, which are open for the best plan."""
    stages = fullest_phases(plan.estimate)
    capacity = plan.estimate.gpu.capacity_bytes
    top = max([capacity, *(phase.peak_reserved_bytes for phase in stages.values())]) * 1.03
    bars = {
        stage: _render_bar(stage, phase, capacity=capacity, top=top, colours=colours)
        for stage, phase in stages.items()
    }
    peak = plan.estimate.gpu.peak_phase
    fullest = STAGES.get(peak, peak)
    others = "".join(bar for stage, bar in bars.items() if stage != fullest)
    return (
        f'<div class="tf-bars">{bars[fullest]}</div>'
        f"<details{' open' if is_open else ''}><summary>Other stages</summary>"
        f'<div class="tf-bars">{others}</div></details>'
    )


def _render_bar(
    stage: str, phase: Phase, *, capacity: int, top: float, colours: Mapping[str, str]
) -> str:
    names = list(colours)
    parts = sorted(
        ((name.replace("_", " "), size) for name, size in phase.components.items() if size > 0),
        key=lambda part: names.index(part[0]) if part[0] in names else len(names),
    )
    drawn = "".join(
        f'<i style="width:{100 * size / top:.3f}%;background:{_colour(name, colours)}" '
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


def _parts(plan: Plan) -> Sequence[str]:
    phases = fullest_phases(plan.estimate).values()
    return [n.replace("_", " ") for phase in phases for n, size in phase.components.items() if size]


def _colour(part: str, colours: Mapping[str, str]) -> str:
    return colours.get(part, _PLAIN_COLOUR)


def _read_count(name: str, value: float | None, most: int) -> int:
    if value is None or not 1 <= value <= most:
        raise InvalidInputError(
            f"{name} is {'empty' if value is None else f'{value:g}'}.",
            remedy=f"give a whole number from 1 to {most:,}",
        )
    return int(value)
