"""All that docs/speed.md shows of a GPU, one measurement after another, as far as time allows.

    python benchmarks/measure_card.py --out card --model MODEL --tokens rows.npz --seconds 540
    python benchmarks/measure_card.py --out card ...    (again: what is missing)

Each measurement writes below `--out` what its own script describes, and what it printed to
`logs/`. What ended well is not run again; what would not end in time is not started. MODEL and the
tokens are for `measure_levers.py`. Needs a GPU and all that the scripts need.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from _limited import run_limited
from _throughput_jobs import JOBS

HERE = Path(__file__).resolve().parent
LEAST_FRACTION = 0.8
"""Of a measurement's usual time: with less left, it is not started."""
LEVER_RUN_SECONDS = 400
CONTESTANTS = {"tightfit": 80, "trl-best": 50, "trl-default": 60}
"""And the seconds each takes."""
FP8_CONTESTANTS = {"tightfit-fp8": 65, "tightfit-fp8-gradients": 70}
FP8_JOBS = ("7b-full", "1b-full")

Words = Sequence[object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One measurement, and the seconds it took on an H200."""

    name: str
    seconds: float
    make_words: Callable[[float], Words]
    """Its command, by the seconds that are left, once those before it have run."""

    @property
    def file_name(self) -> str:
        return self.name.replace(" ", "-")


def list_items(out: Path, *, model: str, tokens: str) -> Iterator[Item]:
    """In the order in which they should run: one calibration serves all that follow it."""
    yield _script("tune_casts", 60, "--out", out / "cast_tiles.json")
    yield _script("measure_fused_kernels", 80, "--out", out / "fused_kernels.json")
    calibrate = ["-m", "tightfit", "calibrate", "--json"]
    yield Item(name="calibrate", seconds=120, make_words=lambda _: calibrate)
    for job in (*FP8_JOBS, *(name for name in JOBS if name not in FP8_JOBS)):
        contestants = CONTESTANTS | (FP8_CONTESTANTS if job in FP8_JOBS else {})
        for name, seconds in contestants.items():
            yield _contestant(out, job, name, seconds)
    yield Item(name="profile_step", seconds=150, make_words=lambda _: _profile(out))
    rows = ("--model", model, "--tokens", tokens, "--rows", 8, "--jobs", 8)
    limit = ("--run-seconds", LEVER_RUN_SECONDS, "--out", out / "levers.json")
    yield _script("measure_levers", LEVER_RUN_SECONDS, *rows, *limit)
    yield Item(name="measure_sweep", seconds=380, make_words=lambda left: _sweep(out, left))


def _script(name: str, seconds: float, *words: object) -> Item:
    command = [HERE / f"{name}.py", *words]
    return Item(name=name, seconds=seconds, make_words=lambda _: command)


def _contestant(out: Path, job: str, name: str, seconds: float) -> Item:
    words = ["--only", job, "--contestants", name, "--out", out / "throughput.json"]
    command = [HERE / "measure_throughput.py", *words]
    return Item(name=f"{job} {name}", seconds=seconds, make_words=lambda _: command)


def _profile(out: Path) -> Words:
    """Each part of a step with the GPU's own limit."""
    calibration = next((out / "calibrations").glob("*.json"), out / "calibrations")
    words = ["--calibration", calibration, "--out", out / "profile.json", "--no-trace"]
    return [HERE / "profile_step.py", *words]


def _sweep(out: Path, seconds_left: float) -> Words:
    """It leaves what does not end in time to the next call."""
    file = out / "sweep.json"
    way = "--resume" if file.exists() else "--out"
    words: list[object] = [way, file, "--seconds", int(seconds_left)]
    words += ["--within", 1.25, "--compiled-last", "--steps", 6, "--warm-up", 3]
    return [HERE / "measure_sweep.py", *words]


def run_item(item: Item, out: Path, seconds_left: float) -> bool:
    """Whether it ended well; all its processes end when the time is over."""
    begin = time.monotonic()
    words = [str(word) for word in (sys.executable, *item.make_words(seconds_left))]
    environment = os.environ | {"TIGHTFIT_LEDGER": str(out / "ledger.sqlite")}
    log = out / "logs" / f"{item.file_name}.txt"
    try:
        code = run_limited(words, environment, seconds_left, log)
        end = f"exit {code}"
    except TimeoutError as error:
        code, end = None, str(error)
    took = time.monotonic() - begin
    print(f"{took:6.1f} s  {item.name}: {end}", flush=True)
    if code == 0:
        (out / "done" / item.file_name).write_text(f"{took:.1f} s\n")
    return code == 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder, resumed if it is there")
    parser.add_argument("--model", default="", help="folder or GGUF file whose losses are compared")
    parser.add_argument("--tokens", default="", help="its rows, by measure_levers.py --tokenize")
    parser.add_argument("--seconds", type=float, default=1e9, help="for all together")
    parser.add_argument("--only", default="", help="how names of measurements begin, with commas")
    parser.add_argument("--list", action="store_true", help="say what is missing, and stop")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    end = time.monotonic() + arguments.seconds
    out: Path = arguments.out.resolve()
    for place in ("done", "logs"):
        (out / place).mkdir(parents=True, exist_ok=True)
    beginnings = tuple(arguments.only.split(","))
    num_missing = 0
    for item in list_items(out, model=arguments.model, tokens=arguments.tokens):
        is_done = (out / "done" / item.file_name).exists()
        if is_done or not item.name.startswith(beginnings):
            continue
        left = end - time.monotonic()
        if arguments.list or left < LEAST_FRACTION * item.seconds:
            print(f"missing: {item.name}, about {item.seconds:.0f} s", flush=True)
            num_missing += 1
        else:
            num_missing += not run_item(item, out, left)
    return int(num_missing > 0)


if __name__ == "__main__":
    sys.exit(main())
