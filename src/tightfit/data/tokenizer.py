"""ChatTokenizer: a model folder's tokenizer, special tokens and chat template, without torch.

Each control token (`<|im_end|>`, `</s>`) gets an alias, one character of a private-use plane,
and the tokenizer is loaded with the aliases as its special tokens. So a message that spells
`<|im_end|>` is tokenized as plain text and cannot open or close a turn.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightfit.core.errors import InvalidInputError, NotFoundError, SetupError

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

    def encode_sealed(self, texts: Sequence[str]) -> list[Any]:
        """`tokenizers` encodings of texts in which control tokens are aliases; nothing is added."""
        return list(self._aliased.encode_batch(list(texts), add_special_tokens=False))

    def encode(self, text: str) -> list[int]:
        """Tokens of a text in which control tokens count wherever they stand; nothing is added."""
        return list(self._text.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text, control tokens included."""
        return str(self._text.decode([int(i) for i in token_ids], skip_special_tokens=False))

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
    """Read a model folder's tokenizer files. Everything is local; no code of the model runs."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise NotFoundError(
            f"{folder} holds no tokenizer.json.",
            remedy="save the model's fast tokenizer there: "
            "AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)",
        )
    document = _read_object(path)
    if not isinstance(document.get("model"), dict):
        raise InvalidInputError(
            f"{path} is no tokenizer: it has no `model`.",
            remedy="copy or download the model's tokenizer.json again",
        )
    settings = _read_object(folder / "tokenizer_config.json")
    config = _read_object(folder / "config.json")
    adapter = _read_object(folder / "adapter_config.json")  # whose folder has no config.json
    stated = _read_object(folder / "special_tokens_map.json") | settings
    names = {key: text for key in _NAMED if (text := _content(stated.get(key)))}
    listed = settings.get("added_tokens_decoder")
    tokens = listed.values() if isinstance(listed, dict) else ()
    special = [token for token in tokens if isinstance(token, dict) and token.get("special")]
    added = [text for token in special if (text := _content(token))]
    missing = _add_named(document, [*names.values(), *added])
    names = {key: text for key, text in names.items() if text not in missing}
    text = _build(document, folder)
    eos = text.token_to_id(names["eos_token"]) if "eos_token" in names else None
    generation = _read_object(folder / "generation_config.json")
    stops = _stop_ids(eos, generation, config, int(text.get_vocab_size(with_added_tokens=True)))
    control = make_control_tokens(_control_ids(document, text, names, stops))
    aliased = _build(alias_tokenizer(document, control.alias_of), folder)
    moved = [alias for alias, number in control.ids.items() if aliased.token_to_id(alias) != number]
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
        begins_with=_begin_token(text, control),
        is_encoder_decoder=bool(config.get("is_encoder_decoder"))
        or adapter.get("task_type") == "SEQ_2_SEQ_LM",
        notes=tuple(
            f"The tokenizer names `{name}`, which its vocabulary lacks." for name in missing
        ),
        _text=text,
        _aliased=aliased,
    )


def digest_files(folder: Path) -> str:
    """One digest over the tokenizer files of a folder."""
    digest = hashlib.blake2b(digest_size=16)
    for name in _FILES:
        path = folder / name
        if path.is_file():
            digest.update(f"{name} {path.stat().st_size}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            f"{path} cannot be read as JSON: {error}.",
            remedy="copy or download that file again",
        ) from error
    return value if isinstance(value, dict) else {}


def _content(value: Any) -> str | None:
    """A special token, written as text or as an object."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else None


def _add_named(document: dict[str, Any], names: Sequence[str]) -> list[str]:
    """Make named special tokens special, as transformers does; returns those with no number."""
    added = document.setdefault("added_tokens", [])
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
        if name in numbers:
            added.append({"id": numbers[name], "content": name, **flags, "special": True})
        else:
            missing.append(name)
    added.sort(key=lambda token: token["id"])
    return missing


def _build(document: Mapping[str, Any], folder: Path) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise SetupError(
            "Encoding data needs the tokenizers package, which is not installed.",
            remedy="pip install 'tightfit[data]'",
        ) from error
    try:
        built = tokenizers.Tokenizer.from_str(json.dumps(document))
    except Exception as error:  # the library raises bare Exception
        raise InvalidInputError(
            f"{folder / 'tokenizer.json'} is not a tokenizer this version reads: "
            f"{str(error)[:200]}.",
            remedy="pip install -U tokenizers, or download the model's tokenizer.json again",
        ) from error
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
    whole = [i for i in found if isinstance(i, int) and 0 <= i < vocab_size]
    return tuple(dict.fromkeys(whole))


def _control_ids(
    document: Mapping[str, Any], text: Any, names: Mapping[str, str], stops: Sequence[int]
) -> dict[str, int]:
    """Special tokens, and what ends or frames a text even where it is not marked special."""
    added = document.get("added_tokens", ())
    held = {token["content"]: bool(token.get("special")) for token in added}
    framing = {*names.values(), *(text.id_to_token(stop) for stop in stops)}
    wanted = [name for name, is_special in held.items() if is_special or name in framing]
    return {name: int(text.token_to_id(name)) for name in wanted if not name.isspace()}


def _chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The file beside the tokenizer wins over the setting, as in transformers."""
    stated = settings.get("chat_template")
    found: dict[str, str] = {}
    if isinstance(stated, str):
        found["default"] = stated
    elif isinstance(stated, dict):
        found |= {str(k): v for k, v in stated.items() if isinstance(v, str)}
    elif isinstance(stated, list):
        found |= {str(i["name"]): str(i["template"]) for i in stated if isinstance(i, dict)}
    own = folder / "chat_template.jinja"
    try:
        if own.is_file():
            found["default"] = own.read_text(encoding="utf-8")
        for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            found[path.stem] = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(
            f"A chat template in {folder} cannot be read: {error}.",
            remedy="copy or download that file again",
        ) from error
    return found


def _begin_token(text: Any, control: ControlTokens) -> str | None:
    """What a plain `encode` puts first. As in transformers 5, the tokenizer file alone decides."""
    bare = text.encode("a", add_special_tokens=False).ids
    framed = text.encode("a").ids
    if framed[:1] == bare[:1]:
        return None
    name = text.id_to_token(framed[0])
    return name if name in control.alias_of else None
