"""A pytest plugin: hostile cases, run through the command line in this process and judged."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tightfit.cli.app import main
from tightfit.core.errors import EXIT_BUG, UserError
from word_model import plant_model

CASES_VARIABLE = "TIGHTFIT_FUZZ_CASES"
SECONDS_VARIABLE = "TIGHTFIT_FUZZ_SECONDS"
"""No further cases of a kind after so long; the report says how many there were."""
REPORT_VARIABLE = "TIGHTFIT_FUZZ_REPORT"
"""A file that gets a JSON line for each kind."""
MOST_SECONDS = 10
"""Of CPU time: other tests run at the same time."""
MOST_WAITING_SECONDS = 40
"""Of a case in all; nothing here waits for anything."""
MOST_BYTES = 2**30
_MOST_SHOWN = 5
MakeCase = Callable[[Random, Path], Sequence[str]]
"""Writes hostile files into an empty folder; returns the words to type there."""
Attempt = Callable[[Random], Callable[[], object]]
"""Makes a case; returns a call that works or raises a `UserError`."""


class HangError(BaseException):
    """No Exception: nothing in the program may catch it."""


def count_cases(num_short: int) -> int:
    """How many random cases of a kind are wanted."""
    return int(os.environ.get(CASES_VARIABLE, num_short))


@dataclass(slots=True)
class Tally:
    """What became of the cases of one kind."""

    kind: str
    codes: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    slowest_seconds: float = 0.0
    peak_bytes: int = 0

    def describe(self) -> dict[str, Any]:
        num_cases = self.codes.total()
        return {
            "kind": self.kind,
            "cases": num_cases,
            "refused": num_cases - self.codes[0] - len(self.failures),
            "accepted": self.codes[0],
            "failures": len(self.failures),
            "seconds": round(self.seconds, 1),
            "slowest_seconds": round(self.slowest_seconds, 2),
            "peak_bytes": self.peak_bytes,
            "exit_codes": {str(code): count for code, count in sorted(self.codes.items())},
        }


class Trials:
    """The cases of one kind; `check` fails the test if any ended badly."""

    def __init__(
        self, kind: str, folder: Path, capsys: pytest.CaptureFixture[str], *, num_short: int
    ) -> None:
        self._folder = folder
        self._capsys = capsys
        self._num_cases = count_cases(num_short)
        self.tally = Tally(kind)

    def run(self, make_case: MakeCase) -> None:
        """As many seeded cases as are asked for."""
        for name, rng in self._draw():
            self.run_one(name, partial(make_case, rng))

    def try_each(self, attempt: Attempt) -> None:
        """As many seeded cases of a reader itself, without a command around it."""

        def call(try_it: Callable[[], object]) -> int:
            try:
                try_it()
            except UserError as error:
                return error.exit_code if error.remedy else EXIT_BUG
            return 0

        for name, rng in self._draw():
            try_it = attempt(rng)
            self._judge(name, partial(call, try_it), says_errors=False)

    def _draw(self) -> Iterator[tuple[str, Random]]:
        """The cases' names and seeds."""
        end = time.monotonic() + float(os.environ.get(SECONDS_VARIABLE, "inf"))
        for number in range(self._num_cases):
            if time.monotonic() > end:
                break
            yield f"case {number}", Random(f"{self.tally.kind} {number}")

    def run_one(self, name: str, make: Callable[[Path], Sequence[str]]) -> int:
        """One case in a folder of its own; its exit code."""
        home = self._folder / "case"
        home.mkdir()
        before = Path.cwd()
        try:
            words = make(home)
            os.chdir(home)
            return self._judge(f"{name}: {str(words)[:300]}", partial(main, list(words)))
        finally:
            os.chdir(before)
            _remove_tree(home)

    def _judge(self, name: str, call: Callable[[], int], *, says_errors: bool = True) -> int:
        self._capsys.readouterr()
        start_bytes = _reset_peak()
        start = time.monotonic()
        problem, code = "", -1
        try:
            with _time_limit():
                code = call()
        except HangError:
            problem = f"did not end within {MOST_SECONDS} s, or waited for {MOST_WAITING_SECONDS} s"
        except BaseException as error:
            problem = "".join(traceback.format_exception(error)[-4:])
        seconds = time.monotonic() - start
        grown = _read_status("VmHWM") - start_bytes
        _, err = self._capsys.readouterr()
        if not problem and (code == EXIT_BUG or "Traceback" in err):
            problem = err.strip()
        elif says_errors and not problem and code != 0 and "error:" not in err:
            problem = f"exit {code} without a message"
        elif not problem and grown > MOST_BYTES:
            problem = f"took {grown / 2**20:.0f} MiB more"
        tally = self.tally
        tally.codes[code] += 1
        tally.seconds += seconds
        tally.slowest_seconds = max(tally.slowest_seconds, seconds)
        tally.peak_bytes = max(tally.peak_bytes, grown)
        if problem:
            tally.failures.append(f"{name}: {problem[-1500:]}")
        return code

    def check(self) -> None:
        """Report, then fail if any case ended badly."""
        report = os.environ.get(REPORT_VARIABLE)
        if report:
            with Path(report).open("a") as stream:
                stream.write(json.dumps(self.tally.describe()) + "\n")
        failures = self.tally.failures
        kinds = Counter(re.sub(r"[0-9]+|'.*?'|/\S+", "#", text[-200:]) for text in failures)
        shown = "\n\n".join(failures[:_MOST_SHOWN])
        assert not failures, f"{len(failures)} of {len(kinds)} kinds ended badly:\n{shown}"
        assert self.tally.codes.total() > 0


@contextmanager
def _time_limit() -> Iterator[None]:
    """HangError in Python code; what hangs in a library ends the whole run."""

    def stop(*_: object) -> None:
        raise HangError

    timers = (
        (signal.ITIMER_PROF, signal.SIGPROF, MOST_SECONDS),
        (signal.ITIMER_REAL, signal.SIGALRM, MOST_WAITING_SECONDS),
    )
    previous = [signal.signal(kind, stop) for _, kind, _ in timers]
    for timer, _, seconds in timers:
        signal.setitimer(timer, seconds)
    faulthandler.dump_traceback_later(3 * MOST_WAITING_SECONDS, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        for (timer, kind, _), handler in zip(timers, previous, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(kind, handler)


def _reset_peak() -> int:
    """Begin the peak of resident memory anew; returns what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _read_status("VmRSS")


def _read_status(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _remove_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()
    folder.rmdir()


StartTrials = Callable[..., Trials]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with config, tokenizer and a made-up weight: nothing here loads it."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    plant_model(folder)
    return folder


@pytest.fixture
def trials(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[StartTrials]:
    """Trials of a kind, with caches and ledgers of their own; judged when the test ends."""
    for name, value in {
        "TIGHTFIT_CACHE": str(tmp_path / "cache"),
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "HF_HOME": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "100",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TIGHTFIT_DEBUG", raising=False)
    started: list[Trials] = []

    def start(kind: str, *, num_short: int = 200) -> Trials:
        started.append(Trials(kind, tmp_path, capsys, num_short=num_short))
        return started[-1]

    yield start
    for one in started:
        one.check()
