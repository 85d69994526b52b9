"""What torchrun starts on each rank: the worker, with exit codes as torchrun understands them.

To torchrun every code but 0 means: start the group again. A stop that was asked for is
therefore 0, and a group that is started again after an outcome no restart can change
(out of memory, an error of the user's) ends at once; the launcher reads state.json.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from tightfit.core.errors import EXIT_REQUEUE, UsageError, UserError
from tightfit.core.with_parent import follow_bound_parent
from tightfit.runs.run_folder import RunFolder, RunState, RunStatus

MAX_USER_CODE = 7


def main(worker: str, run: str) -> int:
    """Run the worker module's `main` in this process and translate how it ends."""
    follow_bound_parent()
    is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if is_restart and _is_final(RunFolder(path=Path(run))):
        return 0
    code = int(importlib.import_module(worker).main([run]))
    return 0 if code == EXIT_REQUEUE else code


def _is_final(run: RunFolder) -> bool:
    try:
        return is_final(run.read_state())
    except UserError:
        return False


def is_final(state: RunState) -> bool:
    """Whether starting the same plan again could change nothing.

    A worker that lost its peer fails with 1, one with a bug with 70: those are worth
    another start, as the node that was lost may come back.
    """
    if state.status is RunStatus.FAILED:
        code = state.exit_code or 0
        return UsageError.exit_code <= code <= MAX_USER_CODE
    return state.status in (RunStatus.FINISHED, RunStatus.STOPPED, RunStatus.OUT_OF_MEMORY)


if __name__ == "__main__":
    exit_code = main(*sys.argv[1:3])
    sys.stdout.flush()
    sys.stderr.flush()
    # Leaving normally would wait for threads and ranks that may never answer.
    os._exit(exit_code)
