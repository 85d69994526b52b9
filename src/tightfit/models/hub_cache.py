"""Models that Hugging Face's own tools have already put on this disk. Never asks the network."""

from __future__ import annotations

import os
import re
from pathlib import Path

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def locate_hub_cache() -> Path | None:
    """Where hub downloads land, by the hub library's own rules."""
    for variable, below in (
        ("HF_HUB_CACHE", ""),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
    ):
        value = os.environ.get(variable)
        if value:
            return Path(value).expanduser() / below
    try:
        return Path.home() / ".cache/huggingface/hub"
    except RuntimeError:  # a user id without a home
        return None


def find_in_hub_cache(name: str, cache: Path | None) -> Path | None:
    """The snapshot folder of a hub id: that of `main`, else the newest that has a config."""
    if cache is None or len(name) > 200 or ".." in name or not _HUB_ID.fullmatch(name):
        return None
    home = cache / f"models--{name.replace('/', '--')}"
    try:
        named = home / "snapshots" / (home / "refs" / "main").read_text(encoding="utf-8").strip()
        if (named / "config.json").is_file():
            return named
    except (OSError, ValueError):
        pass  # no such ref; another revision may be there
    try:
        snapshots = [path.parent for path in home.glob("snapshots/*/config.json")]
        return max(snapshots, key=lambda path: path.stat().st_mtime, default=None)
    except OSError:
        return None
