"""Convert a GGUF file to a Hugging Face folder: tensor by tensor, and its tokenizer as
tokenizer.json; llama.cpp's pre-tokenizers by name.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.errors import InvalidInputError
from tightfit.models.families.registry import FAMILIES
from tightfit.models.family import GgufLayout
from tightfit.runtime.gguf.file import (
    PLAIN,
    GgufFile,
    changed_shape,
    find_layout_change,
    make_name_lookup,
    read_rope,
)
from tightfit.runtime.libraries import silence_libraries
from tightfit.runtime.tensor_files import FolderPlan, Output

if TYPE_CHECKING:
    import torch


# The tokenizer in a GGUF file as tokenizer.json, and llama.cpp's pre-tokenizers by name.

# How text is cut before BPE: llama.cpp's names and the tokenizer.json forms they stand for.

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
    """Words that end where an upper-case letter follows a lower-case one."""
    lower = f"{_START}{_UPPER}*{_LOWER}+{ending}"
    return f"{lower}|{_START}{_UPPER}+{_LOWER}*{ending}"


_CASED_WORDS = _cased("") + r"|\p{N}" + _SIGNS_AND_SLASH + _TAIL
_GPT4O = _cased(_CONTRACTIONS + "?") + r"|\p{N}{1,3}" + _SIGNS_AND_SLASH + _TAIL
_BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"

Step = tuple[object, ...]
"""One pre-tokenizer: its type and the settings that matter."""
_BYTES: Step = ("ByteLevel", False)
_BYTES_AND_WORDS: Step = ("ByteLevel", True)


PRE_TOKENIZERS: Mapping[str, tuple[Step, ...]] = {
    "gpt-2": (_BYTES_AND_WORDS,),
    "llama-bpe": (("Split", _THREE_DIGITS), _BYTES),
    "dbrx": (("Split", _THREE_DIGITS), _BYTES),
    "qwen2": (("Split", _ONE_DIGIT), _BYTES),
    "qwen35": (("Split", _WITH_MARKS), _BYTES),
    "tekken": (("Split", _CASED_WORDS), _BYTES),
    "gpt-4o": (("Split", _GPT4O), _BYTES),
    "smollm": (("Digits", True), _BYTES_AND_WORDS),
    "falcon": (
        ("Punctuation", "Contiguous"),
        _BYTES_AND_WORDS,
        ("Digits", False),
        ("Split", "[0-9][0-9][0-9]"),
    ),
    "bloom": (("Split", _BLOOM), _BYTES),
}
"""Sources: `src/llama-vocab.cpp` of llama.cpp; the tokenizer.json of one model of each name."""
_IGNORES_MERGES = ("llama-bpe", "tekken")
"""A whole word that is in the vocabulary is taken without merging."""
OTHERS = (
    *("deepseek-llm", "deepseek-coder", "deepseek-v3", "minicpm5", "viking", "chameleon"),
    *("superbpe", "default"),
)
"""Other names of llama.cpp, tried if no form above matches."""


def recognise(document: Mapping[str, Any]) -> str | None:
    """llama.cpp's name for a tokenizer.json's pre-tokenizer; None if it is not one above."""
    steps = read_steps(document.get("pre_tokenizer"))
    ignores = bool(document.get("model", {}).get("ignore_merges", False))
    same = [name for name, known in PRE_TOKENIZERS.items() if known == steps]
    exact = [name for name in same if (name in _IGNORES_MERGES) == ignores]
    return next(iter(exact or same), None)


def read_steps(stated: Any) -> tuple[Step, ...]:
    """The steps of a `pre_tokenizer` entry, without settings that have no effect."""
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
    """The `pre_tokenizer` entry that splits as llama.cpp does under this name."""
    entries = [_entry(step) for step in PRE_TOKENIZERS[name]]
    return entries[0] if len(entries) == 1 else {"type": "Sequence", "pretokenizers": entries}


def _entry(step: Step) -> dict[str, Any]:
    kind, setting = step
    settings: dict[Any, dict[str, Any]] = {
        "ByteLevel": {"add_prefix_space": False, "trim_offsets": True, "use_regex": setting},
        "Digits": {"individual_digits": setting},
        "Punctuation": {"behavior": setting},
        "Split": {"pattern": {"Regex": setting}, "behavior": "Isolated", "invert": False},
    }
    return {"type": kind, **settings[kind]}


_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_CONTROL, _UNKNOWN, _USER_DEFINED, _UNUSED = 3, 2, 4, 5
_SPECIAL_TOKENS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
}
_ALIKE = {
    # Files without the key, old ones too: transformers reads them like this.
    "default": "gpt-2",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "falcon3": "llama-bpe",
    "smaug-bpe": "dbrx",
    "deepseek-r1-qwen": "qwen2",
    "megrez": "qwen2",
    "stablelm2": "qwen2",
    "phi-2": "gpt-2",
    "olmo": "gpt-2",
    "mpt": "gpt-2",
    "starcoder": "smollm",
    "refact": "smollm",
    "command-r": "smollm",
    "llama4": "gpt-4o",
}
"""Names of llama.cpp that split like another one. Source: `llama-vocab.cpp`."""


def read_special_tokens(file: GgufFile) -> dict[str, int]:
    """`bos`, `eos`, `eot`, `eom`, `unk`, `pad`: those that the file defines."""
    count = len(_tokens(file))
    found = {
        role: file.metadata.get(f"tokenizer.ggml.{key}") for role, key in _SPECIAL_TOKENS.items()
    }
    return {role: int(n) for role, n in found.items() if n is not None and int(n) < count}


def write_tokenizer_folder(file: GgufFile, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, the chat templates and the stop tokens."""
    special_ids = read_special_tokens(file)
    tokens = _tokens(file)
    document = _document(file, tokens, special_ids)
    (folder / "tokenizer.json").write_text(json.dumps(document, ensure_ascii=False))
    roles = ("bos", "eos", "unk", "pad")
    named = {f"{role}_token": tokens[special_ids[role]] for role in roles if role in special_ids}
    settings = named | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text)
    template = file.metadata.get("tokenizer.chat_template")
    if template:
        (folder / "chat_template.jinja").write_text(str(template), encoding="utf-8")
    for key, text in file.metadata.items():
        if key.startswith("tokenizer.chat_template."):
            others = folder / "additional_chat_templates"
            others.mkdir(exist_ok=True)
            name = Path(key.removeprefix("tokenizer.chat_template.")).name
            (others / f"{name}.jinja").write_text(str(text), encoding="utf-8")
    stops = dict.fromkeys(special_ids[r] for r in ("eos", "eot", "eom") if r in special_ids)
    stated: dict[str, Any] = {"eos_token_id": list(stops)} if stops else {}
    stated |= {f"{r}_token_id": special_ids[r] for r in ("bos", "pad") if r in special_ids}
    (folder / "generation_config.json").write_text(json.dumps(stated, indent=2) + "\n")


def _tokens(file: GgufFile) -> list[str]:
    return [str(token) for token in file.metadata.get("tokenizer.ggml.tokens", ())]


def _document(file: GgufFile, tokens: Sequence[str], special_ids: dict[str, int]) -> dict[str, Any]:
    model = str(file.metadata.get("tokenizer.ggml.model", ""))
    pre = str(file.metadata.get("tokenizer.ggml.pre", "default"))
    if model == "gpt2":
        parts = _byte_level(file, tokens, _ALIKE.get(pre, pre))
    elif model == "llama":
        parts = _pieces(file, tokens, special_ids)
    elif model == "t5":
        parts = _unigram(file, tokens, special_ids)
    else:
        raise InvalidInputError(
            f"{file.path} has a tokenizer of the kind {model or 'unnamed'}, which cannot be "
            "converted.",
            remedy="name the model's own folder instead",
        )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(file, tokens, special_ids),
        **parts,
        "post_processor": _framing(file, tokens, special_ids),
    }


def _byte_level(file: GgufFile, tokens: Sequence[str], pre: str) -> dict[str, Any]:
    if pre not in PRE_TOKENIZERS:
        raise InvalidInputError(
            f"{file.path} cuts text as `{pre}`, whose tokenizer.json form is not known here.",
            remedy="name the model's own folder instead",
        )
    merges = [str(merge) for merge in file.metadata.get("tokenizer.ggml.merges", ())]
    return {
        "normalizer": {"type": "NFC"} if pre in ("qwen2", "qwen35") else None,
        "pre_tokenizer": write_steps(pre),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
        "model": {
            "type": "BPE",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre in _IGNORES_MERGES,
            "vocab": _vocab(file, tokens),
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }


def _pieces(file: GgufFile, tokens: Sequence[str], special_ids: dict[str, int]) -> dict[str, Any]:
    """Merges by score: every way to split a piece, best pieces first."""
    spelt = [token.replace(" ", _SPACE) for token in tokens]
    vocab = _vocab(file, spelt)
    scores = [float(score) for score in file.metadata["tokenizer.ggml.scores"]]
    types = _types(file, tokens)
    numbers = [n for n in vocab.values() if types[n] not in (_CONTROL, _UNKNOWN)]
    merges: list[list[str]] = []
    for number in sorted(numbers, key=lambda n: -scores[n]):
        piece = spelt[number]
        if len(piece) == 6 and piece.startswith("<0x"):
            continue
        splits = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        known = [pair for pair in splits if pair[0] in vocab and pair[1] in vocab]
        merges += [list(p) for p in sorted(known, key=lambda p: (vocab[p[0]], vocab[p[1]]))]
    adds_space = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    return {
        "normalizer": _spacing(adds_space),
        "pre_tokenizer": None,
        "decoder": _piece_decoder(adds_space),
        "model": {
            "type": "BPE",
            "unk_token": spelt[special_ids["unk"]] if "unk" in special_ids else None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }


def _unigram(file: GgufFile, tokens: Sequence[str], special_ids: dict[str, int]) -> dict[str, Any]:
    scores = [float(score) for score in file.metadata["tokenizer.ggml.scores"]]
    adds_space = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    table = file.metadata.get("tokenizer.ggml.precompiled_charsmap")
    steps: list[dict[str, Any]] = []
    if table:
        text = base64.b64encode(bytes(int(byte) & 0xFF for byte in table)).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": text})
    steps += _spacing(adds_space)["normalizers"]
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": _piece_decoder(adds_space),
        "model": {
            "type": "Unigram",
            "unk_id": special_ids.get("unk"),
            "vocab": [list(pair) for pair in zip(tokens, scores, strict=True)],
            "byte_fallback": False,
        },
    }


def _spacing(adds_space: bool) -> dict[str, Any]:
    first = [{"type": "Prepend", "prepend": _SPACE}] if adds_space else []
    rest = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    return {"type": "Sequence", "normalizers": [*first, rest]}


def _piece_decoder(adds_space: bool) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if adds_space:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _vocab(file: GgufFile, tokens: Sequence[str]) -> dict[str, int]:
    """Tokens by name, without padding rows."""
    types = _types(file, tokens)
    return {token: n for n, token in enumerate(tokens) if types[n] != _UNUSED}


def _types(file: GgufFile, tokens: Sequence[str]) -> list[int]:
    stated = file.metadata.get("tokenizer.ggml.token_type")
    return [int(kind) for kind in stated] if stated is not None else [1] * len(tokens)


def _added(
    file: GgufFile, tokens: Sequence[str], special_ids: dict[str, int]
) -> list[dict[str, Any]]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = set(special_ids.values())
    added = []
    for number, (token, kind) in enumerate(zip(tokens, _types(file, tokens), strict=True)):
        if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED):
            is_special = kind != _USER_DEFINED or number in special
            added.append({"id": number, "content": token, **flags, "special": is_special})
    return added


def _framing(
    file: GgufFile, tokens: Sequence[str], special_ids: dict[str, int]
) -> dict[str, Any] | None:
    """The post-processor that adds special tokens around a text."""
    is_pieces = file.metadata.get("tokenizer.ggml.model") == "llama"
    adds = {
        role: role in special_ids
        and bool(file.metadata.get(f"tokenizer.ggml.add_{role}_token", usual))
        for role, usual in (("bos", is_pieces), ("eos", False))
    }
    if not any(adds.values()):
        return None

    def around(name: str, type_id: int) -> list[dict[str, Any]]:
        parts: dict[str, dict[str, Any]] = {
            role: {"SpecialToken": {"id": tokens[special_ids[role]], "type_id": type_id}}
            for role, is_added in adds.items()
            if is_added
        }
        text = {"Sequence": {"id": name, "type_id": type_id}}
        return [part for part in (parts.get("bos"), text, parts.get("eos")) if part]

    used = {tokens[special_ids[role]]: special_ids[role] for role in adds if adds[role]}
    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {
            token: {"id": token, "ids": [number], "tokens": [token]}
            for token, number in used.items()
        },
    }


_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def plan_unpack(path: Path, dtype: torch.dtype | None = None) -> FolderPlan:
    """Parse the file; raises for what transformers would compute differently."""
    silence_libraries()
    file = GgufFile(path)
    special_ids = read_special_tokens(file)
    layout, config = read_config(file, special_ids)
    wanted = dtype or _stored_dtype(file)
    sources, outputs = _match_tensors(file, layout, config, wanted)

    def produce(output: Output) -> torch.Tensor:
        values = file.read(sources[output.name])
        change = find_layout_change(layout, output.name, config)
        return (change.undo(values) if change else values).to(output.dtype).contiguous()

    def write_others(folder: Path) -> None:
        write_tokenizer_folder(file, folder)
        config.dtype = wanted
        config.save_pretrained(str(folder))

    def count_bytes(output: Output) -> int:
        """Of one tensor as stored, twice in fp32 if quantized, and as written."""
        place = file.tensors[sources[output.name]]
        unpacked = 0 if place.kind.name in PLAIN else 2 * 4 * output.num_values
        return place.num_bytes + unpacked + 2 * output.num_bytes

    return FolderPlan(
        outputs=tuple(outputs),
        produce=produce,
        write_others=write_others,
        extra_bytes=max(map(count_bytes, outputs)),
        notes=tuple(_notes(file)),
    )


def read_config(file: GgufFile, special_ids: dict[str, int]) -> tuple[GgufLayout, Any]:
    """The family's layout and a transformers config."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    family = file.family
    if family is None or family.gguf is None or family.gguf.read_settings is None:
        layouts = ((each.architecture, each.gguf) for each in FAMILIES.values())
        known = sorted({name for name, layout in layouts if layout and layout.read_settings})
        kind = file.architecture + (" with experts" if file.architecture in known else "")
        raise InvalidInputError(
            f"{file.path} is of the architecture {kind or 'unnamed'}, which cannot be converted.",
            remedy=f"name a file of one of: {', '.join(known)}",
        )
    layout, model_type = family.gguf, family.model_types[0]
    read_settings = family.gguf.read_settings
    rope: dict[str, Any] = {}
    if layout.has_rotary:
        even = int(file.get("embedding_length")) // int(file.get("attention.head_count"))
        rope = read_rope(file, int(file.get("attention.key_length", even)), layout.rope_theta)
    settings = read_settings(file, rope) | {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]],
        **{f"{name}_token_id": special_ids.get(name) for name in ("bos", "eos", "pad")},
    }
    return layout, AutoConfig.for_model(model_type, **settings)


def _match_tensors(
    file: GgufFile, layout: GgufLayout, config: Any, dtype: torch.dtype
) -> tuple[dict[str, str], list[Output]]:
    """The file's tensors by transformers' names; raises unless they are those of its model."""
    import torch
    import transformers

    assert file.family is not None
    library: Any = transformers
    with torch.device("meta"):
        model: Any = library.AutoModelForCausalLM.from_config(config)
    look_up = make_name_lookup(file.family, int(config.num_hidden_layers))
    unused = set(file.tensors) - set(_ROPE_TENSORS)
    sources: dict[str, str] = {}
    outputs, problems = [], []
    for name, parameter in model.named_parameters():
        stored = look_up(name)
        if stored is None or stored not in unused:
            problems.append(f"lacks {name}")
            continue
        unused.remove(stored)
        shape = file.tensors[stored].shape
        change = find_layout_change(layout, name, config)
        if change is not None:
            shape = changed_shape(change.undo, shape)
        if shape != tuple(parameter.shape):
            problems.append(f"has {name} as {list(shape)}")
        sources[name] = stored
        outputs.append(Output(name=name, shape=shape, dtype=dtype))
    if unused:
        problems.append(f"holds {min(unused)}, which no {config.model_type} model has")
    if problems:
        raise InvalidInputError(
            f"{file.path} {problems[0]}.", remedy="fetch or convert the file again"
        )
    return sources, outputs


def _stored_dtype(file: GgufFile) -> torch.dtype:
    """The dtype of most matrices; fp16 for quantized ones."""
    import torch

    plain = {"F32": torch.float32, "BF16": torch.bfloat16}
    kinds: Counter[str] = Counter()
    for place in file.tensors.values():
        if len(place.shape) > 1:
            kinds[place.kind.name] += place.num_bytes
    return plain.get(kinds.most_common(1)[0][0], torch.float16)


def _notes(file: GgufFile) -> list[str]:
    notes = []
    kinds = {p.kind.name for p in file.tensors.values() if len(p.shape) > 1}
    packed = sorted(kinds - set(PLAIN))
    if packed:
        notes.append(
            f"The file is quantized ({', '.join(packed)}): the folder holds those values, not the "
            "ones they were made from."
        )
    is_mistral = "mistral" in str(file.metadata.get("general.name", "")).lower()
    if file.architecture == "llama" and is_mistral:
        notes.append("llama.cpp calls Mistral models llama; the folder says so too.")
    return notes
