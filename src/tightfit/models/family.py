"""Family: what the program knows of one architecture of transformers beyond its sizes.

The planner, the estimates, the tracer, the runtime and the exporters ask this record. A new family
is a record in `families/`, listed in `families/registry.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tightfit.models.families.parts import ConfigFields
from tightfit.models.spec import ModelSpec

Reader = Callable[[ConfigFields], ModelSpec]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture. The defaults are those of a Llama-like decoder.

    Facts about modelling code are those of transformers 5.22; `tests/unit/models/test_families.py`
    compares them with the installed one.
    """

    model_types: tuple[str, ...]
    """Values of `model_type` in config.json."""
    read: Reader | None = None
    """From the config to a ModelSpec. None: the generic reader, which warns."""
    is_known: bool = True
    """False where no record says so: then transformers' own flags decide at load."""

    # Attention
    has_sdpa: bool = True
    """`_supports_sdpa` of the model class."""
    has_flash: bool = True
    """`_supports_flash_attn` of the model class."""
    accepts_custom_attention: bool = True
    """Attention is looked up by name, so that ours can be registered. False: the modelling code
    has classes of its own for each attention."""
    has_sinks: bool = False
    """A learned logit per head joins the softmax; no kernel that we call has them."""
    has_position_bias: bool = False
    """A learned bias on the scores sends SDPA to its math kernel, which holds the scores."""
    default_softcap: bool = False
    """Attention logits are capped unless the config says null."""
    default_attention_dropout: float = 0.0
    """Where the config does not say."""
    alibi: Literal["never", "always", "ungrouped"] = "never"
    """Where scores get a fixed bias by distance. `ungrouped`: in models without grouped heads."""
    sdpa_always_masks: bool = False
    """SDPA is always given a mask, so that its flash kernel is never chosen."""
    is_causal: bool = True
    """False: tokens see those behind them, so padding needs a mask."""

    # Packing
    takes_positions: bool = True
    """The model's forward takes `position_ids`, by which packed documents are told apart."""
    mask_reads_positions: bool = True
    """The causal mask is made with the positions. False: only attention that is given document
    bounds keeps packed documents apart."""

    # Layers
    has_liger: bool = False
    """Liger has fused kernels for it (monkey_patch.py, 0.8)."""
    scales_logits: bool = False
    """The head's output is changed before the loss, so the model makes all logits itself."""
    fuses_projections: bool = False
    """A norm feeds q, k, v and nothing else, and another gate and up, so that the matrices of each
    can be one product."""
    splits_rotary: bool = False
    """One projection is split and rotated: the values, a view of it, keep all of it alive."""
    composes_gelu: bool = False
    """The usual activation is `gelu_new`, which transformers writes as separate operations."""
    keeps_norm_output_fp32: bool = False
    """The norm multiplies in fp32, and keeps that product where its weight is trained."""
    quantizes_linears: bool = True
    """bitsandbytes packs its layers. False: they are a subclass of nn.Linear, which is left."""
    has_fp8_linears: bool = True
    """Its linear layers are `nn.Linear`, which fp8 products replace."""
    casts_to_weight_dtype: bool = False
    """Activations are cast to the dtype of the stored matrix, which must not be fp8."""

    # fp16
    overflows_fp16: bool = False
    """Activations exceed 65504 in practice (transformers pull 36832)."""
    may_overflow_fp16: bool = False
    """Trained in bf16, and known to overflow at times (transformers issue 9295)."""

    @property
    def has_fused_attention(self) -> bool:
        """Whether its modelling code has any attention but the eager one."""
        return self.has_sdpa or self.has_flash
