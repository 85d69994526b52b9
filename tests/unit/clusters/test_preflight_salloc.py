"""Raw options of sbatch in site.yaml, as `preflight` hands them to salloc.

tests/integration/cluster/test_cluster_submit.py asks a real salloc which of them it knows.
"""

from __future__ import annotations

import pytest

from tightfit.clusters.site import Site, SlurmSite
from tightfit.clusters.slurm.script import allocation_command, keep_salloc_options


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--exclusive", ["--exclusive"]),
        ("--mail-type=END", ["--mail-type=END"]),
        ("--constraint ib", ["--constraint", "ib"]),
        ("-C ib", ["-C", "ib"]),
        ("-N2", ["-N2"]),
        ('--comment="two words"', ["--comment=two words"]),
        ("--exclusive --requeue --mem=0", ["--exclusive", "--mem=0"]),
        ("--exclusive  # whole nodes", ["--exclusive"]),
        ("--requeue", []),
        ("--no-requeue", []),
        ("--output=/dev/null", []),
        ("-o /dev/null", []),
        ("--error /dev/null --qos=low", ["--qos=low"]),
        ("--open-mode=append", []),
        ("--export=NONE", []),
        ("-W", []),
        ("--array=0-3", []),
    ],
)
def test_only_what_salloc_knows_too(line: str, words: list[str]) -> None:
    assert keep_salloc_options([line]) == words


def test_preflight_has_the_last_word_on_its_own_size() -> None:
    site = Site(slurm=SlurmSite(extra=("--time=1-00:00:00", "--nodes=8", "--mem=0")))
    command = allocation_command(["preflight"], site, partition="gpu", num_nodes=2)

    assert command[-1] == "preflight"
    assert command.index("--time=1-00:00:00") < command.index("--time=3")
    assert command.index("--nodes=8") < command.index("--nodes=2")
    assert "--mem=0" in command


def test_an_allocation_is_asked_for_as_the_site_wants_it() -> None:
    site = Site(slurm=SlurmSite(account="lab", extra=("--exclusive",)))
    wanted = {"num_nodes": 2, "gpus_per_node": 4}

    assert allocation_command(["tightfit", "preflight"], site, partition="gpu", **wanted) == [
        "salloc", "--exclusive", "--job-name=tightfit-preflight", "--partition=gpu", "--nodes=2",
        "--ntasks-per-node=1", "--time=3", "--gpus-per-node=4", "--account=lab",
        "tightfit", "preflight",
    ]  # fmt: skip
