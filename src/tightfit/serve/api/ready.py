"""Ready: what a script needs to know of a server that answers."""

from __future__ import annotations

import os

from pydantic import BaseModel, ConfigDict

from tightfit.serve.api.hub import ServedModel
from tightfit.serve.api.server import ApiServer


class ReadyModel(BaseModel):
    """One loaded model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    aliases: tuple[str, ...]
    engine: str
    why: str
    format: str
    device: str
    max_context: int
    num_slots: int


class Ready(BaseModel):
    """The address and the models. A key is told only where it was made here, never to a file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    base_url: str
    """For OpenAI's clients."""
    host: str
    port: int
    pid: int
    needs_api_key: bool
    api_key: str | None = None
    models: tuple[ReadyModel, ...]


def describe_ready(server: ApiServer, *, needs_api_key: bool, made_key: str | None) -> Ready:
    """What to tell once everything is loaded."""
    bound = server.bound
    return Ready(
        url=bound.url,
        base_url=f"{bound.url}/v1",
        host=bound.address,
        port=bound.port,
        pid=os.getpid(),
        needs_api_key=needs_api_key,
        api_key=made_key,
        models=tuple(map(_describe, server.hub.models)),
    )


def _describe(model: ServedModel) -> ReadyModel:
    info = model.engine.info
    return ReadyModel(
        id=model.id,
        aliases=model.names[1:],
        engine=info.engine,
        why=info.why,
        format=info.format,
        device=info.device,
        max_context=info.max_context,
        num_slots=info.num_slots,
    )
