"""Nodes that a constraint leaves, so that no plan is made for those it rules out."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from tightfit.core.errors import UsageError
from tightfit.hardware.inventory import Inventory

_SIMPLE = re.compile(r"[\w.:=+-]+(?:\s*[&|]\s*[\w.:=+-]+)*")


def keep_fitting(inventory: Inventory, constraint: str | None) -> Inventory:
    """The inventory without nodes that lack the features.

    Leaves out brackets, counts and negation: those are for Slurm alone to judge.
    """
    if constraint is None or not _SIMPLE.fullmatch(constraint.strip()):
        return inventory
    nodes = tuple(node for node in inventory.nodes if _has(node.features, constraint))
    if not nodes:
        held = sorted({word for node in inventory.nodes for word in node.features})
        known = f"choose among: {', '.join(held[:20])}" if held else "its nodes have none"
        raise UsageError(
            f"No node of {inventory.source} has the features `{constraint.strip()}`.",
            remedy=f"--constraint with a feature that nodes have, here or in site.yaml; {known}",
        )
    return replace(inventory, nodes=nodes)


def _has(features: Collection[str], constraint: str) -> bool:
    """Slurm binds `&` and `|` alike, from left to right."""
    first, *rest = re.split(r"([&|])", constraint)
    found = first.strip() in features
    for sign, word in zip(rest[::2], rest[1::2], strict=True):
        is_held = word.strip() in features
        found = (found or is_held) if sign == "|" else (found and is_held)
    return found
