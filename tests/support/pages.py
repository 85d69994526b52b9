"""What tests read in HTML pages: whole markup, hover numbers, the SVG of a figure."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "br", "link"}


class Checker(HTMLParser):
    """Notes every tag, and that each one is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    @property
    def hovers(self) -> list[dict[str, Any]]:
        """The numbers of each plot, as the page's script reads them."""
        return [json.loads(value or "") for name, value in self.attributes if name == "data-hover"]


def check_page(page: str) -> Checker:
    """One whole file that fetches nothing."""
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    assert "http" not in page.replace("http-equiv", "")
    assert {"link", "img", "iframe"}.isdisjoint(checker.tags)
    assert {"src", "href"}.isdisjoint(name for name, _ in checker.attributes)
    assert "prefers-color-scheme: dark" in page
    return checker
