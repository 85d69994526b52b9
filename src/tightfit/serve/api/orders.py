"""From a checked HTTP request to what its model is asked: prompts as tokens, settings, a shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tightfit.data.formats import Message
from tightfit.engines.protocol import Request, Sampling
from tightfit.serve.api.errors import ApiError, prompt_too_long
from tightfit.serve.api.hub import Hub, ServedModel
from tightfit.serve.api.requests import MAX_ANSWERS, AnswerRequest, ChatRequest, CompletionRequest
from tightfit.serve.api.shapes import ChatShape, CompletionShape, Shape

COMPLETION_TOKENS = 16
"""OpenAI's default for `/v1/completions`; a chat answer may fill the context."""
_SEED_BITS = 0x7FFF_FFFF
"""llama.cpp's seeds are 32 bits wide and the largest means `any`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One HTTP request for answers."""

    model: ServedModel
    num_answers: int
    num_per_prompt: int
    write_requests: Callable[[], list[Request]]
    """Runs the template and the tokenizer, which takes a while for long prompts."""
    shape: Shape
    is_streamed: bool
    includes_usage: bool


def order_chat(hub: Hub, body: ChatRequest) -> Order:
    """A conversation to be gone on with."""
    model = hub.find(body.model)

    def write_requests() -> list[Request]:
        messages = [Message(_role(message.role), message.text) for message in body.messages]
        tokens = model.engine.prompter.ask(messages)
        return _requests(model, body, tokens, most=body.most_tokens, param="messages")

    return _order(
        model,
        body,
        num_prompts=1,
        write_requests=write_requests,
        shape=ChatShape(model, includes_usage=body.includes_usage),
    )


def order_completion(hub: Hub, body: CompletionRequest) -> Order:
    """Texts to be continued."""
    model = hub.find(body.model)
    prompts = body.prompts

    def write_requests() -> list[Request]:
        prompter = model.engine.prompter
        encoded = [
            prompter.continue_text(prompt) if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]
        most = body.max_tokens or COMPLETION_TOKENS
        return [
            request
            for tokens in encoded
            for request in _requests(model, body, tokens, most=most, param="prompt")
        ]

    return _order(
        model,
        body,
        num_prompts=len(prompts),
        write_requests=write_requests,
        shape=CompletionShape(model, includes_usage=body.includes_usage),
    )


def _order(
    model: ServedModel,
    body: AnswerRequest,
    *,
    num_prompts: int,
    write_requests: Callable[[], list[Request]],
    shape: Shape,
) -> Order:
    num_per_prompt = body.n or 1
    num_answers = num_prompts * num_per_prompt
    if num_answers > MAX_ANSWERS:
        raise ApiError(
            400,
            f"{num_prompts} prompts with {num_per_prompt} answers each are {num_answers} answers; "
            f"one request may ask for {MAX_ANSWERS}.",
            param="n",
        )
    return Order(
        model=model,
        num_answers=num_answers,
        num_per_prompt=num_per_prompt,
        write_requests=write_requests,
        shape=shape,
        is_streamed=bool(body.stream),
        includes_usage=body.includes_usage,
    )


def _role(name: str) -> str:
    """`developer` is what newer clients call the system."""
    return "system" if name == "developer" else name


def _requests(
    model: ServedModel,
    body: AnswerRequest,
    tokens: Sequence[int],
    *,
    most: int | None,
    param: str,
) -> list[Request]:
    """The same prompt `n` times, each with a seed of its own."""
    max_context = model.engine.info.max_context
    if not tokens:
        raise ApiError(400, "The prompt is empty.", param=param)
    if len(tokens) >= max_context:
        raise prompt_too_long(len(tokens), max_context, param=param)
    room = max_context - len(tokens)
    max_new_tokens = room if most is None else min(most, room)
    return [
        Request(prompt=tuple(tokens), sampling=_sampling(body, max_new_tokens, index))
        for index in range(body.n or 1)
    ]


def _sampling(body: AnswerRequest, max_new_tokens: int, index: int) -> Sampling:
    is_greedy = body.temperature == 0 or body.top_p == 0
    temperature = 1.0 if body.temperature is None else body.temperature
    return Sampling(
        max_new_tokens=max_new_tokens,
        temperature=0.0 if is_greedy else float(temperature),
        top_p=float(body.top_p) if body.top_p else 1.0,
        top_k=max(body.top_k or 0, 0),
        min_p=float(body.min_p or 0.0),
        repetition_penalty=float(body.repetition_penalty or 1.0),
        seed=None if body.seed is None else (body.seed + index) & _SEED_BITS,
        stop=body.stops,
        ignores_stop_tokens=bool(body.ignore_eos),
    )
