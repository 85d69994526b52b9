"""Continuous batching: one thread that keeps the device's rows full of waiting requests."""

from __future__ import annotations

import contextlib
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tightfit.core.errors import DoesNotFitError, InvalidInputError, UserError
from tightfit.core.sampling import Sampling
from tightfit.data.templates import Prompter, TextStream
from tightfit.engines.protocol import (
    BaseAnswer,
    FinishReason,
    Listener,
    Request,
    TokenLogprob,
)
from tightfit.engines.transformers.constraint import Constraint
from tightfit.engines.transformers.rows import BatchRows
from tightfit.runtime.libraries import is_out_of_memory

if TYPE_CHECKING:
    import torch


# Sampling: the next token of every row, greedy or drawn with the row's own settings and seed.

_MASK = (1 << 64) - 1


def draw_uniform(seed: int, number: int) -> float:
    """The `number`-th value in [0, 1) of a seed's sequence, without any state to carry.

    An answer thus depends on its own seed alone, whatever else is computed beside it.
    Source: SplitMix64, Steele, Lea and Flood, OOPSLA 2014.
    """
    mixed = _mix((seed & _MASK) ^ _mix(number + 1))
    return (_mix(mixed) >> 40) / (1 << 24)


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def penalize(logits: torch.Tensor, seen: torch.Tensor, penalties: torch.Tensor) -> torch.Tensor:
    """Logits with every token in `seen` made less likely. Source: CTRL, arXiv:1909.05858."""
    import torch

    by = penalties[:, None]
    return torch.where(seen, torch.where(logits < 0, logits * by, logits / by), logits)


def penalize_counts(
    logits: torch.Tensor, counts: torch.Tensor, presence: torch.Tensor, frequency: torch.Tensor
) -> torch.Tensor:
    """Logits less OpenAI's two penalties, by how often each answer holds each token.

    Source: platform.openai.com/docs/guides/text-generation, "Frequency and presence penalties".
    """
    return logits - presence[:, None] * (counts > 0) - frequency[:, None] * counts


def find_logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, counts: Sequence[int]
) -> list[TokenLogprob]:
    """The chosen token of each row, and as many of its likeliest as the row's count says."""
    import torch

    scores = torch.log_softmax(logits.float(), dim=-1)
    own = scores.gather(-1, chosen[:, None]).squeeze(-1).tolist()
    most = min(max(counts), int(scores.shape[-1]))
    values, places = scores.topk(most, dim=-1) if most else (scores[:, :0], scores[:, :0])
    found = []
    rows = zip(chosen.tolist(), own, values.tolist(), places.tolist(), counts, strict=True)
    for token, logprob, ranked, tokens, count in rows:
        top = tuple(zip(map(int, tokens[:count]), ranked[:count], strict=True))
        found.append(TokenLogprob(token=int(token), logprob=logprob, top=top))
    return found


def choose_tokens(
    logits: torch.Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]
) -> torch.Tensor:
    """One token for each row of fp32 logits. `uniforms` are used where a row is drawn."""
    import torch

    drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    if not drawn:
        return logits.argmax(dim=-1)
    device = logits.device
    settings = torch.tensor(
        [
            [
                samplings[row].temperature,
                samplings[row].top_p,
                samplings[row].min_p,
                float(samplings[row].top_k),
                uniforms[row],
            ]
            for row in drawn
        ],
        dtype=torch.float32,
    ).to(device)
    if len(drawn) == len(samplings):
        return draw_tokens(logits, settings)
    rows = torch.tensor(drawn, device=device)
    chosen = logits.argmax(dim=-1)
    chosen[rows] = draw_tokens(logits[rows], settings)
    return chosen


def draw_tokens(logits: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
    """Draw by the inverse of the distribution function, likeliest token first.

    Columns of `settings`: temperature, top_p, min_p, top_k (0: all), a uniform number.
    Filters are applied in transformers' order: temperature, top k, top p, min p.
    """
    import torch

    temperature, top_p, min_p, top_k, uniform = settings.unbind(dim=1)
    chances, tokens = torch.softmax(logits / temperature[:, None], dim=-1).sort(
        dim=-1, descending=True
    )
    rank = torch.arange(chances.shape[-1], device=logits.device)
    most = torch.where(top_k > 0, top_k, float(chances.shape[-1]))
    chances = chances * (rank < most[:, None])
    chances = chances / chances.sum(dim=-1, keepdim=True)
    before = chances.cumsum(dim=-1) - chances
    is_kept = (before < top_p[:, None]) & (chances >= min_p[:, None] * chances[:, :1])
    is_kept[:, 0] = True
    chances = chances * is_kept
    reached = chances.cumsum(dim=-1)
    target = uniform[:, None] * reached[:, -1:]
    place = torch.searchsorted(reached, target, right=True)
    # Rounding can carry the target to the very end, behind the last token that is left.
    place = torch.minimum(place, is_kept.sum(dim=-1, keepdim=True) - 1)
    return tokens.gather(-1, place).squeeze(-1)


# One request: tokens to text and events, and when it ends.


class RunningAnswer(BaseAnswer[TextStream]):
    """An answer whose tokens the batch computes one by one."""

    def __init__(
        self,
        request: Request,
        listener: Listener,
        prompter: Prompter,
        *,
        max_context: int,
        constraint: Constraint | None = None,
        adapter: str | None = None,
    ) -> None:
        self.sampling: Sampling = request.sampling
        super().__init__(
            request,
            listener,
            prompter.stop_ids,
            TextStream(prompter, self.sampling.stop, request.kept_control),
        )
        self.constraint = constraint
        self.adapter = adapter
        """The key of the adapter that computes it; None: the base alone."""
        self.tokens: list[int] = []
        """All new tokens so far, the stop token included."""
        self.seed = random.getrandbits(63) if self.sampling.seed is None else self.sampling.seed
        """Draws are numbered by token, so that a preempted answer continues with the same ones."""
        self.num_chosen = 0
        """Tokens chosen on the device, of which the last may not have been taken yet."""
        self.most_tokens = self.sampling.max_new_tokens
        if not prompter.tokenizer.is_encoder_decoder:
            self.most_tokens = min(self.most_tokens, max_context - len(request.prompt))

    @property
    def so_far(self) -> list[int]:
        """Prompt and answer so far: what a preempted answer is prefilled with again."""
        return [*self.request.prompt, *self.tokens]

    @property
    def num_left(self) -> int:
        """Tokens that may still come."""
        return self.most_tokens - len(self.tokens)

    def take(self, token: int, logprob: TokenLogprob | None = None) -> bool:
        """Take the next token. True when the answer ends with it."""
        self.mark_first_token()
        self.tokens.append(token)
        self.num_new_tokens += 1
        is_stop = token in self.stop_ids
        is_complete = False
        if self.constraint is not None and not is_stop:
            is_complete = self.constraint.take(token)
            if self.constraint.error is not None:
                self.fail(self.constraint.error)
                return True
        if not is_stop:
            self.show(self.text.push([token]), [token], () if logprob is None else (logprob,))
        if is_stop or is_complete or self.text.is_stopped:
            self.end(FinishReason.STOP)
        elif self.num_left <= 0:
            self.end(FinishReason.LENGTH)
        return self.is_over


_Result = TypeVar("_Result")
_GATHER_SECONDS = 0.002
_ROWS_BEFORE_GROWTH = 8
"""Rows that must end without running out of memory before one more is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepInFlight:
    """A step whose tokens are on their way to the host."""

    answers: list[RunningAnswer]
    """By row, as they were when it was launched."""
    tokens: torch.Tensor
    copied: Any
    """The CUDA event after the copy; None on a CPU."""

    def read(self) -> list[int]:
        if self.copied is not None:
            self.copied.synchronize()
        found: list[int] = self.tokens.tolist()
        return found


class ContinuousBatcher:
    """Computes several answers at once on the device's rows.

    `overlaps`: the next step is launched before the last one's tokens are taken, so that the device
    does not wait for their text. A row that ends with such a token has run one step too many.
    """

    def __init__(
        self,
        rows: BatchRows,
        *,
        num_slots: int,
        prefill_tokens: int,
        overlaps: bool = False,
        select: Callable[[Sequence[str | None]], None] = lambda _keys: None,
    ) -> None:
        self._rows = rows
        self._select = select
        """Called before a pass with the adapter of each of its rows."""
        self._num_slots = num_slots
        self._room = num_slots
        """Rows that fit at present: fewer than the slots once memory has run out."""
        self._num_ended_since_oom = 0
        self._prefill_tokens = prefill_tokens
        self._active: list[RunningAnswer] = []
        """In the order of the device's rows."""
        self._seen: dict[int, torch.Tensor] = {}
        """Tokens that a penalized answer and its prompt hold, by the answer's id."""
        self._counts: dict[int, torch.Tensor] = {}
        """How often an answer holds each token, where its sampling counts them."""
        self._biases: dict[int, torch.Tensor] = {}
        """What is added to an answer's logits."""
        self._logprobs: dict[int, TokenLogprob] = {}
        """Of the tokens chosen last, by the answer's id."""
        self._states: tuple[dict[int, Any], ...] = (
            *(self._seen, self._counts, self._biases, self._logprobs),
        )
        self._next: Any = None
        """The rows' last tokens on the device; None where they must be taken from the answers."""
        self._overlaps = overlaps
        self._in_flight: _StepInFlight | None = None
        self._host_tokens: deque[Any] = deque(maxlen=2)
        """Pinned buffers that steps take turns to be copied to."""
        self._waiting: deque[RunningAnswer] = deque()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._is_closing = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="tightfit-batch", daemon=True)
        self._thread.start()

    def add(self, answer: RunningAnswer) -> None:
        """Queue an answer. Returns at once."""
        with self._wake:
            if self._is_closing:
                answer.fail(closed_error())
                return
            self._waiting.append(answer)
            self._wake.notify()

    def call(self, function: Callable[[], _Result]) -> _Result:
        """Run a function between two steps, with the model to itself, and wait for its result."""
        return self.call_later(function).result()

    def call_later(self, function: Callable[[], _Result]) -> Future[_Result]:
        """The same without waiting. Later requests wait for it."""
        future: Future[_Result] = Future()
        with self._wake:
            if self._is_closing:
                raise closed_error()
            self._calls.append((function, future))
            self._wake.notify()
        return future

    def close(self) -> None:
        """End every answer, and the thread."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        import torch

        try:
            with torch.inference_mode():
                while self._wait_for_work():
                    self._run_calls()
                    self._drop_cancelled()
                    self._admit()
                    if self._active:
                        self._step()
        except Exception as error:  # no caller may wait for ever for a thread that has ended
            self._end_all(error)
        else:
            self._end_all(None)

    def _wait_for_work(self) -> bool:
        with self._wake:
            if not (self._active or self._waiting or self._calls):
                self._wake.wait_for(lambda: self._is_closing or self._waiting or self._calls)
                # Otherwise the first request of a burst would be prefilled alone.
                self._wake.wait_for(
                    lambda: self._is_closing or len(self._waiting) >= self._num_slots,
                    timeout=_GATHER_SECONDS,
                )
            return not self._is_closing

    def _end_all(self, error: Exception | None) -> None:
        with self._wake:
            self._is_closing = True
            left = [*self._active, *self._waiting]
            calls = list(self._calls)
            self._waiting.clear()
            self._calls.clear()
        for answer in left:
            if error is None:
                answer.end(FinishReason.CANCELLED)
            else:
                answer.fail(error)
        for _, future in calls:
            future.set_exception(error or closed_error())
        self._active.clear()
        for held in self._states:
            held.clear()

    def _run_calls(self) -> None:
        while self._calls:
            function, future = self._calls.popleft()
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

    def _drop_cancelled(self) -> None:
        with self._wake:
            gone = [answer for answer in self._waiting if answer.is_cancelled]
            for answer in gone:
                self._waiting.remove(answer)
        for answer in gone:
            answer.end(FinishReason.CANCELLED)
        for row in reversed(range(len(self._active))):
            if self._active[row].is_cancelled:
                self._active[row].end(FinishReason.CANCELLED)
                self._drop_row(row)

    def _admit(self) -> None:
        """Prefill as many waiting requests as there is room for."""
        while not self._active or not self._rows.starts_together:
            joiners = self._pick()
            if not joiners:
                return
            prompts = [answer.so_far for answer in joiners]
            try:
                self._select([answer.adapter for answer in joiners])
                joined = self._rows.join(prompts, max(answer.num_left for answer in joiners))
            except Exception as error:
                self._refuse(joiners, error)
            else:
                for answer, count in zip(joiners, joined.num_cached, strict=True):
                    if not answer.tokens:  # one that was preempted finds its own
                        answer.num_cached_tokens = count
                self._start_rows(joiners, joined.logits)

    def _refuse(self, joiners: list[RunningAnswer], error: Exception) -> None:
        """After a failed prefill: try fewer at once, or fail a request that is too long alone."""
        if not is_out_of_memory(error):
            for answer in joiners:
                answer.fail(error)
        elif not self._active and len(joiners) == 1:
            joiners[0].fail(out_of_memory_error(joiners[0]))
        else:
            self._put_back(joiners)
            self._room = len(self._active) + len(joiners) // 2
            self._num_ended_since_oom = 0
        self._rows.forget_prefixes()
        free_memory()

    def _pick(self) -> list[RunningAnswer]:
        """The next requests of the queue, up to the size of one prefill."""
        picked: list[RunningAnswer] = []
        longest = 0
        with self._wake:
            while self._waiting and len(self._active) + len(picked) < self._room:
                answer = self._waiting[0]
                longest = max(longest, len(answer.so_far))
                if picked and longest * (len(picked) + 1) > self._prefill_tokens:
                    break
                picked.append(self._waiting.popleft())
        return picked

    def _put_back(self, answers: list[RunningAnswer]) -> None:
        with self._wake:
            self._waiting.extendleft(reversed(answers))

    def _start_rows(self, joiners: list[RunningAnswer], logits: torch.Tensor) -> None:
        """Give the new rows their first tokens."""
        import torch

        first = len(self._active)
        self._active.extend(joiners)
        self._device = logits.device
        for answer in joiners:
            answer.num_chosen = len(answer.tokens)
            self._keep_state(answer, int(logits.shape[-1]))
        is_number = torch.isfinite(logits).all(dim=-1).tolist()
        try:
            new = self._choose(logits, joiners)
            chosen = new.tolist()
        except Exception as error:
            self._recover(error, is_behind=True)
            return
        if first == 0:
            self._next = new
        elif self._next is not None:
            self._next = torch.cat([self._next, new])
        ended = []
        for number, (answer, token) in enumerate(zip(joiners, chosen, strict=True)):
            if not is_number[number]:
                answer.fail(
                    InvalidInputError(
                        "The model's scores are not numbers (NaN or infinity).",
                        remedy="--weights bf16 or fp32; if they stay, the weights are damaged: "
                        "tightfit verify",
                    )
                )
                ended.append(first + number)
            elif answer.take(token, self._logprobs.pop(id(answer), None)):
                ended.append(first + number)
        for row in reversed(ended):
            self._drop_row(row, is_kept=is_number[row - first])

    def _keep_state(self, answer: RunningAnswer, num_vocabulary: int) -> None:
        """What the sampling of a new row needs beside the logits."""
        import torch

        sampling, device = answer.sampling, self._device
        if sampling.repetition_penalty != 1.0:
            seen = torch.zeros(num_vocabulary, dtype=torch.bool, device=device)
            seen[torch.tensor(answer.so_far, device=device)] = True
            self._seen[id(answer)] = seen
        if sampling.counts_tokens:
            held = torch.tensor(answer.tokens, dtype=torch.long, device=device)
            self._counts[id(answer)] = torch.bincount(held, minlength=num_vocabulary).float()
        if sampling.logit_bias:
            bias = torch.zeros(num_vocabulary)
            for token, amount in sampling.logit_bias:
                bias[token] = amount
            self._biases[id(answer)] = bias.to(device)

    def _step(self) -> None:
        """Launch the next step, and take the tokens of the one before or its own."""
        import torch

        if not self._has_more() or not self._may_overlap():
            self._take_tokens()
        if not self._active:
            return
        is_behind = False
        try:
            if self._next is None:
                last = [answer.tokens[-1] for answer in self._active]
                self._next = torch.tensor(last, device=self._device)
            self._select([answer.adapter for answer in self._active])
            logits = self._rows.step(self._next)
            is_behind = True
            self._next = self._choose(logits, self._active)
            launched = self._copy_tokens(self._next)
        except Exception as error:
            self._recover(error, is_behind=is_behind)
            return
        self._take_tokens()
        self._in_flight = launched
        if not self._may_overlap():
            self._take_tokens()

    def _has_more(self) -> bool:
        """Whether some answer may go on after the tokens that were chosen."""
        return any(answer.num_chosen < answer.most_tokens for answer in self._active)

    def _may_overlap(self) -> bool:
        """Whether no answer needs its last token on the host before the next is chosen."""
        return self._overlaps and not any(
            answer.constraint is not None or answer.sampling.top_logprobs is not None
            for answer in self._active
        )

    def _copy_tokens(self, tokens: torch.Tensor) -> _StepInFlight:
        """Start to copy a step's tokens to the host."""
        import torch

        answers = [*self._active]
        if tokens.device.type != "cuda":
            return _StepInFlight(answers=answers, tokens=tokens, copied=None)
        if len(self._host_tokens) < 2:
            buffer = torch.empty(self._num_slots, dtype=torch.long, pin_memory=True)
            self._host_tokens.append(buffer)
        self._host_tokens.rotate()
        here = self._host_tokens[0][: len(tokens)]
        here.copy_(tokens, non_blocking=True)
        cuda: Any = torch.cuda  # half typed
        copied = cuda.Event()
        copied.record()
        return _StepInFlight(answers=answers, tokens=here, copied=copied)

    def _take_tokens(self) -> None:
        """Hand the tokens of the step in flight to their answers, and drop the rows that ended."""
        step, self._in_flight = self._in_flight, None
        if step is None:
            return
        ended = [
            answer
            for answer, token in zip(step.answers, step.read(), strict=True)
            if not answer.is_over and answer.take(token, self._logprobs.pop(id(answer), None))
        ]
        rows = {id(answer): row for row, answer in enumerate(self._active)} if ended else {}
        for row in sorted((rows[id(answer)] for answer in ended), reverse=True):
            self._drop_row(row)

    def _choose(self, logits: torch.Tensor, answers: list[RunningAnswer]) -> torch.Tensor:
        changed = self._penalize(self._change(logits, answers), answers)
        changed = self._constrain(changed, answers)
        chosen = choose_tokens(
            changed,
            [answer.sampling for answer in answers],
            [
                draw_uniform(answer.seed, answer.num_chosen) if answer.sampling.temperature else 0
                for answer in answers
            ],
        )
        for row, answer in enumerate(answers):
            answer.num_chosen += 1
            if id(answer) in self._seen:
                self._seen[id(answer)].index_fill_(0, chosen[row : row + 1], True)
            if id(answer) in self._counts:
                self._counts[id(answer)][chosen[row]] += 1
        self._note_logprobs(logits, chosen, answers)
        return chosen

    def _note_logprobs(
        self, logits: torch.Tensor, chosen: torch.Tensor, answers: list[RunningAnswer]
    ) -> None:
        import torch

        wanted = [
            (row, answer.sampling.top_logprobs)
            for row, answer in enumerate(answers)
            if answer.sampling.top_logprobs is not None
        ]
        if not wanted:
            return
        rows = torch.tensor([row for row, _ in wanted], device=logits.device)
        found = find_logprobs(logits[rows], chosen[rows], [count for _, count in wanted])
        for (row, _), logprob in zip(wanted, found, strict=True):
            self._logprobs[id(answers[row])] = logprob

    def _change(self, logits: torch.Tensor, answers: list[RunningAnswer]) -> torch.Tensor:
        """Logits with biases and OpenAI's penalties."""
        import torch

        biased = [row for row, answer in enumerate(answers) if id(answer) in self._biases]
        if biased:
            bias = torch.stack([self._biases[id(answers[row])] for row in biased])
            logits = logits.index_add(0, torch.tensor(biased, device=logits.device), bias)
        counted = [row for row, answer in enumerate(answers) if id(answer) in self._counts]
        if not counted:
            return logits
        places = torch.tensor(counted, device=logits.device)
        counts = torch.stack([self._counts[id(answers[row])] for row in counted])
        samplings = [answers[row].sampling for row in counted]
        presence, frequency = (
            torch.tensor(amounts, dtype=torch.float32, device=logits.device)
            for amounts in (
                [sampling.presence_penalty for sampling in samplings],
                [sampling.frequency_penalty for sampling in samplings],
            )
        )
        changed = penalize_counts(logits[places], counts, presence, frequency)
        return logits.index_copy(0, places, changed)

    def _constrain(self, logits: torch.Tensor, answers: list[RunningAnswer]) -> torch.Tensor:
        """Logits without the tokens that an answer's grammar forbids."""
        import torch

        allowed = {
            row: mask
            for row, answer in enumerate(answers)
            if answer.constraint is not None and (mask := answer.constraint.allowed()) is not None
        }
        if not allowed:
            return logits
        places = torch.tensor(list(allowed), device=logits.device)
        masks = torch.stack(list(allowed.values())).to(logits.device)
        return logits.index_copy(0, places, logits[places].masked_fill(~masks, float("-inf")))

    def _penalize(self, logits: torch.Tensor, answers: list[RunningAnswer]) -> torch.Tensor:
        import torch

        rows = [row for row, answer in enumerate(answers) if id(answer) in self._seen]
        if not rows:
            return logits
        places = torch.tensor(rows, device=logits.device)
        seen = torch.stack([self._seen[id(answers[row])] for row in rows])
        by = torch.tensor(
            [answers[row].sampling.repetition_penalty for row in rows], device=logits.device
        )
        return logits.index_copy(0, places, penalize(logits[places], seen, by))

    def _drop_row(self, row: int, *, is_kept: bool = True) -> None:
        """Drop a row; the last one takes its place, here and on the device.

        `is_kept`: its keys and values, for prompts that begin as it does.
        """
        for held in self._states:
            held.pop(id(self._active[row]), None)
        self._rows.drop(row, self._active[row].so_far if is_kept else ())
        last = self._active.pop()
        if row < len(self._active):
            self._active[row] = last
        if self._next is not None:
            kept = self._next[:-1].clone()
            kept[row : row + 1] = self._next[len(kept) :][: len(kept) - row]
            self._next = kept
        # After running out of memory, rows are added again, but rarely: a failure is expensive.
        self._num_ended_since_oom += 1
        if self._num_ended_since_oom % _ROWS_BEFORE_GROWTH == 0 or not self._active:
            self._room = min(self._num_slots, self._room + 1)

    def _recover(self, error: Exception, *, is_behind: bool) -> None:
        """After a failed step: requeue some rows and go on, or fail the answers in progress.

        `is_behind`: the device's rows hold a token that no answer has; they are built anew.
        """
        self._take_tokens()
        num_active = len(self._active)
        is_memory = is_out_of_memory(error)
        is_lost = not is_memory or num_active == 1 or self._rows.starts_together
        self._rows.forget_prefixes()
        # The newest rows have the least to recompute.
        keep = 0 if is_lost or is_behind else num_active * 3 // 4
        for row in reversed(range(keep, num_active)):
            answer = self._active[row]
            if is_lost:
                answer.fail(out_of_memory_error(answer) if is_memory else error)
            else:
                self._put_back([answer])
            self._drop_row(row, is_kept=False)
        self._room = max(1, num_active * 3 // 4) if not is_lost else self._room
        self._num_ended_since_oom = 0
        self._next = None
        free_memory()


def free_memory() -> None:
    """Return cached blocks to the device against fragmentation."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()


def closed_error() -> UserError:
    return UserError("The engine has been closed.", remedy="start the command again")


def out_of_memory_error(answer: RunningAnswer) -> UserError:
    return DoesNotFitError(
        f"Memory ran out on a request of {len(answer.so_far):,} tokens, alone on the device.",
        remedy="--weights nf4, a shorter prompt or --context, or --device cpu",
    )
