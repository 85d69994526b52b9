"""A Hugging Face tokenizer as GGUF metadata, checked against llama.cpp's own tokenizer."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightfit.core.errors import InvalidInputError
from tightfit.core.files import temporary_folder
from tightfit.data.tokenizer import ChatTokenizer, load_tokenizer
from tightfit.runtime.gguf.unpack import OTHERS, PRE_TOKENIZERS, read_steps, recognise
from tightfit.runtime.llama_cpp import LlamaModel, has_llama
from tightfit.runtime.model_files import read_json

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Token types. Source: `gguf.TokenType`."""
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_PHI3 = re.compile("phi-?3", re.IGNORECASE)
_PHI3_TOKENS = ("<unk>", "<s>", "</s>", "<|endoftext|>")
_SLOTS = ("eos", "eot", "eom")
"""Where GGUF can name tokens that end an answer."""
_END_BY_TEXT = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "<|end_of_text|>",
    "<eos>",
)
"""Tokens that end an answer in llama.cpp whatever the file says. Source: `llama-vocab.cpp`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One description of a tokenizer in llama.cpp's terms."""

    model: str
    """`gpt2`: merges over bytes; `llama`: scores over characters; `t5`: most likely pieces."""
    pre: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Everything under `tokenizer.` in a GGUF file, but the scheme."""

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    scores: tuple[float, ...] | None = None
    merges: tuple[str, ...] | None = None
    charsmap: bytes | None = None
    schemes: tuple[Scheme, ...]
    """Best guess first."""
    marks: Mapping[str, int]
    """`bos`, `eos`, `eot`, `eom`, `unk`, `pad` to token numbers."""
    adds_bos: bool
    adds_eos: bool
    adds_space: bool
    templates: Mapping[str, str]
    strips_right: bool
    """Control tokens strip the spaces after them, as Phi-3's do."""
    notes: tuple[str, ...]


def read_vocabulary(folder: Path, num_rows: int) -> tuple[Vocabulary, ChatTokenizer]:
    """The vocabulary of a model folder, padded to the rows of the model's embedding."""
    tokenizer = load_tokenizer(folder)
    document = json.loads((folder / "tokenizer.json").read_bytes())
    kind = _kind(document, folder)
    tokens, types = _list_tokens(tokenizer, document, folder, num_rows)
    if kind == "llama":
        tokens, types = _as_pieces(tokens, types, tokenizer)
    # llama.cpp aborts the process where two tokens have the same text.
    seen: dict[str, int] = {}
    for number, token in enumerate(tokens):
        first = seen.setdefault(token, number)
        if first != number:
            raise InvalidInputError(
                f"Tokens {first} and {number} of {folder} are both {token!r}.",
                remedy="use the model with --engine transformers",
            )
    marks, notes = _choose_marks(tokenizer)
    added = document.get("added_tokens", ())
    strips = any(entry.get("special") and entry.get("rstrip") for entry in added)
    vocabulary = Vocabulary(
        tokens=tuple(tokens),
        types=tuple(types),
        scores=_scores(kind, document, tokens),
        merges=tuple(_merges(document)) if _is_bpe(document) else None,
        charsmap=_charsmap(document.get("normalizer")),
        schemes=_list_schemes(kind, document),
        marks=marks,
        adds_bos=tokenizer.begins_with is not None,
        adds_eos=_adds_end(folder, marks.get("eos")),
        adds_space=_adds_space(document),
        templates=dict(tokenizer.chat_templates),
        strips_right=strips and set(_PHI3_TOKENS) <= set(tokens),
        notes=tuple(notes),
    )
    return vocabulary, tokenizer


def write_vocabulary(writer: Any, vocabulary: Vocabulary, scheme: Scheme, name: str) -> None:
    """Into a GGUFWriter, with the model's name, which llama.cpp's tokenizer looks at."""
    writer.add_name(name_model(name, vocabulary))
    writer.add_tokenizer_model(scheme.model)
    writer.add_tokenizer_pre(scheme.pre)
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types(list(vocabulary.types))
    if vocabulary.scores is not None and scheme.model != "gpt2":
        writer.add_token_scores(list(vocabulary.scores))
    if vocabulary.merges is not None and scheme.model == "gpt2":
        writer.add_token_merges(list(vocabulary.merges))
    if scheme.model == "t5" and vocabulary.charsmap is not None:
        writer.add_precompiled_charsmap(vocabulary.charsmap)
    for role, number in vocabulary.marks.items():
        getattr(writer, f"add_{role}_token_id")(number)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_eos_token(vocabulary.adds_eos)
    writer.add_add_space_prefix(vocabulary.adds_space)
    templates = vocabulary.templates
    if len(templates) == 1 or (templates and "default" not in templates):
        writer.add_chat_template(next(iter(templates.values())))
    elif templates:
        listed = [{"name": name, "template": text} for name, text in templates.items()]
        writer.add_chat_template(listed)


def name_model(name: str, vocabulary: Vocabulary) -> str:
    """A name under which llama.cpp treats control tokens as this tokenizer does.

    It has them swallow spaces where the model's name says phi-3 or phi3, and fails
    there without Phi-3's own tokens. Source: `llama-vocab.cpp`.
    """
    if vocabulary.strips_right:
        return name if _PHI3.search(name) else f"{name} (phi-3 tokens)"
    return _PHI3.sub("phi 3", name)


def _kind(document: Mapping[str, Any], folder: Path) -> str:
    model = document.get("model", {})
    is_bytes = any(step[0] == "ByteLevel" for step in read_steps(document.get("pre_tokenizer")))
    if _is_bpe(document):
        return "gpt2" if is_bytes else "llama"
    if model.get("type") == "Unigram":
        return "t5"
    raise InvalidInputError(
        f"The tokenizer of {folder} is of the kind {model.get('type')}, which llama.cpp's text "
        "models do not have.",
        remedy="use the model with --engine transformers",
    )


def _is_bpe(document: Mapping[str, Any]) -> bool:
    model = document.get("model", {})
    return "merges" in model and model.get("type", "BPE") == "BPE"


def _list_tokens(
    tokenizer: ChatTokenizer, document: Mapping[str, Any], folder: Path, num_rows: int
) -> tuple[list[str], list[int]]:
    """Tokens by number; rows of the model without a token are filled up, as llama.cpp wants."""
    stated = read_json(folder / "tokenizer_config.json").get("added_tokens_decoder", {})
    added = {int(number): entry for number, entry in stated.items()}
    added |= {int(entry["id"]): entry for entry in document.get("added_tokens", ())}
    vocab = document.get("model", {}).get("vocab", {})
    last = max(vocab.values(), default=-1) if isinstance(vocab, dict) else len(vocab) - 1
    last = max(last, *added, -1)
    if last >= num_rows:
        raise InvalidInputError(
            f"The tokenizer has {last + 1:,} tokens and the model rows for {num_rows:,}.",
            remedy="use the tokenizer that belongs to this model, or give the model more rows "
            "(transformers: resize_token_embeddings)",
        )
    control = set(tokenizer.control.ids.values())
    tokens, types = [], []
    for number in range(num_rows):
        name = tokenizer.token_name(number)
        if tokenizer.token_id(name) != number:
            tokens.append(f"[PAD{number}]")
            types.append(UNUSED)
            continue
        tokens.append(name)
        if number in control or added.get(number, {}).get("special"):
            types.append(CONTROL)
        else:
            types.append(USER_DEFINED if number in added else NORMAL)
    return tokens, types


def _as_pieces(
    tokens: Sequence[str], types: Sequence[int], tokenizer: ChatTokenizer
) -> tuple[list[str], list[int]]:
    """SentencePiece's types: byte pieces, the unknown piece, and spaces as users type them."""
    unknown = tokenizer.names.get("unk_token")
    new_tokens, new_types = [], []
    for token, kind in zip(tokens, types, strict=True):
        is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        if is_byte and kind in (NORMAL, USER_DEFINED):
            new_types.append(BYTE)
        elif token == unknown:
            new_types.append(UNKNOWN)
        else:
            new_types.append(kind)
        is_typed = kind == USER_DEFINED
        new_tokens.append(token.replace(_SPACE, " ") if is_typed else token)
    return new_tokens, new_types


def _scores(
    kind: str, document: Mapping[str, Any], tokens: Sequence[str]
) -> tuple[float, ...] | None:
    """What decides between pieces: the order of merges, or the model's own log probabilities."""
    if kind == "gpt2":
        return None
    if kind == "t5":
        stated = [float(score) for _, score in document["model"]["vocab"]]
        return tuple(stated + [-10_000.0] * (len(tokens) - len(stated)))[: len(tokens)]
    ranks: dict[str, int] = {}
    for merge in _merges(document):
        ranks.setdefault(merge.replace(" ", "", 1), len(ranks))
    vocab = document["model"]["vocab"]
    for token in sorted(vocab, key=vocab.__getitem__):
        ranks.setdefault(token, len(ranks))
    return tuple(-float(ranks.get(token, len(tokens))) for token in tokens)


def _merges(document: Mapping[str, Any]) -> list[str]:
    merges = document.get("model", {}).get("merges", ())
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


def _list_schemes(kind: str, document: Mapping[str, Any]) -> tuple[Scheme, ...]:
    if kind == "t5":
        return (Scheme(model="t5", pre="default"),)
    if kind == "llama":
        by_score = Scheme(model="llama", pre="default")
        # Merges over characters, for tokenizers whose merges are not those of their scores.
        by_merge = Scheme(model="gpt2", pre="sarvam-moe")
        return (by_score,) if _adds_space(document) else (by_score, by_merge)
    known = recognise(document)
    names = dict.fromkeys([*([known] if known else []), *PRE_TOKENIZERS, *OTHERS])
    return tuple(Scheme(model="gpt2", pre=name) for name in names)


def _choose_marks(tokenizer: ChatTokenizer) -> tuple[dict[str, int], list[str]]:
    """Token numbers by role. Every stop token gets a place, or is one that needs none."""
    marks: dict[str, int] = {}
    for role in ("bos", "eos", "unk", "pad"):
        name = tokenizer.names.get(f"{role}_token")
        number = tokenizer.token_id(name) if name else None
        if number is not None:
            marks[role] = number
    stops = list(dict.fromkeys([*([marks["eos"]] if "eos" in marks else []), *tokenizer.stop_ids]))
    # Those that llama.cpp would not know by their text come first.
    stops[1:] = sorted(stops[1:], key=lambda n: tokenizer.token_name(n) in _END_BY_TEXT)
    for slot, number in zip(_SLOTS, stops, strict=False):
        marks[slot] = number
    lost = [tokenizer.token_name(n) for n in stops[len(_SLOTS) :]]
    lost = [name for name in lost if name not in _END_BY_TEXT]
    notes = [f"GGUF has no place for the stop token {name}; add --stop '{name}'." for name in lost]
    return marks, notes


def _adds_space(document: Mapping[str, Any]) -> bool:
    """Whether a text is begun with a space, as SentencePiece does by default."""
    found = json.dumps(document.get("normalizer")) + json.dumps(document.get("pre_tokenizer"))
    # tokenizers writes a Prepend normalizer, or a Metaspace with its scheme.
    has_prepend = '"Prepend"' in found
    has_scheme = any(f'"prepend_scheme": "{how}"' in found for how in ("first", "always"))
    return has_prepend or ('"Metaspace"' in found and has_scheme)


def _adds_end(folder: Path, eos: int | None) -> bool:
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("a").ids
    return eos is not None and len(ids) > 1 and ids[-1] == eos


def _charsmap(normalizer: Any) -> bytes | None:
    """The table that SentencePiece normalizes by."""
    if not isinstance(normalizer, dict):
        return None
    if normalizer.get("type") == "Sequence":
        found = (_charsmap(part) for part in normalizer.get("normalizers", ()))
        return next((table for table in found if table is not None), None)
    text = normalizer.get("precompiled_charsmap")
    return base64.b64decode(text) if text else None


# The check: which scheme makes llama.cpp tokenize as the model's own tokenizer does.

TEXTS = (
    "Hello world, how's it going? I'VE been told she'll DON'T we'd they're I'm.",
    "3 33 333 3333 33333 1234567890 3.14 1,000,000 0x1F 2024-01-31 12:59:01 №5 ½ ² ٣٤ १२",
    "two  three   four    five     spaces\ttab\t\ttabs \t mixed, trailing ",
    "line\nline\n\nline\n\n\n  indented\r\nwindows\r\n\r\n end \n",
    "def f(x: int) -> str:\n    return f'{x!r}'  # 100%\n\n\tif (a<=b && c!=d) { e[i]++; }",
    "SELECT name, COUNT(*) FROM singer WHERE age >= 20 GROUP BY name ORDER BY 2 DESC;",
    "snake_case camelCase HTTPServer __init__ a-b-c e.g. i.e. U.S.A. foo@bar.com https://x.y/z?a=b",
    "«Привет», naïve café Ünïcödé Straße İstanbul ﬁ ǆ ŉ",
    "我想在apple工作1314151天～ 日本語テスト カタカナ 한국어 시험 कृपया ภาษาไทย العربية עברית កាន់តែ",
    "🚀 😶\u200d🌫️ 👩\u200d👩\u200d👧 ✅🦙🦙 \u200b\ufeff\u00a0nbsp\u2003em\u3000wide …—–‘’“”",
    "''''''```````\"\"\"\"......!!!!!!?????? ------======= ///\\\\\\ ~~~ ^^^ $$$ ### @@@ <<>> [[]]",
)
"""Unicode, numbers, spaces, code, contractions: where tokenizers differ."""
_EDGES = {
    "text that begins with a space": "  leading and trailing ",
    "letters with separate accents (llama.cpp does not compose them)": "cafe\u0301 n\u0303o",
}
"""Known differences of llama.cpp for a whole kind of tokenizers; worth a note."""


def settle_scheme(
    vocabulary: Vocabulary, encode: Callable[[str], list[int]]
) -> tuple[Scheme, list[str]]:
    """The first scheme under which llama.cpp agrees on every text; refuses where none does.

    Without llama.cpp the best guess stands, with a note that it was not checked.
    """
    guess = vocabulary.schemes[0]
    if not has_llama():
        return guess, [
            f"The tokenizer is written as `{guess.pre}` and was not checked against llama.cpp, "
            "which is not installed (pip install 'tightfit[gguf]')."
        ]
    refusal: InvalidInputError | None = None
    for scheme in vocabulary.schemes:
        found, edges = compare_scheme(vocabulary, scheme, encode)
        if found is None:
            named = [] if scheme == guess else [f"llama.cpp cuts text as `{scheme.pre}`."]
            return scheme, [*named, *(f"llama.cpp itself cuts {edge} otherwise." for edge in edges)]
        refusal = refusal or found
    assert refusal is not None
    raise refusal


def compare_scheme(
    vocabulary: Vocabulary, scheme: Scheme, encode: Callable[[str], list[int]]
) -> tuple[InvalidInputError | None, list[str]]:
    """The first difference of llama.cpp with this scheme, and the known edges that differ."""
    control = [t for t, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == 3]
    edges = dict(_EDGES)
    if control:
        edges["text behind a control token"] = f"a{control[0]}b {control[0]} c"
    with temporary_folder() as folder:
        path = folder / "vocabulary.gguf"
        _write_probe(path, vocabulary, scheme)
        try:
            model = LlamaModel(path, num_positions=32)
        except InvalidInputError:  # a scheme that this release of llama.cpp does not know
            return _refusal(TEXTS[0], encode(TEXTS[0]), []), []
        with model:
            for text in TEXTS:
                ours, theirs = encode(text), model.tokenize(text)
                if ours != theirs:
                    return _refusal(text, ours, theirs), []
            return None, [
                name for name, text in edges.items() if encode(text) != model.tokenize(text)
            ]


def _write_probe(path: Path, vocabulary: Vocabulary, scheme: Scheme) -> None:
    """The real vocabulary on the smallest model that llama.cpp loads."""
    import gguf
    import numpy as np

    width = 32
    writer: Any = gguf.GGUFWriter(path, "llama")
    for size in ("context_length", "embedding_length", "feed_forward_length"):
        getattr(writer, f"add_{size}")(width)
    for count in ("block_count", "head_count", "head_count_kv"):
        getattr(writer, f"add_{count}")(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width)
    write_vocabulary(writer, vocabulary, scheme, "probe")
    square = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(vocabulary.tokens), width),
        "output_norm.weight": (width,),
        "blk.0.attn_norm.weight": (width,),
        "blk.0.ffn_norm.weight": (width,),
    }
    shapes |= {f"blk.0.{name}.weight": (width, width) for name in square}
    for name, shape in shapes.items():
        kind = np.float32 if len(shape) == 1 else np.float16
        writer.add_tensor(name, np.zeros(shape, dtype=kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _refusal(text: str, ours: list[int], theirs: list[int]) -> InvalidInputError:
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), 0)
    return InvalidInputError(
        "llama.cpp knows no way of cutting text as this model's tokenizer does: "
        f"{text[:60]!r} is {ours[at : at + 4]} here and {theirs[at : at + 4]} there, from token "
        f"{at} on.",
        remedy="use the model with --engine transformers; tightfit quantize --to nf4 or gptq-4 "
        "shrinks it",
    )
