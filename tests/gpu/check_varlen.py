"""Packed rows on a GPU: varlen attention against SDPA's block mask, loss, gradients and time.

Run with: python tests/gpu/check_varlen.py    (prints one JSON document; exit code 1 on a fault)
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tightfit.models.spec import AttentionFeature
from tightfit.runtime.attention import (
    VARLEN,
    find_varlen_kernel,
    register_attention,
    resolve_attention,
    varlen_inputs,
)

_SMALL: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _SMALL | {"model_type": "llama"},
    "qwen3": _SMALL | {"model_type": "qwen3"},
    "mistral-window": _SMALL | {"model_type": "mistral", "sliding_window": 128},
    "gemma3": _SMALL
    | {
        "model_type": "gemma3_text",
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 64,
    },
}
NUM_ROWS, NUM_TOKENS = 3, 2048
MOST_LOSS_ERROR = 2e-3
MOST_GRADIENT_ERROR = 0.05
"""Relative norm of the difference; bf16 sums in another order differ by about 0.01."""


def lay_out(device: torch.device) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    rows = []
    for _ in range(NUM_ROWS):
        cuts = torch.randperm(NUM_TOKENS - 1)[:9].add(1).sort().values.tolist()
        ends = [*cuts, NUM_TOKENS]
        starts = [0, *cuts]
        rows.append(torch.cat([torch.arange(e - s) for s, e in zip(starts, ends, strict=True)]))
    ids = torch.randint(3, 1024, (NUM_ROWS, NUM_TOKENS))
    labels = ids.clone()
    positions = torch.stack(rows)
    labels[positions == 0] = -100  # a document's first token follows nothing
    return {
        "input_ids": ids.to(device),
        "labels": labels.to(device),
        "position_ids": positions.to(device),
    }


def run(fields: dict[str, Any], attention: str, dtype: torch.dtype, *, bounds: bool) -> Any:
    """Loss, gradients, and seconds of a warm step."""
    fields = dict(fields)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    config.use_cache = False
    if attention == VARLEN:
        attention = resolve_attention(config, VARLEN)
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    # Drawn in fp32 and cast: another dtype would draw other weights.
    model = auto.from_config(config, dtype=torch.float32, attn_implementation=attention)
    model = model.to("cuda", dtype)
    model.train()
    batch = lay_out(torch.device("cuda"))
    extra = varlen_inputs(batch["position_ids"]) if bounds else {}
    seconds = 0.0
    for _ in range(3):
        model.zero_grad()
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = model(**batch, **extra).loss
        loss.backward()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    gradients = torch.cat([p.grad.float().flatten() for p in model.parameters()])
    return float(loss.detach()), gradients, seconds


def compare(fields: dict[str, Any]) -> dict[str, Any]:
    exact_loss, exact, _ = run(fields, "sdpa", torch.float32, bounds=False)
    block_loss, block, block_seconds = run(fields, "sdpa", torch.bfloat16, bounds=False)
    report: dict[str, Any] = {
        "loss_fp32": exact_loss,
        "loss_block_mask_bf16": block_loss,
        "gradient_error_block_mask_bf16": float((block - exact).norm() / exact.norm()),
        "seconds_block_mask": block_seconds,
    }
    is_right = True
    for name, bounds in (("found", False), ("given", True)):
        loss, gradients, seconds = run(fields, VARLEN, torch.bfloat16, bounds=bounds)
        error = float((gradients - exact).norm() / exact.norm())
        report |= {
            f"loss_varlen_{name}": loss,
            f"gradient_error_varlen_{name}": error,
            f"seconds_varlen_{name}": seconds,
        }
        is_right &= abs(loss - exact_loss) / exact_loss < MOST_LOSS_ERROR
        is_right &= error < MOST_GRADIENT_ERROR
    return report | {"is_right": is_right}


def main() -> int:
    register_attention()
    kernel = find_varlen_kernel()
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "has_window": kernel is not None and AttentionFeature.WINDOW in kernel.features,
        "has_grouped_heads": kernel is not None and kernel.has_grouped_heads,
        "families": {name: compare(fields) for name, fields in FAMILIES.items()},
    }
    print(json.dumps(report, indent=2))
    return 0 if all(item["is_right"] for item in report["families"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
