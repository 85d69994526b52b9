"""Foreign text is shown as text: markup, links and what a terminal would obey do nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_run import run_here
from made_runs import make_plan, make_run
from pages import Checker, check_page
from scripted_engine import ScriptedEngine
from tightfit.cli.prepare import make_visible
from tightfit.cli.terminal.error_report import report_error
from tightfit.cli.terminal.output import report_progress, show_json, write_err, write_out
from tightfit.cli.terminal.screen import as_text, make_table, plain, render_pairs, show
from tightfit.core.errors import InvalidInputError
from tightfit.core.figures import render_table as render_report_table
from tightfit.core.sampling import Sampling
from tightfit.core.text import disarm, escape_html
from tightfit.engines.protocol import Done, FinishReason
from tightfit.runs.report_html import load_runs, render_report
from tightfit.runs.run_folder import RunStatus
from tightfit.serving.chat import Conversation
from tightfit.serving.page import components
from tightfit.serving.page.chat_tab import Turn, render_thread
from tightfit.serving.page.models import PartialAnswer
from tightfit.serving.page.runs_tab import render_runs

ESCAPES = (
    "\x1b]52;c;ZXZpbA==\x07",  # the clipboard
    "\x1b]8;;http://outside.example/\x1b\\link\x1b]8;;\x1b\\",
    "\x1b[2J\x1b[H\x1b[1A\r",
    "\x9b2J\x9d0;title\x9c",
    "\x1bP$q\x1b\\\x1b_x\x1b\\\x1bc",
    "\x07\x08\x0b\x0c\x00\x7f\x85",
    "\u202egpj.exe\u202c\u2066\u2067\u200f\u061c\u2028",
)
MARKUP = (
    "<script>alert(1)</script>",
    "<img src=http://outside.example/a.png onerror=alert(1)>",
    "![x](http://outside.example/c.png) [y](javascript:alert(1))",
    '"><iframe srcdoc="<b>x</b>"></iframe><a href=javascript:alert(1)>',
    "</div></td></table></html><style>*{display:none}</style><!--",
    "{{value}} ${x} `y` &lt;b&gt; &#27;[2J",
    "[bold red]not ours[/] [link=http://outside.example]x[/link]",
)
HOSTILE = (*ESCAPES, *MARKUP)
_COLOUR = re.compile("\x1b\\[[0-9;]*m")
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)

every_text = st.text(max_size=60) | st.sampled_from(HOSTILE) | st.sampled_from(ESCAPES)


def _obeyed(text: str) -> list[str]:
    """What a terminal would act upon beside line breaks, tabs and colours."""
    return _OBEYED.findall(_COLOUR.sub("", text))


@given(every_text)
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    assert _obeyed(disarm(text)) == []
    assert _obeyed(as_text(text).plain) == []
    assert _obeyed(make_visible(text)) == []
    if not _obeyed(text):
        assert disarm(text) == text


@pytest.mark.parametrize("text", HOSTILE)
def test_the_terminal_gets_text_alone(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_out(text)
    write_err(text)
    report_error(InvalidInputError(text, remedy=text), as_json=True)
    show_json({text: [text]})
    show([text, plain(text), make_table([text, ">n"], [[text, text]]), render_pairs([("a", text)])])
    report_progress(text, 1, 2)
    shown = capsys.readouterr()

    assert _obeyed(shown.out) == []
    assert _obeyed(shown.err) == []


@pytest.mark.parametrize("text", HOSTILE)
def test_json_says_the_same_to_a_program(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    show_json({"text": text})
    assert json.loads(capsys.readouterr().out) == {"text": text}


@pytest.mark.parametrize("text", ESCAPES)
def test_a_chat_shows_the_answer_without_its_escapes(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = ScriptedEngine()
    with Conversation(engine=engine, sampling=Sampling(max_new_tokens=len(text))) as talk:
        reply = talk.ask(text, write_out)
    shown = capsys.readouterr().out

    assert reply.text == text
    assert _obeyed(shown) == []
    assert "\x1b" not in shown


def _markup(text: str) -> tuple[list[str], list[tuple[str, str | None]]]:
    parser = Checker()
    parser.feed(text)
    return parser.tags, parser.attributes


_DONE = Done(
    reason=FinishReason.STOP,
    text="",
    num_prompt_tokens=1,
    num_new_tokens=1,
    submitted_s=0.0,
    first_token_s=0.0,
    finished_s=0.0,
)


def _answer(text: str) -> PartialAnswer:
    return PartialAnswer(text=text, done=_DONE)


_PARTS: tuple[Callable[[str], str], ...] = (
    escape_html,
    components.render_note,
    lambda text: components.render_error(InvalidInputError(text, remedy=text)),
    lambda text: components.render_error(RuntimeError(text)),
    lambda text: components.render_list([text]),
    lambda text: components.render_folded(text, ""),
    lambda text: components.render_tiles([(text, text, text)]),
    lambda text: components.render_commands([text]),
    lambda text: components.render_table([text], [[text]], fills=[(text, text)]),
    lambda text: components.render_card(1, text, None, _answer(text), None),
    lambda text: components.render_card(
        1, text, None, _answer(text), components.find_difference(text, "other").left
    ),
    lambda text: render_thread(
        [Turn(role="user", text=text), Turn(role="assistant", text=text, name=text)]
    ),
    lambda text: render_report_table([[text]], head=[text], title=text, note=text),
)


@pytest.mark.parametrize("number", range(len(_PARTS)))
@given(text=every_text.filter(str.strip))
def test_pages_show_text_and_no_markup_of_others(number: int, text: str) -> None:
    render = _PARTS[number]
    tags, attributes = _markup(render(text))
    own_tags, own_attributes = _markup(render("plain"))
    # A mark for each stretch that differs, and a small print for a cell's second line: ours.
    ours = {"mark", "small", "br"}
    assert [tag for tag in tags if tag not in ours] == [t for t in own_tags if t not in ours]
    assert {name for name, _ in attributes} <= {name for name, _ in own_attributes}
    links = {value for name, value in attributes if name in ("href", "src", "srcdoc")}
    assert links <= {value for name, value in own_attributes if name in ("href", "src", "srcdoc")}


def test_what_is_escaped_reads_as_it_was() -> None:
    for text in MARKUP:
        assert unescape(escape_html(text)) == text
        assert unescape(components.escape_html(text)) == text


class _Text(HTMLParser):
    """The text of a page, without scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []

    def handle_data(self, data: str) -> None:
        self.parts.append(data)


def test_a_report_of_hostile_names_is_text_and_fetches_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'tightfit[plot]' un-skips this")
    nasty = "<img src=x onerror=alert(1)> \x1b]52;c;eA==\x07 \u202egpj"
    plan = make_plan().model_copy(update={"why": (nasty,)})
    folder = tmp_path / "runs" / "a <b> \x1b[2J"
    made: Any = {"plan": plan, "status": RunStatus.FAILED, "problem": nasty, "remedy": nasty}
    run = make_run(folder, **made)

    page = render_report(load_runs([run]))
    checker = check_page(page)
    assert "img" not in checker.tags
    assert "content-security-policy" in page.lower()
    assert "default-src 'none'" in page
    text = _Text()
    text.feed(page)
    assert "<img src=x onerror=alert(1)>" in "".join(text.parts)
    assert _obeyed(page) == []
    framed = render_runs([str(folder)])
    assert _markup(framed)[0] == ["iframe"]
    for words in (["runs", str(folder)], ["runs", str(tmp_path / "runs")]):
        answer = run_here(words, capsys)
        assert _obeyed(answer.out + answer.err) == [], words
