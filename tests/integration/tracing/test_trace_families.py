"""The plan that a GPU would get is traced, for every family with a record and a tiny model."""

from __future__ import annotations

import pytest

from tightfit.hardware.resolve import resolve_hardware
from tightfit.models.config import read_config
from tightfit.planning.request import JobRequest
from tightfit.planning.search import search
from tightfit.trace.caching_allocator import find_peak
from tightfit.training.tracing.job import TraceJob
from tightfit.training.tracing.trace import record_job
from tiny_configs import TINY, tiny_config

pytest.importorskip("peft", reason="pip install 'tightfit[train]'")

CARD = resolve_hardware("H100-SXM")
CAPABILITY = (9, 0)
# GPT-BigCode's modelling file uses torch.jit.script, which torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

MIXTURES = ("gpt_oss", "mixtral", "qwen3_moe", "deepseek_v3", "glm4_moe")


@pytest.mark.parametrize(
    ("model_type", "method"),
    [*((name, "lora") for name in TINY), *((name, "full") for name in MIXTURES)],
)
def test_the_first_plan_is_traced(model_type: str, method: str) -> None:
    config = tiny_config(model_type)
    spec = read_config(config, name=model_type, source="a tiny config")
    request = JobRequest(spec=spec, method=method, seq_len=32, effective_batch=4)
    [first, *_] = search(request, CARD).plans
    # What is compiled is not traced: the same plan without it.
    strategy = first.strategy.model_copy(update={"compile": False})
    job = TraceJob(config=config, strategy=strategy, compute_capability=CAPABILITY, stages=())
    recording = record_job(job)

    sizes = [one.num_bytes for one in recording.allocations]
    assert find_peak(sizes, recording.events)[0] > 2 * spec.num_params
    assert recording.operations is not None, "an operation was not understood"
