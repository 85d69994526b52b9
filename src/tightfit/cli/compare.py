"""`tightfit compare`: two models side by side on a web page of this machine."""

from __future__ import annotations

import json

from tightfit.api.compare import ComparePageReady, CompareWatcher, run_compare
from tightfit.cli.flags.serving import CompareFlags
from tightfit.cli.terminal.output import write_err, write_out
from tightfit.core.text import sanitize


def compare(flags: CompareFlags) -> None:
    """Serve the page until Ctrl-C."""
    run_compare(flags, _CompareScreen(as_json=flags.as_json))


class _CompareScreen(CompareWatcher):
    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def loading(self, model: str) -> None:
        write_err(f"loading {sanitize(model)}\n")

    def ready(self, page: ComparePageReady) -> None:
        """Where the page is; one line of JSON for a program that waits for it."""
        votes = str(page.votes)
        if self._as_json:
            document = {"address": page.address, "votes": votes, "models": list(page.models)}
            write_out(json.dumps(document) + "\n")
            return
        for name, info in zip(page.models, page.engines, strict=False):
            write_out(f"{sanitize(name)}: {sanitize(info.why)}\n")
        write_out(f"votes go to {sanitize(votes)}\nopen {page.address}    (Ctrl+C ends it)\n")
