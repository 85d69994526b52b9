"""A saved plan or a run given to `bench`: its job, with every lever said as an option would."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from tightfit.cli.bench_words import NOT_TURNED, list_words
from tightfit.cli.flags.bench import BenchFlags
from tightfit.cli.saved_plan import read_saved_plans
from tightfit.cli.settings import show_value
from tightfit.cli.training.plan import encoded_len
from tightfit.core.errors import UsageError
from tightfit.core.strategy import Strategy
from tightfit.ledger.find import find_run
from tightfit.planning.plan import Plan

_SAID_APART = ("method", "seq_len")
"""By options of their own."""


def unfold_saved(flags: BenchFlags) -> BenchFlags:
    """The plan is estimated anew for this machine: a prediction for another says nothing here."""
    plan = _find_plan(flags.job)
    if plan is None:
        return flags
    _refuse_changes(flags, plan)
    held = plan.training
    data, template = flags.data, flags.template
    if held is not None:
        data = data or next((Path(part.path) for part in held.data if part.split == "train"), None)
        template = template or held.template
    words = list_words(plan.strategy)
    return replace(
        flags,
        job=plan.model.name if held is None else held.model_path,
        data=data,
        template=template,
        method=words[1],
        seq_len=encoded_len(plan),
        effective_batch=plan.effective_batch,
        settings=[*words[3::2], *_list_unusual(plan.strategy)],
        random_weights=flags.random_weights or (held is not None and held.random_weights),
    )


def _find_plan(name: str) -> Plan | None:
    run = find_run(name)
    if run is not None:
        return run.read_plan()
    saved = read_saved_plans(name)
    return None if saved is None else saved.plans[0]


def _list_unusual(strategy: Strategy) -> list[str]:
    """What a plan's words leave out, as far as it is not what a job has anyway."""
    plainest = Strategy()
    return [
        f"{name}={show_value(getattr(strategy, name))}"
        for name in NOT_TURNED
        if name not in _SAID_APART and getattr(strategy, name) != getattr(plainest, name)
    ]


def _refuse_changes(flags: BenchFlags, plan: Plan) -> None:
    given = {
        "--method": flags.method,
        "--seq-len": flags.seq_len,
        "--effective-batch": flags.effective_batch,
        "--set": flags.settings,
        "--top": flags.top,
        "--all-levers": flags.all_levers or None,
    }
    option = next((name for name, value in given.items() if value is not None), None)
    if option is not None:
        name = shlex.quote(plan.model.name)
        raise UsageError(
            f"{flags.job} holds one plan, which {option} cannot change.",
            remedy=f"tightfit bench {name} with the same options    (plans it anew)",
        )
