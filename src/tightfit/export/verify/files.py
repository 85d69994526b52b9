"""Comparison of two artefacts' files: settings, stored dtypes, tensors, templates, tokenizers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import UserError
from tightfit.core.findings import Finding, Status
from tightfit.core.text import list_some, printable
from tightfit.data.formats import Message
from tightfit.data.templates import TemplateRenderError
from tightfit.engines.protocol import Engine
from tightfit.export.merge import plan_merge
from tightfit.export.verify.verdict import fail, find_difference
from tightfit.models.families.registry import find_family
from tightfit.models.gguf import GgufHeader, read_gguf_header
from tightfit.runtime.model_files import Artefact, ArtefactKind, import_gguf, read_json
from tightfit.runtime.tensor_files import StoredWeights

if TYPE_CHECKING:
    import torch


_FREE = {
    *("_name_or_path", "architectures", "attn_implementation", "dtype", "torch_dtype"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "model_type", "quantization_config"),
    *("tie_word_embeddings", "transformers_version", "use_cache", "vocab_size"),
}
"""May differ, or are compared elsewhere."""
_CLOSE = 1e-5


def compare_settings(reference: Artefact, other: Artefact) -> list[Finding]:
    """RoPE differences fail: they may show only beyond the sample's length. Others warn."""
    config = _read_config(reference)
    if config is None or reference.kind is ArtefactKind.GGUF:
        return []
    if other.kind is ArtefactKind.GGUF:
        return list(_compare_gguf(config, read_gguf_header(other.path)))
    found = _read_config(other)
    return [] if found is None else list(_compare_configs(config, found))


def read_rounding_factor(artefact: Artefact) -> float:
    """Of the artefact's family; 1 for a GGUF file."""
    config = _read_config(artefact) or {}
    return find_family(str(config.get("model_type", ""))).rounding_factor


def _read_config(artefact: Artefact) -> dict[str, Any] | None:
    """As transformers understands it, so that old and new spellings are one."""
    from transformers import AutoConfig

    folder = artefact.base or artefact.path
    if not folder.is_dir():
        return None
    try:
        config = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        # Tuples become lists, as both sides must be comparable.
        return dict(json.loads(json.dumps(config.to_dict(), default=str)))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _compare_configs(one: dict[str, Any], two: dict[str, Any]) -> Iterator[Finding]:
    for key in sorted(set(one) | set(two)):
        if key in _FREE or _same(one.get(key), two.get(key)):
            continue
        is_rope = key.startswith("rope") or key in ("partial_rotary_factor", "sliding_window")
        what = "Rope settings differ" if key.startswith("rope") else "A setting differs"
        yield Finding(
            area="settings",
            status=Status.ERROR if is_rope else Status.WARNING,
            detail=f"{what}: {key} is {_show(two.get(key))} instead of {_show(one.get(key))}.",
            remedy="copy the setting from the reference's config.json, or make this one again",
        )


def _compare_gguf(config: dict[str, Any], header: GgufHeader) -> Iterator[Finding]:
    stated = header.metadata
    architecture = stated.get("general.architecture")
    rope = config.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        return  # by kind of layer, as in Gemma 3: only the scores can show a difference
    theta = rope.get("rope_theta", config.get("rope_theta"))
    found = stated.get(f"{architecture}.rope.freq_base")
    if theta is not None and found is not None and not _same(float(theta), found):
        yield _rope(f"rope's base is {found} instead of {theta}")
    kind = rope.get("rope_type", "default")
    scaling = stated.get(f"{architecture}.rope.scaling.type")
    factor = stated.get(f"{architecture}.rope.scaling.factor")
    has_table = any(tensor.name.startswith("rope_f") for tensor in header.tensors)
    if kind in ("linear", "yarn"):
        if not _same(float(rope.get("factor", 1.0)), factor):
            yield _rope(f"rope scaling by {rope.get('factor')} has become {factor}")
    elif kind in ("llama3", "longrope"):
        if not has_table:
            yield _rope(f"rope scaling of type {kind} is lost")
    elif scaling not in (None, "none") and factor not in (None, 1.0, 0.0):
        yield _rope(f"rope is scaled by {factor} where the reference's is not")


def _rope(what: str) -> Finding:
    remedy = "convert it again from the reference: tightfit convert REFERENCE --out FILE.gguf"
    return fail("settings", f"Rope settings differ: {what}.", remedy)


def _show(value: Any) -> str:
    return printable(json.dumps(value), most=120)


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, float | int) and isinstance(two, float | int):
        return abs(one - two) <= _CLOSE * max(abs(one), abs(two))
    if isinstance(one, dict) and isinstance(two, dict):
        return all(_same(one.get(key), two.get(key)) for key in {*one, *two})
    return bool(one == two) or (not one and not two)


def read_stored_dtype(artefact: Artefact) -> str | None:
    """The dtype of most bytes of an unquantized folder. None: quantized, or GGUF."""
    if artefact.kind not in (ArtefactKind.MODEL, ArtefactKind.ADAPTER):
        return None
    found = StoredWeights(artefact.base or artefact.path).main_dtype()
    return found and found.value


# Diagnosis: which tensors of a failed artefact differ, and how.

Read = Callable[[str], "torch.Tensor | None"]
FAR_FRACTION = 0.5
"""Of a tensor's norm: no usable quantization moves it this far."""
CLOSE_FRACTION = 0.02


def diagnose(reference: Artefact, other: Artefact, *, far: float = FAR_FRACTION) -> list[Finding]:
    """Findings that name tensors; none where the two cannot be compared tensor by tensor."""
    try:
        names, expected = _open(reference)
        held, found = _open(other)
    except UserError:
        return []
    import torch

    bad: dict[str, list[str]] = {}
    with torch.no_grad():
        for name in names:
            if name not in held:
                continue
            one, two = expected(name), found(name)
            if one is None or two is None or one.ndim > 2:
                continue
            what = _describe(one.float(), two.float(), far)
            if what is not None:
                bad.setdefault(what, []).append(name)
    return [_make_finding(what, tensors) for what, tensors in bad.items()]


def _describe(one: torch.Tensor, two: torch.Tensor, far: float) -> str | None:
    """What is wrong with the second; None: close enough, or only padded."""
    if one.shape != two.shape:
        is_turned = one.ndim == 2 and one.T.shape == two.shape
        is_padded = one.shape[1:] == two.shape[1:]
        return "transposed" if is_turned else None if is_padded else "of another shape"
    if float((one - two).norm()) <= far * float(one.norm()):
        return None
    what = "with other values"
    if not bool(two.isfinite().all()):
        what = "not finite"
    elif not float(two.norm()):
        what = "all zero"
    elif one.ndim == 2 and one.shape[0] == one.shape[1] and _close(one.T, two):
        what = "transposed"
    elif one.ndim == 2 and _close(one.norm(dim=1).sort()[0], two.norm(dim=1).sort()[0]):
        what = "with rows in another order"
    return what


def _close(one: torch.Tensor, two: torch.Tensor) -> bool:
    return float((one - two).norm()) <= CLOSE_FRACTION * float(one.norm())


def _make_finding(what: str, names: list[str]) -> Finding:
    is_attention = all("q_proj" in name or "k_proj" in name for name in names)
    remedy = "make this one again from the reference"
    if what == "with rows in another order" and is_attention:
        remedy = "the q and k rows look permuted for another rope layout: convert it again"
    elif what == "all zero":
        remedy = "the file lost these weights: copy it or make it again"
    detail = f"{list_some(names)}: {what}."
    return Finding(area="tensors", status=Status.INFO, detail=detail, remedy=remedy)


def _open(artefact: Artefact) -> tuple[list[str], Read]:
    """Names as the model has them, and a reader; an adapter's are those of its merge."""
    if artefact.kind is ArtefactKind.ADAPTER and artefact.base is not None:
        plan = plan_merge(artefact.path, artefact.base)
        return [output.name for output in plan.outputs], plan.read
    folder = artefact.path
    if artefact.kind is ArtefactKind.GGUF:
        folder = import_gguf(artefact.path)
    elif artefact.kind is not ArtefactKind.MODEL:
        return [], lambda _: None
    whole = StoredWeights(folder)
    return list(whole.tensors), whole.read


# The dtype in which unquantized artefacts are compared: fp32 where it fits, for least noise.

_ROOM_FRACTION = 0.7
"""Of the free memory that weights may take; the rest is for scores and arithmetic."""


def choose_weights(artefact: Artefact, wanted: Dtype | None, device: str) -> Dtype | None:
    """For an unquantized folder, or an adapter on one. None: as stored."""
    if artefact.kind not in (ArtefactKind.MODEL, ArtefactKind.ADAPTER):
        return None
    if wanted is not None:
        return wanted
    stored = StoredWeights(artefact.base or artefact.path).tensors.values()
    needed = 4 * sum(tensor.num_values for tensor in stored)
    import torch

    free = psutil.virtual_memory().available
    if device != "cpu" and torch.cuda.is_available():
        free = sum(torch.cuda.mem_get_info(n)[0] for n in range(torch.cuda.device_count()))
    if needed <= _ROOM_FRACTION * free:
        return Dtype.FP32
    return Dtype(read_stored_dtype(artefact) or Dtype.BF16.value)


# Comparison of templates, tokenizers, special tokens and stop tokens.

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
    is_gguf = artefact.kind is ArtefactKind.GGUF
    metadata = read_gguf_header(artefact.path).metadata if is_gguf else {}
    in_file = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    stated = None
    if (artefact.tokenizer / "generation_config.json").is_file():
        found = read_json(artefact.tokenizer / "generation_config.json").get("eos_token_id")
        listed = found if isinstance(found, list) else [found]
        stated = frozenset(number for number in listed if isinstance(number, int))
    shown = [text for text in rendered if text]
    return TokenizerFacts(
        name=artefact.name,
        rendered=tuple(rendered),
        tokens=tuple(tuple(engine.tokenize(text)) for text in (*texts, *shown)),
        prompts=tuple(prompts),
        specials=named,
        stop_ids=frozenset({*prompter.stop_ids, *(n for n in in_file if isinstance(n, int))}),
        stated_stops=stated,
        is_gguf=is_gguf,
        vocabulary=None if is_gguf else _digest(artefact.tokenizer),
    )


def compare_tokenizers(reference: TokenizerFacts, other: TokenizerFacts) -> list[Finding]:
    """Findings of the areas `template`, `tokenizer` and `specials`; none: the same."""
    return [
        *_compare_templates(reference, other),
        *_compare_tokens(reference, other),
        *_compare_specials(reference, other),
    ]


def _compare_templates(reference: TokenizerFacts, other: TokenizerFacts) -> list[Finding]:
    for one, two in zip(reference.rendered, other.rendered, strict=True):
        if one == two:
            continue
        if one is None or two is None:
            which = "refuses" if two is None else "takes"
            text = f"The chat template {which} a conversation that the reference's does not."
        else:
            at = max(0, find_difference(one, two) - 10)
            text = (
                "The chat template writes another text: "
                f"{two[at : at + _SHOWN]!r} instead of {one[at : at + _SHOWN]!r}."
            )
        remedy = (
            "the model was tuned on the reference's template: copy its chat_template.jinja, or "
            "make this one again"
        )
        return [fail("template", text, remedy)]
    if reference.prompts != other.prompts and reference.tokens == other.tokens:
        remedy = "copy the reference's tokenizer files, or make this one again"
        return [fail("template", "The same prompt text becomes other tokens.", remedy)]
    return []


def _compare_tokens(reference: TokenizerFacts, other: TokenizerFacts) -> list[Finding]:
    remedy = (
        "answers will be worse in ways that no score shows: copy the reference's tokenizer.json "
        "and tokenizer_config.json, or make this one again from the reference"
    )
    for one, two in zip(reference.tokens, other.tokens, strict=False):
        if one != two:
            at = find_difference(one, two)
            ours, theirs = (str(t[at]) if at < len(t) else "missing" for t in (one, two))
            text = f"The tokenizer cuts text otherwise: token {at} is {theirs} instead of {ours}."
            return [fail("tokenizer", text, remedy)]
    known = reference.vocabulary and other.vocabulary
    if known and reference.vocabulary != other.vocabulary:
        text = "The tokenizer has other words or merges, though the sample came out the same."
        return [fail("tokenizer", text, remedy)]
    return []


def _compare_specials(reference: TokenizerFacts, other: TokenizerFacts) -> Iterator[Finding]:
    for key in _NAMED:
        one, two = reference.specials.get(key), other.specials.get(key)
        if one == two:
            continue
        is_hard = key in _MUST_MATCH and not (one is None and key == "bos_token")
        if is_hard or (one is not None and two is not None):
            ours, theirs = (f"`{t[0]}` ({t[1]})" if t else "none" for t in (one, two))
            yield Finding(
                area="specials",
                status=Status.ERROR if is_hard else Status.WARNING,
                detail=f"{key.replace('_', ' ')} is {theirs} instead of {ours}.",
                remedy="copy the reference's tokenizer_config.json, or make this one again",
            )
    lost = sorted(reference.stop_ids - other.stop_ids)
    if lost:
        eos = reference.specials.get("eos_token", ("", None))[1]
        is_hard = not other.is_gguf or eos in lost or not reference.stop_ids & other.stop_ids
        yield Finding(
            area="specials",
            status=Status.ERROR if is_hard else Status.WARNING,
            detail=f"Answers no longer end at {_tokens(lost)}: the end-of-turn token is lost.",
            remedy="state it as eos_token_id in generation_config.json, as the reference does, "
            "and make files that were made from this one again",
        )
    gained = sorted(other.stop_ids - reference.stop_ids)
    if gained:
        also = f"Answers also end at {_tokens(gained)}."
        yield Finding(area="specials", status=Status.INFO, detail=also)
    missing = sorted((reference.stated_stops or set()) - (other.stated_stops or set()))
    if missing and other.stated_stops is not None and not lost:
        yield fail(
            "specials",
            f"generation_config.json no longer names {_tokens(missing)} as an end: other programs "
            "will run on past it.",
            "copy the reference's generation_config.json",
        )


def _digest(folder: Path) -> str | None:
    model = read_json(folder / "tokenizer.json").get("model")
    if not isinstance(model, dict):
        return None
    merges = [m.split(" ", 1) if isinstance(m, str) else list(m) for m in model.get("merges", [])]
    content: list[Any] = [model.get("vocab"), merges]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _tokens(numbers: Sequence[int]) -> str:
    return f"token{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
