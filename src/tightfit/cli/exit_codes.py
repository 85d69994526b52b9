"""Exit codes beside those of `core/errors.py`."""

from __future__ import annotations

EXIT_BUG = 70
"""EX_SOFTWARE of sysexits.h: our fault, not the user's."""
EXIT_REQUEUE = 75
"""EX_TEMPFAIL: saved and stopped as asked; the same command goes on."""
EXIT_OUT_OF_MEMORY = 76
"""Of a worker: the launcher goes on with the next plan."""
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
