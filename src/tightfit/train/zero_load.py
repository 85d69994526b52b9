"""Loading under ZeRO-3: every parameter is split over the ranks the moment it is made."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from tightfit.core.errors import InvalidInputError
from tightfit.runtime.attention import register_attention
from tightfit.runtime.devices import is_out_of_memory
from tightfit.runtime.load import LoadRequest, build_model, read_config
from tightfit.runtime.quiet import silence_libraries


def announce_partitioning(config: dict[str, Any]) -> Any:
    """Tell transformers and peft, for as long as the result lives, that parameters are split.

    transformers then makes modules inside `deepspeed.zero.Init` and fills them one
    by one: rank 0 reads a tensor from the mapped file, each rank keeps its share.
    Every rank must load; rank 0 alone would wait for the others for ever.
    """
    from transformers.integrations import deepspeed as integration

    announced: Any = integration.HfDeepSpeedConfig
    return announced(config)


def withdraw_partitioning() -> None:
    """The next model of this process is an ordinary one."""
    from transformers.integrations import deepspeed as integration

    withdraw: Any = integration.unset_hf_deepspeed_config
    withdraw()


def load_partitioned(folder: Path, request: LoadRequest) -> Any:
    """The base model in training mode, its parameters split; partitioning has been announced."""
    silence_libraries()
    register_attention()
    config = read_config(folder, request)
    if getattr(config, "quantization_config", None) is not None:
        raise InvalidInputError(
            f"{folder} is already quantized, and ZeRO-3 splits unpacked weights.",
            remedy="name the model it was made from",
        )
    if request.random_weights:
        model = build_model(config, request)
    else:
        model = _read_model(folder, config, request)
    model.config.use_cache = False
    return model.train()


def _read_model(folder: Path, config: Any, request: LoadRequest) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    auto: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    try:
        model, info = auto.from_pretrained(
            str(folder),
            config=config,
            dtype=request.plain_dtype,
            attn_implementation=config._attn_implementation,
            local_files_only=True,
            trust_remote_code=False,
            weights_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, pickle.UnpicklingError) as fault:
        if is_out_of_memory(fault):
            raise
        lines = str(fault).strip().splitlines() or [type(fault).__name__]
        raise InvalidInputError(
            f"transformers cannot load {folder}: {lines[0].rstrip('.')}.",
            remedy="fetch the model again, or name another: tightfit models",
        ) from fault
    # transformers only mentions a missing tensor, and fills it with noise.
    missing = sorted(info["missing_keys"])
    if missing:
        raise InvalidInputError(
            f"{folder} lacks {len(missing)} tensors of the model, {missing[0]} first.",
            remedy="fetch the model again; these weights are not those of its config.json",
        )
    return model
