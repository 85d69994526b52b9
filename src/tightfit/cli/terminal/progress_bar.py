"""A bar with the time left on stderr where someone watches, and nothing elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

Report = Callable[[str, int, int], None]


@contextlib.contextmanager
def progress_bar() -> Iterator[Report | None]:
    """What to call with a task's name, how far it is, and of how much."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress, TaskID

    with Progress(console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, of: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=of)
            bars.update(tasks[what], completed=done)

        yield report
