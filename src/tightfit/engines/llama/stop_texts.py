"""Text as it comes, cut at a stop text and never shown beyond what may be the head of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """What `data.prompter.TextStream` does for tokens, for an engine that gives text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._longest = max(map(len, self._stops), default=0)
        self._pieces: list[str] = []
        self._held = ""
        """The end of what came, not shown yet."""
        self.is_stopped = False

    @property
    def text(self) -> str:
        """All that came, cut at a stop text."""
        return "".join(self._pieces) + self._held

    def push(self, text: str) -> str:
        """What can be shown now; often less than came."""
        if self.is_stopped:
            return ""
        held = self._held + text
        found = [at for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            self._held = held[: min(found)]
            return self.finish()
        count = self._head_of_stop(held)
        self._held = held[len(held) - count :]
        return self._show(held[: len(held) - count])

    def finish(self) -> str:
        """What was held back, now that no more comes."""
        held, self._held = self._held, ""
        return self._show(held)

    def _show(self, text: str) -> str:
        if text:
            self._pieces.append(text)
        return text

    def _head_of_stop(self, text: str) -> int:
        """Characters at the end that may be the head of a stop text."""
        for count in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-count:]) for stop in self._stops):
                return count
        return 0
