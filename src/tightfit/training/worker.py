"""`python -m tightfit.training.worker RUN`: one process of a job, alone or under torchrun."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from tightfit.core.errors import EXIT_BUG, EXIT_OUT_OF_MEMORY, EXIT_REQUEUE, SetupError, UserError
from tightfit.core.strategy import Method
from tightfit.core.training import Training
from tightfit.planning.plan import Plan
from tightfit.runs.run_folder import RunFolder, RunState, RunStatus
from tightfit.runtime.libraries import fast_imports

_FIRST_ERROR_SECONDS = 3.0
"""How long a rank that lost another waits for that one to write the reason."""


def main(argv: list[str]) -> int:
    """Run or resume the job of a run folder; the exit code is in docs/exit-codes.md."""
    from tightfit.runtime.libraries import silence_libraries

    silence_libraries()
    signals = StopSignals()
    signals.listen()
    run = RunFolder(path=Path(argv[0]))
    attempt = _Attempt(run, signals)
    try:
        code = attempt.run()
    except UserError as error:
        return attempt.fail(error.problem, error.remedy, error.exit_code)
    except BaseException as error:
        from tightfit.runtime.devices import is_out_of_memory

        if not is_out_of_memory(error):
            return attempt.fail_unexpected(error)
        error.__traceback__ = None  # its frames hold the tensors that filled the GPU
    else:
        return code
    return attempt.run_out_of_memory()


class StopSignals:
    """Records that a signal asked the run to save and stop: SIGTERM, SIGINT or Slurm's SIGUSR1."""

    def __init__(self) -> None:
        self.is_received = False

    def listen(self) -> None:
        """Install the handlers.

        Under torchrun SIGTERM is ignored: torchrun sends it to restart its processes after one is
        lost, which is no request to stop. The launcher sends SIGUSR1 for a real one, also when a
        batch system sends SIGTERM to every process at once.
        """
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._record)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _record(self, _number: int, _frame: FrameType | None) -> None:
        self.is_received = True


class _Attempt:
    """One start of the worker: what it has built so far, and how it ends."""

    def __init__(self, run: RunFolder, signals: StopSignals) -> None:
        self._run = run
        self._signals = signals
        self._loop: Any = None
        self._state_before = self._read_state()

    def run(self) -> int:
        plan, training = _read_plan(self._run)
        with fast_imports([plan.strategy]):
            from transformers import AutoModelForCausalLM  # noqa: F401

            from tightfit.training.artefact import write_artefact
            from tightfit.training.build import apply_memory_limit, build_loop
            from tightfit.training.distributed import destroy_dist_context, init_dist_context

            if plan.strategy.method is Method.LORA:
                import peft  # noqa: F401
        context = init_dist_context(on_cpu=plan.hardware.node.gpu.is_cpu)
        apply_memory_limit(context.device)
        if context.is_first:
            _log_staged_copy(training)
        loop = self._loop = build_loop(
            self._run, plan, training, context, lambda: self._signals.is_received
        )
        is_finished = loop.train()
        if is_finished and training.keep_result:
            write_artefact(self._run, loop.engine, plan, context)
        code = 0 if is_finished else EXIT_REQUEUE
        status = RunStatus.FINISHED if is_finished else RunStatus.STOPPED
        loop.logger.set_state(status, loop.step, exit_code=code)
        loop.logger.close()
        destroy_dist_context()
        return code

    def run_out_of_memory(self) -> int:
        """Save the progress if this rank holds all of it, and report."""
        if self._loop is not None:
            self._free()
            self._keep_progress()
        problem = f"Out of memory after step {self._count_saved()}."
        remedy = "tightfit train goes on with a smaller plan by itself; start it again"
        return self.fail(problem, remedy, EXIT_OUT_OF_MEMORY, status=RunStatus.OUT_OF_MEMORY)

    def _free(self) -> None:
        import torch

        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _keep_progress(self) -> None:
        """Save alone, unless the state is sharded over ranks or half updated."""
        loop = self._loop
        is_whole = not loop.plan.strategy.sharding.shards_optimizer
        if is_whole and not loop.engine.is_updating and loop.step > loop.saved_step:
            loop.engine.optimizer.zero_grad(set_to_none=True)
            try:
                loop.save(alone=True)
            except Exception:
                traceback.print_exc()

    def fail_unexpected(self, error: BaseException) -> int:
        from tightfit.training.checkpoint import find_disk_error

        cause = find_disk_error(error)
        if cause is not None:
            return self._fail_on_disk(cause)
        traceback.print_exception(error)
        text = str(error).strip().splitlines()
        where = f"{type(error).__name__}: {text[0] if text else 'no message'}"
        if _is_lost_rank(error):
            time.sleep(_FIRST_ERROR_SECONDS)
            return self.fail(
                f"Another process of the job was lost ({where[:200]}).",
                "start the same command again: it resumes from the last checkpoint",
                1,
            )
        remedy = f"see {self._run.log_path}; it is a bug worth reporting"
        return self.fail(f"Training failed with {where[:300]}.", remedy, EXIT_BUG)

    def _fail_on_disk(self, cause: OSError) -> int:
        """A disk error outside of a checkpoint: in the result or a tracker's file."""
        for partial in self._run.path.glob("*.partial"):
            shutil.rmtree(partial, ignore_errors=True)  # to make room for state.json
        saved = self._count_saved()
        kept = f"The checkpoint of step {saved} is intact" if saved else "Nothing was saved yet"
        return self.fail(
            f"Cannot write in {self._run.path}: {cause.strerror}. {kept}.",
            f"make room (df -h {self._run.path}), then start the same command again",
            SetupError.exit_code,
        )

    def fail(
        self, problem: str, remedy: str, code: int, *, status: RunStatus = RunStatus.FAILED
    ) -> int:
        """Print the reason, and write it unless another rank was first."""
        from tightfit.training.run_logger import now

        print(f"error: {problem}\n  try: {remedy}", file=sys.stderr, flush=True)
        if self._is_reported():
            return code
        with suppress(UserError):  # a full disk: the exit code must do
            self._run.write_state(
                RunState(
                    status=status,
                    step=self._count_saved(),
                    num_steps=self._count_steps(),
                    problem=problem,
                    remedy=remedy,
                    exit_code=code,
                    pid=os.getpid(),
                    host=socket.gethostname(),
                    updated_at=now(),
                )
            )
        return code

    def _count_saved(self) -> int:
        """Steps in the newest checkpoint, loaded by this attempt or not."""
        if self._loop is not None:
            return max(0, int(self._loop.saved_step))
        from tightfit.training.checkpoint import find_checkpoint, read_progress

        try:
            folder = find_checkpoint(self._run)
        except UserError:  # none is complete, which may be the reason being written
            return 0
        return 0 if folder is None else read_progress(folder).step

    def _count_steps(self) -> int:
        if self._loop is not None:
            return int(self._loop.num_steps)
        return 0 if self._state_before is None else self._state_before.num_steps

    def _is_reported(self) -> bool:
        """Whether another rank of this attempt has written a reason; older ones do not count."""
        state = self._read_state()
        is_final = state and state.status in (RunStatus.FAILED, RunStatus.OUT_OF_MEMORY)
        return bool(is_final) and state != self._state_before

    def _read_state(self) -> RunState | None:
        try:
            return self._run.read_state()
        except UserError:
            return None


def _read_plan(run: RunFolder) -> tuple[Plan, Training]:
    plan = run.read_plan()
    if plan.training is None:
        raise UserError(
            f"{run.plan_path} says what would run, but not on which data.",
            remedy="tightfit train RECIPE.YAML",
        )
    return plan, plan.training


def _log_staged_copy(training: Training) -> None:
    """Log a staged copy that the weights are read from."""
    from tightfit.runtime.staged import describe_use, find_staged

    copy = find_staged(Path(training.model_path))
    if copy is not None:
        print(describe_use(copy), flush=True)


def _is_lost_rank(error: BaseException) -> bool:
    words = ("connection closed", "connection reset", "nccl", "gloo", "broken pipe", "timed out")
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in words)


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # A normal exit would wait for threads and ranks that may hang.
    os._exit(exit_code)
