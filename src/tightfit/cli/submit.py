"""`tightfit submit`: plan for a cluster, submit the job, follow it, report."""

from __future__ import annotations

from tightfit.cli.flags.clusters import SubmitFlags
from tightfit.core.errors import UsageError, UserError
from tightfit.core.text import shorten

_KUBERNETES = ("k8s", "kubernetes")


def submit(flags: SubmitFlags) -> None:
    """To the scheduler that `--on`, the run or the recipe names."""
    system = _find_system(flags)
    if system in _KUBERNETES:
        from tightfit.cli.submitting.kubernetes import submit_kubernetes

        submit_kubernetes(flags)
        return
    if system != "slurm":
        raise UsageError(
            f"`--on {shorten(system)}` is no cluster that takes jobs.",
            remedy="--on slurm:PARTITION or --on k8s    (on this machine: tightfit train)",
        )
    _refuse_options_of_kubernetes(flags)
    from tightfit.cli.submitting.slurm import submit_slurm

    submit_slurm(flags)


def _refuse_options_of_kubernetes(flags: SubmitFlags) -> None:
    given = {"--as": flags.kind, "--write": flags.write, "--context": flags.context,
             "--namespace": flags.namespace, "--stage": flags.stage or None}  # fmt: skip
    option = next((name for name, value in given.items() if value is not None), None)
    if option is not None:
        raise UsageError(
            f"`{option}` is for Kubernetes.",
            remedy="leave it out    (--dry-run shows the batch script)",
        )


def _find_system(flags: SubmitFlags) -> str:
    """The first word of what names the cluster; slurm where nothing does."""
    said = flags.on or _recorded(flags.job) or "slurm"
    return said.partition(":")[0].strip().casefold()


def _recorded(job: str) -> str | None:
    """What the run was submitted to, or the recipe's `on`."""
    from tightfit.cli.training.request import RECIPE_ENDINGS
    from tightfit.cli.training.run_folder import read_run_recipe_file
    from tightfit.core.recipe import read_recipe
    from tightfit.runs.find import find_run

    run = find_run(job)
    if run is not None:
        wanted = read_run_recipe_file(run.path)
        return None if wanted is None else wanted.recipe.on
    if not job.lower().endswith(RECIPE_ENDINGS):
        return None
    try:
        return read_recipe(job).on
    except UserError:
        return None  # whoever reads it in earnest says what is wrong with it
