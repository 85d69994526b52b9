"""The page as one web app: its tabs, its looks, its headers, and serving it."""

from __future__ import annotations

import hmac
import logging
import os
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from tightfit.core.errors import UsageError
from tightfit.core.packages import require_packages
from tightfit.core.sampling import Sampling
from tightfit.runs.report import DEFAULT_FOLDER
from tightfit.runs.run_folder import RunFolder
from tightfit.serving.page.compare_tab import ExamplePrompt
from tightfit.serving.page.components import LIVE_EVENT, QUIET_EVENT, escape_html, make_cancel
from tightfit.serving.page.data_tab import Preview
from tightfit.serving.page.model_form import (
    OpenModels,
    build_model_form,
    connect_model_form,
    describe_models,
)
from tightfit.serving.page.models import PageModels
from tightfit.serving.page.plan_tab import Explore, PlanForm
from tightfit.serving.page.votes import VoteFile
from tightfit.serving.sockets import (
    BoundSocket,
    host_name,
    is_loopback,
    is_of_other_site,
    is_same_origin,
)

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
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 7860
WRONG_NAME = "Open this page as http://127.0.0.1:PORT/, or start it with --host and --password.\n"
UNREADABLE = "The page does not understand this request.\n"
WRONG_SITE = "Requests of other sites' pages are refused.\n"
SECONDS_TO_END = 2
"""For open streams when the page is stopped."""
LOGIN = "Any user name will do. The password is the one given to --password."

_LOGGER = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Asgi = Callable[[Scope, Any, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageVerbs:
    """What the page asks of the rooms above it. None: paths that are typed are not read."""

    explore: Explore
    preview: Preview | None
    open_models: OpenModels | None

    @property
    def reads_paths(self) -> bool:
        return self.preview is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What the page shows and where votes go."""

    models: PageModels
    votes: VoteFile
    sampling: Sampling
    """What the controls show first, and the rest of it."""
    verbs: PageVerbs
    system: str = ""
    examples: tuple[ExamplePrompt, ...] = ()
    runs: tuple[RunFolder, ...] = ()
    """Of the models."""
    runs_folder: Path = DEFAULT_FOLDER
    plan: PlanForm
    """What the plan tab starts with."""
    data_model: str = ""
    """The model that the data tab starts with."""
    known_models: tuple[str, ...] = ()
    """Offered while a model's name is typed."""
    first_tab: str = "plan"
    password: str | None = None


def require_gradio() -> None:
    """Raise with the command that installs what the page needs; keep gradio offline."""
    os.environ.update(QUIET_ENVIRONMENT)
    require_packages("The page", "gradio", "fastapi", "uvicorn", extra="ui")


def check_exposure(host: str, password: str | None) -> None:
    """Raise where other machines could open the page without a password."""
    if not is_loopback(host) and not password:
        raise UsageError(
            f"--host {host} lets other machines in, and no password was given.",
            remedy="add --password WORD, or leave out --host and reach it by ssh -L",
        )


def make_app(page: Page) -> Asgi:
    """The app to be served. Nothing is loaded or asked yet."""
    require_gradio()
    import gradio as gr
    from fastapi import FastAPI

    def is_right(_name: str, given: str) -> bool:
        return hmac.compare_digest(given.encode(), str(page.password).encode())

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
        theme=_make_theme(),
        # As it is: gradio's own option for style sheets rewrites their rules.
        head=f"<style>{_STYLE.read_text('utf-8')}</style>"
        f"<script>{_SCRIPT.read_text('utf-8')}</script>",
        auth=None if page.password is None else is_right,
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


def _make_blocks(page: Page) -> Any:
    import gradio as gr

    from tightfit.serving.page.chat_tab import build_chat_tab
    from tightfit.serving.page.compare_tab import CompareController, build_compare_tab
    from tightfit.serving.page.data_tab import build_data_tab
    from tightfit.serving.page.plan_tab import build_plan_tab
    from tightfit.serving.page.runs_tab import build_runs_tab

    models, verbs = page.models, page.verbs
    with gr.Blocks(analytics_enabled=False, title="tightfit") as blocks:
        where = f"{Path.cwd().name} on {socket.gethostname()}"
        gr.HTML(
            f'<header class="tf-head"><h1>tightfit</h1><p>{escape_html(where)}</p></header>',
            apply_default_css=False,
        )
        with gr.Tabs(selected=page.first_tab):
            with gr.Tab("Plan", id="plan"):
                plan = build_plan_tab(
                    verbs.explore, page.plan, page.known_models, reads_paths=verbs.reads_paths
                )
            if verbs.preview is not None:
                with gr.Tab("Data", id="data"):
                    build_data_tab(verbs.preview, page.data_model)
            with gr.Tab("Runs", id="runs"):
                build_runs_tab(page.runs, page.runs_folder, reads_paths=verbs.reads_paths)
            with gr.Tab("Chat", id="chat"):
                chat_form = build_model_form(models, "chat", can_choose=verbs.reads_paths)
                chat = build_chat_tab(models, page.sampling, page.system)
            with gr.Tab("Compare", id="compare"):
                compare_form = build_model_form(models, "compare", can_choose=verbs.reads_paths)
                compare = build_compare_tab(
                    CompareController(models, page.votes), page.examples, page.sampling, page.system
                )

        changing = [*chat.outputs, *compare.outputs]

        def refresh() -> list[Any]:
            return [*chat.refresh(), *compare.refresh()]

        forms = (chat_form, compare_form)
        if verbs.open_models is not None:
            for form, other in (forms, forms[::-1]):
                connect_model_form(
                    form, models, verbs.open_models, [other.note, *changing],
                    lambda: [describe_models(models), *refresh()],
                )  # fmt: skip
        blocks.load(plan.run, [*plan.inputs], plan.shown, **LIVE_EVENT)
        # Other models may be loaded than when the page was built.
        blocks.load(
            lambda: [describe_models(models)] * 2 + refresh(), None,
            [*(form.note for form in forms), *changing], **QUIET_EVENT,
        )  # fmt: skip
        blocks.unload(make_cancel(models))
    blocks.queue(api_open=False)
    return blocks


def serve_app(app: Asgi, bound: BoundSocket, *, on_ready: Callable[[], None]) -> None:
    """Serve until interrupted. `on_ready` is called once requests are answered."""
    import uvicorn

    from tightfit.serving.http.app import BodyLimit
    from tightfit.serving.http.connections import make_config
    from tightfit.serving.http.limits import ServerLimits, reserve_connections

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                on_ready()

    limits = ServerLimits()
    app = cast(Asgi, BodyLimit(cast(Any, refuse_unreadable(app)), limits.max_body_bytes))
    config = make_config(
        require_own_name(app, is_loopback_only=bound.is_loopback),
        replace(limits, max_connections=reserve_connections(limits.max_connections)),
        access_log=False,
        timeout_graceful_shutdown=SECONDS_TO_END,
        lifespan="on",
    )
    Server(config).run(sockets=[bound.socket])


def require_own_name(app: Asgi, *, is_loopback_only: bool) -> Asgi:
    """The same app, for requests of its own page; on loopback only under a loopback name.

    A page of another site can have its own name point here (DNS rebinding), and the browser
    would then let it in as if it were ours; or send forms here, whose answer it cannot read.
    """

    async def guarded(scope: Scope, receive: Any, send: Send) -> None:
        if scope["type"] == "websocket":
            return  # none is served, and a refusal by silence closes it
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            host = headers.get(b"host", b"").decode("latin-1")
            origin = headers.get(b"origin")
            if is_loopback_only and not is_loopback(host_name(host)):
                await _refuse(send, 421, WRONG_NAME)
                return
            is_same = origin is None or is_same_origin(origin.decode("latin-1"), host)
            if not is_same or is_of_other_site(headers):
                await _refuse(send, 403, WRONG_SITE)
                return
        await app(scope, receive, send)

    return guarded


def refuse_unreadable(app: Asgi) -> Asgi:
    """The same app; what it cannot read is refused in a line, where gradio fails with a traceback.

    What our own code does with a request runs behind gradio's queue, and never raises here.
    """

    async def guarded(scope: Scope, receive: Any, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        held: list[MutableMapping[str, Any]] = []
        has_begun = False

        async def send_or_hold(message: MutableMapping[str, Any]) -> None:
            nonlocal has_begun
            # Starlette answers 500 before it raises.
            if held or message.get("status") == 500:
                held.append(message)
                return
            has_begun = True
            await send(message)

        try:
            await app(scope, receive, send_or_hold)
        except Exception as error:
            _LOGGER.error("the page could not read a request: %s", type(error).__name__)
            if not has_begun:
                await _refuse(send, 400, UNREADABLE)
            return
        for message in held:
            await send(message)

    return guarded


async def _refuse(send: Send, status: int, text: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})


# How the page looks: the report page's colours and system fonts, light and dark, any width.

_STYLE = Path(__file__).with_name("style.css")
_SCRIPT = Path(__file__).with_name("page.js")
_COLOURS = {
    # name: light, dark; those of `core/figures.py`, and what controls need besides
    "body_background_fill": ("#ffffff", "#0f1419"),
    "body_text_color": ("#1f2328", "#e6edf3"),
    "body_text_color_subdued": ("#59636e", "#9aa4ae"),
    "background_fill_primary": ("#ffffff", "#0f1419"),
    "background_fill_secondary": ("#f6f8fa", "#161c23"),
    "border_color_primary": ("#d8dee4", "#3a424b"),
    "border_color_accent": ("#4477aa", "#7fb0de"),
    "color_accent_soft": ("#e8eff6", "#1c2a38"),
    "block_background_fill": ("#ffffff", "#0f1419"),
    "block_label_text_color": ("#59636e", "#9aa4ae"),
    "block_title_text_color": ("#59636e", "#9aa4ae"),
    "block_info_text_color": ("#59636e", "#9aa4ae"),
    "input_background_fill": ("#ffffff", "#161c23"),
    "input_border_color": ("#c4ccd4", "#4a535d"),
    "input_border_color_focus": ("#4477aa", "#7fb0de"),
    "input_placeholder_color": ("#6b7580", "#8b95a0"),
    "button_primary_background_fill": ("#36648f", "#3f74a6"),
    "button_primary_background_fill_hover": ("#2b5276", "#4b83b8"),
    "button_primary_text_color": ("#ffffff", "#ffffff"),
    "button_secondary_background_fill": ("#f6f8fa", "#1c232b"),
    "button_secondary_background_fill_hover": ("#e9eef3", "#27303a"),
    "button_secondary_text_color": ("#1f2328", "#e6edf3"),
    "button_secondary_border_color": ("#d8dee4", "#3a424b"),
    "slider_color": ("#4477aa", "#7fb0de"),
    "checkbox_background_color_selected": ("#36648f", "#3f74a6"),
    "checkbox_border_color_selected": ("#36648f", "#3f74a6"),
    "checkbox_label_background_fill": ("#f6f8fa", "#1c232b"),
    "checkbox_label_background_fill_selected": ("#e8eff6", "#1c2a38"),
    "checkbox_label_text_color_selected": ("#1f2328", "#e6edf3"),
    "link_text_color": ("#36648f", "#7fb0de"),
}


def _make_theme() -> Any:
    """System fonts and plain surfaces: nothing is fetched for it."""
    import gradio as gr

    theme = gr.themes.Base(
        font=("system-ui", "sans-serif"),
        font_mono=("ui-monospace", "monospace"),
        radius_size=gr.themes.sizes.radius_md,
        spacing_size=gr.themes.sizes.spacing_md,
    )
    chosen = {
        "color_accent": "#4477aa",  # the theme knows no dark one; the style sheet has it
        "block_shadow": "none",
        "block_border_width": "0px",
        "block_padding": "0px",
        "block_label_text_weight": "500",
        "input_border_width": "1px",
        "button_large_text_weight": "500",
        "button_large_text_size": "*text_md",
        "button_large_padding": "8px 16px",
        "checkbox_label_padding": "6px 10px",
        "button_primary_border_color": "transparent",
    }
    for name, (light, dark) in _COLOURS.items():
        chosen |= {name: light, f"{name}_dark": dark}
    return theme.set(**chosen)
