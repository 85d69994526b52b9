"""The only place where bytes, seconds and counts become text, and text becomes them."""

from __future__ import annotations

import re

from tightfit.core.errors import InvalidInputError

KIB = 1024
MIB = 1024**2
GIB = 1024**3
GB = 10**9
TERA = 10**12

_SUFFIXES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1024**4,
    "k": KIB,
    "m": MIB,
    "g": GIB,
    "t": 1024**4,
}
MAX_SIZE_TEXT = 40
"""Longer texts are no sizes; the bound keeps their digits from overflowing a float."""
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """`24GiB`, `24 GB`, `24G`, `1024` as bytes; a bare letter is binary, as Slurm has it."""
    match = _SIZE.fullmatch(text) if len(text) <= MAX_SIZE_TEXT else None
    factor = _SUFFIXES.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise InvalidInputError(
            f"`{text[:MAX_SIZE_TEXT]}` is not a size.", remedy="write it like 24GiB, 24GB or 1024"
        )
    return int(float(match.group(1)) * factor)


def render_bytes(num_bytes: float) -> str:
    """GiB with one decimal; smaller amounts in MiB or KiB so that they never read 0.0."""
    for factor, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= 0.95 * factor:
            return f"{num_bytes / factor:,.1f} {unit}"
    return f"{num_bytes:.0f} B"


def render_seconds(seconds: float) -> str:
    """`0.42 s`, `12 s`, `4 min 10 s`, `3 h 20 min`, `2 d 5 h`."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    for size, unit, smaller, smaller_unit in (
        (86_400, "d", 3_600, "h"),
        (3_600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            rest = (whole % size) // smaller
            return f"{whole // size} {unit}" + (f" {rest} {smaller_unit}" if rest else "")
    return f"{whole} s"


def render_count(number: float) -> str:
    """`6.74 B`, `125 M`, `950`: parameters and tokens as people say them."""
    for factor, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if abs(number) >= 0.9995 * factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number:.0f}"


def render_usd(usd: float) -> str:
    """Money, with cents only where they matter."""
    return f"${usd:,.2f}" if usd < 1000 else f"${usd:,.0f}"
