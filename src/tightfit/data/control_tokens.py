"""Control tokens kept apart from text: what a message says can never open or close a turn.

Every control token (`<|im_end|>`, `</s>`) gets an alias, one character of a
private-use plane. The tokenizer is loaded with the aliases as its special
tokens, so the words `<|im_end|>` in a user's message are tokenized as plain
text, and the one that the template writes is the token. The rest of the
tokenizer is untouched, so without such words the result is the library's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_FIRST_ALIAS = 0x100000
_LAST_ALIAS = 0x10F000
_BREAK = "\U0010fff2"
"""Put inside a control token's name in a message, so that it no longer is that name."""
_PRIVATE = re.compile("[\U00100000-\U0010ffff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlTokens:
    """Names and aliases of a tokenizer's control tokens."""

    ids: Mapping[str, int]
    """By alias."""
    alias_of: Mapping[str, str]
    pattern: re.Pattern[str]
    breakable: re.Pattern[str]

    def holds_name(self, text: str) -> bool:
        """Does a message spell a control token?"""
        return self.breakable.search(text) is not None

    def strip_private(self, text: str) -> str:
        """Text without the characters that aliases are made of."""
        return text if text.isascii() else _PRIVATE.sub("\ufffd", text)

    def escape(self, text: str) -> str:
        """Message text that stays text, whatever it spells."""
        text = self.strip_private(text)
        while self.breakable.search(text):  # breaking one name can uncover another
            text = self.breakable.sub(lambda found: found[0][0] + _BREAK + found[0][1:], text)
        return text

    def seal(self, rendered: str) -> str:
        """Rendered text with the template's control tokens as aliases and messages unescaped."""
        sealed = self.pattern.sub(lambda found: self.alias_of[found[0]], rendered)
        return sealed.replace(_BREAK, "")

    def unseal(self, sealed: str) -> str:
        """The text as the template wrote it."""
        names = {alias: name for name, alias in self.alias_of.items()}
        return _PRIVATE.sub(lambda found: names.get(found[0], found[0]), sealed)


def make_control_tokens(ids_by_name: Mapping[str, int]) -> ControlTokens:
    """Aliases for these tokens, in order."""
    names = list(ids_by_name)[: _LAST_ALIAS - _FIRST_ALIAS]
    alias_of = {name: chr(_FIRST_ALIAS + number) for number, name in enumerate(names)}
    return ControlTokens(
        ids={alias: ids_by_name[name] for name, alias in alias_of.items()},
        alias_of=alias_of,
        pattern=_any_of(names),
        breakable=_any_of([name for name in names if len(name) > 1]),
    )


def alias_tokenizer(document: dict[str, Any], alias_of: Mapping[str, str]) -> dict[str, Any]:
    """A copy of a tokenizer.json in which control tokens bear their aliases.

    Ids stay: where the model's vocabulary lists the token, it is renamed there
    too. The post-processor goes: it would add tokens, and trims offsets.
    """
    model = dict(document["model"])
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {alias_of.get(name, name): number for name, number in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[alias_of.get(item[0], item[0]), *item[1:]] for item in vocab]
    if model.get("unk_token") in alias_of:
        model["unk_token"] = alias_of[model["unk_token"]]
    added = [
        {**token, "content": alias_of.get(token["content"], token["content"])}
        for token in document.get("added_tokens", ())
    ]
    return {
        **document,
        "model": model,
        "added_tokens": added,
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }


def _any_of(names: list[str]) -> re.Pattern[str]:
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
