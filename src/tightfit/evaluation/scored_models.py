"""What an evaluation scores: the questions of a data file, and the columns of models with their
greedy answers and their loss by row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.errors import UserError
from tightfit.core.objectives import Objective
from tightfit.core.progress import CountProgress
from tightfit.core.sampling import Sampling
from tightfit.core.settings import TrainOn
from tightfit.core.strategy import DataSource
from tightfit.data.call_syntax import CallSyntax
from tightfit.data.formats import ASSISTANT, Message
from tightfit.data.sources import open_source, read_source
from tightfit.data.templates import Prompter
from tightfit.data.token_store import EncodedRow, TokenStore
from tightfit.data.tools import Tool, ToolCall
from tightfit.engines.protocol import Engine, Failed, Request, answer_all
from tightfit.evaluation.scores import BASE, MODEL, TUNED
from tightfit.runtime.attention import needs_padding_mask
from tightfit.runtime.model_files import Artefact, ArtefactKind, find_artefact, locate_model
from tightfit.runtime.resolve import resolve_model

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from tightfit.engines.transformers.engine import TransformersEngine


DEFAULT_SEQ_LEN = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One row: the messages before its last answer or call, and that as gold."""

    place: str
    values: Mapping[str, Any]
    """The whole row, which may name a database."""
    messages: tuple[Message, ...]
    """Everything before the answer."""
    num_prompt_tokens: int
    """Of the messages in the training template."""
    gold: str
    num_gold_tokens: int
    tools: tuple[Tool, ...] = ()
    """That the answer may call."""
    gold_calls: tuple[ToolCall, ...] = ()
    syntax: CallSyntax | None = None
    """How the model writes calls; None where its template has none."""

    @property
    def prompt(self) -> str:
        """The messages as plain text."""
        return "\n\n".join(message.content for message in self.messages)


def read_questions(
    source: DataSource, prompter: Prompter, *, prefers_calls: bool = False
) -> tuple[str, list[Question]]:
    """The format of the rows, and a question for each row that has an answer: its last one, or
    with `prefers_calls` the last that calls tools, where one does."""
    questions: list[Question] = []
    formats: dict[str, None] = {}
    for row, row_format in read_source(open_source(source)):
        formats[row_format.name] = None
        messages, tools = row_format.to_conversation(row)
        asked = [at for at, message in enumerate(messages) if message.role == ASSISTANT]
        calls = [at for at in asked if messages[at].tool_calls] if prefers_calls else []
        wanted = (calls or asked or [0])[-1]
        if row_format.name == "text" or not wanted:
            continue
        before, answer = messages[:wanted], messages[wanted]
        gold = answer.text if answer.tool_calls else answer.content
        questions.append(
            Question(
                place=row.place,
                values=row.values,
                messages=tuple(before),
                num_prompt_tokens=len(prompter.ask(before, tools, place=row.place)),
                gold=gold,
                num_gold_tokens=prompter.count_tokens(gold),
                tools=tools,
                gold_calls=answer.tool_calls,
                syntax=prompter.call_syntax,
            )
        )
    return "+".join(formats), questions


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalTarget:
    """An artefact, and how its data is encoded."""

    artefact: Artefact
    """With the tokenizer and template of the training, where it was tuned here."""
    base: Path | None
    """The model it was tuned from; None where nothing was tuned."""
    train_on: TrainOn = TrainOn.ANSWERS
    objective: Objective = Objective.SFT
    """What the run learnt by."""
    beta: float = Objective.DPO.record.beta or 0.0
    seq_len: int
    max_positions: int | None
    """Longest sequence the model can read; None where its positions are relative or unknown."""

    def list_columns(self, beside: Sequence[str], *, with_base: bool) -> dict[str, Artefact]:
        """The artefacts to score, by the name of their column."""
        columns = {MODEL if self.base is None else TUNED: self.artefact}
        if self.base is not None and with_base:
            plain = replace(
                self.artefact,
                kind=ArtefactKind.MODEL,
                name=str(self.base),
                path=self.base,
                base=None,
            )
            columns = {BASE: plain, **columns}
        others = [find_artefact(name) for name in beside]
        short = [artefact.path.name.removesuffix(".gguf") for artefact in others]
        for name, artefact in zip(short, others, strict=True):
            is_clear = short.count(name) == 1 and name not in (BASE, TUNED, MODEL)
            columns[name if is_clear else artefact.name] = artefact
        return columns


def find_eval_target(name: str, *, template: str | None = None) -> EvalTarget:
    """The run folder, adapter folder or model that `name` means."""
    artefact = find_artefact(name)
    base, train_on, seq_len = artefact.base, TrainOn.ANSWERS, DEFAULT_SEQ_LEN
    learnt: dict[str, Any] = {}
    if artefact.run is not None:
        # The run's own base model, template and reading of the data.
        plan = artefact.run.read_plan()
        assert plan.training is not None  # find_artefact has checked it
        base = base or locate_model(plan.training.model_path)
        artefact = replace(artefact, tokenizer=base, template=plan.training.template)
        train_on = plan.training.train_on
        objective = plan.strategy.objective
        if objective is not Objective.SFT:
            learnt = {"objective": objective, "beta": plan.training.beta_of(objective)}
        # The plan's length is that of its longest training row; rows to score may be longer.
        seq_len = max(plan.strategy.seq_len, plan.data.seq_len if plan.data else 0, seq_len)
    if template is not None:
        artefact = replace(artefact, template=template)
    most = None
    with contextlib.suppress(UserError):  # a family without formulas may still be loaded
        spec = resolve_model(str(artefact.base or artefact.path))
        most = None if spec.is_encoder_decoder else spec.max_positions
    return EvalTarget(
        artefact=artefact,
        base=base,
        train_on=train_on,
        seq_len=seq_len if most is None else min(seq_len, most),
        max_positions=most,
        **learnt,
    )


def generate_answers(
    engine: Engine,
    questions: Sequence[Question],
    *,
    max_new_tokens: int,
    progress: CountProgress | None = None,
) -> list[str]:
    """Greedy answers by the engine's own template; of a prompt too long the end is kept."""
    room = max(engine.info.max_context - max_new_tokens, 1)
    sampling = Sampling(max_new_tokens=max_new_tokens)
    requests = (
        Request(
            prompt=engine.prompter.ask(item.messages, item.tools)[-room:],
            sampling=sampling,
            kept_control=engine.prompter.call_control if item.tools else (),
        )
        for item in questions
    )
    texts = [""] * len(questions)
    for count, (number, done) in enumerate(answer_all(engine, requests), start=1):
        if isinstance(done, Failed):
            raise done.error
        texts[number] = done.text.strip()
        if progress is not None:
            progress(count, len(questions))
    return texts


# Loss by row, from which means and intervals are computed.

MAX_LOGITS = 1 << 28
"""Values of one batch's logits: 1 GiB in fp32. Limits the tokens per batch."""
IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLosses:
    """Negative log-likelihood of each row's trained tokens, in nats."""

    sums: NDArray[np.float64]
    num_tokens: NDArray[np.int64]

    @property
    def mean(self) -> float:
        """Over tokens, not over rows."""
        return float(self.sums.sum() / self.num_tokens.sum())


def measure_loss(
    engine: Engine, store: TokenStore, progress: CountProgress | None = None
) -> RowLosses | None:
    """One pass over all rows. None: llama.cpp has no logits of an encoder-decoder's pairs."""
    import numpy as np

    from tightfit.engines.transformers.engine import TransformersEngine

    if isinstance(engine, TransformersEngine):
        batches = _torch_losses(engine, store)
    elif store.description.is_encoder_decoder:
        return None
    else:
        batches = _losses_by_logits(engine, store)
    sums = np.zeros(len(store))
    done = 0
    for places, found in batches:
        sums[places] = found
        done += len(places)
        if progress is not None:
            progress(done, len(store))
    return RowLosses(sums=sums, num_tokens=store.num_trained.astype(np.int64))


def _losses_by_logits(
    engine: Engine, store: TokenStore
) -> Iterator[tuple[list[int], NDArray[np.float64]]]:
    import numpy as np

    for place in range(len(store)):
        row = store.row(place)
        at = np.flatnonzero(row.trained[1:])
        scores = engine.logits(row.tokens.tolist())[at].astype(np.float64)
        highest = scores.max(axis=1, initial=-np.inf)
        total = np.log(np.exp(scores - highest[:, None]).sum(axis=1)) + highest
        losses = total - scores[np.arange(len(at)), row.tokens[at + 1]]
        yield [place], np.array([losses.sum()])


def _torch_losses(
    engine: TransformersEngine, store: TokenStore
) -> Iterator[tuple[list[int], NDArray[np.float64]]]:
    """Batches, which no engine's logits have, and the pairs of encoder-decoders."""
    vocab_size = engine.call(lambda model: model.config.get_text_config().vocab_size)
    for places in list_batches(store.lengths, vocab_size):
        rows = [store.row(place) for place in places]
        yield places, engine.call(partial(_sum_losses, rows, store))


def list_batches(lengths: NDArray[np.int32], vocab_size: int) -> Iterator[list[int]]:
    """Rows of like length together, the longest first; each batch's logits within the limit."""
    import numpy as np

    max_tokens = max(MAX_LOGITS // vocab_size, 1)
    order = np.argsort(-lengths, kind="stable").tolist()
    while order:
        size = max(max_tokens // max(int(lengths[order[0]]), 1), 1)
        yield order[:size]
        order = order[size:]


def _sum_losses(rows: list[EncodedRow], store: TokenStore, model: Any) -> NDArray[np.float64]:
    import numpy as np
    import torch
    from torch.nn.functional import cross_entropy

    is_pair, device = store.description.is_encoder_decoder, model.device
    if is_pair:  # the decoder's tokens are the trained ones
        read = [row.tokens[~row.trained] for row in rows]
        wanted = [row.tokens[row.trained] for row in rows]
    else:
        read = [row.tokens for row in rows]
        wanted = [np.where(row.trained, row.tokens, IGNORED) for row in rows]
    labels = _padded(wanted, IGNORED, device)
    inputs = {"input_ids": _padded(read, store.description.pad_token_id, device)}
    if needs_padding_mask(model.config):
        inputs["attention_mask"] = _padded([np.ones_like(row) for row in read], 0, device)
    if is_pair:
        inputs["labels"] = labels
    logits = model(**inputs, use_cache=False).logits
    if not is_pair:  # a position predicts the next token
        logits, labels = logits[:, :-1], labels[:, 1:]
    is_trained = labels != IGNORED
    losses = cross_entropy(logits[is_trained].float(), labels[is_trained], reduction="none")
    sums = torch.zeros(len(rows), dtype=torch.float64, device=losses.device)
    sums.index_add_(0, is_trained.nonzero()[:, 0], losses.double())
    values: NDArray[np.float64] = sums.cpu().numpy()
    return values


def _padded(rows: list[NDArray[np.int32]], filler: int, device: torch.device) -> torch.Tensor:
    import numpy as np
    import torch

    table = np.full((len(rows), max(map(len, rows))), filler, dtype=np.int64)
    for place, row in enumerate(rows):
        table[place, : len(row)] = row
    return torch.from_numpy(table).to(device)
