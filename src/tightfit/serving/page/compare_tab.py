"""The compare tab: example prompts, one round with two answers, and the vote."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote

from tightfit.core.errors import InvalidInputError, UserError
from tightfit.core.sampling import Sampling
from tightfit.core.strategy import DataSource
from tightfit.data.formats import ASSISTANT, SYSTEM, USER
from tightfit.data.sources import open_source, read_source
from tightfit.runs.run_folder import RunFolder
from tightfit.serving.page.components import (
    QUIET_EVENT,
    Difference,
    DiffPiece,
    build_controls,
    find_difference,
    make_cancel,
    render_card,
    render_error,
    render_note,
    render_vote_counts,
    visitor_id,
    with_request,
)
from tightfit.serving.page.models import PageModels, PartialAnswer, make_messages
from tightfit.serving.page.votes import Vote, VoteChoice, VoteFile, VoteSettings

NUM_EXAMPLES = 12
MAX_PROMPT_CHARACTERS = 4000
"""A longer prompt is no example to look at."""


class ExamplePrompt(NamedTuple):
    """One question of the data."""

    prompt: str
    system: str = ""


def read_examples(run: RunFolder | None) -> tuple[ExamplePrompt, ...]:
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
        found = tuple(dict.fromkeys(itertools.islice(_read_source_examples(source), NUM_EXAMPLES)))
        if found:
            return found
    return ()


def _read_source_examples(source: DataSource) -> Iterator[ExamplePrompt]:
    try:
        for row, row_format in read_source(open_source(source)):
            if row_format.name == "text":
                return
            messages = row_format.to_messages(row)
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
    """One prompt and its two answers. Lives on the server; only cards reach the browser."""

    id: str
    prompt: str
    system: str
    sampling: Sampling
    names: tuple[str, ...]
    """Of the models; others may have been loaded since."""
    order: tuple[int, int]
    """Which model is on the left and which on the right."""
    is_blind: bool
    sides: tuple[PartialAnswer, PartialAnswer] = (PartialAnswer(), PartialAnswer())
    """Left and right."""
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


class CompareController:
    """What the tab does, without its looks."""

    def __init__(self, models: PageModels, votes: VoteFile) -> None:
        self.models = models
        self.votes = votes

    def open_round(self, prompt: str, system: str, sampling: Sampling, *, is_blind: bool) -> Round:
        if len(self.models.names) < 2:
            raise InvalidInputError("Two models are needed.", remedy="load A and B, above")
        if not prompt.strip():
            raise InvalidInputError("The prompt is empty.", remedy="write one, or take an example")
        is_swapped = is_blind and secrets.randbelow(2) == 1
        return Round(
            id=secrets.token_hex(8),
            prompt=prompt,
            system=system.strip(),
            sampling=sampling,
            names=self.models.names,
            order=(1, 0) if is_swapped else (0, 1),
            is_blind=is_blind,
        )

    def play(self, opened: Round, visitor: str) -> Iterator[Round]:
        """The round as its answers grow."""
        messages = make_messages(opened.system, opened.prompt)
        sides = self.models.stream(opened.order, messages, opened.sampling, visitor=visitor)
        for left, right in sides:
            yield replace(opened, sides=(left, right))

    def cast(self, played: Round, button: int) -> tuple[Round, bool]:
        """Count a vote, given by the button's number; False where it had been counted before."""
        by_model = dict(zip(played.order, played.sides, strict=True))
        of_models = [(VoteChoice.A, VoteChoice.B)[model] for model in played.order]
        choice = (*of_models, VoteChoice.TIE, VoteChoice.BOTH_BAD)[button]
        settings = {name: getattr(played.sampling, name) for name in VoteSettings.model_fields}
        vote = Vote(
            id=played.id,
            time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            prompt=played.prompt,
            system=played.system,
            settings=VoteSettings(**settings),
            name_a=played.names[0],
            name_b=played.names[1],
            answer_a=by_model[0].text,
            answer_b=by_model[1].text,
            vote=choice,
            blind=played.is_blind,
            left="a" if played.order[0] == 0 else "b",
        )
        return replace(played, is_voted=True), self.votes.cast(vote)

    def render(self, shown: Round | None, *, is_marked: bool) -> tuple[str, str, str]:
        """Both cards as markup, and one line on how much the answers have in common."""
        found = shown.difference if shown is not None and is_marked else None
        verdict = ""
        if shown is not None and found is not None:
            verdict = "Both answers are the same."
            if shown.sides[0].text != shown.sides[1].text:
                shared = f"{found.shared_fraction:.0%} of the words are in both answers"
                verdict = f"{shared}; the rest is marked."
                if found.shared_fraction < MIN_SHARED_FRACTION:
                    verdict = f"Only {shared}; to mark all the rest would show nothing."
                    found = None
            verdict = render_note(verdict)
        pieces = (None, None) if found is None else (found.left, found.right)
        return self._card(shown, 0, pieces[0]), self._card(shown, 1, pieces[1]), verdict

    def tally(self, *, message: str = "") -> str:
        names, path = self.models.names, self.votes.path
        if len(names) < 2:
            return ""
        export = f"gradio_api/file={quote(str(path.resolve()))}" if path.exists() else None
        counted = self.votes.count(names[0], names[1])
        return render_vote_counts(counted, names, message=message, export=export)

    def _card(self, shown: Round | None, index: int, pieces: tuple[DiffPiece, ...] | None) -> str:
        model = index if shown is None else shown.order[index]
        is_hidden = shown is not None and shown.is_blind and not shown.is_voted
        names = self.models.names if shown is None else shown.names
        name = names[model] if model < len(names) else "no model yet"
        return render_card(
            index + 1,
            None if is_hidden else name,
            self.models.info(model),
            None if shown is None else shown.sides[index],
            pieces,
        )


# The components of the tab, and their events.

VOTE_LABELS = ("1 is better", "2 is better", "Tie", "Both are bad")
MAX_LABEL_CHARACTERS = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareTab:
    """The components that change when other models are loaded."""

    outputs: tuple[Any, ...]
    refresh: Callable[[], list[Any]]


def build_compare_tab(
    controller: CompareController,
    examples: Sequence[ExamplePrompt],
    sampling: Sampling,
    system: str,
) -> CompareTab:
    """Draw the tab, with these settings filled in, and connect it."""
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
    with gr.Accordion("Settings", open=False, elem_id="tf-settings", elem_classes="tf-settings"):
        controls = build_controls(sampling, system)
    _build_examples(examples, prompt, controls.system)
    with gr.Row(elem_classes="tf-pair"):
        blind = gr.Checkbox(
            label="Blind: hide the names and shuffle the sides until the vote",
            elem_id="tf-blind",
            container=False,
        )
        marked = gr.Checkbox(
            label="Mark what differs", value=True, elem_id="tf-marked", container=False
        )
    empty = controller.render(None, is_marked=True)
    with gr.Row(elem_classes="tf-pair", equal_height=True):
        left, right = (
            gr.HTML(
                card,
                elem_classes=["tf-card", colour],
                apply_default_css=False,
                elem_id=elem_id,
                min_width=300,
            )
            for card, colour, elem_id in (
                (empty[0], "tf-one", "tf-left"),
                (empty[1], "tf-two", "tf-right"),
            )
        )
    shown = [left, right, gr.HTML("", apply_default_css=False, elem_id="tf-verdict")]
    with gr.Row(elem_classes="tf-vote", elem_id="tf-vote"):
        ballots = [
            gr.Button(label, interactive=False, elem_id=f"tf-vote-{number}")
            for number, label in enumerate(VOTE_LABELS)
        ]
    tally = gr.HTML(controller.tally(), apply_default_css=False, elem_id="tf-tally")
    buttons = [go, stop, *ballots]
    kept, off, on = gr.skip(), gr.update(interactive=False), gr.update(interactive=True)
    kept_buttons = [kept] * len(buttons)

    @with_request
    def run(given: dict[Any, Any], request: Any) -> Iterator[list[Any]]:
        try:
            system, chosen = controls.read(given, sampling)
            opened = controller.open_round(
                given[prompt] or "", system, chosen, is_blind=bool(given[blind])
            )
        except UserError as error:
            yield [kept, kept, kept, render_error(error), kept, *kept_buttons]
            return
        rest = ["", controller.tally(), off, on, *([off] * len(ballots))]
        now = opened
        for now in controller.play(opened, visitor_id(request)):
            if not now.has_ended:
                yield [None, *controller.render(now, is_marked=False)[:2], *rest]
                rest = [kept] * len(rest)
        cards = controller.render(now, is_marked=bool(given[marked]))
        yield [now, *cards, controller.tally(), *kept_buttons]

    def free_buttons(now: Round | None) -> list[Any]:
        can_vote = now is not None and now.can_vote
        return [on, off, *([on if can_vote else off] * len(ballots))]

    def cast(button: int, now: Round | None, is_marked: bool) -> list[Any]:
        if now is None or not now.can_vote:
            return [kept] * (5 + len(ballots))
        try:
            voted, is_new = controller.cast(now, button)
        except UserError as error:
            return [kept] * 4 + [render_error(error)] + [kept] * len(ballots)
        message = "Vote kept. " if is_new else "This pair has had its vote. "
        cards = controller.render(voted, is_marked=is_marked)
        return [voted, *cards, controller.tally(message=message), *([off] * len(ballots))]

    asked = go.click(
        run,
        {prompt, *controls, blind, marked},
        [played, *shown, tally, *buttons],
        concurrency_limit=8,
        **QUIET_EVENT,
    )
    # Not with the last words: until the round is over, another click would be dropped.
    asked.then(free_buttons, played, buttons, **QUIET_EVENT)
    stop.click(make_cancel(controller.models), None, None, concurrency_limit=None, **QUIET_EVENT)
    for number, ballot in enumerate(ballots):
        ballot.click(
            partial(cast, number), [played, marked], [played, *shown, tally, *ballots],
            **QUIET_EVENT,
        )  # fmt: skip
    marked.change(
        lambda now, is_marked: controller.render(now, is_marked=is_marked),
        [played, marked],
        shown,
        **QUIET_EVENT,
    )
    return CompareTab(
        outputs=(played, *shown, tally),
        refresh=lambda: [None, *controller.render(None, is_marked=True), controller.tally()],
    )


def _build_examples(examples: Sequence[ExamplePrompt], prompt: Any, system: Any) -> None:
    """The run's own prompts, where it has some."""
    import gradio as gr

    if not examples:
        return
    labels = [" ".join(example.prompt.split()) for example in examples]
    most = MAX_LABEL_CHARACTERS
    chosen = gr.Dropdown(
        choices=[
            (label if len(label) <= most else f"{label[: most - 1]}…", number)
            for number, label in enumerate(labels)
        ],
        value=None,
        label="Prompts from the run's data",
        elem_id="tf-examples",
        type="value",
    )
    chosen.input(
        lambda number: (gr.skip(), gr.skip()) if number is None else tuple(examples[number]),
        chosen,
        [prompt, system],
        **QUIET_EVENT,
    )
