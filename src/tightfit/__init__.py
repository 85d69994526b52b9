"""Predict, run and check fine-tuning on the GPUs you have.

    import tightfit
    tightfit.plan("Llama-3.1-8B", on="2xRTX-4090").best

A verb loads when it is first used: `import tightfit` alone needs neither pydantic nor torch.
"""

import sys

if sys.argv[:1] == ["-m"]:  # `python -m tightfit...` looks for it, with the current folder first
    from tightfit.core.import_path import drop_current_folder

    drop_current_folder()

from importlib import import_module
from typing import TYPE_CHECKING

from tightfit.core.packages import __version__

if TYPE_CHECKING:
    from tightfit.api.bench import bench
    from tightfit.api.calibrate import calibrate
    from tightfit.api.cancel import cancel
    from tightfit.api.chat import chat, load
    from tightfit.api.compare import compare
    from tightfit.api.convert import convert
    from tightfit.api.estimate import estimate
    from tightfit.api.evaluate import evaluate, evaluate_suite
    from tightfit.api.farm import farm
    from tightfit.api.generate import generate
    from tightfit.api.init import init
    from tightfit.api.merge import merge
    from tightfit.api.plan import buy, longest, plan
    from tightfit.api.preflight import preflight
    from tightfit.api.prepare import prepare
    from tightfit.api.quantize import quantize
    from tightfit.api.runs import list_runs, read_runs
    from tightfit.api.serve import serve
    from tightfit.api.stage import stage
    from tightfit.api.submit import submit
    from tightfit.api.train import train
    from tightfit.api.ui import ui
    from tightfit.api.verify import verify
    from tightfit.core.errors import UserError

_HOMES = {
    "UserError": "core.errors",
    "buy": "api.plan",
    "evaluate_suite": "api.evaluate",
    "longest": "api.plan",
    "list_runs": "api.runs",  # not `runs`: that is a package here
    "load": "api.chat",
    "read_runs": "api.runs",
}
"""The modules of names that do not stand in `api.<name>`."""

__all__ = [
    "UserError",
    "__version__",
    "bench",
    "buy",
    "calibrate",
    "cancel",
    "chat",
    "compare",
    "convert",
    "estimate",
    "evaluate",
    "evaluate_suite",
    "farm",
    "generate",
    "init",
    "list_runs",
    "load",
    "longest",
    "merge",
    "plan",
    "preflight",
    "prepare",
    "quantize",
    "read_runs",
    "serve",
    "stage",
    "submit",
    "train",
    "ui",
    "verify",
]


def __getattr__(name: str) -> object:
    if name not in __all__ or name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOMES.get(name, f'api.{name}')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
