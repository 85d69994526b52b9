"""A worker that trains nothing but keeps the contract: files, exit codes, signals.

`behaviour.json` in the run folder says what it does at which step:
{"num_steps": 6, "at": {"3": "oom"}, "seconds_per_step": 0.02, "lost_seconds": 60}
A word with `once:` before it happens only at the first start.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import Any

from tightfit.runs.metrics import EventRecord, StepRecord, append_record, drop_after_step
from tightfit.runs.run_folder import RunFolder, RunState, RunStatus

LOST_SECONDS = 60.0
"""A collective fails a while after a peer is gone: long enough for one that only pauses."""


class StandIn:
    def __init__(self, folder: Path) -> None:
        self.run = RunFolder(path=folder)
        self.behaviour = read_behaviour(folder)
        self.num_steps = int(self.behaviour["num_steps"])
        self.is_asked = False
        self.saved = folder / "saved_step"
        starts = folder / "starts"
        self.num_starts = int(starts.read_text()) + 1 if starts.exists() else 1
        starts.write_text(str(self.num_starts))

    def tell(self, status: RunStatus, step: int, **more: str | int) -> None:
        reported = {"status": status, "step": step, "num_steps": self.num_steps, "pid": os.getpid()}
        now = datetime.now(timezone.utc).isoformat()
        self.run.write_state(RunState.model_validate({**reported, **more, "updated_at": now}))

    def hear(self, _signum: int, _frame: FrameType | None) -> None:
        self.is_asked = True

    def work(self) -> int:
        if self.behaviour.get("hears", True):
            if "TORCHELASTIC_RUN_ID" not in os.environ:  # torchrun's word for a restart
                signal.signal(signal.SIGTERM, self.hear)
            signal.signal(signal.SIGUSR1, self.hear)
        else:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        first = int(self.saved.read_text()) if self.saved.exists() else 0
        drop_after_step(self.run.metrics_path, first)
        print(f"stand-in starts at step {first}", flush=True)
        self.tell(RunStatus.RUNNING, first)
        self.meet()
        if first:
            text = f"resumed at step {first}"
            append_record(self.run.metrics_path, EventRecord(step=first, text=text))
        for step in range(first + 1, self.num_steps + 1):
            code = self.step(step)
            if code is not None:
                return code
        self.tell(RunStatus.FINISHED, self.num_steps, exit_code=0)
        return 0

    def meet(self) -> None:
        """As the first collective: a peer that came when all is over would wait for ever."""
        beat = self.run.path / "beat"
        beat.unlink(missing_ok=True)
        end = time.monotonic() + find_patience(self.behaviour)
        while has_peer() and not beat.exists() and time.monotonic() < end:
            time.sleep(0.02)

    def step(self, step: int) -> int | None:
        time.sleep(float(self.behaviour.get("seconds_per_step", 0.01)))
        word = str(self.behaviour.get("at", {}).get(str(step), ""))
        if word.startswith("once:"):
            word = word.removeprefix("once:") if self.num_starts == 1 else ""
        if word == "oom":
            self.tell(RunStatus.OUT_OF_MEMORY, step - 1, exit_code=76, problem="out of memory")
            return 76
        if word == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "abort":
            os.kill(os.getpid(), signal.SIGABRT)
        if word == "refused":
            print("OpenBLAS error: Memory allocation still failed after 10 retries, giving up.")
            sys.exit(1)
        if word == "bug":
            raise ValueError("the stand-in is broken")
        if word == "import":
            raise ModuleNotFoundError("No module named 'peft'")
        if word == "nan":
            self.tell(RunStatus.FAILED, step, exit_code=4, problem="loss is nan", remedy="lower it")
            return 4
        if is_silent(self.run.path / "beat", find_patience(self.behaviour)):
            problem = "Another process of the job was lost."
            self.tell(RunStatus.FAILED, step - 1, exit_code=1, problem=problem)
            return 1
        append_record(self.run.metrics_path, make_step(step))
        self.tell(RunStatus.RUNNING, step)
        if self.is_asked:
            self.saved.write_text(str(step))
            self.tell(RunStatus.STOPPED, step, exit_code=75)
            return 75
        if step % int(self.behaviour.get("save_every", 2)) == 0:
            self.saved.write_text(str(step))
        return None


def make_step(step: int) -> StepRecord:
    return StepRecord(
        step=step,
        epoch=step / 10,
        loss=3.0 / step,
        learning_rate=1e-4,
        grad_norm=1.0,
        num_tokens=1000,
        num_trained_tokens=400,
        seconds=0.5,
        data_wait_seconds=0.01,
        tokens_per_second=2000.0,
        mfu_fraction=0.31,
        gpu_allocated_bytes=8 * 2**30,
        gpu_reserved_bytes=9 * 2**30,
        host_bytes=2**30,
    )


def read_behaviour(folder: Path) -> dict[str, Any]:
    behaviour: dict[str, Any] = json.loads((folder / "behaviour.json").read_text())
    return behaviour


def find_patience(behaviour: dict[str, Any]) -> float:
    return float(behaviour.get("lost_seconds", LOST_SECONDS))


def has_peer() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_silent(path: Path, seconds: float) -> bool:
    """Whether the peer that touches this file is gone; where there is none, it is not missed."""
    return has_peer() and path.exists() and time.time() - path.stat().st_mtime > seconds


def keep_company(run: RunFolder) -> int:
    """What the other ranks do: be there until the first one has ended, or is lost."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    parent, started = os.getppid(), time.time()
    patience = find_patience(read_behaviour(run.path))
    while os.getppid() == parent:
        (run.path / "beat").touch()
        is_fresh = run.state_path.exists() and run.state_path.stat().st_mtime > started
        if is_fresh and run.read_state().status is not RunStatus.RUNNING:
            return 0
        if is_fresh and is_silent(run.state_path, patience):
            return 1
        time.sleep(0.05)
    return 1


def main(argv: list[str]) -> int:
    if int(os.environ.get("RANK", "0")) != 0:
        return keep_company(RunFolder(path=Path(argv[0])))
    return StandIn(Path(argv[0])).work()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
