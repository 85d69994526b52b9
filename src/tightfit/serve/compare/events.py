"""How the page's functions are bound to its components: quietly, and knowing who asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Handler = TypeVar("Handler", bound=Callable[..., Any])

QUIET: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
"""No veil over text that is being read, and no entry in a public list of endpoints."""
BUSY: dict[str, Any] = {"api_visibility": "private", "show_progress": "minimal"}
"""The same, for what takes a second and shows nothing meanwhile."""


def knows_visitor(handler: Handler) -> Handler:
    """Have the argument `request` filled in.

    Gradio goes by the annotation, and cannot resolve one that names a library which is
    imported inside a function.
    """
    import gradio as gr

    handler.__annotations__ = {"request": gr.Request}
    return handler


def name_visitor(request: Any) -> str:
    """One open tab of one browser."""
    return str(request.session_hash or "")
