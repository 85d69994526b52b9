"""Which template turns messages into text: the tokenizer's own, a named one, or a user's file."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from tightfit.core.errors import InvalidInputError, NotFoundError
from tightfit.core.suggest import did_you_mean
from tightfit.data.tokenizer import ChatTokenizer

DEFAULT_FOR_BASE_MODELS = "plain"
"""Adds no words, so a base model needs to learn no new marks."""
_PACKAGE = "tightfit.catalogue"
_FOLDER = "templates"
_ENDING = ".jinja"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A Jinja template and where it came from."""

    name: str
    """`tokenizer`, a name of ours, or a file: as reports say it."""
    text: str
    """Complete: saved as `chat_template.jinja`, it renders the same in any tool."""
    note: str | None = None


def list_templates() -> list[str]:
    """Names of the templates that come with tightfit."""
    entries = files(_PACKAGE).joinpath(_FOLDER).iterdir()
    return sorted(
        entry.name.removesuffix(_ENDING) for entry in entries if entry.name.endswith(_ENDING)
    )


def choose_template(wanted: str | None, tokenizer: ChatTokenizer) -> ChatTemplate:
    """The template asked for; unasked the tokenizer's own; for a base model without one `plain`."""
    own = tokenizer.chat_templates
    if wanted is None or (wanted == "tokenizer" and own):
        if own:
            name = "default" if "default" in own else next(iter(own))
            return ChatTemplate(name="tokenizer", text=own[name])
        note = (
            f"The tokenizer has no chat template; `{DEFAULT_FOR_BASE_MODELS}` is used. "
            f"Others: {', '.join(list_templates())}, or a Jinja file."
        )
        text = _named(DEFAULT_FOR_BASE_MODELS, tokenizer)
        return ChatTemplate(name=DEFAULT_FOR_BASE_MODELS, text=text, note=note)
    if wanted in list_templates():
        return ChatTemplate(name=wanted, text=_named(wanted, tokenizer))
    if wanted in own:
        return ChatTemplate(name=f"tokenizer ({wanted})", text=own[wanted])
    return ChatTemplate(name=wanted, text=_own_file(wanted))


def _named(name: str, tokenizer: ChatTokenizer) -> str:
    """A template of ours, with marks that the model lacks set to nothing.

    Ours write BOS first. A model whose tokenizer puts no BOS before a text was
    not trained to see one, whatever its config calls BOS.
    """
    text = files(_PACKAGE).joinpath(_FOLDER).joinpath(name + _ENDING).read_text(encoding="utf-8")
    bos = tokenizer.names.get("bos_token")
    unset = "" if bos and tokenizer.begins_with == bos else "{%- set bos_token = '' -%}\n"
    if "eos_token" not in tokenizer.names:
        unset += "{%- set eos_token = '' -%}\n"
    return unset + text


def _own_file(wanted: str) -> str:
    path = Path(wanted).expanduser()
    known = list_templates()
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError) as fault:
        raise NotFoundError(
            f"There is no template `{wanted}`, neither by that name nor as a file."
            f"{did_you_mean(wanted, known)}",
            remedy=f"name one of {', '.join(known)}, or a Jinja file",
        ) from fault
    except (OSError, ValueError) as fault:
        raise InvalidInputError(
            f"The template {wanted} cannot be read: {fault}.",
            remedy="name a readable Jinja file in UTF-8",
        ) from fault
