"""Exit codes of a worker beside those of `core/errors.py`; `tightfit train` has the same."""

from __future__ import annotations

EXIT_BUG = 70
EXIT_REQUEUE = 75
"""EX_TEMPFAIL of sysexits.h: saved and stopped as asked; the same command goes on."""
EXIT_OUT_OF_MEMORY = 76
"""The launcher goes on with the next plan."""
EXIT_INTERRUPTED = 130
