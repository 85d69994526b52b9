"""Token counters: the model's own tokenizer where its file is at hand, else a guess."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightfit.core.errors import InvalidInputError
from tightfit.data.guess import guess_tokens
from tightfit.models.hub_cache import locate_hub_cache

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
    except Exception as fault:  # the library raises bare Exception
        raise InvalidInputError(
            f"{path} is not a tokenizer this version reads: {str(fault)[:200]}.",
            remedy="download the model's tokenizer.json again, or plan without the tokenizer by "
            "naming the model by its catalogue name",
        ) from fault
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
