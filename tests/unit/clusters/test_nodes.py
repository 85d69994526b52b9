"""Host lists are read as Slurm writes them; a command reaches a node word for word."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tightfit.clusters.nodes import expand_nodes, node_command, node_prefix
from tightfit.core.errors import UsageError

AWKWARD = ["print", "two words", "it's", '"quoted"', "$HOME", "a;b", "*", ""]
ECHO = "import json, sys; print(json.dumps(sys.argv[1:]))"
HERE = "env TIGHTFIT_TEST_NODE={node}"
"""Runs what follows on this machine."""


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a,b", ["a", "b"]),
        ("gpu[01-04],big01", ["gpu01", "gpu02", "gpu03", "gpu04", "big01"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[1,3-4,07]", ["n1", "n3", "n4", "n07"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("n[1-2]-ib.site.org", ["n1-ib.site.org", "n2-ib.site.org"]),
        ("me@10.0.0.1, 10.0.0.2,", ["me@10.0.0.1", "10.0.0.2"]),
        ("a,b,a", ["a", "b"]),
    ],
)
def test_a_list_of_nodes(text: str, names: list[str]) -> None:
    assert list(expand_nodes(text)) == names


@pytest.mark.parametrize(
    "text",
    ["", " , ", "n[1-", "n1]", "n[[1]]", "n[]", "n[3-1]", "n[a-b]", "-oProxyCommand=x", "a b",
     "n[1-99999]", "r[1-999]n[1-999]", "$(x)", "n[0-99999999999999]"],
)  # fmt: skip
def test_what_is_no_list_of_nodes(text: str) -> None:
    with pytest.raises(UsageError) as error:
        expand_nodes(text)

    assert error.value.remedy


def test_how_a_node_is_reached() -> None:
    silent: Any = SimpleNamespace(run_on_node=None)
    reported: Any = SimpleNamespace(run_on_node="ip netns exec {node}")

    assert node_prefix(silent, {}) == "ssh -o BatchMode=yes {node}"
    assert node_prefix(silent, {"SLURM_JOB_ID": "7"}) == "srun --overlap -N1 -n1 -w {node}"
    assert node_prefix(reported, {"SLURM_JOB_ID": "7"}) == "ip netns exec {node}"


def test_words_reach_a_program_as_they_are() -> None:
    argv = [sys.executable, "-c", ECHO, *AWKWARD]
    words = node_command("n1", argv, prefix=HERE, env={"LANG": "C"})

    assert eval(subprocess.check_output(words)) == AWKWARD


def test_words_reach_a_shell_over_there_as_they_are(tmp_path: Path) -> None:
    """A stand-in for ssh does as ssh does: joins the words and hands them to a shell."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nshift 3\nexec sh -c "$*"\n')
    ssh.chmod(0o755)
    argv = [sys.executable, "-c", f"import os; {ECHO}; print(os.environ['X'])", *AWKWARD]
    prefix = f"{ssh} -o BatchMode=yes {{node}}"
    reported = subprocess.check_output(node_command("n1", argv, prefix=prefix, env={"X": "a b'c"}))

    assert reported.decode().splitlines()[1] == "a b'c"
    assert eval(reported.splitlines()[0]) == AWKWARD


def test_the_environment_is_set_over_there() -> None:
    words = node_command("n2", ["x", "y"], prefix="srun -w {node}", env={"A": "1"})

    assert words == ["srun", "-w", "n2", "env", "A=1", "x", "y"]


@pytest.mark.parametrize("prefix", ["ssh", "ssh 'x {node}", ""])
def test_a_prefix_that_cannot_be(prefix: str) -> None:
    with pytest.raises(UsageError, match="command before"):
        node_command("n1", ["true"], prefix=prefix)
