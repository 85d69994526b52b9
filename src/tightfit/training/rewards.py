"""Sums from which a step's rewards are reported, added up on the device and read once per step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tightfit.runs.metrics import PreferenceRecord

NUM_SUMS = 9


class Rewards(NamedTuple):
    """Of one micro-batch."""

    chosen: Tensor
    rejected: Tensor
    is_chosen: Tensor
    """Which of the rewards count; so the next."""
    is_rejected: Tensor
    losses: Tensor
    nll: Tensor
    """Summed over the tokens of chosen answers."""
    num_nll_tokens: Tensor
    num_correct: Tensor | None = None
    """Of the pairs; None without pairs."""
    kl: Tensor | None = None

    def sums(self) -> Tensor:
        nothing = self.chosen.new_zeros(())
        num_chosen, num_rejected = self.is_chosen.sum(), self.is_rejected.sum()
        is_paired = self.num_correct is not None
        num_examples = num_chosen if is_paired else num_chosen + num_rejected
        sums = [
            num_chosen,
            num_rejected,
            (self.chosen * self.is_chosen).sum(),
            (self.rejected * self.is_rejected).sum(),
            nothing - 1 if self.num_correct is None else self.num_correct,
            self.losses.sum(),
            self.nll,
            self.num_nll_tokens,
            nothing - 1 if self.kl is None else self.kl * num_examples,
        ]
        return torch.stack([one.detach().double() for one in sums])


def describe_rewards(sums: list[float]) -> PreferenceRecord:
    """Means from sums over micro-batches and ranks; those that were not taken are negative."""
    num_chosen, num_rejected, chosen, rejected, correct, losses, nll, tokens, kl = sums
    is_paired = correct >= 0
    num_examples = num_chosen if is_paired else num_chosen + num_rejected
    reward_chosen = chosen / num_chosen if num_chosen else None
    reward_rejected = rejected / num_rejected if num_rejected else None
    has_both = reward_chosen is not None and reward_rejected is not None
    return PreferenceRecord(
        reward_chosen=reward_chosen,
        reward_rejected=reward_rejected,
        reward_margin=(reward_chosen or 0.0) - (reward_rejected or 0.0) if has_both else None,
        reward_accuracy=correct / num_chosen if is_paired and num_chosen else None,
        kl=kl / num_examples if kl >= 0 and num_examples else None,
        chosen_nll=nll / tokens if tokens else None,
        preference_loss=losses / num_examples if num_examples else None,
    )
