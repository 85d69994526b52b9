"""Model folders of two layers with a tokenizer and template of their own, for many rooms' tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' "
    "+ message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SENTENCES = (
    "How many singers are older than the average album of every band in this town?",
    "The quick brown fox jumps over the lazy dog, and 1234567890 more of them.",
    "SELECT name FROM singer WHERE age > 20 ORDER BY name DESC LIMIT 3;",
)


def make_tokenizer(folder: Path, *, vocab_size: int = 400, cut: Any = None) -> Any:
    """A byte-level BPE with ChatML marks, saved as a fast tokenizer; `cut`: its pre-tokenizer."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library: Any = transformers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if cut is not None:
        tokenizer.pre_tokenizer = _read_cut(cut)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    fast = library.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        pad_token="<pad>",
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return fast


def _read_cut(cut: Any) -> Any:
    """A `pre_tokenizer` entry as the library's object."""
    import json

    from tokenizers import Tokenizer

    model = {"type": "BPE", "vocab": {}, "merges": []}
    return Tokenizer.from_str(json.dumps({"model": model, "pre_tokenizer": cut})).pre_tokenizer


def make_llama(folder: Path, *, seed: int = 3, **changes: Any) -> Path:
    """A Llama with grouped heads whose scores are spread wide enough to tell tokens apart."""
    import transformers

    library: Any = transformers
    fast = make_tokenizer(folder)
    library.set_seed(seed)
    settings: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": len(fast),
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
    }
    model = library.LlamaForCausalLM(library.LlamaConfig(**(settings | changes)))
    model.save_pretrained(folder)
    return folder


FAMILIES = (
    "llama",
    "llama3",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "phi3",
    "gpt2",
    "falcon",
    "falcon-7b",
    "bloom",
    "qwen3_moe",
    "gpt_oss",
    "mixtral",
    "granite",
    "granitemoe",
    "smollm3",
    "gpt_neox",
    "phi",
    "stablelm",
    "qwen2_moe",
    "olmo2",
    "olmo3",
    "starcoder2",
    "cohere",
    "cohere2",
    "glm4",
    "nemotron",
    "mpt",
    "gpt_bigcode",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "ernie4_5",
    "seed_oss",
    "arcee",
    "hunyuan",
    "exaone4",
    "ministral3",
    "olmoe",
    "glm4_moe",
    "hunyuan_moe",
    "granitemoeshared",
    "deepseek_v3",
    "glm4_moe_lite",
    "lfm2",
    "granitemoehybrid",
)
"""What `make_family` makes; `falcon` has the grouped heads of the 40B, `falcon-7b` a single one."""

_MORE_TEXT = (
    "The café was naïve, 3 of 14 said; Привет, мир! 我想 在 家 工作.",
    "def f(x):\n    return x + 1  # don't, won't, it's\n\n\tif x >= 10: print('ok')",
    "Two  spaces, three   spaces, four    spaces. https://example.org/a?b=c&d=e",
)
_WORDS = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+"""
_WORDS += r"""[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.12,
}


def make_family(folder: Path, family: str, *, seed: int = 3, **changes: Any) -> Path:
    """A tiny model of one family with the kind of tokenizer its published models have.

    Vectors are random too, so that a norm or bias that is lost or moved shows.
    """
    import torch
    import transformers

    library: Any = transformers
    folder.mkdir(parents=True, exist_ok=True)
    num_tokens = make_family_tokenizer(folder, family)
    library.set_seed(seed)
    begin, end = (2, 1) if family.startswith("gemma") else (1, 2)
    settings = {"vocab_size": num_tokens + 3, "bos_token_id": begin, "eos_token_id": end}
    name, own = _family_settings(family)
    config = getattr(library, f"{name}Config")(**(settings | own | changes))
    model = library.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return folder


def _family_settings(family: str) -> tuple[str, dict[str, Any]]:
    """The config class's name, and what it is called with."""
    wide = _SIZES | {"head_dim": 16, "query_pre_attn_scalar": 16}
    plain = {key: _SIZES[key] for key in ("hidden_size", "num_attention_heads")}
    plain |= {"num_hidden_layers": 2, "initializer_range": 0.12}
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    grouped = {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": False}
    single = {"new_decoder_architecture": False, "multi_query": True, "bias": False}
    gpt2: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024}
    gpt2 |= {"initializer_range": 0.12}
    sparse = _SIZES | {"num_experts": 6, "num_experts_per_tok": 2}
    gpt_oss: dict[str, Any] = {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    gpt_oss |= {"sliding_window": 64, "rope_parameters": {"rope_type": "default"}}
    gpt_oss["rope_parameters"] |= {"rope_theta": 10_000.0}
    shared = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
    linear = {"num_hidden_layers": 4, "head_dim": 16, "norm_topk_prob": True}
    linear["num_experts_per_tok"] = 5  # a near tie of two experts would stay in the state for good
    linear |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    linear |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    mpt: dict[str, Any] = {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 1024}
    mpt |= {"initializer_range": 0.12, "attn_config": {"clip_qkv": 3.0}}
    granite: dict[str, Any] = {"embedding_multiplier": 3.0, "logits_scaling": 2.0}
    granite |= {"residual_multiplier": 0.5, "attention_multiplier": 0.2}
    ministral: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0}
    ministral |= {"original_max_position_embeddings": 128, "llama_4_scaling_beta": 0.5}
    ministral |= {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}
    routed: dict[str, Any] = {"n_routed_experts": 6, "n_shared_experts": 2}
    routed |= {"num_experts_per_tok": 3, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
    routed |= {"norm_topk_prob": True, "routed_scaling_factor": 1.5}
    latent: dict[str, Any] = {"q_lora_rank": 24, "kv_lora_rank": 32, "num_key_value_heads": 4}
    latent |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
    convolved = _SIZES | {"layer_types": ["conv", "full_attention"]}
    known: dict[str, tuple[str, dict[str, Any]]] = {
        "llama": ("Llama", _SIZES),
        "llama3": ("Llama", _SIZES | {"rope_parameters": llama3, "tie_word_embeddings": True}),
        "mistral": ("Mistral", _SIZES | {"head_dim": 24, "sliding_window": None}),
        "qwen2": ("Qwen2", _SIZES | {"tie_word_embeddings": True}),
        "qwen3": ("Qwen3", _SIZES | {"head_dim": 24}),
        "gemma": ("Gemma", _SIZES | {"head_dim": 24}),
        "gemma2": ("Gemma2", wide | {"sliding_window": 64}),
        "gemma3": ("Gemma3Text", wide | {"num_hidden_layers": 6, "sliding_window": 64}),
        "phi3": ("Phi3", _SIZES | {"pad_token_id": 0, "sliding_window": None}),
        "gpt2": ("GPT2", gpt2),
        "falcon": ("Falcon", plain | grouped),
        "falcon-7b": ("Falcon", plain | single),
        "bloom": ("Bloom", plain | {"n_layer": 2, "n_head": 4}),
        "qwen3_moe": ("Qwen3Moe", sparse | {"moe_intermediate_size": 32, "norm_topk_prob": True}),
        "gpt_oss": ("GptOss", _SIZES | gpt_oss),
        "mixtral": ("Mixtral", _SIZES | {"num_local_experts": 4}),
        "granite": ("Granite", _SIZES | granite),
        "granitemoe": ("GraniteMoe", _SIZES | granite | {"num_local_experts": 4}),
        "smollm3": ("SmolLM3", _SIZES | {"num_hidden_layers": 4, "pad_token_id": None}),
        "gpt_neox": ("GPTNeoX", _SIZES),
        "phi": ("Phi", _SIZES),
        "stablelm": ("StableLm", _SIZES | {"use_qkv_bias": True}),
        "qwen2_moe": ("Qwen2Moe", sparse | shared),
        "olmo2": ("Olmo2", _SIZES),
        "olmo3": ("Olmo3", _SIZES | {"num_hidden_layers": 4, "sliding_window": 64}),
        "starcoder2": ("Starcoder2", _SIZES | {"initializer_range": 0.4}),
        "cohere": ("Cohere", _SIZES | {"logit_scale": 0.5}),
        "cohere2": ("Cohere2", _SIZES | {"num_hidden_layers": 4, "sliding_window": 64}),
        "glm4": ("Glm4", _SIZES | {"head_dim": 24, "pad_token_id": 0}),
        "nemotron": ("Nemotron", _SIZES),
        "mpt": ("Mpt", mpt),
        "gpt_bigcode": ("GPTBigCode", gpt2),
        "qwen3_next": ("Qwen3Next", sparse | shared | linear),
        "qwen3_5": ("Qwen3_5Text", _SIZES | linear),
        "qwen3_5_moe": (
            "Qwen3_5MoeText",
            sparse | shared | linear | {"num_experts_per_tok": 6},
        ),
        "ernie4_5": ("Ernie4_5", _SIZES | {"head_dim": 24}),
        "seed_oss": ("SeedOss", _SIZES | {"head_dim": 24}),
        "arcee": ("Arcee", _SIZES | {"initializer_range": 0.2}),
        "hunyuan": ("HunYuanDenseV1", _SIZES | {"head_dim": 24}),
        "exaone4": (
            "Exaone4",
            _SIZES | {"sliding_window": None, "layer_types": ["full_attention"] * 2},
        ),
        "ministral3": ("Ministral3", wide | {"rope_parameters": ministral}),
        "olmoe": ("Olmoe", sparse | {"num_key_value_heads": 4}),
        "glm4_moe": ("Glm4Moe", wide | routed | {"use_qk_norm": True, "attention_bias": True}),
        "hunyuan_moe": ("HunYuanMoEV1", wide | {"num_experts": 6, "moe_topk": 3}),
        "granitemoeshared": (
            "GraniteMoeShared",
            _SIZES | granite | {"num_local_experts": 4, "shared_intermediate_size": 48},
        ),
        "deepseek_v3": ("DeepseekV3", _SIZES | routed | latent | {"n_group": 2, "topk_group": 1}),
        "glm4_moe_lite": (
            "Glm4MoeLite",
            _SIZES | routed | latent | {"mlp_layer_types": ["dense", "sparse"]},
        ),
        "granitemoehybrid": (
            "GraniteMoeHybrid",
            _SIZES
            | granite
            | {"num_local_experts": 4, "shared_intermediate_size": 48}
            | {"layer_types": ["linear_attention", "full_attention"]}
            | {"mamba_n_heads": 8, "mamba_d_state": 16},
        ),
        "lfm2": ("Lfm2", convolved | {"block_multiple_of": 8}),
    }
    return known[family]


def name_model_type(family: str) -> str:
    """The `model_type` of what `make_family` makes."""
    import transformers

    library: Any = transformers
    name = _family_settings(family)[0]
    model_type: str = getattr(library, f"{name}Config").model_type
    return model_type


def make_family_tokenizer(folder: Path, family: str) -> int:
    """SentencePiece where the family has it, else byte-level BPE cut as the family cuts."""
    if family in ("llama", "mistral", "phi3"):
        return make_sentencepiece(folder, "LlamaTokenizer", begins_with_space=True)
    if family.startswith("gemma"):
        return make_sentencepiece(folder, "GemmaTokenizer", begins_with_space=False)
    return make_byte_level(folder, family)


def make_sentencepiece(folder: Path, kind: str, *, begins_with_space: bool) -> int:
    """A trained `tokenizer.model`, and the tokenizer.json that transformers makes of it."""
    import json

    import sentencepiece
    import transformers

    library: Any = transformers
    is_gemma = kind == "GemmaTokenizer"
    names = ["<pad>", "<eos>", "<bos>"] if is_gemma else ["<pad>", "<s>", "</s>"]
    pad, begins, ends = "<pad>", names[2 if is_gemma else 1], names[1 if is_gemma else 2]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*SENTENCES, *_MORE_TEXT] * 2),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=480,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=begins_with_space,
        pad_id=0,
        bos_id=names.index(begins),
        eos_id=names.index(ends),
        unk_id=3,
        pad_piece=pad,
        bos_piece=begins,
        eos_piece=ends,
        minloglevel=2,
    )
    (folder / "tokenizer.vocab").unlink()
    named = {"bos_token": begins, "eos_token": ends, "unk_token": "<unk>", "pad_token": pad}
    settings = {"tokenizer_class": kind, **named, "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": kind[:5].lower()}))
    tokenizer = library.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def make_byte_level(folder: Path, family: str) -> int:
    """Byte-level BPE with the pre-tokenizer of the family's published tokenizers."""
    import json

    make_tokenizer(folder, cut=_pre_tokenizer(family))
    document = json.loads((folder / "tokenizer.json").read_text())
    document["model"]["ignore_merges"] = family == "llama3"
    if family.startswith("qwen"):
        document["normalizer"] = {"type": "NFC"}
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return len(document["model"]["vocab"])


def _pre_tokenizer(family: str) -> dict[str, Any]:
    def in_bytes(by_words: bool) -> dict[str, Any]:
        setting = {"add_prefix_space": False, "trim_offsets": True, "use_regex": by_words}
        return {"type": "ByteLevel", **setting}

    def split(regex: str) -> dict[str, Any]:
        setting = {"pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        return {"type": "Split", **setting}

    def together(*parts: dict[str, Any]) -> dict[str, Any]:
        return {"type": "Sequence", "pretokenizers": list(parts)}

    if family == "llama3":
        return together(split(_WORDS % "{1,3}"), in_bytes(False))
    if family.startswith("qwen"):
        return together(split(_WORDS % ""), in_bytes(False))
    if family.startswith("falcon"):
        return together(
            {"type": "Punctuation", "behavior": "Contiguous"},
            in_bytes(True),
            {"type": "Digits", "individual_digits": False},
            split("[0-9][0-9][0-9]"),
        )
    if family == "bloom":
        return together(split(r" ?[^(\s|[.,!?…。，、।۔،])]+"), in_bytes(False))
    return in_bytes(True)
