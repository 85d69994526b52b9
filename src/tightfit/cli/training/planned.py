"""`train RUN --as-planned`: a batch job on a node, a pod: the folder's plan, and nothing else."""

from __future__ import annotations

import sys

from tightfit.cli.flags.train import TrainFlags
from tightfit.cli.training.job import refuse_changes
from tightfit.core.errors import UsageError, UserError
from tightfit.ledger.environment import probe_environment, write_environment
from tightfit.ledger.find import find_run
from tightfit.ledger.run_folder import RunFolder, RunStatus
from tightfit.planning.plan import Plan

LOCK_WAIT_SECONDS = 180.0
"""A file server forgets the lock of a node that died after its lease, mostly 90 seconds."""


def open_planned(flags: TrainFlags) -> tuple[RunFolder, Plan]:
    """The run and its plan, without a look at what is here: whoever planned it looked."""
    found = find_run(flags.job)
    if found is None:
        raise UsageError(
            f"`--as-planned` takes a run's folder, and {flags.job} is none.",
            remedy=f"tightfit train {flags.job}    (plans and runs)",
        )
    run = RunFolder(path=found.path.absolute())
    refuse_changes(flags)
    plan = run.read_plan()
    count = plan.strategy.num_nodes
    if flags.nodes != count:
        raise UsageError(
            f"The plan in {run.path} is for {count} nodes, not for {flags.nodes}.",
            remedy=f"--nodes {count} --rendezvous FIRST-NODE:29500    (on every node)"
            if count > 1
            else "leave out --nodes",
        )
    if not flags.dry_run and not is_finished(run) and flags.node_rank in (None, "0"):
        write_environment(run, probe_environment(sys.argv))
    return run, plan


def is_finished(run: RunFolder) -> bool:
    try:
        return run.read_state().status is RunStatus.FINISHED
    except UserError:
        return False
