"""Training: what is learnt and how, as far as no memory estimate depends on it.

The other half of a job is the Strategy. Both stand in the Plan, so that a
worker needs nothing but the plan. A default lives here and nowhere else.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from tightfit.core.frozen import FiniteFrozen
from tightfit.core.strategy import Method

Name = Annotated[str, Field(min_length=1, max_length=4096)]
Fraction = Annotated[float, Field(ge=0, le=1)]

DEFAULT_LEARNING_RATES = {Method.FULL: 2e-5, Method.LORA: 2e-4}
"""Stanford Alpaca's full tuning of 7B (github.com/tatsu-lab/stanford_alpaca, README), and QLoRA's
for models up to 13B (arXiv:2305.14314, table 9)."""
DEFAULT_ALPHA_PER_RANK = 2.0
"""LoRA's scale is alpha / rank; twice the rank is what most open recipes write."""

MEMORY_VARIABLE = "TIGHTFIT_MEMORY_LIMIT_BYTES"
"""Read by a worker, which then cannot take more."""


class Schedule(str, Enum):
    """How the learning rate goes from its peak, after the warm-up, to its end."""

    COSINE = "cosine"
    LINEAR = "linear"
    CONSTANT = "constant"


class TrainOn(str, Enum):
    """Which tokens carry loss."""

    ANSWERS = "answers"
    ALL = "all"


class DataSource(FiniteFrozen):
    """One file or folder of rows."""

    path: Name
    weight: float = Field(default=1.0, gt=0, le=10**6)
    """Times each row is seen in an epoch: 2 shows every row twice, 0.5 a fresh half each epoch."""
    split: Literal["train", "eval"] = "train"
    take: Name | None = None
    """A part of the rows, as people write it: `10`, `1%`, `[:10%]`, `train[10:20]`."""


class Training(FiniteFrozen):
    """The learning side of a job."""

    model_path: Name
    """Folder with the base model's weights, tokenizer and config."""
    data: tuple[DataSource, ...] = ()
    eval_fraction: float = Field(default=0.0, ge=0, le=0.5)
    """Share of the training rows held back, drawn with `seed`."""
    template: Name | None = None
    """A named template or a Jinja file. None: the tokenizer's own."""
    train_on: TrainOn = TrainOn.ANSWERS
    learning_rate: PositiveFloat
    schedule: Schedule = Schedule.COSINE
    warmup_fraction: Fraction = 0.03
    """Of all steps, with the rate rising from zero."""
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    max_grad_norm: PositiveFloat | None = 1.0
    """None: no clipping."""
    max_steps: PositiveInt | None = None
    shuffle: bool = True
    seed: int = Field(default=0, ge=0, lt=2**32)
    lora_alpha: PositiveFloat | None = None
    """None: twice the rank."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank), which keeps high ranks learning (arXiv:2312.03732)."""
    save_every: PositiveInt | None = None
    """Steps between checkpoints. None: about every ten minutes."""
    keep_checkpoints: NonNegativeInt = 2
    """0: none is written, and what dies starts over."""
    eval_every: PositiveInt | None = None
    """Steps between evaluations. None: at the start and after each epoch."""
    log_to: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    random_weights: bool = False
    """Draw the base weights at random instead of reading them: for measuring a shape."""
    keep_result: bool = True
    """False: what was learnt is dropped at the end: for measuring."""

    def scale_alpha(self, rank: int) -> float:
        """LoRA's alpha, stated or by rank."""
        return DEFAULT_ALPHA_PER_RANK * rank if self.lora_alpha is None else self.lora_alpha
