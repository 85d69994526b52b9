"""The `--json` side of every verb."""

from __future__ import annotations

from typing import Any

from tightfit.cli.terminal.output import speaks_unicode, write_out


def show_json(value: Any) -> None:
    """One JSON document on stdout and nothing else."""
    import json

    text = json.dumps(value, indent=2, ensure_ascii=not speaks_unicode(), allow_nan=False)
    # Half of a surrogate pair (a file name that is no UTF-8) is JSON only as an escape.
    write_out(_escape_halves(text) + "\n")


def _escape_halves(text: str) -> str:
    if text.isascii():
        return text
    return "".join(f"\\u{ord(c):04x}" if "\ud800" <= c <= "\udfff" else c for c in text)
