"""Convert a GGUF file to a Hugging Face folder, tensor by tensor."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.errors import InvalidInputError
from tightfit.core.units import MIB
from tightfit.runtime.gguf.config import read_config
from tightfit.runtime.gguf.families import choose_undo
from tightfit.runtime.gguf.file import PLAIN, GgufFile
from tightfit.runtime.gguf.tokenizer import read_special_tokens, write_tokenizer
from tightfit.runtime.libraries import silence_libraries
from tightfit.runtime.output_folder import check_room, whole_folder
from tightfit.runtime.tensor_files import DEFAULT_SHARD_BYTES, Output, write_shards

if TYPE_CHECKING:
    import torch

_ROPE = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight")
_USUAL = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA = _USUAL | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_BLOOM = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_OUTER = {"token_embd": "embed_tokens", "output_norm": "norm"}
_OLD_OUTER = {
    "gpt2": {"token_embd": "wte", "position_embd": "wpe", "output_norm": "ln_f"},
    "falcon": {"token_embd": "word_embeddings", "output_norm": "ln_f"},
    "bloom": {
        "token_embd": "word_embeddings",
        "token_embd_norm": "word_embeddings_layernorm",
        "output_norm": "ln_f",
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpackPlan:
    """A parsed GGUF file; nothing is written yet."""

    file: GgufFile
    model_type: str
    config: Any
    outputs: tuple[Output, ...]
    sources: dict[str, str]
    """transformers' names to the file's."""
    special_ids: dict[str, int]
    notes: tuple[str, ...]

    @property
    def disk_bytes(self) -> int:
        return sum(output.num_bytes for output in self.outputs) + 32 * MIB

    @property
    def extra_bytes(self) -> int:
        """Peak host memory: one tensor as stored, twice in fp32 if quantized, and as written."""
        return max(self._tensor_bytes(output) for output in self.outputs)

    def _tensor_bytes(self, output: Output) -> int:
        place = self.file.tensors[self.sources[output.name]]
        num_values = output.num_bytes // output.dtype.itemsize
        unpacked = 0 if place.kind.name in PLAIN else 2 * 4 * num_values
        return place.num_bytes + unpacked + 2 * output.num_bytes


def plan_unpack(path: Path, dtype: torch.dtype | None = None) -> UnpackPlan:
    """Parse the file; raises for what transformers would compute differently."""
    silence_libraries()
    file = GgufFile(path)
    special_ids = read_special_tokens(file)
    model_type, config = read_config(file, special_ids)
    wanted = dtype or _stored_dtype(file)
    sources, outputs = {}, []
    for name, place in file.tensors.items():
        if _ROPE.fullmatch(name):
            continue
        ours = _name_of(name, model_type, config)
        if ours is None:
            raise InvalidInputError(
                f"{path} holds {name}, which no {model_type} model of transformers has.",
                remedy="name the model's own folder instead",
            )
        is_turned = model_type == "gpt2" and choose_undo(model_type, ours, config) is not None
        sources[ours] = name
        shape = place.shape[::-1] if is_turned else place.shape
        outputs.append(Output(name=ours, shape=shape, dtype=wanted))
    check_against_transformers(config, outputs, path)
    return UnpackPlan(
        file=file,
        model_type=model_type,
        config=config,
        outputs=tuple(outputs),
        sources=sources,
        special_ids=special_ids,
        notes=tuple(_notes(file, model_type)),
    )


def write_unpacked(
    plan: UnpackPlan,
    target: Path,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    watch: Callable[[str, int, int], None] | None = None,
) -> None:
    """Write the folder atomically."""
    check_room(target, plan.disk_bytes)
    with whole_folder(target) as work:
        fill_unpacked(plan, work, max_shard_bytes=max_shard_bytes, watch=watch)


def fill_unpacked(
    plan: UnpackPlan,
    work: Path,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    watch: Callable[[str, int, int], None] | None = None,
) -> None:
    """Write config, tokenizer and weights into an existing folder."""
    total, done = sum(output.num_bytes for output in plan.outputs), 0

    def produce(output: Output) -> torch.Tensor:
        values = plan.file.read(plan.sources[output.name])
        undo = choose_undo(plan.model_type, output.name, plan.config)
        return (undo(values) if undo else values).to(output.dtype).contiguous()

    def count(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if watch is not None:
            watch("writing", done, total)

    write_tokenizer_folder(plan.file, plan.special_ids, work)
    plan.config.dtype = plan.outputs[0].dtype
    plan.config.save_pretrained(str(work))
    write_shards(work, plan.outputs, produce, max_shard_bytes=max_shard_bytes, report=count)


def write_tokenizer_folder(file: GgufFile, special_ids: dict[str, int], folder: Path) -> None:
    """Tokenizer, template and stop tokens."""
    write_tokenizer(file, folder)
    generation = json.dumps(_generation(special_ids), indent=2) + "\n"
    (folder / "generation_config.json").write_text(generation)


def _generation(special_ids: dict[str, int]) -> dict[str, Any]:
    stops = [special_ids[role] for role in ("eos", "eot", "eom") if role in special_ids]
    found: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(stops))} if stops else {}
    return found | {
        f"{role}_token_id": special_ids[role] for role in ("bos", "pad") if role in special_ids
    }


def check_against_transformers(config: Any, outputs: list[Output], source: Path) -> None:
    """Raise unless names and shapes are those of transformers' model."""
    import torch
    import transformers

    library: Any = transformers
    with torch.device("meta"):
        model: Any = library.AutoModelForCausalLM.from_config(config)
    wanted = {name: tuple(value.shape) for name, value in model.named_parameters()}
    found = {output.name: output.shape for output in outputs}
    lost = sorted(set(wanted) - set(found))
    strange = sorted(set(found) - set(wanted))
    bent = sorted(name for name in found if name in wanted and found[name] != wanted[name])
    problems = [f"lacks {name}" for name in lost[:1]]
    problems += [f"has {name}, which is not in the model" for name in strange[:1]]
    problems += [f"has {name} as {list(found[name])}" for name in bent[:1]]
    if problems:
        raise InvalidInputError(
            f"{source} {' and '.join(problems)}.", remedy="fetch or convert the file again"
        )


def _stored_dtype(file: GgufFile) -> torch.dtype:
    """The dtype of most matrices; fp16 for quantized ones."""
    import torch

    plain = {"F32": torch.float32, "BF16": torch.bfloat16}
    kinds: Counter[str] = Counter()
    for place in file.tensors.values():
        if len(place.shape) > 1:
            kinds[place.kind.name] += place.num_bytes
    return plain.get(kinds.most_common(1)[0][0], torch.float16)


def _name_of(name: str, model_type: str, config: Any) -> str | None:
    """transformers' name for one of llama.cpp's."""
    stem, _, ending = name.rpartition(".")
    if stem == "output":
        return f"lm_head.{ending}"
    is_old = model_type in _OLD_OUTER
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if block is None:
        outer = (_OLD_OUTER[model_type] if is_old else _OUTER).get(stem)
        return None if outer is None else f"{'transformer' if is_old else 'model'}.{outer}.{ending}"
    part = _block_names(model_type, config).get(block[2])
    home = "transformer.h" if is_old else "model.layers"
    return None if part is None else f"{home}.{block[1]}.{part}.{ending}"


def _block_names(model_type: str, config: Any) -> dict[str, str]:
    if model_type in ("gemma2", "gemma3_text"):
        return _GEMMA
    if model_type == "phi3":
        return _USUAL | {"ffn_up": "mlp.gate_up_proj"}
    if model_type == "gpt2":
        return _GPT2
    if model_type == "falcon" and getattr(config, "num_ln_in_parallel_attn", None) == 2:
        return _BLOOM | {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}
    return _BLOOM if model_type in ("falcon", "bloom") else _USUAL


def _notes(file: GgufFile, model_type: str) -> list[str]:
    notes = []
    kinds = {p.kind.name for p in file.tensors.values() if len(p.shape) > 1}
    packed = sorted(kinds - set(PLAIN))
    if packed:
        notes.append(
            f"The file is quantized ({', '.join(packed)}): the folder holds those values, not the "
            "ones they were made from."
        )
    if model_type == "llama" and "mistral" in str(file.metadata.get("general.name", "")).lower():
        notes.append("llama.cpp calls Mistral models llama; the folder says so too.")
    return notes
