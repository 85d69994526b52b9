"""One attempt of one peer in a fresh process: reads a request, writes an answer, both JSON.

python benchmarks/_throughput_worker.py request.json answer.json
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from _throughput_contestants import Switches
from _throughput_jobs import NUM_WARM_UP, Job, make_rows
from measure_training import count_words

PACKAGES = (
    *("torch", "triton", "transformers", "peft", "accelerate", "trl", "datasets"),
    *("liger-kernel", "bitsandbytes", "unsloth", "unsloth_zoo", "torchtune", "torchao"),
)


def run_request(request: dict[str, Any]) -> dict[str, Any]:
    job, switches = Job(**request["job"]), Switches(**request["switches"])
    folder = Path(request["folder"])
    num_words = count_words(json.loads((folder / "config.json").read_text()))
    num_steps = request["num_steps"]
    rows = make_rows(job, num_steps=NUM_WARM_UP + num_steps, num_words=num_words)
    named = {"rows": rows, "folder": folder, "device": request["device"], "num_steps": num_steps}
    if request["kind"] == "trl":
        from _throughput_trl import run_trl

        return run_trl(job, switches, **named)
    if request["kind"] == "torch":
        from _throughput_torch import run_torch

        return run_torch(job, switches, **named)
    if request["kind"] == "torchtune":
        from _throughput_torchtune import run_torchtune

        return run_torchtune(job, switches, **named)
    from _throughput_unsloth import run_unsloth

    return run_unsloth(job, switches, **named)


def describe_machine(device: str) -> dict[str, str]:
    import torch

    cpu = f"{platform.system()} {platform.machine()}"
    return {"device": torch.cuda.get_device_name() if device != "cpu" else cpu} | list_versions()


def list_versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def answer_request(asked: Path, answered: Path) -> int:
    """The exit code: whatever stops a contestant is its result."""
    request = json.loads(asked.read_text())
    answer: dict[str, Any]
    try:
        answer = run_request(request) | {"about": describe_machine(request["device"])}
    except Exception as error:
        traceback.print_exc()
        answer = {"fault": f"{type(error).__name__}: {error}"[:600]}
    answered.write_text(json.dumps(answer))
    return 1 if "fault" in answer else 0


def import_trl(device: str, path: str | None) -> None:
    """All that trl's attempts import."""
    if path:
        sys.path.insert(0, path)
    from measure_trace import known_capability, set_environment

    set_environment()  # asking for a device must not start CUDA, which no fork could use
    with known_capability(device):
        import peft  # noqa: F401
        import transformers  # noqa: F401
        from trl import SFTConfig, SFTTrainer  # noqa: F401

        import _throughput_trl  # noqa: F401

        if device == "cuda":
            import liger_kernel.transformers  # noqa: F401
    with known_capability(device):  # a fork that cannot use the card would end every attempt
        pass


def run_forked(
    asked: Path, answered: Path, environment: Mapping[str, str], limit: float, log: Path
) -> int:
    """As `run_limited`, in a fork of this process, which `import_trl` has made ready."""
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setsid()
            stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(stream, 1)
            os.dup2(stream, 2)
            os.environ.clear()
            os.environ.update(environment)
            code = answer_request(asked, answered)
        finally:
            sys.stdout.flush()
            os._exit(code)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise TimeoutError(f"not done after {limit:.0f} s")


def main() -> int:
    return answer_request(Path(sys.argv[1]), Path(sys.argv[2]))


if __name__ == "__main__":
    sys.exit(main())
