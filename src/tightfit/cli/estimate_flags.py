"""The options of `tightfit estimate`. None means: not given, so it is chosen for the card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from tightfit.cli import choices
from tightfit.cli.completion import complete_model
from tightfit.cli.options import Json, On, count_option, word_option


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateFlags:
    """One configuration, as far as the user stated it."""

    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Catalogue name, cached hub id, folder with config.json, or GGUF file.",
            autocompletion=complete_model,
            show_default=False,
        ),
    ] = None
    method: Annotated[
        str,
        word_option(
            "--method", choices.METHODS, "What is trained; qlora is lora over nf4. [default: lora]"
        ),
    ] = "lora"
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
    lora_rank: Annotated[int | None, count_option("--lora-rank", "Rank. [default: 16]")] = None
    lora_targets: Annotated[
        str | None,
        typer.Option(
            "--lora-targets",
            metavar="A,B|all-linear",
            help="Names of the modules that get adapters. [default: all-linear]",
            show_default=False,
        ),
    ] = None
    micro_batch: Annotated[
        int | None, count_option("--micro-batch", "Sequences per GPU at once. [default: 1]")
    ] = None
    seq_len: Annotated[
        int | None, count_option("--seq-len", "Tokens per sequence. [default: 2048]")
    ] = None
    grad_accum: Annotated[
        int | None, count_option("--grad-accum", "Micro-batches per step. [default: 1]")
    ] = None
    checkpointing: Annotated[
        bool | None,
        typer.Option(
            "--checkpointing/--no-checkpointing",
            help="Recompute layers in the backward pass. [default: on]",
            show_default=False,
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
        typer.Option(
            "--fused-kernels/--no-fused-kernels",
            help="Fused norm, rotary and gated-MLP kernels. [default: off]",
            show_default=False,
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
        typer.Option(
            "--double-quant/--no-double-quant",
            help="Quantize nf4's scales too. [default: on]",
            show_default=False,
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
    on: On = None
    zero_table: Annotated[
        bool,
        typer.Option("--zero-table", help="Print the six-row ZeRO-3 offload table instead."),
    ] = False
    gpus_per_node: Annotated[
        int,
        typer.Option("--gpus-per-node", metavar="N", min=1, max=65_536, help="For --zero-table."),
    ] = 1
    nodes: Annotated[
        int, typer.Option("--nodes", metavar="N", min=1, max=65_536, help="For --zero-table.")
    ] = 1
    total_params: Annotated[
        str | None,
        typer.Option(
            "--total-params",
            metavar="N",
            help="For --zero-table without a model: 2851e6 or 2.8B.",
            show_default=False,
        ),
    ] = None
    largest_layer_params: Annotated[
        str | None,
        typer.Option(
            "--largest-layer-params",
            metavar="N",
            help="For --zero-table without a model: 32e6 or 32M.",
            show_default=False,
        ),
    ] = None
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 5 where it does not fit or cannot work.")
    ] = False
    as_json: Json = False
