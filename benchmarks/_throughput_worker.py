"""One attempt of one peer in a fresh process: reads a request, writes an answer, both JSON.

python benchmarks/_throughput_worker.py request.json answer.json
"""

from __future__ import annotations

import json
import platform
import sys
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from _throughput_contestants import Switches
from _throughput_jobs import NUM_WARM_UP, Job, make_rows

PACKAGES = (
    *("torch", "triton", "transformers", "peft", "accelerate", "trl", "datasets"),
    *("liger-kernel", "bitsandbytes", "unsloth", "unsloth_zoo", "torchtune", "torchao"),
)


def run_request(request: dict[str, Any]) -> dict[str, Any]:
    job, switches = Job(**request["job"]), Switches(**request["switches"])
    folder = Path(request["folder"])
    num_words = json.loads((folder / "config.json").read_text())["vocab_size"]
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


def main() -> int:
    request = json.loads(Path(sys.argv[1]).read_text())
    answer: dict[str, Any]
    try:
        answer = run_request(request) | {"about": describe_machine(request["device"])}
    except Exception as error:  # whatever stops a contestant is its result
        traceback.print_exc()
        answer = {"fault": f"{type(error).__name__}: {error}"[:600]}
    Path(sys.argv[2]).write_text(json.dumps(answer))
    return 1 if "fault" in answer else 0


if __name__ == "__main__":
    sys.exit(main())
