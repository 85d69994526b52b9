"""Sampling controls of the compare page, and how Gradio events are connected."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tightfit.core.errors import InvalidInputError
from tightfit.core.sampling import MAX_SEED, SAMPLING_OPTIONS, Sampling
from tightfit.serving.compare.votes import VoteSettings

Handler = TypeVar("Handler", bound=Callable[..., Any])

QUIET_EVENT: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
"""No veil over text that is being read, and no entry in a public list of endpoints."""
BUSY_EVENT: dict[str, Any] = {"api_visibility": "private", "show_progress": "minimal"}
"""The same, for what takes a second and shows nothing meanwhile."""


def with_request(handler: Handler) -> Handler:
    """Have the argument `request` filled in.

    Gradio goes by the annotation, and cannot resolve one that names a library which is
    imported inside a function.
    """
    import gradio as gr

    handler.__annotations__ = {"request": gr.Request}
    return handler


def visitor_id(request: Any) -> str:
    """One open tab of one browser."""
    return str(request.session_hash or "")


LABELS = {"temperature": "Temperature", "top_p": "Top-p", "max_new_tokens": "Longest answer"}
SLIDER_MAX_TEMPERATURE = 2.0
"""Where the slider ends, unless the command line asked for more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlDefaults:
    """What the controls show first."""

    system: str = ""
    sampling: Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Controls:
    """The settings' components."""

    system: Any
    temperature: Any
    top_p: Any
    max_new_tokens: Any
    seed: Any

    @property
    def all(self) -> tuple[Any, ...]:
        return (self.system, self.temperature, self.top_p, self.max_new_tokens, self.seed)

    def read(self, given: Mapping[Any, Any]) -> tuple[str, VoteSettings]:
        """The system prompt and the rest, from all that a form sent."""
        settings = read_settings(
            given[self.temperature],
            given[self.top_p],
            given[self.max_new_tokens],
            given[self.seed],
        )
        return given[self.system] or "", settings


def build_controls(defaults: ControlDefaults) -> Controls:
    """Draw the controls where they are called."""
    import gradio as gr

    sampling = defaults.sampling
    system = gr.Textbox(
        label="System prompt",
        value=defaults.system,
        lines=2,
        max_lines=8,
        placeholder="None",
    )
    with gr.Row():
        temperature = gr.Slider(
            0.0,
            max(SLIDER_MAX_TEMPERATURE, sampling.temperature),
            value=sampling.temperature,
            step=0.05,
            label=LABELS["temperature"],
            info="0: always the likeliest token",
            min_width=220,
        )
        top_p = gr.Slider(
            min(0.05, sampling.top_p),
            1.0,
            value=sampling.top_p,
            step=0.05,
            label=LABELS["top_p"],
            info="Only the likeliest tokens with this share",
            min_width=220,
        )
    with gr.Row():
        most = gr.Number(
            value=sampling.max_new_tokens,
            precision=0,
            minimum=1,
            maximum=int(SAMPLING_OPTIONS["max_new_tokens"].most),
            label=LABELS["max_new_tokens"],
            min_width=160,
        )
        # A number field would turn an empty value into 0.
        seed = gr.Textbox(
            value="" if sampling.seed is None else str(sampling.seed),
            label="Seed",
            placeholder="A new one each time",
            max_lines=1,
            min_width=160,
        )
    return Controls(
        system=system, temperature=temperature, top_p=top_p, max_new_tokens=most, seed=seed
    )


def read_settings(
    temperature: float | None, top_p: float | None, most: float | None, seed: str | None
) -> VoteSettings:
    """What a visitor set, checked again here: a request need not come from our page."""
    return VoteSettings(
        temperature=_within("temperature", temperature),
        top_p=_within("top_p", top_p),
        max_new_tokens=int(_within("max_new_tokens", most)),
        seed=_read_seed((seed or "").strip()),
    )


def make_sampling(settings: VoteSettings, defaults: Sampling) -> Sampling:
    """The same for both models; what the page does not show comes from the command line."""
    return replace(
        defaults,
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        seed=settings.seed,
    )


def _read_seed(text: str) -> int:
    """The same for both models; drawn where none is given, so that a vote can be repeated."""
    if not text:
        return secrets.randbelow(MAX_SEED + 1)
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= MAX_SEED):
        raise InvalidInputError(
            f"`{text[:20]}` is not a seed.", remedy=f"give a whole number up to {MAX_SEED:,}"
        )
    return int(text)


def _within(name: str, value: float | None) -> float:
    least, most = SAMPLING_OPTIONS[name].least, SAMPLING_OPTIONS[name].most
    if value is None or not math.isfinite(value) or not least <= value <= most:
        given = "empty" if value is None else f"{value:g}"
        raise InvalidInputError(
            f"{LABELS[name]} is {given}.", remedy=f"give a number from {least:g} to {most:g}"
        )
    return value
