"""What artefacts are compared on: windows of text, prompts, and the greedy answers to them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from queue import SimpleQueue

from tightfit.core.errors import InvalidInputError, NotFoundError, UserError
from tightfit.core.sampling import Sampling
from tightfit.data.formats import ASSISTANT, USER, Message, to_messages
from tightfit.data.prompter import Prompter
from tightfit.data.sources import open_source, read_source
from tightfit.data.streams import ReadMeter
from tightfit.data.templates import TemplateRenderError
from tightfit.data.token_store import TokenStore
from tightfit.engines.protocol import Delta, Done, Engine, Event, Failed, FinishReason, Request
from tightfit.export.verify.scores import Window
from tightfit.export.verify.verdict import AnswerComparison, Finding, Level
from tightfit.runs.run_folder import RunFolder

WINDOW = 512
"""Tokens that are read in one go."""
LEAST_WINDOW = 32
"""A shorter remainder is left out."""
TEXT_FILE = "check_text.txt"
PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three fruits.",
    "What is 12 times 12?",
    "Write a SQL query that counts the rows of the table `orders`.",
    "Explain in two sentences why ice floats.",
)
NUM_RUN_PROMPTS = 4
RUN_FRACTION = 0.5
"""Of the tokens, from the run's own rows where there are some."""

Prompt = tuple[Message, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The same for every artefact of a check."""

    source: str
    """What the text is, for the report."""
    text: str
    """For the tokenizers; empty where the windows come from elsewhere alone."""
    windows: tuple[Window, ...]
    prompts: tuple[Prompt, ...]


def make_sample(
    prompter: Prompter,
    *,
    text: Path | None,
    prompts: Sequence[str] | None,
    num_tokens: int,
    run: RunFolder | None,
) -> Sample:
    """A given text alone; else rows of the run, where it has some, and the package's own text."""
    windows: list[Window] = []
    sources = []
    if text is None and run is not None and not prompter.tokenizer.is_encoder_decoder:
        windows = list(_limit(_run_windows(run), int(num_tokens * RUN_FRACTION)))
        sources += ["rows of the run"] if windows else []
    content = _read_text(text)
    room = num_tokens - sum(map(len, windows))
    windows += _limit(_cut(content, prompter), room)
    sources.append(text.name if text is not None else "the package's own text")
    if sum(map(len, windows)) < LEAST_WINDOW:
        raise InvalidInputError(
            f"{text or 'The text'} has too few tokens to compare anything.",
            remedy="--text FILE with a page of text or more",
        )
    asked: list[Prompt] = [(Message(USER, words),) for words in prompts or ()]
    if prompts is None:
        asked = _run_prompts(run) if run is not None else []
        asked += [(Message(USER, words),) for words in PROMPTS[: len(PROMPTS) - len(asked) // 2]]
    return Sample(
        source=" and ".join(sources),
        text=content[: 20 * WINDOW],
        windows=tuple(windows),
        prompts=tuple(asked),
    )


def read_prompts(path: Path) -> tuple[str, ...]:
    """Lines of a text file, or the questions of a data file in any format that `train` reads."""
    if path.suffix.lower() in (".txt", ".text", ".raw", ""):
        lines = [line.strip() for line in _read_text(path).splitlines()]
        found = [line for line in lines if line]
    else:
        found = [messages[-1].content for messages in _rows_before_answers(str(path))]
    if not found:
        raise InvalidInputError(f"{path} holds no prompts.", remedy="write one on each line")
    return tuple(found)


def _read_text(path: Path | None) -> str:
    if path is None:
        return resources.files("tightfit.catalogue").joinpath(TEXT_FILE).read_text("utf-8")
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise NotFoundError(
            f"There is no file {str(path)!r}.", remedy="--text with a file of plain text"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(
            f"{path} cannot be read as text: {error}.", remedy="--text with a UTF-8 text file"
        ) from error


def _cut(text: str, prompter: Prompter) -> Iterator[Window]:
    """Consecutive windows, each with the tokenizer's own start tokens."""
    tokenizer = prompter.tokenizer
    first = [] if tokenizer.begins_with is None else [tokenizer.token_id(tokenizer.begins_with)]
    start = [number for number in first if number is not None]
    tokens = tokenizer.encode(text)
    size = WINDOW - len(start)
    for at in range(0, len(tokens), size):
        yield (*start, *tokens[at : at + size])


def _run_windows(run: RunFolder) -> Iterator[Window]:
    """Rows as they were trained on or held back; none where the cache no longer has them."""
    with contextlib.suppress(UserError, OSError):
        folders = run.read_tokens()
        store = TokenStore(Path(folders.eval or folders.train))
        for index in range(len(store)):
            yield tuple(int(token) for token in store.row(index).tokens[:WINDOW])


def _limit(windows: Iterator[Window], most: int) -> Iterator[Window]:
    held = 0
    for window in windows:
        part = window[: most - held]
        if len(part) < LEAST_WINDOW:
            if held + len(part) >= most:
                return
            continue
        held += len(part)
        yield part


def _run_prompts(run: RunFolder) -> list[Prompt]:
    """Questions of the run's rows, validation rows first."""
    with contextlib.suppress(UserError, OSError):
        training = run.read_plan().training
        sources = [] if training is None else sorted(training.data, key=lambda s: s.split)
        for source in sources:
            rows = _rows_before_answers(source.path)
            return list(itertools.islice(rows, NUM_RUN_PROMPTS))
    return []


def _rows_before_answers(path: str) -> Iterator[Prompt]:
    from tightfit.core.training import DataSource

    for row, row_format in read_source(open_source(DataSource(path=path)), ReadMeter()):
        messages = to_messages(row, row_format)
        asked = [at for at, message in enumerate(messages) if message.role == ASSISTANT]
        if asked and asked[-1] and row_format.name != "text":
            yield tuple(messages[: asked[-1]])
        elif not asked and messages:
            yield tuple(messages)


# Greedy answers, and where two engines' answers differ.

ANSWER_TOKENS = 48
LEAST_STOPPED = 3
"""Answers of the reference that must stop by themselves for the test to mean anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to one prompt."""

    text: str
    tokens: tuple[int, ...]
    is_stopped: bool
    """It ended by itself, not at the limit."""
    is_empty: bool = False
    """The prompt could not be asked."""


_NONE = Answer(text="", tokens=(), is_stopped=False, is_empty=True)


def ask_all(engine: Engine, prompts: Sequence[Prompt], watch: Callable[[], None]) -> list[Answer]:
    """Each prompt by the engine's own template and tokenizer, greedily."""
    return [_ask(engine, prompt, watch) for prompt in prompts]


def compare_answers(
    prompts: Sequence[Prompt], reference: Sequence[Answer], other: Sequence[Answer]
) -> tuple[tuple[AnswerComparison, ...], list[Finding]]:
    """Pairs of answers, and findings about stop tokens."""
    rows = []
    for prompt, one, two in zip(prompts, reference, other, strict=True):
        rows.append(
            AnswerComparison(
                prompt=prompt[-1].content,
                reference=one.text,
                other=two.text,
                first_difference=_first_difference(one, two),
                reference_stopped=one.is_stopped,
                other_stopped=two.is_stopped,
            )
        )
    return tuple(rows), list(_judge_stops(rows))


def _judge_stops(rows: Sequence[AnswerComparison]) -> list[Finding]:
    """A model that gives the same answer and does not stop has lost its stop token."""
    runs_on = [
        row
        for row in rows
        if row.reference_stopped
        and not row.other_stopped
        and row.reference.strip()
        and row.other.startswith(row.reference)
    ]
    ended = [row for row in rows if row.reference_stopped]
    never = len(ended) >= LEAST_STOPPED and not any(row.other_stopped for row in rows)
    if not runs_on and not never:
        return []
    finding = (
        f"gives the same answer to {runs_on[0].prompt[:40]!r} and runs on where the reference stops"
        if runs_on
        else f"never ends an answer by itself; the reference ends {len(ended)} of {len(rows)}"
    )
    return [
        Finding(
            level=Level.FAIL,
            text=f"It {finding}.",
            remedy="the end-of-turn token is lost: compare eos_token_id in generation_config.json "
            "and tokenizer_config.json with the reference's, and make this one again",
        )
    ]


def _ask(engine: Engine, prompt: Prompt, watch: Callable[[], None]) -> Answer:
    events: SimpleQueue[Event] = SimpleQueue()
    tokens: list[int] = []
    try:
        ids = engine.prompter.chat(prompt)
        room = max(1, min(ANSWER_TOKENS, engine.info.max_context - len(ids) - 1))
        engine.submit(Request(prompt=ids, sampling=Sampling(max_new_tokens=room)), events.put)
    except (UserError, TemplateRenderError):
        watch()
        return _NONE
    while True:
        event = events.get()
        if isinstance(event, Delta):
            tokens.extend(event.tokens)
        elif isinstance(event, Failed):
            if not isinstance(event.error, InvalidInputError):
                raise event.error
            watch()  # non-finite logits are judged with the scores
            return _NONE
        elif isinstance(event, Done):
            watch()
            is_stopped = event.reason is FinishReason.STOP
            return Answer(text=event.text, tokens=tuple(tokens), is_stopped=is_stopped)


def _first_difference(one: Answer, two: Answer) -> int | None:
    """The first token that differs."""
    if one.text == two.text and one.is_stopped == two.is_stopped:
        return None
    pairs = enumerate(zip(one.tokens, two.tokens, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one.tokens), len(two.tokens)))
