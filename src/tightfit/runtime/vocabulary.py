"""Rows of embeddings and head for new tokens: grown, and given their first values."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.errors import UsageError
from tightfit.core.new_tokens import NewTokens, count_rows
from tightfit.data.new_tokens import count_tokens, number_new_tokens, split_new_tokens
from tightfit.data.tokenizer import TOKENIZER_FILE

if TYPE_CHECKING:
    import torch
    from torch import nn


_NUMBERS = "_tightfit_new_tokens"


def add_new_tokens(model: Any, folder: Path, new: NewTokens) -> None:
    """Rows for the new tokens of a base model from `folder`, each the mean of the rows of the
    pieces that its tokenizer makes of the token. On the meta device the rows alone."""
    import torch

    if not new.names:
        return
    check_grows(model)
    num_rows = count_model_rows(model)
    numbers = number_new_tokens(folder, new, num_rows=num_rows)
    grow_rows(model, count_rows(num_rows, numbers.stop))
    model.__dict__[_NUMBERS] = numbers
    # Random weights need no tokenizer.
    pieces = split_new_tokens(folder, new) if (folder / TOKENIZER_FILE).is_file() else []
    for weight in list_token_matrices(model):
        if weight.is_meta:
            continue
        with torch.no_grad():
            for number, parts in zip(numbers, pieces, strict=False):
                rows = weight[parts] if parts else weight[: numbers.start]
                weight[number] = rows.float().mean(0).to(weight.dtype)


def list_new_tokens(model: Any) -> list[int]:
    """The numbers of the tokens that `add_new_tokens` has added."""
    return list(model.__dict__.get(_NUMBERS, ()))


def count_model_rows(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def list_token_matrices(model: Any) -> list[nn.Parameter]:
    """The matrices that have a row for each token: one where embeddings and head are tied."""
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    found = {id(module.weight): module.weight for module in modules if module is not None}
    return list(found.values())


def check_grows(model: Any) -> None:
    """Refuse models that have more of each token than a row of embeddings and of the head."""
    config = model.config.get_text_config()
    if config.is_encoder_decoder or hasattr(config, "vocab_size_per_layer_input"):
        raise UsageError(
            f"{model.config.model_type} keeps several matrices by token, and new tokens are added "
            "to decoder models with one for embeddings and one for the head.",
            remedy="train without add_tokens, or name a decoder model",
        )


def grow_rows(model: Any, num_rows: int) -> None:
    """Give embeddings and head so many rows; ties stay. New ones are the mean of all old rows."""
    from torch import nn

    held = {id(weight): weight for weight in list_token_matrices(model)}
    grown = {
        key: nn.Parameter(extend_rows(weight.detach(), num_rows), weight.requires_grad)
        for key, weight in held.items()
        if len(weight) < num_rows
    }
    if not grown:
        return
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if id(parameter) not in grown:
                continue
            module._parameters[name] = grown[id(parameter)]
            for size in ("num_embeddings", "out_features"):
                if hasattr(module, size):
                    setattr(module, size, num_rows)
            bias = module._parameters.get("bias")
            if bias is not None:
                longer = extend_rows(bias.detach()[:, None], num_rows)[:, 0]
                module._parameters["bias"] = nn.Parameter(longer, bias.requires_grad)
    model.config.get_text_config().vocab_size = num_rows
    if hasattr(model, "vocab_size"):
        model.vocab_size = num_rows


def extend_rows(values: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The matrix with more rows: the mean of the old ones, which no logit prefers to all of them.
    Zeros would win wherever every logit is negative."""
    import torch

    made = torch.empty((num_rows, values.shape[1]), dtype=values.dtype, device=values.device)
    made[: len(values)] = values
    if not values.is_meta:
        # Summed in fp32 without a whole copy in it.
        made[len(values) :] = (values.sum(0, dtype=torch.float32) / len(values)).to(values.dtype)
    return made


def count_adapter_rows(adapter: Path, indices: list[int], num_rows: int) -> int:
    """Rows of the model that an adapter with trained rows of new tokens was made for."""
    file = adapter / TOKENIZER_FILE
    num_tokens = count_tokens(file) if file.is_file() else 0
    return count_rows(num_rows, max(num_tokens, *(index + 1 for index in indices)))
