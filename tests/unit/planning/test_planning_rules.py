"""Each legality rule, shown firing and shown silent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tightfit.core.errors import UsageError
from tightfit.core.strategy import Strategy
from tightfit.hardware.catalogue import find_gpu
from tightfit.hardware.types import Node
from tightfit.models.config import read_config
from tightfit.models.resolve import resolve_model
from tightfit.planning.rules import (
    RULES,
    Case,
    check_lora_targets,
    find_first_violation,
    find_violations,
    find_warnings,
)

_PLAIN: dict[str, Any] = {
    "method": "full",
    "weights": "fp32",
    "compute": "fp32",
    "adapter_dtype": "fp32",
    "attention": "eager",
}
_BF16: dict[str, Any] = {"weights": "bf16", "compute": "bf16", "adapter_dtype": "bf16"}
_FP16: dict[str, Any] = {"weights": "fp32", "compute": "fp16"}
_FOLDED: dict[str, Any] = {"method": "lora", "fused_lora": True}
_FP8: dict[str, Any] = _BF16 | {"fp8": True}
_TILES: dict[str, Any] = {"checkpointing": True, "mlp_tiles": 4}
_FP8_GRADIENTS: dict[str, Any] = _BF16 | {"fp8_gradients": True}
_NF4: dict[str, Any] = {"method": "lora", "weights": "nf4", "compute": "fp16"}
_UNPACKED: dict[str, Any] = {**_NF4, "dequantized_base": True}
_SHARED: dict[str, Any] = {"sharding": "ddp", "gpus_per_node": 4, "context_parallel": 2}
_INT8: dict[str, Any] = {"method": "lora", "weights": "int8", "compute": "fp16"}


def _case(
    fields: dict[str, Any],
    *,
    model: str = "Llama-2-7b",
    gpu: str = "A100-80GB",
    num_gpus: int = 4,
    num_nodes: int = 1,
) -> Case:
    node = Node(gpu=find_gpu(gpu), num_gpus=num_gpus)
    strategy = Strategy(**(_PLAIN | fields))
    return Case(spec=resolve_model(model), strategy=strategy, node=node, num_nodes=num_nodes)


def _without_capability(case: Case) -> Case:
    """A card older than any in the catalogue that torch still runs on."""
    gpu = case.gpu.model_copy(update={"compute_capability": (5, 0), "name": "Maxwell"})
    return Case(
        spec=case.spec,
        strategy=case.strategy,
        node=case.node.model_copy(update={"gpu": gpu}),
        num_nodes=case.num_nodes,
    )


_FSDP4: dict[str, Any] = {"sharding": "fsdp", "gpus_per_node": 4}
_EMBEDDINGS: dict[str, Any] = {"method": "lora", "lora_targets": ("all-linear", "embeddings")}
_ZERO3: dict[str, Any] = {"sharding": "zero3", "gpus_per_node": 4}

# name -> (a case that breaks the rule, the nearest case that does not)
CASES: dict[str, tuple[Callable[[], Case], Callable[[], Case]]] = {
    "torch-wheels": (lambda: _case({}, gpu="K80"), lambda: _case({}, gpu="P100-PCIE-16GB")),
    "legacy-wheels": (lambda: _case({}, gpu="V100-32GB"), lambda: _case({}, gpu="T4")),
    "fp16-capability": (
        lambda: _without_capability(_case(_FP16)),
        lambda: _case(_FP16, gpu="P100-PCIE-16GB"),
    ),
    "bf16-capability": (lambda: _case(_BF16, gpu="T4"), lambda: _case(_BF16, gpu="A10")),
    "int8-capability": (lambda: _case(_INT8, gpu="V100-32GB"), lambda: _case(_INT8, gpu="T4")),
    "nf4-capability": (
        lambda: _without_capability(_case(_NF4)),
        lambda: _case(_NF4, gpu="V100-32GB"),
    ),
    "optimizer-capability": (
        lambda: _without_capability(_case({"optimizer": "adamw-8bit"})),
        lambda: _case({"optimizer": "adamw-8bit"}, gpu="P100-PCIE-16GB"),
    ),
    "triton-capability": (
        lambda: _case({"compile": True}, gpu="P100-PCIE-16GB"),
        lambda: _case({"compile": True}, gpu="V100-32GB"),
    ),
    "quantized-full": (
        lambda: _case({"weights": "nf4"}),
        lambda: _case({"weights": "nf4", "method": "lora"}),
    ),
    "quantized-family": (
        lambda: _case({"weights": "nf4", "method": "lora"}, model="falcon-7b"),
        lambda: _case({"weights": "bf16", "method": "lora"}, model="falcon-7b"),
    ),
    "packed-arithmetic": (
        lambda: _case({"compute": "int8"}),
        lambda: _case({"weights": "int8", "method": "lora"}),
    ),
    "autocast-up": (
        lambda: _case({"weights": "bf16"}),
        lambda: _case({"weights": "nf4", "method": "lora"}),
    ),
    "fp16-trained-weights": (
        lambda: _case({"weights": "fp16", "compute": "fp16"}),
        lambda: _case({"weights": "fp16", "compute": "fp16"} | _ZERO3),
    ),
    "fp16-adapters": (
        lambda: _case(_NF4 | {"adapter_dtype": "fp16"}),
        lambda: _case(_NF4 | {"adapter_dtype": "fp32"}),
    ),
    "fp16-overflow": (
        lambda: _case(_FP16, model="gemma-3-1b-it"),
        lambda: _case(_BF16, model="gemma-3-1b-it"),
    ),
    "fp16-overflow-t5": (lambda: _case(_FP16, model="t5-base"), lambda: _case(_FP16)),
    "attention-capability": (
        lambda: _case(_FP16 | {"attention": "flash"}, gpu="T4"),
        lambda: _case(_FP16 | {"attention": "flash"}, gpu="RTX 3090"),
    ),
    "attention-dtype": (
        lambda: _case({"attention": "flash"}),
        lambda: _case(_BF16 | {"attention": "flash"}),
    ),
    "attention-head-dim": (
        lambda: _wide_heads(_case(_BF16 | {"attention": "flash"})),
        lambda: _case(_BF16 | {"attention": "flash"}, model="gemma-2-9b"),
    ),
    "attention-family": (
        lambda: _case(_BF16 | {"attention": "flash"}, model="bloom-1b1"),
        lambda: _case(_BF16 | {"attention": "flash"}, model="gpt2"),
    ),
    "sdpa-softcap": (
        lambda: _case({"attention": "sdpa"}, model="gemma-2-9b"),
        lambda: _case({"attention": "sdpa"}, model="gemma-3-1b-it"),
    ),
    "bf16-updates": (lambda: _case(_BF16), lambda: _case({"weights": "fp32", "compute": "bf16"})),
    "rocm": (lambda: _case(_BF16, gpu="MI300X"), lambda: _case(_BF16)),
    "sdpa-grouped-heads": (
        lambda: _case({"attention": "sdpa"}, model="Llama-3.1-8B", gpu="T4"),
        lambda: _case({"attention": "sdpa", "repeat_keys": True}, model="Llama-3.1-8B", gpu="T4"),
    ),
    "sdpa-family": (
        lambda: _case({"attention": "sdpa"}, model="bloom-1b1"),
        lambda: _case({"attention": "sdpa"}, model="gpt2"),
    ),
    "fused-family": (
        lambda: _case({"fused_kernels": True}, model="gpt2"),
        lambda: _case({"loss": "chunked"}, model="gpt2"),
    ),
    "fused-loss-family": (
        lambda: _case({"loss": "fused"}, model="PowerLM-3b"),
        lambda: _case({"loss": "fused", "trainer": "trl@1.16"}, model="gpt2"),
    ),
    "trainer": (
        lambda: _case({"loss": "chunked", "trainer": "trl@1.16"}),
        lambda: _case({"loss": "fused", "trainer": "trl@1.16"}),
    ),
    "compile-sinks": (
        lambda: _case({"compile": True, "attention": "flex"}, model="gpt-oss-20b"),
        lambda: _case({"compile": True, "attention": "flex"}, model="gemma-2-2b"),
    ),
    "context-gpus": (
        lambda: _case(_SHARED | {"gpus_per_node": 3}),
        lambda: _case(_SHARED),
    ),
    "context-nodes": (
        lambda: _case(_SHARED | {"num_nodes": 2, "context_parallel": 8, "gpus_per_node": 3}),
        lambda: _case(_SHARED | {"num_nodes": 2, "context_parallel": 8}, num_nodes=2),
    ),
    "context-single": (
        lambda: _case(_SHARED | {"sharding": "single"}),
        lambda: _case(_SHARED | {"sharding": "zero3"}),
    ),
    "context-family": (
        lambda: _case(_SHARED, model="t5-base"),
        lambda: _case(_SHARED | {"context_parallel": 4}, model="Mixtral-8x7B"),
    ),
    "context-heads": (
        lambda: _case(_SHARED | {"context_parallel": 4}, model="Qwen2.5-0.5B"),
        lambda: _case(_SHARED, model="Qwen2.5-0.5B"),
    ),
    "context-method": (
        lambda: _case(_SHARED | {"method": "load"}),
        lambda: _case(_SHARED | {"method": "lora"}),
    ),
    "context-objective": (
        lambda: _case(_SHARED | {"objective": "orpo"}),
        lambda: _case(_SHARED | {"context_parallel": 1, "objective": "orpo"}),
    ),
    "context-compile": (
        lambda: _case(_SHARED | {"compile": True}),
        lambda: _case(_SHARED | {"context_parallel": 1, "compile": True}),
    ),
    "context-trainer": (
        lambda: _case(_SHARED | {"trainer": "trl@1.16"}),
        lambda: _case(_SHARED | {"context_parallel": 1, "trainer": "trl@1.16"}),
    ),
    "router-loss-family": (
        lambda: _case({"router_loss_weight": 0.01}),
        lambda: _case({"router_loss_weight": 0.01}, model="Mixtral-8x7B"),
    ),
    "router-loss-method": (
        lambda: _case({"router_loss_weight": 0.01, "method": "load"}, model="Mixtral-8x7B"),
        lambda: _case({"router_loss_weight": 0.01, "method": "lora"}, model="Mixtral-8x7B"),
    ),
    "router-loss-compile": (
        lambda: _case({"router_loss_weight": 0.01, "compile": True}, model="Mixtral-8x7B"),
        lambda: _case({"compile": True}, model="Mixtral-8x7B"),
    ),
    "router-loss-trainer": (
        lambda: _case({"router_loss_weight": 0.01, "trainer": "trl@1.16"}, model="Mixtral-8x7B"),
        lambda: _case({"trainer": "trl@1.16"}, model="Mixtral-8x7B"),
    ),
    "objective-method": (
        lambda: _case({"objective": "kto", "method": "load"}),
        lambda: _case({"method": "load"}),
    ),
    "objective-family": (
        lambda: _case({"objective": "dpo"}, model="t5-base"),
        lambda: _case({"objective": "dpo"}),
    ),
    "objective-loss": (
        lambda: _case({"objective": "orpo", "loss": "kernel"}),
        lambda: _case({"objective": "orpo", "loss": "fused"}),
    ),
    "objective-zero3": (
        lambda: _case({"objective": "dpo", "sharding": "zero3"}),
        lambda: _case({"objective": "dpo", "sharding": "zero3", "precompute_reference": True}),
    ),
    "reference-copy-sharded": (
        lambda: _case({"objective": "ipo", "method": "full", "sharding": "zero2"}),
        lambda: _case({"objective": "ipo", "method": "full", "sharding": "ddp"}),
    ),
    "reference-objective": (
        lambda: _case({"objective": "simpo", "precompute_reference": True}),
        lambda: _case({"objective": "kto", "precompute_reference": True}),
    ),
    "new-tokens-encoder": (
        lambda: _case({"add_tokens": ("<a>",)}, model="t5-base"),
        lambda: _case({"add_tokens": ("<a>",)}),
    ),
    "new-tokens-zero3": (
        lambda: _case({"add_special_tokens": ("<a>",), **_ZERO3}),
        lambda: _case({"add_special_tokens": ("<a>",), **_FSDP4}),
    ),
    "new-tokens-head-bias": (
        lambda: _head_bias(_case({"add_tokens": ("<a>",), "method": "lora"})),
        lambda: _head_bias(_case({"add_tokens": ("<a>",), "method": "full"})),
    ),
    "new-tokens-trainer": (
        lambda: _case({"add_tokens": ("<a>",), "trainer": "trl@1.16"}),
        lambda: _case({"trainer": "trl@1.16"}),
    ),
    "embedding-adapters-encoder": (
        lambda: _case(_EMBEDDINGS, model="t5-base"),
        lambda: _case(_EMBEDDINGS),
    ),
    "embedding-adapters-trained": (
        lambda: _case({**_EMBEDDINGS, "train_embeddings": True}),
        lambda: _case({"train_embeddings": True}),
    ),
    "embedding-adapters-dora": (
        lambda: _case({**_EMBEDDINGS, "dora": True}),
        lambda: _case({"dora": True}),
    ),
    "embedding-adapters-dropout": (
        lambda: _case({**_EMBEDDINGS, "lora_dropout": 0.1, "loss": "fused"}),
        lambda: _case({**_EMBEDDINGS, "lora_dropout": 0.1, "loss": "chunked"}),
    ),
    "embedding-adapters-zero": (
        lambda: _case({**_EMBEDDINGS, "sharding": "zero2"}),
        lambda: _case({**_EMBEDDINGS, "sharding": "ddp"}),
    ),
    "embedding-adapters-trainer": (
        lambda: _case({**_EMBEDDINGS, "trainer": "trl@1.16"}),
        lambda: _case({"trainer": "trl@1.16"}),
    ),
    "compile-over-fused": (
        lambda: _case({"compile": True, "fused_kernels": True}),
        lambda: _case({"compile": True}),
    ),
    "learned-positions": (
        lambda: _case({"seq_len": 2048}, model="gpt2"),
        lambda: _case({"seq_len": 2048}, model="t5-base"),
    ),
    "beyond-positions": (
        lambda: _case({"seq_len": 8192}),
        lambda: _case({"seq_len": 4096}),
    ),
    "absurd-batch": (
        lambda: _case({"micro_batch": 65536, "seq_len": 4096}),
        lambda: _case({"micro_batch": 64, "seq_len": 4096}),
    ),
    "packing-encoder-decoder": (
        lambda: _case({"packing": True}, model="t5-base"),
        lambda: _case({"packing": True}, model="gpt2"),
    ),
    "packing-kto": (
        lambda: _case({"packing": True, "objective": "kto"}, model="gpt2"),
        lambda: _case({"packing": True, "objective": "dpo"}, model="gpt2"),
    ),
    "packing-family": (
        lambda: _case({"packing": True}, model="Qwen3-Next-80B-A3B-Instruct"),
        lambda: _case({"packing": True}, model="bloom-1b7"),
    ),
    "packing-mask": (
        lambda: _case(_FP16 | {"packing": True, "attention": "sdpa"}, gpu="T4"),
        lambda: _case(_BF16 | {"packing": True, "attention": "flash"}),
    ),
    "more-than-there-is": (
        lambda: _case({"sharding": "ddp", "gpus_per_node": 8}),
        lambda: _case({"sharding": "ddp", "gpus_per_node": 4}),
    ),
    "single-many": (
        lambda: _case({"gpus_per_node": 2}),
        lambda: _case({"gpus_per_node": 2, "sharding": "ddp"}),
    ),
    "needless-sharding": (
        lambda: _case({"sharding": "zero2"}),
        lambda: _case({"sharding": "zero2", "offload": "optimizer"}),
    ),
    "hybrid-one-node": (
        lambda: _case({"sharding": "fsdp-hybrid", "gpus_per_node": 4}),
        lambda: _case({"sharding": "fsdp-hybrid", "gpus_per_node": 4, "num_nodes": 2}, num_nodes=2),
    ),
    "offload-unsharded": (
        lambda: _case({"sharding": "ddp", "gpus_per_node": 4, "offload": "optimizer"}),
        lambda: _case({"optimizer": "adamw-paged-8bit"}),
    ),
    "fsdp-partial-offload": (
        lambda: _case(_FSDP4 | {"offload": "optimizer"}),
        lambda: _case(_FSDP4 | {"offload": "all"}),
    ),
    "zero-param-offload": (
        lambda: _case({"sharding": "zero2", "offload": "all"}),
        lambda: _case({"sharding": "zero3", "offload": "params"}),
    ),
    "int8-sharded": (
        lambda: _case(_INT8 | _ZERO3),
        lambda: _case(_INT8 | {"sharding": "zero2", "gpus_per_node": 4}),
    ),
    "gptq-sharded": (
        lambda: _case(_FSDP4 | {"method": "lora", "weights": "gptq4"}),
        lambda: _case(
            {"sharding": "ddp", "gpus_per_node": 4, "method": "lora", "weights": "gptq4"}
        ),
    ),
    "nf4-zero3-offload": (
        lambda: _case(_NF4 | _ZERO3 | {"offload": "all"}),
        lambda: _case(_NF4 | _FSDP4 | {"offload": "all"}),
    ),
    "optimizer-fsdp": (
        lambda: _case(_FSDP4 | {"optimizer": "adamw-8bit"}),
        lambda: _case({"sharding": "ddp", "gpus_per_node": 4, "optimizer": "adamw-8bit"}),
    ),
    "optimizer-offload": (
        lambda: _case(_ZERO3 | {"optimizer": "adamw-8bit", "offload": "optimizer"}),
        lambda: _case(_ZERO3 | {"optimizer": "adamw", "offload": "optimizer"}),
    ),
    "optimizer-zero": (
        lambda: _case(_ZERO3 | {"optimizer": "adafactor"}),
        lambda: _case({"optimizer": "adafactor"}),
    ),
    "recomputed-layers": (
        lambda: _case({"checkpointing": False, "recomputed_layers": 4}),
        lambda: _case({"checkpointing": True, "recomputed_layers": 4}),
    ),
    "recomputed-layers-there": (
        lambda: _case({"checkpointing": True, "recomputed_layers": 33}),
        lambda: _case({"checkpointing": True, "recomputed_layers": 32}),
    ),
    "offloaded-inputs": (
        lambda: _case({"checkpointing": False, "offloaded_inputs": 4}),
        lambda: _case({"checkpointing": True, "offloaded_inputs": 4}),
    ),
    "tiles-checkpointing": (
        lambda: _case(_TILES | {"checkpointing": False}),
        lambda: _case(_TILES),
    ),
    "tiles-family": (
        lambda: _case(_TILES, model="bloom-1b1"),
        lambda: _case(_TILES),
    ),
    "tiles-compile": (
        lambda: _case(_TILES | {"compile": True}),
        lambda: _case(_TILES),
    ),
    "tiles-zero3": (
        lambda: _case(_ZERO3 | _TILES),
        lambda: _case(_ZERO3 | {"sharding": "zero2"} | _TILES),
    ),
    "tiles-weights": (
        lambda: _case(_TILES | {"method": "lora", "weights": "int8"}),
        lambda: _case(_TILES | {"method": "lora", "weights": "nf4"}),
    ),
    "tiles-router-loss": (
        lambda: _case(_TILES | {"router_loss_weight": 0.01}, model="Qwen3-30B-A3B"),
        lambda: _case(_TILES, model="Qwen3-30B-A3B"),
    ),
    "loss-slices": (
        lambda: _case({"loss": "chunked", "loss_chunk_factor": 4}),
        lambda: _case({"loss": "fused", "loss_chunk_factor": 4}),
    ),
    "loss-slices-family": (
        lambda: _case({"loss": "fused", "loss_chunk_factor": 4}, model="PowerLM-3b"),
        lambda: _case({"loss": "fused"}, model="PowerLM-3b"),
    ),
    "flash-package": (
        lambda: _case(_BF16 | {"attention": "flash"}, model="gemma-2-9b"),
        lambda: _case(_BF16 | {"attention": "flash"}),
    ),
    "dora-method": (
        lambda: _case({"dora": True}),
        lambda: _case({"dora": True, "method": "lora"}),
    ),
    "dora-experts": (
        lambda: _case(
            {"dora": True, "method": "lora", "lora_targets": ("all-linear", "experts")},
            model="mixtral-8x7b",
        ),
        lambda: _case({"dora": True, "method": "lora"}, model="mixtral-8x7b"),
    ),
    "dora-zero3": (
        lambda: _case(_ZERO3 | {"dora": True, "method": "lora"}),
        lambda: _case(_FSDP4 | {"dora": True, "method": "lora"}),
    ),
    "dora-sharded-quantized": (
        lambda: _case(_FSDP4 | _NF4 | {"dora": True}),
        lambda: _case(_NF4 | {"dora": True}),
    ),
    "folded-method": (
        lambda: _case({"fused_lora": True}),
        lambda: _case(_FOLDED),
    ),
    "folded-dropout": (
        lambda: _case(_FOLDED | {"lora_dropout": 0.1}),
        lambda: _case(_FOLDED | {"lora_dropout": 0.0}),
    ),
    "folded-dora": (
        lambda: _case(_FOLDED | {"dora": True}),
        lambda: _case({"method": "lora", "dora": True}),
    ),
    "folded-base": (
        lambda: _case(_FOLDED | {"weights": "int8"}),
        lambda: _case(_FOLDED | {"weights": "nf4"}),
    ),
    "folded-dtype": (
        lambda: _case(_FOLDED | _BF16 | {"adapter_dtype": "fp32"}),
        lambda: _case(_FOLDED | _BF16),
    ),
    "folded-autocast": (
        lambda: _case(_FOLDED | _BF16 | {"weights": "fp32"}),
        lambda: _case(_FOLDED | _FSDP4 | _BF16 | {"weights": "fp32"}),
    ),
    "folded-zero3": (
        lambda: _case(_ZERO3 | _FOLDED),
        lambda: _case(_FSDP4 | _FOLDED),
    ),
    "fp8-capability": (
        lambda: _case(_FP8, gpu="A100-80GB"),
        lambda: _case(_FP8, gpu="RTX 4090"),
    ),
    "fp8-cpu": (
        lambda: _on_cpu(_case(_FP8), supports_bf16=True),
        lambda: _on_cpu(_case(_BF16), supports_bf16=True),
    ),
    "fp8-method": (
        lambda: _case(_FP8 | {"method": "load"}, gpu="H100-SXM"),
        lambda: _case(_FP8, gpu="H100-SXM"),
    ),
    "fp8-dtype": (
        lambda: _case(_FP8 | {"weights": "fp32"}, gpu="H100-SXM"),
        lambda: _case(_FP8, gpu="H100-SXM"),
    ),
    "fp8-packed": (
        lambda: _case(_FP8 | _FOLDED | {"weights": "nf4"}, gpu="H100-SXM"),
        lambda: _case(
            _FP8 | _FOLDED | {"weights": "nf4", "dequantized_base": True}, gpu="H100-SXM"
        ),
    ),
    "fp8-family": (
        lambda: _case(_FP8, gpu="H100-SXM", model="gpt2-xl"),
        lambda: _case(_FP8, gpu="H100-SXM", model="Llama-2-7b"),
    ),
    "fp8-frozen-family": (
        lambda: _case(_FP8 | _FOLDED, gpu="H100-SXM", model="t5-base"),
        lambda: _case(_FP8, gpu="H100-SXM", model="t5-base"),
    ),
    "fp8-adapters": (
        lambda: _case(_FP8 | {"method": "lora"}, gpu="H100-SXM"),
        lambda: _case(_FP8 | _FOLDED, gpu="H100-SXM"),
    ),
    "fp8-gradients-method": (
        lambda: _case(_FP8_GRADIENTS | {"method": "lora"}, gpu="H100-SXM"),
        lambda: _case(_FP8_GRADIENTS | {"method": "full"}, gpu="H100-SXM"),
    ),
    "fp8-twice": (
        lambda: _case(_FP8 | _FP8_GRADIENTS, gpu="H100-SXM"),
        lambda: _case(_FP8_GRADIENTS, gpu="H100-SXM"),
    ),
    "fp8-sharded": (
        lambda: _case(_FP8 | _FSDP4, gpu="H100-SXM"),
        lambda: _case(_FP8 | {"sharding": "ddp", "gpus_per_node": 4}, gpu="H100-SXM"),
    ),
    "unpacked-weights": (
        lambda: _case(_UNPACKED | {"weights": "int8"}),
        lambda: _case(_UNPACKED),
    ),
    "unpacked-family": (
        lambda: _case(_UNPACKED, model="falcon-7b"),
        lambda: _case(_NF4, model="falcon-7b"),
    ),
    "unpacked-sharding": (
        lambda: _case(_FSDP4 | _UNPACKED),
        lambda: _case(_UNPACKED | {"sharding": "ddp", "gpus_per_node": 4}),
    ),
    "unpacked-upcast": (
        lambda: _case(_UNPACKED | {"upcast_unquantized": True}),
        lambda: _case(_NF4 | {"upcast_unquantized": True}),
    ),
    "experts-zero3": (
        lambda: _case(_ZERO3 | _NF4, model="mixtral-8x7b"),
        lambda: _case(_FSDP4 | _NF4, model="mixtral-8x7b"),
    ),
    "cpu-kernels": (
        lambda: _on_cpu(_case({"fused_kernels": True})),
        lambda: _on_cpu(_case({"loss": "chunked"})),
    ),
    "cpu-loss": (
        lambda: _on_cpu(_case({"loss": "fused"})),
        lambda: _on_cpu(_case({"loss": "fused", "trainer": "trl@1.16"})),
    ),
    "cpu-optimizer": (
        lambda: _on_cpu(_case({"optimizer": "adamw-kernel"})),
        lambda: _on_cpu(_case({"optimizer": "adamw"})),
    ),
    "cpu-attention": (
        lambda: _on_cpu(_case(_BF16 | {"attention": "flash"})),
        lambda: _on_cpu(_case({"attention": "sdpa"})),
    ),
    "cpu-fp16": (lambda: _on_cpu(_case(_FP16)), lambda: _on_cpu(_case({}))),
    "cpu-bf16": (
        lambda: _on_cpu(_case(_BF16), supports_bf16=False),
        lambda: _on_cpu(_case(_BF16), supports_bf16=True),
    ),
    "cpu-paged": (
        lambda: _on_cpu(_case({"optimizer": "adamw-paged-8bit"})),
        lambda: _on_cpu(_case({"optimizer": "adamw-8bit"})),
    ),
    "cpu-offload": (
        lambda: _on_cpu(_case(_FSDP4 | {"offload": "all"})),
        lambda: _case(_FSDP4 | {"offload": "all"}),
    ),
    "cpu-nf4-rows": (
        lambda: _on_cpu(_narrow_rows(_case({"method": "lora", "weights": "nf4"}))),
        lambda: _narrow_rows(_case({"method": "lora", "weights": "nf4"})),
    ),
    "cpu-compile": (
        lambda: _on_cpu(_case({"compile": True})),
        lambda: _case({"compile": True}),
    ),
    "cpu-quantized": (
        lambda: _on_cpu(_case({"method": "lora", "weights": "nf4"})),
        lambda: _on_cpu(_case({})),
    ),
}


def _on_cpu(case: Case, *, supports_bf16: bool = True) -> Case:
    update = {"is_cpu": True, "compute_capability": None, "supports_bf16": supports_bf16}
    gpu = case.gpu.model_copy(update=update)
    node = case.node.model_copy(update={"gpu": gpu})
    return Case(spec=case.spec, strategy=case.strategy, node=node, num_nodes=case.num_nodes)


def _narrow_rows(case: Case) -> Case:
    config = {"model_type": "llama", "hidden_size": 48, "intermediate_size": 64} | {
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    spec = read_config(config, name="narrow", source="a test")
    return case._replace(spec=spec)


def _head_bias(case: Case) -> Case:
    return case._replace(spec=case.spec.model_copy(update={"lm_head_bias": True}))


def _wide_heads(case: Case) -> Case:
    spec = case.spec.model_copy(update={"head_dim": 512})
    return Case(spec=spec, strategy=case.strategy, node=case.node, num_nodes=case.num_nodes)


def _fired(case: Case) -> dict[str, str]:
    return {found.rule: found.reason for found in (*find_violations(case), *find_warnings(case))}


def test_every_rule_has_its_pair_of_cases() -> None:
    assert sorted(CASES) == sorted(rule.name for rule in RULES)
    assert len(CASES) >= 40


@pytest.mark.parametrize("name", CASES)
def test_rule_fires_and_stays_silent(name: str) -> None:
    broken, near = CASES[name]
    fired = _fired(broken())
    assert name in fired
    assert "{" not in fired[name]
    assert name not in _fired(near())


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rule_says_where_it_comes_from(rule: Any) -> None:
    assert rule.source
    assert not rule.reason.endswith(".")


@pytest.mark.parametrize(
    ("fields", "gpu", "reason"),
    [
        (_INT8, "V100-32GB", "int8 needs compute capability 7.5; Tesla V100-SXM2-32GB is 7.0"),
        (_BF16, "T4", "bf16 needs compute capability 8.0; Tesla T4 is 7.5"),
    ],
)
def test_reason_names_the_values(fields: dict[str, Any], gpu: str, reason: str) -> None:
    violation = find_first_violation(_case(fields, gpu=gpu))
    assert violation is not None
    assert violation.reason == reason


def test_plain_strategy_breaks_nothing() -> None:
    assert find_violations(_case({})) == []


def test_amd_cards_may_quantize() -> None:
    """bitsandbytes ships gfx90a and gfx942 builds (its installation page, ROCm)."""
    assert find_violations(_case(_NF4, gpu="MI300X")) == []


def test_lora_target_must_exist() -> None:
    spec = resolve_model("Llama-2-7b")
    check_lora_targets(spec, ("q_proj", "v_proj"))
    check_lora_targets(spec, ("all-linear",))
    with pytest.raises(UsageError, match="Did you mean `q_proj`") as error:
        check_lora_targets(spec, ("q_porj",))
    assert "down_proj" in error.value.remedy


def test_a_target_whose_adapter_would_be_ignored() -> None:
    spec = resolve_model("granite-4.0-h-350m")
    check_lora_targets(spec, ("in_proj",))

    assert "out_proj" not in spec.module_names
    with pytest.raises(UsageError, match="granitemoehybrid takes no adapter on out_proj"):
        check_lora_targets(spec, ("out_proj",))
