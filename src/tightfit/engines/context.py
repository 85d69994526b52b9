"""How long prompt and answer may be together."""

from __future__ import annotations

from tightfit.core.errors import InvalidInputError
from tightfit.engines.protocol import Request

DEFAULT_CONTEXT = 4096


def choose_context(asked: int | None, known: int | None) -> int:
    """Tokens of one request. `known` is what the model was made for; None where it does not say."""
    if asked is None:
        return min(known or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    if known is not None and asked > known:
        raise InvalidInputError(
            f"A context of {asked:,} tokens was asked for; the model was made for {known:,}.",
            remedy=f"--context {known} or less",
        )
    return asked


def check_request(request: Request, *, max_context: int, num_vocabulary: int) -> int:
    """Raise for what can never be answered; otherwise, how many new tokens there is room for."""
    num_tokens = len(request.prompt)
    if num_tokens == 0:
        raise InvalidInputError("The prompt is empty.", remedy="send at least one token")
    if request.sampling.max_new_tokens < 1:
        raise InvalidInputError(
            f"{request.sampling.max_new_tokens} new tokens were asked for.",
            remedy="ask for at least 1",
        )
    if num_tokens >= max_context:
        raise InvalidInputError(
            f"The prompt has {num_tokens:,} tokens; prompt and answer together may have "
            f"{max_context:,}.",
            remedy="shorten the prompt, or allow more: --context N, up to the model's own",
        )
    strange = next((t for t in request.prompt if not 0 <= t < num_vocabulary), None)
    if strange is not None:
        raise InvalidInputError(
            f"Token {strange} is beyond the model's {num_vocabulary:,} tokens.",
            remedy="make the prompt with this model's own tokenizer",
        )
    return min(request.sampling.max_new_tokens, max_context - num_tokens)
