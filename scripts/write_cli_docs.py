"""Write docs/cli.md from the `--help` of every verb.

python scripts/write_cli_docs.py            # rewrite
python scripts/write_cli_docs.py --check    # fail if it is out of date
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path

from tightfit.cli.app import main
from tightfit.cli.command import VERBS

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"
COLUMNS = 90

_HEAD = """# The command line

<!-- Made by `python scripts/write_cli_docs.py` from `--help`; a test keeps it true. -->

Every verb takes `--json` (one JSON document on stdout and nothing else) and `--help`. Text in
a pipe has no colours and no frames; `COLUMNS` sets its width. A failure is one `error:` line
and one `try:` line on stderr, with an exit code by its kind: [exit codes](exit-codes.md). With
`--json` the failure is also an object on stdout: `error`, `remedy`, `exit_code`.

What `--json` prints: `estimate` one estimate (`verdict`, `reason`, `parameters`, `gpu`, `host`,
`disk`, `time`, `phases`, `assumptions`) beside the `model`, `strategy` and `hardware` it was made
for; `plan` an object with `plans` (best first, each the same JSON that `--save` writes),
`excluded` and `considered`; `plan --buy` an object with `offers`, cheapest first.

The shell completes verbs, options, their words, models and GPUs after
`tightfit --install-completion`.
"""


def render_page() -> str:
    """The whole page."""
    parts = [_HEAD, _section("tightfit", [])]
    parts += [_section(f"tightfit {verb}", [verb]) for verb in VERBS]
    return "\n".join(parts)


def _section(title: str, argv: list[str]) -> str:
    return f"## `{title}`\n\n```text\n{read_help(argv)}```\n"


def read_help(argv: list[str]) -> str:
    """What `tightfit ARGV --help` prints in a terminal of fixed width."""
    printed = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(COLUMNS)
    try:
        with contextlib.redirect_stdout(printed):
            main([*argv, "--help"])
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines()) + "\n"


def write_page() -> int:
    page = render_page()
    if "--check" not in sys.argv:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    is_current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == page
    if not is_current:
        sys.stdout.write("docs/cli.md is out of date: run python scripts/write_cli_docs.py\n")
    return int(not is_current)


if __name__ == "__main__":
    sys.exit(write_page())
