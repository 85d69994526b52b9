"""Training speed of tightfit and its peers, one after another on one card, on the same tokens.

    python benchmarks/measure_throughput.py --out benchmarks/results/h200_throughput.json
    python benchmarks/measure_throughput.py --only 7b-lora,8b-lora --seconds 560 --out ...
    python benchmarks/measure_throughput.py --device cpu --tiny --steps 2 --out tiny.json

Needs trl, datasets and liger-kernel for trl's rows, bitsandbytes for QLoRA, torchtune and unsloth
for their own; `--path trl=FOLDER` names where unpacked wheels lie, for that kind of contestant
alone. Each attempt is a fresh process with a time limit; what stops it is its result. Weights are
drawn on the card and tokens at random. The file is written after each contestant; jobs not asked
for stay in it. On a card that is lent by the minute, `--plan-first` plans and traces all jobs at
once on the host's cores, and `--fork` imports trl once for all of its attempts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from _limited import run_limited
from _provenance import provenance
from _throughput_contestants import Contestant, Switches, list_contestants
from _throughput_jobs import JOBS, NUM_WARM_UP, TINY_LEN, Job, make_rows, write_folder, write_rows
from _throughput_tightfit import make_recipe, read_run, train_command
from _throughput_worker import import_trl, list_versions, run_forked
from tightfit.core.files import write_atomic
from tightfit.core.units import GIB

HERE = Path(__file__).resolve().parent
COMMAND = "benchmarks/measure_throughput.py"
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
LEAST_SECONDS = 30.0
"""With less time left, no further framework is started."""
PLAN_SECONDS = 150
PLANNERS = 12
"""At a time: a trace takes one core and some GiB of the host."""


class ContestantError(Exception):
    """Why a process brought no result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Options common to all frameworks of a call."""

    device: str
    num_steps: int
    limit_seconds: float
    end: float
    """Of the whole call, on the monotonic clock."""
    paths: dict[str, str]
    is_forked: bool
    """trl's attempts are forks of this process, which has imported its libraries."""
    work: Path

    def remaining(self) -> float:
        return min(self.limit_seconds, self.end - time.monotonic())


def make_environment(setting: Setting, kind: str, *, expandable: bool) -> dict[str, str]:
    environment = dict(os.environ) | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    for name in (ALLOCATOR, "PYTORCH_ALLOC_CONF"):
        environment.pop(name, None)
    if expandable:
        environment[ALLOCATOR] = "expandable_segments:True"
    if kind in setting.paths:
        paths = [setting.paths[kind], environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment


def run_attempt(
    setting: Setting, job: Job, contestant: Contestant, switches: Switches, name: str
) -> dict[str, Any]:
    """One peer with one set of switches."""
    work = setting.work / job.name
    asked, answered = work / f"{name}.json", work / f"{name}.answer.json"
    request = {
        "kind": contestant.kind,
        "job": asdict(job),
        "switches": asdict(switches),
        "folder": str(work / "model"),
        "device": setting.device,
        "num_steps": setting.num_steps,
    }
    asked.write_text(json.dumps(request))
    worker = str(HERE / "_throughput_worker.py")
    environment = make_environment(
        setting, contestant.kind, expandable=switches.expandable_segments
    )
    log = work / f"{name}.log"
    if setting.is_forked and contestant.kind == "trl":
        code = run_forked(asked, answered, environment, setting.remaining(), log)
    else:
        command = [sys.executable, worker, str(asked), str(answered)]
        code = run_limited(command, environment, setting.remaining(), log)
    if not answered.exists():
        raise ContestantError(f"exit {code}: {log.read_text()[-600:]}")
    answer: dict[str, Any] = json.loads(answered.read_text())
    if "fault" in answer:
        print(log.read_text()[-3000:], flush=True)
        raise ContestantError(answer["fault"])
    return answer | {"switches": asdict(switches)}


def run_peer(setting: Setting, job: Job, contestant: Contestant) -> dict[str, Any]:
    """The first set of options that runs, with the errors of the others."""
    tried: list[dict[str, Any]] = []
    for number, switches in enumerate(contestant.attempts):
        if tried and setting.remaining() < LEAST_SECONDS:
            tried.append({"switches": asdict(switches), "fault": "not tried: no time was left"})
            continue
        try:
            name = f"{contestant.name}-{number}"
            return run_attempt(setting, job, contestant, switches, name) | {"tried": tried}
        except (ContestantError, TimeoutError) as problem:
            tried.append({"switches": asdict(switches), "fault": str(problem)})
    return {"fault": tried[-1]["fault"], "tried": tried}


def write_recipe(setting: Setting, job: Job, contestant: Contestant) -> tuple[Path, dict[str, Any]]:
    """The recipe's file, beside which its run's folder lies, and what it says."""
    work = setting.work / job.name
    path = work / f"{contestant.name}-run.yaml"
    recipe = make_recipe(
        job,
        folder=work / "model",
        data=work / "rows.jsonl",
        run=path.with_suffix(""),
        device=setting.device,
        num_steps=setting.num_steps,
    )
    if contestant.asked:
        recipe["strategy"] = contestant.asked
    path.write_text(json.dumps(recipe))
    return path, recipe


def run_tightfit(setting: Setting, job: Job, contestant: Contestant) -> dict[str, Any]:
    """`tightfit train` on a recipe; planning is not timed, as building is not for the others."""
    path, recipe = write_recipe(setting, job, contestant)
    run, log = path.with_suffix(""), path.with_suffix(".log")
    environment = make_environment(setting, "tightfit", expandable=False)
    try:
        code = run_limited(train_command(path, job), environment, setting.remaining(), log)
        if code:
            raise ContestantError(f"exit {code}: {log.read_text()[-1500:]}")
    except (ContestantError, TimeoutError) as problem:
        worker_log = run / "log.txt"
        if worker_log.exists():
            print(worker_log.read_text()[-3000:], flush=True)
        return {"fault": str(problem)}
    return read_run(run, device=setting.device) | {
        "recipe": {
            name: value for name, value in recipe.items() if name not in ("model", "data", "output")
        }
    }


def plan_first(setting: Setting, jobs: list[Job]) -> None:
    """Rows encoded and plans traced, which tightfit keeps, on all cores at once."""

    def plan(job: Job) -> str:
        contestants = list_contestants(job, device=setting.device)
        ours = next(one for one in contestants if one.name == "tightfit")
        path, _ = write_recipe(setting, job, ours)
        environment = make_environment(setting, "tightfit", expandable=False)
        log = setting.work / job.name / "plan.log"
        command = [*train_command(path, job), "--dry-run"]
        try:
            code = run_limited(command, environment, PLAN_SECONDS, log)
        except TimeoutError as problem:
            return f"{job.name}: {problem}"
        return f"{job.name}: exit {code}{log.read_text()[-800:] if code else ''}"

    start = time.monotonic()
    with ThreadPoolExecutor(PLANNERS) as threads:
        for line in threads.map(plan, jobs):
            print(f"{time.monotonic() - start:6.1f} s  planned {line}", flush=True)


def prepare_job(setting: Setting, job: Job, *, tiny: bool) -> None:
    """The job's folder with the model's config and the rows."""
    work = setting.work / job.name
    work.mkdir()
    num_words = write_folder(job, work / "model", tiny=tiny)
    rows = make_rows(job, num_steps=NUM_WARM_UP + setting.num_steps, num_words=num_words)
    write_rows(rows, work / "rows.jsonl", objective=job.objective)


def run_job(
    setting: Setting, job: Job, names: list[str], *, before: dict[str, Any], keep: Any
) -> dict[str, Any]:
    """Every framework of one job; `keep` is called with all results so far after each.

    `before`: earlier results, which stay unless their contestant runs again.
    """
    found = dict(before)
    for contestant in list_contestants(job, device=setting.device):
        if names and contestant.name not in names:
            continue
        if setting.remaining() < LEAST_SECONDS:
            found.setdefault(contestant.name, {"fault": "not started: no time was left"})
            continue
        start = time.monotonic()
        is_ours = contestant.kind == "tightfit"
        run = run_tightfit if is_ours else run_peer
        row = run(setting, job, contestant)
        found[contestant.name] = row | {
            "process_seconds": round(time.monotonic() - start, 1),
            "about": provenance(COMMAND) | list_versions() | row.get("about", {}),
        }
        print(describe(job, contestant.name, found[contestant.name]), flush=True)
        keep(found)
    return found


def describe(job: Job, name: str, row: dict[str, Any]) -> str:
    start = f"{job.name:15} {name:18} {row['process_seconds']:6.1f} s"
    if "fault" in row:
        return f"{start}  failed: {row['fault'][-300:]}"
    peak = row.get("peak_allocated_bytes")
    memory = "" if peak is None else f"  {peak / GIB:6.1f} GiB"
    losses = " ".join(f"{loss:.3f}" for loss in row["first_losses"][:3])
    speed = f"{row['tokens_per_second']:9.0f} tokens/s  {row['step_seconds']:.4f} s/step"
    return f"{start}  {speed}{memory}  losses {losses}"


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="file; other jobs in it stay")
    parser.add_argument(
        "--only", default=",".join(JOBS), help="jobs, with commas; the default is all"
    )
    parser.add_argument("--contestants", default="", help="names, with commas; the default is all")
    parser.add_argument("--steps", type=int, default=20, help="measured, after the warm-up")
    parser.add_argument("--seconds", type=float, default=1e9, help="limit of the whole call")
    parser.add_argument("--limit", type=float, default=240, help="seconds for one attempt")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="two small layers and short rows")
    parser.add_argument(
        "--path",
        action="append",
        default=[],
        metavar="KIND=FOLDER",
        help="where its unpacked wheels lie",
    )
    parser.add_argument("--plan-first", action="store_true", help="plan all jobs before the first")
    parser.add_argument("--fork", action="store_true", help="import trl's libraries once")
    parser.add_argument("--logs", type=Path, help="folder for what the contestants said")
    options = parser.parse_args()
    unknown = [name for name in options.only.split(",") if name not in JOBS]
    if unknown:
        parser.error(f"no such job: {', '.join(unknown)}; there are {', '.join(JOBS)}")
    return options


def keep_logs(work: Path, folder: Path | None, job: str) -> None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for log in sorted((work / job).glob("*.log")):
            (folder / f"{job}.{log.name}").write_text(log.read_text()[-20_000:])


def main() -> int:
    """1 where a requested framework has no result."""
    options = read_options()
    end = time.monotonic() + options.seconds
    document: dict[str, Any] = {"jobs": {}}
    if options.out.exists():
        document = json.loads(options.out.read_text())
    paths = dict(item.partition("=")[::2] for item in options.path)
    names = [name for name in options.contestants.split(",") if name]
    jobs = [JOBS[name] for name in options.only.split(",")]
    if options.tiny:
        jobs = [replace(job, seq_len=TINY_LEN) for job in jobs]
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(
            device=options.device,
            num_steps=options.steps,
            limit_seconds=options.limit,
            end=end,
            paths={kind: str(Path(path).resolve()) for kind, path in paths.items()},
            is_forked=options.fork,
            work=Path(folder),
        )
        for job in jobs:
            prepare_job(setting, job, tiny=options.tiny)
        if options.plan_first:
            plan_first(setting, jobs)
        if options.fork:
            import_trl(setting.device, setting.paths.get("trl"))
        for job in jobs:
            before = document["jobs"].get(job.name, {}).get("contestants", {}) if names else {}

            def keep(found: dict[str, Any], *, job: Job = job) -> None:
                document["jobs"][job.name] = {"job": asdict(job), "contestants": found}
                write_atomic(options.out, json.dumps(document, indent=1) + "\n")

            keep(run_job(setting, job, names, before=before, keep=keep))
            keep_logs(setting.work, options.logs, job.name)
    found = (document["jobs"][name]["contestants"] for name in options.only.split(","))
    asked = [rows[name] for rows in found for name in names or rows if name in rows]
    return int(any("fault" in row for row in asked))


if __name__ == "__main__":
    sys.exit(main())
