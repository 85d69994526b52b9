"""`python -m tightfit`: the same as the `tightfit` command."""

from __future__ import annotations

import sys

from tightfit.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
