"""The chat tab: a streamed conversation with either model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tightfit.core.errors import InvalidInputError, UserError
from tightfit.core.sampling import Sampling
from tightfit.data.formats import ASSISTANT, SYSTEM, USER, Message
from tightfit.serving.page.components import (
    QUIET_EVENT,
    build_controls,
    describe_figures,
    escape_html,
    make_cancel,
    render_error,
    visitor_id,
    with_request,
)
from tightfit.serving.page.models import PageModels, PartialAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message, of the visitor or of a model."""

    role: str
    text: str
    name: str = ""
    """Of the model that wrote it."""
    side: PartialAnswer | None = None
    """The answer's state and figures."""

    @property
    def has_failed(self) -> bool:
        return self.side is not None and self.side.error is not None


Thread = tuple[Turn, ...]


def say(
    models: PageModels,
    model: int | None,
    asked: Thread,
    *,
    system: str,
    sampling: Sampling,
    visitor: str,
) -> Iterator[Thread]:
    """The thread, which ends with a question, and its answer as it grows."""
    if not asked[-1].text.strip():
        raise InvalidInputError("The message is empty.", remedy="write one")
    if model is None or model not in range(len(models.names)):
        raise InvalidInputError("No model is loaded.", remedy="load one, above")
    name = models.names[model]
    sides = models.stream((model,), make_history(asked, system), sampling, visitor=visitor)
    return (
        (*asked, Turn(role=ASSISTANT, text=side.text, name=name, side=side)) for (side,) in sides
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
    inside = "".join(map(_render_turn, thread)) or '<p class="tf-note">Nothing said yet.</p>'
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTab:
    """The components that change when other models are loaded."""

    outputs: tuple[Any, ...]
    refresh: Callable[[], list[Any]]


def build_chat_tab(models: PageModels, sampling: Sampling, system: str) -> ChatTab:
    """Draw the tab, with these settings filled in, and connect it."""
    import gradio as gr

    def offered() -> dict[str, Any]:
        names = models.names
        choices = [(name, index) for index, name in enumerate(names)]
        last = len(names) - 1 if names else None
        return {"choices": choices, "value": last, "visible": len(names) > 1}

    kept = gr.State(())
    model = gr.Radio(**offered(), label="Talk to", elem_id="tf-chat-model")
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
        controls = build_controls(sampling, system)
    buttons, kept_buttons = [go, stop, clear], [gr.skip()] * 3
    off, on, left = gr.update(interactive=False), gr.update(interactive=True), gr.skip()

    @with_request
    def run(given: dict[Any, Any], request: Any) -> Iterator[list[Any]]:
        thread, message = given[kept], given[text] or ""
        try:
            system, chosen = controls.read(given, sampling)
            visitor = visitor_id(request)
            asked = (*thread, Turn(role=USER, text=message))
            grown = say(
                models, given[model], asked, system=system, sampling=chosen, visitor=visitor
            )
        except UserError as error:
            yield [left, render_thread(thread) + render_error(error), left, *kept_buttons]
            return
        now = thread
        # Emptied once: the visitor may be writing the next message while this one is answered.
        rest = ["", off, on, off]
        for now in grown:
            yield [left, render_thread(now), *rest]
            rest = [left, *kept_buttons]
        if now[-1].has_failed:
            yield [thread, render_thread(now), message, *kept_buttons]
            return
        # Figures of the last answer stay; those of earlier ones would crowd the page.
        remembered = (*(replace(turn, side=None) for turn in now[:-1]), now[-1])
        yield [remembered, render_thread(now), left, *kept_buttons]

    sent = go.click(
        run,
        {kept, text, model, *controls},
        [kept, shown, text, *buttons],
        concurrency_limit=8,
        **QUIET_EVENT,
    )
    # Not with the last words: until the answer is over, another click would be dropped.
    sent.then(lambda: [on, off, on], None, buttons, **QUIET_EVENT)
    stop.click(make_cancel(models), None, None, concurrency_limit=None, **QUIET_EVENT)
    clear.click(lambda: ((), render_thread(())), None, [kept, shown], **QUIET_EVENT)
    return ChatTab(
        outputs=(model, kept, shown),
        refresh=lambda: [gr.update(**offered()), (), render_thread(())],
    )
