"""How text is cut before BPE: llama.cpp's names and the tokenizer.json forms they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_LETTERS_AND_MARKS = r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_SIGNS_AND_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*"

_THREE_DIGITS = _CONTRACTIONS + _LETTERS + r"|\p{N}{1,3}" + _SIGNS + _TAIL
_ONE_DIGIT = _CONTRACTIONS + _LETTERS + r"|\p{N}" + _SIGNS + _TAIL
_WITH_MARKS = _CONTRACTIONS + _LETTERS_AND_MARKS + r"|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _TAIL


def _cased(ending: str) -> str:
    """Words up to where a capital follows a small letter."""
    lower = f"{_START}{_UPPER}*{_LOWER}+{ending}"
    return f"{lower}|{_START}{_UPPER}+{_LOWER}*{ending}"


_CASED_WORDS = _cased("") + r"|\p{N}" + _SIGNS_AND_SLASH + _TAIL
_GPT4O = _cased(_CONTRACTIONS + "?") + r"|\p{N}{1,3}" + _SIGNS_AND_SLASH + _TAIL
_BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"

Step = tuple[object, ...]
"""One pre-tokenizer: its type and the settings that matter."""
_BYTES: Step = ("ByteLevel", False)
_BYTES_AND_WORDS: Step = ("ByteLevel", True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """One way of cutting."""

    steps: tuple[Step, ...]
    ignores_merges: bool = False
    """A whole word that is in the vocabulary is taken without merging."""


PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": PreTokenizer(steps=(_BYTES_AND_WORDS,)),
    "llama-bpe": PreTokenizer(steps=(("Split", _THREE_DIGITS), _BYTES), ignores_merges=True),
    "dbrx": PreTokenizer(steps=(("Split", _THREE_DIGITS), _BYTES)),
    "qwen2": PreTokenizer(steps=(("Split", _ONE_DIGIT), _BYTES)),
    "qwen35": PreTokenizer(steps=(("Split", _WITH_MARKS), _BYTES)),
    "tekken": PreTokenizer(steps=(("Split", _CASED_WORDS), _BYTES), ignores_merges=True),
    "gpt-4o": PreTokenizer(steps=(("Split", _GPT4O), _BYTES)),
    "smollm": PreTokenizer(steps=(("Digits", True), _BYTES_AND_WORDS)),
    "falcon": PreTokenizer(
        steps=(
            ("Punctuation", "Contiguous"),
            _BYTES_AND_WORDS,
            ("Digits", False),
            ("Split", "[0-9][0-9][0-9]"),
        )
    ),
    "bloom": PreTokenizer(steps=(("Split", _BLOOM), _BYTES)),
}
"""Sources: `src/llama-vocab.cpp` of llama.cpp; the tokenizer.json of one model of each name."""

OTHERS = (
    "deepseek-llm",
    "deepseek-coder",
    "deepseek-v3",
    "minicpm5",
    "viking",
    "chameleon",
    "superbpe",
    "default",
)
"""Names that llama.cpp knows beside those; tried where no form above is found."""


def recognise(document: Mapping[str, Any]) -> str | None:
    """llama.cpp's name for a tokenizer.json's way of cutting; None if it is not one above."""
    steps = read_steps(document.get("pre_tokenizer"))
    ignores = bool(document.get("model", {}).get("ignore_merges", False))
    same = [name for name, known in PRE_TOKENIZERS.items() if known.steps == steps]
    exact = [name for name in same if PRE_TOKENIZERS[name].ignores_merges == ignores]
    return next(iter(exact or same), None)


def read_steps(stated: Any) -> tuple[Step, ...]:
    """A `pre_tokenizer` entry as the steps it takes, without what decides nothing."""
    if not isinstance(stated, dict):
        return ()
    kind = stated.get("type")
    if kind == "Sequence":
        return tuple(step for part in stated.get("pretokenizers", ()) for step in read_steps(part))
    pattern = stated.get("pattern") or {}
    settings: dict[Any, object] = {
        "ByteLevel": bool(stated.get("use_regex", True)),
        "Digits": bool(stated.get("individual_digits", False)),
        "Punctuation": str(stated.get("behavior", "Isolated")),
        "Split": pattern.get("Regex", pattern.get("String")),
    }
    return ((kind, settings[kind]) if kind in settings else (kind,),)


def write_steps(name: str) -> dict[str, Any]:
    """The `pre_tokenizer` entry that cuts as llama.cpp does under this name."""
    entries = [_entry(step) for step in PRE_TOKENIZERS[name].steps]
    return entries[0] if len(entries) == 1 else {"type": "Sequence", "pretokenizers": entries}


def _entry(step: Step) -> dict[str, Any]:
    kind, setting = step
    if kind == "ByteLevel":
        return {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": setting,
        }
    if kind == "Digits":
        return {"type": "Digits", "individual_digits": setting}
    if kind == "Punctuation":
        return {"type": "Punctuation", "behavior": setting}
    return {
        "type": "Split",
        "pattern": {"Regex": setting},
        "behavior": "Isolated",
        "invert": False,
    }
