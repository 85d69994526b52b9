"""Log-probabilities of given tokens, without ever holding the logits of all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tightfit.estimation.activations import count_chunk_tokens


def fused_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    softcap: float | None,
    factor: int,
) -> Tensor:
    """The log-probability of each target, in fp32, from the head's input and weight."""
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    chunk = count_chunk_tokens(
        tokens=max(1, len(hidden)),
        hidden_size=weight.shape[1],
        vocab_size=weight.shape[0],
        factor=factor,
    )
    product: Any = _FusedLogProbs
    log_probs: Tensor = product.apply(hidden, weight, bias, targets, (softcap, chunk))
    return log_probs


class _FusedLogProbs(torch.autograd.Function):
    """Keeps hidden states and a logsumexp per token; backward computes each chunk's logits anew."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        how: tuple[float | None, int],
    ) -> Tensor:
        softcap, chunk = how
        log_probs = hidden.new_empty(len(hidden), dtype=torch.float32)
        normalizers = torch.empty_like(log_probs)
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], weight, bias, softcap)
            torch.logsumexp(logits, dim=-1, out=normalizers[part])
            chosen = logits.gather(-1, targets[part, None]).squeeze(-1)
            torch.sub(chosen, normalizers[part], out=log_probs[part])
            del logits
        ctx.save_for_backward(hidden, weight, bias, targets, normalizers)
        ctx.softcap, ctx.chunk = softcap, chunk
        return log_probs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizers = ctx.saved_tensors
        gradient = gradients[0]
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        grad_bias = torch.zeros_like(bias) if needs_bias and bias is not None else None
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = _logits(hidden[part], weight, bias, ctx.softcap)
            slope = None if ctx.softcap is None else 1 - (logits / ctx.softcap).square()
            # d log p(target) / d logits = onehot - softmax
            logits.sub_(normalizers[part, None]).exp_().neg_()
            ones = logits.new_ones(len(logits), 1)
            logits.scatter_add_(-1, targets[part, None], ones)
            logits.mul_(gradient[part, None])
            if slope is not None:
                logits.mul_(slope)
                del slope
            grad = logits.to(hidden.dtype)
            del logits
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight.addmm_(grad.t(), hidden[part])
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            del grad  # before the next chunk's logits
        return grad_hidden, grad_weight, grad_bias, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap
