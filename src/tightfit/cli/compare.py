"""`tightfit compare`: Open a web page with two models side by side."""

from __future__ import annotations

from tightfit.api.compare import run_compare
from tightfit.api.options.common import Output
from tightfit.api.options.serving import CompareOptions
from tightfit.cli.ui import PageScreen


def compare(options: CompareOptions, output: Output) -> None:
    """Serve the page until Ctrl-C."""
    run_compare(options, PageScreen(as_json=output.as_json))
