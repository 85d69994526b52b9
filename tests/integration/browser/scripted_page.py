"""The page over engines without models: `scripted_page.py VOTES TOKEN_SECONDS [PASSWORD]`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from scripted_engine import ScriptedEngine, ScriptedPrompter
from tightfit.api.ui import explore_without_paths
from tightfit.core.sampling import Sampling
from tightfit.data.formats import Message
from tightfit.data.tools import Tool
from tightfit.engines.protocol import Engine
from tightfit.serving.page.app import Page, PageVerbs, make_app, serve_app
from tightfit.serving.page.models import PageModels
from tightfit.serving.page.plan_tab import PlanForm
from tightfit.serving.page.votes import VoteFile
from tightfit.serving.sockets import bind_socket

HOST = "127.0.0.1"


class NamedPrompter(ScriptedPrompter):
    """Has each model say something of its own."""

    def __init__(self, name: str) -> None:
        self.name = name

    def ask(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> tuple[int, ...]:
        return (*super().ask(messages, tools), *map(ord, f" says {self.name} "))


def opener(name: str, token_seconds: float) -> Callable[[], Engine]:
    def open_it() -> Engine:
        engine = ScriptedEngine(token_seconds=token_seconds)
        engine.prompter = NamedPrompter(name)
        return engine

    return open_it


def main(votes: str, token_seconds: str, password: str | None = None) -> None:
    models = PageModels(
        {
            "model-one": opener("one", float(token_seconds)),
            "model-two": opener("two", float(token_seconds)),
        },
        is_one_at_a_time=False,
    )
    models.load()
    page = Page(
        models=models,
        votes=VoteFile(Path(votes)),
        sampling=Sampling(max_new_tokens=400),
        password=password,
        verbs=PageVerbs(explore=explore_without_paths, preview=None, open_models=None),
        plan=PlanForm(job="Llama-2-7b", on="RTX-4090"),
        first_tab="compare",
    )
    bound = bind_socket(HOST, 0)
    serve_app(make_app(page), bound, on_ready=lambda: print(f"{bound.url}/", flush=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
