"""The plan that a GPU would get is traced, for every family with a record and a tiny model."""

from __future__ import annotations

import pytest

from tightfit.core.strategy import Strategy
from tightfit.estimation.activations import estimate_activation_bytes, list_layers
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

COMPILED = ("bloom", "gpt_neox", "glm4_moe_lite", "nemotron_h", "lfm2")
"""Where the first plan compiles layers that differ most: biases by distance, layers in parallel,
latent attention and experts, Mamba, convolutions."""
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
    strategy = first.strategy
    if model_type not in COMPILED:  # a second of CPU for each kind of layer
        strategy = strategy.model_copy(update={"compile": False})
    job = TraceJob(config=config, strategy=strategy, compute_capability=CAPABILITY, stages=())
    recording = record_job(job)

    sizes = [one.num_bytes for one in recording.allocations]
    assert find_peak(sizes, recording.events)[0] > 2 * spec.num_params
    assert recording.operations is not None, "an operation was not understood"


@pytest.mark.parametrize("is_recomputed", [False, True])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "olmoe", "ernie4_5_moe"])
def test_the_router_loss_keeps_what_is_estimated(model_type: str, is_recomputed: bool) -> None:
    """Probabilities of all experts and tokens, beside the tensors of the same step without it."""
    config = tiny_config(model_type)
    count = next(
        key for key in ("num_local_experts", "moe_num_experts", "num_experts") if key in config
    )
    config[count] = 64
    spec = read_config(config, name=model_type, source="a tiny config")
    traced, estimated = [], []
    for weight in (0.0, 0.01):
        strategy = Strategy(
            method="full",
            micro_batch=4,
            seq_len=512,
            checkpointing=is_recomputed,
            router_loss_weight=weight,
        )
        job = TraceJob(config=config, strategy=strategy, compute_capability=CAPABILITY, stages=())
        recording = record_job(job)
        assert recording.operations is not None, "an operation was not understood"
        sizes = [one.num_bytes for one in recording.allocations]
        traced.append(find_peak(sizes, recording.events)[0])
        layers = list_layers(spec, strategy)
        estimated.append(estimate_activation_bytes(spec, strategy, layers).kept)
    of_all_layers = estimated[1] - estimated[0]

    # The peak may lie in a recomputed layer, when the others have given theirs back.
    least = 0 if is_recomputed else 0.6
    assert least * of_all_layers <= traced[1] - traced[0] <= 2.2 * of_all_layers
