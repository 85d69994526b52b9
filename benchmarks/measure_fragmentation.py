"""How far torch's reserve grows over live tensors when batch lengths vary, on a real GPU.

    python benchmarks/measure_fragmentation.py --out benchmarks/results/h200_fragmentation.json

One checkpointed LoRA job with a large vocabulary, micro-batch 1, for each way of
drawing lengths: all alike, or log-normal and cut at a maximum, with and without
expandable segments. Each case runs in a process of its own.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

MEAN_TOKENS, SPREAD_TOKENS = 3234, 2548
"""A long-document dataset; lengths are drawn log-normal with this mean and deviation."""
NUM_MICRO_STEPS = 48
ACCUMULATION = 8
CASES = [
    {"max_tokens": limit, "varying": varying, "expandable": expandable}
    for limit in (512, 1024, 2048, 4096, 8192)
    for varying, expandable in ((False, False), (True, False), (True, True))
]


def draw_lengths(case: dict[str, Any]) -> list[int]:
    if not case["varying"]:
        return [case["max_tokens"]] * NUM_MICRO_STEPS
    sigma = math.sqrt(math.log(1 + (SPREAD_TOKENS / MEAN_TOKENS) ** 2))
    mu = math.log(MEAN_TOKENS) - sigma**2 / 2
    rng = random.Random(0)
    return [
        min(case["max_tokens"], int(rng.lognormvariate(mu, sigma))) for _ in range(NUM_MICRO_STEPS)
    ]


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    make_config: Any = Qwen2Config  # takes more options than its annotations name
    config = make_config(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, vocab_size=151_936, tie_word_embeddings=False, use_cache=False,
        max_position_embeddings=8192, attn_implementation="sdpa",
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model: Any = Qwen2ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj"]))
    model.enable_input_require_grads()
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    reserved = []
    for step, length in enumerate(draw_lengths(case)):
        tokens = torch.randint(0, config.vocab_size, (1, length), device="cuda")
        with torch.autocast("cuda", torch.bfloat16, enabled=case.get("autocast", True)):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if (step + 1) % ACCUMULATION == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        reserved.append(torch.cuda.memory_reserved())
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    allocated = torch.cuda.max_memory_allocated()
    return {
        **case,
        "weights_bytes": weights,
        "allocated_bytes": allocated,
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "slack_over_transient": round(
            (torch.cuda.max_memory_reserved() - allocated) / (allocated - weights), 3
        ),
        "reserved_after_steps": reserved[::8],
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--case", help="run one case, given as JSON, in this process")
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(run_case(json.loads(arguments.case))))
        return 0
    results = []
    for case in CASES:
        environment = dict(os.environ)
        if case["expandable"]:
            environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        command = [sys.executable, __file__, "--out", "-", "--case", json.dumps(case)]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        line = done.stdout.strip().splitlines()[-1:] or [
            json.dumps({**case, "error": done.stderr[-400:]})
        ]
        results.append(json.loads(line[0]))
        print(line[0], flush=True)
        arguments.out.write_text(json.dumps({**_head(), "cases": results}, indent=2) + "\n")
    return 0


def _head() -> dict[str, str]:
    import torch
    import transformers

    return {
        "command": "python benchmarks/measure_fragmentation.py",
        "date": datetime.date.today().isoformat(),
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


if __name__ == "__main__":
    sys.exit(main())
