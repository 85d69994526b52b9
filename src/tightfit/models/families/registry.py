"""Which reader a config's `model_type` goes to."""

from __future__ import annotations

from collections.abc import Callable

from tightfit.models.families.bloom import read_bloom, read_falcon, read_mpt, read_opt
from tightfit.models.families.chatglm import read_chatglm
from tightfit.models.families.gemma import read_gemma, read_gemma2, read_gemma3
from tightfit.models.families.generic import read_generic
from tightfit.models.families.gpt import (
    read_codegen,
    read_gpt2,
    read_gpt_bigcode,
    read_gpt_neox,
    read_gptj,
)
from tightfit.models.families.llama import (
    read_baichuan,
    read_llama,
    read_mistral,
    read_stablelm,
    read_tied_llama,
)
from tightfit.models.families.moe import read_gpt_oss, read_granitemoe, read_mixtral
from tightfit.models.families.phi import read_phi, read_phi3
from tightfit.models.families.qwen import read_qwen, read_qwen2, read_qwen3, read_qwen3_moe
from tightfit.models.families.t5 import read_t5
from tightfit.models.fields import Fields
from tightfit.models.spec import ModelSpec

Reader = Callable[[Fields], ModelSpec]

READERS: dict[str, Reader] = {
    "baichuan": read_baichuan,
    "bloom": read_bloom,
    "chatglm": read_chatglm,
    "codegen": read_codegen,
    "falcon": read_falcon,
    "RefinedWeb": read_falcon,  # Falcon's name before transformers took it in
    "RefinedWebModel": read_falcon,
    "gemma": read_gemma,
    "gemma2": read_gemma2,
    "gemma3": read_gemma3,
    "gemma3_text": read_gemma3,
    "gpt2": read_gpt2,
    "gpt_bigcode": read_gpt_bigcode,
    "gpt_neox": read_gpt_neox,
    "gpt_oss": read_gpt_oss,
    "gptj": read_gptj,
    "granite": read_llama,
    "granitemoe": read_granitemoe,
    "llama": read_llama,
    "mistral": read_mistral,
    "mixtral": read_mixtral,
    "mpt": read_mpt,
    "mt5": read_t5,
    "opt": read_opt,
    "phi": read_phi,
    "phi3": read_phi3,
    "qwen": read_qwen,
    "qwen2": read_qwen2,
    "qwen3": read_qwen3,
    "qwen3_moe": read_qwen3_moe,
    "smollm3": read_tied_llama,
    "stablelm": read_stablelm,
    "t5": read_t5,
}


def reader_for(model_type: str) -> Reader:
    """The family's reader, or the generic one, which warns."""
    return READERS.get(model_type, read_generic)
