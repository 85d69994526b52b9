"""`tightfit ui`: Open a web page: plans while you type, data, runs, chat."""

from __future__ import annotations

import json

from tightfit.api.options.common import Output
from tightfit.api.options.serving import UiOptions
from tightfit.api.ui import PageReady, PageWatcher, run_ui
from tightfit.cli.terminal.output import write_err, write_out
from tightfit.core.text import sanitize


def ui(options: UiOptions, output: Output) -> None:
    """Serve the page until Ctrl-C."""
    run_ui(options, PageScreen(as_json=output.as_json))


class PageScreen(PageWatcher):
    """Says where the page is; one line of JSON for a program that waits for it."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def loading(self, model: str) -> None:
        write_err(f"loading {sanitize(model)}\n")

    def ready(self, page: PageReady) -> None:
        votes = str(page.votes)
        if self._as_json:
            document = {"address": page.address, "votes": votes, "models": list(page.models)}
            write_out(json.dumps(document) + "\n")
            return
        for name, info in zip(page.models, page.engines, strict=False):
            write_out(f"{sanitize(name)}: {sanitize(info.why)}\n")
        if page.models:
            write_out(f"votes go to {sanitize(votes)}\n")
        write_out(f"open {page.address}    (Ctrl+C ends it)\n")
