"""What the browser tests share: a page's process, a Chromium that is watched, and its findings."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

HERE = Path(__file__).parent
SUPPORT = HERE.parent.parent / "support"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
SECONDS = 60
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
WATCH_POLICY = """
window.refused = [];
document.addEventListener('securitypolicyviolation', event => refused.push(event.blockedURI));
"""
WATCH_GROWTH = """
() => {
  window.grown = {left: [], right: []};
  for (const name of Object.keys(grown)) {
    const place = document.getElementById('tf-' + name);
    new MutationObserver(() => {
      const side = place.querySelector('.tf-side'), answer = place.querySelector('.tf-answer');
      const state = side && side.dataset.state;
      if (answer && (state === 'streaming' || state === 'done'))
        grown[name].push([performance.now(), answer.textContent.length]);
    }).observe(place, {childList: true, subtree: true, characterData: true});
  }
}
"""
"""Keeps the length of each answer whenever the page changes."""

GUARD = """
import socket
_real = socket.getaddrinfo
def _guarded(host, *rest, **more):
    name = host.decode() if isinstance(host, bytes) else host
    if name not in (None, "", "localhost", "127.0.0.1", "::1", "0.0.0.0"):
        with open({log!r}, "a") as stream:
            stream.write(str(name) + "\\n")
        raise OSError("outside is blocked")
    return _real(host, *rest, **more)
socket.getaddrinfo = _guarded
"""
"""A `sitecustomize` for the page's process: every name of another machine is noted and refused."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """A page that is up."""

    address: str
    votes: Path
    lookups: Path
    """Names of other machines that its process wanted to know."""


@dataclass(kw_only=True)
class Watched:
    """A browser's tab, and what it did besides showing the page."""

    page: Any
    outside: list[str] = field(default_factory=list)
    """Requests to other machines."""
    errors: list[str] = field(default_factory=list)

    def list_refused(self) -> list[str]:
        """What the page's own policy refused before it became a request."""
        return list(self.page.evaluate("window.refused"))


@contextlib.contextmanager
def served(command: Sequence[str], folder: Path) -> Iterator[Served]:
    """The page of a command whose first line of output holds the address."""
    folder.mkdir(parents=True, exist_ok=True)
    lookups = folder / "lookups.txt"
    (folder / "sitecustomize.py").write_text(GUARD.format(log=str(lookups)))
    paths = [str(folder), str(SUPPORT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with (folder / "stderr.txt").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=folder,
            env=environment,
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = next((part for part in line.replace('"', " ").split() if "http://" in part), None)
        assert found, f"no address: {line!r} {(folder / 'stderr.txt').read_text()}"
        yield Served(address=found.rstrip(","), votes=folder / "votes.jsonl", lookups=lookups)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Any]:
    """A Chromium with a profile of its own."""
    executable = shutil.which("chromium")
    if executable is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        opened = play.chromium.launch_persistent_context(
            str(folder),
            executable_path=executable,
            headless=True,
            args=list(FLAGS),
            viewport={"width": DESKTOP["width"], "height": DESKTOP["height"]},
            accept_downloads=True,
        )
        opened.set_default_timeout(SECONDS * 1000)
        opened.add_init_script(WATCH_POLICY)
        yield opened
        opened.close()


@contextlib.contextmanager
def watched_page(opened: Any, address: str) -> Iterator[Watched]:
    """A fresh tab at the address; what goes elsewhere is noted and refused."""
    watched = Watched(page=opened.new_page())

    def guard(route: Any) -> None:
        url = route.request.url
        host = urlsplit(url).hostname
        if url.startswith(("data:", "blob:")) or host in LOOPBACK:
            route.continue_()
        else:
            watched.outside.append(url)
            route.abort()

    watched.page.route("**/*", guard)
    watched.page.on("pageerror", lambda error: watched.errors.append(str(error)))
    try:
        watched.page.goto(address)
        yield watched
    finally:
        watched.page.close()


def wait_for_round(page: Any) -> None:
    """Until both answers have ended and can be voted on or have failed."""
    page.wait_for_function(
        "() => ['left', 'right'].every(name => ['done', 'failed'].includes("
        "document.querySelector(`#tf-${name} .tf-side`).dataset.state))"
        " && !document.getElementById('tf-go-compare').disabled"
    )


def ask(page: Any, prompt: str, *, most: int | None = None) -> None:
    """Fill the form in and send it by the keyboard."""
    if most is not None:
        if not page.get_by_label("Longest answer").first.is_visible():
            page.locator("#tf-settings button").first.click()
        page.get_by_label("Longest answer").first.fill(str(most))
        page.get_by_label("Longest answer").first.press("Tab")
    page.locator("#tf-ask-compare textarea").fill(prompt)
    page.locator("#tf-ask-compare textarea").press("Control+Enter")


def keep_picture(page: Any, name: str) -> None:
    """A screenshot to look at, where a folder is named for them."""
    folder = os.environ.get("TIGHTFIT_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)
