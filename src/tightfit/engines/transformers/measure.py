"""What a loaded model holds and what it can hold beside itself: parameters, bytes, slots."""

from __future__ import annotations

from typing import Any

from tightfit.engines.transformers.sizes import CPU_SLOTS, KEPT_FRACTION, MOST_SLOTS


def count_params(model: Any) -> int:
    """Parameters of the architecture, whatever they are packed into."""
    from tightfit.runtime.gptq import GptqLinear

    packed = [module for module in model.modules() if isinstance(module, GptqLinear)]
    total = sum(module.in_features * module.out_features for module in packed)
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        total += parameter.numel() if state is None else state.shape.numel()
    return int(total)


def count_bytes(model: Any) -> int:
    """Weights as they lie in memory, with the scales of packed ones; shared ones count once."""
    found: dict[int, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        for part in (tensor, *_scales(tensor)):
            found[part.data_ptr()] = part.numel() * part.element_size()
    return sum(found.values())


def _scales(tensor: Any) -> list[Any]:
    """bitsandbytes keeps them beside the parameter."""
    import torch

    state = getattr(tensor, "quant_state", None)
    nested = getattr(state, "state2", None)
    held = [getattr(state, "absmax", None), getattr(nested, "absmax", None)]
    held.append(getattr(tensor, "SCB", None))
    return [part for part in held if isinstance(part, torch.Tensor)]


def kv_bytes_per_token(model: Any) -> int:
    """Keys and values that one token leaves behind, over all layers, as this engine keeps them."""
    config = model.config.get_text_config(decoder=True)
    heads = int(config.num_attention_heads)
    # Falcon's and Bloom's configs name no key heads, or name them only in some variants.
    key_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", 0):
        key_heads = 1
    if getattr(config, "new_decoder_architecture", False):
        key_heads = int(config.num_kv_heads)
    width = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
    width = int(width or config.hidden_size // heads)
    layers = int(getattr(config, "num_decoder_layers", None) or config.num_hidden_layers)
    return 2 * layers * key_heads * width * _value_bytes(model)


def _value_bytes(model: Any) -> int:
    import torch

    return int(torch.empty((), dtype=model.dtype).element_size())


def find_context(config: Any) -> int | None:
    """Tokens the model was made for; None where its positions have no end."""
    if config.is_encoder_decoder:
        return None
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(found) if found else None


def choose_slots(model: Any, asked: int | None, *, max_context: int) -> int:
    """Requests at once: as many as memory holds when each fills half of its context."""
    import torch

    from tightfit.engines.transformers.rows import has_plain_cache

    if not model.config.is_encoder_decoder and not has_plain_cache(model.config):
        return 1
    if asked is not None:
        return max(1, asked)
    if model.device.type != "cuda":
        return CPU_SLOTS
    free = sum(torch.cuda.mem_get_info(index)[0] for index in _gpus(model))
    each = kv_bytes_per_token(model) * max(1, max_context // 2)
    return max(1, min(MOST_SLOTS, int(free * KEPT_FRACTION // each)))


def _gpus(model: Any) -> set[int]:
    return {p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"}
