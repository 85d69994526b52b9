"""`evaluate`: score a run or a model on a data file, before and after tuning."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tightfit.api.call import accepts_keywords
from tightfit.api.options.common import Tools, complete_model, model_argument
from tightfit.api.options.engines import read_template
from tightfit.core.errors import NotFoundError, UsageError
from tightfit.core.options import (
    count_option,
    offer,
    path_option,
    read_word,
    switch_option,
    text_option,
)
from tightfit.core.packages import require_packages
from tightfit.core.progress import Progress
from tightfit.core.text import shorten
from tightfit.evaluation.metrics import METRICS

if TYPE_CHECKING:
    from tightfit.evaluation.scores import Scores
    from tightfit.evaluation.suite import SuiteScores


METRIC_WORDS = ("auto", *METRICS)
MAX_EVAL_ROWS = 10**9
MAX_EVAL_BATCH = 65_536
MAX_EVAL_NEW_TOKENS = 1_048_576
MAX_FEWSHOT = 1000

EVAL_EXAMPLES = """\b
Examples:
  tightfit eval runs/sql --data test.jsonl
  tightfit eval runs/sql --data test.jsonl --databases databases --limit 100
  tightfit eval runs/summaries --data samsum_test.jsonl --metric rouge
  tightfit eval runs/sql --data test.jsonl --beside runs/sql/merged --beside small.gguf
  tightfit eval ./my-model --data wiki.txt --metric loss --json
  tightfit eval runs/sql --suite arc_easy --suite gsm8k --suite-data tasks --beside small.gguf
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
        model_argument(
            "RUN|MODEL",
            "A run folder, an adapter folder, a model folder, a cached hub id or a GGUF file.",
        ),
    ] = field(kw_only=False)
    data: str | None = text_option("FILE", "Rows that were not trained on.", example="test.jsonl")
    tools: Tools = None
    metrics: list[str] | None = text_option(
        "|".join(METRIC_WORDS),
        "Repeatable. auto chooses by the data; "
        + "; ".join(f"{metric.word}: {metric.help}" for metric in METRICS.values())
        + ". [default: auto]",
        complete=offer(METRIC_WORDS),
        name="--metric",
        parse=lambda typed, option: read_word(typed, METRIC_WORDS, option=option.name),
    )
    databases: str | None = text_option(
        "FOLDER",
        "Folder with NAME.sqlite for the rows' db_id. [default: databases/ beside the data; "
        "without one, synthetic rows in the tables that each row shows]",
        example="databases",
    )
    limit: int | None = count_option("Only the first N rows.", most=MAX_EVAL_ROWS, example=100)
    batch: int | None = count_option(
        "Answers generated at a time. [default: 16]", most=MAX_EVAL_BATCH, example=16
    )
    max_new_tokens: int | None = count_option(
        "Longest answer. [default: the longest gold answer and 32 more]",
        most=MAX_EVAL_NEW_TOKENS,
        example=128,
    )
    base: bool = switch_option(
        "Score the base model too.", has_off=True, show_default=True, default=True
    )
    beside: list[str] | None = text_option(
        "MODEL|FILE",
        "Score another artefact of the same model too: merged, quantized, a GGUF file. Repeatable.",
        complete=complete_model,
    )
    save: str | None = text_option(
        "FOLDER", "Folder for the scores and every answer. [default: RUN/eval]", example="scores"
    )
    suite: list[str] | None = text_option(
        "TASK",
        "Score on tasks of lm-eval instead, by name, group or tag. Repeatable.",
        example="arc_easy",
    )
    suite_data: Path | None = path_option(
        "Rows of the tasks: DATASET/SPLIT.jsonl or .parquet, DATASET as the task has it.",
        example="tasks",
        metavar="FOLDER",
    )
    suite_tasks: Path | None = path_option(
        "Tasks of your own, as YAML files of lm-eval.", example="own", metavar="FOLDER"
    )
    suite_fewshot: int | None = count_option(
        "Examples before each question. [default: as each task says]",
        most=MAX_FEWSHOT,
        example=5,
        least=0,
    )
    suite_chat: bool = switch_option("Ask the tasks through the model's chat template.")
    suite_code: bool = switch_option(
        "Run Python code that the task files of --suite-tasks name, and tasks that run the model's."
    )
    context: int | None = count_option(
        "Longest prompt and answer together of --suite, in tokens. "
        "[default: the model's own, at most 4096]",
        most=MAX_EVAL_NEW_TOKENS,
        example=2048,
    )
    settings: list[str] | None = text_option(
        "template=NAME",
        "Read the rows with another template than the run's or the tokenizer's.",
        name="--set",
    )
    progress: Progress | None = None


@accepts_keywords(EvalOptions)
def evaluate(options: EvalOptions) -> Scores:
    """Score the model, and its base and the artefacts of `beside` where asked."""
    if options.suite:
        raise UsageError(
            "`evaluate` scores on a data file, not on tasks.", remedy="tightfit.evaluate_suite"
        )
    given = {name: getattr(options, name) for name in SUITE_ONLY}
    stated = next(
        (name for name, one in given.items() if one is not None and one is not False), None
    )
    if stated is not None:
        raise UsageError(
            f"`--{stated.replace('_', '-')}` belongs to --suite.", remedy="--suite TASK"
        )
    if options.data is None:
        raise UsageError(
            "No data to evaluate on was named.",
            remedy=f"tightfit eval {shorten(options.target)} --data test.jsonl",
        )
    metrics = dict.fromkeys(options.metrics or ())
    if "auto" in metrics and len(metrics) > 1:
        raise UsageError("`--metric auto` chooses by itself.", remedy="leave it out")
    template = read_template(options.settings or ())
    databases = None if options.databases is None else Path(options.databases)
    if databases is not None and not databases.is_dir():
        raise NotFoundError(
            f"There is no folder {options.databases!r}.",
            remedy="--databases FOLDER with one NAME.sqlite for each db_id of the rows",
        )
    require_packages("Evaluation", "torch", "transformers", "peft", extra="eval")
    from tightfit.evaluation.evaluate import DEFAULT_BATCH, EvaluateRequest, evaluate_model

    return evaluate_model(
        EvaluateRequest(
            target=options.target,
            data=options.data,
            tools=options.tools,
            metrics=tuple(name for name in metrics if name != "auto"),
            databases=databases,
            limit=options.limit,
            batch=options.batch or DEFAULT_BATCH,
            max_new_tokens=options.max_new_tokens,
            with_base=options.base,
            beside=tuple(options.beside or ()),
            template=template,
            save_to=None if options.save is None else Path(options.save),
            report=options.progress,
        )
    )


SUITE_ONLY = (
    "suite_data", "suite_tasks", "suite_fewshot", "suite_chat", "suite_code", "context",
)  # fmt: skip
DATA_ONLY = ("data", "tools", "metrics", "databases", "max_new_tokens")


@accepts_keywords(EvalOptions)
def evaluate_suite(options: EvalOptions) -> SuiteScores:
    """Score the model, and its base and the artefacts of `beside`, on tasks of lm-eval."""
    if not options.suite:
        raise UsageError("No task was named.", remedy="--suite TASK")
    stated = next((name for name in DATA_ONLY if getattr(options, name) is not None), None)
    if stated is not None:
        option = "metric" if stated == "metrics" else stated.replace("_", "-")
        raise UsageError(
            f"`--{option}` belongs to a data file, and `--suite` has its own.",
            remedy=f"leave out --{option}, or --suite",
        )
    if options.suite_data is None:
        raise UsageError(
            "No data of the tasks was named; nothing is downloaded.",
            remedy="--suite-data FOLDER with DATASET/test.jsonl for each task's dataset",
        )
    template = read_template(options.settings or ())
    require_packages(
        "Evaluation on tasks", "torch", "transformers", "peft", "lm_eval", extra="eval"
    )
    from tightfit.evaluation.suite import SuiteRequest, score_tasks

    return score_tasks(
        SuiteRequest(
            target=options.target,
            tasks=tuple(dict.fromkeys(options.suite)),
            data=options.suite_data.expanduser(),
            own_tasks=None if options.suite_tasks is None else options.suite_tasks.expanduser(),
            allows_code=options.suite_code,
            num_fewshot=options.suite_fewshot,
            uses_chat=options.suite_chat,
            limit=options.limit,
            batch=options.batch,
            context=options.context,
            with_base=options.base,
            beside=tuple(options.beside or ()),
            template=template,
            save_to=None if options.save is None else Path(options.save),
            report=options.progress,
        )
    )
