"""Checked access to the values of a model's config: nothing unchecked gets past this file."""

from __future__ import annotations

from collections.abc import Mapping

from tightfit.core.errors import InvalidInputError

MAX_WIDTH = 1_000_000
"""Of hidden states. The widest public model has 18,432."""
MAX_INNER_WIDTH = 16 * MAX_WIDTH
MAX_LAYERS = 10_000
MAX_COUNT = 65_536
"""Of heads, experts, buckets."""
MAX_VOCAB = 100_000_000
MAX_POSITIONS = 10_000_000_000


class Fields:
    """The values of one config. Each read names the key, so each error can name it too."""

    def __init__(self, values: Mapping[str, object], *, name: str, source: str) -> None:
        self._values = values
        self.name = name
        self.source = source
        self.warnings: list[str] = []

    def has(self, *keys: str) -> bool:
        """Whether any of the keys holds a value; null counts as absent."""
        return self._first(keys) is not None

    def mentions(self, key: str) -> bool:
        """Whether the key is there at all, null or not."""
        return key in self._values

    def need(self, *groups: tuple[str, ...]) -> None:
        """Name every missing key at once. A group holds the spellings of one key."""
        missing = [f"`{group[0]}`" for group in groups if not self.has(*group)]
        if missing:
            raise InvalidInputError(
                f"{self.source} does not say {', '.join(missing)}.",
                remedy=f"add {'it' if len(missing) == 1 else 'them'}, or name a model that "
                "`tightfit models` lists",
            )

    def size(self, *keys: str, most: int = MAX_WIDTH) -> int:
        """A whole number from 1 to `most`, under the first of the keys that is there."""
        value = self.optional_size(*keys, most=most)
        if value is None:
            self.need(keys)
            raise AssertionError("unreachable: `need` raises")
        return value

    def size_or_default(self, *keys: str, default: int, most: int = MAX_WIDTH) -> int:
        """As `size`; where the config is silent, the library's default, with a warning."""
        value = self.optional_size(*keys, most=most)
        if value is None:
            self.warnings.append(f"`{keys[0]}` is not in the config; {default} assumed.")
            return default
        return value

    def optional_size(self, *keys: str, most: int = MAX_WIDTH) -> int | None:
        """As `size`, or None where no key holds a value."""
        key = self._first(keys)
        if key is None:
            return None
        value = self._values[key]
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, "a whole number")
        if value < 1:
            raise self._wrong(key, "1 or more")
        if value > most:
            raise self._wrong(key, f"at most {most:,}")
        return value

    def window(self, key: str, *, default: int | None) -> int | None:
        """A size where null means none and only a missing key means the default."""
        if key not in self._values:
            return default
        return self.optional_size(key, most=MAX_POSITIONS)

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false; null counts as absent."""
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def text(self, key: str, *, default: str) -> str:
        """Short printable text; null counts as absent."""
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, str) or len(value) > 100 or not value.isprintable():
            raise self._wrong(key, "a short word")
        return value

    def texts(self, key: str) -> tuple[str, ...] | None:
        """A list of words, or None where the config is silent."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of words")
        return tuple(value)

    def numbers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers; empty where the config is silent."""
        value = self._values.get(key)
        if value is None:
            return ()
        if not isinstance(value, (list, tuple)) or not all(type(item) is int for item in value):
            raise self._wrong(key, "a list of whole numbers")
        return tuple(value)

    def number(self, key: str) -> float | None:
        """Any finite number, or None."""
        value = self._values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(key, "a number")
        if not abs(value) <= 1e18:  # written so that NaN is refused too
            raise self._wrong(key, "a number")
        return float(value)

    def part(self, key: str) -> Fields | None:
        """A nested config that shares this one's warnings, or None."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self._wrong(key, "an object with keys")
        inner = Fields(value, name=self.name, source=self.source)
        inner.warnings = self.warnings
        return inner

    def with_fallback(self, other: Fields, *keys: str) -> Fields:
        """These values, with some keys taken from `other` where these are silent."""
        borrowed = {key: other._values[key] for key in keys if other.has(key)}
        merged = Fields({**borrowed, **self._values}, name=self.name, source=self.source)
        merged.warnings = self.warnings
        return merged

    def quotient(self, whole: int, parts: int, what: str) -> int:
        """`whole / parts`, refused where it is not whole."""
        if whole % parts:
            raise InvalidInputError(
                f"{self.source}: {what}: {parts:,} does not divide {whole:,}.",
                remedy="correct the config, or name a model that `tightfit models` lists",
            )
        return whole // parts

    def _first(self, keys: tuple[str, ...]) -> str | None:
        return next((key for key in keys if self._values.get(key) is not None), None)

    def _wrong(self, key: str, expected: str) -> InvalidInputError:
        return InvalidInputError(
            f"{self.source}: `{key}` is {shown(self._values[key])}; it must be {expected}.",
            remedy=f"correct `{key}` in the config",
        )


def shown(value: object) -> str:
    """A value for a message: short, printable, whatever it is."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, int) and abs(value) > 10**40:
        return "an integer of more than 40 digits"
    text = ascii(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
