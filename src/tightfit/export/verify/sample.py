"""What artefacts are compared on: windows of text as tokens, and prompts."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from tightfit.core.errors import InvalidInputError, NotFoundError, UserError
from tightfit.data.formats import ASSISTANT, USER, Message, to_messages
from tightfit.data.meter import Meter
from tightfit.data.prompter import Prompter
from tightfit.data.sources import open_source, read_source
from tightfit.data.token_store import TokenStore
from tightfit.export.verify.scores import Window
from tightfit.ledger.run_folder import RunFolder

WINDOW = 512
"""Tokens that are read in one go."""
LEAST_WINDOW = 32
"""A rest shorter than this is left out."""
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
RUN_SHARE = 0.5
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
        windows = list(_limit(_run_windows(run), int(num_tokens * RUN_SHARE)))
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
    except FileNotFoundError as fault:
        raise NotFoundError(
            f"There is no file {str(path)!r}.", remedy="--text with a file of plain text"
        ) from fault
    except (OSError, UnicodeDecodeError) as fault:
        raise InvalidInputError(
            f"{path} cannot be read as text: {fault}.", remedy="--text with a UTF-8 text file"
        ) from fault


def _cut(text: str, prompter: Prompter) -> Iterator[Window]:
    """Windows side by side, each begun as the tokenizer begins a text."""
    tokenizer = prompter.tokenizer
    first = [] if tokenizer.begins_with is None else [tokenizer.token_id(tokenizer.begins_with)]
    start = [number for number in first if number is not None]
    tokens = tokenizer.encode(text)
    size = WINDOW - len(start)
    for at in range(0, len(tokens), size):
        yield (*start, *tokens[at : at + size])


def _run_windows(run: RunFolder) -> Iterator[Window]:
    """Rows as they were trained on or held back; none where the cache has let go of them."""
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
    """Questions of the run's rows, those held back first."""
    with contextlib.suppress(UserError, OSError):
        training = run.read_plan().training
        sources = [] if training is None else sorted(training.data, key=lambda s: s.split)
        for source in sources:
            rows = _rows_before_answers(source.path)
            return list(itertools.islice(rows, NUM_RUN_PROMPTS))
    return []


def _rows_before_answers(path: str) -> Iterator[Prompt]:
    from tightfit.core.training import DataSource

    for row, row_format in read_source(open_source(DataSource(path=path)), Meter()):
        messages = to_messages(row, row_format)
        asked = [at for at, message in enumerate(messages) if message.role == ASSISTANT]
        if asked and asked[-1] and row_format.name != "text":
            yield tuple(messages[: asked[-1]])
        elif not asked and messages:
            yield tuple(messages)
