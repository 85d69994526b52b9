"""Slurm's time limits as seconds: `30`, `30:00`, `12:00:00`, `7-00:00:00`, `infinite`."""

from __future__ import annotations

import re

from tightfit.core.errors import InvalidInputError

_UNLIMITED = {"infinite", "unlimited", "n/a", "not_set", "none", "(null)", ""}
_TIME = re.compile(
    r"(?:(?P<days>[0-9]{1,6})-(?P<dh>[0-9]{1,6})(?::(?P<dm>[0-9]{1,6}))?(?::(?P<ds>[0-9]{1,6}))?"
    r"|(?P<h>[0-9]{1,6}):(?P<hm>[0-9]{1,6}):(?P<hs>[0-9]{1,6})"
    r"|(?P<m>[0-9]{1,6})(?::(?P<s>[0-9]{1,6}))?)"
)
EXAMPLES = "write it as Slurm does: 12:00:00, 7-00:00:00, 90 (minutes) or infinite"


def parse_time_limit(text: str) -> float | None:
    """Seconds, or None for no limit. A bare number is minutes, as everywhere in Slurm."""
    if text.strip().casefold() in _UNLIMITED:
        return None
    parts = _TIME.fullmatch(text.strip())
    if parts is None:
        raise InvalidInputError(f"`{text[:40]}` is not a time limit.", remedy=EXAMPLES)
    seconds = (
        int(parts["days"] or 0) * 86_400
        + int(parts["dh"] or parts["h"] or 0) * 3_600
        + int(parts["dm"] or parts["hm"] or parts["m"] or 0) * 60
        + int(parts["ds"] or parts["hs"] or parts["s"] or 0)
    )
    if seconds == 0:
        raise InvalidInputError(f"`{text}` is a time limit of nothing.", remedy=EXAMPLES)
    return float(seconds)
