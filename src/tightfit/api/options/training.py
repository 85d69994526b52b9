"""Options of estimate, plan, prepare, train, bench and calibrate.

None means not given: the recipe, the planner or a default decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tightfit.api.options import choices
from tightfit.api.options.choices import complete_job, complete_model, empty_value
from tightfit.api.options.common import (
    MAX_TOP,
    EffectiveBatch,
    Epochs,
    EvalRows,
    Network,
    On,
    PlanMethod,
    SeqLen,
    Settings,
    Template,
    Trace,
    count_option,
    number_option,
    path_option,
    refuse_empty,
    setting_option,
    switch_option,
    text_option,
    word_option,
)
from tightfit.api.options.declare import Argument, Option
from tightfit.core.progress import Progress
from tightfit.core.settings import MAX_WORLD_SIZE

MAX_STEPS = 10**9
MAX_LEARNING_RATE = 10.0

Data = Annotated[Path | None, path_option("--data", "Rows to train on.", example="train.jsonl")]
MaxSteps = Annotated[
    int | None,
    count_option(
        "--max-steps", "Optimizer steps, in place of epochs.", most=MAX_STEPS, example=100
    ),
]
LearningRate = Annotated[
    float | None,
    number_option(
        "--lr",
        "Peak learning rate. [default: 2e-4, full 2e-5]",
        most=MAX_LEARNING_RATE,
        example=2e-4,
    ),
]
TrainingSeed = Annotated[
    str | None, text_option("--seed", "N", "Order and dropout. [default: 0]", example="17")
]
PlanNumber = Annotated[
    int,
    count_option("--plan", "Take the Nth plan of the list. [default: 1]", most=MAX_TOP, example=2),
]
MemoryLimit = Annotated[
    str | None,
    text_option(
        "--memory-limit", "SIZE", "Use no more than this per GPU, like 20GiB.", example="20GiB"
    ),
]
LogTo = Annotated[
    str | None,
    text_option(
        "--log-to",
        "A,B",
        "tensorboard, wandb, mlflow, or none. [default: tensorboard]",
        example="tensorboard",
    ),
]
Fresh = Annotated[
    bool, switch_option("--fresh", "Start over; what the folder holds is moved aside.")
]
Again = Annotated[bool, switch_option("--again", "Train once more although this run is finished.")]


# What `tightfit estimate` accepts. None: not given, so it is chosen for the card.

ESTIMATE_EXAMPLES = """\b
Examples:
  tightfit estimate Llama-2-7b --on V100-32GB
  tightfit estimate Llama-2-7b --method full --sharding fsdp --on 8xA100-80GB --seq-len 4096
  tightfit estimate Qwen2.5-7B --method qlora --micro-batch 4 --loss fused --on RTX-4090 --json
  tightfit estimate Llama-3.1-8B --on H100-80GB --trace --chart step.html
  tightfit estimate t5-3b --zero-table --gpus-per-node 8 --nodes 1
  tightfit estimate --zero-table --total-params 2851e6 --largest-layer-params 32e6 --gpus-per-node 8
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateOptions:
    """Memory, disk and time of one configuration, part by part.

    Lists every part of the peak: weights, gradients, optimizer, activations, logits, gathered
    shards, quantization state, CUDA context and allocator slack, for each phase of the job.
    """

    model: Annotated[
        str | None,
        Argument(
            metavar="MODEL",
            help="Catalogue name, cached hub id, folder with config.json, or GGUF file.",
            complete=complete_model,
            read=refuse_empty("MODEL", "Llama-2-7b"),
            show_default=False,
        ),
    ] = field(default=None, kw_only=False)
    method: Annotated[
        str | None,
        word_option(
            "--method", choices.METHODS, "What is trained; qlora is lora over nf4. [default: lora]"
        ),
    ] = None
    weights: Annotated[str | None, setting_option("weights")] = None
    compute: Annotated[str | None, setting_option("compute")] = None
    adapter_dtype: Annotated[str | None, setting_option("adapter_dtype")] = None
    optimizer: Annotated[str | None, setting_option("optimizer")] = None
    lora_rank: Annotated[int | None, setting_option("lora_rank")] = None
    lora_targets: Annotated[
        str | None,
        text_option(
            "--lora-targets",
            "A,B|all-linear",
            "Names of the modules that get adapters. [default: all-linear]",
            example="all-linear",
        ),
    ] = None
    micro_batch: Annotated[int | None, setting_option("micro_batch")] = None
    seq_len: SeqLen = None
    grad_accum: Annotated[int | None, setting_option("grad_accum")] = None
    checkpointing: Annotated[bool | None, setting_option("checkpointing")] = None
    attention: Annotated[str | None, setting_option("attention")] = None
    loss: Annotated[str | None, setting_option("loss")] = None
    fused_kernels: Annotated[bool | None, setting_option("fused_kernels")] = None
    fused_lora: Annotated[bool | None, setting_option("fused_lora")] = None
    dequantized_base: Annotated[bool | None, setting_option("dequantized_base")] = None
    sharding: Annotated[str | None, setting_option("sharding")] = None
    offload: Annotated[str | None, setting_option("offload")] = None
    double_quant: Annotated[bool | None, setting_option("double_quant")] = None
    train_embeddings: Annotated[
        bool,
        Option("--train-embeddings", help="LoRA with fully trained embeddings and head."),
    ] = False
    settings: Settings = None
    on: On = None
    network: Network = None
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
    progress: Progress | None = None


# What `tightfit plan` accepts. None: not given, so a recipe or the planner says it.

PLAN_EXAMPLES = """\b
Examples:
  tightfit plan Llama-2-7b --on 4xV100-32GB
  tightfit plan Qwen2.5-7B --on RTX-4090 --data train.jsonl --seq-len 4096 --save plan.json
  tightfit plan job.yaml --on slurm:gpu --explain
  tightfit plan Llama-3.1-70B --on '2n x 8xA100-80GB' --network 100Gb/s --json
  tightfit plan plan.json
  tightfit plan Llama-3.1-8B --method full --buy --chart memory.html
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The best ways to run a job on given hardware, and why.

    Searches method, precision, sharding, offload, micro-batch, checkpointing, kernels, optimizer
    and node count. Best first: what fits comes before what is tight, then the faster, where
    full tuning, quantized weights and extra packages must be clearly faster to come first.
    """

    job: Annotated[
        str,
        Argument(
            metavar="MODEL|RECIPE.YAML|PLAN.JSON",
            help="Catalogue name, cached hub id, folder with config.json or GGUF file; a recipe; "
            "or a saved plan, to be shown again.",
            complete=complete_job,
            read=refuse_empty("MODEL", "Llama-2-7b"),
            show_default=False,
        ),
    ] = field(kw_only=False)
    on: On = None
    network: Network = None
    seq_len: SeqLen = None
    data: Annotated[
        Path | None,
        path_option(
            "--data",
            "Dataset; its real lengths drive padding, packing and time.",
            example="train.jsonl",
        ),
    ] = None
    method: PlanMethod = None
    epochs: Epochs = None
    effective_batch: EffectiveBatch = None
    top: Annotated[
        int, count_option("--top", "How many plans to show. [default: 5]", most=MAX_TOP, example=5)
    ] = 5
    explain: Annotated[
        bool, Option("--explain", help="List what was excluded and the reason of each.")
    ] = False
    settings: Settings = None
    trace: Trace = None
    progress: Progress | None = None


# What `tightfit prepare` accepts. None: not given, so a recipe or a default says it.

TRAIN_ON = ("answers", "all")
MAX_SHOWN = 1000
MAX_ROW = 10**12
PREPARE_EXAMPLES = """\b
Examples:
  tightfit prepare ./SmolLM2-135M --data train.jsonl
  tightfit prepare recipe.yaml --show 5               five rows, what is trained in colour
  tightfit prepare recipe.yaml --row 812              the row that a message names
  tightfit prepare ./Llama-2-7b --data chats.json --template llama-2 --seq-len 4096
  tightfit prepare ./gemma-2-2b --data a.jsonl --data 'b.jsonl[:10%]' --eval 0.05 --chart len.png
"""


def _refuse_empty_files(values: list[str] | None) -> list[str] | None:
    if any(not value.strip() for value in values or ()):
        raise empty_value("--data", "train.jsonl")
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOptions:
    """Encode data as `train` will, and show what becomes of it.

    Rows, tokens, lengths, packing, every fault with its row, and which words are trained. The
    encoding is kept: `tightfit train` on the same data finds it. Needs the model's tokenizer and
    config.json, not its weights.
    """

    job: Annotated[
        str,
        Argument(
            metavar="RECIPE.YAML|MODEL",
            help="A recipe; or a model's folder, cached hub id or GGUF file.",
            complete=complete_job,
            read=refuse_empty("MODEL", "./my-model"),
            show_default=False,
        ),
    ] = field(kw_only=False)
    data: Annotated[
        list[str] | None,
        Option(
            "--data",
            metavar="FILE",
            help="Rows to train on, in place of the recipe's. Repeatable.",
            read=_refuse_empty_files,
            show_default=False,
        ),
    ] = None
    seq_len: SeqLen = None
    template: Template = None
    eval: EvalRows = None
    take: Annotated[
        str | None,
        text_option(
            "--take",
            "PART",
            "Only a part of the training rows: 100, 1%, '[:10%]' or 'train[10:20]'.",
            example="1%",
        ),
    ] = None
    train_on: Annotated[
        str | None,
        word_option("--train-on", TRAIN_ON, "Which tokens carry loss. [default: answers]"),
    ] = None
    skip_faulty: Annotated[
        bool,
        Option("--skip-faulty", help="Report on the other rows where some cannot be read."),
    ] = False
    progress: Progress | None = None


# What `tightfit train` accepts. None: not given, so a recipe or the planner says it.

TRAIN_EXAMPLES = """\b
Examples:
  tightfit train recipe.yaml
  tightfit train recipe.yaml                 the same again: goes on where it stopped
  tightfit train ./SmolLM2-135M --data train.jsonl --on here --eval 0.05
  tightfit train recipe.yaml --method qlora --seq-len 4096 --dry-run
  tightfit train plan.json --data train.jsonl --output runs/mine
  tightfit train runs/mine                   goes on with a run by its folder
  tightfit train recipe.yaml --nodes 2 --rendezvous node1:29500     (on both nodes)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Plan, show the plan, tune, and report.

    Data is encoded and checked before any process starts. Out of memory, the run goes on with
    the next smaller plan. Ctrl-C and SIGTERM save first; the same command resumes.
    """

    job: Annotated[
        str,
        Argument(
            metavar="RECIPE.YAML|MODEL|PLAN.JSON|RUN",
            help="A recipe; a folder with weights, cached hub id or GGUF file; a saved plan; or "
            "the folder of a run, to go on with it.",
            complete=complete_job,
            read=refuse_empty("MODEL", "./my-model"),
            show_default=False,
        ),
    ] = field(kw_only=False)
    data: Data = None
    eval: EvalRows = None
    on: On = None
    network: Network = None
    method: PlanMethod = None
    seq_len: SeqLen = None
    epochs: Epochs = None
    max_steps: MaxSteps = None
    lr: LearningRate = None
    effective_batch: EffectiveBatch = None
    template: Template = None
    seed: TrainingSeed = None
    settings: Settings = None
    plan: PlanNumber = 1
    output: Annotated[
        Path | None,
        path_option(
            "--output", "Folder of the run. [default: runs/MODEL-METHOD-N]", example="runs/mine"
        ),
    ] = None
    memory_limit: MemoryLimit = None
    log_to: LogTo = None
    dry_run: Annotated[bool, Option("--dry-run", help="Show what would happen; start nothing.")] = (
        False
    )
    fresh: Fresh = False
    again: Again = False
    nodes: Annotated[
        int,
        count_option(
            "--nodes", "Nodes that run this same command. [default: 1]", most=MAX_WORLD_SIZE,
            example=2,
        ),
    ] = 1  # fmt: skip
    rendezvous: Annotated[
        str | None,
        text_option(
            "--rendezvous", "HOST:PORT", "Where several nodes meet.", example="node1:29500"
        ),
    ] = None
    node_rank: Annotated[
        str | None,
        text_option("--node-rank", "N", "This node's number, where hosts share a name.",
                    example="0"),
    ] = None  # fmt: skip
    local_addr: Annotated[
        str | None,
        text_option(
            "--local-addr", "ADDRESS", "How other nodes reach this one.", example="10.0.0.2"
        ),
    ] = None
    interface: Annotated[
        str | None,
        text_option("--interface", "NAME", "Network device between nodes.", example="ib0"),
    ] = None
    as_planned: Annotated[
        bool,
        switch_option(
            "--as-planned", "Run a run folder's plan as it is, without a look at the hardware."
        ),
    ] = False
    progress: Progress | None = None


# What `tightfit bench` accepts. None: not given, so a recipe or the planner says it.

BENCH_EXAMPLES = """\b
Examples:
  tightfit bench recipe.yaml
  tightfit bench ./SmolLM2-135M --data train.jsonl --method lora --on here
  tightfit bench recipe.yaml --top 5 --chart plans.png --out plans.json
  tightfit bench Llama-3.1-8B --random-weights --seq-len 4096 --steps 10
  tightfit bench plan.json
  tightfit bench recipe.yaml --method lora --all-levers --minutes 30
"""
DEFAULT_STEPS = 20
DEFAULT_WARM_UP = 3
DEFAULT_LEVERS = 50
MAX_MINUTES = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Run a plan for a few steps here; predicted beside measured.

    Each plan runs in processes of its own, as `train` would run it. Nothing is kept but the
    figures. Without data, rows are random tokens of full length.
    """

    job: Annotated[
        str,
        Argument(
            metavar="RECIPE.YAML|MODEL|PLAN.JSON|RUN",
            help="A recipe; a folder with weights, cached hub id or GGUF file; with "
            "--random-weights also a catalogue name; a saved plan or a run, for its plan alone.",
            complete=complete_job,
            read=refuse_empty("MODEL", "./my-model"),
            show_default=False,
        ),
    ] = field(kw_only=False)
    data: Annotated[
        Path | None,
        path_option("--data", "Rows to measure with.", example="train.jsonl"),
    ] = None
    on: On = None
    method: PlanMethod = None
    seq_len: SeqLen = None
    effective_batch: EffectiveBatch = None
    template: Template = None
    settings: Settings = None
    steps: Annotated[
        int,
        count_option(
            "--steps",
            f"Steps to measure. [default: {DEFAULT_STEPS}]",
            most=MAX_STEPS,
            example=DEFAULT_STEPS,
        ),
    ] = DEFAULT_STEPS
    warm_up: Annotated[
        int,
        count_option(
            "--warm-up",
            f"Steps before them that do not count. [default: {DEFAULT_WARM_UP}]",
            most=MAX_STEPS,
            example=DEFAULT_WARM_UP,
        ),
    ] = DEFAULT_WARM_UP
    top: Annotated[
        int | None,
        count_option(
            "--top",
            f"Measure the planner's first N plans. [default: 1; {DEFAULT_LEVERS} with "
            "--all-levers]",
            most=MAX_TOP,
            example=5,
        ),
    ] = None
    all_levers: Annotated[
        bool,
        switch_option(
            "--all-levers", "Measure every legal setting of the levers, best predicted first."
        ),
    ] = False
    minutes: Annotated[
        float | None,
        number_option(
            "--minutes", "Start no further plan after this long.", most=MAX_MINUTES, example=30
        ),
    ] = None
    random_weights: Annotated[
        bool,
        switch_option(
            "--random-weights", "Draw the weights: the model's shape is enough, as for a catalogue "
            "name.",
        ),
    ] = False  # fmt: skip
    synthetic: Annotated[
        bool,
        switch_option(
            "--synthetic", "Random tokens in place of the data's, in rows as long as its own."
        ),
    ] = False
    memory_limit: MemoryLimit = None
    out: Annotated[
        Path | None,
        path_option(
            "--out", "Write the figures as JSON, anew after each plan.", example="plans.json"
        ),
    ] = None
    progress: Progress | None = None


# What `tightfit calibrate` accepts.

CALIBRATION_DEVICES = ("cuda", "cpu")
MAX_CALIBRATION_SECONDS = 3600

CALIBRATE_EXAMPLES = """\b
Examples:
  tightfit calibrate                    this machine's GPUs, or its CPU where it has none
  tightfit calibrate --show             what was measured before
  tightfit calibrate --device cpu --seconds 30
  tightfit calibrate --json > rates.json
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    """Measure this machine in under 2 minutes; plans made on it then use it.

    Measures matrix products, attention, memory, AdamW, launches, the CUDA context, host copies
    and, with several GPUs, collectives. Kept beside the ledger, one file per host and device, in
    place of the last one. Run it while the machine is idle: what was measured beside other work is
    not kept. Needs torch.
    """

    device: Annotated[
        str | None,
        word_option(
            "--device",
            CALIBRATION_DEVICES,
            "What to measure. [default: cuda, or cpu without a GPU]",
        ),
    ] = None
    seconds: Annotated[
        float | None,
        number_option(
            "--seconds",
            "About how long to measure; less of it leaves out the largest shapes. [default: 100]",
            most=MAX_CALIBRATION_SECONDS,
            example=30,
        ),
    ] = None
    force: Annotated[
        bool,
        Option(
            "--force",
            help="Keep what was measured on a busy machine too; plans then say so.",
            show_default=False,
        ),
    ] = False
    progress: Progress | None = None
