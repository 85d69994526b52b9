"""What each measuring source states about its jobs, with where it states it."""

from __future__ import annotations

from typing import Any

Job = dict[str, Any]

# `trainer`: whose record in `core/trainers.py` says what the source's software does; none for a
# plain loop. `defaults`: options that its own scripts state, for every row unless the row says
# otherwise.
SOURCES: dict[str, dict[str, Any]] = {
    "QwenLM/Qwen": {
        "trainer": "transformers@4.33",
        "defaults": {
            "weights": "bf16",
            "attention": "flash",
            "checkpointing": True,
            "lora_rank": 64,
            "lora_targets": ["c_attn", "c_proj", "w1", "w2"],
            "lora_dropout": 0.05,
        },
        "evidence": [
            "finetune.py@2df8e8ac450f: HF Trainer; lora_r 64 on c_attn, c_proj, w1, w2; "
            "modules_to_save wte, lm_head for LoRA (emb); every example padded to model_max_length",
            "finetune/*.sh: --bf16 (--fp16 with GPTQ), --gradient_checkpointing; ds_config_zero2 "
            "for Q-LoRA and multi-node LoRA, ds_config_zero3 for full (DeepSpeed fused AdamW)",
            "README: CUDA 11.8, torch 2.0, flash attention 2, batch 1, accumulation 8",
            "figures dated 2023-10-11 and 2023-11-30 (git log -S), when transformers was 4.34",
            "finetune.py: lora_dropout 0.05",
            "unit: 162.0G over two 80 GiB cards is 81.0 each, impossible as GiB, so 1e9 bytes",
        ],
    },
    "AnswerDotAI/fsdp_qlora": {
        "trainer": "fsdp-qlora",
        "defaults": {
            "weights": "bf16",
            "lora_targets": ["k_proj", "q_proj", "v_proj", "up_proj", "down_proj", "gate_proj"],
        },
        "evidence": [
            "train.py@05ed9f2a60f9: lora_target_modules all = k,q,v,up,down,gate, sdpa",
            "Linear4bit quant_type nf4, quant_storage bf16; compress_statistics defaults to True "
            "(bitsandbytes nn/modules.py), double quantization; lm_head and embeddings stay bf16",
            "dummy data: every sample is longer than context_length and cut to it",
            "peak = torch.cuda.max_memory_reserved / 2**30; CPUOffload(offload_params=True) keeps "
            "parameters, gradients and the optimizer step on the host",
        ],
    },
    "Lightning-AI/litgpt": {
        "trainer": "litgpt@0.4",
        "defaults": {"weights": "bf16", "lora_dropout": 0.05},
        "evidence": [
            "finetune/lora.py@8641822 (resource tables) and litgpt/finetune/lora.py@26857050fe3f",
            "memory = torch.cuda.max_memory_allocated() / 1e9 (same files)",
            "BitsandbytesPrecision gets no ignore_modules, so lm_head is quantized too (its "
            "docstring); it is counted in 16 bit",
            "resource tables: lora_r 8 on query and value; config_hub yaml: rank and targets below",
            "bitsandbytes 0.41.1 (resource tables), 0.42.0 (pyproject.toml@e7e8f7cf and before)",
            "lora_dropout 0.05 (finetune/lora.py@8641822; yaml files, gemma 0.1)",
            "batch_size 128, or global_batch_size of the yaml",
            "config_hub lora yaml all say devices: 1, so the 4xA10G rows used one GPU",
        ],
    },
    "pytorch/torchtune": {
        "trainer": "torchtune@0.4",
        "defaults": {"weights": "bf16", "optimizer": "adamw", "packing": True},
        "evidence": [
            "README@1814feb17 (2024-11-18) names technique, batch 2, 4096 tokens, bf16; the 29 "
            "full configs with torch.optim.AdamW at that commit all set fused: True",
            "README@30b8519e8 (2024-09-24) first prints 16.2 and 27.6 GiB; llama3_1/"
            "8B_lora_single_device.yaml and 70B_lora.yaml there: rank 8 on q,v and 16 on q,k,v, "
            "activation checkpointing, CEWithChunkedOutputLoss, fused AdamW, no lora_dropout",
            "training/_compile.py@30b8519e8, @1814feb17: compile covers each layer and the loss",
        ],
    },
    "modelscope/ms-swift": {
        "trainer": "ms-swift@1.7",
        "defaults": {"weights": "bf16", "attention": "flash", "checkpointing": True},
        "evidence": [
            "memory = torch.cuda.max_memory_reserved / 2**30: swift/trainers/trainers.py:47"
            "@97e4d198b, swift/trainers/mixin.py:522@d2b45ec8c6ac",
            "LoRATM@97e4d198b: qwen c_attn, llama2 q,k,v, chatglm query_key_value, baichuan W_pack",
            "only qwen, yi and zephyr are registered with support_flash_attn",
            "Benchmark.md@97e4d198b: torch 2.1.1, bitsandbytes 0.41.3.post2, no evaluation "
            "(dataset_test_ratio 0); lora_dropout_p 0.05",
            "Benchmark.md: rows of 3234+-2548 tokens cut at max_length; the peak is the longest's",
        ],
    },
    "foundation-model-stack/fms-acceleration": {
        "trainer": "fms-hf-tuning",
        "defaults": {
            "attention": "flash",
            "checkpointing": True,
            "packing": True,
            "lora_dropout": 0.1,
        },
        "evidence": [
            "scripts/benchmarks/benchmark.py@876e2ed6fc4e: packing_matrix [True] and "
            "max_seq_len_matrix [4096] by default, so batches are full and failed rows are 4096 "
            "too; santacoder's tokenizer stops at 2048",
            "defaults.yaml: gradient_checkpointing, flash attention; adamw_torch of HF Trainer",
            "scenarios.yaml, -granite: torch_dtype bfloat16 and no autocast for full and LoRA; "
            "scenarios-liger: bf16 autocast everywhere",
            "framework_plugin_bnb.py: nf4, double quantization; accelerated-peft-bnb skips the "
            "fp32 upcast of baseline-peft-bnb on one GPU",
            "accelerate.yaml: FULL_SHARD, TRANSFORMER_BASED_WRAP, BACKWARD_PRE; FSDP1, torch 2.4.1",
            "scenarios*.yaml: lora_dropout 0.1; refs/requirements*.txt: bitsandbytes 0.43.3, "
            "transformers 4.45.2 and 4.48.1, trl 0.11.4 and 0.13.0",
            "foak: in-place Triton cross entropy on fp32 logits, fused norm and rope, fused LoRA "
            "when quantized; foak-liger: fused linear cross entropy",
            "peak = HF Trainer's max_memory_allocated on rank 0 (README, Logging GPU Memory)",
        ],
    },
    "pytorch/ao": {
        "trainer": None,
        "defaults": {"weights": "bf16", "checkpointing": True},
        "evidence": [
            "benchmarks/quantized_training/pretrain_llama2.py@9e5059e2c: a plain loop, logits "
            ".float(), torchao _AdamW, max_memory_allocated / 1e9",
        ],
    },
    "huggingface/blog:4bit": {
        "trainer": "trl@0.4.2",
        "defaults": {"attention": "eager", "lora_targets": ["q_proj", "v_proj"]},
        "evidence": [
            "blog table of May 2023: SFTTrainer (trl v0.4.2); eager attention assumed; adapter "
            "rank not stated, so peft's defaults",
        ],
    },
}

# rank, targets of the litgpt config_hub yaml files @26857050fe3f
_QV = ["q_proj", "v_proj"]
# And lm_head, whose adapter is not expressed.
_EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LITGPT_LORA: dict[str, tuple[int, list[str]]] = {
    "falcon-7b/lora.yaml": (32, ["query_key_value"]),
    "gemma-2b/lora.yaml": (8, _EVERY),
    "gemma2-9b/lora.yaml": (16, _EVERY),
    "gemma2-9b/qlora.yaml": (16, _EVERY),
    "llama-2-7b/lora.yaml": (32, _QV),
    "llama-3.1-8b/qlora.yaml": (32, _QV),
    "llama-3.2-1b/lora.yaml": (32, _QV),
    "mistral-7b-v0.2/lora.yaml": (32, _QV),
    "mistral-7b/lora.yaml": (32, _QV),
    "stablelm-base-alpha-3b/lora.yaml": (32, ["query_key_value"]),
}

# global_batch_size of the same yaml files
LITGPT_BATCHES: dict[str, int] = {
    "falcon-7b/lora.yaml": 8,
    "gemma-2b/lora.yaml": 6,
    "gemma2-9b/lora.yaml": 6,
    "gemma2-9b/qlora.yaml": 6,
    "llama-2-7b/full.yaml": 64,
    "llama-2-7b/lora.yaml": 8,
    "llama-3-8b/full.yaml": 64,
    "llama-3.1-8b/full.yaml": 64,
    "llama-3.1-8b/qlora.yaml": 8,
    "llama-3.2-1b/full.yaml": 64,
    "llama-3.2-1b/lora.yaml": 8,
    "llama-3.2-3b/full.yaml": 64,
    "mistral-7b-v0.2/lora.yaml": 8,
    "mistral-7b/lora.yaml": 8,
    "stablelm-base-alpha-3b/lora.yaml": 8,
    "tiny-llama/full.yaml": 32,
}

# Per-device batch from a source's own script where the table leaves it out:
# examples/megatron/benchmark/deepspeed.sh@3602360a5623 (accumulation 2, packing, flash_attn)
BATCHES: dict[tuple[str, str, str], str] = {
    ("modelscope/ms-swift", "Qwen2.5-14B", "DeepSpeed ZeRO-2"): "1",
}

# Names as the sources print them -> catalogue entry
MODELS: dict[str, str] = {
    "Qwen-1.8B (v1)": "Qwen/Qwen-1_8B",
    "Qwen-7B (v1)": "Qwen/Qwen-7B",
    "Qwen-14B (v1)": "Qwen/Qwen-14B",
    "Qwen-72B (v1)": "Qwen/Qwen-72B",
    "qwen-1_8b-chat": "Qwen/Qwen-1_8B",
    "qwen-7b-chat": "Qwen/Qwen-7B",
    "qwen-14b-chat": "Qwen/Qwen-14B",
    "qwen-72b-chat": "Qwen/Qwen-72B",
    "yi-6b-chat": "01-ai/Yi-6B",
    "Yi-34B": "01-ai/Yi-34B",
    "openbuddy-zephyr-7b-chat": "mistralai/Mistral-7B-v0.1",
    "baichuan2-7b-chat": "baichuan-inc/Baichuan2-7B-Chat",
    "baichuan2-13b-chat": "baichuan-inc/Baichuan2-13B-Chat",
    "chatglm3-6b": "THUDM/chatglm3-6b",
    "Llama-2-7B": "meta-llama/Llama-2-7b-hf",
    "Llama 2 7B": "meta-llama/Llama-2-7b-hf",
    "llama-2-7b": "meta-llama/Llama-2-7b-hf",
    "Llama 2 13B": "meta-llama/Llama-2-13b-hf",
    "Llama-2-70B": "meta-llama/Llama-2-70b-hf",
    "NousResearch/Llama-2-70b-hf": "meta-llama/Llama-2-70b-hf",
    "TheBloke/Llama-2-70B-GPTQ": "meta-llama/Llama-2-70b-hf",
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B",
    "TechxGenus/Meta-Llama-3-8B-GPTQ": "meta-llama/Meta-Llama-3-8B",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "Llama-3.1 8B": "meta-llama/Llama-3.1-8B",
    "Llama-3.1 70B": "meta-llama/Llama-3.1-70B",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B",
    "Llama-3.2-3B": "meta-llama/Llama-3.2-3B",
    "phi-1.5 1.3B": "microsoft/phi-1_5",
    "StableLM Alpha 3B": "stabilityai/stablelm-base-alpha-3b",
    "stablelm-base-alpha-3b": "stabilityai/stablelm-base-alpha-3b",
    "Falcon 40B": "tiiuae/falcon-40b",
    "falcon-7b": "tiiuae/falcon-7b",
    "gemma-2b": "google/gemma-2b",
    "gemma-2-9b": "google/gemma-2-9b",
    "mistral-7b-v0.2": "mistralai/Mistral-7B-v0.2",
    "mistral-7b": "mistralai/Mistral-7B-v0.1",
    "tiny-llama": "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T",
    "TheBloke/Mistral-7B-v0.1-GPTQ": "mistralai/Mistral-7B-v0.1",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mistralai/Mixtral-8x7B-v0.1",
    "TheBloke/Mixtral-8x7B-Instruct-v0.1-GPTQ": "mistralai/Mixtral-8x7B-v0.1",
    "Llama2-1B (torchao bench config)": "torchao/Llama2-1B",
    "decapoda-research/llama-7b-hf": "huggyllama/llama-7b",
    "decapoda-research/llama-13b-hf": "huggyllama/llama-13b",
    "Qwen2.5-14B": "Qwen/Qwen2.5-14B",
}

# Card as printed -> GPU of the catalogue
GPUS: dict[str, str] = {
    "A100-SXM4-80GB": "A100-SXM4-80GB",
    "A100 80GB": "A100-SXM4-80GB",
    "A100 (80GB implied by peak)": "A100-SXM4-80GB",
    "A100-SXM4-40GB": "A100-SXM4-40GB",
    "A100 40GB SXM": "A100-SXM4-40GB",
    "A10G 24GB": "A10G",
    "RTX 3090 (280W limit, no NVLink)": "GeForce RTX 3090",
    "RTX 4090 (PCIe4 x16, no NVLink)": "GeForce RTX 4090",
    "RTX 4090": "GeForce RTX 4090",
    "RTX 4070 Ti SUPER": "GeForce RTX 4070 Ti SUPER",
    "Tesla T4 16GB": "Tesla T4",
    "A800 80GB": "A100-SXM4-80GB",  # the same chip and memory, with less NVLink
}
