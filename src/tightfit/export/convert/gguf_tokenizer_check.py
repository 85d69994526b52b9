"""Finds how llama.cpp cuts text as the model's own tokenizer does, by asking llama.cpp."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightfit.core.errors import InvalidInputError
from tightfit.export.convert.gguf_vocabulary import Scheme, Vocabulary, write_vocabulary
from tightfit.runtime.ggml import has_llama

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
"""Unicode, numbers, spaces, code, contractions: where ways of cutting differ."""
_EDGES = {
    "text that begins with a space": "  leading and trailing ",
    "letters with separate accents (llama.cpp does not compose them)": "cafe\u0301 n\u0303o",
}
"""Where llama.cpp is known to go its own way in a whole kind of tokenizers; worth a note."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first place where llama.cpp cuts otherwise."""

    text: str
    ours: tuple[int, ...]
    theirs: tuple[int, ...]


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
    first: Difference | None = None
    for scheme in vocabulary.schemes:
        found, edges = compare_scheme(vocabulary, scheme, encode)
        if found is None:
            named = [] if scheme == guess else [f"llama.cpp cuts text as `{scheme.pre}`."]
            return scheme, [*named, *(f"llama.cpp itself cuts {edge} otherwise." for edge in edges)]
        first = first or found
    assert first is not None
    raise _refusal(first)


def compare_scheme(
    vocabulary: Vocabulary, scheme: Scheme, encode: Callable[[str], list[int]]
) -> tuple[Difference | None, list[str]]:
    """Where llama.cpp, told this scheme, and the tokenizer part ways; and at which edges."""
    from tightfit.runtime.llama_model import LlamaModel

    with tempfile.TemporaryDirectory(prefix="tightfit-") as folder:
        path = Path(folder) / "vocabulary.gguf"
        _write_probe(path, vocabulary, scheme)
        try:
            model = LlamaModel(path, num_positions=32)
        except InvalidInputError:  # a scheme that this release of llama.cpp does not know
            return Difference(text=TEXTS[0], ours=tuple(encode(TEXTS[0])), theirs=()), []
        with model:
            for text in TEXTS:
                ours, theirs = tuple(encode(text)), tuple(model.tokenize(text))
                if ours != theirs:
                    return Difference(text=text, ours=ours, theirs=theirs), []
            edges = _list_edges(vocabulary)
            return None, [
                name for name, text in edges.items() if encode(text) != model.tokenize(text)
            ]


def _list_edges(vocabulary: Vocabulary) -> dict[str, str]:
    control = [t for t, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == 3]
    around = {"text behind a control token": f"a{control[0]}b {control[0]} c"} if control else {}
    return _EDGES | around


def _write_probe(path: Path, vocabulary: Vocabulary, scheme: Scheme) -> None:
    """The real vocabulary on the smallest model that llama.cpp loads."""
    import gguf
    import numpy as np

    width = 32
    writer: Any = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(width)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(width)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
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


def _refusal(found: Difference) -> InvalidInputError:
    pairs = zip(found.ours, found.theirs, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), 0)
    return InvalidInputError(
        "llama.cpp knows no way of cutting text as this model's tokenizer does: "
        f"{found.text[:60]!r} is {list(found.ours[at : at + 4])} here and "
        f"{list(found.theirs[at : at + 4])} there, from token {at} on.",
        remedy="use the model with --engine transformers; tightfit quantize --to nf4 or gptq-4 "
        "shrinks it",
    )
