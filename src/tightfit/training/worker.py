"""`python -m tightfit.training.worker RUN`: one process of a job, alone or under torchrun.

Starts the loop of `loop.py`, writes the result, and reports every failure in state.json.
"""

from __future__ import annotations

import gc
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tightfit.core.errors import EXIT_BUG, EXIT_OUT_OF_MEMORY, EXIT_REQUEUE, SetupError, UserError
from tightfit.core.files import describe_write_error
from tightfit.core.secrets import hide_secrets
from tightfit.core.settings import Method
from tightfit.core.strategy import MEMORY_VARIABLE
from tightfit.core.text import disarm
from tightfit.runs.run_folder import RunFolder, RunState, RunStatus
from tightfit.runtime.compile_cache import keep_compiled_code
from tightfit.runtime.libraries import fast_imports, silence_libraries

if TYPE_CHECKING:
    import torch

    from tightfit.training.loop import TrainLoop

_FIRST_ERROR_SECONDS = 3.0
"""How long a rank that lost another waits for that one to write the reason."""
_LOST_RANK_WORDS = (
    "connection closed",
    "connection reset",
    "nccl",
    "gloo",
    "broken pipe",
    "timed out",
)


def main(argv: list[str]) -> int:
    """Run or resume the job of a run folder; the exit code is in docs/exit-codes.md."""
    silence_libraries()
    worker = Worker(RunFolder(path=Path(argv[0])), listen_for_stop())
    try:
        return worker.train()
    except UserError as error:
        return worker.fail(error.problem, error.remedy, error.exit_code)
    except BaseException as error:
        from tightfit.runtime.libraries import is_out_of_memory

        if not is_out_of_memory(error):
            return worker.fail_unexpected(error)
        error.__traceback__ = None  # its frames hold the tensors that filled the GPU
    return worker.fail_out_of_memory()


def listen_for_stop() -> Callable[[], bool]:
    """Whether a signal has asked the run to save and stop: SIGTERM, SIGINT or Slurm's SIGUSR1.

    Under torchrun SIGTERM is ignored: torchrun sends it to restart its processes after one is
    lost, which is no request to stop. The launcher sends SIGUSR1 for a real one, also when a batch
    system sends SIGTERM to every process at once.
    """
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, lambda number, _frame: received.append(number))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return lambda: bool(received)


class Worker:
    """One start of a run: the loop it has built so far, and how it ends."""

    def __init__(self, run: RunFolder, is_stop_requested: Callable[[], bool]) -> None:
        self._run = run
        self._is_stop_requested = is_stop_requested
        self._loop: TrainLoop | None = None
        self._state_before = self._read_state()

    def train(self) -> int:
        """Build the loop, train, write the result; returns the exit code."""
        plan = self._run.read_plan()
        if plan.training is None:
            raise UserError(
                f"{self._run.plan_path} says what would run, but not on which data.",
                remedy="tightfit train RECIPE.YAML",
            )
        keep_compiled_code()
        with fast_imports([plan.strategy]):
            from transformers import AutoModelForCausalLM  # noqa: F401

            from tightfit.runtime.staged import describe_use, find_staged
            from tightfit.training.checkpoint import write_artefact
            from tightfit.training.distributed import destroy_dist_context, init_dist_context
            from tightfit.training.loop import TrainLoop

            if plan.strategy.method is Method.LORA:
                import peft  # noqa: F401
        context = init_dist_context(on_cpu=plan.hardware.node.gpu.is_cpu)
        _apply_memory_limit(context.device)
        copy = find_staged(Path(plan.training.model_path)) if context.is_first else None
        if copy is not None:
            print(describe_use(copy), flush=True)
        loop = self._loop = TrainLoop(self._run, plan, context, self._is_stop_requested)
        is_finished = loop.train()
        if is_finished and plan.training.keep_result:
            write_artefact(self._run, loop.engine, plan, context)
        code = 0 if is_finished else EXIT_REQUEUE
        status = RunStatus.FINISHED if is_finished else RunStatus.STOPPED
        loop.logger.set_state(status, loop.step, exit_code=code)
        loop.logger.close()
        destroy_dist_context()
        return code

    def fail_out_of_memory(self) -> int:
        """Save the progress if this rank holds all of it, and report."""
        loop = self._loop
        if loop is not None:
            import torch

            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            # No rank holds all of a sharded state, and an update that ran out left half of one.
            is_whole = not loop.plan.strategy.sharding.shards_optimizer
            if is_whole and not loop.engine.is_updating and loop.step > loop.saved_step:
                loop.engine.optimizer.zero_grad(set_to_none=True)
                try:
                    loop.save(alone=True)
                except Exception:
                    traceback.print_exc()
        return self.fail(
            f"Out of memory after step {self._count_saved()}.",
            "tightfit train goes on with a smaller plan by itself; start it again",
            EXIT_OUT_OF_MEMORY,
            status=RunStatus.OUT_OF_MEMORY,
        )

    def fail_unexpected(self, error: BaseException) -> int:
        from tightfit.training.checkpoint import find_disk_error

        cause = find_disk_error(error)
        if cause is not None:  # outside of a checkpoint: in the result or a tracker's file
            for partial in self._run.path.glob("*.partial"):
                shutil.rmtree(partial, ignore_errors=True)  # to make room for state.json
            saved = self._count_saved()
            kept = f"The checkpoint of step {saved} is intact" if saved else "Nothing was saved yet"
            return self.fail(
                f"Cannot write in {self._run.path}: "
                f"{describe_write_error(cause, self._run.path)}. {kept}.",
                f"make room (df -h {self._run.path}), then start the same command again",
                SetupError.exit_code,
            )
        sys.stderr.write(hide_secrets("".join(traceback.format_exception(error))))
        text = hide_secrets(str(error)).strip().splitlines()
        where = f"{type(error).__name__}: {text[0] if text else 'no message'}"
        message = str(error).lower()
        if isinstance(error, RuntimeError) and any(word in message for word in _LOST_RANK_WORDS):
            time.sleep(_FIRST_ERROR_SECONDS)
            return self.fail(
                f"Another process of the job was lost ({where[:200]}).",
                "start the same command again: it resumes from the last checkpoint",
                1,
            )
        remedy = f"see {self._run.log_path}; it is a bug worth reporting"
        return self.fail(f"Training failed with {where[:300]}.", remedy, EXIT_BUG)

    def fail(
        self, problem: str, remedy: str, code: int, *, status: RunStatus = RunStatus.FAILED
    ) -> int:
        """Print the reason, and write it unless another rank of this start was first."""
        from tightfit.training.run_logger import make_state

        print(disarm(f"error: {problem}\n  try: {remedy}"), file=sys.stderr, flush=True)
        now, before = self._read_state(), self._state_before
        is_final = now is not None and now.status in (RunStatus.FAILED, RunStatus.OUT_OF_MEMORY)
        if is_final and now != before:
            return code
        num_steps = before.num_steps if before is not None else 0
        if self._loop is not None:
            num_steps = self._loop.num_steps
        with suppress(UserError):  # a full disk: the exit code must do
            self._run.write_state(
                make_state(
                    status,
                    self._count_saved(),
                    num_steps,
                    exit_code=code,
                    problem=problem,
                    remedy=remedy,
                )
            )
        return code

    def _count_saved(self) -> int:
        """Steps in the newest checkpoint, loaded by this process or not."""
        if self._loop is not None:
            return max(0, self._loop.saved_step)
        from tightfit.training.checkpoint import find_checkpoint, read_progress

        try:
            folder = find_checkpoint(self._run)
        except UserError:  # none is complete, which may be the reason being written
            return 0
        return 0 if folder is None else read_progress(folder).step

    def _read_state(self) -> RunState | None:
        try:
            return self._run.read_state()
        except UserError:
            return None


def _apply_memory_limit(device: torch.device) -> None:
    """Cap this process's memory at the limit in the environment, if one is set there."""
    limit = int(os.environ.get(MEMORY_VARIABLE) or 0)
    if not limit:
        return
    if device.type == "cuda":
        import torch

        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    else:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # A normal exit would wait for threads and ranks that may hang.
    os._exit(exit_code)
