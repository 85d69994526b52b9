"""Which tensors a merged model has, where each comes from, and what becomes of tied ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tightfit.core.errors import InvalidInputError
from tightfit.export.merge.changes import AdapterChanges
from tightfit.runtime.shard_writer import Output
from tightfit.runtime.stored_weights import StoredWeights

if TYPE_CHECKING:
    import torch

SAME_FRACTION = 1e-6
"""Of the largest value: two halves of a tie that differ by less are one matrix still."""


@dataclass(slots=True, kw_only=True)
class MergePlan:
    """Outputs in the order of the base's files."""

    outputs: list[Output] = field(default_factory=list)
    sources: dict[str, str | None] = field(default_factory=dict)
    """By output: the tensor of the base that it is made from."""
    is_untied: bool = False
    missing: tuple[str, ...] = ()
    """Changed parameters that the base's files hold under no name of their own."""

    @property
    def num_bytes(self) -> int:
        return sum(output.num_bytes for output in self.outputs)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.sources)


def plan_merge(
    changes: AdapterChanges, stored: StoredWeights, dtype: torch.dtype | None
) -> MergePlan:
    """`dtype` for every number with a point; None: each as the base has it."""
    plan = MergePlan()
    for key, tensor in stored.tensors.items():
        name = resolve_name(key, changes)
        is_known = name in changes.shapes
        names = _tied_outputs(name, key, changes, stored, plan) if is_known else [name]
        for made in names:
            if made in plan.sources:
                continue
            is_number = tensor.dtype.is_floating_point
            has_own_shape = is_known and (changes.is_changed(made) or changes.vocab_size)
            plan.sources[made] = key
            plan.outputs.append(
                Output(
                    name=made,
                    shape=changes.shapes[made] if has_own_shape else tensor.shape,
                    dtype=dtype if dtype is not None and is_number else tensor.dtype,
                )
            )
    _add_unstored(plan, changes, dtype)
    return plan


def resolve_name(key: str, changes: AdapterChanges) -> str:
    """A stored name as the model has it: checkpoints of the bare model lack the prefix."""
    candidates = (key, f"{changes.prefix}.{key}", key.removeprefix(f"{changes.prefix}."))
    return next((name for name in candidates if name in changes.shapes), key)


def _tied_outputs(
    name: str, key: str, changes: AdapterChanges, stored: StoredWeights, plan: MergePlan
) -> list[str]:
    """The names to write for one stored matrix: one while all that share it stay the same."""
    partners = changes.partners(name)
    touched = sorted(p for p in partners if p in changes.layers or p in changes.saved)
    if len(partners) == 1 or not touched:
        written = next((p for p in partners if p in plan.sources), None)
        return [written or name] if changes.base_value(name) is not None else [name]
    if len(touched) == len(partners) and _come_out_same(touched, key, changes, stored):
        return [next((p for p in partners if p in plan.sources), name)]
    if changes.model.config.is_encoder_decoder:
        raise InvalidInputError(
            f"The adapter changes {touched[0]}, and the model uses that matrix in "
            f"{len(partners)} places, which cannot be told apart in its files.",
            remedy="use the adapter as it is: tightfit chat ADAPTER; or train it again without "
            "embeddings",
        )
    plan.is_untied = True
    return [name, *sorted(partners - {name})]


def _come_out_same(
    names: list[str], key: str, changes: AdapterChanges, stored: StoredWeights
) -> bool:
    first = changes.apply(names[0], stored.read(key))
    most = float(first.abs().max())
    for name in names[1:]:
        other = changes.apply(name, stored.read(key))
        if float((other - first).abs().max()) > SAME_FRACTION * most:
            return False
    return True


def _add_unstored(plan: MergePlan, changes: AdapterChanges, dtype: torch.dtype | None) -> None:
    """Parameters that the base's files lack: whole ones can be written, others are missing."""
    missing = []
    for name in {**changes.layers, **changes.saved, **changes.based}:
        if any(partner in plan.sources for partner in changes.partners(name)):
            continue
        whole = changes.saved.get(name, changes.based.get(name))
        if whole is None:
            missing.append(name)
            continue
        plan.sources[name] = None
        plan.outputs.append(Output(name=name, shape=tuple(whole.shape), dtype=dtype or whole.dtype))
    plan.missing = tuple(missing)
