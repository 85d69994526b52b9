"""Token counters: the model's own tokenizer where its file is present, else a guess.

The guess splits text into words, numbers and marks, as byte-pair tokenizers do, and prices
each. Prices are fitted to six vocabularies (GPT-2, SmolLM2, Mistral v3, Tekken, Qwen, DeepSeek):
at most 12% off their mean on English text and code, 25% on 22 other languages.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightfit.core.errors import InvalidInputError
from tightfit.models.resolve import locate_hub_cache

TOKENS_PER_WORD = 1.07
TOKENS_PER_LETTER = 0.013
TOKENS_PER_DIGIT = 0.8
TOKENS_PER_MARK = 1.1
MAX_LETTERS_PER_TOKEN = 8.0
"""Runs of letters that are no words (encodings, keys) cost by length."""

_TOKENS_PER_CHAR = (
    # (first code point, tokens per character, what lives from there on)
    (0x0080, 1.0, "Latin-1 signs"),
    (0x00C0, 2.0, "Latin letters with accents: such languages also split their words more"),
    (0x0250, 1.5, "phonetic letters and combining marks"),
    (0x0370, 1.0, "Greek"),
    (0x0400, 0.5, "Cyrillic"),
    (0x0530, 1.2, "Armenian"),
    (0x0590, 0.9, "Hebrew and Arabic"),
    (0x0900, 1.25, "scripts of India, Georgia and Southeast Asia"),
    (0x0E00, 0.9, "Thai and Lao"),
    (0x0F00, 1.25, "Tibetan, Burmese, Georgian, Ethiopic, Khmer"),
    (0x1E00, 1.2, "more Latin letters with accents (Vietnamese) and Greek"),
    (0x2000, 1.0, "typographic marks and symbols"),
    (0x2E80, 0.95, "Chinese"),
    (0x3000, 0.85, "Japanese kana and full-width marks"),
    (0x3100, 0.95, "Chinese"),
    (0xA000, 1.25, "rare scripts"),
    (0xAC00, 1.05, "Korean"),
    (0xD800, 1.0, "presentation forms"),
    (0x10000, 2.0, "emoji and rare characters"),
)
_STARTS = [start for start, _, _ in _TOKENS_PER_CHAR]

_LETTER, _DIGIT, _MARK, _SPACE = "a", "0", ".", " "


def _shape_of(code: int) -> str:
    char = chr(code)
    if char.isascii():
        if char.isalpha():
            return _LETTER
        if char.isdigit():
            return _DIGIT
        return _SPACE if char.isspace() or not char.isprintable() else _MARK
    is_latin = 0x00C0 <= code < 0x0250 or 0x1E00 <= code < 0x1F00
    return _LETTER if is_latin else _SPACE


class _Shapes(dict[int, str]):
    def __missing__(self, code: int) -> str:
        shape = self[code] = _shape_of(code)
        return shape


class _Prices(dict[str, float]):
    def __missing__(self, char: str) -> float:
        code = ord(char)
        price = 0.0 if code < 0x80 else _TOKENS_PER_CHAR[bisect_right(_STARTS, code) - 1][1]
        self[char] = price
        return price


_ASCII_SHAPES = bytes(ord(_shape_of(code)) if code < 128 else ord(" ") for code in range(256))
_ONLY_LETTERS = bytes(ord("a") if code == ord("a") else ord(" ") for code in range(256))
_SHAPES = _Shapes()
_PRICES = _Prices()


def guess_tokens(text: str) -> int:
    """About how many tokens a byte-pair tokenizer makes of `text`; one per byte at most."""
    if text.isascii():
        shape = text.encode("ascii").translate(_ASCII_SHAPES)
        foreign, num_bytes = 0.0, len(shape)
    else:
        shape = text.translate(_SHAPES).encode("ascii")
        foreign = sum(_PRICES[char] * times for char, times in Counter(text).items())
        num_bytes = len(text.encode("utf-8", "surrogatepass"))
    num_letters = shape.count(b"a")
    num_words = (b" " + shape.translate(_ONLY_LETTERS)).count(b" a")
    words = TOKENS_PER_WORD * num_words + TOKENS_PER_LETTER * num_letters
    ascii_tokens = (
        max(words, num_letters / MAX_LETTERS_PER_TOKEN)
        + TOKENS_PER_DIGIT * shape.count(b"0")
        + TOKENS_PER_MARK * shape.count(b".")
    )
    return min(math.ceil(ascii_tokens + foreign), num_bytes)


# Token counters: the model's own tokenizer where its file is at hand, else a guess.

TOKENS_PER_MESSAGE = 5
"""What a chat template adds around a message. ChatML: opening mark, role, line end, closing mark,
line end (five, measured with SmolLM2-135M-Instruct's template and vocabulary). Llama 3: two header
marks, role, blank line, end of turn (five by its published form, huggingface.co/blog/llama3).
A default system prompt, which some templates add, is not counted."""
TOKENS_PER_ROW = 1
"""The begin-of-text or end-of-text mark."""
TRAINED_END_TOKENS = 1
"""The mark that ends an answer is learnt with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounter:
    """Counts tokens of many texts at once."""

    count: Callable[[Sequence[str]], list[int]]
    is_exact: bool
    description: str


def token_counter(model: str | None) -> TokenCounter:
    """The best counter for a model name or folder, without network or torch."""
    if model is None:
        return _guessing("no model named")
    path = find_tokenizer(model)
    if path is None:
        return _guessing(f"no tokenizer.json of {model} on this machine")
    try:
        import tokenizers
    except ImportError:
        return _guessing("for exact counts: pip install 'tightfit[data]'")
    return _exact(tokenizers, path)


def find_tokenizer(model: str) -> Path | None:
    """`tokenizer.json` of a model folder, or of a hub id in the local cache."""
    try:
        folder = Path(model).expanduser()
        if folder.is_dir():
            return _if_file(folder / "tokenizer.json")
        if folder.name == "tokenizer.json":
            return _if_file(folder)
        if model.count("/") == 1 and not model.startswith((".", "/", "~")):
            return _in_hub_cache(model)
    except (OSError, RuntimeError, ValueError):
        return None  # a name no file system takes, or `~nobody`: then there is no such file
    return None


def _in_hub_cache(model: str) -> Path | None:
    cache = locate_hub_cache()
    if cache is None:
        return None
    repository = cache / ("models--" + model.replace("/", "--"))
    main = repository / "refs" / "main"
    if main.is_file():
        named = repository / "snapshots" / main.read_text(errors="replace").strip()
        if found := _if_file(named / "tokenizer.json"):
            return found
    others = sorted(repository.glob("snapshots/*/tokenizer.json"), key=lambda p: p.stat().st_mtime)
    return others[-1] if others else None


def _if_file(path: Path) -> Path | None:
    return path if path.is_file() else None


def _guessing(why: str) -> TokenCounter:
    return TokenCounter(
        count=lambda texts: [guess_tokens(text) for text in texts],
        is_exact=False,
        description=f"guessed from words, digits and marks, about 4 characters per token in English"
        f" ({why})",
    )


def _exact(tokenizers: Any, path: Path) -> TokenCounter:
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise InvalidInputError(
            f"{path} is not a tokenizer this version reads: {str(error)[:200]}.",
            remedy="download the model's tokenizer.json again, or plan without the tokenizer by "
            "naming the model by its catalogue name",
        ) from error
    # The file may ask for truncation or padding, which would falsify every length.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)

    def count(texts: Sequence[str]) -> list[int]:
        try:
            encoded = encode(list(texts), add_special_tokens=False)
        except TypeError:  # half a surrogate pair, which JSON can write and UTF-8 cannot
            whole = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
            encoded = encode(whole, add_special_tokens=False)
        return [len(item) for item in encoded]

    return TokenCounter(count=count, is_exact=True, description=f"counted with {path}")
