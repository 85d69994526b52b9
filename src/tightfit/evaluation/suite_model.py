"""An engine as a model of lm-eval: scores of continuations, of whole texts, and answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from tightfit.core.errors import InvalidInputError
from tightfit.core.sampling import Sampling
from tightfit.data.formats import Message
from tightfit.engines.protocol import Engine, Failed, Request, answer_all
from tightfit.engines.transformers.engine import TransformersEngine
from tightfit.evaluation.scored_models import list_batches
from tightfit.runtime.attention import needs_padding_mask

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tightfit.core.progress import CountProgress

Score = tuple[float, bool]
MAX_NEW_TOKENS = 256
"""lm-eval's own, where a task does not say."""

ROWS_AT_A_TIME = 64
"""Logits in double precision: 128 MiB for the largest vocabularies."""


class EngineModel(TemplateLM):  # type: ignore[misc]
    """Tokens as lm-eval's `hf` model makes them; numbers by the engine."""

    def __init__(self, engine: Engine, progress: CountProgress | None = None) -> None:
        super().__init__()
        self._engine = engine
        self._tokens = engine.prompter.tokenizer
        self._progress = progress

    @property
    def eot_token_id(self) -> int:
        end = self._tokens.eos_id
        if end is None:
            raise InvalidInputError(
                f"{self._engine.info.model} has no end token.", remedy="choose another model"
            )
        return end

    @property
    def prefix_token_id(self) -> int:
        name = self._tokens.names.get("bos_token")
        found = self._tokens.token_id(name) if name else None
        return self.eot_token_id if found is None else found

    @property
    def tokenizer_name(self) -> str:
        return str(self._tokens.digest)

    def chat_template(self, chat_template: bool | str = False) -> str | None:  # noqa: ARG002
        template = self._engine.prompter.template
        return None if template is None else template.text

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        if not add_generation_prompt:
            raise InvalidInputError(
                "This task begins the model's answer, which is not done through a chat template.",
                remedy="leave out --suite-chat",
            )
        messages = [Message(one["role"], one["content"]) for one in chat_history]
        return self._engine.prompter.render(messages)

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        **_: Any,
    ) -> list[int]:
        tokens = self._tokens.encode(string)
        begin = self._tokens.begins_with
        if begin is None or add_special_tokens is False:
            return tokens
        number = self._tokens.token_id(begin)
        return tokens if number is None or tokens[:1] == [number] else [number, *tokens]

    # Scores

    def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> list[Score]:
        found: list[Score] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[Score]:
        most = self._engine.info.max_context
        places: dict[tuple[int, ...], list[tuple[int, tuple[int, ...]]]] = {}
        for number, (_text, context, wanted) in enumerate(requests):
            # The last token is predicted, not read; of what is too long the end is kept.
            read = tuple((context + wanted)[-(most + 1) :][:-1])
            places.setdefault(read, []).append((number, tuple(wanted[-len(read) :])))
        scores: list[Score] = [(0.0, False)] * len(requests)
        done = 0
        for read, found in _score(self._engine, places):
            for (number, _wanted), score in zip(places[read], found, strict=True):
                scores[number] = score
            done += len(found)
            self._report(done, len(requests))
        return scores

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:  # noqa: ARG002
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for number, (text,) in enumerate(one.args for one in requests):
            for pair in get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._engine.info.max_context,
                context_len=1,
            ):
                windows.append((None, *make_disjoint_window(pair)))
                owners.append(number)
        sums = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[owner] += value
        return sums

    # Answers

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:  # noqa: ARG002
        prompts = [self._make_request(*one.args) for one in requests]
        texts = [""] * len(prompts)
        for count, (number, done) in enumerate(answer_all(self._engine, prompts), start=1):
            if isinstance(done, Failed):
                raise done.error
            texts[number] = done.text
            self._report(count, len(prompts))
        return texts

    def _make_request(self, context: str, stated: dict[str, Any]) -> Request:
        given = normalize_gen_kwargs(stated, MAX_NEW_TOKENS)
        most = self._engine.info.max_context
        num_new_tokens = int(given["max_gen_toks"])
        if num_new_tokens >= most:
            raise InvalidInputError(
                f"The task asks for {num_new_tokens:,} new tokens; prompt and answer together may "
                f"have {most:,}.",
                remedy="--context N, up to the model's own, or another task",
            )
        end = self._tokens.token_name(self.eot_token_id)
        stops = handle_stop_sequences(given.get("until"), eos=end)
        samples = bool(given.get("do_sample"))
        sampling = Sampling(
            max_new_tokens=num_new_tokens,
            temperature=float(given.get("temperature") or 0.0) if samples else 0.0,
            top_p=float(given.get("top_p") or 1.0) if samples else 1.0,
            top_k=int(given.get("top_k") or 0) if samples else 0,
            seed=1234,
            stop=tuple(stop for stop in stops if stop),
        )
        tokens = self.tok_encode(context)[-(most - num_new_tokens) :]
        return Request(prompt=tuple(tokens or [self.prefix_token_id]), sampling=sampling)

    def _report(self, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(done, total)


Places = dict[tuple[int, ...], list[tuple[int, tuple[int, ...]]]]
"""By the tokens that are read: numbers of requests, and the last tokens that are predicted."""


def _score(engine: Engine, places: Places) -> Iterator[tuple[tuple[int, ...], list[Score]]]:
    """Log-probability of what follows each text, and whether it is the likeliest at each place."""
    import numpy as np

    if not isinstance(engine, TransformersEngine):
        for read, wanted in places.items():
            logits = engine.logits(read)
            yield read, [_score_rows(logits[len(read) - len(one) :], one) for _, one in wanted]
        return
    reads = list(places)
    vocabulary = engine.call(lambda model: model.config.get_text_config().vocab_size)
    lengths = np.array([len(read) for read in reads], dtype=np.int32)
    for batch in list_batches(lengths, vocabulary):
        for start in range(0, len(batch), engine.info.num_slots):
            part = [reads[at] for at in batch[start : start + engine.info.num_slots]]
            call: Callable[[Any], list[list[Score]]] = partial(_score_batch, part, places)
            yield from zip(part, engine.call(call), strict=True)


def _score_rows(logits: NDArray[np.float32], wanted: Sequence[int]) -> Score:
    import numpy as np

    total, is_greedy = 0.0, True
    for start in range(0, len(wanted), ROWS_AT_A_TIME):
        values = logits[start : start + ROWS_AT_A_TIME].astype(np.float64)
        aim = np.array(wanted[start : start + ROWS_AT_A_TIME])
        highest = values.max(axis=1)
        sums = np.log(np.exp(values - highest[:, None]).sum(axis=1)) + highest
        total += float((values[np.arange(len(aim)), aim] - sums).sum())
        is_greedy = is_greedy and bool((values.argmax(axis=1) == aim).all())
    return total, is_greedy


def _score_batch(reads: Sequence[tuple[int, ...]], places: Places, model: Any) -> list[list[Score]]:
    import torch

    longest = max(map(len, reads))
    tokens = torch.zeros((len(reads), longest), dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for row, read in enumerate(reads):
        tokens[row, : len(read)] = torch.tensor(read)
        mask[row, : len(read)] = 1
    inputs = {"input_ids": tokens.to(model.device)}
    if needs_padding_mask(model.config):
        inputs["attention_mask"] = mask.to(model.device)
    with torch.inference_mode():
        logits = model(**inputs, use_cache=False).logits
        scores: list[list[Score]] = []
        for row, read in enumerate(reads):
            found: list[Score] = []
            for _, wanted in places[read]:
                own = logits[row, len(read) - len(wanted) : len(read)].float()
                aim = torch.tensor(wanted, device=own.device)
                logprobs = own.log_softmax(-1).gather(1, aim[:, None])
                is_greedy = bool((own.argmax(-1) == aim).all())
                found.append((float(logprobs.double().sum()), is_greedy))
            scores.append(found)
    return scores
