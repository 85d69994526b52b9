"""Options of the verbs that answer a file of prompts, each written once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tightfit.cli.flags.options import count_option, path_option, switch_option, text_option

MAX_PROMPTS = 10**9
MAX_SAMPLES = 65_536

Prompts = Annotated[
    str | None,
    text_option("--prompts", "FILE|-", "Prompts; - is stdin.", example="prompts.jsonl"),
]
Out = Annotated[
    Path | None,
    path_option(
        "--out",
        "Answers, as JSON Lines. [default: PROMPTS.answers.jsonl in this folder]",
        example="answers.jsonl",
    ),
]
Samples = Annotated[
    int | None,
    count_option("--n", "Answers to each prompt. [default: 1]", most=MAX_SAMPLES, example=4),
]
Limit = Annotated[
    int | None,
    count_option("--limit", "Only the first N prompts.", most=MAX_PROMPTS, example=100),
]
Column = Annotated[
    str | None,
    text_option("--column", "NAME", "The rows' column that is the prompt.", example="question"),
]
PromptTemplate = Annotated[
    Path | None,
    path_option(
        "--template", "Text with {column} in it, filled from each row.", example="prompt.txt"
    ),
]
TemplateText = Annotated[
    str | None,
    text_option(
        "--template-text", "TEXT", "The same, written here.", example="'Summarize: {article}'"
    ),
]
Whole = Annotated[
    bool, switch_option("--whole", "A text file is one prompt, not one in each line.")
]
Raw = Annotated[
    bool, switch_option("--raw", "Continue the text as it is, without a chat template.")
]
