"""The compare tab: example prompts, one round with two answers, and the vote."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from tightfit.core.errors import InvalidInputError, UserError
from tightfit.core.training import DataSource
from tightfit.data.formats import ASSISTANT, SYSTEM, USER, to_messages
from tightfit.data.sources import open_source, read_source
from tightfit.data.streams import ReadMeter
from tightfit.runs.run_folder import RunFolder
from tightfit.serving.compare.controls import (
    QUIET_EVENT,
    ControlDefaults,
    Controls,
    build_controls,
    make_sampling,
    visitor_id,
    with_request,
)
from tightfit.serving.compare.html import (
    AnswerCard,
    Difference,
    DiffPiece,
    find_difference,
    render_card,
    render_error,
    render_note,
    render_vote_counts,
)
from tightfit.serving.compare.models import ComparedModels, PartialAnswer, make_messages
from tightfit.serving.compare.votes import Vote, VoteChoice, VoteFile, VoteSettings, utc_now_text

NUM_EXAMPLES = 12
MAX_PROMPT_CHARACTERS = 4000
"""A longer prompt is no example to look at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExamplePrompt:
    """One question of the data."""

    prompt: str
    system: str = ""


def read_examples(run: RunFolder | None, *, most: int = NUM_EXAMPLES) -> tuple[ExamplePrompt, ...]:
    """The first questions of the run's data, held-out rows first; none where it cannot be read.

    The data may long be gone from where the run read it, and the page does without.
    """
    if run is None:
        return ()
    try:
        training = run.read_plan().training
    except UserError:
        return ()
    sources = training.data if training is not None else ()
    for source in sorted(sources, key=lambda found: found.split != "eval"):
        found = tuple(dict.fromkeys(itertools.islice(_read_source_examples(source), most)))
        if found:
            return found
    return ()


def _read_source_examples(source: DataSource) -> Iterator[ExamplePrompt]:
    try:
        for row, row_format in read_source(open_source(source), ReadMeter()):
            if row_format.name == "text":
                return
            messages = to_messages(row, row_format)
            before = list(itertools.takewhile(lambda message: message.role != ASSISTANT, messages))
            asked = "\n\n".join(message.content for message in before if message.role == USER)
            if asked.strip() and len(asked) <= MAX_PROMPT_CHARACTERS:
                system = "\n\n".join(
                    message.content for message in before if message.role == SYSTEM
                )
                yield ExamplePrompt(prompt=asked, system=system)
    except (UserError, OSError):
        return


# One round: a prompt, two answers, their difference, and the vote.

MIN_SHARED_FRACTION = 0.1
"""Of the words: answers with less in common are different throughout, and marks say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One prompt and what became of it. Lives on the server; only cards reach the browser."""

    id: str
    prompt: str
    system: str
    settings: VoteSettings
    order: tuple[int, int]
    """Which model stands on the left and which on the right."""
    is_blind: bool
    sides: tuple[PartialAnswer, PartialAnswer] = (PartialAnswer(), PartialAnswer())
    """By place on the page."""
    is_voted: bool = False

    @property
    def has_ended(self) -> bool:
        return all(side.has_ended for side in self.sides)

    @property
    def can_vote(self) -> bool:
        return not self.is_voted and all(side.done is not None for side in self.sides)

    @property
    def difference(self) -> Difference | None:
        """Once both answers are there."""
        if any(side.done is None for side in self.sides):
            return None
        return find_difference(self.sides[0].text, self.sides[1].text)

    @property
    def are_names_hidden(self) -> bool:
        return self.is_blind and not self.is_voted


class CompareController:
    """What the tab does, without its looks."""

    def __init__(self, models: ComparedModels, votes: VoteFile, defaults: ControlDefaults) -> None:
        self.models = models
        self.votes = votes
        self.defaults = defaults

    def open_round(
        self, prompt: str, system: str, settings: VoteSettings, *, is_blind: bool
    ) -> Round:
        if not prompt.strip():
            raise InvalidInputError("The prompt is empty.", remedy="write one, or take an example")
        is_swapped = is_blind and secrets.randbelow(2) == 1
        return Round(
            id=secrets.token_hex(8),
            prompt=prompt,
            system=system.strip(),
            settings=settings,
            order=(1, 0) if is_swapped else (0, 1),
            is_blind=is_blind,
        )

    def play(self, opened: Round, visitor: str) -> Iterator[Round]:
        """The round as its answers grow."""
        sampling = make_sampling(opened.settings, self.defaults.sampling)
        messages = make_messages(opened.system, opened.prompt)
        for left, right in self.models.stream(opened.order, messages, sampling, visitor=visitor):
            yield replace(opened, sides=(left, right))

    def cast(self, played: Round, button: int) -> tuple[Round, bool]:
        """Count a vote, given by the button's place; False where it had been counted before."""
        by_model = {model: played.sides[place] for place, model in enumerate(played.order)}
        if button < len(played.order):
            choice = (VoteChoice.A, VoteChoice.B)[played.order[button]]
        else:
            choice = (VoteChoice.TIE, VoteChoice.BOTH_BAD)[button - len(played.order)]
        vote = Vote(
            id=played.id,
            time=utc_now_text(),
            prompt=played.prompt,
            system=played.system,
            settings=played.settings,
            name_a=self.models.names[0],
            name_b=self.models.names[1],
            answer_a=by_model[0].text,
            answer_b=by_model[1].text,
            vote=choice,
            blind=played.is_blind,
            left="a" if played.order[0] == 0 else "b",
        )
        return replace(played, is_voted=True), self.votes.cast(vote)

    def cards(self, shown: Round | None, *, is_marked: bool) -> tuple[str, str]:
        """Both sides as markup."""
        found = shown.difference if shown is not None and is_marked else None
        is_worth_it = found is not None and found.shared_fraction >= MIN_SHARED_FRACTION
        pieces = (found.left, found.right) if found is not None and is_worth_it else (None, None)
        return self._card(shown, 0, pieces[0]), self._card(shown, 1, pieces[1])

    def verdict(self, shown: Round | None, *, is_marked: bool) -> str:
        """One line on how much the answers have in common."""
        found = shown.difference if shown is not None and is_marked else None
        if shown is None or found is None:
            return ""
        if shown.sides[0].text == shown.sides[1].text:
            return render_note("Both answers are the same.")
        shared = f"{found.shared_fraction:.0%} of the words are in both answers"
        if found.shared_fraction < MIN_SHARED_FRACTION:
            return render_note(f"Only {shared}; to mark all the rest would show nothing.")
        return render_note(f"{shared}; the rest is marked.")

    def tally(self, *, message: str = "") -> str:
        names, path = self.models.names, self.votes.path
        export = f"gradio_api/file={quote(str(path.resolve()))}" if path.exists() else None
        counted = self.votes.count(names[0], names[1])
        return render_vote_counts(counted, names, message=message, export=export)

    def _card(self, shown: Round | None, place: int, pieces: tuple[DiffPiece, ...] | None) -> str:
        if shown is None:
            card = AnswerCard(
                number=place + 1, name=self.models.names[place], info=self.models.info(place)
            )
            return render_card(card)
        model, is_hidden = shown.order[place], shown.are_names_hidden
        card = AnswerCard(
            number=place + 1,
            name=None if is_hidden else self.models.names[model],
            info=self.models.info(model),
            side=shown.sides[place],
            pieces=pieces,
            are_figures_shown=not is_hidden,
        )
        return render_card(card)


# The components of the tab, and their events.

VOTE_LABELS = ("1 is better", "2 is better", "Tie", "Both are bad")
MAX_LABEL_CHARACTERS = 90


def build_compare_tab(controller: CompareController, examples: Sequence[ExamplePrompt]) -> None:
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
    controls = _build_examples(controller, examples, prompt)
    with gr.Row(elem_classes="tf-pair"):
        blind = gr.Checkbox(
            label="Blind: hide the names and shuffle the sides until the vote",
            elem_id="tf-blind",
            container=False,
        )
        marked = gr.Checkbox(
            label="Mark what differs", value=True, elem_id="tf-marked", container=False
        )
    left, right = _build_sides(controller)
    verdict = gr.HTML("", apply_default_css=False, elem_id="tf-verdict")
    with gr.Row(elem_classes="tf-vote", elem_id="tf-vote"):
        ballots = [
            gr.Button(label, interactive=False, elem_id=f"tf-vote-{place}")
            for place, label in enumerate(VOTE_LABELS)
        ]
    tally = gr.HTML(controller.tally(), apply_default_css=False, elem_id="tf-tally")
    page = _CompareComponents(
        played=played, left=left, right=right, verdict=verdict, tally=tally, go=go, stop=stop,
        ballots=tuple(ballots),
    )  # fmt: skip
    form = _Form(prompt=prompt, controls=controls, blind=blind, marked=marked)
    _connect_round(controller, page, form)
    _connect_votes(controller, page, marked)
    marked.change(
        lambda shown, is_marked: (
            *controller.cards(shown, is_marked=is_marked),
            controller.verdict(shown, is_marked=is_marked),
        ),
        [played, marked],
        [left, right, verdict],
        **QUIET_EVENT,
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
class _CompareComponents:
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


def _build_sides(controller: CompareController) -> tuple[Any, Any]:
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
                controller.cards(None, is_marked=True),
                ("tf-one", "tf-two"),
                ("tf-left", "tf-right"),
                strict=True,
            )
        )
    return left, right


def _build_examples(
    controller: CompareController, examples: Sequence[ExamplePrompt], prompt: Any
) -> Controls:
    """The settings, folded, and the run's own prompts, where it has some."""
    import gradio as gr

    with gr.Accordion("Settings", open=False, elem_id="tf-settings", elem_classes="tf-settings"):
        controls = build_controls(controller.defaults)
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
            **QUIET_EVENT,
        )
    return controls


def _connect_round(controller: CompareController, page: _CompareComponents, form: _Form) -> None:
    import gradio as gr

    kept = gr.skip()

    @with_request
    def run(given: dict[Any, Any], request: Any) -> Iterator[list[Any]]:
        try:
            system, settings = form.controls.read(given)
            prompt = given[form.prompt] or ""
            shown = controller.open_round(
                prompt, system, settings, is_blind=bool(given[form.blind])
            )
        except UserError as error:
            yield [kept] * 3 + [render_error(error)] + [kept] * (len(page.all) - 4)
            return
        off, on = gr.update(interactive=False), gr.update(interactive=True)
        rest = ["", controller.tally(), off, on, *([off] * len(page.ballots))]
        for grown in controller.play(shown, visitor_id(request)):
            shown = grown
            if not shown.has_ended:
                yield [None, *controller.cards(shown, is_marked=False), *rest]
                rest = [kept] * len(rest)
        is_marked = bool(given[form.marked])
        cards = controller.cards(shown, is_marked=is_marked)
        verdict = controller.verdict(shown, is_marked=is_marked)
        yield [shown, *cards, verdict, controller.tally(), *([kept] * len(page.buttons))]

    def free_buttons(played: Round | None) -> list[Any]:
        can_vote = played is not None and played.can_vote
        are_free = (True, False, *([can_vote] * len(page.ballots)))
        return [gr.update(interactive=is_free) for is_free in are_free]

    @with_request
    def stop(request: Any) -> None:
        controller.models.cancel(visitor_id(request))

    asked = page.go.click(run, form.all, page.all, concurrency_limit=8, **QUIET_EVENT)
    # Not with the last words: until the round is over, another click would be dropped.
    asked.then(free_buttons, page.played, page.buttons, **QUIET_EVENT)
    page.stop.click(stop, None, None, concurrency_limit=None, **QUIET_EVENT)


def _connect_votes(controller: CompareController, page: _CompareComponents, marked: Any) -> None:
    import gradio as gr

    outputs = [page.played, page.left, page.right, page.tally, *page.ballots]

    def cast_by(button: int) -> Any:
        def cast(shown: Round | None, is_marked: bool) -> list[Any]:
            if shown is None or not shown.can_vote:
                return [gr.skip()] * len(outputs)
            try:
                voted, is_new = controller.cast(shown, button)
            except UserError as error:
                return [gr.skip()] * 3 + [render_error(error)] + [gr.skip()] * len(page.ballots)
            message = "Vote kept. " if is_new else "This pair has had its vote. "
            off = [gr.update(interactive=False)] * len(page.ballots)
            cards = controller.cards(voted, is_marked=is_marked)
            return [voted, *cards, controller.tally(message=message), *off]

        return cast

    for place, ballot in enumerate(page.ballots):
        ballot.click(cast_by(place), [page.played, marked], outputs, **QUIET_EVENT)


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    if len(line) <= MAX_LABEL_CHARACTERS:
        return line
    return line[: MAX_LABEL_CHARACTERS - 1] + "…"
