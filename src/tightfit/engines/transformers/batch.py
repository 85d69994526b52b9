"""Continuous batching: one thread that keeps the device's rows full of waiting requests."""

from __future__ import annotations

import contextlib
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from tightfit.core.errors import DoesNotFitError, InvalidInputError, UserError
from tightfit.core.sampling import Sampling
from tightfit.data.templates import Prompter, TextStream
from tightfit.engines.protocol import BaseAnswer, FinishReason, Listener, Request
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
        self, request: Request, listener: Listener, prompter: Prompter, *, max_context: int
    ) -> None:
        self.sampling: Sampling = request.sampling
        super().__init__(
            request,
            listener,
            prompter.stop_ids,
            TextStream(prompter, self.sampling.stop, request.kept_control),
        )
        self.tokens: list[int] = []
        """All new tokens so far, the stop token included."""
        self.seed = random.getrandbits(63) if self.sampling.seed is None else self.sampling.seed
        """Draws are numbered by token, so that a preempted answer continues with the same ones."""
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

    def take(self, token: int) -> bool:
        """Take the next token. True when the answer ends with it."""
        self.mark_first_token()
        self.tokens.append(token)
        self.num_new_tokens += 1
        is_stop = token in self.stop_ids
        if not is_stop:
            self.show(self.text.push([token]), [token])
        if is_stop or self.text.is_stopped:
            self.end(FinishReason.STOP)
        elif self.num_left <= 0:
            self.end(FinishReason.LENGTH)
        return self.is_over


_Result = TypeVar("_Result")
_GATHER_SECONDS = 0.002
_ROWS_BEFORE_GROWTH = 8
"""Rows that must end without running out of memory before one more is tried."""


class ContinuousBatcher:
    """Computes several answers at once on the device's rows."""

    def __init__(self, rows: BatchRows, *, num_slots: int, prefill_tokens: int) -> None:
        self._rows = rows
        self._num_slots = num_slots
        self._room = num_slots
        """Rows that fit at present: fewer than the slots once memory has run out."""
        self._num_ended_since_oom = 0
        self._prefill_tokens = prefill_tokens
        self._active: list[RunningAnswer] = []
        """In the order of the device's rows."""
        self._seen: dict[int, torch.Tensor] = {}
        """Tokens that a penalized answer holds, by the answer's id."""
        self._next: Any = None
        """The rows' last tokens on the device; None after rows have come or gone."""
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
        future: Future[Any] = Future()
        with self._wake:
            if self._is_closing:
                raise closed_error()
            self._calls.append((function, future))
            self._wake.notify()
        result: _Result = future.result()
        return result

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
        self._seen.clear()

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
                logits = self._rows.join(prompts, max(answer.num_left for answer in joiners))
            except Exception as error:
                self._refuse(joiners, error)
            else:
                self._start_rows(joiners, logits)

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
        self._next = None
        self._device = logits.device
        for answer in joiners:
            if answer.sampling.repetition_penalty != 1.0:
                seen = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
                seen[torch.tensor(answer.so_far, device=logits.device)] = True
                self._seen[id(answer)] = seen
        is_number = torch.isfinite(logits).all(dim=-1).tolist()
        try:
            chosen = self._choose(logits, joiners).tolist()
        except Exception as error:
            self._recover(error, is_behind=True)
            return
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
            elif answer.take(token):
                ended.append(first + number)
        for row in reversed(ended):
            self._drop_row(row)

    def _step(self) -> None:
        import torch

        is_behind = False
        try:
            if self._next is None:
                last = [answer.tokens[-1] for answer in self._active]
                self._next = torch.tensor(last, device=self._device)
            logits = self._rows.step(self._next)
            is_behind = True
            self._next = self._choose(logits, self._active)
        except Exception as error:
            self._recover(error, is_behind=is_behind)
            return
        chosen = self._next.tolist()
        ended = [
            row
            for row, (answer, token) in enumerate(zip(self._active, chosen, strict=True))
            if answer.take(token)
        ]
        for row in reversed(ended):
            self._drop_row(row)

    def _choose(self, logits: torch.Tensor, answers: list[RunningAnswer]) -> torch.Tensor:
        logits = self._penalize(logits, answers)
        chosen = choose_tokens(
            logits,
            [answer.sampling for answer in answers],
            [
                draw_uniform(answer.seed, len(answer.tokens)) if answer.sampling.temperature else 0
                for answer in answers
            ],
        )
        for row, answer in enumerate(answers):
            if id(answer) in self._seen:
                self._seen[id(answer)].index_fill_(0, chosen[row : row + 1], True)
        return chosen

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

    def _drop_row(self, row: int) -> None:
        """Drop a row; the last one takes its place, here and on the device."""
        self._seen.pop(id(self._active[row]), None)
        self._rows.drop(row)
        last = self._active.pop()
        if row < len(self._active):
            self._active[row] = last
        self._next = None
        # After running out of memory, rows are added again, but rarely: a failure is expensive.
        self._num_ended_since_oom += 1
        if self._num_ended_since_oom % _ROWS_BEFORE_GROWTH == 0 or not self._active:
            self._room = min(self._num_slots, self._room + 1)

    def _recover(self, error: Exception, *, is_behind: bool) -> None:
        """After a failed step: requeue some rows and go on, or fail the answers in progress.

        `is_behind`: the device's rows hold a token that no answer has; they are built anew.
        """
        num_active = len(self._active)
        is_memory = is_out_of_memory(error)
        is_lost = not is_memory or num_active == 1 or self._rows.starts_together
        # The newest rows have the least to recompute.
        keep = 0 if is_lost or is_behind else num_active * 3 // 4
        for row in reversed(range(keep, num_active)):
            answer = self._active[row]
            if is_lost:
                answer.fail(out_of_memory_error(answer) if is_memory else error)
            else:
                self._put_back([answer])
            self._drop_row(row)
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
