"""The words that make the planner come to one plan alone."""

from __future__ import annotations

import shlex

from tightfit.cli.flags.bench import BenchFlags
from tightfit.cli.repeat import list_given
from tightfit.cli.settings import FIELDS, read_settings, show_value
from tightfit.core.strategy import Method, Strategy
from tightfit.planning.request import name_method

NOT_TURNED = (
    "method",
    "seq_len",
    "num_nodes",
    "lora_rank",
    "lora_targets",
    "lora_dropout",
    "dora",
    "train_embeddings",
    "double_quant",
    "upcast_unquantized",
    "optimizer_in_backward",
)
"""What the planner takes from the job and never chooses; `method` is an option of its own."""
_OF_ADAPTERS = ("adapter_dtype",)


def list_words(strategy: Strategy) -> tuple[str, ...]:
    """`--method` and a `--set` for every lever."""
    name = name_method(strategy)
    words = ["--method", name if name in ("full", "qlora") else "lora"]
    is_full = strategy.method is Method.FULL
    for field in FIELDS:
        value = getattr(strategy, field)
        if field in NOT_TURNED or value is None or (is_full and field in _OF_ADAPTERS):
            continue
        words += ["--set", f"{field}={show_value(value)}"]
    return tuple(words)


def repeat_job(flags: BenchFlags) -> str:
    """The command again as far as it names the job, to be continued with a plan's words."""
    options = (
        ("--data", flags.data),
        ("--on", flags.on),
        ("--seq-len", flags.seq_len),
        ("--effective-batch", flags.effective_batch),
        ("--template", flags.template),
        ("--memory-limit", flags.memory_limit),
    )
    words = ["tightfit", "bench", flags.job, *list_given(options)]
    for option, is_given in (
        ("--random-weights", flags.random_weights),
        ("--synthetic", flags.synthetic),
    ):
        words += [option] if is_given else []
    for field, value in read_settings(flags.settings).items():
        if field in NOT_TURNED and field != "method":
            words += ["--set", f"{field}={show_value(value)}"]
    return shlex.join(words)
