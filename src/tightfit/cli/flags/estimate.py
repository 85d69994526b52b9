"""What `tightfit estimate` accepts. None: not given, so it is chosen for the card."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tightfit.cli import choices
from tightfit.cli.completion import complete_model
from tightfit.cli.flags.options import (
    MAX_BATCH,
    MAX_LORA_RANK,
    MAX_WORLD_SIZE,
    Json,
    Network,
    On,
    SeqLen,
    Settings,
    Trace,
    count_option,
    path_option,
    refuse_empty,
    switch_option,
    text_option,
    word_option,
)

EXAMPLES = """\b
Examples:
  tightfit estimate Llama-2-7b --on V100-32GB
  tightfit estimate Llama-2-7b --method full --sharding fsdp --on 8xA100-80GB --seq-len 4096
  tightfit estimate Qwen2.5-7B --method qlora --micro-batch 4 --loss fused --on RTX-4090 --json
  tightfit estimate Llama-3.1-8B --on H100-80GB --trace --chart step.html
  tightfit estimate t5-3b --zero-table --gpus-per-node 8 --nodes 1
  tightfit estimate --zero-table --total-params 2851e6 --largest-layer-params 32e6 --gpus-per-node 8
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateFlags:
    """Memory, disk and time of one configuration, part by part.

    Lists every part of the peak: weights, gradients, optimizer, activations, logits, gathered
    shards, quantization state, CUDA context and allocator slack, for each phase of the job.
    """

    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Catalogue name, cached hub id, folder with config.json, or GGUF file.",
            autocompletion=complete_model,
            callback=refuse_empty("MODEL", "Llama-2-7b"),
            show_default=False,
        ),
    ] = None
    method: Annotated[
        str | None,
        word_option(
            "--method", choices.METHODS, "What is trained; qlora is lora over nf4. [default: lora]"
        ),
    ] = None
    weights: Annotated[
        str | None,
        word_option(
            "--weights", choices.WEIGHTS, "How base weights are stored. [default: by card]"
        ),
    ] = None
    compute: Annotated[
        str | None,
        word_option("--compute", choices.COMPUTE, "Arithmetic. [default: by weights and card]"),
    ] = None
    adapter_dtype: Annotated[
        str | None,
        word_option("--adapter-dtype", choices.COMPUTE, "LoRA weights. [default: by compute]"),
    ] = None
    optimizer: Annotated[
        str | None,
        word_option("--optimizer", choices.OPTIMIZERS, "Update rule. [default: adamw, fused]"),
    ] = None
    lora_rank: Annotated[
        int | None,
        count_option("--lora-rank", "Rank. [default: 16]", most=MAX_LORA_RANK, example=16),
    ] = None
    lora_targets: Annotated[
        str | None,
        text_option(
            "--lora-targets",
            "A,B|all-linear",
            "Names of the modules that get adapters. [default: all-linear]",
            example="all-linear",
        ),
    ] = None
    micro_batch: Annotated[
        int | None,
        count_option(
            "--micro-batch", "Sequences per GPU at once. [default: 1]", most=MAX_BATCH, example=4
        ),
    ] = None
    seq_len: SeqLen = None
    grad_accum: Annotated[
        int | None,
        count_option(
            "--grad-accum", "Micro-batches per step. [default: 1]", most=MAX_BATCH, example=8
        ),
    ] = None
    checkpointing: Annotated[
        bool | None,
        switch_option(
            "--checkpointing/--no-checkpointing",
            "Recompute layers in the backward pass. [default: on]",
        ),
    ] = None
    attention: Annotated[
        str | None, word_option("--attention", choices.ATTENTIONS, "Kernel. [default: sdpa]")
    ] = None
    loss: Annotated[
        str | None,
        word_option("--loss", choices.LOSSES, "How logits become a loss. [default: plain]"),
    ] = None
    fused_kernels: Annotated[
        bool | None,
        switch_option(
            "--fused-kernels/--no-fused-kernels",
            "Fused norm, rotary and gated-MLP kernels. [default: off]",
        ),
    ] = None
    folded_adapters: Annotated[
        bool | None,
        switch_option(
            "--folded-adapters/--no-folded-adapters",
            "LoRA scaled and added inside its matmuls. [default: off]",
        ),
    ] = None
    unpacked_base: Annotated[
        bool | None,
        switch_option(
            "--unpacked-base/--no-unpacked-base",
            "nf4 weights unpacked once, not in every pass. [default: off]",
        ),
    ] = None
    sharding: Annotated[
        str | None,
        word_option(
            "--sharding",
            choices.SHARDINGS,
            "How state is spread. [default: single on one GPU, else fsdp]",
        ),
    ] = None
    offload: Annotated[
        str | None, word_option("--offload", choices.OFFLOADS, "To host RAM. [default: none]")
    ] = None
    double_quant: Annotated[
        bool | None,
        switch_option(
            "--double-quant/--no-double-quant", "Quantize nf4's scales too. [default: on]"
        ),
    ] = None
    train_embeddings: Annotated[
        bool,
        typer.Option("--train-embeddings", help="LoRA with fully trained embeddings and head."),
    ] = False
    optimizer_in_backward: Annotated[
        bool,
        typer.Option("--optimizer-in-backward", help="Step and free each gradient at once."),
    ] = False
    settings: Settings = None
    on: On = None
    network: Network = None
    zero_table: Annotated[
        bool,
        typer.Option("--zero-table", help="Print the six-row ZeRO-3 offload table instead."),
    ] = False
    gpus_per_node: Annotated[
        int,
        count_option(
            "--gpus-per-node", "For --zero-table. [default: 1]", most=MAX_WORLD_SIZE, example=8
        ),
    ] = 1
    nodes: Annotated[
        int,
        count_option("--nodes", "For --zero-table. [default: 1]", most=MAX_WORLD_SIZE, example=2),
    ] = 1
    total_params: Annotated[
        str | None,
        text_option(
            "--total-params",
            "N",
            "For --zero-table without a model: 2851e6 or 2.8B.",
            example="2.8B",
        ),
    ] = None
    largest_layer_params: Annotated[
        str | None,
        text_option(
            "--largest-layer-params",
            "N",
            "For --zero-table without a model: 32e6 or 32M.",
            example="32M",
        ),
    ] = None
    trace: Trace = None
    chart: Annotated[
        Path | None,
        path_option(
            "--chart",
            "With --trace: draw memory over the step into a .png or .html file.",
            example="step.html",
        ),
    ] = None
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 5 where it does not fit or cannot work.")
    ] = False
    as_json: Json = False
