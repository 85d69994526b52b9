"""The compare page in a real Chromium, over two tiny models, with every other machine cut off."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from compare_browser import (
    DESKTOP,
    PHONE,
    WATCH_GROWTH,
    Served,
    Watched,
    ask,
    browser,
    keep_picture,
    served,
    wait_for_round,
    watched_page,
)

from small_models import make_llama

NUM_TOKENS = 160
WATCH_SENDING = """
() => {
  window.freed = 0;
  const watched = {subtree: true, attributeFilter: ['disabled'], attributeOldValue: true};
  new MutationObserver(changes => {
    for (const change of changes)
      if (change.target.id === 'tf-go-chat' && change.oldValue !== null) window.freed += 1;
  }).observe(document.body, watched);
}
"""
"""Counts how often the button came back: the answer is shown before it is even disabled."""


@pytest.fixture(scope="module")
def compare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`tightfit compare` itself, on two models of long and different answers."""
    folder = tmp_path_factory.mktemp("compare")
    make_llama(folder / "first", seed=1)
    make_llama(folder / "second", seed=4)
    words = ["-m", "tightfit", "compare", "first", "second", "--json", "--port", "0"]
    words += ["--votes", "votes.jsonl", "--device", "cpu", "--max-new-tokens", str(NUM_TOKENS)]
    with served(words, folder) as page:
        yield page


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def tab(chromium: Any, compare: Served) -> Iterator[Watched]:
    """The page, loaded; at the end nothing may have asked for another machine."""
    with watched_page(chromium, compare.address) as watched:
        watched.page.set_viewport_size(DESKTOP)
        watched.page.wait_for_selector("#tf-go-compare")
        yield watched
        assert watched.outside == []
        assert watched.list_refused() == []
        assert watched.errors == []
        assert not compare.lookups.exists(), compare.lookups.read_text()


def test_both_answers_stream_in_and_can_be_voted_on_and_exported(
    tab: Watched, compare: Served, tmp_path: Path
) -> None:
    page = tab.page
    page.evaluate(WATCH_GROWTH)
    ask(page, "How many singers are older than 20?")
    wait_for_round(page)
    grown = page.evaluate("window.grown")
    spans = {}
    for name in ("left", "right"):
        lengths = [length for _, length in grown[name]]
        assert len(set(lengths)) >= 5, f"{name} did not stream: {lengths}"
        assert lengths == sorted(lengths)
        spans[name] = (grown[name][0][0], grown[name][-1][0])
    assert max(low for low, _ in spans.values()) < min(high for _, high in spans.values())
    figures = page.locator(".tf-figures").all_inner_texts()
    assert all("tokens/s" in reported and "in all" in reported for reported in figures), figures
    assert "of the words are in both answers" in page.inner_text("#tf-verdict")
    keep_picture(page, "compare-desktop")

    page.click("#tf-vote-1")
    page.wait_for_selector("text=Vote kept.")

    (line,) = compare.votes.read_text(encoding="utf-8").splitlines()
    row = json.loads(line)
    shown = [page.inner_text(f"#tf-{name} .tf-answer") for name in ("left", "right")]
    assert row["vote"] == "b"
    assert (row["name_a"], row["name_b"]) == ("first", "second")
    assert _squeezed(row["answer_a"], row["answer_b"]) == _squeezed(*shown)
    assert row["answer_a"] != row["answer_b"]
    assert row["prompt"] == "How many singers are older than 20?"
    assert row["blind"] is False
    assert all(page.is_disabled(f"#tf-vote-{place}") for place in range(4))
    with page.expect_download() as download:
        page.click(".tf-export")
    download.value.save_as(tmp_path / "exported.jsonl")
    assert (tmp_path / "exported.jsonl").read_bytes() == compare.votes.read_bytes()


def test_a_blind_round_names_nobody_until_the_vote(tab: Watched, compare: Served) -> None:
    page = tab.page
    page.check("#tf-blind input")
    ask(page, "Which of them are you?")
    wait_for_round(page)
    cards = "".join(page.inner_html(f"#tf-{name}") for name in ("left", "right"))
    assert "first" not in cards
    assert "second" not in cards
    assert "tokens/s" not in cards
    keep_picture(page, "compare-blind")

    page.click("#tf-vote-2")
    page.wait_for_selector("text=Vote kept.")

    names = page.locator(".tf-name").all_inner_texts()
    assert sorted(names) == ["first", "second"]
    row = json.loads(compare.votes.read_text(encoding="utf-8").splitlines()[-1])
    assert row["vote"] == "tie"
    assert row["blind"] is True
    assert row["left"] == ("a" if names[0] == "first" else "b")


def test_the_chat_streams_and_goes_on(tab: Watched) -> None:
    page = tab.page
    page.get_by_role("tab", name="Chat").click()
    page.evaluate(WATCH_SENDING)
    box = page.locator("#tf-ask-chat textarea")
    box.fill("Hello there")
    box.press("Control+Enter")
    page.wait_for_selector(".tf-user")
    box.fill("And again")
    _wait_for_answer(page, 1)
    assert box.input_value() == "And again", "what was written meanwhile is gone"
    box.press("Control+Enter")
    _wait_for_answer(page, 2)
    assert box.input_value() == ""
    turns = page.locator(".tf-turn").all_inner_texts()
    assert len(turns) == 4
    assert "And again" in turns[2]
    assert "second" in turns[3]
    assert "tokens/s" in turns[3]
    keep_picture(page, "chat-desktop")


def test_a_phone_shows_one_answer_above_the_other(tab: Watched) -> None:
    page = tab.page
    page.set_viewport_size(PHONE)
    ask(page, "On a phone", most=24)
    wait_for_round(page)
    left, right = (page.locator(f"#tf-{name}").bounding_box() for name in ("left", "right"))
    assert right["y"] >= left["y"] + left["height"]
    assert left["width"] > 0.85 * PHONE["width"]
    keep_picture(page, "compare-phone")


def test_dark_is_dark(tab: Watched) -> None:
    page = tab.page
    page.emulate_media(color_scheme="dark")
    page.reload()
    page.wait_for_selector("#tf-go-compare")
    colours = page.evaluate(
        "['color', 'backgroundColor'].map(name => getComputedStyle("
        "name === 'color' ? document.querySelector('.tf-name') : document.body)[name])"
    )
    light, dark = (sum(map(int, _numbers(colour))) for colour in colours)
    assert light > 600, colours
    assert dark < 150, colours
    keep_picture(page, "compare-dark")
    page.emulate_media(color_scheme="light")


def _wait_for_answer(page: Any, number: int) -> None:
    """Until so many messages are answered and the next can be sent."""
    page.wait_for_function(
        "number => document.querySelectorAll('.tf-user').length === number"
        " && !document.querySelector('.tf-turn[aria-busy=true]')"
        " && window.freed === number",
        arg=number,
    )


def _numbers(colour: str) -> list[str]:
    return colour.partition("(")[2].rstrip(")").split(",")[:3]


def _squeezed(*texts: str) -> list[str]:
    """Letters and digits: models without training also write what no browser shows."""
    return [re.sub("[^a-zA-Z0-9]", "", text) for text in texts]
