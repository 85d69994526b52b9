"""Chat templates as a hostile model would bring them: limits hold, and ordinary ones still render.

`TIGHTFIT_FUZZ_CASES=10000 pytest tests/hostile/test_templates.py` makes more of the random ones.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import pytest
from mutate import mutate_bytes

from cli_run import run_here
from hostile_trials import StartTrials
from tightfit.core.errors import UserError
from tightfit.data.templates import TemplateRenderError, compile_template, render
from word_model import ROWS, plant_model

NUM_SHORT = 300
SECONDS = 10.0
"""Of processor time: the machine may be busy."""
MOST_MEMORY = 2**30
MESSAGES = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "How many?"},
    {"role": "assistant", "content": "<think>\nlet me see\n</think>\n\nTwo, or três."},
    {"role": "user", "content": "And now?"},
]
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}

GROWING = """
{% set ns = namespace(x=START) %}{% for i in range(99) %}{% set ns.x = STEP %}{% endfor %}SHOW
"""


def growing(start: str, step: str, show: str = "{{ ns.x }}") -> str:
    """A value that a loop makes larger and larger."""
    text = GROWING.strip().replace("START", start)
    return text.replace("STEP", step).replace("SHOW", show)


REFUSED = {
    "{{ 'a' * 10000000000 }}": "characters",
    "{{ 10000000000 * 'a' }}": "characters",
    "{{ ('a' * 100000) * 100000 }}": "characters",
    "{{ [0] * 10000000000 }}": "characters",
    "{{ '%1000000000s' % 1 }}": "characters",
    "{{ '%*d' % (1000000000, 1) }}": "characters",
    "{{ '%.1000000000f'|format(1.0) }}": "characters",
    "{{ '{:>1000000000}'.format(1) }}": "characters",
    "{{ '{:>{w}}'.format(1, w=1000000000) }}": "format inside a format",
    "{{ ('{0}' * 100000).format('a' * 100000) }}": "characters",
    "{{ 'a'|center(1000000000) }}": "characters",
    "{{ 'a'.ljust(1000000000) }}": "characters",
    "{{ 'a'.zfill(1000000000) }}": "characters",
    "{{ ('a\n' * 100000)|indent(100000) }}": "characters",
    "{{ ('a' * 100000)|replace('a', 'a' * 100000) }}": "characters",
    "{{ ('a' * 100000).replace('', 'a' * 100000) }}": "characters",
    "{{ ('a' * 100000).join(['b'] * 100000) }}": "characters",
    "{{ ('\t' * 100000).expandtabs(100000) }}": "characters",
    "{{ ('a' * 100000).translate({97: 'b' * 100000}) }}": "characters",
    "{{ (1).to_bytes(1000000000, 'big') }}": "characters",
    "{{ [1]|batch(1000000000, 0)|list }}": "characters",
    "{{ [1]|slice(1000000000)|list }}": "characters",
    "{{ range(99999)|map('center', 99999)|list }}": "characters",
    "{{ [1]|tojson(indent=1000000000) }}": "characters",
    "{{ 1|tojson('count', 10000000000) }}": "characters",
    "{{ ''|tojson(indent=10000000000) }}": "characters",
    "{{ '%(a(b))10000000000d' % {'a(b)': 1} }}": "parentheses",
    "{{ '%(a(b))10000000000d'|format(**{'a(b)': 1}) }}": "parentheses",
    "{{ 1.5|round(1000000000, 'ceil') }}": "bits",
    "{{ 99 ** 10000000000 }}": "bits",
    "{{ ('a' * 1000000).rfind('b' + 'a' * 100000) }}": "comparisons",
    "{{ range(0, 2305843009213693951 * 99999, 2305843009213693951)|unique|list }}": "counts beyond",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": "1 s",
    "{% for a in range(99999) %}{% for b in range(99999) if 0 %}{% endfor %}{% endfor %}": "1 s",
    "{% for a in range(999) %}{% for b in range(9999) %}xx{% endfor %}{% endfor %}": "characters",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}": (
        "1 s"
    ),
    growing("'a'", "ns.x ~ ns.x"): "characters",
    growing("'a'", "ns.x + ns.x"): "characters",
    growing("3", "ns.x * ns.x"): "bits",
    growing("[]", "[ns.x, ns.x]"): "characters",
    growing("()", "(ns.x, ns.x)", "{{ {ns.x: 1} }}"): "characters",
    growing("{}", "{'a': ns.x, 'b': ns.x}", "{{ ns.x|tojson }}"): "characters",
    growing("{}", "dict(a=ns.x, b=ns.x)", "{{ ns.x|string }}"): "more than",
    growing("[]", "namespace(a=ns.x, b=ns.x)"): "more than",
    growing("[]", "cycler(ns.x, ns.x).items"): "characters",
    growing("()", "(ns.x,)").replace("99", "9999"): "deep",
    "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}": "deep",
    "{% set x='a' * 1000000 %}"
    + "".join(f"{{% set a{n} = x[1:] %}}" for n in range(2000)): "together",
    "{% include 'x' %}": "one file",
    "{% import 'x' as y %}": "one file",
    "{% extends 'x' %}": "one file",
    "{{ 'a'|urlize }}": "No filter",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}": "deep",
    "{{ 1" + "9" * 5000 + " }}": "compiled",
    "x" * 200_000: "100,000",
    "{% if %}": "not Jinja",
}
"""Templates that once hung, filled the memory or ended in a traceback, and what is said of them."""

UNREFUSED = [
    "{{ messages.__class__.__mro__ }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ messages|attr('__class__') }}",
    "{{ dict.update(messages[0], role=1) }}",
    "{{ lipsum(n=1000000000) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for i in [messages] recursive %}{{ loop([i, i]) }}{% endfor %}",
    "{{ self.x() }}{% block x %}{{ self.x() }}{% endblock %}",
    "{{ '%c' % 55296 }}",
    "{{ 1 // 0 }}",
    "{{ raise_exception('') }}",
    "{{ raise_exception(messages) }}",
    "{{ ('9' * 1000000)|int }}",
    "{{ strftime_now('%1000000000Y') }}",
    "{% generation %}{% endgeneration %}",
    "\U0010fff1\U0010fff0\U00100000",
    "\0{{ 1 }}",
    "",
]
"""These render, or fail on the messages; none reaches anything outside."""


def attempt(text: str) -> str:
    """What a template renders or is refused with, in limited time and memory."""
    started, memory = time.process_time(), peak_bytes()
    try:
        said = use(text)
    except UserError as error:
        said = f"{type(error).__name__}: {error}"
    assert time.process_time() - started < SECONDS, text[:300]
    assert peak_bytes() - memory < MOST_MEMORY, text[:300]
    return said


def use(text: str) -> str:
    try:
        return render(compile_template(text, "theirs"), MESSAGES, NAMES)
    except TemplateRenderError as error:
        return f"{type(error).__name__}: {error}"


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("text", REFUSED, ids=range(len(REFUSED)))
def test_a_hostile_template_is_refused_by_the_limit_that_it_exceeds(text: str) -> None:
    said = attempt(text)
    assert said.startswith("InvalidInputError"), said[:200]
    assert REFUSED[text] in said


@pytest.mark.parametrize("text", UNREFUSED, ids=range(len(UNREFUSED)))
def test_a_template_reaches_nothing_outside_the_messages(text: str) -> None:
    said = attempt(text)
    assert "<class" not in said
    assert "0x" not in said


# Random templates by grammar.

SMALL = ["0", "1", "-1", "7", "100", "1.5", "true", "none", "'a'", "'é\\n'", "''", "[]", "{}", "()"]
HUGE = [
    "10000000000",
    "99999",
    "1000000",
    "'a' * 99999",
    "range(99999)",
    "'%99999999s'",
    "[0] * 9999",
]
VARIABLES = [
    "messages",
    "messages[0]",
    "message",
    "message.content",
    "x",
    "ns.x",
    "loop",
    "loop.index",
]
VARIABLES += [
    "bos_token",
    "missing",
    "self",
    "tools",
    "caller",
    "varargs",
    "ns",
    "add_generation_prompt",
]
BINARY = ["+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "and", "or", "is", "not in"]
METHODS = [
    "upper",
    "split",
    "center",
    "ljust",
    "zfill",
    "replace",
    "join",
    "format",
    "items",
    "get",
]
METHODS += ["strip", "rfind", "count", "translate", "expandtabs", "encode", "splitlines", "keys"]
METHODS += [
    "__class__",
    "mro",
    "append",
    "update",
    "fromkeys",
    "to_bytes",
    "partition",
    "format_map",
]
FUNCTIONS = ["range", "dict", "namespace", "cycler", "joiner", "f", "loop", "raise_exception", "x"]
FUNCTIONS += ["strftime_now", "lipsum", "loop.cycle", "self.b", "caller", "loop.changed"]
FILTERS = [
    "abs",
    "attr",
    "batch",
    "capitalize",
    "center",
    "count",
    "default",
    "dictsort",
    "e",
    "escape",
]
FILTERS += ["filesizeformat", "first", "float", "forceescape", "format", "groupby", "indent", "int"]
FILTERS += [
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "random",
    "reject",
]
FILTERS += [
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "slice",
    "sort",
]
FILTERS += ["string", "sum", "title", "tojson", "trim", "truncate", "unique", "upper", "urlencode"]
FILTERS += ["wordcount", "urlize", "nothing"]


class Grammar:
    """Templates that are Jinja nearly always, and ask for too much often."""

    def __init__(self, rng: Random) -> None:
        self.random = rng

    def template(self) -> str:
        text = "{% macro f(a, b=1) %}" + self.block(1) + "{% endmacro %}"
        text += (
            "{% set x = " + self.value(2) + " %}{% set ns = namespace(x=" + self.value(2) + ") %}"
        )
        text += "".join(self.block(3) for _ in range(self.random.randint(1, 4)))
        if self.random.random() < 0.15:  # and some that are not
            data = mutate_bytes(self.random, text.encode())
            text = data.decode("utf-8", "surrogateescape")
        return text

    def block(self, depth: int) -> str:
        if depth <= 0:
            return self.random.choice(["text ", "{{ " + self.value(1) + " }}", "\n"])
        inner = self.block(depth - 1)
        value = self.value(2)
        return self.random.choice(
            [
                "{{ " + value + " }}" + inner,
                "{% for message in " + value + " %}" + inner + "{% endfor %}",
                "{% for message in range(99999) %}" + inner + "{% endfor %}",
                "{% for message in messages %}" + inner + "{% endfor %}",
                "{% for a, b in " + value + " if " + self.value(1) + " %}" + inner + "{% endfor %}",
                "{% for a in " + value + " recursive %}" + inner + "{{ loop(a) }}{% endfor %}",
                "{% if "
                + value
                + " %}"
                + inner
                + "{% elif x %}"
                + inner
                + "{% else %}c{% endif %}",
                "{% set x = " + value + " %}" + inner,
                "{% set ns.x = " + value + " %}" + inner,
                "{% set x %}" + inner + "{% endset %}",
                "{% call f(" + value + ") %}" + inner + "{% endcall %}",
                "{% filter " + self.random.choice(FILTERS) + " %}" + inner + "{% endfilter %}",
                "{% generation %}" + inner + "{% endgeneration %}",
                "{% with y = " + value + " %}" + inner + "{% endwith %}",
                "{% autoescape true %}" + inner + "{% endautoescape %}",
                "{% include " + value + " %}",
                inner + "{% break %}",
            ]
        )

    def value(self, depth: int) -> str:
        pick = self.random.choice
        if depth <= 0:
            return pick(pick([SMALL, SMALL, VARIABLES, VARIABLES, HUGE]))
        one, other = self.value(depth - 1), self.value(depth - 1)
        return pick(
            [
                one,
                f"({one} {pick(BINARY)} {other})",
                f"({one})|{pick(FILTERS)}",
                f"({one})|{pick(FILTERS)}({other})",
                f"({one})|{pick(FILTERS)}('{pick(FILTERS)}', {other})",
                f"({one}).{pick(METHODS)}({other})",
                f"({one}).{pick(METHODS)}({other}, {self.value(0)})",
                f"{pick(FUNCTIONS)}({one})",
                f"{pick(FUNCTIONS)}({one}, {other})",
                f"[{one}, {other}]",
                f"{{{one}: {other}}}",
                f"({one}, {other})",
                f"({one})[{self.value(0)}:]",
                f"({one})[{other}]",
                f"({one} if {other} else x)",
                f"({one} is {pick(['string', 'mapping', 'defined', 'none', 'odd'])})",
                f"f(*[{one}], **{{'b': {other}}})",
            ]
        )


def test_random_templates_end_in_a_text_or_one_error(trials: StartTrials) -> None:
    def make(rng: Random) -> Callable[[], object]:
        return partial(use, Grammar(rng).template())

    trials("chat templates", num_short=NUM_SHORT).try_each(make)


# Through the command line.


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    plant_model(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    "text",
    [
        "{{ 'a' * 10000000000 }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% include 'x' %}",
        "{% if %}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ 1 // 0 }}",
        "{{ '%c' % 55296 }}",
        "\U0010fff0",
        "{% generation %}{% endgeneration %}",
        "{{ raise_exception('') }}",
    ],
)
def test_prepare_says_in_one_error_what_is_wrong_with_a_template(
    model: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "chat_template.jinja").write_text(text)
    answer = run_here(["prepare", str(model), "--data", "rows.jsonl"], capsys)
    assert answer.code == 4, answer.err
    assert answer.err.startswith("error: ")
    assert "try: " in answer.err
    assert "Traceback" not in answer.err


def test_prepare_survives_random_templates(trials: StartTrials) -> None:
    def make(rng: Random, folder: Path) -> list[str]:
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        plant_model(folder / "model")
        text = Grammar(rng).template().encode("utf-8", "surrogatepass")
        (folder / "model" / "chat_template.jinja").write_bytes(text)
        return ["prepare", "model", "--data", "rows.jsonl"]

    trials("prepare a template", num_short=NUM_SHORT // 10).run(make)
