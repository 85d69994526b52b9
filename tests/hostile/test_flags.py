"""Every verb's options with hostile values: an answer or one error."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from mutate import NAMES, NUMBERS, plant_special

from hostile_trials import StartTrials
from tightfit.cli.command import VERBS, load_options
from tightfit.core.options import Option, list_declared

QUIET = {
    verb: options
    for verb in VERBS
    # What would listen, wait for another machine, or measure this one.
    if verb not in ("serve", "compare", "ui", "chat", "calibrate", "stage", "preflight", "doctor")
    for options in [[o for kind in load_options(verb)[:2] for o in list_declared(kind).values()]]
}
WORDS = (*NAMES, *(str(number)[:5000] for number in NUMBERS), "nan", "a=b", "1,2", "rows.jsonl")
WORDS += ("[:10%]", "rows.jsonl[5:2]", "T4", "4xT4", "99999999999xT4", "here", "gpt2", "plan.json")


def make_case(rng: Random, folder: Path) -> list[str]:
    (folder / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    (folder / "plan.json").write_text("[]")
    if rng.random() < 0.15:
        plant_special(rng, folder / rng.choice(("rows.jsonl", "plan.json")))
    verb = rng.choice(list(QUIET))
    options = [one for one in QUIET[verb] if one.name.startswith("--")]
    words = [verb]
    if not any(one.name.startswith("--model") for one in options) or rng.random() < 0.5:
        words += [rng.choice((*WORDS, "no-such-model")) for _ in range(rng.choice((0, 1, 1, 2)))]
    for option in rng.sample(options, min(len(options), rng.randint(0, 3))):
        words += _spell(rng, option)
    # Nothing may run for minutes, or start a farm, where a case happens to be right.
    return [*words, "--trace", "x"] if rng.random() < 0.02 else words


def _spell(rng: Random, option: Option) -> list[str]:
    name, _, off = option.name.partition("/")
    if option.metavar is None:
        return [rng.choice((name, off or name))]
    known = option.metavar.split("|") if "|" in option.metavar else [option.example or "1"]
    value = rng.choice((rng.choice(WORDS), rng.choice(WORDS), rng.choice(known)))
    return [name, value] if rng.random() < 0.8 else [f"{name}={value}"]


def test_flags(trials: StartTrials) -> None:
    trials("flags", num_short=250).run(make_case)


@pytest.mark.parametrize(
    "name", ["a\0b", "\udc80", "a" * 300, "/".join(["a" * 200] * 30), "loop", "file/x"]
)
@pytest.mark.parametrize(
    "words",
    [
        ["plan", "gpt2", "--on", "T4", "--save", "NAME"],
        ["plan", "gpt2", "--on", "T4", "--chart", "NAME"],
        ["plan", "NAME"],
        ["plan", "gpt2", "--on", "NAME"],
        ["estimate", "NAME", "--on", "T4"],
        ["train", "NAME"],
        ["train", "gpt2", "--output", "NAME"],
        ["prepare", "gpt2", "--data", "NAME"],
        ["runs", "NAME"],
        ["runs", "--html", "NAME"],
        ["merge", "NAME", "--out", "out"],
        ["merge", "gpt2", "--out", "NAME"],
        ["convert", "NAME", "--to", "gguf"],
        ["quantize", "NAME", "--to", "nf4"],
        ["verify", "NAME", "NAME"],
        ["eval", "NAME", "--data", "NAME"],
        ["generate", "NAME", "--prompts", "NAME", "--out", "NAME"],
        ["farm", "NAME", "--prompts", "NAME", "--out", "NAME"],
        ["init", "--output", "NAME"],
    ],
    ids="-".join,
)
def test_names_that_once_failed(trials: StartTrials, words: list[str], name: str) -> None:
    def make(folder: Path) -> list[str]:
        (folder / "loop").symlink_to("loop")
        (folder / "file").write_text("x")
        return [name if word == "NAME" else word for word in words]

    assert trials("flag names").run_one("name", make) != 70
