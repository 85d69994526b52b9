"""Which tensors of a failed artefact are to blame, and what was done to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tightfit.core.errors import UserError
from tightfit.export.verify.verdict import Finding, Level
from tightfit.runtime.artefacts import Artefact, ArtefactKind

if TYPE_CHECKING:
    import torch

Read = Callable[[str], "torch.Tensor | None"]
MOST_NAMED = 4
FAR_FRACTION = 0.5
"""Of a tensor's own size: no rounding that still works moves one this far."""
CLOSE_FRACTION = 0.02


def diagnose(reference: Artefact, other: Artefact, *, far: float = FAR_FRACTION) -> list[Finding]:
    """Findings that name tensors; none where the two cannot be compared tensor by tensor."""
    try:
        names, expected = _open(reference)
        held, found = _open(other)
    except UserError:
        return []
    import torch

    bad: dict[str, list[str]] = {}
    with torch.no_grad():
        for name in names:
            if name not in held:
                continue
            one, two = expected(name), found(name)
            if one is None or two is None or one.ndim > 2:
                continue
            what = _describe(one.float(), two.float(), far)
            if what is not None:
                bad.setdefault(what, []).append(name)
    return [_tell(what, tensors) for what, tensors in bad.items()]


def _describe(one: torch.Tensor, two: torch.Tensor, far: float) -> str | None:
    if one.shape != two.shape:
        is_turned = one.ndim == 2 and one.T.shape == two.shape
        is_padded = one.shape[1:] == two.shape[1:]
        return "transposed" if is_turned else None if is_padded else "of another shape"
    if float((one - two).norm()) <= far * float(one.norm()):
        return None
    what = "with other values"
    if not bool(two.isfinite().all()):
        what = "not finite"
    elif not float(two.norm()):
        what = "all zero"
    elif one.ndim == 2 and one.shape[0] == one.shape[1] and _close(one.T, two):
        what = "transposed"
    elif one.ndim == 2 and _close(one.norm(dim=1).sort()[0], two.norm(dim=1).sort()[0]):
        what = "with rows in another order"
    return what


def _close(one: torch.Tensor, two: torch.Tensor) -> bool:
    return float((one - two).norm()) <= CLOSE_FRACTION * float(one.norm())


def _tell(what: str, names: list[str]) -> Finding:
    shown = ", ".join(names[:MOST_NAMED])
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    is_attention = all("q_proj" in name or "k_proj" in name for name in names)
    remedy = "make this one again from the reference"
    if what == "with rows in another order" and is_attention:
        remedy = "the q and k rows look permuted for another rope layout: convert it again"
    elif what == "all zero":
        remedy = "the file lost these weights: copy it or make it again"
    return Finding(level=Level.NOTE, text=f"{shown}{more}: {what}.", remedy=remedy)


def _open(artefact: Artefact) -> tuple[list[str], Read]:
    """Names as the model has them, and a reader; an adapter's are those of its merge."""
    from tightfit.export.merge.changes import read_changes
    from tightfit.export.merge.plan import plan_merge
    from tightfit.runtime.stored_weights import StoredWeights

    if artefact.kind is ArtefactKind.ADAPTER and artefact.base is not None:
        changes, stored = read_changes(artefact.path, artefact.base), StoredWeights(artefact.base)
        plan = plan_merge(changes, stored, None)

        def read_merged(name: str) -> torch.Tensor | None:
            key = plan.sources[name]
            held = stored.read(key) if key is not None else None
            return changes.apply(name, held) if changes.is_changed(name) else held

        return [output.name for output in plan.outputs], read_merged
    folder = artefact.path
    if artefact.kind is ArtefactKind.GGUF:
        from tightfit.runtime.import_models import import_gguf

        folder = import_gguf(artefact.path)
    elif artefact.kind is not ArtefactKind.MODEL:
        return [], lambda _: None
    whole = StoredWeights(folder)
    return list(whole.tensors), whole.read
