"""Tiny bases of several shapes, and adapters of every kind trained by throwing dice."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from small_models import make_tokenizer

ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": "all-linear", "lora_alpha": 32},
    "rslora": {"target_modules": ["q_proj", "v_proj"], "use_rslora": True, "lora_alpha": 16},
    "patterns": {
        "target_modules": ["q_proj", "down_proj"],
        "rank_pattern": {"layers.0.self_attn.q_proj": 4},
        "alpha_pattern": {"down_proj": 3},
    },
    "dora": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "biases": {"target_modules": ["q_proj"], "bias": "all"},
    "lora-only-biases": {"target_modules": ["q_proj"], "bias": "lora_only"},
    "lora-bias": {"target_modules": ["q_proj"], "lora_bias": True},
    "saved-embeddings": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "saved-both": {
        "target_modules": ["q_proj"],
        "modules_to_save": ["embed_tokens", "lm_head"],
    },
    "saved-norms": {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [5, 9]},
    "embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "embeddings-dora": {"target_modules": ["embed_tokens"], "use_dora": True},
    "head": {"target_modules": ["lm_head", "q_proj"]},
    "some-layers": {"target_modules": ["q_proj"], "layers_to_transform": [1]},
    "parameters": {"target_modules": ["q_proj"], "target_parameters": ["mlp.up_proj.weight"]},
}

_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
BASES: dict[str, dict[str, Any]] = {
    "llama": {**_SMALL, "model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "tied": {**_SMALL, "model_type": "llama", "tie_word_embeddings": True},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "initializer_range": 0.2,
    },
    "t5": {
        "model_type": "t5",
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 3,
        "pad_token_id": 3,
        "eos_token_id": 2,
    },
    "mixtral": {
        **_SMALL,
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}


def make_base(folder: Path, name: str, *, dtype: Any = None, shard_size: str = "5GB") -> Path:
    """A model folder with random weights and a tokenizer."""
    import torch
    import transformers

    library: Any = transformers
    fast = make_tokenizer(folder)
    fields = BASES[name] | {"vocab_size": len(fast)}
    config = library.AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(7)
    model = auto_class(config).from_config(config)
    for parameter in model.parameters():  # so that norms and biases are not all ones and zeros
        parameter.data += 0.02 * torch.randn_like(parameter)
    model.to(dtype or torch.float32).save_pretrained(folder, max_shard_size=shard_size)
    return folder


def make_adapter(folder: Path, base: Path, *, rows: int | None = None, **settings: Any) -> Path:
    """An adapter whose every trained value was drawn at random."""
    import torch
    from peft import LoraConfig, TaskType, get_peft_model

    model = load_plain(base)
    if rows is not None:
        model.resize_token_embeddings(rows, mean_resizing=False)
    is_seq2seq = model.config.is_encoder_decoder
    task = TaskType.SEQ_2_SEQ_LM if is_seq2seq else TaskType.CAUSAL_LM
    make_config: Any = LoraConfig
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's advice about ties
        adapted: Any = get_peft_model(model, make_config(task_type=task, **settings))
        torch.manual_seed(11)
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn_like(parameter)
        adapted.peft_config["default"].base_model_name_or_path = str(base)
        adapted.save_pretrained(str(folder))
    return folder


def load_plain(folder: Path, **options: Any) -> Any:
    import torch
    import transformers

    library: Any = transformers
    config = library.AutoConfig.from_pretrained(folder)
    return auto_class(config).from_pretrained(folder, dtype=options.pop("dtype", torch.float32))


def load_adapted(base: Path, adapter: Path, *, rows: int | None = None) -> Any:
    """peft's own model: the truth that a merge is held against."""
    from peft import PeftModel

    model = load_plain(base)
    if rows is not None:
        model.resize_token_embeddings(rows, mean_resizing=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(model, str(adapter)).eval()


def auto_class(config: Any) -> Any:
    import transformers

    library: Any = transformers
    if config.is_encoder_decoder:
        return library.AutoModelForSeq2SeqLM
    return library.AutoModelForCausalLM


def scores(model: Any, *, num_tokens: int = 24, seed: int = 5) -> Any:
    """Scores of random tokens, for the encoder and decoder alike."""
    import torch

    torch.manual_seed(seed)
    ids = torch.randint(4, 300, (2, num_tokens))
    extra = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model.eval()(input_ids=ids, **extra).logits.float()
