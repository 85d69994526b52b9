"""Comparison of templates, tokenizers, special tokens and stop tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightfit.data.formats import Message
from tightfit.data.templates import TemplateRenderError
from tightfit.engines.protocol import Engine
from tightfit.export.verify.verdict import Finding, Level
from tightfit.models.gguf import read_gguf_header
from tightfit.runtime.artefacts import Artefact, ArtefactKind

CONVERSATIONS: tuple[tuple[Message, ...], ...] = (
    (Message("user", "What is 17 + 25?"),),
    (Message("system", "You are terse."), Message("user", "Name a colour.")),
    (
        Message("user", "Hello!"),
        Message("assistant", "Hello. What do you need?"),
        Message("user", "A rhyme,\nplease."),
    ),
)
TRICKY_TEXT = (
    "  Leading spaces,\ttabs\t\tand\n\n\nnewlines; it's we'll DON'T 1234567890 3.14 1e-9 "
    "snake_case camelCase HTTPServer x+=1; a[i]->b {'k': [1, 2]} <tag attr=\"v\"/> #!/bin/sh\r\n"
    "naïve café Straße Ελληνικά Привет 你好世界 こんにちは 한국어 العربية עברית हिन्दी 🙂👩‍🚀 ¼ № ™ "
    "https://example.org/a?b=c&d=%20 --- ... !!! ??? \\n \\t 0x1F $100.00 @user `code` ~/.profile "
)
"""Text on which tokenizers differ."""
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")
_MUST_MATCH = ("bos_token", "eos_token")
_SHOWN = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFacts:
    """Template, tokens and special tokens of one artefact."""

    name: str
    rendered: tuple[str | None, ...]
    """By conversation; None where the template refuses it."""
    tokens: tuple[tuple[int, ...], ...]
    """Of each text, by the engine's own tokenizer."""
    prompts: tuple[tuple[int, ...], ...]
    """Of each conversation, as it is sent to the engine."""
    specials: Mapping[str, tuple[str, int | None]]
    stop_ids: frozenset[int]
    stated_stops: frozenset[int] | None
    """Of generation_config.json alone, which other programs rely on. None: there is none."""
    is_gguf: bool
    """llama.cpp also stops at tokens whose usual names it knows."""
    vocabulary: str | None
    """Digest of vocabulary and merges, where the model has a tokenizer.json."""


def read_tokenizer_facts(
    artefact: Artefact, engine: Engine, texts: Sequence[str]
) -> TokenizerFacts:
    prompter = engine.prompter
    rendered: list[str | None] = []
    prompts: list[tuple[int, ...]] = []
    for messages in CONVERSATIONS:
        try:
            rendered.append(prompter.render(messages))
            prompts.append(prompter.chat(messages))
        except TemplateRenderError:
            rendered.append(None)
            prompts.append(())
    tokenizer = prompter.tokenizer
    named = {
        key: (name, tokenizer.token_id(name))
        for key in _NAMED
        if (name := tokenizer.names.get(key)) is not None
    }
    shown = [text for text in rendered if text]
    return TokenizerFacts(
        name=artefact.name,
        rendered=tuple(rendered),
        tokens=tuple(tuple(engine.tokenize(text)) for text in (*texts, *shown)),
        prompts=tuple(prompts),
        specials=named,
        stop_ids=frozenset(prompter.stop_ids) | _read_gguf_stops(artefact),
        stated_stops=_read_stops(artefact.tokenizer),
        is_gguf=artefact.kind is ArtefactKind.GGUF,
        vocabulary=None if artefact.kind is ArtefactKind.GGUF else _digest(artefact.tokenizer),
    )


def compare_tokenizers(
    reference: TokenizerFacts, other: TokenizerFacts
) -> dict[str, list[Finding]]:
    """Findings under `template`, `tokenizer` and `specials`; none: the same."""
    return {
        "template": list(_compare_templates(reference, other)),
        "tokenizer": list(_compare_tokens(reference, other)),
        "specials": list(_compare_specials(reference, other)),
    }


def _compare_templates(reference: TokenizerFacts, other: TokenizerFacts) -> Iterator[Finding]:
    for one, two in zip(reference.rendered, other.rendered, strict=True):
        if one == two:
            continue
        if one is None or two is None:
            which = "refuses" if two is None else "takes"
            text = f"The chat template {which} a conversation that the reference's does not."
        else:
            at = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), 0)
            at = max(0, (at or min(len(one), len(two))) - 10)
            text = (
                "The chat template writes another text: "
                f"{two[at : at + _SHOWN]!r} instead of {one[at : at + _SHOWN]!r}."
            )
        yield Finding(
            level=Level.FAIL,
            text=text,
            remedy="the model was tuned on the reference's template: copy its "
            "chat_template.jinja, or make this one again",
        )
        return
    if reference.prompts != other.prompts and reference.tokens == other.tokens:
        yield Finding(
            level=Level.FAIL,
            text="The same prompt text becomes other tokens.",
            remedy="copy the reference's tokenizer files, or make this one again",
        )


def _compare_tokens(reference: TokenizerFacts, other: TokenizerFacts) -> Iterator[Finding]:
    remedy = (
        "answers will be worse in ways that no score shows: copy the reference's tokenizer.json "
        "and tokenizer_config.json, or make this one again from the reference"
    )
    for one, two in zip(reference.tokens, other.tokens, strict=False):
        if one != two:
            pairs = enumerate(zip(one, two, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(one), len(two)))
            text = (
                f"The tokenizer cuts text otherwise: token {at} is {_at(two, at)} instead of "
                f"{_at(one, at)}."
            )
            yield Finding(level=Level.FAIL, text=text, remedy=remedy)
            return
    known = reference.vocabulary and other.vocabulary
    if known and reference.vocabulary != other.vocabulary:
        text = "The tokenizer has other words or merges, though the sample came out the same."
        yield Finding(level=Level.FAIL, text=text, remedy=remedy)


def _compare_specials(reference: TokenizerFacts, other: TokenizerFacts) -> Iterator[Finding]:
    for key in _NAMED:
        one, two = reference.specials.get(key), other.specials.get(key)
        if one == two:
            continue
        is_hard = key in _MUST_MATCH and not (one is None and key == "bos_token")
        has_both = one is not None and two is not None
        if is_hard or has_both:
            yield Finding(
                level=Level.FAIL if is_hard else Level.WARNING,
                text=f"{key.replace('_', ' ')} is {_told(two)} instead of {_told(one)}.",
                remedy="copy the reference's tokenizer_config.json, or make this one again",
            )
    lost = sorted(reference.stop_ids - other.stop_ids)
    if lost:
        eos = reference.specials.get("eos_token", ("", None))[1]
        is_hard = not other.is_gguf or eos in lost or not reference.stop_ids & other.stop_ids
        yield Finding(
            level=Level.FAIL if is_hard else Level.WARNING,
            text=f"Answers no longer end at {_tokens(lost)}: the end-of-turn token is lost.",
            remedy="state it as eos_token_id in generation_config.json, as the reference does, "
            "and make files that were made from this one again",
        )
    gained = sorted(other.stop_ids - reference.stop_ids)
    if gained:
        yield Finding(level=Level.NOTE, text=f"Answers also end at {_tokens(gained)}.", remedy=None)
    stated = reference.stated_stops
    if stated and other.stated_stops is not None and not lost:
        missing = sorted(stated - other.stated_stops)
        if missing:
            yield Finding(
                level=Level.FAIL,
                text=f"generation_config.json no longer names {_tokens(missing)} as an end: other "
                "programs will run on past it.",
                remedy="copy the reference's generation_config.json",
            )


def _read_stops(folder: Path) -> frozenset[int] | None:
    path = folder / "generation_config.json"
    if not path.is_file():
        return None
    try:
        stated = json.loads(path.read_bytes()).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        return frozenset()
    listed = stated if isinstance(stated, list) else [stated]
    return frozenset(number for number in listed if isinstance(number, int))


def _read_gguf_stops(artefact: Artefact) -> frozenset[int]:
    if artefact.kind is not ArtefactKind.GGUF:
        return frozenset()
    stated = read_gguf_header(artefact.path).metadata
    found = [stated.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    return frozenset(number for number in found if isinstance(number, int))


def _digest(folder: Path) -> str | None:
    import hashlib

    try:
        model = json.loads((folder / "tokenizer.json").read_bytes())["model"]
    except (OSError, ValueError, KeyError):
        return None
    merges = [m.split(" ", 1) if isinstance(m, str) else list(m) for m in model.get("merges", [])]
    content: list[Any] = [model.get("vocab"), merges]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _at(tokens: Sequence[int], place: int) -> str:
    return str(tokens[place]) if place < len(tokens) else "missing"


def _told(special: tuple[str, int | None] | None) -> str:
    return "none" if special is None else f"`{special[0]}` ({special[1]})"


def _tokens(numbers: Sequence[int]) -> str:
    return f"token{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
