"""OpenAI's embeddings: the request, its limits, and the answer."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import Response
from numpy.typing import NDArray
from pydantic import Field
from starlette.types import Receive

from tightfit.serving.http.answers import compute
from tightfit.serving.http.limits import MAX_INPUT_TOKENS, MAX_INPUTS
from tightfit.serving.http.registry import (
    ModelRegistry,
    ServedModel,
    ServerPhase,
    shutting_down_error,
)
from tightfit.serving.http.schemas import (
    ApiError,
    Count,
    Listed,
    RequestBody,
    ResponseBody,
    Text,
    TokenId,
    list_texts,
)


class EmbeddingRequest(RequestBody):
    """`POST /v1/embeddings`."""

    model: Text | None = None
    """An id of `/v1/models`. May be left out where only one model is served."""
    input: (
        Text
        | Annotated[Listed[Text], Field(min_length=1, max_length=MAX_INPUTS)]
        | Annotated[Listed[TokenId], Field(min_length=1)]
        | Annotated[
            Listed[Annotated[Listed[TokenId], Field(min_length=1)]],
            Field(min_length=1, max_length=MAX_INPUTS),
        ]
    )
    """A text, several, or the same as tokens."""
    encoding_format: Literal["float", "base64"] | None = None
    """`base64`: little-endian fp32. Left out: `float`."""
    dimensions: Count | None = None
    """None but the model's own width: it was not trained to be cut."""
    user: Any = None
    """Not looked at."""

    @property
    def inputs(self) -> list[str | tuple[int, ...]]:
        """Each input by itself."""
        return list_texts(self.input)


class Embedding(ResponseBody):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(ResponseBody):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(ResponseBody):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


async def answer_embeddings(
    registry: ModelRegistry, body: EmbeddingRequest, receive: Receive, *, timeout_seconds: float
) -> Response:
    """The embedding of each input, one after another, between the steps of other answers."""
    registry.require_open()
    model = registry.find(body.model)
    loop = asyncio.get_running_loop()
    has_left = threading.Event()

    def work() -> EmbeddingList:
        inputs = _read_inputs(model, body)
        found: list[NDArray[np.float32]] = []
        for tokens in inputs:
            if has_left.is_set() or registry.phase is ServerPhase.STOPPING:
                raise shutting_down_error()
            found.append(model.engine.embed(tokens))
            _check_width(len(found[0]), body.dimensions)
        num_tokens = sum(map(len, inputs))
        loop.call_soon_threadsafe(model.count_read, num_tokens)
        return EmbeddingList(
            object="list",
            data=[
                Embedding(
                    object="embedding",
                    index=index,
                    embedding=_write(vector, body.encoding_format),
                )
                for index, vector in enumerate(found)
            ],
            model=model.id,
            usage=EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens),
        )

    try:
        return await compute(model, work, receive, timeout_seconds=timeout_seconds)
    finally:
        has_left.set()


def _check_width(width: int, stated: int | None) -> None:
    if stated not in (None, width):
        raise ApiError(
            400,
            f"This model does not support specifying dimensions: its embeddings have {width:,}.",
            code="unsupported_parameter",
            param="dimensions",
        )


def _read_inputs(model: ServedModel, body: EmbeddingRequest) -> list[Sequence[int]]:
    """Every input's tokens, within the limits."""
    prompter, most = model.engine.prompter, model.engine.info.max_context
    inputs: list[Sequence[int]] = []
    total = 0
    for given in body.inputs:
        tokens = given
        if isinstance(given, str):
            if not given:
                raise ApiError(400, "An input is empty.", code="invalid_value", param="input")
            tokens = (*prompter.continue_text(given), *prompter.tokenizer.ends_with)
        assert not isinstance(tokens, str)
        if len(tokens) > most:
            raise ApiError(
                400,
                f"An input has {len(tokens):,} tokens; the model takes {most:,}.",
                code="context_length_exceeded",
                param="input",
            )
        total += len(tokens)
        if total > MAX_INPUT_TOKENS:
            raise ApiError(
                400,
                f"The inputs have more than {MAX_INPUT_TOKENS:,} tokens: send fewer in one "
                "request.",
                code="max_tokens_per_request",
                param="input",
            )
        inputs.append(tokens)
    return inputs


def _write(vector: NDArray[np.float32], form: str | None) -> list[float] | str:
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    # The shortest digits that read back as the same fp32.
    return [float(str(value)) for value in vector]
