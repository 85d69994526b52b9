"""A round without a browser: answers side by side, errors, hidden names, and votes that count."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from scripted_engine import ScriptedEngine, ScriptedPrompter
from tightfit.core.errors import InvalidInputError
from tightfit.core.sampling import Sampling
from tightfit.data.formats import ASSISTANT, SYSTEM, USER, Message
from tightfit.data.tools import Tool
from tightfit.engines.protocol import FinishReason
from tightfit.serving.page.chat_tab import Turn, make_history, render_thread, say
from tightfit.serving.page.compare_tab import CompareController, Round
from tightfit.serving.page.components import read_sampling
from tightfit.serving.page.models import PageModels
from tightfit.serving.page.votes import VoteFile

HOSTILE = (
    "<img src=http://outside.example/a.png onerror=alert(1)> ![x](http://outside.example/b.png) "
    "</div><script>alert(2)</script> {{value}} ${alert(3)} `x` \"'&amp;"
)


class NamedPrompter(ScriptedPrompter):
    """Has each model say something of its own."""

    def __init__(self, name: str) -> None:
        self.name = name

    def ask(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> tuple[int, ...]:
        return (*super().ask(messages, tools), *map(ord, f" {self.name}"))


class TagReader(HTMLParser):
    """What a browser would make of some markup."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, _attrs: Any) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def read_tags(markup: str) -> TagReader:
    reader = TagReader()
    reader.feed(markup)
    reader.close()
    return reader


def make_engine(name: str, **settings: Any) -> ScriptedEngine:
    engine = ScriptedEngine(**settings)
    engine.prompter = NamedPrompter(name)
    return engine


def make_desk(tmp_path: Path, *, token_seconds: float = 0.0) -> CompareController:
    models = PageModels(
        {
            "plain": lambda: make_engine("P", token_seconds=token_seconds),
            "tuned": lambda: make_engine("T", token_seconds=token_seconds),
        },
        is_one_at_a_time=False,
    )
    models.load()
    return CompareController(models, VoteFile(tmp_path / "votes.jsonl"))


def play(
    desk: CompareController, prompt: str, *, is_blind: bool = False, most: int | None = None
) -> Round:
    settings = read_sampling(Sampling(), 0.0, 1.0, most or len(prompt) + 2, "1")
    opened = desk.open_round(prompt, "", settings, is_blind=is_blind)
    *_, ended = desk.play(opened, "visitor")
    return ended


def test_both_models_answer_the_same_prompt_with_the_same_settings(tmp_path: Path) -> None:
    desk = make_desk(tmp_path)

    ended = play(desk, "hello")

    assert [side.text for side in ended.sides] == ["hello P", "hello T"]
    requests = [desk.models._engines[place].tickets[0].request for place in (0, 1)]  # type: ignore[attr-defined]
    assert requests[0].sampling == requests[1].sampling
    assert requests[0].sampling.seed == 1


def test_answers_grow_at_the_same_time(tmp_path: Path) -> None:
    desk = make_desk(tmp_path, token_seconds=0.02)
    most = 1000  # of which a busy machine may show none for a while
    settings = read_sampling(Sampling(), 0.0, 1.0, most, "")
    grown: list[tuple[int, ...]] = []
    num_both = 0
    for shown in desk.play(desk.open_round("go on", "", settings, is_blind=False), "visitor"):
        grown.append(tuple(len(side.text) for side in shown.sides))
        num_both += all(0 < length < most for length in grown[-1])
        if num_both == 4:
            desk.models.cancel("visitor")

    assert num_both >= 4
    assert grown == sorted(grown)


def test_an_error_of_one_side_leaves_the_other_going(tmp_path: Path) -> None:
    desk = make_desk(tmp_path)
    desk.models._engines[0].prompter = ScriptedPrompter()  # type: ignore[assignment, misc]

    ended = play(desk, "!")

    assert isinstance(ended.sides[0].error, RuntimeError)
    assert ended.sides[1].text == "! T"
    assert not ended.can_vote
    assert "The engine failed" in desk.render(ended, is_marked=True)[0]


def test_a_stop_ends_both_and_keeps_what_was_said(tmp_path: Path) -> None:
    desk = make_desk(tmp_path, token_seconds=0.02)
    settings = read_sampling(Sampling(), 0.0, 1.0, 100_000, "")
    opened = desk.open_round("on and on", "", settings, is_blind=False)
    shown = opened
    for shown in desk.play(opened, "visitor"):
        if all(side.text for side in shown.sides):
            desk.models.cancel("visitor")

    assert [side.done and side.done.reason for side in shown.sides] == [FinishReason.CANCELLED] * 2
    assert all(shown.sides[place].text for place in (0, 1))


def test_a_visitor_who_leaves_takes_the_work_along(tmp_path: Path) -> None:
    desk = make_desk(tmp_path, token_seconds=0.02)
    settings = read_sampling(Sampling(), 0.0, 1.0, 100_000, "")
    rounds = desk.play(desk.open_round("on and on", "", settings, is_blind=False), "visitor")
    next(rounds)
    rounds.close()  # type: ignore[attr-defined]

    for place in (0, 1):
        (ticket,) = desk.models._engines[place].tickets  # type: ignore[attr-defined]
        assert ticket.is_over.wait(60)


def test_blind_rounds_hide_names_and_figures_and_votes_reach_the_right_model(
    tmp_path: Path,
) -> None:
    desk = make_desk(tmp_path)
    seen = set()
    for _ in range(40):
        ended = play(desk, "who", is_blind=True)
        hidden = "".join(desk.render(ended, is_marked=True))
        assert "plain" not in hidden
        assert "tuned" not in hidden
        assert "tokens/s" not in hidden
        voted, is_new = desk.cast(ended, 0)
        assert is_new
        assert "plain" in "".join(desk.render(voted, is_marked=True))
        seen.add(ended.order)
    rows = [json.loads(line) for line in desk.votes.path.read_text().splitlines()]

    assert seen == {(0, 1), (1, 0)}
    assert {row["vote"] for row in rows} == {"a", "b"}
    assert all(row["vote"] == row["left"] and row["blind"] for row in rows)
    assert all((row["answer_a"], row["answer_b"]) == ("who P", "who T") for row in rows)


@pytest.mark.parametrize(("button", "vote"), [(0, "a"), (1, "b"), (2, "tie"), (3, "both_bad")])
def test_each_button_has_its_meaning(tmp_path: Path, button: int, vote: str) -> None:
    desk = make_desk(tmp_path)
    ended = play(desk, "x")

    desk.cast(ended, button)
    again, is_new = desk.cast(ended, (button + 1) % 4)

    assert json.loads(desk.votes.path.read_text())["vote"] == vote
    assert not is_new
    assert again.is_voted
    assert not again.can_vote


def test_what_a_model_says_is_never_markup(tmp_path: Path) -> None:
    ended = play(make_desk(tmp_path), HOSTILE)
    desk = make_desk(tmp_path)

    for is_marked in (False, True):
        read = read_tags(desk.render(ended, is_marked=is_marked)[0])
        assert f"{HOSTILE} P" in read.text
        assert not {"img", "script", "a"} & set(read.tags)
    for mark in ("{{", "${", "`"):
        assert mark not in desk.render(ended, is_marked=True)[0]
    thread = (Turn(role=USER, text=HOSTILE), Turn(role=ASSISTANT, text=HOSTILE, name=HOSTILE))
    assert not {"img", "script", "a"} & set(read_tags(render_thread(thread)).tags)


def test_one_at_a_time_holds_one_engine(tmp_path: Path) -> None:
    opened: list[ScriptedEngine] = []

    def open_one(name: str) -> Callable[[], Any]:
        def open_it() -> ScriptedEngine:
            assert all(engine.is_closed for engine in opened)
            opened.append(make_engine(name))
            return opened[-1]

        return open_it

    models = PageModels({"plain": open_one("P"), "tuned": open_one("T")}, is_one_at_a_time=True)
    models.load()
    desk = CompareController(models, VoteFile(tmp_path / "v.jsonl"))

    ended = play(desk, "turns")

    assert [side.text for side in ended.sides] == ["turns P", "turns T"]
    assert len(opened) == 2


def test_a_chat_remembers_what_was_answered_and_forgets_what_failed(tmp_path: Path) -> None:
    models = make_desk(tmp_path).models
    sampling = Sampling(max_new_tokens=4)
    *_, first = say(
        models, 1, (Turn(role=USER, text="ab"),), system="", sampling=sampling, visitor="v"
    )
    *_, failed = say(
        models,
        0,
        (*first, Turn(role=USER, text="refuse me")),
        system="",
        sampling=sampling,
        visitor="v",
    )

    assert first[-1].text == "ab T"
    assert first[-1].name == "tuned"
    assert failed[-1].has_failed
    asked = (*failed, Turn(role=USER, text="again"))
    assert make_history(asked, "be kind") == [
        Message(SYSTEM, "be kind"),
        Message(USER, "ab"),
        Message(ASSISTANT, "ab T"),
        Message(USER, "again"),
    ]


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ((-1, 1.0, 10, ""), "Temperature"),
        ((float("nan"), 1.0, 10, ""), "Temperature"),
        ((0.0, 0.0, 10, ""), "Top-p"),
        ((0.0, 1.0, None, ""), "Longest"),
        ((0.0, 1.0, 0, ""), "Longest"),
        ((0.0, 1.0, 10, "many"), "seed"),
        ((0.0, 1.0, 10, "99999999999"), "seed"),
    ],
)
def test_settings_that_no_control_gives_are_refused(settings: Any, word: str) -> None:
    with pytest.raises(InvalidInputError, match=word):
        read_sampling(Sampling(), *settings)


def test_an_empty_seed_is_drawn() -> None:
    seeds = {read_sampling(Sampling(), 0.7, 1.0, 10, "").seed for _ in range(8)}

    assert len(seeds) > 1


def test_an_empty_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="empty"):
        play(make_desk(tmp_path), " \n ")


def test_answers_without_anything_in_common_are_not_painted_over(tmp_path: Path) -> None:
    desk = make_desk(tmp_path)
    ended = play(desk, "a b c d e f")
    other = replace(ended.sides[1], text="u v w x y z")

    assert "<mark>" in desk.render(ended, is_marked=True)[0]
    assert "<mark>" not in desk.render(ended, is_marked=False)[0]
    apart = replace(ended, sides=(ended.sides[0], other))
    assert "<mark>" not in desk.render(apart, is_marked=True)[0]
    assert "Only 0%" in desk.render(apart, is_marked=True)[2]
