"""Objectives: what is learnt from the data. One record each, which data, planner, tracer and
training read.

Light on purpose: the command line lists the names before anything heavy is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tightfit.core.dtypes import RecordEnum


class ExampleKind(str, Enum):
    """What one example of the data holds. `micro_batch` and `effective_batch` count examples."""

    ANSWER = "answer"
    """A prompt and its answer."""
    PAIR = "pair"
    """A prompt with a chosen and a rejected answer: two sequences of up to `seq_len` tokens."""
    LABELLED = "labelled answer"
    """A prompt and an answer that is labelled good or bad."""

    @property
    def num_sequences(self) -> int:
        """Per example; each is a row of encoded data."""
        return 2 if self is ExampleKind.PAIR else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveRecord:
    """Everything the program knows of one objective."""

    title: str
    source: str
    """Where the loss is defined."""
    example: ExampleKind
    needs_reference: bool = False
    """The loss compares the trained model with the one that training starts from."""
    needs_kl: bool = False
    """The loss needs the divergence from the reference over mismatched prompts and answers: one
    more sequence per example, without gradients."""
    averages_tokens: bool = False
    """An answer's log-probability is divided by its number of tokens."""
    is_smoothed: bool = False
    """Takes `label_smoothing`."""
    beta: float | None = None
    """The default; None where the loss has none."""
    beta_source: str = ""
    gamma: float | None = None
    """`simpo_gamma` where none is stated; None where the loss has no target margin."""
    full_rate: float | None = None
    """AdamW's peak rate for full tuning where none is stated; None: the optimizer's own."""
    lora_rate: float | None = None
    rate_source: str = ""

    @property
    def settings(self) -> frozenset[str]:
        """Those of `TrainingSettings` that the loss reads."""
        reads = {
            "beta": self.beta is not None,
            "label_smoothing": self.is_smoothed,
            "simpo_gamma": self.gamma is not None,
            "desirable_weight": self.needs_kl,
            "undesirable_weight": self.needs_kl,
        }
        return frozenset(name for name, is_read in reads.items() if is_read)

    @property
    def num_sequences(self) -> int:
        """Sequences per example that gradients flow through."""
        return self.example.num_sequences

    @property
    def num_kl_sequences(self) -> int:
        """Further sequences per example, through the trained model without gradients."""
        return 1 if self.needs_kl else 0

    @property
    def num_reference_sequences(self) -> int:
        """Sequences per example through the reference, in each step or once before training."""
        return self.num_sequences + self.num_kl_sequences if self.needs_reference else 0


OBJECTIVE_SETTINGS = (
    *("beta", "label_smoothing", "simpo_gamma"),
    *("desirable_weight", "undesirable_weight"),
)
"""Settings that only some objectives read."""
_TRL_BETA = "trl 1.16, {}"
_DPO_RATES = "trl 1.16, trl/scripts/dpo.py, full and LoRA"


class Objective(RecordEnum):
    """What is learnt from the data."""

    record: ObjectiveRecord

    SFT = (
        "sft",
        ObjectiveRecord(
            title="supervised fine-tuning",
            source="next-token cross-entropy",
            example=ExampleKind.ANSWER,
        ),
    )
    DPO = (
        "dpo",
        ObjectiveRecord(
            title="direct preference optimization",
            source="arXiv:2305.18290, equation 7; smoothed: arXiv:2305.18290's code (conservative)",
            example=ExampleKind.PAIR,
            needs_reference=True,
            is_smoothed=True,
            beta=0.1,
            beta_source=_TRL_BETA.format("DPOConfig"),
            full_rate=5e-7,
            lora_rate=5e-6,
            rate_source=_DPO_RATES,
        ),
    )
    IPO = (
        "ipo",
        ObjectiveRecord(
            title="identity preference optimization",
            source="arXiv:2310.12036, equation 17, of log-probabilities per token as in trl",
            example=ExampleKind.PAIR,
            needs_reference=True,
            averages_tokens=True,
            beta=0.1,
            beta_source=_TRL_BETA.format("DPOConfig"),
            full_rate=5e-7,
            lora_rate=5e-6,
            rate_source=_DPO_RATES,
        ),
    )
    ORPO = (
        "orpo",
        ObjectiveRecord(
            title="odds ratio preference optimization",
            source="arXiv:2403.07691, equation 6",
            example=ExampleKind.PAIR,
            averages_tokens=True,
            beta=0.1,
            beta_source=_TRL_BETA.format("ORPOConfig"),
            full_rate=8e-6,
            lora_rate=8e-5,
            rate_source="trl, examples/scripts/orpo.py, full and LoRA",
        ),
    )
    SIMPO = (
        "simpo",
        ObjectiveRecord(
            title="simple preference optimization",
            source="arXiv:2405.14734, equation 6",
            example=ExampleKind.PAIR,
            averages_tokens=True,
            is_smoothed=True,
            beta=2.0,
            beta_source="arXiv:2405.14734, 2.0 to 2.5; github.com/princeton-nlp/SimPO",
            gamma=0.5,
            full_rate=5e-7,
            lora_rate=5e-6,
            rate_source="github.com/princeton-nlp/SimPO, README: 3e-7 to 1e-6; LoRA as DPO's",
        ),
    )
    KTO = (
        "kto",
        ObjectiveRecord(
            title="Kahneman-Tversky optimization",
            source="arXiv:2402.01306, equation 7",
            example=ExampleKind.LABELLED,
            needs_reference=True,
            needs_kl=True,
            beta=0.1,
            beta_source=_TRL_BETA.format("KTOConfig"),
            full_rate=5e-7,
            lora_rate=5e-6,
            rate_source="trl 1.16, trl/scripts/kto.py; LoRA as DPO's",
        ),
    )
