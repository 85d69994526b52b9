"""How long work reports how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with a task's name, how much of it is done, and of how much."""
CountProgress = Callable[[int, int], None]
"""The same of one task: how much is done, and of how much."""
