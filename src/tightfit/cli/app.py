"""Where `tightfit` starts: so little is loaded here that Ctrl-C is met from the start."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

from tightfit.core.errors import EXIT_INTERRUPTED
from tightfit.core.import_path import drop_current_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code by kind of failure is in docs/exit-codes.md."""
    if argv is None:  # this process's own command line
        drop_current_folder()
    # pydantic would look through every installed package for plugins that watch it validate.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    # Loading and planning make hundreds of thousands of objects that stay: looking through them
    # for cycles every 700 takes a tenth of the time of a short command.
    gc.set_threshold(50_000)
    try:
        # Here and not above: loading takes longest, and an interrupt then would be a traceback.
        from tightfit.cli.command import run

        return run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
