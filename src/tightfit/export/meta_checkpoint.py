"""Meta's original Llama checkpoints as Hugging Face folders: weights, config, tokenizer."""

from __future__ import annotations

import base64
import json
import re
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.errors import InvalidInputError, NotFoundError, SetupError, first_line
from tightfit.core.files import temporary_folder
from tightfit.core.reading import read_bytes, read_json_file
from tightfit.core.units import GIB, MIB
from tightfit.data.slow_tokenizer import check_tokenizer_model, is_tiktoken
from tightfit.runtime.gguf.file import split_rotary
from tightfit.runtime.gguf.unpack import write_steps
from tightfit.runtime.libraries import silence_libraries
from tightfit.runtime.tensor_files import FolderPlan, Output, load_pickle

if TYPE_CHECKING:
    import torch
    from torch import Tensor


REOPEN_BYTES = 2 * GIB
"""Mapped pages count as this process's memory until the map is closed."""
_LAYER_NAMES = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_OUTER_NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BY_ROWS = ("wq", "wk", "wv", "w1", "w3", "output")
_BY_COLUMNS = ("wo", "w2")
"""How fairscale's layers split a matrix: ColumnParallelLinear its outputs, RowParallelLinear its
inputs. Source: `llama/model.py` of meta-llama/llama."""
_COMPUTED = re.compile(r"(^|\.)(rope\.freqs|inner_attention\.rope\.freqs)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaShape:
    """What params.json says, checked."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int


class MetaShards:
    """All shards at once, mapped; tensors by Meta's name, whole."""

    def __init__(self, folder: Path, shape: MetaShape) -> None:
        self._paths = sorted(folder.glob("consolidated.*.pth"))
        self._shape = shape
        self._held = 0
        _check_files(self._paths, folder)
        self._shards: list[Mapping[str, Tensor]] = []
        self._open()
        self._check_names()
        self._check_count(folder)

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._paths)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        first = self._shards[0][name]
        shape, axis = list(first.shape), self._axis(name, first)
        if axis is not None:
            shape[axis] *= len(self._paths)
        return tuple(shape)

    def dtype_of(self, name: str) -> torch.dtype:
        return self._shards[0][name].dtype

    def read(self, name: str) -> Tensor:
        """The whole tensor in memory of its own, queries and keys in transformers' rotary order."""
        import torch

        if self._held > REOPEN_BYTES:
            self._open()
        parts = [shard[name] for shard in self._shards]
        self._held += sum(part.numel() * part.element_size() for part in parts)
        axis = self._axis(name, parts[0])
        values = parts[0].clone() if axis is None else torch.cat(parts, dim=axis)
        if name.endswith(".wq.weight"):
            return split_rotary(values, self._shape.num_heads)
        if name.endswith(".wk.weight"):
            return split_rotary(values, self._shape.num_kv_heads)
        return values

    def _open(self) -> None:
        self._shards = []  # close the old maps first
        self._shards = [load_pickle(path) for path in self._paths]
        self._held = 0

    def _axis(self, name: str, part: Tensor) -> int | None:
        """Along which axis the shards are parts of the whole; None: each has all of it."""
        if len(self._paths) == 1 or part.ndim == 1:
            return None
        kind = name.split(".")[-2]
        if kind in _BY_ROWS:
            return 0
        if kind in _BY_COLUMNS:
            return 1
        # Llama 1 and 2 split the embedding's width, Llama 3 its vocabulary.
        return 0 if part.shape[1] == self._shape.dim else 1

    def _check_names(self) -> None:
        wanted = set(list_names(self._shape.num_layers))
        for path, shard in zip(self._paths, self._shards, strict=True):
            found = {name for name in shard if not _COMPUTED.search(name)}
            lost, extra = sorted(wanted - found), sorted(found - wanted)
            if lost or extra:
                problem = f"lacks {lost[0]}" if lost else f"holds {extra[0]}, which no Llama has"
                raise InvalidInputError(
                    f"{path} {problem}.",
                    remedy="fetch the file again; vision and adapter files cannot be converted",
                )

    def _check_count(self, folder: Path) -> None:
        """The last files may be missing, which their numbers do not show."""
        rows, _ = self.shape_of("layers.0.attention.wq.weight")
        if rows != self._shape.dim:
            needed = self._shape.dim * len(self._paths) / rows
            raise InvalidInputError(
                f"{folder} holds {len(self._paths)} of {needed:g} consolidated files, or its "
                "params.json belongs to another model.",
                remedy="fetch all of the model's files",
            )


def list_names(num_layers: int) -> dict[str, str]:
    """Meta's names to transformers', in the order of the layers."""
    names = {"tok_embeddings.weight": _OUTER_NAMES["tok_embeddings.weight"]}
    for layer in range(num_layers):
        names |= {
            f"layers.{layer}.{theirs}": f"model.layers.{layer}.{ours}"
            for theirs, ours in _LAYER_NAMES.items()
        }
    return names | _OUTER_NAMES


def _check_files(paths: list[Path], folder: Path) -> None:
    numbers = [int(found[1]) for path in paths if (found := re.search(r"\.(\d+)\.pth$", path.name))]
    if not paths or numbers != list(range(len(paths))):
        gap = next(i for i in range(len(numbers) + 1) if i not in numbers)
        raise InvalidInputError(
            f"{folder} lacks consolidated.{gap:02}.pth.",
            remedy="fetch all of the model's files",
        )
    for path in paths:
        # A zip's directory is at its end, so a truncated file has none.
        if not zipfile.is_zipfile(path):
            raise InvalidInputError(
                f"{path} is cut short, or no file of torch.", remedy="fetch the file again"
            )


# The tokenizer: tokenizer.model, SentencePiece's or tiktoken's format, as a tokenizer.json.

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


def write_tokenizer(source: Path, folder: Path, *, is_scaled: bool) -> dict[str, Any]:
    """Write tokenizer.json and tokenizer_config.json; returns the special tokens' numbers."""
    check_tokenizer_model(source)
    if is_tiktoken(source):
        return _write_tiktoken(source, folder, _LLAMA_3_1 if is_scaled else _LLAMA_3)
    return _write_sentencepiece(source, folder)


def _write_tiktoken(source: Path, folder: Path, special: tuple[str, ...]) -> dict[str, Any]:
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors

    try:
        pairs = [line.split() for line in read_bytes(source).splitlines() if line.strip()]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except ValueError as error:
        raise InvalidInputError(
            f"{source} is no tiktoken file: {error}.", remedy="fetch the file again"
        ) from error
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
    special_ids = {"bos_token_id": begin, "eos_token_id": stops}
    return special_ids | ({"pad_token_id": tokenizer.token_to_id(pad)} if pad in names else {})


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
    from transformers import AutoTokenizer

    silence_libraries()
    with temporary_folder() as work:
        shutil.copyfile(source, work / "tokenizer.model")
        (work / "config.json").write_text('{"model_type": "llama"}')
        settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
        (work / "tokenizer_config.json").write_text(json.dumps(settings))
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(str(work), local_files_only=True)
            document: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
        except ImportError as error:
            raise SetupError(
                f"Reading a SentencePiece tokenizer needs a package that is missing: "
                f"{first_line(error)}.",
                remedy="pip install sentencepiece protobuf",
            ) from error
        except Exception as error:  # the parser of the format raises its own kinds
            raise InvalidInputError(
                f"{source} is neither a SentencePiece nor a tiktoken file ({error}).",
                remedy="fetch the file again",
            ) from error
    document["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": _SPACE},
            {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
        ],
    }
    document["pre_tokenizer"] = None
    _write(folder, document, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})
    shutil.copyfile(source, folder / "tokenizer.model")
    return {"bos_token_id": 1, "eos_token_id": 2}


def _write(folder: Path, document: dict[str, Any], named: dict[str, str]) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(document, ensure_ascii=False))
    # This class takes tokenizer.json as it is; Llama's own would build another one.
    settings = named | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


# The folder.

TOKENIZER_BYTES = 400 * MIB
"""A vocabulary of 128k tokens and its merges while the tokenizer is built. Measured."""
_SCALED = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What `use_scaled_rope` means. Source: `apply_scaling` in meta-llama/llama-models."""
_FACTOR, _FACTOR_OF_SMALL = 8.0, 32.0
"""Llama 3.1 and 3.3; Llama 3.2's 1B and 3B, the only ones with a tied head."""


def plan_meta(source: Path, dtype: torch.dtype | None = None) -> FolderPlan:
    """Read params.json, check every shard's names and shapes, and refuse what does not agree."""
    params, shape = _read_params(source)
    tokenizer = source / "tokenizer.model"
    if not tokenizer.is_file():
        raise NotFoundError(
            f"{source} has no tokenizer.model.",
            remedy="copy it there; Meta puts it beside the models' folders",
        )
    shards = MetaShards(source, shape)
    wanted = dtype or shards.dtype_of("layers.0.attention.wq.weight")
    is_tied = _is_tied(shards)
    width, _ = shards.shape_of("layers.0.feed_forward.w1.weight")
    _check_width(params, shape, width)
    config, notes = _make_config(params, shape, source=source, is_tied=is_tied)
    vocab_size, _ = shards.shape_of("tok_embeddings.weight")
    config |= {"vocab_size": vocab_size, "intermediate_size": width}
    config["dtype"] = str(wanted).removeprefix("torch.")
    meta_names = {ours: theirs for theirs, ours in list_names(shape.num_layers).items()}
    if is_tied:
        del meta_names["lm_head.weight"]
    outputs = tuple(
        Output(name=ours, shape=shards.shape_of(theirs), dtype=wanted)
        for ours, theirs in meta_names.items()
    )

    def produce(output: Output) -> torch.Tensor:
        values = shards.read(meta_names[output.name])
        return values.to(output.dtype).contiguous()

    def write_others(folder: Path) -> None:
        is_scaled = bool(params.get("use_scaled_rope", False))
        special = write_tokenizer(tokenizer, folder, is_scaled=is_scaled)
        for name, content in (("config", config | special), ("generation_config", special)):
            (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")

    # One tensor put together, rearranged and cast, and the mapped pages it came from.
    largest = max(output.num_bytes for output in outputs)
    return FolderPlan(
        outputs=outputs,
        produce=produce,
        write_others=write_others,
        extra_bytes=3 * largest + min(REOPEN_BYTES, shards.num_bytes) + TOKENIZER_BYTES,
        notes=tuple(notes),
    )


def _read_params(source: Path) -> tuple[dict[str, Any], MetaShape]:
    path = source / "params.json"
    try:
        params = dict(read_json_file(path))
    except (OSError, ValueError, TypeError) as error:
        raise InvalidInputError(
            f"{path} cannot be read ({error}).", remedy="fetch the file again"
        ) from error
    if "vision_chunk_size" in params or "moe_args" in params:
        raise InvalidInputError(
            f"{source} is a model with pictures or experts, which cannot be converted.",
            remedy="name a Llama 1, 2, 3, 3.1, 3.2 or 3.3 text model",
        )
    try:
        num_heads = int(params["n_heads"])
        return params, MetaShape(
            dim=int(params["dim"]),
            num_layers=int(params["n_layers"]),
            num_heads=num_heads,
            num_kv_heads=int(params.get("n_kv_heads") or num_heads),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInputError(
            f"{path} does not say {error}.", remedy="fetch the file again"
        ) from error


def _is_tied(shards: MetaShards) -> bool:
    """Small Llama 3.2 models store the embedding twice."""
    import torch

    names = ("tok_embeddings.weight", "output.weight")
    if shards.shape_of(names[0]) != shards.shape_of(names[1]):
        return False
    return torch.equal(shards.read(names[0]), shards.read(names[1]))


def feed_forward_width(dim: int, *, multiple_of: int, multiplier: float | None = None) -> int:
    """Two thirds of four times the width, stretched, rounded up. Source: `llama/model.py`."""
    width = int(2 * 4 * dim / 3)
    if multiplier is not None:
        width = int(multiplier * width)
    return multiple_of * -(-width // multiple_of)


def _check_width(params: dict[str, Any], shape: MetaShape, found: int) -> None:
    if "multiple_of" not in params:
        return
    expected = feed_forward_width(
        shape.dim,
        multiple_of=int(params["multiple_of"]),
        multiplier=params.get("ffn_dim_multiplier"),
    )
    if expected != found:
        raise InvalidInputError(
            f"The feed-forward layers are {found:,} wide; by params.json they would be "
            f"{expected:,}.",
            remedy="use the params.json that belongs to these files",
        )


def _make_config(
    params: dict[str, Any], shape: MetaShape, *, source: Path, is_tied: bool
) -> tuple[dict[str, Any], list[str]]:
    """transformers' settings; lengths that Meta's file leaves out are those of the release."""
    is_llama_3 = is_tiktoken(source / "tokenizer.model")
    is_scaled = bool(params.get("use_scaled_rope", False))
    theta = float(params.get("rope_theta") or 10_000.0)
    context, release = _release(params, shape, is_llama_3=is_llama_3, theta=theta)
    scaling: dict[str, Any] | None = None
    if is_scaled:
        usual = _FACTOR_OF_SMALL if is_tied else _FACTOR
        scaling = _SCALED | {"factor": float(params.get("rope_scaling_factor") or usual)}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.dim,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.dim // shape.num_heads,
        "hidden_act": "silu",
        "rms_norm_eps": float(params.get("norm_eps", 1e-5)),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": context,
        "tie_word_embeddings": is_tied,
        "attention_bias": False,
        "mlp_bias": False,
        "use_cache": True,
    }
    template = "llama-3" if is_llama_3 else "llama-2"
    return config, [
        f"Taken for {release}: a context of {context:,} tokens.",
        f"Meta's files hold no chat template; a chat model wants --set template={template}.",
    ]


def _release(
    params: dict[str, Any], shape: MetaShape, *, is_llama_3: bool, theta: float
) -> tuple[int, str]:
    """Context length by release. params.json does not say it; other settings tell them apart."""
    if params.get("use_scaled_rope"):
        return 131_072, "Llama 3.1 or later"
    if is_llama_3:
        return 8192, "Llama 3"
    if theta > 100_000:
        return 16_384, "Code Llama"
    # Llama 1: norm_eps 1e-6, but 1e-5 in the 65B, whose heads are not grouped.
    is_first = float(params.get("norm_eps", 1e-5)) < 5e-6
    is_first = is_first or (shape.dim == 8192 and shape.num_kv_heads == shape.num_heads)
    return (2048, "Llama 1") if is_first else (4096, "Llama 2")
