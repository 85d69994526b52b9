"""Measure whether each lever of a plan keeps the loss: 200 steps with it and without, on real rows.

    python benchmarks/measure_levers.py --tokenize DATA.json --model MODEL --tokens rows.npz
    python benchmarks/measure_levers.py --tokens rows.npz --model MODEL --out levers.json
    python benchmarks/measure_levers.py --tokens rows.npz --device cpu --tiny --steps 4
    python benchmarks/measure_levers.py --again levers.json    (its tables anew; nothing runs)

MODEL is a folder or a GGUF file; without one, SmolLM2-135M's shape is drawn at random. Every run
has the same rows and the same first adapters; runs with other ones show what luck changes. Each is
held against the run with its lever turned back. Gradients of one batch are held against fp32's.

Needs torch, transformers and peft; liger-kernel and bitsandbytes for the levers that name them.
Runs share the GPU, several at a time: losses do not depend on it, and nothing is timed here.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _lever_cases import CASES, CUDA, YARDSTICKS, Case, Noise, find_noise, judge_levers
from measure_trace import describe_run, run_in_process, set_environment

if TYPE_CHECKING:
    from _lever_runs import Setup

DRAWN = "SmolLM2-135M"
"""Whose shape is drawn where no model is named."""
ROW_TOKENS = 512
"""Longer rows are cut."""


class Runs:
    """Answers as they come, and the file that holds them."""

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        self._path = path
        self._head = head
        self._lock = threading.Lock()
        self.found: dict[str, dict[str, Any]] = {}

    def add(self, name: str, answer: dict[str, Any]) -> None:
        with self._lock:
            self.found[name] = answer
            self._write()
        problem = answer.get("fault", "")
        loss = answer.get("held_out_loss", float("nan"))
        print(f"{answer['status']:6} {answer['wall_seconds']:6.1f} s {loss:8.4f} {name} {problem}")

    @property
    def good(self) -> dict[str, dict[str, Any]]:
        return {name: run for name, run in self.found.items() if run["status"] == "ok"}

    def _write(self) -> None:
        noises = {method.value: find_noise(self.good, method) for method in YARDSTICKS}
        report = {name: None if noise is None else asdict(noise) for name, noise in noises.items()}
        head = self._head | {"noise": report}
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        for section, rows in (("levers", judge_levers(self.good)), ("runs", self._list_runs())):
            text = ",\n".join(f"  {json.dumps(row)}" for row in rows)
            lines.append(f" {json.dumps(section)}: [\n{text}\n ]")
        partial = self._path.with_suffix(".partial")
        partial.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        partial.replace(self._path)

    def _list_runs(self) -> list[dict[str, Any]]:
        known = [case.name for case in CASES if case.name in self.found]
        return [{"name": name, **self.found[name]} for name in known]


def tokenize(sources: list[Path], model: str, path: Path) -> int:
    """Rows of the data as `tightfit train` would make them, in an order of no meaning."""
    import numpy as np

    from _lever_runs import write_rows
    from tightfit.core.strategy import DataSource
    from tightfit.data.encode import EncodeRequest, encode_dataset
    from tightfit.runtime.model_files import locate_model

    with tempfile.TemporaryDirectory() as cache:
        request = EncodeRequest(
            sources=[DataSource(path=str(source.absolute())) for source in sources],
            model_folder=locate_model(model, needs_weights=False),
            seq_len=ROW_TOKENS,
            cache=Path(cache),
        )
        store = encode_dataset(request).train
        order = np.random.default_rng(0).permutation(len(store))
        rows = [store.row(int(index)) for index in order]
        write_rows(path, rows)
    print(f"{len(rows)} rows, {sum(len(row.tokens) for row in rows)} tokens: {path}")
    return 0


def draw_model(folder: Path, *, is_tiny: bool) -> None:
    """Weights at random, once for all runs."""
    import torch
    import transformers

    from _trace_build import write_config
    from _trace_jobs import Job
    from tightfit.core.strategy import Strategy
    from tightfit.runtime.libraries import silence_libraries

    silence_libraries()
    write_config(Job(name=DRAWN, model=DRAWN, strategy=Strategy()), folder, is_tiny=is_tiny)
    torch.manual_seed(0)
    library: Any = transformers  # not annotated
    config = library.AutoConfig.from_pretrained(str(folder))
    model = library.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(str(folder))


def find_model(name: str | None, folder: Path, *, is_tiny: bool) -> Path:
    if name is None:
        draw_model(folder, is_tiny=is_tiny)
        return folder
    from tightfit.runtime.model_files import locate_model

    return locate_model(name, needs_weights=True)


def list_cases(only: str, device: str) -> tuple[list[Case], list[str]]:
    """Cases that can run here, and those that cannot; the plain ones of levers come along."""
    wanted = set(filter(None, only.split(",")))
    for case in CASES:
        if case.name in wanted:
            wanted |= {case.against, case.yardstick.plain} if case.is_lever else {case.name}
    cases, left = [], []
    for case in CASES:
        if wanted and case.name not in wanted:
            continue
        can_run = all(_has(need, device) for need in case.needs)
        cases.append(case) if can_run else left.append(case.name)
    return cases, left


def _has(need: str, device: str) -> bool:
    return device == CUDA if need == CUDA else importlib.util.find_spec(need) is not None


def measure(arguments: argparse.Namespace, setup: Setup, runs: Runs, cases: list[Case]) -> int:
    """Start no run after `--seconds`; 1 where one failed or was not started."""
    from _lever_runs import Request, run_case

    begin = time.perf_counter()
    limit = arguments.run_seconds
    methods = {case.method for case in cases}
    for plain in (case for case in CASES if case.is_plain and case.method in methods):
        reference = Request(case=plain, setup=setup, is_reference=True)
        answer = run_in_process("spawn", run_case, reference, timeout_seconds=limit)
        if answer["status"] != "ok":
            print(f"reference of {plain.name}: {answer}")
            return 1
        print(f"{answer['num_trained']} trained values, {answer['wall_seconds']:.1f} s", flush=True)

    def start(case: Case) -> None:
        if time.perf_counter() - begin < arguments.seconds:
            request = Request(case=case, setup=setup)
            runs.add(case.name, run_in_process("spawn", run_case, request, timeout_seconds=limit))

    with ThreadPoolExecutor(arguments.jobs) as threads:
        list(threads.map(start, cases))
    print(f"{time.perf_counter() - begin:.0f} s, {len(cases) - len(runs.good)} failed or left")
    return int(len(runs.good) < len(cases))


def render_table(runs: dict[str, dict[str, Any]]) -> str:
    """Differences of each setting and of noise, in thousandths of a nat."""
    lines = [
        f"{'lever':28} {'|steps|':>8} {'|held|':>8} {'loss':>8} {'without':>8} {'in noise':>8}"
        f" {'gradient':>9} {'plain':>9} {'in fp32':>9} {'precise':>8}"
    ]
    for row in judge_levers(runs):
        losses = (row["held_out_loss"], row["held_out_loss_turned_back"])
        errors = (row["gradient_error"], row["plain_gradient_error"], row["fp32_gradient_error"])
        lines.append(
            f"{row['lever']:28} {_thousandths(row['mean_step_difference'])}"
            f" {_thousandths(row['held_out_difference'])} {losses[0]:8.4f} {losses[1]:8.4f}"
            f" {_word(row['is_within_noise']):>8} "
            + " ".join(f"{'-' if error is None else f'{error:.2g}':>9}" for error in errors)
            + f" {_word(row['is_precise']):>8}"
        )
    for method in YARDSTICKS:
        if noise := find_noise(runs, method):
            lines += _render_noise(f"noise, {method.value}", noise)
    return "\n".join(lines)


def _render_noise(name: str, noise: Noise) -> list[str]:
    steps, held = noise.mean_step_difference, noise.held_out_difference
    lines = [f"{name:28} {_thousandths(steps)} {_thousandths(held)}"]
    if again := noise.repeated:
        steps_again = _thousandths(again.mean_step_difference)
        held_again = _thousandths(again.held_out_difference)
        lines.append(f"{'the same run twice':28} {steps_again} {held_again}")
    return lines


def _thousandths(value: float | None) -> str:
    return f"{'-' if value is None else f'{1e3 * value:.2f}':>8}"


def _word(verdict: bool | None) -> str:
    return {True: "yes", False: "NO", None: "-"}[verdict]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=Path, help="token file, read or written")
    parser.add_argument("--again", type=Path, help="an earlier output, to be judged anew")
    parser.add_argument("--tokenize", type=Path, nargs="+", help="write --tokens of these and stop")
    parser.add_argument("--model", help="folder or GGUF file; drawn at random unless named")
    parser.add_argument("--out", type=Path, default=Path("levers.json"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=16, help="per step")
    parser.add_argument("--seq-len", type=int, default=1024, help="of packed sequences")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--only", default="", help="names of runs, comma-separated; all else")
    parser.add_argument("--jobs", type=int, default=8, help="runs at a time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start none after")
    parser.add_argument("--run-seconds", type=float, default=200.0, help="end a run after")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="draw a model of two small layers")
    arguments = parser.parse_args()
    if unknown := set(filter(None, arguments.only.split(","))) - {case.name for case in CASES}:
        parser.error(f"unknown runs: {', '.join(sorted(unknown))}")
    if arguments.tokens is None and arguments.again is None:
        parser.error("--tokens names the rows to train on")
    if arguments.tokenize and not arguments.model:
        parser.error("--tokenize needs --model, for its tokenizer")
    if arguments.seq_len < ROW_TOKENS:
        parser.error(f"--seq-len must hold a row of {ROW_TOKENS} tokens")
    if arguments.tiny and arguments.model:
        parser.error("--tiny draws a model of its own; leave out --model")
    return arguments


def judge_again(path: Path) -> int:
    """What was measured, by the rules as they are now."""
    document = json.loads(path.read_text())
    rows = document.pop("runs")
    runs = Runs(path, {key: document[key] for key in document if key not in ("noise", "levers")})
    for row in rows:
        runs.add(row.pop("name"), row)
    print(render_table(runs.good))
    return 0


def main() -> int:
    arguments = parse_arguments()
    if arguments.again is not None:
        return judge_again(arguments.again)
    set_environment()
    if arguments.tokenize:
        return tokenize(arguments.tokenize, arguments.model, arguments.tokens)
    from _lever_runs import Setup

    cases, left = list_cases(arguments.only, arguments.device)
    head = describe_run()
    words = [word.rpartition("/")[2] for word in sys.argv[1:]]
    head["commands"] = [" ".join(["python benchmarks/measure_levers.py", *words])]
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        model = find_model(arguments.model, work / "model", is_tiny=arguments.tiny)
        setup = Setup(
            model=str(model),
            tokens=str(arguments.tokens),
            work=str(work),
            device=arguments.device,
            num_steps=arguments.steps,
            num_rows=arguments.rows,
            seq_len=arguments.seq_len,
            learning_rate=arguments.learning_rate,
        )
        head["setup"] = {
            "model": Path(arguments.model).name if arguments.model else f"{DRAWN}, drawn",
            "device": arguments.device,
            "num_steps": arguments.steps,
            "num_rows": arguments.rows,
            "learning_rate": arguments.learning_rate,
        }
        head["left_out"] = left
        runs = Runs(arguments.out, head)
        code = measure(arguments, setup, runs, cases)
    print(render_table(runs.good))
    if left:
        print(f"not here: {', '.join(left)}")
    return code


if __name__ == "__main__":
    sys.exit(main())
