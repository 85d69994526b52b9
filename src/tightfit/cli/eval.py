"""`tightfit eval`: a run or a model scored on data, before and after tuning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tightfit.cli.flags.eval import METRICS, EvalFlags
from tightfit.cli.require import require_packages
from tightfit.cli.terminal.harmless import shorten
from tightfit.cli.terminal.json_output import show_json
from tightfit.cli.terminal.output import announce
from tightfit.cli.terminal.progress_bar import progress_bar
from tightfit.core.errors import NotFoundError, UsageError
from tightfit.core.suggest import did_you_mean


def eval(flags: EvalFlags) -> None:
    """Score, save and show."""
    if flags.data is None:
        raise UsageError(
            "No data to evaluate on was named.",
            remedy=f"tightfit eval {shorten(flags.target)} --data test.jsonl",
        )
    metrics = _read_metrics(flags.metrics or ())
    template = _read_template(flags.settings or ())
    databases = None if flags.databases is None else Path(flags.databases)
    if databases is not None and not databases.is_dir():
        raise NotFoundError(
            f"There is no folder {flags.databases!r}.",
            remedy="--databases FOLDER with one NAME.sqlite for each db_id of the rows",
        )
    require_packages("Evaluation", "torch", "transformers", "peft", extra="eval")
    from tightfit.evaluate.evaluate import DEFAULT_BATCH, EvaluateRequest, evaluate_model
    from tightfit.evaluate.metrics import Metric

    with progress_bar() as report:
        scores = evaluate_model(
            EvaluateRequest(
                target=flags.target,
                data=flags.data,
                metrics=tuple(Metric(name) for name in metrics),
                databases=databases,
                limit=flags.limit,
                batch=flags.batch or DEFAULT_BATCH,
                max_new_tokens=flags.max_new_tokens,
                with_base=flags.base,
                beside=tuple(flags.beside or ()),
                template=template,
                save_to=None if flags.save is None else Path(flags.save),
                report=report,
            )
        )
    if flags.as_json:
        show_json(scores.model_dump(mode="json"))
    else:
        from tightfit.cli.render.eval import show_scores

        show_scores(scores)
    if scores.answers_path is not None:
        announce(Path(scores.answers_path))


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


def _read_template(texts: Sequence[str]) -> str | None:
    template = None
    for text in texts:
        key, _, value = text.partition("=")
        if key.strip() != "template" or not value.strip():
            raise UsageError(
                f"`--set {shorten(text)}`: only the template can be set here.",
                remedy="--set template=NAME or a Jinja file",
            )
        template = value.strip()
    return template
