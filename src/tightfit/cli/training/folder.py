"""The folder of a run, filled before its workers start."""

from __future__ import annotations

import sys
from datetime import datetime, timezone
from pathlib import Path

from tightfit.cli.training.place import write_wish_file
from tightfit.cli.training.plan import Ready
from tightfit.cli.training.recipe import Wish
from tightfit.core.errors import EnvironmentFaultError, UsageError, UserError
from tightfit.ledger.environment import probe_environment, write_environment
from tightfit.ledger.metrics import EventRecord, append_record
from tightfit.ledger.run_folder import RunFolder, RunState, RunStatus, TokenFolders
from tightfit.planning.plan import Plan


def write_folder(run: RunFolder, wish: Wish, ready: Ready, begun: Plan | None) -> None:
    """Everything that later starts read; `begun` is the plan of a run that goes on."""
    tokens = TokenFolders(
        train=str(ready.encoded.train.folder),
        eval=None if ready.encoded.eval is None else str(ready.encoded.eval.folder),
    )
    try:
        run.path.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise EnvironmentFaultError(
            f"Cannot make the folder {run.path}: {fault.strerror or fault}.",
            remedy="choose a folder that is writable: --output FOLDER",
        ) from fault
    if begun is not None:
        _refuse_changed_data(run, tokens)
    write_wish_file(run.path, wish)  # first: by it a half-made folder is known as ours
    run.write_tokens(tokens)
    write_environment(run, probe_environment(sys.argv))
    if not run.state_path.exists():
        now = datetime.now(timezone.utc).isoformat()
        run.write_state(RunState(status=RunStatus.PREPARED, updated_at=now))
    if begun is not None and ready.plan != begun:
        text = f"goes on with other hardware: {ready.plan.summary}"
        append_record(run.metrics_path, EventRecord(step=run.read_state().step, text=text))
    if ready.plan != begun:
        run.write_plan(ready.plan)  # last: a folder with a plan is a run


def _refuse_changed_data(run: RunFolder, tokens: TokenFolders) -> None:
    """Going on with other rows would be another run under the same name."""
    try:
        held = run.read_tokens()
    except UserError:
        return
    if Path(held.train).parent.name != Path(tokens.train).parent.name:
        raise UsageError(
            f"The data has changed since the run in {run.path} began.",
            remedy="--fresh to start over, or --output ANOTHER-FOLDER",
        )
