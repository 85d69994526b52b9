"""Whatever is typed: an answer or one message with a remedy, never a bug report."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cli_run import run_here
from tightfit.api.options.training import EstimateOptions
from tightfit.core.options import list_declared

JUNK = ("", "-1", "0", "1e9", "nan", "ä", "None", "1.5", "99999999999999999999", "a,b", "--", "x=y")
WORDS = {
    option.name: tuple((option.metavar or "").split("|"))
    for option in list_declared(EstimateOptions).values()
    if "|" in (option.metavar or "") and option.name != "--lora-targets"
} | {
    "--lora-rank": ("1", "64", "65536"),
    "--lora-targets": ("all-linear", "q_proj,v_proj", "c_attn"),
    "--micro-batch": ("1", "7", "65536"),
    "--seq-len": ("1", "333", "131072", "16777216"),
    "--grad-accum": ("1", "65536"),
    "--set": ("packing=true", "compile=yes", "num_nodes=3", "gpus_per_node=65536", "seq_len=5"),
    "--on": ("T4", "4xV100-32GB", "2n x 8xA100-80GB", "K80", "6xT4 + 2xRTX6000", "MI250"),
    "--total-params": ("2851e6",),
    "--gpus-per-node": ("8",),
}
SWITCHES: tuple[str, ...] = (
    "--checkpointing",
    "--no-checkpointing",
    "--fused-kernels",
    "--no-double-quant",
)
SWITCHES += ("--train-embeddings", "--zero-table", "--check")
MODELS = ("Llama-2-7b", "gpt2", "Mixtral-8x7B-v0.1", "t5-3b", "bloom-560m", "gpt-oss-20b", "nope")

choice = st.one_of(
    st.sampled_from(SWITCHES).map(lambda switch: [switch]),
    st.sampled_from(sorted(WORDS)).flatmap(
        lambda option: st.sampled_from(WORDS[option]).map(lambda word: [option, word])
    ),
)
mistake = st.tuples(st.sampled_from(sorted(WORDS)), st.sampled_from(JUNK)).map(list)
lines = st.tuples(
    st.sampled_from(MODELS), st.lists(choice, max_size=8), st.lists(mistake, max_size=1)
)


@given(line=lines)
@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_no_estimate_ends_in_a_bug(
    line: tuple[str, Sequence[list[str]], Sequence[list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    model, options, mistakes = line
    argv = ["estimate", model, *(word for pair in (*options, *mistakes) for word in pair)]

    answer = run_here([*argv, "--json"], capsys)

    assert answer.code in (0, 2, 3, 4, 5), (argv, answer.err)
    reported = json.loads(answer.out)
    assert ("error" in reported) == (answer.code in (2, 3, 4))
