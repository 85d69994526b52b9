"""Where a model's parameters are: the count, part by part, with what is easily miscounted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tightfit.models.spec import Block, ModelSpec, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class CountRow:
    """One part of a model. The rows of a model sum to its `num_params`."""

    part: str
    num_params: int
    note: str = ""


def explain_count(spec: ModelSpec) -> list[CountRow]:
    """Parts in the order a token meets them, empty ones left out except a tied head."""
    rows = [
        CountRow(
            part="embedding",
            num_params=spec.embedding_params,
            note=f"{spec.vocab_size:,} x {spec.embedding_width or spec.hidden_size:,}",
        ),
        CountRow(
            part="positions",
            num_params=spec.position_params,
            note="learned position or relative-position tables",
        ),
        *_linear_rows(spec),
        CountRow(
            part="norms",
            num_params=sum(block.num_layers * block.norm_params for block in spec.blocks),
            note=_norm_note(spec),
        ),
        CountRow(
            part="other",
            num_params=spec.outer_params
            + sum(block.num_layers * block.extra_params for block in spec.blocks),
            note="last and embedding norms, projections, attention sinks",
        ),
        CountRow(part="lm_head", num_params=spec.lm_head_params, note=_head_note(spec)),
    ]
    return [row for row in rows if row.num_params or row.part == "lm_head"]


def _linear_rows(spec: ModelSpec) -> Iterator[CountRow]:
    for role in Role:
        total = sum(_role_params(block, role) for block in spec.blocks)
        yield CountRow(part=role.value, num_params=total, note=_linear_note(spec, role))


def _role_params(block: Block, role: Role) -> int:
    return block.num_layers * sum(p.num_params for p in block.linears if p.role is role)


def _linear_note(spec: ModelSpec, role: Role) -> str:
    parts = [part for block in spec.blocks for part in block.linears if part.role is role]
    names = ", ".join(dict.fromkeys(part.name for part in parts))
    layers = sum(
        block.num_layers
        for block in spec.blocks
        if any(part.role is role for part in block.linears)
    )
    note = f"{names} in {layers} layers"
    if role is Role.ATTENTION and spec.num_kv_heads != spec.num_heads:
        note += f"; {spec.num_heads} heads share {spec.num_kv_heads} of keys and values"
    if role is Role.EXPERT and parts:
        note += f"; {parts[0].copies} experts, {parts[0].copies_per_token} used by each token"
    return note


def _norm_note(spec: ModelSpec) -> str:
    per_layer = ", ".join(
        dict.fromkeys(f"{len(block.norm_widths)} a layer" for block in spec.blocks)
    )
    heads = ", and over query and key heads" if any(b.head_norm_params for b in spec.blocks) else ""
    return f"{'RMSNorm' if spec.is_rms_norm else 'LayerNorm'}, {per_layer}{heads}"


def _head_note(spec: ModelSpec) -> str:
    bias = " and a bias" if spec.lm_head_bias else ""
    if not spec.tie_embeddings:
        return f"separate from the embedding: its own {spec.embedding_params:,}{bias}"
    again = spec.num_params + spec.embedding_params
    return (
        f"tied to the embedding, counted once{bias}; "
        f"a file or figure that counts it again has {again:,}"
    )
