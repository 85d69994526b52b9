"""Exit codes beside those of `core/errors.py`."""

from __future__ import annotations

EXIT_BUG = 70
"""EX_SOFTWARE of sysexits.h: our fault, not the user's."""
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
