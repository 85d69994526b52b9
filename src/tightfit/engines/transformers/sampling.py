"""The next token of every row: greedy, or drawn with that row's own settings and seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tightfit.engines.protocol import Sampling

if TYPE_CHECKING:
    import torch

_MASK = (1 << 64) - 1


def draw_uniform(seed: int, number: int) -> float:
    """The `number`-th value in [0, 1) of a seed's sequence, without any state to carry.

    An answer thus depends on its own seed alone, whatever else is computed beside it.
    Source: SplitMix64, Steele, Lea and Flood, OOPSLA 2014.
    """
    mixed = _mix((seed & _MASK) ^ _mix(number + 1))
    return (_mix(mixed) >> 40) / (1 << 24)


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def penalize(logits: torch.Tensor, seen: torch.Tensor, penalties: torch.Tensor) -> torch.Tensor:
    """Logits with every token in `seen` made less likely. Source: CTRL, arXiv:1909.05858."""
    import torch

    by = penalties[:, None]
    return torch.where(seen, torch.where(logits < 0, logits * by, logits / by), logits)


def choose_tokens(
    logits: torch.Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]
) -> torch.Tensor:
    """One token for each row of fp32 logits. `uniforms` are used where a row is drawn."""
    import torch

    drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    if not drawn:
        return logits.argmax(dim=-1)
    device = logits.device
    settings = torch.tensor(
        [
            [
                samplings[row].temperature,
                samplings[row].top_p,
                samplings[row].min_p,
                float(samplings[row].top_k),
                uniforms[row],
            ]
            for row in drawn
        ],
        dtype=torch.float32,
    ).to(device)
    if len(drawn) == len(samplings):
        return draw_tokens(logits, settings)
    rows = torch.tensor(drawn, device=device)
    chosen = logits.argmax(dim=-1)
    chosen[rows] = draw_tokens(logits[rows], settings)
    return chosen


def draw_tokens(logits: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
    """Draw by the inverse of the distribution function, likeliest token first.

    Columns of `settings`: temperature, top_p, min_p, top_k (0: all), a uniform number.
    Filters are applied in transformers' order: temperature, top k, top p, min p.
    """
    import torch

    temperature, top_p, min_p, top_k, uniform = settings.unbind(dim=1)
    chances, tokens = torch.softmax(logits / temperature[:, None], dim=-1).sort(
        dim=-1, descending=True
    )
    rank = torch.arange(chances.shape[-1], device=logits.device)
    most = torch.where(top_k > 0, top_k, float(chances.shape[-1]))
    chances = chances * (rank < most[:, None])
    chances = chances / chances.sum(dim=-1, keepdim=True)
    before = chances.cumsum(dim=-1) - chances
    is_kept = (before < top_p[:, None]) & (chances >= min_p[:, None] * chances[:, :1])
    is_kept[:, 0] = True
    chances = chances * is_kept
    reached = chances.cumsum(dim=-1)
    target = uniform[:, None] * reached[:, -1:]
    place = torch.searchsorted(reached, target, right=True)
    # Rounding can carry the target to the very end, behind the last token that is left.
    place = torch.minimum(place, is_kept.sum(dim=-1, keepdim=True) - 1)
    return tokens.gather(-1, place).squeeze(-1)
