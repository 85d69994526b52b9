"""Meta's tokenizer.model, SentencePiece's or tiktoken's format, as a tokenizer.json."""

from __future__ import annotations

import base64
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tightfit.core.errors import EnvironmentFaultError, InvalidInputError
from tightfit.runtime.gguf.pre_tokenizers import write_steps
from tightfit.runtime.quiet import silence_libraries

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_NUM_SPECIAL = 256
_LLAMA_3 = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|reserved_special_token_2|>",
    "<|reserved_special_token_3|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|reserved_special_token_4|>",
    "<|eot_id|>",
)
_LLAMA_3_1 = (
    *_LLAMA_3[:4],
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)
"""Special tokens behind the ranks, as the published transformers folders of Llama 3 and 3.1 have
them; 3.1's `<|step_id|>` of Meta's code is a reserved token there."""


def is_tiktoken(path: Path) -> bool:
    """tiktoken's files are lines of base64 and a rank; SentencePiece's are binary."""
    with path.open("rb") as stream:
        line = stream.readline(4096).split()
    try:
        return (
            len(line) == 2 and line[1].isdigit() and bool(base64.b64decode(line[0], validate=True))
        )
    except ValueError:
        return False


def write_tokenizer(source: Path, folder: Path, *, is_scaled: bool) -> dict[str, Any]:
    """Write tokenizer.json and tokenizer_config.json; returns the numbers of the marks."""
    if is_tiktoken(source):
        return _write_tiktoken(source, folder, _LLAMA_3_1 if is_scaled else _LLAMA_3)
    return _write_sentencepiece(source, folder)


def _write_tiktoken(source: Path, folder: Path, special: tuple[str, ...]) -> dict[str, Any]:
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors

    ranks = _read_ranks(source)
    spare = [f"<|reserved_special_token_{number}|>" for number in range(_NUM_SPECIAL)]
    names = list(dict.fromkeys([*special, *spare]))[:_NUM_SPECIAL]
    vocab, merges = _as_merges(ranks)
    tokenizer = Tokenizer(models.BPE(vocab, merges, fuse_unk=False, ignore_merges=True))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    begin = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A",
        pair="<|begin_of_text|> $A <|begin_of_text|>:1 $B:1",
        special_tokens=[("<|begin_of_text|>", begin)],
    )
    document = json.loads(tokenizer.to_str())
    document["pre_tokenizer"] = write_steps("llama-bpe")
    pad = "<|finetune_right_pad_id|>"
    named = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    if pad in names:
        named["pad_token"] = pad
    _write(folder, document, named)
    ends = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
    stops = [tokenizer.token_to_id(name) for name in ends if name in names]
    return {
        "bos_token_id": begin,
        "eos_token_id": stops,
        "pad_token_id": tokenizer.token_to_id(pad) if pad in names else None,
    }


def _read_ranks(path: Path) -> dict[bytes, int]:
    try:
        lines = path.read_bytes().splitlines()
        pairs = [line.split() for line in lines if line.strip()]
        return {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except ValueError as fault:
        raise InvalidInputError(
            f"{path} is no tiktoken file: {fault}.", remedy="fetch the file again"
        ) from fault


def _as_merges(ranks: dict[bytes, int]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """tiktoken merges whatever pair has the lowest rank; so every way to split a token counts."""
    letters = _byte_letters()

    def spelt(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = []
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        splits = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [(a, b) for a, b in splits if a in ranks and b in ranks]
        merges += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return (
        {spelt(token): rank for token, rank in ranks.items()},
        [(spelt(left), spelt(right)) for left, right in merges],
    )


def _byte_letters() -> list[str]:
    """GPT-2's printable letter for each byte. Source: `encoder.py` of openai/gpt-2."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain}
    letters |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


def _write_sentencepiece(source: Path, folder: Path) -> dict[str, Any]:
    """Pieces and merges from transformers' converter; spaces as SentencePiece itself has them."""
    document = _convert_pieces(source)
    document["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": _SPACE},
            {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
        ],
    }
    document["pre_tokenizer"] = None
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    _write(folder, document, named)
    shutil.copyfile(source, folder / "tokenizer.model")
    return {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}


def _convert_pieces(source: Path) -> dict[str, Any]:
    from transformers import AutoTokenizer

    silence_libraries()
    with tempfile.TemporaryDirectory(prefix="tightfit-") as text:
        work = Path(text)
        shutil.copyfile(source, work / "tokenizer.model")
        (work / "config.json").write_text('{"model_type": "llama"}')
        settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
        (work / "tokenizer_config.json").write_text(json.dumps(settings))
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(str(work), local_files_only=True)
            document: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
        except ImportError as fault:
            raise EnvironmentFaultError(
                "Reading a SentencePiece tokenizer needs a package that is missing: "
                f"{str(fault).strip().splitlines()[0]}",
                remedy="pip install sentencepiece protobuf",
            ) from fault
        except Exception as fault:  # the parser of the format raises its own kinds
            raise InvalidInputError(
                f"{source} is neither a SentencePiece nor a tiktoken file ({fault}).",
                remedy="fetch the file again",
            ) from fault
    return document


def _write(folder: Path, document: dict[str, Any], named: dict[str, str]) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(document, ensure_ascii=False))
    # This class takes tokenizer.json as it is; Llama's own would build another one.
    settings = named | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
