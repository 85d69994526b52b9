"""The compare tab: how a round is laid out, started, stopped and voted on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tightfit.core.errors import UserError
from tightfit.serve.compare.events import QUIET, knows_visitor, name_visitor
from tightfit.serve.compare.examples import Example
from tightfit.serve.compare.html import render_fault
from tightfit.serve.compare.round import CompareDesk, Round
from tightfit.serve.compare.settings import Controls, lay_out_settings

VOTE_LABELS = ("1 is better", "2 is better", "Tie", "Both are bad")
MOST_EXAMPLE_CHARACTERS = 90


def lay_out_compare(desk: CompareDesk, examples: Sequence[Example]) -> None:
    """Draw the tab and connect it."""
    import gradio as gr

    played = gr.State(None)
    prompt = gr.Textbox(
        label="Prompt",
        lines=3,
        max_lines=14,
        placeholder="Ask both models the same thing. Ctrl+Enter sends it.",
        elem_id="tf-ask-compare",
        autofocus=True,
    )
    with gr.Row(elem_classes="tf-vote"):
        go = gr.Button("Compare", variant="primary", elem_id="tf-go-compare", scale=3)
        stop = gr.Button("Stop", interactive=False, elem_id="tf-stop-compare")
    controls = _lay_out_examples(desk, examples, prompt)
    with gr.Row(elem_classes="tf-pair"):
        blind = gr.Checkbox(
            label="Blind: hide the names and shuffle the sides until the vote",
            elem_id="tf-blind",
            container=False,
        )
        marked = gr.Checkbox(
            label="Mark what differs", value=True, elem_id="tf-marked", container=False
        )
    left, right = _lay_out_sides(desk)
    verdict = gr.HTML("", apply_default_css=False, elem_id="tf-verdict")
    with gr.Row(elem_classes="tf-vote", elem_id="tf-vote"):
        ballots = [
            gr.Button(label, interactive=False, elem_id=f"tf-vote-{place}")
            for place, label in enumerate(VOTE_LABELS)
        ]
    tally = gr.HTML(desk.tally(), apply_default_css=False, elem_id="tf-tally")
    page = _Page(
        played=played, left=left, right=right, verdict=verdict, tally=tally, go=go, stop=stop,
        ballots=tuple(ballots),
    )  # fmt: skip
    form = _Form(prompt=prompt, controls=controls, blind=blind, marked=marked)
    _connect_round(desk, page, form)
    _connect_votes(desk, page, marked)
    marked.change(
        lambda shown, is_marked: (
            *desk.cards(shown, is_marked=is_marked),
            desk.verdict(shown, is_marked=is_marked),
        ),
        [played, marked],
        [left, right, verdict],
        **QUIET,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """What a visitor fills in."""

    prompt: Any
    controls: Controls
    blind: Any
    marked: Any

    @property
    def all(self) -> set[Any]:
        return {self.prompt, *self.controls.all, self.blind, self.marked}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    """The tab's components that a round changes."""

    played: Any
    left: Any
    right: Any
    verdict: Any
    tally: Any
    go: Any
    stop: Any
    ballots: tuple[Any, ...]

    @property
    def all(self) -> list[Any]:
        shown = [self.played, self.left, self.right, self.verdict, self.tally]
        return [*shown, *self.buttons]

    @property
    def buttons(self) -> list[Any]:
        return [self.go, self.stop, *self.ballots]


def _lay_out_sides(desk: CompareDesk) -> tuple[Any, Any]:
    """Two cards, still empty."""
    import gradio as gr

    with gr.Row(elem_classes="tf-pair", equal_height=True):
        left, right = (
            gr.HTML(
                card,
                elem_classes=["tf-card", colour],
                apply_default_css=False,
                elem_id=place,
                min_width=300,
            )
            for card, colour, place in zip(
                desk.cards(None, is_marked=True),
                ("tf-one", "tf-two"),
                ("tf-left", "tf-right"),
                strict=True,
            )
        )
    return left, right


def _lay_out_examples(desk: CompareDesk, examples: Sequence[Example], prompt: Any) -> Controls:
    """The settings, folded, and the run's own prompts, where it has some."""
    import gradio as gr

    with gr.Accordion("Settings", open=False, elem_id="tf-settings", elem_classes="tf-settings"):
        controls = lay_out_settings(desk.defaults)
    if examples:
        labels = [(_shorten(example.prompt), place) for place, example in enumerate(examples)]
        chosen = gr.Dropdown(
            choices=labels,
            value=None,
            label="Prompts from the run's data",
            elem_id="tf-examples",
            type="value",
        )
        chosen.input(
            lambda place: (
                (gr.skip(), gr.skip())
                if place is None
                else (examples[place].prompt, examples[place].system)
            ),
            chosen,
            [prompt, controls.system],
            **QUIET,
        )
    return controls


def _connect_round(desk: CompareDesk, page: _Page, form: _Form) -> None:
    import gradio as gr

    kept = gr.skip()

    @knows_visitor
    def run(given: dict[Any, Any], request: Any) -> Iterator[list[Any]]:
        try:
            system, settings = form.controls.read(given)
            prompt = given[form.prompt] or ""
            shown = desk.open_round(prompt, system, settings, is_blind=bool(given[form.blind]))
        except UserError as fault:
            yield [kept] * 3 + [render_fault(fault)] + [kept] * (len(page.all) - 4)
            return
        off, on = gr.update(interactive=False), gr.update(interactive=True)
        rest = ["", desk.tally(), off, on, *([off] * len(page.ballots))]
        for grown in desk.play(shown, name_visitor(request)):
            shown = grown
            if not shown.has_ended:
                yield [None, *desk.cards(shown, is_marked=False), *rest]
                rest = [kept] * len(rest)
        is_marked = bool(given[form.marked])
        cards = desk.cards(shown, is_marked=is_marked)
        verdict = desk.verdict(shown, is_marked=is_marked)
        yield [shown, *cards, verdict, desk.tally(), *([kept] * len(page.buttons))]

    def free_buttons(played: Round | None) -> list[Any]:
        can_vote = played is not None and played.can_vote
        are_free = (True, False, *([can_vote] * len(page.ballots)))
        return [gr.update(interactive=is_free) for is_free in are_free]

    @knows_visitor
    def stop(request: Any) -> None:
        desk.models.cancel(name_visitor(request))

    asked = page.go.click(run, form.all, page.all, concurrency_limit=8, **QUIET)
    # Not with the last words: until the round is over, another click would be dropped.
    asked.then(free_buttons, page.played, page.buttons, **QUIET)
    page.stop.click(stop, None, None, concurrency_limit=None, **QUIET)


def _connect_votes(desk: CompareDesk, page: _Page, marked: Any) -> None:
    import gradio as gr

    outputs = [page.played, page.left, page.right, page.tally, *page.ballots]

    def cast_by(button: int) -> Any:
        def cast(shown: Round | None, is_marked: bool) -> list[Any]:
            if shown is None or not shown.can_vote:
                return [gr.skip()] * len(outputs)
            try:
                voted, is_new = desk.cast(shown, button)
            except UserError as fault:
                return [gr.skip()] * 3 + [render_fault(fault)] + [gr.skip()] * len(page.ballots)
            said = "Vote kept. " if is_new else "This pair has had its vote. "
            off = [gr.update(interactive=False)] * len(page.ballots)
            cards = desk.cards(voted, is_marked=is_marked)
            return [voted, *cards, desk.tally(said=said), *off]

        return cast

    for place, ballot in enumerate(page.ballots):
        ballot.click(cast_by(place), [page.played, marked], outputs, **QUIET)


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    if len(line) <= MOST_EXAMPLE_CHARACTERS:
        return line
    return line[: MOST_EXAMPLE_CHARACTERS - 1] + "…"
