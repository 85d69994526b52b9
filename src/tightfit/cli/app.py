"""Where `tightfit` starts: so little is loaded here that Ctrl-C is met from the start."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from tightfit.core.errors import EXIT_INTERRUPTED


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code by kind of failure is in docs/exit-codes.md."""
    # pydantic would look through every installed package for plugins that watch it validate.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        # Here and not above: loading takes longest, and an interrupt then would be a traceback.
        from tightfit.cli.command import run

        return run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
