"""Chunks that several workers died of: one prompt at a time, so that the guilty one is found."""

from __future__ import annotations

import json

from tightfit.core.errors import UserError
from tightfit.engines.answers import answer_all
from tightfit.engines.protocol import Done, Engine, FinishReason
from tightfit.farm.field import Field, OpenChunk
from tightfit.farm.leases import Lease
from tightfit.farm.results import Answered, FailureNote
from tightfit.farm.store import Store
from tightfit.serve.generate.journal import Key
from tightfit.serve.generate.prompts import Prompt

LONE_TRIES = 2
"""Deaths with nothing else under way after which a prompt is given up."""


def answer_suspect(
    engine: Engine, work: Field, store: Store, lease: Lease, prompts: list[Prompt]
) -> OpenChunk | None:
    """The chunk, each prompt alone and kept as it is answered. None where we were told to stop.

    A try is noted before it begins. Where the note is there and the answer is not, whoever tried
    it died of it.
    """
    chunk = work.begin(lease, prompts)
    for prompt in prompts:
        place = f"suspect/{lease.chunk:08d}/{prompt.index}"
        kept = store.look(f"{place}.kept")
        if kept is not None:
            _restore(chunk, kept.content)
        elif (note := _note_try(store, place)) is not None:
            if not _answer_alone(engine, work, chunk, prompt):
                store.create(f"{note}.stopped")
                return None
            store.publish(f"{place}.kept", _pack(chunk, prompt.index))
        else:
            _give_up(chunk, prompt)
    return chunk


def _note_try(store: Store, place: str) -> str | None:
    """The note of a try that may begin; None after too many deaths, stops not counted."""
    num_deaths = number = 0
    while num_deaths < LONE_TRIES:
        note = f"{place}.{number}"
        if store.create(note):
            return note
        num_deaths += store.look(f"{note}.stopped") is None
        number += 1
    return None


def _answer_alone(engine: Engine, work: Field, chunk: OpenChunk, prompt: Prompt) -> bool:
    asked = list(work.requests_of(chunk, prompt))
    for number, end in answer_all(engine, (request for request, _ in asked), in_flight=1):
        if isinstance(end, Done) and end.reason is FinishReason.CANCELLED:
            return False
        work.take_end(chunk, prompt, asked[number][1], end)
    return True


def _give_up(chunk: OpenChunk, prompt: Prompt) -> None:
    fault = UserError(
        f"{prompt.place}: every worker that tried to answer it died.",
        remedy="the farm's logs say of what; a smaller --context or --parallel may do",
    )
    for key in chunk.keys:
        if key.prompt == prompt.index:
            chunk.fail(key, fault)


def _pack(chunk: OpenChunk, prompt: int) -> bytes:
    told = {
        "answers": [
            [key.sample, answer.row.decode(), answer.num_prompt_tokens, answer.num_new_tokens]
            for key, answer in chunk.answers.items()
            if key.prompt == prompt
        ],
        "failures": [
            note.model_dump() for key, note in chunk.failures.items() if key.prompt == prompt
        ],
        "prompt": prompt,
    }
    return json.dumps(told).encode()


def _restore(chunk: OpenChunk, content: bytes) -> None:
    told = json.loads(content)
    for sample, row, num_prompt, num_new in told["answers"]:
        chunk.answers[Key(told["prompt"], sample)] = Answered(row.encode(), num_prompt, num_new)
    for found in told["failures"]:
        note = FailureNote.model_validate(found)
        chunk.failures[Key(note.prompt, note.sample)] = note
