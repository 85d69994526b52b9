"""Did you mean: the nearest known names to a mistyped one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], *, most: int = 3) -> list[str]:
    """Known names close to `word`, best first, case ignored; names that contain it count too."""
    by_fold: dict[str, str] = {}
    for name in known:
        by_fold.setdefault(name.casefold(), name)
    fold = word.casefold()
    close = difflib.get_close_matches(fold, by_fold, n=most, cutoff=0.6)
    inside = [name for name in by_fold if fold and fold in name and name not in close]
    return [by_fold[name] for name in (close + sorted(inside, key=len))[:most]]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` Did you mean a, b or c?`, or nothing where no name is near. Starts with a space."""
    names = [f"`{name}`" for name in nearest(word, known)]
    if not names:
        return ""
    listed = " or ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
    return f" Did you mean {listed}?"
