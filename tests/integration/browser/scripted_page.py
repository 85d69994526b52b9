"""A compare page over engines without models: `scripted_page.py VOTES TOKEN_SECONDS [PASSWORD]`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from scripted_engine import ScriptedEngine, ScriptedPrompter
from tightfit.core.sampling import Sampling
from tightfit.data.formats import Message
from tightfit.engines.protocol import Engine
from tightfit.serving.compare.controls import ControlDefaults
from tightfit.serving.compare.models import ComparedModel, ComparedModels
from tightfit.serving.compare.page import ComparePage, make_compare_app
from tightfit.serving.compare.server import address_of, bound_socket, serve_app
from tightfit.serving.compare.votes import VoteFile

HOST = "127.0.0.1"


class NamedPrompter(ScriptedPrompter):
    """Has each model say something of its own."""

    def __init__(self, name: str) -> None:
        self.name = name

    def ask(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return (*super().ask(messages), *map(ord, f" says {self.name} "))


def opener(name: str, token_seconds: float) -> Callable[[], Engine]:
    def open_it() -> Engine:
        engine = ScriptedEngine(token_seconds=token_seconds)
        engine.prompter = NamedPrompter(name)
        return engine

    return open_it


def main(votes: str, token_seconds: str, password: str | None = None) -> None:
    models = ComparedModels(
        [
            ComparedModel(name="model-one", open=opener("one", float(token_seconds))),
            ComparedModel(name="model-two", open=opener("two", float(token_seconds))),
        ],
        is_one_at_a_time=False,
    )
    models.load()
    page = ComparePage(
        models=models,
        votes=VoteFile(Path(votes)),
        defaults=ControlDefaults(sampling=Sampling(max_new_tokens=400)),
        password=password,
    )
    with bound_socket(HOST, 0) as held:
        serve_app(
            make_compare_app(page), held, on_ready=lambda: print(address_of(held, HOST), flush=True)
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
