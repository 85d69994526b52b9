"""The objective of preferences: pairs and labelled answers, with or without a reference.

The formulas are trl 1.16's; `tests/integration/trl` compares losses, rewards and gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid

from tightfit.core.objectives import ExampleKind
from tightfit.core.objectives import Objective as ObjectiveKind
from tightfit.core.settings import Loss
from tightfit.core.strategy import Strategy, Training
from tightfit.estimation.activations import NUM_LOSS_CHUNKS
from tightfit.runtime.embedding_adapters import head_weight
from tightfit.training.batches import IGNORED
from tightfit.training.log_probs import fused_log_probs
from tightfit.training.model import Objective, Predictions
from tightfit.training.rewards import NUM_SUMS, Rewards
from tightfit.training.routing import Routing


def build_objective(model: Any, strategy: Strategy, training: Training) -> Objective:
    """The module that is trained: model and loss, as the plan's objective has them."""
    if strategy.objective is ObjectiveKind.SFT:
        return Objective.from_strategy(model, strategy)
    return PreferenceObjective(model, strategy, training)


class _Given(NamedTuple):
    """What a batch holds beside the model's inputs."""

    answer_lengths: Tensor
    reference: Tensor | None
    """Log-probabilities computed before training."""
    is_good: Tensor | None
    """Of labelled answers."""
    nll_weight: Tensor | None
    """Turns ORPO's summed cross-entropy, once divided like the loss, into the mean over the
    step's chosen tokens."""
    kl: Tensor | None
    """KTO's, of the whole step."""


class _Scored(NamedTuple):
    log_probs: Tensor
    """Of each answer: the sum over its tokens."""
    balance: Tensor | None


class PreferenceObjective(Objective):
    """The summed preference loss of a batch's pairs, or labelled answers.

    All answers of a batch go through the model in one forward pass. The head runs on trained
    positions only, and each answer's log-probability is the sum over its trained tokens. Like
    `Objective` a sum, so that micro-batches and ranks weigh each pair the same.

    The reference is the same model with its adapters off, a frozen copy, or log-probabilities that
    come with the batch.
    """

    def __init__(self, model: Any, strategy: Strategy, training: Training) -> None:
        super().__init__(
            model,
            strategy.loss,
            loss_chunk_factor=strategy.loss_chunk_factor,
            routing=Routing.attach(model, strategy),
        )
        self.kind = strategy.objective
        self._beta = training.beta_of(self.kind)
        self._gamma = training.gamma_of(self.kind)
        self._smoothing = training.label_smoothing
        self._weights = (training.desirable_weight, training.undesirable_weight)
        record = self.kind.record
        self._is_paired = record.example is ExampleKind.PAIR
        self._sums: Tensor | None = None
        self.reference: nn.Module | None = None
        """Full tuning's frozen copy."""
        if strategy.copies_reference:
            self.reference = copy.deepcopy(model).requires_grad_(False)

    def forward(  # type: ignore[override]
        self,
        labels: Tensor,
        answer_ids: Tensor,
        answer_lengths: Tensor,
        *,
        is_reference: bool = False,
        **inputs: Tensor,
    ) -> Tensor:
        """`answer_ids`: of each trained token, the number of its answer; a pair's follow each
        other. `answer_lengths`: trained tokens of each; none where it carries no loss.

        `is_reference`: give the reference's log-probabilities of the answers instead of a loss.
        KTO's batch of mismatched rows, which has no `kl`, gives the sum of their log-ratios.
        """
        given = _Given(answer_lengths, *(inputs.pop(name, None) for name in _Given._fields[1:]))
        lengths = inputs.pop("lengths", None)
        batch = (labels, answer_ids, answer_lengths, lengths, inputs)
        record, reference = self.kind.record, given.reference
        if record.needs_reference and reference is None:
            with torch.no_grad(), self._as_reference() as module:
                reference = self._score(module, *batch).log_probs
        if is_reference and reference is not None:
            return reference
        found = self._score(self.model, *batch)
        scores = found.log_probs
        # Without a reference the log-probabilities themselves.
        log_ratios = scores if reference is None else scores - reference
        if record.needs_kl and given.kl is None:
            return (log_ratios * (answer_lengths > 0)).sum()
        if record.averages_tokens:
            log_ratios = log_ratios / answer_lengths.clamp(min=1)
        compute_loss = self._compute_pair_loss if self._is_paired else self._compute_answer_loss
        loss, rewards = compute_loss(log_ratios, scores, given)
        self._sums = rewards.sums() if self._sums is None else self._sums + rewards.sums()
        if self.routing is not None and found.balance is not None:
            num_examples = len(scores) // record.num_sequences
            loss = self.routing.add_loss(loss, found.balance, num_examples)
        return loss

    def _compute_pair_loss(
        self, log_ratios: Tensor, scores: Tensor, given: _Given
    ) -> tuple[Tensor, Rewards]:
        is_real = given.answer_lengths[0::2] > 0
        delta = log_ratios[0::2] - log_ratios[1::2]
        if self.kind is ObjectiveKind.IPO:
            losses = (delta - 1 / (2 * self._beta)).square()
        elif self.kind is ObjectiveKind.ORPO:
            log_odds = delta - (_log1mexp(log_ratios[0::2]) - _log1mexp(log_ratios[1::2]))
            losses = -self._beta * logsigmoid(log_odds)
        else:  # DPO and SimPO; smoothed as conservative DPO is
            margin = self._beta * delta - self._gamma
            losses = -(1 - self._smoothing) * logsigmoid(margin)
            if self._smoothing:
                losses = losses - self._smoothing * logsigmoid(-margin)
        losses = losses * is_real
        # IPO is regressed per token; its rewards are of whole answers, as DPO's.
        factor = given.answer_lengths if self.kind is ObjectiveKind.IPO else 1
        reward = self._beta * factor * log_ratios.detach()
        rewards = Rewards(
            chosen=reward[0::2],
            rejected=reward[1::2],
            is_chosen=is_real,
            is_rejected=is_real,
            losses=losses,
            nll=-(scores[0::2] * is_real).sum(),
            num_nll_tokens=given.answer_lengths[0::2].sum(),
            num_correct=((reward[0::2] > reward[1::2]) & is_real).sum(),
        )
        if self.kind is ObjectiveKind.ORPO:
            assert given.nll_weight is not None
            return losses.sum() + rewards.nll * given.nll_weight, rewards
        return losses.sum(), rewards

    def _compute_answer_loss(
        self, log_ratios: Tensor, scores: Tensor, given: _Given
    ) -> tuple[Tensor, Rewards]:
        assert given.is_good is not None
        assert given.kl is not None
        is_real = given.answer_lengths > 0
        sign = torch.where(given.is_good, 1.0, -1.0)
        weight = torch.where(given.is_good, *self._weights)
        losses = weight * torch.sigmoid(-sign * self._beta * (log_ratios - given.kl)) * is_real
        reward = self._beta * log_ratios.detach()
        good = given.is_good & is_real
        rewards = Rewards(
            chosen=reward,
            rejected=reward,
            is_chosen=good,
            is_rejected=~given.is_good & is_real,
            losses=losses,
            nll=-(scores * good).sum(),
            num_nll_tokens=(given.answer_lengths * good).sum(),
            kl=given.kl,
        )
        return losses.sum(), rewards

    def _score(
        self,
        module: Any,
        labels: Tensor,
        answer_ids: Tensor,
        answer_lengths: Tensor,
        lengths: Tensor | None,
        inputs: dict[str, Tensor],
    ) -> _Scored:
        wanted = labels[:, 1:] != IGNORED
        targets = labels[:, 1:][wanted]
        found = self._predict(module, wanted, labels, lengths, inputs, is_counted=len(targets) > 0)
        log_probs = self._log_probs(found, targets)
        # A sum per answer in a fixed order; `index_add` has none on GPUs.
        numbers = torch.arange(len(answer_lengths), device=labels.device)
        is_own = answer_ids[:, 1:][wanted] == numbers[:, None]
        return _Scored((log_probs * is_own).sum(dim=1), found.balance)

    def _log_probs(self, found: Predictions, targets: Tensor) -> Tensor:
        if self._loss is Loss.FUSED and found.head is not None:
            head = _active_head(found.head)
            return fused_log_probs(
                found.values,
                head_weight(head),
                getattr(head, "bias", None),
                targets,
                softcap=found.softcap,
                factor=self._loss_chunk_factor,
            )
        logits = found.logits()
        if self._loss is Loss.CHUNKED and len(targets):
            # The upcast to fp32 takes one chunk at a time.
            pairs = zip(logits.chunk(NUM_LOSS_CHUNKS), targets.chunk(NUM_LOSS_CHUNKS), strict=True)
            parts = [cross_entropy(part.float(), own, reduction="none") for part, own in pairs]
            return -torch.cat(parts)
        return -cross_entropy(logits.float(), targets, reduction="none")

    @contextmanager
    def _as_reference(self) -> Iterator[Any]:
        """The module that computes what the model did before training."""
        if self.reference is not None:
            yield self.reference
            return
        with adapters_off(self.model):
            yield self.model

    def take(self) -> Tensor:
        """The sums of rewards and losses since the last call."""
        sums, self._sums = self._sums, None
        if sums is None:
            device = next(self.model.parameters()).device
            return torch.zeros(NUM_SUMS, dtype=torch.float64, device=device)
        return sums


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The base alone. Not peft's `disable_adapter`, which toggles `requires_grad`: DDP, FSDP and
    ZeRO hold gradients by it."""
    layers: list[Any] = [part for part in model.modules() if hasattr(part, "_disable_adapters")]
    before = [layer._disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, is_off in zip(layers, before, strict=True):
            layer._disable_adapters = is_off


def find_preference(module: nn.Module) -> PreferenceObjective | None:
    """Inside what DDP or DeepSpeed wrapped."""
    parts = module.modules()
    return next((part for part in parts if isinstance(part, PreferenceObjective)), None)


def _active_head(head: Any) -> Any:
    """The head itself: peft wraps one that is trained whole, beside the original, or whose rows of
    new tokens are."""
    rows = getattr(head, "token_adapter", None)
    if rows is not None and rows.disable_adapters:
        return rows.base_layer
    if not hasattr(head, "modules_to_save"):
        return head
    if head.disable_adapters:
        return head.original_module
    (name,) = head.active_adapters
    return head.modules_to_save[name]


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) of negative x, exact near 0 and far from it (Maechler, 2012)."""
    x = x.clamp(max=-1e-7)
    near = torch.log(-torch.expm1(x))
    far = torch.log1p(-torch.exp(x))
    return torch.where(x > -0.6931472, near, far)
