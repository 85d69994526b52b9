"""Bodies of the HTTP API in OpenAI's format: requests, answers and errors.

Unknown request fields are ignored. A field that would change the answer and that no engine
supports has a schema that accepts only the value that requests nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from fastapi import HTTPException, Response
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from tightfit.core.errors import UserError
from tightfit.engines.protocol import EngineLostError
from tightfit.serving.http.limits import MAX_LOGIT_BIASES, MAX_TOP_LOGPROBS

MAX_MESSAGES = 10_000
MAX_CHOICES = 16
MAX_ANSWERS = 64
MAX_STOPS = 16
MAX_TOOLS = 512
MAX_STOP_CHARS = 1000
MAX_SEED = 2**63 - 1
MAX_TOKEN_ID = 2**31 - 1
MAX_REASON_CHARS = 400
"""Of pydantic's words, which quote a part of the body."""


def _require_characters(text: str) -> str:
    """JSON can spell half a surrogate pair, which is no character and which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("Text must not hold half of a surrogate pair") from None
    return text


def _require_false(value: bool) -> bool:
    if value:
        raise ValueError("Input should be false")
    return value


OnlyFalse = Annotated[
    bool, AfterValidator(_require_false), Field(json_schema_extra={"const": False})
]
"""Not `Literal[False]`, which takes 0 as well."""
Item = TypeVar("Item")
Listed = Annotated[list[Item], Field(fail_fast=True)]
"""A list whose first wrong item is the only one reported: a body can hold millions."""
Text = Annotated[str, AfterValidator(_require_characters)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
StopText = Annotated[Text, Field(max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
NoItems = Annotated[Listed[Any], Field(max_length=0)]
NoKeys = Annotated[dict[str, Any], Field(max_length=0)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
TokenNumber = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]


class RequestBody(BaseModel):
    # Strict, because "3" for a number is a caller's mistake that a guess would hide.
    model_config = ConfigDict(extra="ignore", strict=True)


class StreamOptions(RequestBody):
    """What a stream sends beside the answer."""

    include_usage: bool | None = None
    """One more event before the end, with the number of tokens."""


class TextFormat(RequestBody):
    """Any text."""

    type: Literal["text"]


class JsonFormat(RequestBody):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(RequestBody):
    """A JSON schema, as OpenAI wraps it."""

    name: Text | None = None
    description: Any = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: Any = None
    """Not looked at: every answer is valid."""


class SchemaFormat(RequestBody):
    """Values of a JSON schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class PatternFormat(RequestBody):
    """Not OpenAI's. Whole matches of a regular expression."""

    type: Literal["regex"]
    pattern: Text


AnswerFormat = Annotated[
    TextFormat | JsonFormat | SchemaFormat | PatternFormat, Field(discriminator="type")
]


class AnswerRequest(RequestBody):
    """What chat and completions share."""

    model: Text | None = None
    """An id of `/v1/models`. May be left out where only one model is served."""
    max_tokens: Count | None = None
    """Most tokens of an answer. Cut where the context ends."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0: always the likeliest token. Left out: 1."""
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID)] | None = None
    """Not OpenAI's. 0 or -1: every token may be drawn."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Not OpenAI's."""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    """Not OpenAI's. 1: none."""
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    """The same seed gives the same answer; with `n`, each answer has a seed of its own from it."""
    stop: StopText | Annotated[Listed[StopText], Field(max_length=MAX_STOPS)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    ignore_eos: bool | None = None
    """Not OpenAI's. Go on to `max_tokens`, for measuring."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenNumber, Bias], Field(max_length=MAX_LOGIT_BIASES)] | None = None
    """By token id: what is added to its logit."""
    response_format: AnswerFormat | None = None
    """What the whole answer is. Of completions not OpenAI's."""
    user: Any = None
    """Not looked at."""

    @property
    def stops(self) -> tuple[str, ...]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in given if text)

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        return tuple((int(token), amount) for token, amount in (self.logit_bias or {}).items())

    @property
    def num_top_logprobs(self) -> int | None:
        """Likeliest tokens to report beside each token; None: no log-probabilities."""
        return None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class TextPart(RequestBody):
    """A piece of a message."""

    type: Literal["text"]
    text: Text


Content = Text | Annotated[Listed[TextPart], Field(max_length=MAX_MESSAGES)] | None


class CalledFunction(RequestBody):
    """Name and arguments of a call."""

    name: Text
    arguments: Text
    """An object, as JSON."""


class RequestToolCall(RequestBody):
    """A call that the assistant made earlier."""

    id: Text | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class ChatMessage(RequestBody):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: Annotated[Listed[RequestToolCall], Field(max_length=MAX_TOOLS)] | None = None
    content: Content = Field(default=None, validate_default=True)
    """Only an assistant that calls tools may leave it out."""
    reasoning_content: Text | None = None
    """Not OpenAI's. Of the assistant."""
    tool_call_id: Text | None = None
    """Of a `tool` message: the call whose result it is."""
    name: Text | None = None
    function_call: NoKeys | None = None
    audio: NoKeys | None = None

    @property
    def text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)

    @field_validator("content")
    @classmethod
    def _require_content(cls, content: Content, given: ValidationInfo) -> Content:
        if content is None and not given.data.get("tool_calls"):
            raise PydanticCustomError("missing", "Field required")
        return content


class ToolName(RequestBody):
    name: Text


class NamedTool(RequestBody):
    """The tool that is to be called."""

    type: Literal["function"]
    function: ToolName


class ChatRequest(AnswerRequest):
    """`POST /v1/chat/completions`."""

    messages: Annotated[Listed[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    """The newer name of `max_tokens`, and stronger than it."""
    logprobs: bool | None = None
    """Of the model's own distribution, before temperature and penalties."""
    top_logprobs: TopLogprobs | None = None
    """So many likeliest tokens at each place; only with `logprobs`."""
    tools: Annotated[Listed[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    """Functions that the model may call, each with a JSON schema."""
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """`none`: the model does not see the tools. `required`: the answer is a call."""
    parallel_tool_calls: bool | None = None
    """False: of several calls, the first one is returned."""
    functions: NoItems | None = None
    function_call: Literal["none", "auto"] | None = None
    modalities: Annotated[Listed[Literal["text"]], Field(max_length=1)] | None = None
    audio: NoKeys | None = None

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def num_top_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @field_validator("top_logprobs")
    @classmethod
    def _require_logprobs(cls, count: int | None, given: ValidationInfo) -> int | None:
        if count and not given.data.get("logprobs"):
            raise PydanticCustomError("missing_logprobs", "Only with `logprobs: true`")
        return count

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """What the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def required_tools(self) -> list[str] | None:
        """Names of the tools of which one must be called; none: of all; None: no call must be."""
        if isinstance(self.tool_choice, NamedTool):
            return [self.tool_choice.function.name]
        return [] if self.tool_choice == "required" else None

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(AnswerRequest):
    """`POST /v1/completions`."""

    prompt: (
        Text
        | Annotated[Listed[Text], Field(min_length=1, max_length=MAX_ANSWERS)]
        | Annotated[Listed[TokenId], Field(min_length=1)]
        | Annotated[
            Listed[Annotated[Listed[TokenId], Field(min_length=1)]],
            Field(min_length=1, max_length=MAX_ANSWERS),
        ]
    )
    """A text, several, or the same as tokens."""
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Left out: 16. 0 with `echo`: the prompt alone."""
    logprobs: TopLogprobs | None = None
    """So many likeliest tokens at each place, and the token's own."""
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    echo: bool | None = None
    """The prompt comes before the answer; with `logprobs` its tokens' too."""
    suffix: Annotated[str, Field(max_length=0)] | None = None

    @property
    def num_top_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def prompts(self) -> list[str | tuple[int, ...]]:
        """Each prompt by itself."""
        return list_texts(self.prompt)


def list_texts(given: Any) -> list[str | tuple[int, ...]]:
    """Each by itself, of a text, several, or the same as tokens."""
    if isinstance(given, str) or isinstance(given[0], int):
        given = [given]
    return [one if isinstance(one, str) else tuple(one) for one in given]


# Response bodies, for the OpenAPI description; `answers.py` writes them.

Finish = Literal["stop", "length"]
ChatFinish = Literal["stop", "length", "tool_calls"]


class ResponseBody(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PromptTokensDetails(ResponseBody):
    cached_tokens: int
    """Of the prompt, read from the cache of an earlier request."""


class Usage(ResponseBody):
    """A prompt counts once, however many answers it has; the token that ends an answer counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class _AnswerHead(ResponseBody):
    id: str
    created: int
    model: str
    system_fingerprint: str


class AnswerFunction(ResponseBody):
    name: str
    arguments: str
    """An object, as JSON."""


class AnswerToolCall(ResponseBody):
    id: str
    type: Literal["function"]
    function: AnswerFunction


class AnswerMessage(ResponseBody):
    role: Literal["assistant"]
    content: str | None
    """Null where there are only calls."""
    reasoning_content: str | None = None
    """Only of models that write reasoning in a channel of its own."""
    tool_calls: list[AnswerToolCall] | None = None
    refusal: None


class LogprobEntry(ResponseBody):
    token: str
    logprob: float
    bytes: list[int]
    """A token may be a part of a character."""


class ChatLogprobEntry(LogprobEntry):
    top_logprobs: list[LogprobEntry]


class ChatLogprobs(ResponseBody):
    content: list[ChatLogprobEntry]
    refusal: None


class ChatChoice(ResponseBody):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish


class ChatCompletion(_AnswerHead):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class ToolCallDelta(AnswerToolCall):
    """A whole call: calls are sent when the answer has ended."""

    index: int


class ChatDelta(ResponseBody):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(ResponseBody):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None


class ChatChunk(_AnswerHead):
    """One `data:` line of a stream. `usage` is there only where `include_usage` asked for it."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionLogprobs(ResponseBody):
    tokens: list[str]
    token_logprobs: list[float | None]
    """Null for a prompt's first token."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ResponseBody):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None


class Completion(_AnswerHead):
    """A whole answer, or one `data:` line of a stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TokenizeRequest(RequestBody):
    """`POST /tokenize`, in vLLM's form: a text, or messages as the chat template writes them."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[Listed[ChatMessage], Field(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[Listed[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool = True
    """Begin a text as the tokenizer begins one; the template decides for messages."""
    return_token_strs: bool = False


class TokenizeAnswer(ResponseBody):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestBody):
    """`POST /detokenize`."""

    model: Text | None = None
    tokens: Listed[TokenId]


class DetokenizeAnswer(ResponseBody):
    prompt: str


class ModelCard(ResponseBody):
    """One model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    aliases: list[str]
    """Other names it answers to."""
    engine: str
    format: str
    device: str
    max_context: int
    """Tokens of prompt and answer together."""
    pooling: Literal["mean", "last"]
    """Of the hidden states whose pool is an embedding."""
    parent: str | None
    """The model that an adapter lies over."""
    root: str
    """Of an adapter the name of its folder, of a model its own."""


class ModelList(ResponseBody):
    object: Literal["list"]
    data: list[ModelCard]


class Health(ResponseBody):
    status: Literal["loading", "ready", "stopping"]


# Errors: one body, and one place for every status.

CLIENT_GONE = 499
"""What the metrics count where nobody was left to answer; never sent."""
_KINDS = {
    403: "permission_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}


class ErrorDetail(ResponseBody):
    """What went wrong, for a reader and for a program."""

    message: str
    type: str
    param: str | None
    """The field of the request that it is about."""
    code: str | None


class ErrorBody(ResponseBody):
    """The body of every answer that is not a success, in OpenAI's shape."""

    error: ErrorDetail


class ApiError(HTTPException):
    """A refusal with its status; the routes raise it and one handler writes it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status_code=status, detail=message, headers=dict(headers or {}))
        self.code = code
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status_code, "invalid_request_error")
        detail = {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        return {"error": detail}

    def respond(self) -> Response:
        """The whole HTTP answer."""
        return Response(
            json.dumps(self.body),
            status_code=self.status_code,
            media_type="application/json",
            headers=self.headers,
        )


def unknown_model(name: str, known: tuple[str, ...]) -> ApiError:
    listed = ", ".join(f"`{one}`" for one in known)
    return ApiError(
        404,
        f"The model `{name[:200]}` is not served here. There is: {listed}.",
        code="model_not_found",
        param="model",
    )


def prompt_too_long(num_tokens: int, max_context: int, *, param: str) -> ApiError:
    return ApiError(
        400,
        f"The prompt has {num_tokens:,} tokens; prompt and answer together may have "
        f"{max_context:,}, so at most {max_context - 1:,} are left for the prompt.",
        code="context_length_exceeded",
        param=param,
    )


def internal_error() -> ApiError:
    return ApiError(500, "This is a bug in tightfit.", code="internal_error")


def to_api_error(error: Exception) -> ApiError:
    """What an engine could not do: the caller's to mend, or ours."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineLostError):
        return ApiError(503, error.problem, code="engine_lost")
    if isinstance(error, UserError):
        return ApiError(400, error.problem, code="invalid_request")
    return ApiError(
        500, f"The answer could not be made: {type(error).__name__}.", code="internal_error"
    )


_OLD_TOOLS = "`{name}` is OpenAI's old form: send `tools`, and calls as `tool_calls`."
_NO_FIELD = "`{name}` is not supported: leave it out."
_NOT_KEPT = "`{name}` is not supported, as answers are not kept: send the conversation in `input`."
_TEXT_ONLY = "Only text goes in and comes out here"
_UNSUPPORTED = {
    "functions": _OLD_TOOLS,
    "function_call": _OLD_TOOLS,
    "role": _OLD_TOOLS.format(name="function"),
    "audio": _TEXT_ONLY + ": leave `audio` out.",
    "modalities": _TEXT_ONLY + ': leave `modalities` out, or send ["text"].',
    "type": _TEXT_ONLY + ": a part of type `{value}` is not supported.",
    "suffix": _NO_FIELD,
    "best_of": "`best_of` is not supported: ask for `n` answers and choose.",
    "background": _NO_FIELD,
    "previous_response_id": _NOT_KEPT,
    "conversation": _NOT_KEPT,
    "thinking": "`thinking` cannot be asked for: a model has its own way.",
}
"""By field: the error where its value asks for something that no engine does."""


@cache
def _field_names() -> frozenset[str]:
    """Of every request."""
    names, kinds = set(), [RequestBody]
    for kind in kinds:
        kinds += kind.__subclasses__()
        names |= {field.alias or name for name, field in kind.model_fields.items()}
    return frozenset(names)


def from_validation_error(errors: Sequence[Mapping[str, Any]], content_type: str) -> ApiError:
    """What is wrong with a body: a field that is not supported, else the first thing."""
    for error in errors:
        place = error["loc"]
        name = next((step for step in place if step in _UNSUPPORTED), None)
        is_known = name == "role" and error["input"] != "function"
        if name is None or is_known or error["type"] == "missing":
            continue
        given = error["input"]
        value = given[:40] if isinstance(given, str) else type(given).__name__
        message = _UNSUPPORTED[name].format(name=name, value=value)
        param = _path(place[: place.index(name) + 1])
        return ApiError(400, message, code="unsupported_parameter", param=param)
    # Of a field's alternatives, the one that the value came nearest to.
    first = max(errors, key=lambda error: len(error["loc"]))
    place = first["loc"]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return ApiError(400, f"The body is not JSON: {reason} at character {place[-1]}.")
    if len(place) == 1 and "json" not in content_type.lower():
        return ApiError(400, "Send JSON, with the header `Content-Type: application/json`.")
    if len(place) == 1:
        return ApiError(400, "The body must be a JSON object.")
    param = _path(place)
    reason = first["msg"][:MAX_REASON_CHARS]
    return ApiError(400, f"`{param}`: {reason}.", code="invalid_value", param=param)


def _path(place: Sequence[str | int]) -> str:
    """`messages[0].content`, without the names that pydantic gives to the body and alternatives."""
    path = ""
    for at, step in enumerate(place):
        if isinstance(step, int):
            path += f"[{step}]"
        elif step in _field_names() and not (
            step == place[at - 1] and at
        ):  # a format's name, then its key
            path += f".{step}" if path else step
    return path


def _documented(description: str, *headers: str) -> dict[str, Any]:
    found: dict[str, Any] = {"model": ErrorBody, "description": description}
    if headers:
        found["headers"] = {name: {"schema": {"type": "string"}} for name in headers}
    return found


PLAIN_ERRORS: dict[int | str, dict[str, Any]] = {
    401: _documented(
        "The server asks for a bearer token, and it was missing or wrong (`invalid_api_key`).",
        "WWW-Authenticate",
    ),
    403: _documented(
        "The Host header names another machine, as a page that rebinds its name would "
        "(`host_not_allowed`)."
    ),
    500: _documented("A bug or a failing engine (`internal_error`)."),
}
LISTING_ERRORS = PLAIN_ERRORS | {
    404: _documented("No such model is served (`model_not_found`)."),
    503: _documented("The models are still being loaded (`model_loading`).", "Retry-After"),
}
ANSWERING_ERRORS = PLAIN_ERRORS | {
    400: _documented(
        "The body is not JSON, a field has a wrong value, something is asked for that no engine "
        "here does (`unsupported_parameter`), or the prompt is longer than the context "
        "(`context_length_exceeded`)."
    ),
    404: _documented("No such model is served (`model_not_found`)."),
    413: _documented("The body is larger than the server takes (`body_too_large`)."),
    503: _documented(
        "The queue is full (`queue_full`), the models are still being loaded (`model_loading`) "
        "or the server is being stopped (`shutting_down`).",
        "Retry-After",
    ),
    504: _documented("The answer took longer than the server allows (`timeout`)."),
}
