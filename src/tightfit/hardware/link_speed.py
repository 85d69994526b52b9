"""Network speeds as bytes per second: `100Gb/s` is bits, `12.5GB/s` is bytes."""

from __future__ import annotations

import re

from tightfit.core.errors import InvalidInputError

EXAMPLES = "write it like 10Gb/s, 100Gb/s or 12.5GB/s (b for bits, B for bytes)"
_SPEED = re.compile(
    r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([kKMGT])(b|bit|bits|B|bytes?)\s*(?:/s|ps|/sec)"
)
_FACTORS = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
SLOWEST_BYTES_PER_SECOND = 1e6 / 8
FASTEST_BYTES_PER_SECOND = 1e14 / 8


def parse_link_speed(text: str) -> float:
    """Bytes per second in one direction; between 1 Mb/s and 100 Tb/s."""
    parts = _SPEED.fullmatch(text.strip())
    if parts is None:
        raise InvalidInputError(f"`{text[:40]}` is not a network speed.", remedy=EXAMPLES)
    number, factor, unit = parts.groups()
    # Only the letter alone tells bits from bytes; the words say it themselves.
    is_bits = unit in ("b", "bit", "bits")
    speed = float(number) * _FACTORS[factor] / (8 if is_bits else 1)
    if not SLOWEST_BYTES_PER_SECOND <= speed <= FASTEST_BYTES_PER_SECOND:
        raise InvalidInputError(
            f"`{text}` is no network's speed (1 Mb/s to 100 Tb/s).", remedy=EXAMPLES
        )
    return speed
