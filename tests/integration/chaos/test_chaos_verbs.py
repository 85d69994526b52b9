"""A few of the moments and faults of benchmarks/kill_verbs.py and fault_verbs.py, for each verb
that ends in a second or two; the others have tests of their own here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fault_trials import FAULTS, Fault, try_fault
from faults import COMPILER, NEEDS_COMPILER
from kill_trials import Moment, Undisturbed, draw_moment, run_undisturbed, try_moment
from tightfit.core.errors import SetupError
from verb_lab import VerbLab

VERBS = ("merge", "convert", "generate", "stage")
NEEDS_MOUNT = "run as root, or allow user namespaces: sysctl kernel.unprivileged_userns_clone=1"

pytestmark = pytest.mark.skipif(COMPILER is None, reason=NEEDS_COMPILER)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VerbLab]:
    made = VerbLab(tmp_path_factory.mktemp("lab"))
    yield made
    made.close()


@pytest.fixture(scope="module", params=VERBS)
def undisturbed(lab: VerbLab, request: pytest.FixtureRequest) -> tuple[str, Undisturbed]:
    return request.param, run_undisturbed(lab, lab.verbs[request.param])


def test_killed_at_a_moment(lab: VerbLab, undisturbed: tuple[str, Undisturbed]) -> None:
    name, expected = undisturbed
    moment = draw_moment(lab.verbs[name], expected, 2)

    trial = try_moment(lab, lab.verbs[name], expected, moment)

    assert trial.was_running
    assert trial.problems == (), moment.describe()


@pytest.mark.parametrize("fault", FAULTS[:4], ids=lambda fault: fault.name)
def test_disk_that_fails(lab: VerbLab, undisturbed: tuple[str, Undisturbed], fault: Fault) -> None:
    name, expected = undisturbed

    trial = try_fault(lab, lab.verbs[name], expected, fault, 0)

    assert trial.problems == ()


@pytest.mark.parametrize("operation", [51, 70])
def test_staging_killed_between_the_copy_and_its_name(lab: VerbLab, operation: int) -> None:
    """It once said that the copy was there, and left it under its temporary name."""
    verb = lab.verbs["stage"]
    expected = run_undisturbed(lab, verb)

    trial = try_moment(lab, verb, expected, Moment(operation=operation))

    assert trial.problems == ()


REAL = """
mount -t tmpfs -o size={size} none $AREA && mkdir $AREA/tmp
code=0
{command} > $SAID 2>&1 || code=$?
echo $code; ls -A $AREA
"""


@pytest.mark.parametrize("limit", ["full", "quota"])
def test_a_real_disk_that_is_too_small(lab: VerbLab, tmp_path: Path, limit: str) -> None:
    """Of the kernel, not of the library that plays one."""
    lab.clear()
    allowed = subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "none", str(lab.area)],
        capture_output=True,
        check=False,
    )
    if allowed.returncode:
        pytest.skip(f"mounting is not permitted; un-skip: {NEEDS_MOUNT}")
    said = tmp_path / "said"
    words = ["tightfit", *map(str, lab.verbs["convert"].words)]
    command = f"{sys.executable} -m {' '.join(words)}"
    if limit == "quota":
        command = f"(ulimit -f 100; {command})"
    script = REAL.format(command=command, size="100k" if limit == "full" else "8m")
    plain = {k: v for k, v in lab.environment.items() if k not in lab.faults.environment}
    done = subprocess.run(
        ["unshare", "-rm", "bash", "-eu", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={**plain, "AREA": str(lab.area), "SAID": str(said)},
    )

    code, *left = done.stdout.split()
    text = said.read_text()
    assert code == str(SetupError.exit_code), done.stderr + text
    assert text.count("error: ") == 1
    assert str(lab.area) in text
    assert "free" in text
    assert "m.gguf" not in left
    assert not any("partial" in name for name in left)
