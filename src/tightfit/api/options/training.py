"""Options of estimate, plan, prepare, train, bench and calibrate.

None means not given: the recipe, the planner or a default decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tightfit.api.options.common import (
    MAX_TOP,
    EffectiveBatch,
    Epochs,
    EvalRows,
    Json,
    Method,
    Network,
    Objective,
    On,
    SeqLen,
    Settings,
    Template,
    Tools,
    Trace,
    Trainer,
    complete_job,
    model_argument,
)
from tightfit.core.options import (
    Argument,
    count_option,
    number_option,
    path_option,
    setting_option,
    switch_option,
    text_option,
    word_option,
)
from tightfit.core.progress import Progress
from tightfit.core.settings import MAX_COUNT, MAX_WORLD_SIZE, TrainOn, words_of


def job_argument(help: str, *, metavar: str = "RECIPE.YAML|MODEL|PLAN.JSON|RUN") -> Argument:
    return Argument(
        name="MODEL", metavar=metavar, help=help, complete=complete_job, example="./my-model"
    )


MemoryLimit = Annotated[
    str | None, text_option("SIZE", "Use no more than this per GPU, like 20GiB.", example="20GiB")
]

ESTIMATE_EXAMPLES = """\b
Examples:
  tightfit estimate Llama-2-7b --on V100-32GB
  tightfit estimate Llama-2-7b --method full --sharding fsdp --on 8xA100-80GB --seq-len 4096
  tightfit estimate Qwen2.5-7B --method qlora --micro-batch 4 --loss fused --on RTX-4090 --json
  tightfit estimate Llama-3.1-8B --on H100-80GB --trace --chart step.html
  tightfit estimate Llama-3.1-8B --on RTX-4090 --method qlora --trainer axolotl
  tightfit estimate t5-3b --zero-table --gpus-per-node 8 --nodes 1
  tightfit estimate --zero-table --total-params 2851e6 --largest-layer-params 32e6 --gpus-per-node 8
"""
ESTIMATE_METHODS = ("full", "lora", "qlora", "load")


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateOptions:
    """Memory, disk and time of one configuration, part by part.

    Lists every part of the peak: weights, gradients, optimizer, activations, logits, gathered
    shards, quantization state, CUDA context and allocator slack, for each phase of the job.
    """

    model: Annotated[
        str | None,
        model_argument(
            "MODEL",
            "Catalogue name, cached hub id, folder with config.json, or GGUF file.",
            example="Llama-2-7b",
        ),
    ] = field(default=None, kw_only=False)
    method: str | None = word_option(
        ESTIMATE_METHODS, "What is trained; qlora is lora over nf4. [default: lora]"
    )
    objective: Objective = None
    precompute_reference: bool | None = setting_option("precompute_reference")
    weights: str | None = setting_option("weights")
    compute: str | None = setting_option("compute")
    adapter_dtype: str | None = setting_option("adapter_dtype")
    optimizer: str | None = setting_option("optimizer")
    lora_rank: int | None = setting_option("lora_rank")
    lora_targets: str | None = setting_option("lora_targets")
    micro_batch: int | None = setting_option("micro_batch")
    seq_len: SeqLen = None
    grad_accum: int | None = setting_option("grad_accum")
    checkpointing: bool | None = setting_option("checkpointing")
    attention: str | None = setting_option("attention")
    loss: str | None = setting_option("loss")
    fused_kernels: bool | None = setting_option("fused_kernels")
    fused_lora: bool | None = setting_option("fused_lora")
    dequantized_base: bool | None = setting_option("dequantized_base")
    sharding: str | None = setting_option("sharding")
    offload: str | None = setting_option("offload")
    double_quant: bool | None = setting_option("double_quant")
    train_embeddings: bool | None = setting_option("train_embeddings")
    settings: Settings = None
    trainer: Trainer = None
    on: On = None
    network: Network = None
    gpus_per_node: int = count_option(
        "For --zero-table. [default: 1]", most=MAX_WORLD_SIZE, example=8, default=1
    )
    nodes: int = count_option(
        "For --zero-table. [default: 1]", most=MAX_WORLD_SIZE, example=2, default=1
    )
    total_params: str | None = text_option(
        "N", "For --zero-table without a model: 2851e6 or 2.8B.", example="2.8B"
    )
    largest_layer_params: str | None = text_option(
        "N", "For --zero-table without a model: 32e6 or 32M.", example="32M"
    )
    trace: Trace = False
    progress: Progress | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateOutput:
    zero_table: bool = switch_option("Print the six-row ZeRO-3 offload table instead.")
    chart: Path | None = path_option(
        "With --trace: draw memory over the step into a .png or .html file.", example="step.html"
    )
    check: bool = switch_option("Exit with 5 where it does not fit or cannot work.")
    as_json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """A job to plan: what plan, bench, train and submit have in common."""

    job: str = field(kw_only=False)
    data: Path | None = path_option("Rows to train on.", example="train.jsonl")
    tools: Tools = None
    on: On = None
    method: Method = None
    objective: Objective = None
    seq_len: SeqLen = None
    effective_batch: EffectiveBatch = None
    settings: Settings = None
    progress: Progress | None = None


PLAN_EXAMPLES = """\b
Examples:
  tightfit plan Llama-2-7b --on 4xV100-32GB
  tightfit plan Qwen2.5-7B --on RTX-4090 --data train.jsonl --seq-len 4096 --save plan.json
  tightfit plan job.yaml --on slurm:gpu --explain
  tightfit plan Llama-3.1-70B --on '2n x 8xA100-80GB' --network 100Gb/s --json
  tightfit plan Qwen2.5-7B --on RTX-4090 --trainer trl --save plan.json    also plan.trl.yaml
  tightfit plan plan.json
  tightfit plan Llama-3.1-8B --method full --buy --chart memory.html
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(JobOptions):
    """The best plans for a job on given hardware, and why.

    Searches method, precision, sharding, offload, micro-batch, checkpointing, kernels, optimizer
    and node count. Best first: what fits comes before what is tight, then the faster, where
    full tuning, quantized weights and extra packages must be clearly faster to come first.
    """

    job: Annotated[
        str,
        job_argument(
            "Catalogue name, cached hub id, folder with config.json or GGUF file; a recipe; or a "
            "saved plan, to be shown again.",
            metavar="MODEL|RECIPE.YAML|PLAN.JSON",
        ),
    ] = field(kw_only=False)
    data: Path | None = path_option(
        "Dataset; its real lengths drive padding, packing and time.", example="train.jsonl"
    )
    network: Network = None
    memory_limit: MemoryLimit = None
    trainer: Trainer = None
    epochs: Epochs = None
    top: int = count_option(
        "How many plans to show. [default: 5]", most=MAX_TOP, example=5, default=5
    )
    explain: bool = switch_option("List what was excluded and the reason of each.")
    trace: Trace = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOutput:
    save: Path | None = path_option(
        "Write the best plan as JSON; with --trainer also as that trainer's own configuration.",
        example="plan.json",
    )
    buy: bool = switch_option("The cheapest hardware that does the job.")
    longest: bool = switch_option("How long a row fits, by lever, and how fast it is.")
    chart: Path | None = path_option(
        "Draw memory by phase into a .png or .html file.", example="memory.html"
    )
    as_json: Json = False


PREPARE_EXAMPLES = """\b
Examples:
  tightfit prepare ./SmolLM2-135M --data train.jsonl
  tightfit prepare recipe.yaml --show 5               five rows, what is trained in colour
  tightfit prepare recipe.yaml --row 812              the row that a message names
  tightfit prepare ./Llama-2-7b --data chats.json --template llama-2 --seq-len 4096
  tightfit prepare ./gemma-2-2b --data a.jsonl --data 'b.jsonl[:10%]' --eval 0.05 --chart len.png
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOptions:
    """Encode data as `train` will, and show what becomes of it.

    Rows, tokens, lengths, packing, every error with its row, and which words are trained. The
    encoding is kept: `tightfit train` on the same data finds it. Needs the model's tokenizer and
    config.json, not its weights.
    """

    job: Annotated[
        str,
        job_argument(
            "A recipe; or a model's folder, cached hub id or GGUF file.",
            metavar="RECIPE.YAML|MODEL",
        ),
    ] = field(kw_only=False)
    data: list[str] | None = text_option(
        "FILE",
        "Rows to train on, in place of the recipe's. Repeatable.",
        example="train.jsonl",
    )
    tools: Tools = None
    objective: Objective = None
    seq_len: SeqLen = None
    template: Template = None
    eval: EvalRows = None
    take: str | None = text_option(
        "PART",
        "Only a part of the training rows: 100, 1%, '[:10%]' or 'train[10:20]'.",
        example="1%",
    )
    train_on: str | None = word_option(
        words_of(TrainOn), "Which tokens carry loss. [default: answers]"
    )
    skip_invalid: bool = switch_option("Report on the other rows where some cannot be read.")
    progress: Progress | None = None


MAX_SHOWN = 1000
MAX_ROW = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOutput:
    show: int | None = count_option(
        "Rows to show with their mask, spread over the data. [default: 1]",
        most=MAX_SHOWN,
        example=3,
    )
    row: int | None = count_option(
        "Show the row at this line, as messages count.", most=MAX_ROW, example=812
    )
    chart: Path | None = path_option(
        "Draw the lengths into a .png or .html file.", example="lengths.png"
    )
    as_json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions(JobOptions):
    """What train and submit have in common."""

    eval: EvalRows = None
    network: Network = None
    epochs: Epochs = None
    max_steps: int | None = setting_option("max_steps")
    lr: float | None = setting_option("learning_rate")
    beta: float | None = setting_option("beta")
    template: Template = None
    seed: int | None = setting_option("seed")
    plan: int = count_option(
        "Take the Nth plan of the list. [default: 1]", most=MAX_TOP, example=2, default=1
    )
    output: Path | None = path_option(
        "Folder of the run; every node must see it. [default: runs/MODEL-METHOD-N]",
        example="runs/mine",
    )
    log_to: str | None = setting_option("log_to")
    fresh: bool = switch_option("Start over; what the folder holds is moved aside.")
    again: bool = switch_option("Train once more although this run is finished.")
    dry_run: bool = switch_option("Show what would happen; start nothing.")
    nodes: int | None = None


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
class TrainOptions(TrainingOptions):
    """Plan, show the plan, tune, and report.

    Data is encoded and checked before any process starts. Out of memory, the run goes on with
    the next smaller plan. Ctrl-C and SIGTERM save first; the same command resumes.
    """

    job: Annotated[
        str,
        job_argument(
            "A recipe; a folder with weights, cached hub id or GGUF file; a saved plan; or the "
            "folder of a run, to go on with it."
        ),
    ] = field(kw_only=False)
    memory_limit: MemoryLimit = None
    nodes: int = count_option(
        "Nodes that run this same command. [default: 1]",
        most=MAX_WORLD_SIZE,
        example=2,
        default=1,
    )
    rendezvous: str | None = text_option(
        "HOST:PORT", "Where several nodes meet.", example="node1:29500"
    )
    node_rank: str | None = text_option(
        "N", "This node's number, where hosts share a name.", example="0"
    )
    local_addr: str | None = text_option(
        "ADDRESS", "How other nodes reach this one.", example="10.0.0.2"
    )
    interface: str | None = text_option("NAME", "Network device between nodes.", example="ib0")
    as_planned: bool = switch_option(
        "Run a run folder's plan as it is, without a look at the hardware."
    )


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
class BenchOptions(JobOptions):
    """Run a plan for a few steps here; predicted beside measured.

    Each plan runs in processes of its own, as `train` would run it. Nothing is kept but the
    figures. Without data, rows are random tokens of full length.
    """

    job: Annotated[
        str,
        job_argument(
            "A recipe; a folder with weights, cached hub id or GGUF file; with --random-weights "
            "also a catalogue name; a saved plan or a run, for its plan alone."
        ),
    ] = field(kw_only=False)
    data: Path | None = path_option("Rows to measure with.", example="train.jsonl")
    template: Template = None
    steps: int = count_option(
        f"Steps to measure. [default: {DEFAULT_STEPS}]",
        most=MAX_COUNT,
        example=DEFAULT_STEPS,
        default=DEFAULT_STEPS,
    )
    warm_up: int = count_option(
        f"Steps before them that do not count. [default: {DEFAULT_WARM_UP}]",
        most=MAX_COUNT,
        example=DEFAULT_WARM_UP,
        default=DEFAULT_WARM_UP,
    )
    top: int | None = count_option(
        f"Measure the planner's first N plans. [default: 1; {DEFAULT_LEVERS} with --all-levers]",
        most=MAX_TOP,
        example=5,
    )
    all_levers: bool = switch_option(
        "Measure every legal setting of the levers, best predicted first."
    )
    minutes: float | None = number_option(
        "Start no further plan after this long.", most=MAX_MINUTES, example=30
    )
    random_weights: bool = switch_option(
        "Draw the weights: the model's shape is enough, as for a catalogue name."
    )
    synthetic: bool = switch_option(
        "Random tokens in place of the data's, in rows as long as its own."
    )
    memory_limit: MemoryLimit = None
    out: Path | None = path_option(
        "Write the figures as JSON, anew after each plan.", example="plans.json"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOutput:
    chart: Path | None = path_option(
        "Draw predicted and measured speeds into a .png file.", example="plans.png"
    )
    as_json: Json = False


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

    device: str | None = word_option(
        CALIBRATION_DEVICES, "What to measure. [default: cuda, or cpu without a GPU]"
    )
    seconds: float | None = number_option(
        "About how long to measure; less of it leaves out the largest shapes. [default: 100]",
        most=MAX_CALIBRATION_SECONDS,
        example=30,
    )
    force: bool = switch_option("Keep what was measured on a busy machine too; plans then say so.")
    progress: Progress | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOutput:
    show: bool = switch_option("Measure nothing; print what was stored.")
    as_json: Json = False
