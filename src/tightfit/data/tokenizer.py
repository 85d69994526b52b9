"""ChatTokenizer: a model folder's tokenizer, special tokens and chat template, without torch.

Each control token (`<|im_end|>`, `</s>`) gets an alias, one character of a private-use plane,
and the tokenizer is loaded with the aliases as its special tokens. So a message that spells
`<|im_end|>` is tokenized as plain text and cannot open or close a turn.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightfit.core.errors import (
    InvalidInputError,
    NotFoundError,
    SetupError,
    UserError,
    first_line,
)
from tightfit.core.text import printable

# Control tokens kept apart from text: what a message says can never open or close a turn.

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


_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
"""How SentencePiece names a byte that is no character."""
_SPACE_MARK = "\u2581"


def _list_byte_chars() -> dict[str, int]:
    """The characters by which byte-level BPE names bytes. Source: GPT-2, encoder.py."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {
        chr(256 + number): byte for number, byte in enumerate(others)
    }


_BYTE_OF = _list_byte_chars()
_NEVER_IN_TEXT = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))
OVERLONG_STARTS = frozenset((0xE0, 0xF0)) | _NEVER_IN_TEXT
"""Bytes that can begin a character in more bytes than it takes, which is no UTF-8."""

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
)
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_PAD_NAMES = (
    "<pad>",
    "[PAD]",
    "<|pad|>",
    "<|finetune_right_pad_id|>",
    "<|PAD_TOKEN|>",
    "<|padding|>",
    "<PAD>",
    "<|dummy_id|>",
    "<|endoftext|>",
)
"""What published tokenizers call it. Qwen pads with `<|endoftext|>`, its base models' own end."""
_RESERVED = ("reserved", "unused", "extra", "dummy")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTokenizer:
    """Text to tokens and back, with every special token known by name and number."""

    folder: Path
    digest: str
    """Of every file that decides what the tokens are."""
    names: Mapping[str, str]
    """`bos_token`, `eos_token`, ... as chat templates know them; only those the model has."""
    control: ControlTokens
    chat_templates: Mapping[str, str]
    """By name; `default` is the one without a name. Empty for most base models."""
    stop_ids: tuple[int, ...]
    """Tokens at which generation ends: the tokenizer's and the generation config's."""
    begins_with: str | None
    """The token that the tokenizer itself puts before a text, usually BOS."""
    ends_with: tuple[int, ...]
    """Tokens that the tokenizer itself puts after a text: those of embedding models do."""
    is_encoder_decoder: bool
    notes: tuple[str, ...]
    _text: Any
    _aliased: Any

    def token_id(self, name: str) -> int | None:
        """Number of a token by what it says."""
        found = self._text.token_to_id(name)
        return None if found is None else int(found)

    def token_name(self, token_id: int) -> str:
        """What a token says, as the vocabulary spells it."""
        return str(self._text.id_to_token(token_id))

    @property
    def eos_id(self) -> int | None:
        name = self.names.get("eos_token")
        return self.token_id(name) if name else next(iter(self.stop_ids), None)

    @property
    def eos_alias(self) -> str:
        """The end mark as `encode_sealed` reads it; empty for a model without one."""
        eos = self.eos_id
        return "" if eos is None else self.control.alias_of.get(self.token_name(eos), "")

    @property
    def bos_alias(self) -> str:
        """The begin mark as `encode_sealed` reads it, where the tokenizer itself adds one."""
        return self.control.alias_of[self.begins_with] if self.begins_with else ""

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for by itself; it may be a part of a character."""
        name = self._text.id_to_token(token_id)
        if name is None:
            return b""
        if token_id in self.control.ids.values():
            return str(name).encode()
        fallback = _BYTE_TOKEN.fullmatch(name)
        if fallback:
            return bytes([int(fallback[1], 16)])
        text = self.decode([token_id])
        if "\ufffd" not in text:
            # A leading space, which a decoder of SentencePiece takes off.
            return (
                " " * (name.startswith(_SPACE_MARK) and not text.startswith(" ")) + text
            ).encode()
        if all(char in _BYTE_OF for char in name):
            return bytes(_BYTE_OF[char] for char in name)
        return text.encode()

    def find_lone_bytes(self, wanted: frozenset[int]) -> tuple[int, ...]:
        """Tokens that end with one of these bytes, or that hold one which is no character's."""
        never = wanted & _NEVER_IN_TEXT
        marks = [char for char, byte in _BYTE_OF.items() if byte in wanted]
        found = []
        for token in range(int(self._text.get_vocab_size(with_added_tokens=True))):
            name = self._text.id_to_token(token) or ""
            if not name.startswith("<0x") and not any(mark in name for mark in marks):
                continue
            data = self.token_bytes(token)
            if data and (data[-1] in wanted or not never.isdisjoint(data)):
                found.append(token)
        return tuple(found)

    def to_json(self) -> str:
        """The library's own form of the tokenizer."""
        return str(self._text.to_str())

    def encode_sealed(self, texts: Sequence[str]) -> list[Any]:
        """`tokenizers` encodings of texts in which control tokens are aliases; nothing is added."""
        path = self.folder / TOKENIZER_FILE
        return encode_batch(self._aliased, texts, path, with_offsets=True)

    def encode(self, text: str) -> list[int]:
        """Tokens of a text in which control tokens count wherever they stand; nothing is added."""
        return list(encode_batch(self._text, [text], self.folder / TOKENIZER_FILE)[0].ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text, control tokens included."""
        numbers = [int(i) for i in token_ids]
        with _panics_reported(self.folder, TOKENIZER_FILE):
            return str(self._text.decode(numbers, skip_special_tokens=False))

    def choose_pad(self, stop_ids: Sequence[int]) -> tuple[int, str | None]:
        """A token to pad with that ends no answer, and what to say if it is not the obvious one."""
        stated = self.names.get("pad_token")
        taken = set(stop_ids)
        unk = self.names.get("unk_token")
        reserved = [name for name in self.control.alias_of if any(w in name for w in _RESERVED)]
        for name in [stated, *_PAD_NAMES, unk, *reserved]:
            if name and (token_id := self.token_id(name)) is not None and token_id not in taken:
                own = "none" if stated is None else f"`{stated}`, which also ends answers"
                note = f"Rows are padded with `{name}`; the tokenizer's pad token is {own}."
                return token_id, None if name == stated else note
        spare = next(number for number in range(len(taken) + 1) if number not in taken)
        return spare, f"Rows are padded with token {spare}: the tokenizer has no token to pad with."


def load_tokenizer(folder: Path) -> ChatTokenizer:
    """Read a model folder's tokenizer files. Everything is local; no code of the model runs.

    The files are anyone's: what is wrong with one is an error that names it.
    """
    path = folder / TOKENIZER_FILE
    document = read_tokenizer_file(path)
    settings = read_model_json(folder / "tokenizer_config.json")
    config = read_model_json(folder / "config.json")
    adapter = read_model_json(folder / "adapter_config.json")  # whose folder has no config.json
    stated = read_model_json(folder / "special_tokens_map.json") | settings
    names = {key: text for key in _NAMED if (text := _content(stated.get(key)))}
    listed = settings.get("added_tokens_decoder")
    tokens = listed.values() if isinstance(listed, dict) else ()
    special = [token for token in tokens if isinstance(token, dict) and token.get("special")]
    added = [text for token in special if (text := _content(token))]
    missing = _add_named(document, [*names.values(), *added])
    names = {key: text for key, text in names.items() if text not in missing}
    generation = read_model_json(folder / "generation_config.json")
    with _panics_reported(path):
        text = build_tokenizer(document, path)
        eos = text.token_to_id(names["eos_token"]) if "eos_token" in names else None
        vocab_size = int(text.get_vocab_size(with_added_tokens=True))
        stops = _stop_ids(eos, generation, config, vocab_size)
        control = make_control_tokens(_control_ids(document, text, names, stops))
        aliased = build_tokenizer(alias_tokenizer(document, control.alias_of), path)
        moved = [a for a, number in control.ids.items() if aliased.token_to_id(a) != number]
        begins_with = _begin_token(text, control)
        ends_with = _end_tokens(text)
    if moved:
        raise InvalidInputError(
            f"{path} numbers {len(moved)} special tokens in a way that cannot be kept, "
            f"`{control.unseal(moved[0])}` first.",
            remedy="save it anew: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
        )
    return ChatTokenizer(
        folder=folder,
        digest=digest_files(folder),
        names=names,
        control=control,
        chat_templates=_chat_templates(folder, settings),
        stop_ids=stops,
        begins_with=begins_with,
        ends_with=ends_with,
        is_encoder_decoder=bool(config.get("is_encoder_decoder"))
        or adapter.get("task_type") == "SEQ_2_SEQ_LM",
        notes=tuple(
            f"The tokenizer names `{name}`, which its vocabulary lacks." for name in missing
        ),
        _text=text,
        _aliased=aliased,
    )


def list_tokenizer_files(folder: Path) -> list[Path]:
    """All that decides what the tokens of a folder's model are."""
    named = [folder / name for name in (*_FILES, "added_tokens.json", "adapter_config.json")]
    templates = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    return [path for path in (*named, *templates) if path.is_file()]


def digest_files(folder: Path, *words: str) -> str:
    """One digest over the tokenizer files of a folder, and `words` beside them."""
    digest = hashlib.blake2b("\0".join(words).encode(), digest_size=16)
    for name in _FILES:
        data = read_model_file(folder / name)
        if data is not None:
            digest.update(f"{name} {len(data)}\n".encode())
            digest.update(data)
    return digest.hexdigest()


# The files come with a model, from anyone: nothing in them is taken on trust.

TOKENIZER_FILE = "tokenizer.json"
_MAX_FILE_BYTES = 64 * 2**20
"""The largest published tokenizer.json, Gemma's, has 33 MB."""
_MAX_JSON_ITEMS = 6_000_000
"""Commas and brackets: an item takes up to 100 bytes of memory. Gemma's has 3 million."""
_MAX_TOKEN_ID = 2**31 - 1
_MAX_ADDED_CHARS = 4_000_000
_MAX_PIECE_CHARS = 10_000_000
"""Of a Unigram model: its trie takes about 100 bytes per character."""
_MAX_PATTERN_CHARS = 100_000
_MAX_WORD_CHARS = 1000
"""Of WordPiece, whose time grows with the square of it. BERT's is 100."""
_MAX_GROWTH = 100
"""How many times longer a text may become before it is cut into tokens."""
_ENCODE_SECONDS = 8.0
_ENCODE_CHARS_PER_SECOND = 100_000
"""A tenth of what one slow core does."""
_LONE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_AGAIN = "copy or download that file again"


def read_model_file(path: Path) -> bytes | None:
    """A file's bytes; None where there is no such file."""
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):
            what = "a folder" if stat.S_ISDIR(facts.st_mode) else "a pipe or a device"
            raise InvalidInputError(f"{path} is {what}, not a file.", remedy=_AGAIN)
        if facts.st_size > _MAX_FILE_BYTES:
            raise InvalidInputError(
                f"{path} has {facts.st_size / 2**20:,.0f} MiB; at most "
                f"{_MAX_FILE_BYTES // 2**20} MiB of it are read.",
                remedy=_AGAIN,
            )
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            f"{path} cannot be read: {first_line(error)}.", remedy=_AGAIN
        ) from error


def read_model_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file."""
    data = read_model_file(path)
    if data is None:
        return {}
    if sum(map(data.count, (b",", b"[", b"{"))) > _MAX_JSON_ITEMS:
        raise InvalidInputError(f"{path} holds more than {_MAX_JSON_ITEMS:,} items.", remedy=_AGAIN)
    try:
        value = json.loads(data)
        if _LONE_SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        what = "it nests too deep" if isinstance(error, RecursionError) else first_line(error)
        raise InvalidInputError(f"{path} cannot be read as JSON: {what}.", remedy=_AGAIN) from error
    if not isinstance(value, dict):
        raise InvalidInputError(f"{path} is no JSON object.", remedy=_AGAIN)
    return value


def read_tokenizer_file(path: Path) -> dict[str, Any]:
    """A tokenizer.json whose parts are of the right types and sizes."""
    document = read_model_json(path)
    if not document and not path.exists():
        raise NotFoundError(
            f"{path.parent} holds no {path.name}.",
            remedy="save the model's fast tokenizer there: "
            "AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)",
        )
    if not isinstance(document.get("model"), dict):
        raise InvalidInputError(
            f"{path} is not a tokenizer: it has no `model`.",
            remedy="copy or download the model's tokenizer.json again",
        )
    wrong = next(_faults_of(document), None)
    if wrong is not None:
        raise InvalidInputError(
            f"{path} is not a tokenizer that can be used: {wrong}.",
            remedy="copy or download the model's tokenizer.json again",
        )
    return document


def _faults_of(document: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a tokenizer.json, of what the library would not survive."""
    added = document.get("added_tokens")
    if added is None:
        added = document["added_tokens"] = []
    if not isinstance(added, list) or not all(map(_is_added_token, added)):
        yield "an entry of `added_tokens` has no `content` and `id`, or an id out of range"
        return
    if any(_PRIVATE.search(token["content"]) for token in added):
        yield "an added token has characters of private-use plane 16, which mark control tokens"
    if sum(len(token["content"]) for token in added) > _MAX_ADDED_CHARS:
        yield f"its added tokens have more than {_MAX_ADDED_CHARS:,} characters"
    yield from _faults_of_model(document["model"])
    for sections in (("normalizer", "pre_tokenizer"), ("post_processor",), ("decoder",)):
        growth = 1.0
        for part in _objects([document.get(section) for section in sections]):
            yield from _faults_of_part(part)
            growth *= _growth_of(part)
        if growth > _MAX_GROWTH:
            yield f"its `{sections[0]}` makes texts more than {_MAX_GROWTH} times as long"


def _is_added_token(token: Any) -> bool:
    return (
        isinstance(token, dict)
        and isinstance(token.get("content"), str)
        and bool(token["content"])
        and is_token_id(token.get("id"))
    )


def is_token_id(value: Any) -> bool:
    """Whether it can be a token's number."""
    return type(value) is int and 0 <= value <= _MAX_TOKEN_ID


def _faults_of_model(model: dict[str, Any]) -> Iterator[str]:
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        if not all(map(is_token_id, vocab.values())):
            yield f"its `vocab` has a number that is not between 0 and {_MAX_TOKEN_ID}"
    elif isinstance(vocab, list):
        if not all(isinstance(i, list) and len(i) == 2 and isinstance(i[0], str) for i in vocab):
            yield "its `vocab` has an entry that is not a text and a score"
        elif sum(len(item[0]) for item in vocab) > _MAX_PIECE_CHARS:
            yield f"its `vocab` has more than {_MAX_PIECE_CHARS:,} characters"
    else:
        yield "its `model` has no `vocab`"
    if not isinstance(model.get("unk_token"), str | type(None)):
        yield "its `unk_token` is not a text"
    longest = model.get("max_input_chars_per_word", 0)
    if not isinstance(longest, int) or not 0 <= longest <= _MAX_WORD_CHARS:
        yield f"its `max_input_chars_per_word` is not between 0 and {_MAX_WORD_CHARS}"


def _objects(part: Any) -> Iterator[dict[str, Any]]:
    """Every object in a part of the file, however deep."""
    waiting = [part]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            yield item
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item


def _faults_of_part(part: dict[str, Any]) -> Iterator[str]:
    pattern = part.get("Regex")
    if isinstance(pattern, str) and len(pattern) > _MAX_PATTERN_CHARS:
        yield f"a pattern has more than {_MAX_PATTERN_CHARS:,} characters"
    table = part.get("precompiled_charsmap")
    if table is not None and charsmap_texts(table) is None:
        yield "its `precompiled_charsmap` is broken"


def _growth_of(part: dict[str, Any]) -> float:
    """About how many times longer one step can make a text."""
    kind, content = part.get("type"), part.get("content")
    if kind == "ByteLevel":
        return 2.0
    if kind == "Precompiled":
        texts = charsmap_texts(part.get("precompiled_charsmap")) or b""
        # A character that becomes a long text has three bytes itself, as U+FDFA has.
        return max(1.0, max(map(len, texts.split(b"\0"))) / 3)
    if kind == "Replace" and isinstance(content, str):
        pattern = part.get("pattern")
        replaced = pattern.get("String") if isinstance(pattern, dict) else pattern
        if isinstance(replaced, str) and replaced:
            return max(1.0, len(content) / len(replaced))
        return 1.0 + len(content)  # a regex can match nothing at all, everywhere
    if kind == "TemplateProcessing":
        forms = [len(f) for f in (part.get("single"), part.get("pair")) if isinstance(f, list)]
        ids = [len(i["ids"]) for i in _objects(part) if isinstance(i.get("ids"), list)]
        return float(max(1, *forms, 1) * max(1, *ids, 1))
    return 1.0


def charsmap_texts(table: Any) -> bytes | None:
    """What SentencePiece's table writes instead of characters; None if the table is broken.

    The library allocates what the table says its trie takes, before it looks for it.
    """
    try:
        data = base64.b64decode(table, validate=True)
    except (TypeError, ValueError):
        return None
    size = int.from_bytes(data[:4], "little")
    return data[4 + size :] if len(data) >= 4 + size and size % 4 == 0 else None


@contextmanager
def _panics_reported(path: Path, *inside: str) -> Iterator[None]:
    """Errors of the Rust library, panics included, as errors that name the file.

    Runs for every token of an answer: paths are joined only for an error.
    """
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        what = printable(first_line(error), most=200)
        raise InvalidInputError(
            f"{path.joinpath(*inside)} is not a tokenizer this version reads: {what}.",
            remedy="download the model's tokenizer.json again, or pip install -U tokenizers",
        ) from error


def encode_batch(
    tokenizer: Any, texts: Sequence[str], path: Path, *, with_offsets: bool = False
) -> list[Any]:
    """Encodings without special tokens, in limited time: a file's pattern can take for ever.

    The library lets go of Python's lock as it works, so that this thread can stop waiting.
    """
    encode = tokenizer.encode_batch
    if not with_offsets:
        encode = getattr(tokenizer, "encode_batch_fast", encode)
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append(encode(list(texts), add_special_tokens=False))
        except BaseException as error:  # to the waiting thread
            outcome.append(error)

    seconds = _ENCODE_SECONDS + sum(map(len, texts)) / _ENCODE_CHARS_PER_SECOND
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise InvalidInputError(
            f"{path} takes more than {seconds:.0f} s to encode {len(texts):,} texts: one of its "
            "patterns matches too slowly.",
            remedy="copy or download the model's tokenizer.json again",
        )
    if isinstance(outcome[0], (TypeError, UnicodeError)):  # half a surrogate pair in a text
        raise outcome[0]
    with _panics_reported(path):
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
    return list(outcome[0])


def _content(value: Any) -> str | None:
    """A special token, written as text or as an object."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else None


def _add_named(document: dict[str, Any], names: Sequence[str]) -> list[str]:
    """Make named special tokens special, as transformers does; returns those with no number."""
    added = document["added_tokens"]
    held = {token["content"] for token in added}
    vocab = document["model"].get("vocab") or {}
    numbers = (
        vocab if isinstance(vocab, dict) else {item[0]: number for number, item in enumerate(vocab)}
    )
    missing = []
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for name in dict.fromkeys(names):
        if name in held:
            continue
        if name in numbers and not _PRIVATE.search(name):
            added.append({"id": numbers[name], "content": name, **flags, "special": True})
        else:
            missing.append(name)
    added.sort(key=lambda token: token["id"])
    return missing


def build_tokenizer(document: Mapping[str, Any], path: Path) -> Any:
    """The library's tokenizer of a document from `read_tokenizer_file`."""
    try:
        import tokenizers
    except ImportError as error:
        raise SetupError(
            "Encoding data needs the tokenizers package, which is not installed.",
            remedy="pip install 'tightfit[data]'",
        ) from error
    with _panics_reported(path):
        built = tokenizers.Tokenizer.from_str(json.dumps(document))
        # The file may ask for truncation or padding, which is ours to decide.
        built.no_truncation()
        built.no_padding()
    return built


def _stop_ids(
    eos: int | None, generation: Mapping[str, Any], config: Mapping[str, Any], vocab_size: int
) -> tuple[int, ...]:
    found: list[Any] = [] if eos is None else [eos]
    for stated in (generation.get("eos_token_id"), config.get("eos_token_id")):
        found += stated if isinstance(stated, list) else [stated]
    whole = [i for i in found if type(i) is int and 0 <= i < vocab_size]
    return tuple(dict.fromkeys(whole))


def _control_ids(
    document: Mapping[str, Any], text: Any, names: Mapping[str, str], stops: Sequence[int]
) -> dict[str, int]:
    """Special tokens, and what ends or frames a text even where it is not marked special."""
    added = document.get("added_tokens", ())
    held = {token["content"]: bool(token.get("special")) for token in added}
    framing = {*names.values(), *(text.id_to_token(stop) for stop in stops)}
    wanted = [name for name, is_special in held.items() if is_special or name in framing]
    numbers = {name: text.token_to_id(name) for name in wanted if not name.isspace()}
    return {name: int(number) for name, number in numbers.items() if number is not None}


def _chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The file beside the tokenizer wins over the setting, as in transformers."""
    stated = settings.get("chat_template")
    found: dict[str, str] = {}
    if isinstance(stated, str):
        found["default"] = stated
    elif isinstance(stated, dict):
        found |= {str(k): v for k, v in stated.items() if isinstance(v, str)}
    elif isinstance(stated, list):
        entries = [i for i in stated if isinstance(i, dict) and isinstance(i.get("template"), str)]
        found |= {str(entry.get("name", "default")): entry["template"] for entry in entries}
    others = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    for name, path in [("default", folder / "chat_template.jinja"), *((p.stem, p) for p in others)]:
        text = read_text(path)
        if text is not None:
            found[name] = text
    return found


def read_text(path: Path) -> str | None:
    """A text file in UTF-8; None where there is no such file."""
    data = read_model_file(path)
    try:
        return None if data is None else data.decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path} is not UTF-8: {error}.", remedy=_AGAIN) from error


def _end_tokens(text: Any) -> tuple[int, ...]:
    """What a plain `encode` puts last."""
    num_bare = len(text.encode("a", add_special_tokens=False).ids)
    mask = text.encode("a").special_tokens_mask
    num_ending = next((n for n, is_special in enumerate(reversed(mask)) if not is_special), 0)
    extra = len(mask) - num_bare
    return tuple(text.encode("a").ids[-min(num_ending, extra) :]) if num_ending and extra else ()


def _begin_token(text: Any, control: ControlTokens) -> str | None:
    """What a plain `encode` puts first. As in transformers 5, the tokenizer file alone decides."""
    bare = text.encode("a", add_special_tokens=False).ids
    framed = text.encode("a").ids
    if not framed or framed[:1] == bare[:1]:
        return None
    name = text.id_to_token(framed[0])
    return name if name in control.alias_of else None
