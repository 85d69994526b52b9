"""Bytes, seconds, speeds and counts as text, and text as them: the only place."""

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


# Network speeds as bytes per second: `100Gb/s` is bits, `12.5GB/s` is bytes.

LINK_SPEED_EXAMPLES = "write it like 10Gb/s, 100Gb/s or 12.5GB/s (b for bits, B for bytes)"
_SPEED = re.compile(
    r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([kKMGT])(b|bit|bits|B|bytes?)\s*(?:/s|ps|/sec)"
)
_SPEED_FACTORS = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
SLOWEST_BYTES_PER_SECOND = 1e6 / 8
FASTEST_BYTES_PER_SECOND = 1e14 / 8


def parse_link_speed(text: str) -> float:
    """Bytes per second in one direction; between 1 Mb/s and 100 Tb/s."""
    parts = _SPEED.fullmatch(text.strip())
    if parts is None:
        raise InvalidInputError(
            f"`{text[:40]}` is not a network speed.", remedy=LINK_SPEED_EXAMPLES
        )
    number, factor, unit = parts.groups()
    # Only the letter alone tells bits from bytes; the words say it themselves.
    is_bits = unit in ("b", "bit", "bits")
    speed = float(number) * _SPEED_FACTORS[factor] / (8 if is_bits else 1)
    if not SLOWEST_BYTES_PER_SECOND <= speed <= FASTEST_BYTES_PER_SECOND:
        raise InvalidInputError(
            f"`{text}` is no network's speed (1 Mb/s to 100 Tb/s).", remedy=LINK_SPEED_EXAMPLES
        )
    return speed


# Slurm's time limits as seconds: `30`, `30:00`, `12:00:00`, `7-00:00:00`, `infinite`.

_UNLIMITED = {"infinite", "unlimited", "n/a", "not_set", "none", "(null)", ""}
_TIME = re.compile(
    r"(?:(?P<days>[0-9]{1,6})-(?P<dh>[0-9]{1,6})(?::(?P<dm>[0-9]{1,6}))?(?::(?P<ds>[0-9]{1,6}))?"
    r"|(?P<h>[0-9]{1,6}):(?P<hm>[0-9]{1,6}):(?P<hs>[0-9]{1,6})"
    r"|(?P<m>[0-9]{1,6})(?::(?P<s>[0-9]{1,6}))?)"
)
TIME_LIMIT_EXAMPLES = "write it as Slurm does: 12:00:00, 7-00:00:00, 90 (minutes) or infinite"


def parse_time_limit(text: str) -> float | None:
    """Seconds, or None for no limit. A bare number is minutes, as everywhere in Slurm."""
    if text.strip().casefold() in _UNLIMITED:
        return None
    parts = _TIME.fullmatch(text.strip())
    if parts is None:
        raise InvalidInputError(f"`{text[:40]}` is not a time limit.", remedy=TIME_LIMIT_EXAMPLES)
    seconds = (
        int(parts["days"] or 0) * 86_400
        + int(parts["dh"] or parts["h"] or 0) * 3_600
        + int(parts["dm"] or parts["hm"] or parts["m"] or 0) * 60
        + int(parts["ds"] or parts["hs"] or parts["s"] or 0)
    )
    if seconds == 0:
        raise InvalidInputError(f"`{text}` is a time limit of nothing.", remedy=TIME_LIMIT_EXAMPLES)
    return float(seconds)
