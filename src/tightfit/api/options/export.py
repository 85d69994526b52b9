"""Options of eval, merge, convert, quantize and verify."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tightfit.api.options import choices
from tightfit.api.options.choices import complete_model
from tightfit.api.options.common import (
    count_option,
    path_option,
    refuse_empty,
    text_option,
    word_option,
)
from tightfit.api.options.declare import Argument, Option
from tightfit.api.options.engines import Device, Threads, natural_option
from tightfit.core.progress import Progress
from tightfit.export.formats import CONVERT_DTYPES, CONVERT_FORMATS, GPTQ_TOOLS, format_words

OnForecast = Callable[..., None]
"""Loosely typed: the forecasts are pydantic models, which `--help` must not load."""
METRICS = ("auto", "loss", "exact", "rouge", "execution")
MAX_EVAL_ROWS = 10**9
MAX_EVAL_BATCH = 65_536
MAX_EVAL_NEW_TOKENS = 1_048_576

EVAL_EXAMPLES = """\b
Examples:
  tightfit eval runs/sql --data test.jsonl
  tightfit eval runs/sql --data test.jsonl --databases databases --limit 100
  tightfit eval runs/summaries --data samsum_test.jsonl --metric rouge
  tightfit eval runs/sql --data test.jsonl --beside runs/sql/merged --beside small.gguf
  tightfit eval ./my-model --data wiki.txt --metric loss --json
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """Score a run or a model on a data file, before and after tuning.

    A run's model, template and sequence length come from its plan. Metrics by what the data
    is: loss and perplexity always; ROUGE for summaries; for text-to-SQL whether the answer's
    query finds what the gold query finds, and exact match; exact match elsewhere.

    Queries run read-only and time-limited. Results agree as multisets of rows, in order where
    the gold query is ordered, columns as given.
    """

    target: Annotated[
        str,
        Argument(
            metavar="RUN|MODEL",
            help="A run folder, an adapter folder, a model folder, a cached hub id or a GGUF file.",
            complete=complete_model,
            read=refuse_empty("RUN", "runs/sql"),
            show_default=False,
        ),
    ] = field(kw_only=False)
    data: Annotated[
        str | None,
        text_option("--data", "FILE", "Rows that were not trained on.", example="test.jsonl"),
    ] = None
    metrics: Annotated[
        list[str] | None,
        Option(
            "--metric",
            metavar="|".join(METRICS),
            help="What to measure. Repeatable. [default: auto]",
            complete=choices.offer(METRICS),
            show_default=False,
        ),
    ] = None
    databases: Annotated[
        str | None,
        text_option(
            "--databases",
            "FOLDER",
            "Folder with NAME.sqlite for the rows' db_id. [default: databases/ beside the data; "
            "without one, synthetic rows in the tables that each row shows]",
            example="databases",
        ),
    ] = None
    limit: Annotated[
        int | None,
        count_option("--limit", "Only the first N rows.", most=MAX_EVAL_ROWS, example=100),
    ] = None
    batch: Annotated[
        int | None,
        count_option(
            "--batch",
            "Answers generated at a time. [default: 16]",
            most=MAX_EVAL_BATCH,
            example=16,
        ),
    ] = None
    max_new_tokens: Annotated[
        int | None,
        count_option(
            "--max-new-tokens",
            "Longest answer. [default: the longest gold answer and 32 more]",
            most=MAX_EVAL_NEW_TOKENS,
            example=128,
        ),
    ] = None
    base: Annotated[
        bool,
        Option("--base/--no-base", help="Score the base model too.", show_default=True),
    ] = True
    beside: Annotated[
        list[str] | None,
        Option(
            "--beside",
            metavar="MODEL|FILE",
            help="Score another artefact of the same model too: merged, quantized, a GGUF file. "
            "Repeatable.",
            complete=complete_model,
            show_default=False,
        ),
    ] = None
    save: Annotated[
        str | None,
        text_option(
            "--save",
            "FOLDER",
            "Folder for the scores and every answer. [default: RUN/eval]",
            example="scores",
        ),
    ] = None
    settings: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="template=NAME",
            help="Read the rows with another template than the run's or the tokenizer's.",
            show_default=False,
        ),
    ] = None
    progress: Progress | None = None


# What `tightfit merge` accepts.

MERGE_DTYPES = ("auto", "fp32", "bf16", "fp16")

MERGE_EXAMPLES = """\b
Examples:
  tightfit merge runs/sql
  tightfit merge runs/sql --out sql-model --dtype bf16
  tightfit merge ./my-adapter --out my-model --max-shard-size 2GB
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOptions:
    """Add a run's adapter to its base model.

    The result is one folder that any program can load. Each matrix is added to in fp32 and
    stored as the base has it; a QLoRA run is merged into the unquantized base. The model is read
    and written tensor by tensor, so that little memory is enough. Tokenizer, chat template of the
    training and generation settings go along.

    The result is checked against the adapter; one that fails is kept as NAME.rejected.
    """

    target: Annotated[
        str,
        Argument(
            metavar="RUN|ADAPTER",
            help="A run folder or an adapter folder.",
            complete=complete_model,
            read=refuse_empty("RUN", "runs/sql"),
            show_default=False,
        ),
    ] = field(kw_only=False)
    out: Annotated[
        str | None,
        text_option(
            "--out",
            "FOLDER",
            "Where the model goes. [default: RUN/merged, or ADAPTER-merged]",
            example="my-model",
        ),
    ] = None
    dtype: Annotated[
        str | None,
        word_option(
            "--dtype", MERGE_DTYPES, "How values are stored. [default: auto: as the base's]"
        ),
    ] = None
    max_shard_size: Annotated[
        str | None,
        text_option(
            "--max-shard-size", "SIZE", "Largest weight file. [default: 5GB]", example="5GB"
        ),
    ] = None
    verify: Annotated[
        bool,
        Option(
            "--verify/--no-verify",
            help="Check the result against the adapter on a small sample.",
            show_default=True,
        ),
    ] = True
    force: Annotated[bool, Option("--force", help="Replace a model that is there already.")] = False
    on_forecast: OnForecast | None = None
    """Called with the `MergeForecast` before anything is written."""
    progress: Progress | None = None


# What `tightfit convert` accepts.

CONVERT_EXAMPLES = """\b
Examples:
  tightfit convert ./my-model --to gguf
  tightfit convert ./Llama-2-7b --to hf
  tightfit convert model.Q4_K_M.gguf --to hf --dtype bf16 --out my-model
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """Turn a model into another format, tensor by tensor.

    Meta's original Llama files (params.json, consolidated.*.pth, tokenizer.model) and GGUF files
    become a Hugging Face folder; a Hugging Face folder becomes a GGUF file. Families: llama,
    mistral, qwen2, qwen3, gemma 1 to 3 (text), phi3, gpt2, falcon, bloom. Others are refused.

    A GGUF's tokenizer is checked: llama.cpp must cut text as the model's own tokenizer does.
    """

    source: Annotated[
        str,
        Argument(
            metavar="SOURCE",
            help="A model folder, a finished full-tuning run, Meta's folder or a GGUF file.",
            complete=complete_model,
            read=refuse_empty("SOURCE", "./my-model"),
            show_default=False,
        ),
    ] = field(kw_only=False)
    to: Annotated[
        str | None,
        word_option("--to", CONVERT_FORMATS, "The new format. [default: the other one]"),
    ] = None
    dtype: Annotated[
        str | None,
        word_option(
            "--dtype",
            CONVERT_DTYPES,
            "How matrices are stored. [default: f16 in a GGUF, else as they are]",
        ),
    ] = None
    out: Annotated[
        str | None,
        text_option(
            "--out",
            "PATH",
            "Where the result goes. [default: beside the source, NAME-f16.gguf or NAME-hf]",
            example="my-model.gguf",
        ),
    ] = None
    force: Annotated[bool, Option("--force", help="Replace a result that is there already.")] = (
        False
    )
    on_forecast: OnForecast | None = None
    """Called with source, target and `ConvertForecast` before anything is written."""
    progress: Progress | None = None


# What `tightfit quantize` accepts.

MAX_CALIBRATION_ROWS = 65_536
MAX_ITERS = 10_000
MAX_QUALITY_TOKENS = 10**7

QUANTIZE_EXAMPLES = """\b
Examples:
  tightfit quantize runs/sql --to q4_k_m
  tightfit quantize ./my-model --to gptq-4 --calibrate train.jsonl
  tightfit quantize ./my-model --to q8_0 --to q4_k_m --out shrunk
  tightfit quantize model-f16.gguf --to q5_k_m --no-importance
  tightfit quantize runs/sql --to all
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions:
    """Shrink a model to fewer bits, and measure what was lost.

    q*: a GGUF file for llama.cpp, with its own mixture of types. gptq-*: a folder that
    transformers and vLLM load. nf4, int8: a folder for bitsandbytes. Each result is held against
    the original before it is called good; one that fails is renamed and the command ends with 8.

    What an interrupted `--to all` has finished is not made again.
    """

    model: Annotated[
        str,
        Argument(
            metavar="MODEL|RUN",
            help="A model folder, a run (its merged model), a cached hub id, or for q* an F16, "
            "BF16 or F32 GGUF file.",
            complete=complete_model,
            read=refuse_empty("MODEL", "./my-model"),
            show_default=False,
        ),
    ] = field(kw_only=False)
    to: Annotated[
        list[str] | None,
        Option(
            "--to",
            metavar="|".join(format_words()),
            help="The format. Repeatable; all: every one, with a table to compare them.",
            complete=choices.offer(format_words()),
            show_default=False,
        ),
    ] = None
    calibrate: Annotated[
        Path | None,
        path_option(
            "--calibrate",
            "Rows as `train` reads them, or text. [default: the run's data; without a run, "
            "Python's documentation]",
            example="train.jsonl",
        ),
    ] = None
    rows: Annotated[
        int | None,
        count_option(
            "--rows",
            "Rows of 512 tokens to calibrate on. [default: 128 on a GPU, 32 on a CPU]",
            most=MAX_CALIBRATION_ROWS,
            example=64,
        ),
    ] = None
    out: Annotated[
        str | None,
        text_option(
            "--out",
            "FOLDER|FILE",
            "Where to. [default: beside the model; of a run RUN/quantized]",
            example="shrunk",
        ),
    ] = None
    importance: Annotated[
        bool,
        Option(
            "--importance/--no-importance",
            help="Weigh rounding errors of GGUF files by what each input carries. Needs the model "
            "in memory.",
            show_default=True,
        ),
    ] = True
    iters: Annotated[
        int | None,
        natural_option(
            "--iters",
            "Tuning steps of each layer for gptq-*. [default: 0, at 4 bits 20, at 3 and 2 bits 50]",
            most=MAX_ITERS,
            example=50,
        ),
    ] = None
    gptq_tool: Annotated[
        str | None,
        word_option("--gptq-tool", GPTQ_TOOLS, "What makes gptq-*. [default: auto-round]"),
    ] = None
    python: Annotated[
        str | None,
        text_option(
            "--python",
            "FILE",
            "Python of an environment that has the GPTQ tool. [default: TIGHTFIT_GPTQ_PYTHON, else "
            "this one]",
            example="/opt/gptq/bin/python",
        ),
    ] = None
    verify: Annotated[
        bool,
        Option(
            "--verify/--no-verify", help="Hold results against the original.", show_default=True
        ),
    ] = True
    text: Annotated[
        Path | None,
        path_option(
            "--text", "Text to measure quality on. [default: a short one]", example="t.txt"
        ),
    ] = None
    tokens: Annotated[
        int | None,
        count_option(
            "--tokens",
            "Tokens of it to measure on. [default: 2048]",
            most=MAX_QUALITY_TOKENS,
            example=4096,
        ),
    ] = None
    device: Device = None
    threads: Threads = None
    force: Annotated[bool, Option("--force", help="Replace results that are there.")] = False
    on_forecast: OnForecast | None = None
    """Called with a `QuantizeForecast` by format before anything is written."""
    progress: Progress | None = None


# What `tightfit verify` accepts.

MAX_VERIFY_TOKENS = 10**8

VERIFY_EXAMPLES = """\b
Examples:
  tightfit verify runs/sql runs/sql/merged
  tightfit verify runs/sql/merged model-f16.gguf model-q8_0.gguf model-q4_k_m.gguf
  tightfit verify ./model ./model-gptq-4 --text wiki.test.raw --tokens 100000 --html report.html
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """Hold models against the one they were made from.

    Compares scores (most likely token, KL divergence, perplexity), greedy answers, the rendered
    chat template, how text is cut into tokens, special tokens and where answers stop. How much
    may differ depends on what was done: nothing for a merge, little for 8 bit, more for 4 bit;
    3 and 2 bit are reported. Ends with 0 where all pass and with 8 where one does not.
    """

    reference: Annotated[
        str,
        Argument(
            metavar="REFERENCE",
            help="What the others were made from: a run, an adapter, a model folder or a GGUF "
            "file.",
            complete=complete_model,
            read=refuse_empty("REFERENCE", "runs/sql"),
            show_default=False,
        ),
    ] = field(kw_only=False)
    others: Annotated[
        list[str],
        Argument(
            metavar="OTHER...",
            help="Models to check.",
            complete=complete_model,
            show_default=False,
        ),
    ] = field(kw_only=False)
    text: Annotated[
        str | None,
        text_option(
            "--text",
            "FILE",
            "Text to score. [default: a page of our own, and rows of the run]",
            example="wiki.test.raw",
        ),
    ] = None
    prompts: Annotated[
        str | None,
        text_option(
            "--prompts",
            "FILE",
            "Prompts to answer: one on each line, or rows as `train` reads them.",
            example="prompts.txt",
        ),
    ] = None
    tokens: Annotated[
        int | None,
        count_option(
            "--tokens",
            "Most tokens of the text to score. [default: 2048]",
            most=MAX_VERIFY_TOKENS,
            example=2048,
        ),
    ] = None
    step: Annotated[
        str | None,
        text_option(
            "--as",
            "KIND",
            "Judge every model as this kind: exact, format, 8-bit, int8, 6-bit, 5-bit, 4-bit, "
            "gptq-4, nf4, 3-bit or 2-bit. [default: told from the files]",
            example="8-bit",
        ),
    ] = None
    device: Device = None
    threads: Threads = None
    html: Annotated[
        str | None,
        path_option("--html", "Write the report as a page, with plots.", example="report.html"),
    ] = None
    progress: Progress | None = None
