"""`evaluate`: score a run or a model on a data file, before and after tuning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tightfit.api.call import accepts_keywords
from tightfit.api.options.engines import read_template
from tightfit.api.options.export import METRICS, EvalOptions
from tightfit.core.errors import NotFoundError, UsageError
from tightfit.core.packages import require_packages
from tightfit.core.suggest import did_you_mean
from tightfit.core.text import shorten

if TYPE_CHECKING:
    from tightfit.evaluation.scores import Scores


@accepts_keywords(EvalOptions)
def evaluate(options: EvalOptions) -> Scores:
    """Score the model, and its base and the artefacts of `beside` where asked."""
    if options.data is None:
        raise UsageError(
            "No data to evaluate on was named.",
            remedy=f"tightfit eval {shorten(options.target)} --data test.jsonl",
        )
    metrics = _read_metrics(options.metrics or ())
    template = read_template(options.settings or ())
    databases = None if options.databases is None else Path(options.databases)
    if databases is not None and not databases.is_dir():
        raise NotFoundError(
            f"There is no folder {options.databases!r}.",
            remedy="--databases FOLDER with one NAME.sqlite for each db_id of the rows",
        )
    require_packages("Evaluation", "torch", "transformers", "peft", extra="eval")
    from tightfit.evaluation.evaluate import DEFAULT_BATCH, EvaluateRequest, evaluate_model
    from tightfit.evaluation.metrics import Metric

    return evaluate_model(
        EvaluateRequest(
            target=options.target,
            data=options.data,
            metrics=tuple(Metric(name) for name in metrics),
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


def _read_metrics(names: Sequence[str]) -> tuple[str, ...]:
    """Metrics by name; none for `auto`."""
    chosen = [name.strip().lower() for name in names]
    for name in chosen:
        if name not in METRICS:
            raise UsageError(
                f"`--metric {shorten(name)}` is not known.{did_you_mean(name, METRICS)}",
                remedy=f"--metric {'|'.join(METRICS)}",
            )
    if "auto" in chosen and len(set(chosen)) > 1:
        raise UsageError("`--metric auto` chooses by itself.", remedy="leave it out")
    return tuple(dict.fromkeys(name for name in chosen if name != "auto"))
