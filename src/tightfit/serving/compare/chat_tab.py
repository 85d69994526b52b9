"""The chat tab: a streamed conversation with either model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tightfit.core.errors import InvalidInputError, UserError
from tightfit.core.sampling import Sampling
from tightfit.data.formats import ASSISTANT, SYSTEM, USER, Message
from tightfit.serving.compare.controls import (
    QUIET_EVENT,
    ControlDefaults,
    Controls,
    build_controls,
    make_sampling,
    visitor_id,
    with_request,
)
from tightfit.serving.compare.html import describe_figures, escape_html, render_error
from tightfit.serving.compare.models import ComparedModels, PartialAnswer

PLACES = (0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message, of the visitor or of a model."""

    role: str
    text: str
    name: str = ""
    """Of the model that wrote it."""
    side: PartialAnswer | None = None
    """How the answer came to be, or that it is still coming."""

    @property
    def has_failed(self) -> bool:
        return self.side is not None and self.side.error is not None


Thread = tuple[Turn, ...]


class ChatController:
    """What the tab does, without its looks."""

    def __init__(self, models: ComparedModels, defaults: ControlDefaults) -> None:
        self.models = models
        self.defaults = defaults

    def say(
        self,
        thread: Thread,
        text: str,
        place: int | None,
        *,
        system: str,
        sampling: Sampling,
        visitor: str,
    ) -> Iterator[Thread]:
        """The thread with the answer as it grows. Nothing to say is refused at once."""
        if not text.strip():
            raise InvalidInputError("The message is empty.", remedy="write one")
        if place not in PLACES:
            raise InvalidInputError("No model is chosen.", remedy="choose one above")
        asked = (*thread, Turn(role=USER, text=text))
        messages = make_history(asked, system)
        name = self.models.names[place]
        sides = self.models.stream((place,), messages, sampling, visitor=visitor)
        return (
            (*asked, Turn(role=ASSISTANT, text=side.text, name=name, side=side))
            for (side,) in sides
        )


def make_history(thread: Thread, system: str) -> list[Message]:
    """What the model reads: every question that got an answer, and the last one."""
    history = [Message(SYSTEM, system.strip())] if system.strip() else []
    for turn, answer in zip(thread, (*thread[1:], None), strict=True):
        if turn.role == USER and answer is not None and answer.text:
            history += [Message(USER, turn.text), Message(ASSISTANT, answer.text)]
    return [*history, Message(USER, thread[-1].text)]


def render_thread(thread: Sequence[Turn]) -> str:
    """All turns; only text, whatever the model writes."""
    if not thread:
        inside = '<p class="tf-note">Nothing said yet.</p>'
    else:
        inside = "".join(map(_render_turn, thread))
    return (
        '<div class="tf-thread" role="log" aria-label="Conversation" tabindex="0">'
        f"<div class='tf-turns'>{inside}</div></div>"
    )


def _render_turn(turn: Turn) -> str:
    if turn.role == USER:
        message = '<span class="tf-visually-hidden">You: </span>'
        return f'<div class="tf-turn tf-user">{message}<div>{escape_html(turn.text)}</div></div>'
    side = turn.side
    is_coming = side is not None and not side.has_ended
    cursor = '<span class="tf-cursor"></span>' if is_coming else ""
    error = render_error(side.error) if side is not None and side.error is not None else ""
    figures = describe_figures(side.done) if side is not None and side.done is not None else ""
    return (
        f'<div class="tf-turn" aria-busy="{str(is_coming).lower()}">'
        f"<small>{escape_html(turn.name)}</small><div>{escape_html(turn.text)}{cursor}</div>{error}<small>{escape_html(figures)}</small></div>"
    )


def build_chat_tab(controller: ChatController) -> None:
    """Draw the tab and connect it."""
    import gradio as gr

    kept = gr.State(())
    names = controller.models.names
    model = gr.Radio(
        choices=[(names[place], place) for place in PLACES],
        value=len(PLACES) - 1,
        label="Talk to",
        elem_id="tf-chat-model",
    )
    shown = gr.HTML(render_thread(()), apply_default_css=False, elem_id="tf-thread")
    text = gr.Textbox(
        label="Your message",
        lines=2,
        max_lines=10,
        placeholder="Say something. Ctrl+Enter sends it.",
        elem_id="tf-ask-chat",
    )
    with gr.Row(elem_classes="tf-vote"):
        go = gr.Button("Send", variant="primary", elem_id="tf-go-chat", scale=3)
        stop = gr.Button("Stop", interactive=False, elem_id="tf-stop-chat")
        clear = gr.Button("Start over", elem_id="tf-clear-chat")
    with gr.Accordion("Settings", open=False, elem_classes="tf-settings"):
        controls = build_controls(controller.defaults)
    page = _ChatComponents(
        kept=kept, model=model, shown=shown, text=text, go=go, stop=stop, clear=clear,
        controls=controls,
    )  # fmt: skip
    _connect(controller, page)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChatComponents:
    """The tab's components."""

    kept: Any
    model: Any
    shown: Any
    text: Any
    go: Any
    stop: Any
    clear: Any
    controls: Controls

    @property
    def form(self) -> set[Any]:
        """What a visitor fills in, and the earlier messages."""
        return {self.kept, self.text, self.model, *self.controls.all}

    @property
    def buttons(self) -> list[Any]:
        return [self.go, self.stop, self.clear]


def _connect(controller: ChatController, page: _ChatComponents) -> None:
    import gradio as gr

    off, on, left = gr.update(interactive=False), gr.update(interactive=True), gr.skip()
    as_they_are = [left] * len(page.buttons)

    @with_request
    def run(given: dict[Any, Any], request: Any) -> Iterator[list[Any]]:
        thread, message = given[page.kept], given[page.text] or ""
        try:
            system, settings = page.controls.read(given)
            grown = controller.say(
                thread,
                message,
                given[page.model],
                system=system,
                sampling=make_sampling(settings, controller.defaults.sampling),
                visitor=visitor_id(request),
            )
        except UserError as error:
            yield [left, render_thread(thread) + render_error(error), left, *as_they_are]
            return
        now = thread
        # Emptied once: the visitor may be writing the next message while this one is answered.
        rest = ["", off, on, off]
        for now in grown:
            yield [left, render_thread(now), *rest]
            rest = [left, *as_they_are]
        has_failed = now[-1].has_failed
        remembered = thread if has_failed else _forget_sides(now)
        yield [remembered, render_thread(now), message if has_failed else left, *as_they_are]

    @with_request
    def cancel(request: Any) -> None:
        controller.models.cancel(visitor_id(request))

    outputs = [page.kept, page.shown, page.text, *page.buttons]
    sent = page.go.click(run, page.form, outputs, concurrency_limit=8, **QUIET_EVENT)
    # Not with the last words: until the answer is over, another click would be dropped.
    sent.then(lambda: [on, off, on], None, page.buttons, **QUIET_EVENT)
    page.stop.click(cancel, None, None, concurrency_limit=None, **QUIET_EVENT)
    page.clear.click(lambda: ((), render_thread(())), None, [page.kept, page.shown], **QUIET_EVENT)


def _forget_sides(thread: Thread) -> Thread:
    """Figures of the last answer stay; those of earlier ones would crowd the page."""
    return (*(replace(turn, side=None) for turn in thread[:-1]), thread[-1])
