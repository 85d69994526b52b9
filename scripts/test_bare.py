"""Install tightfit alone into a fresh environment and hold the planner to its promises there.

No torch, no transformers, no numpy: `--help` in under 0.3 s of processor time and a plan over at
least 500 strategies in under 1 s, as the fastest of several runs: the others tell what else
the machine was doing. A machine that is slow at loading other people's packages, or at a plain
loop, is allowed as much more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HELP_LIMIT_SECONDS = 0.3
PLAN_LIMIT_SECONDS = 1.0
YARDSTICKS = {
    "import pydantic.main, typer.main": 0.20,
    "sum(number * number for number in range(3_000_000))": 0.30,
}
"""Programs, and what two cores of 2.5 GHz take for each: the limits are meant there."""
MIN_STRATEGIES = 500
REPEATS = 11


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="tightfit-bare-") as folder:
        home = Path(folder)
        python = make_environment(home / "venv")
        tool = python.with_name("tightfit")
        assert_absent(python, ["torch", "transformers", "numpy", "matplotlib", "tokenizers"])
        plan = [
            str(tool),
            "plan",
            "Llama-2-7b",
            "--on",
            "4xV100-32GB",
            "--seq-len",
            "2048",
            "--json",
        ]
        help_seconds, plan_seconds, *yardstick_seconds = fastest_seconds(
            [str(tool), "--help"], plan, *([str(python), "-c", code] for code in YARDSTICKS)
        )
        answer = json.loads(subprocess.check_output(plan, text=True))
        considered = int(answer["considered"])
        doctor = subprocess.run(
            [str(tool), "doctor", "--json"], capture_output=True, text=True, check=False
        )
    usual = YARDSTICKS.values()
    slower = max(1.0, *(a / b for a, b in zip(yardstick_seconds, usual, strict=True)))
    help_limit, plan_limit = slower * HELP_LIMIT_SECONDS, slower * PLAN_LIMIT_SECONDS
    packages, loop = yardstick_seconds
    print(
        f"its packages {packages:.2f} s, a loop {loop:.2f} s: limits {slower:.2f} times the usual"
    )
    print(f"--help {help_seconds:.2f} s (limit {help_limit:.2f})")
    print(f"plan   {plan_seconds:.2f} s (limit {plan_limit:.2f}), {considered} strategies")
    errors = []
    if help_seconds >= help_limit:
        errors.append("--help is too slow")
    if plan_seconds >= plan_limit:
        errors.append("plan is too slow")
    if considered < MIN_STRATEGIES:
        errors.append(f"only {considered} strategies were considered")
    if not answer["plans"]:
        errors.append("no plan was found")
    if "Traceback" in doctor.stderr or not doctor.stdout:
        errors.append("doctor failed on a bare machine")
    print("\n".join(f"error: {error}" for error in errors) or "bare environment: all good")
    return 1 if errors else 0


def make_environment(folder: Path) -> Path:
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    quiet = ["--quiet", "--disable-pip-version-check"]
    subprocess.run([str(python), "-m", "pip", "install", *quiet, str(ROOT)], check=True)
    return python


def assert_absent(python: Path, names: list[str]) -> None:
    probe = (
        "import sys; from importlib.util import find_spec; print(*filter(find_spec, sys.argv[1:]))"
    )
    found = subprocess.check_output([str(python), "-c", probe, *names], text=True).split()
    if found:
        raise SystemExit(f"the bare environment has {', '.join(found)}")


def fastest_seconds(*commands: list[str]) -> list[float]:
    """Processor time of each command, run in turns, so that a machine that is slow for a while is
    so for all.

    The first run compiles bytecode and is not counted.
    """
    taken: list[list[float]] = [[] for _ in commands]
    for _ in range(REPEATS + 1):
        for command, seconds in zip(commands, taken, strict=True):
            before = os.times()
            subprocess.run(command, check=True, capture_output=True)
            after = os.times()
            user = after.children_user - before.children_user
            seconds.append(user + after.children_system - before.children_system)
    return [min(seconds[1:]) for seconds in taken]


if __name__ == "__main__":
    sys.exit(main())
