"""What a model needs of an attention kernel, and why a kernel cannot run it.

The planner's rules and the runtime's checks both ask here, so that what is planned can run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tightfit.core.attention import Attention, AttentionFeature
from tightfit.models.families.registry import find_family
from tightfit.models.family import Family
from tightfit.models.spec import ModelSpec

_PHRASES = {
    AttentionFeature.WINDOW: "it attends in a window",
    AttentionFeature.SOFTCAP: "it caps attention logits",
    AttentionFeature.SINKS: "it has attention sinks",
    AttentionFeature.CHUNKS: "it attends in chunks",
    AttentionFeature.ALIBI: "it biases attention by distance",
    AttentionFeature.BIDIRECTIONAL: "it attends both ways",
    AttentionFeature.DROPOUT: "it drops attention weights while training",
    AttentionFeature.OWN: "transformers has its own attention for it alone",
}


_SDPA, _FLASH = Attention.SDPA.record, Attention.FLASH.record


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNeeds:
    """What one model needs of a kernel."""

    family: Family
    head_dim: int
    features: frozenset[AttentionFeature]
    is_encoder_decoder: bool = False

    @property
    def can_pack(self) -> bool:
        """Whether packed documents stay apart. A bias by distance needs no positions for that."""
        family = self.family
        return not self.is_encoder_decoder and (family.takes_positions or family.alibi == "always")


def needs_of(spec: ModelSpec) -> AttentionNeeds:
    """What the planner knows: the config, and the family's record."""
    family = find_family(spec.model_type)
    stated = {
        AttentionFeature.SOFTCAP: spec.has_attention_softcap,
        AttentionFeature.WINDOW: spec.num_sliding_layers > 0,
        AttentionFeature.SINKS: family.has_sinks,
        AttentionFeature.ALIBI: has_alibi(family, is_grouped=spec.num_kv_heads < spec.num_heads),
    }
    found = {feature for feature, is_there in stated.items() if is_there}
    return AttentionNeeds(
        family=family,
        head_dim=spec.head_dim,
        features=frozenset({*found, *spec.attention_extras}),
        is_encoder_decoder=spec.is_encoder_decoder,
    )


def has_alibi(family: Family, *, is_grouped: bool) -> bool:
    """Whether scores get a fixed bias by distance."""
    return family.alibi == "always" or (family.alibi == "ungrouped" and not is_grouped)


def find_sdpa_problem(needs: AttentionNeeds) -> str | None:
    """Why SDPA cannot run this model, or None."""
    if not needs.family.has_sdpa:
        return "its family has no sdpa attention in transformers"
    return _name_missing(needs, _SDPA.features)


def find_varlen_problem(
    needs: AttentionNeeds, features: frozenset[AttentionFeature] = _FLASH.features
) -> str | None:
    """Why a kernel over packed documents that computes `features` cannot run this model."""
    if needs.is_encoder_decoder:
        return "it has an encoder and a decoder"
    if not needs.family.has_flash:
        return "its family does not hand down what the kernel needs"
    if not needs.family.accepts_custom_attention:
        return "its family knows its own attention alone"
    if not _FLASH.takes_head_dim(needs.head_dim):
        return f"its heads are {needs.head_dim} wide"
    return _name_missing(needs, features)


def find_flash_problem(needs: AttentionNeeds, *, is_packed: bool) -> str | None:
    """Why flash attention cannot run this model whatever is installed, or None.

    Rows that are not packed can go through transformers' own call of the flash-attn package, which
    families with attention classes of their own have too.
    """
    if is_packed or needs.family.accepts_custom_attention:
        return find_varlen_problem(needs, _FLASH.package_features)
    if not needs.family.has_flash:
        return "its family has no flash attention in transformers"
    return _name_missing(needs, _FLASH.package_features)


def find_context_problem(needs: AttentionNeeds) -> str | None:
    """Why the rows of this model cannot be shared by several GPUs, or None.

    Each computes a slice of a row, and attention alone exchanges anything.
    """
    family = needs.family
    if needs.is_encoder_decoder:
        return "it has an encoder and a decoder"
    if not family.is_known:
        return (
            "its family has no record, which would say whether anything but attention joins tokens"
        )
    if not family.takes_positions:
        return "not all of its layers compute each token by itself and by its position"
    if family.own_attention or not family.accepts_custom_attention:
        return _PHRASES[AttentionFeature.OWN]
    if not family.is_causal or AttentionFeature.BIDIRECTIONAL in needs.features:
        return _PHRASES[AttentionFeature.BIDIRECTIONAL]
    return None


def needs_flash_attn(needs: AttentionNeeds) -> bool:
    """Whether flash attention needs the flash-attn package: torch's own kernel lacks something."""
    return find_varlen_problem(needs) is not None


def find_attention_problem(
    attention: Attention, needs: AttentionNeeds, *, is_packed: bool
) -> str | None:
    """Why this kernel cannot run this model whatever is installed, or None."""
    if attention is Attention.SDPA:
        return find_sdpa_problem(needs)
    if attention is Attention.FLASH:
        return find_flash_problem(needs, is_packed=is_packed)
    if attention.record.is_own and not needs.family.accepts_custom_attention:
        return "its family knows its own attention alone"
    return _name_missing(needs, attention.record.features)


def list_proposed(needs: AttentionNeeds) -> list[Attention]:
    """The kernels that the planner may choose by itself, the best first: they run this model
    without further packages.

    A family without a record is given SDPA, which nearly all of transformers has, and never flash.
    """
    ranked = [(kind.record.preference, kind) for kind in Attention]
    return [
        kind
        for rank, kind in sorted((rank, kind) for rank, kind in ranked if rank is not None)
        if _is_proposed(kind, needs)
    ]


def _is_proposed(attention: Attention, needs: AttentionNeeds) -> bool:
    if attention is Attention.FLASH:
        return needs.family.is_known and find_varlen_problem(needs) is None
    return find_attention_problem(attention, needs, is_packed=False) is None


def read_attention_extras(config: Mapping[str, object], family: Family) -> set[AttentionFeature]:
    """Features that no size in a ModelSpec tells: from the language model's part of a config."""
    found = set()
    drops = [config.get(key) for key in ("attention_dropout", "attn_pdrop", "attn_dropout")]
    stated = [value for value in drops if isinstance(value, int | float)]
    if any(stated) or (not stated and family.default_attention_dropout):
        found.add(AttentionFeature.DROPOUT)
    kinds = config.get("layer_types")
    if isinstance(kinds, list | tuple) and "chunked_attention" in kinds:
        found.add(AttentionFeature.CHUNKS)
    if config.get("use_bidirectional_attention") is True:
        found.add(AttentionFeature.BIDIRECTIONAL)
    return found


def _name_missing(needs: AttentionNeeds, features: frozenset[AttentionFeature]) -> str | None:
    missing = [feature for feature in AttentionFeature if feature in needs.features - features]
    return _PHRASES[missing[0]] if missing else None
