"""Attention kernels: one record each. Planner, estimates, tracer and runtime ask it.

Light on purpose: the command line lists the names before anything heavy is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from tightfit.core.dtypes import Dtype, RecordEnum


class AttentionFeature(str, Enum):
    """What a model's attention does besides a causal softmax; not every kernel computes it."""

    SOFTCAP = "softcap"
    WINDOW = "window"
    CHUNKS = "chunks"
    SINKS = "sinks"
    ALIBI = "alibi"
    BIDIRECTIONAL = "bidirectional"
    DROPOUT = "dropout"
    OWN = "own"
    """Its modelling code knows its own attention alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRecord:
    """Everything the program knows of one attention kernel."""

    implementation: str
    """transformers' own name; or `module:function` of a function with the arguments of
    transformers' `sdpa_attention_forward`, imported when a model is loaded."""
    mask: str = "transformers.masking_utils:sdpa_mask"
    """For such a function, the one that makes its mask, with that one's arguments."""

    # What it computes
    features: frozenset[AttentionFeature] = frozenset()
    """Besides a causal softmax. For flash: of torch's own kernel."""
    package_features: frozenset[AttentionFeature] = frozenset()
    """The same where the flash-attn package is installed."""
    computes: tuple[Dtype, ...] = (Dtype.BF16, Dtype.FP16, Dtype.FP32)
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    varlen: Literal["never", "where it can", "always"] = "never"
    """Whether packed documents are computed one by one, without a mask."""

    # Memory and time
    stores_scores: bool = False
    """The score of every pair of tokens is written to memory."""
    skips: Literal["nothing", "causal", "windows"] = "causal"
    """Masked pairs that it leaves out: none, those of a plain causal mask, or of a window too."""
    num_kernels: int = 2
    """Kernels that one layer's forward pass launches."""

    # Where it runs
    min_capability: tuple[int, int] = (0, 0)
    runs_on_cpu: bool = True

    # Choosing
    preference: int | None = None
    """The planner tries the smallest first; None for what it never chooses by itself."""

    @property
    def is_own(self) -> bool:
        """Whether transformers has to be given the implementation."""
        return ":" in self.implementation

    def takes_head_dim(self, head_dim: int) -> bool:
        is_small = self.max_head_dim is None or head_dim <= self.max_head_dim
        return is_small and head_dim % self.head_dim_multiple == 0


_ALL = frozenset(AttentionFeature)


class Attention(RecordEnum):
    """How attention is computed: with an S x S matrix in memory, or without."""

    record: AttentionRecord

    EAGER = (
        "eager",
        AttentionRecord(
            implementation="eager",
            features=_ALL,
            stores_scores=True,
            skips="nothing",
            num_kernels=8,
            preference=4,
        ),
    )
    SDPA = (
        "sdpa",
        AttentionRecord(
            implementation="sdpa",
            # Windows, chunks and biases by distance come as a mask.
            features=_ALL
            - {AttentionFeature.SOFTCAP, AttentionFeature.SINKS, AttentionFeature.OWN},
            varlen="where it can",
            preference=1,
        ),
    )
    FLASH = (
        "flash",
        AttentionRecord(
            implementation="flash_attention_2",  # for rows that are not packed
            # torch.nn.attention.varlen: 2.10 has `is_causal` alone, 2.11 a scale and a window.
            features=frozenset({AttentionFeature.WINDOW}),
            package_features=frozenset(
                {AttentionFeature.WINDOW, AttentionFeature.SOFTCAP, AttentionFeature.DROPOUT}
            ),
            computes=(Dtype.BF16, Dtype.FP16),
            max_head_dim=256,
            head_dim_multiple=8,
            varlen="always",
            skips="windows",
            min_capability=(8, 0),
            runs_on_cpu=False,
            preference=2,
        ),
    )
    FLEX = (
        "flex",
        AttentionRecord(
            implementation="tightfit.runtime.flex_attention:flex_attention",
            mask="tightfit.runtime.flex_attention:make_block_mask",
            features=_ALL - {AttentionFeature.DROPOUT, AttentionFeature.OWN},
            max_head_dim=256,
            head_dim_multiple=8,
            skips="windows",
            min_capability=(8, 0),  # triton's, and that of its kernels' shared memory
            runs_on_cpu=False,  # no backward pass there (torch 2.13)
            preference=3,
        ),
    )

    @property
    def implementation_name(self) -> str:
        """The name that transformers knows it by."""
        return f"tightfit_{self.value}" if self.record.is_own else self.record.implementation
