"""What hides secrets in texts: tokens of the environment, passwords in URLs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

HIDDEN = "***"
MIN_CHARS = 8
"""A shorter value, such as `true`, is no secret, and would be found in other words."""
_ENDS = ("APIKEY", "CREDENTIAL", "CREDENTIALS", "JWT", "PASSPHRASE", "PASSWD", "PASSWORD", "SECRET",
         "TOKEN")  # fmt: skip
_WORDS = frozenset({"KEY", "PASS"})
_PLACES = ("DIR", "FILE", "PATH")
_LOGIN = re.compile(r"(?<=://)[^/\s@'\"`]+(?=@)")
"""Of a URL: `user:password`, or a token alone."""


def is_secret(name: str, value: str = "") -> bool:
    """Whether a variable or option is one by its name, or holds a URL with a password."""
    words = name.strip("-").replace("-", "_").upper().split("_")
    is_named = any(word in _WORDS or word.endswith(_ENDS) for word in words)
    return (is_named and words[-1] not in _PLACES) or _LOGIN.search(value) is not None


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """For a process that needs none."""
    return {name: value for name, value in environment.items() if not is_secret(name, value)}


def hide_secrets(text: str) -> str:
    """The text without values of the environment's secrets and without logins in URLs."""
    values = [
        value
        for name, value in os.environ.items()
        if len(value) >= MIN_CHARS and value in text and is_secret(name)
    ]
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return _LOGIN.sub(HIDDEN, text)


def hide_secret_options(words: Sequence[str]) -> list[str]:
    """A command line without the values of options such as `--api-key`."""
    shown = []
    for before, word in zip(["", *words], words, strict=False):
        name, sign, _ = word.partition("=")
        if before.startswith("--") and is_secret(before):
            shown.append(HIDDEN)
        elif sign and name.startswith("--") and is_secret(name):
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(hide_secrets(word))
    return shown
