"""The compare page as one web app: four tabs, and headers that let nothing leave the machine."""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from tightfit.core.errors import SetupError
from tightfit.runs.run_folder import RunFolder
from tightfit.serving.compare.compare_tab import ExamplePrompt
from tightfit.serving.compare.controls import ControlDefaults, visitor_id, with_request
from tightfit.serving.compare.html import escape_html
from tightfit.serving.compare.models import ComparedModels
from tightfit.serving.compare.votes import VoteFile

QUIET_ENVIRONMENT = {
    "GRADIO_ANALYTICS_ENABLED": "False",
    "GRADIO_SHARE": "False",
    "GRADIO_MCP_SERVER": "False",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
}
"""Set before gradio is imported: it looks outside hosts up otherwise."""
POLICY = "; ".join(
    (
        "default-src 'self' data: blob:",
        "script-src 'self' blob: 'unsafe-inline' 'unsafe-eval'",
        "style-src 'self' 'unsafe-inline'",
        "object-src 'none'",
        "base-uri 'self'",
        "form-action 'self'",
        "frame-ancestors 'self'",
    )
)
"""The browser itself refuses every other host, whatever a model or a library asks for."""
_HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)
LOGIN = "Any user name will do. The password is the one given to --password."

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Asgi = Callable[[Scope, Any, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparePage:
    """What the page shows and where votes go."""

    models: ComparedModels
    votes: VoteFile
    defaults: ControlDefaults
    examples: tuple[ExamplePrompt, ...] = ()
    runs: tuple[RunFolder, ...] = ()
    plan_model: str = ""
    """The name that the plan tab starts with."""
    plan_on: str = "here"
    """The hardware that it starts with."""
    colours: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Of the parts of memory, by name."""
    password: str | None = None


def require_gradio() -> None:
    """Say how to get what the page needs, and keep it quiet."""
    os.environ.update(QUIET_ENVIRONMENT)
    for package in ("gradio", "fastapi", "uvicorn"):
        if find_spec(package) is None:
            raise SetupError(
                f"The page needs {package}, which is not installed.",
                remedy="pip install 'tightfit[ui]'",
            )


def make_compare_app(page: ComparePage) -> Asgi:
    """The app to be served. Nothing is loaded or asked yet."""
    require_gradio()
    import gradio as gr
    from fastapi import FastAPI

    from tightfit.serving.compare.style import HEAD, make_theme

    outer = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app: Any = gr.mount_gradio_app(
        outer,
        _make_blocks(page),
        path="/",
        footer_links=[],
        run_history=False,
        show_error=False,
        ssr_mode=False,
        mcp_server=False,
        pwa=False,
        enable_monitoring=False,
        allowed_paths=[str(page.votes.path.resolve())],
        max_file_size=1,
        theme=make_theme(),
        head=HEAD,
        auth=None if page.password is None else _make_guard(page.password),
        auth_message=LOGIN,
    )
    return with_headers(app)


def with_headers(app: Asgi) -> Asgi:
    """The same app; every answer carries the policy."""

    async def wrapped(scope: Scope, receive: Any, send: Send) -> None:
        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        await app(scope, receive, send_with_headers if scope["type"] == "http" else send)

    return wrapped


def _make_guard(password: str) -> Callable[[str, str], bool]:
    def is_right(_name: str, given: str) -> bool:
        return hmac.compare_digest(given.encode(), password.encode())

    return is_right


def _make_blocks(page: ComparePage) -> Any:
    import gradio as gr

    from tightfit.serving.compare.chat_tab import ChatController, build_chat_tab
    from tightfit.serving.compare.compare_tab import CompareController, build_compare_tab
    from tightfit.serving.compare.plan_tab import build_plan_tab
    from tightfit.serving.compare.runs_tab import build_runs_tab

    names = page.models.names
    with gr.Blocks(analytics_enabled=False, title=f"{names[0]} and {names[1]}: compare") as blocks:
        gr.HTML(_render_head(names), apply_default_css=False)
        with gr.Tabs():
            with gr.Tab("Compare", id="compare"):
                build_compare_tab(
                    CompareController(page.models, page.votes, page.defaults), page.examples
                )
            with gr.Tab("Chat", id="chat"):
                build_chat_tab(ChatController(page.models, page.defaults))
            with gr.Tab("Plan", id="plan"):
                build_plan_tab(page.plan_model, page.plan_on, page.colours)
            with gr.Tab("Runs", id="runs"):
                build_runs_tab(page.runs)

        @with_request
        def leave(request: Any) -> None:
            page.models.cancel(visitor_id(request))

        blocks.unload(leave)
    blocks.queue(api_open=False)
    return blocks


def _render_head(names: Sequence[str]) -> str:
    title = f"{escape_html(names[0])} <b>and</b> {escape_html(names[1])}"
    return f'<header class="tf-head"><h1>tightfit compare</h1><p>{title}</p></header>'
