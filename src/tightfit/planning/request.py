"""JobRequest: what a user wants planned, before any choice is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from pydantic import ValidationError

from tightfit.core.errors import UsageError
from tightfit.core.profiles import DataProfile
from tightfit.core.settings import Method
from tightfit.core.strategy import Strategy, Training
from tightfit.core.text import did_you_mean
from tightfit.core.trainers import TrainerVersion
from tightfit.estimation.host_and_disk import DEFAULT_CHECKPOINTS
from tightfit.estimation.result import Estimate, StepTime
from tightfit.models.spec import ModelSpec
from tightfit.planning.rules import check_lora_targets

METHODS = ("auto", "full", "lora", "qlora")
DEFAULT_EFFECTIVE_BATCH = 16
"""Sequences per optimizer step: what QLoRA and most open recipes use for instruction tuning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """A job in the user's words. What is not fixed here is searched."""

    spec: ModelSpec
    method: str = "auto"
    """`auto`, `full`, `lora` (16-bit base weights) or `qlora` (nf4 base weights)."""
    seq_len: int | None = None
    """None: the profile's, or the Strategy's default, cut to what the model can take."""
    effective_batch: int = DEFAULT_EFFECTIVE_BATCH
    num_epochs: float = 1.0
    max_steps: int | None = None
    """Optimizer steps, in place of epochs; how many epochs they are depends on the plan."""
    profile: DataProfile | None = None
    training: Mapping[Method, Training] = field(default_factory=lambda: MappingProxyType({}))
    """The learning side for each method that a plan may have; none for a plan that is only asked
    for. `core.recipe.make_training` makes one: the default learning rate goes by the method."""
    fixed: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    """Strategy fields the user has decided, by name."""
    trainer: TrainerVersion | None = None
    """Who runs it; None: tightfit itself."""

    def __post_init__(self) -> None:
        if self.trainer is not None:
            object.__setattr__(self, "spec", change_model(self.spec, self.trainer))
            object.__setattr__(self, "fixed", {**self.trainer.list_fixed(), **self.fixed})
        if self.method not in METHODS:
            raise UsageError(
                f"`{self.method}` is not a method.{did_you_mean(self.method, METHODS)}",
                remedy="--method " + "|".join(METHODS),
            )
        if self.effective_batch < 1 or self.num_epochs <= 0:
            raise UsageError(
                f"A batch of {self.effective_batch} and {self.num_epochs} epochs train nothing.",
                remedy="give an effective batch of 1 or more and more than 0 epochs",
            )
        unknown = [name for name in self.fixed if name not in Strategy.model_fields]
        if unknown:
            raise UsageError(
                f"`{unknown[0]}` is no part of a strategy."
                + did_you_mean(unknown[0], Strategy.model_fields),
                remedy="use a field that `tightfit plan --json` prints under `strategy`",
            )
        object.__setattr__(self, "fixed", _coerce(self.fixed))
        targets = self.fixed.get("lora_targets")
        if isinstance(targets, tuple):
            check_lora_targets(self.spec, targets)

    def count_checkpoints(self, method: Method) -> int:
        """Checkpoints that the run keeps."""
        training = self.training.get(method)
        return DEFAULT_CHECKPOINTS if training is None else training.keep_checkpoints

    def count_epochs(self, estimate: Estimate) -> float:
        """Epochs of the run: as stated, or those that `max_steps` come to under this plan."""
        steps = estimate.time.steps_per_epoch
        if self.max_steps is None or not steps:
            return self.num_epochs
        return self.max_steps / steps

    def count_steps(self, time: StepTime) -> float | None:
        """Optimizer steps of the run; None where neither they nor the data are known."""
        if self.max_steps is not None:
            return self.max_steps
        return self.num_epochs * time.steps_per_epoch if time.steps_per_epoch else None

    @property
    def planned_seq_len(self) -> int:
        """Tokens per sequence that the search uses."""
        stated = self.seq_len or self.fixed.get("seq_len")
        if isinstance(stated, int):
            return stated
        if self.profile is not None:
            return self.profile.seq_len
        default = int(Strategy.model_fields["seq_len"].default)
        return min(default, self.spec.max_positions or default)

    @property
    def longest_batch_len(self) -> int:
        """Tokens per sequence of the worst batch without packing: the longest row's."""
        if self.profile is None or "seq_len" in self.fixed:
            return self.planned_seq_len
        return min(self.planned_seq_len, self.profile.max_tokens)


def change_model(spec: ModelSpec, trainer: TrainerVersion) -> ModelSpec:
    """The model as the trainer's own modelling code builds it."""
    changed = trainer.list_model_changes(spec.activation)
    return spec.model_copy(update=changed) if changed else spec


def _coerce(fixed: Mapping[str, object]) -> Mapping[str, object]:
    """The same fields with enums in place of words, or the first error as a message."""
    try:
        checked = Strategy.model_validate(dict(fixed))
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(
            f"`{first['loc'][0]}` cannot be {first['input']!r}: {first['msg'].lower()}.",
            remedy="tightfit plan --help",
        ) from error
    return MappingProxyType({name: getattr(checked, name) for name in fixed})
