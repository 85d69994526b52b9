"""Answers that try to get out, pages that are stopped, and doors that stay closed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from compare_browser import (
    HERE,
    Served,
    Watched,
    ask,
    browser,
    keep_picture,
    served,
    wait_for_round,
    watched_page,
)

OUTSIDE = "http://outside.example/"
HOSTILE = (
    f"<img src={OUTSIDE}a.png onerror=\"fetch('{OUTSIDE}b')\"> ![x]({OUTSIDE}c.png) "
    f"<script src={OUTSIDE}d.js></script></div><iframe src={OUTSIDE}e></iframe> "
    "{{value}} {{#each value}} ${fetch('" + OUTSIDE + "f')} `x` &lt;b&gt; "
    f"<link rel=stylesheet href={OUTSIDE}g.css> [link]({OUTSIDE}h)"
)
PASSWORD = "a-long-word"


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("scripted")
    with served([str(HERE / "scripted_page.py"), "votes.jsonl", "0.004"], folder) as page:
        yield page


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def tab(chromium: Any, scripted: Served) -> Iterator[Watched]:
    with watched_page(chromium, scripted.address) as watched:
        watched.page.wait_for_selector("#tf-go-compare")
        yield watched


def test_an_answer_is_shown_as_text_and_asks_for_nothing(tab: Watched, scripted: Served) -> None:
    page = tab.page
    ask(page, HOSTILE, most=len(HOSTILE) + 10)
    wait_for_round(page)
    for name in ("left", "right"):
        assert page.locator(f"#tf-{name} .tf-answer").inner_text().startswith(HOSTILE)
    page.get_by_role("tab", name="Chat").click()
    page.locator("#tf-ask-chat textarea").fill(HOSTILE)
    page.click("#tf-go-chat")
    page.wait_for_selector("#tf-thread >> text=in all")
    page.wait_for_timeout(500)

    assert page.locator(f"[src*='{OUTSIDE}'], [href*='{OUTSIDE}']").count() == 0
    assert (tab.outside, tab.list_refused(), tab.errors) == ([], [], [])
    assert not scripted.lookups.exists()
    keep_picture(page, "chat-hostile")


def test_the_browser_refuses_what_got_out_all_the_same(tab: Watched) -> None:
    tab.page.evaluate(
        "url => { document.body.append(Object.assign(new Image(), {src: url + 'a.png'}));"
        " fetch(url + 'b').catch(() => null); }",
        OUTSIDE,
    )
    tab.page.wait_for_function("window.refused.length >= 2")

    assert {f"{OUTSIDE}a.png", f"{OUTSIDE}b"} == set(tab.list_refused())
    assert tab.outside == []


def test_stop_ends_both_answers_and_keeps_them(tab: Watched) -> None:
    page = tab.page
    ask(page, "on and on", most=100_000)
    page.wait_for_function(
        "() => ['left', 'right'].every(name => document.querySelector("
        "`#tf-${name} .tf-side`).dataset.state === 'streaming')"
    )
    page.click("#tf-stop-compare")
    wait_for_round(page)

    figures = page.locator(".tf-figures").all_inner_texts()
    assert len(figures) == 2
    assert all("stopped" in reported for reported in figures)
    assert all(page.locator(".tf-answer").all_inner_texts())


def test_errors_are_said_where_they_belong(tab: Watched) -> None:
    page = tab.page
    page.click("#tf-go-compare")
    page.wait_for_selector("#tf-verdict .tf-error")
    assert "The prompt is empty." in page.inner_text("#tf-verdict")

    ask(page, "refuse me", most=20)
    wait_for_round(page)
    assert "The chat template refuses" in page.inner_text("#tf-left .tf-error")
    assert all(page.is_disabled(f"#tf-vote-{place}") for place in range(4))


def test_marks_come_and_go_with_the_switch(tab: Watched) -> None:
    page = tab.page
    ask(page, "one two three four", most=30)
    wait_for_round(page)
    assert page.locator("#tf-left mark").count() >= 1
    page.uncheck("#tf-marked input")
    page.wait_for_function("document.querySelectorAll('mark').length === 0")
    page.check("#tf-marked input")
    page.wait_for_selector("#tf-right mark")


def test_without_the_password_nothing_is_shown(chromium: Any, tmp_path: Path) -> None:
    command = [str(HERE / "scripted_page.py"), "votes.jsonl", "0", PASSWORD]
    with served(command, tmp_path / "guarded") as page:
        page.votes.write_text("{}\n")
        paths = ("config", "gradio_api/info", f"gradio_api/file={page.votes.resolve()}")
        for path in paths:
            assert httpx.get(page.address + path, timeout=60).status_code in (401, 403), path
        refused = httpx.post(
            page.address + "login",
            data={"username": "x", "password": "a-long-worm"},
            timeout=60,
        )
        assert refused.status_code == 400
        with watched_page(chromium, page.address) as watched:
            watched.page.locator("input[type=password]").fill(PASSWORD)
            watched.page.locator("input:not([type=password]), textarea").first.fill("anyone")
            keep_picture(watched.page, "login")
            watched.page.get_by_role("button", name="Login").click()
            watched.page.wait_for_selector("#tf-go-compare")
            assert watched.outside == []


def test_a_foreign_name_for_this_machine_is_refused(scripted: Served) -> None:
    own = scripted.address.removeprefix("http://").rstrip("/")
    port = own.rpartition(":")[2]
    for name, status in ((own, 200), (f"localhost:{port}", 200), (f"evil.example:{port}", 421)):
        answer = httpx.get(scripted.address + "config", headers={"host": name}, timeout=60)
        assert answer.status_code == status, name


def test_every_answer_carries_the_policy(scripted: Served) -> None:
    for path in ("", "config", "theme.css", "nowhere"):
        policy = httpx.get(scripted.address + path, timeout=60).headers["content-security-policy"]
        assert "default-src 'self' data: blob:" in policy
        assert "http" not in policy
        assert "*" not in policy
