"""From what was asked to vLLM's own arguments, by the names its documentation gives them.

Sources: vllm/engine/arg_utils.py (EngineArgs), vllm/sampling_params.py (SamplingParams),
vllm/lora/request.py (LoRARequest), release 0.32.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError
from tightfit.engines.open import EngineRequest
from tightfit.engines.protocol import Sampling
from tightfit.models.spec import ModelSpec
from tightfit.runtime.artefacts import Artefact, ArtefactKind

DEFAULT_SLOTS = 256
"""vLLM's own `max_num_seqs` on most cards."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What `max_lora_rank` may be."""
_DTYPES = {Dtype.FP32: "float32", Dtype.BF16: "bfloat16", Dtype.FP16: "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmPlan:
    """All that vLLM is told at the start, and the adapter that goes with every request."""

    engine: dict[str, Any]
    """Keyword arguments of `AsyncEngineArgs`."""
    lora: dict[str, Any] | None
    """Keyword arguments of `LoRARequest`."""
    visible_devices: str | None
    """For CUDA_VISIBLE_DEVICES: vLLM takes no number of a GPU. None: leave it as it is."""


def plan_vllm(request: EngineRequest, spec: ModelSpec, *, num_gpus: int, context: int) -> VllmPlan:
    """Pure but for an adapter's own config file, which says its rank."""
    artefact = request.artefact
    folder = artefact.base if artefact.kind is ArtefactKind.ADAPTER else artefact.path
    is_one = request.device.startswith("cuda:")
    settings: dict[str, Any] = {
        "model": str(folder),
        # Prompts go in and answers come out as tokens: the same tokenizer for every engine.
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "dtype": "auto" if request.weights is None else _DTYPES[request.weights],
        "max_model_len": context,
        "max_num_seqs": request.slots or DEFAULT_SLOTS,
        "tensor_parallel_size": 1 if is_one else choose_parallel(num_gpus, spec),
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "seed": 0,
    }
    lora = None
    if artefact.kind is ArtefactKind.ADAPTER:
        settings |= {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": _allowed_rank(artefact),
        }
        lora = {"lora_name": "tuned", "lora_int_id": 1, "lora_path": str(artefact.path)}
    return VllmPlan(
        engine=settings,
        lora=lora,
        visible_devices=request.device.partition(":")[2] if is_one else None,
    )


def choose_parallel(num_gpus: int, spec: ModelSpec) -> int:
    """The most GPUs over which heads and vocabulary can be shared out evenly."""
    return next(
        count
        for count in range(max(1, num_gpus), 0, -1)
        if spec.num_heads % count == 0
        and (spec.num_kv_heads % count == 0 or count % spec.num_kv_heads == 0)
    )


def sampling_arguments(
    sampling: Sampling, *, num_new_tokens: int, stop_ids: tuple[int, ...]
) -> dict[str, Any]:
    """Keyword arguments of `SamplingParams`, but for `output_kind`, which is an enum of vLLM's.

    Stop texts are found by us, from the tokens, as with the other engines.
    """
    is_greedy = sampling.temperature <= 0
    return {
        "max_tokens": num_new_tokens,
        "temperature": max(0.0, sampling.temperature),
        "top_p": 1.0 if is_greedy else sampling.top_p,
        "top_k": 0 if is_greedy else sampling.top_k,
        "min_p": 0.0 if is_greedy else sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": sampling.seed,
        "ignore_eos": sampling.ignores_stop_tokens,
        "stop_token_ids": [] if sampling.ignores_stop_tokens else list(stop_ids),
        "detokenize": False,
    }


def _allowed_rank(adapter: Artefact) -> int:
    path = adapter.path / "adapter_config.json"
    try:
        rank = int(json.loads(path.read_bytes())["r"])
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise InvalidInputError(
            f"{path} does not say the adapter's rank `r`.", remedy="--engine transformers"
        ) from fault
    allowed = next((one for one in LORA_RANKS if one >= rank), None)
    if allowed is None:
        raise InvalidInputError(
            f"The adapter has rank {rank}; vLLM takes up to {LORA_RANKS[-1]}.",
            remedy="--engine transformers, or merge it first: tightfit merge",
        )
    return allowed
