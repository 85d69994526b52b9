"""`load`: a model to talk to; `chat`: one message answered."""

from __future__ import annotations

from dataclasses import replace

from tightfit.api.call import accepts_keywords
from tightfit.api.options.engines import engine_request, read_sampling
from tightfit.api.options.serving import ChatOptions
from tightfit.core.errors import UsageError
from tightfit.core.sampling import Sampling
from tightfit.engines.open import EngineRequest, open_engine
from tightfit.engines.protocol import DEFAULT_CONTEXT
from tightfit.runtime.model_files import find_artefact
from tightfit.serving.chat import Conversation, Reply
from tightfit.serving.generate.prediction import PromptLengths, predict_inference, require_fit


@accepts_keywords(ChatOptions)
def load(options: ChatOptions) -> Conversation:
    """Load a model and begin a conversation with it. Use it as a context manager, or close it."""
    # A conversation has one answer at a time.
    request = replace(engine_request(options, find_artefact(options.model)), slots=1)
    sampling = read_sampling(options)
    if options.check:
        _require_fit(request, sampling)
    return Conversation(engine=open_engine(request), sampling=sampling, system=options.system)


@accepts_keywords(ChatOptions)
def chat(options: ChatOptions) -> Reply:
    """Load a model, answer the message `once`, and unload it."""
    if options.once is None:
        raise UsageError(
            "`chat` answers one message, and none was given.",
            remedy='chat(model, once="..."), or load(model) for a conversation',
        )
    with load(options) as conversation:
        return conversation.ask(options.once)


def _require_fit(request: EngineRequest, sampling: Sampling) -> None:
    longest = request.context or DEFAULT_CONTEXT
    lengths = PromptLengths(mean=longest / 2, longest=longest)
    prediction = predict_inference(request, lengths, sampling)
    if prediction is not None:
        require_fit(prediction, request)
