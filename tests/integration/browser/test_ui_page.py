"""`tightfit ui` in a real Chromium: every tab without a model, and models loaded in the page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from compare_browser import (
    DESKTOP,
    PHONE,
    Served,
    Watched,
    ask,
    browser,
    keep_picture,
    served,
    wait_for_round,
    watched_page,
)

from machine_pace import allow_waiting
from made_runs import make_plan, make_records, make_run
from page_data import write_examples
from small_models import make_llama
from tightfit.runs.metrics import write_records
from tightfit.runs.run_folder import RunFolder, RunState, RunStatus

TABS = ("Plan", "Data", "Runs", "Chat", "Compare")
ANSWER_MS = """
([field, value, wanted]) => new Promise(resolve => {
  const input = document.querySelector(`#${field} input`);
  const shown = document.getElementById('tf-plans');
  input.value = value;
  const began = performance.now();
  new MutationObserver((_, watching) => {
    if (!shown.textContent.includes(wanted)) return;
    watching.disconnect();
    resolve(performance.now() - began);
  }).observe(shown, {childList: true, subtree: true, characterData: true});
  input.dispatchEvent(new Event('input', {bubbles: true}));
})
"""
"""Milliseconds from the last key to an answer that holds the wanted words."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("ui")
    make_llama(place / "first", seed=1)
    make_llama(place / "second", seed=4)
    make_run(place / "runs" / "sql")
    make_run(place / "runs" / "sql-qlora", plan=make_plan(method="qlora"))
    write_examples(place / "train.jsonl")
    return place


@pytest.fixture(scope="module")
def ui(folder: Path) -> Iterator[Served]:
    words = ["-m", "tightfit", "ui", "--json", "--port", "0", "--device", "cpu"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIGHTFIT_CACHE", str(folder / "cache"))
        with served([*words, "--max-new-tokens", "24"], folder) as page:
            yield page


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def tab(chromium: Any, ui: Served) -> Iterator[Watched]:
    """The page, with its first plans; at the end nothing may have asked for another machine."""
    with watched_page(chromium, ui.address) as watched:
        watched.page.set_viewport_size(DESKTOP)
        watched.page.wait_for_selector(".tf-plan .tf-track")
        yield watched
        assert watched.outside == []
        assert watched.list_refused() == []
        assert watched.errors == []
        assert not ui.lookups.exists(), ui.lookups.read_text()


def fill(page: Any, field: str, value: str) -> None:
    page.locator(f"#{field} input").fill(value)


def open_tab(page: Any, name: str) -> None:
    page.get_by_role("tab", name=name).click()


def test_plans_are_there_in_under_a_second_after_typing(tab: Watched) -> None:
    page = tab.page
    asked = (("A100-80GB", "A100"), ("RTX-4090", "RTX 4090"), ("H100-80GB", "H100"),
             ("4xV100-32GB", "V100"))  # fmt: skip
    shares = []
    for hardware, shown in asked:
        limit = allow_waiting(1000)
        took = page.evaluate(ANSWER_MS, ["tf-plan-hardware", hardware, f"x {shown}"])
        shares.append(took / max(limit, allow_waiting(1000)))
    assert min(shares) < 1, shares
    shown = page.inner_text("#tf-plans")
    assert "tightfit plan Llama-3.1-8B --on 4xV100-32GB" in shown
    assert "tightfit train Llama-3.1-8B --data train.jsonl" in shown
    assert "Why the first" in shown
    assert page.locator(".tf-plan").first.locator(".tf-track").count() >= 5


def test_what_would_fit_is_said_where_nothing_does_and_can_be_chosen(tab: Watched) -> None:
    page = tab.page
    fill(page, "tf-plan-model", "Llama-3.1-70B")
    error = page.locator("#tf-plans .tf-error")
    error.wait_for()
    of_any_method = error.inner_text()
    page.locator("#tf-plan-method").get_by_text("full", exact=True).click()
    # What the first answer proposes would not fit the second question.
    page.wait_for_function(
        "before => ![null, before].includes("
        "document.querySelector('#tf-plans .tf-error')?.innerText ?? null)",
        arg=of_any_method,
    )
    page.wait_for_selector(".tf-fill")
    assert "The smallest plan needs" in page.inner_text("#tf-plans .tf-error")
    assert "Why others lose" in page.inner_text("#tf-plans")
    keep_picture(page, "ui-nothing-fits")

    page.locator(".tf-fill").first.click()
    page.wait_for_selector(".tf-plan .tf-track")
    assert "fits" in page.inner_text("#tf-plans h2")


def test_an_error_is_a_problem_and_a_remedy(tab: Watched, tmp_path: Path) -> None:
    page = tab.page
    for field, value, problem in (
        ("tf-plan-model", "Lama-3.1-8B", "No model `Lama-3.1-8B`"),
        ("tf-plan-model", str(tmp_path / "recipe.yaml"), "recipe.yaml"),
        ("tf-plan-model", "Llama-3.1-8B", "slurm"),
    ):
        fill(page, "tf-plan-hardware", "slurm" if problem == "slurm" else "RTX-4090")
        fill(page, field, value)
        page.wait_for_selector(f"#tf-plans .tf-error b:has-text('{problem}')")
        assert "try:" in page.inner_text("#tf-plans .tf-error")


def test_the_data_tab_colours_what_is_learnt_and_names_bad_rows(tab: Watched) -> None:
    page = tab.page
    open_tab(page, "Data")
    fill(page, "tf-data-path", "train.jsonl")
    fill(page, "tf-data-model", "first")
    page.wait_for_selector("#tf-data .tf-row")
    learnt = page.locator(".tf-row").first.locator(".tf-learnt").all_text_contents()
    assert "".join(learnt) == "SELECT count(*) FROM singer WHERE age > 20;<|im_end|>"
    findings = page.locator(".tf-finding").all_inner_texts()
    assert any("empty answer" in found and "line 3" in found for found in findings), findings
    assert any("unreadable" in found and "line 7" in found for found in findings), findings
    assert any("duplicate" in found and "line 5" in found for found in findings), findings
    assert page.locator(".tf-columns i").count() >= 5
    keep_picture(page, "ui-data")

    fill(page, "tf-data-row", "4")
    page.wait_for_function("() => document.querySelectorAll('#tf-data .tf-row').length === 1")
    assert "train.jsonl line 4" in page.inner_text("#tf-data .tf-row h4")
    fill(page, "tf-data-row", "3")
    page.wait_for_selector("#tf-data .tf-error")


def test_a_run_that_goes_on_is_shown_as_it_goes(tab: Watched, folder: Path) -> None:
    page = tab.page
    run = make_run(folder / "runs" / "going", records=make_records(20), status=RunStatus.RUNNING)
    try:
        open_tab(page, "Runs")
        page.wait_for_selector("#tf-runs >> text=running (20 of 160)")
        page.locator("#tf-runs-chosen input").click()
        page.get_by_role("option", name="going", exact=True).click()
        page.keyboard.press("Escape")
        frame = page.frame_locator("#tf-run .tf-frame")
        frame.locator("h1, h2", has_text="2 runs side by side").wait_for()
        frame.locator("summary").first.click()
        page.evaluate("() => { window.shown = document.querySelector('#tf-run .tf-frame'); }")

        _go_on(run, 60)

        page.wait_for_selector("#tf-runs >> text=running (60 of 160)")
        frame.locator("td", has_text="60 of 160").first.wait_for()
        assert page.evaluate("shown === document.querySelector('#tf-run .tf-frame')"), (
            "it flickered"
        )
        assert frame.locator("details").first.get_attribute("open") is not None
        keep_picture(page, "ui-runs")
        heights = page.evaluate(
            "[shown.clientHeight, shown.contentDocument.documentElement.scrollHeight]"
        )
        assert heights[0] >= heights[1] - 2, "the report is cut off"
    finally:
        shutil.rmtree(run.path)


def _go_on(run: RunFolder, step: int) -> None:
    run.metrics_path.unlink()
    write_records(run.metrics_path, make_records(step))
    values = {"step": step, "num_steps": 160, "updated_at": "2026-07-01T10:05:00+00:00"}
    run.write_state(RunState(status=RunStatus.RUNNING, **values))


def test_models_are_loaded_in_the_page_and_answer(tab: Watched, folder: Path) -> None:
    page = tab.page
    open_tab(page, "Compare")
    ask(page, "Too early")
    page.wait_for_selector("text=Two models are needed.")
    form = page.locator("#tf-ask-models-compare")
    form.get_by_label("Model A").fill("nowhere")
    page.click("#tf-go-models-compare")
    page.wait_for_selector("#tf-loaded-compare .tf-error")
    form.get_by_label("Model A").fill("first")
    form.get_by_label("Model B").fill(str(folder / "second"))
    page.click("#tf-go-models-compare")
    page.wait_for_selector("#tf-loaded-compare >> text=first and second")
    ask(page, "Now then")
    wait_for_round(page)
    assert page.locator(".tf-name").all_inner_texts() == ["first", "second"]
    keep_picture(page, "ui-compare")

    open_tab(page, "Chat")
    assert "first and second" in page.inner_text("#tf-loaded-chat")
    page.locator("#tf-ask-chat textarea").fill("Hello")
    page.click("#tf-go-chat")
    page.wait_for_selector("#tf-thread >> text=in all")
    keep_picture(page, "ui-chat")


def test_every_tab_fits_a_phone_and_is_dark_in_the_dark(tab: Watched) -> None:
    page = tab.page
    for scheme, size in (("light", PHONE), ("dark", DESKTOP)):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size(size)
        page.reload()
        page.wait_for_selector(".tf-plan .tf-track")
        for name in TABS:
            open_tab(page, name)
            page.wait_for_timeout(300)
            widths = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
            assert widths[0] <= widths[1], f"{name} is {widths[0]} wide"
            keep_picture(page, f"ui-{name.lower()}-{scheme}")
    page.emulate_media(color_scheme="light")


def test_another_port_of_this_machine_is_let_in(ui: Served) -> None:
    """As through `ssh -L 9000:localhost:PORT`; links in the page name no host."""
    for name, status in (("localhost:9000", 200), ("evil.example:9000", 421)):
        assert httpx.get(ui.address, headers={"host": name}, timeout=60).status_code == status
    page = httpx.get(ui.address, headers={"host": "localhost:9000"}, timeout=60).text
    assert ui.address.rstrip("/") not in page
