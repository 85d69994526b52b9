"""The form that loads models: the chat and the compare tab have one each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tightfit.core.errors import UserError
from tightfit.engines.protocol import Engine
from tightfit.serving.page.components import (
    QUIET_EVENT,
    build_line,
    escape_html,
    render_error,
    render_note,
)
from tightfit.serving.page.models import PageModels

OpenModels = Callable[[Sequence[str]], Mapping[str, Callable[[], Engine]]]
"""From paths to what loads each, by the name that the page shows. Raises UserError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelForm:
    """The components of one form."""

    fields: tuple[Any, Any]
    go: Any
    note: Any


def build_model_form(models: PageModels, tab: str, *, can_choose: bool) -> ModelForm:
    """Draw it where it is called. Without `can_choose` it only says what is loaded."""
    import gradio as gr

    with gr.Row(elem_classes="tf-models", elem_id=f"tf-ask-models-{tab}", visible=can_choose):
        first = build_line("Model A", "", "", hint="a run, an adapter, a folder, a GGUF file")
        second = build_line("Model B", "", "", hint="to stand beside it")
        go = gr.Button("Load", elem_id=f"tf-go-models-{tab}", scale=0, min_width=90)
    note = gr.HTML(describe_models(models), apply_default_css=False, elem_id=f"tf-loaded-{tab}")
    return ModelForm(fields=(first, second), go=go, note=note)


def describe_models(models: PageModels) -> str:
    """What is loaded."""
    if not models.names:
        return render_note("No model is loaded; nothing else on this page needs one.")
    named = " and ".join(f"<b>{escape_html(name)}</b>" for name in models.names)
    return f'<p class="tf-note">Loaded: {named}</p>'


def connect_model_form(
    form: ModelForm,
    models: PageModels,
    open_models: OpenModels,
    outputs: Sequence[Any],
    refresh: Callable[[], list[Any]],
) -> None:
    """Load on a click, then fill in `outputs`; what goes wrong is said under the form."""
    import gradio as gr

    def load(first: str, second: str) -> Iterator[list[Any]]:
        skipped = [gr.skip()] * len(outputs)
        named = [name.strip() for name in (first, second) if name and name.strip()]
        if not named:
            yield [render_note("Name a model to load."), *skipped]
            return
        yield [render_note(f"Loading {' and '.join(named)} ..."), *skipped]
        try:
            models.choose(open_models(named))
        except UserError as error:
            yield [render_error(error), *refresh()]
            return
        yield [describe_models(models), *refresh()]

    gr.on([form.go.click, *(field.submit for field in form.fields)], load, [*form.fields],
          [form.note, *outputs], concurrency_limit=1, **QUIET_EVENT)  # fmt: skip
