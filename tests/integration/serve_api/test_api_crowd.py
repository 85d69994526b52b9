"""Fifty callers at once: no answer is lost, none goes to another.

TIGHTFIT_CROWD_SECONDS=20 keeps it up for so long with each engine.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import OpenAI

from api_processes import MODELS, ServerProcess

pytest_plugins = ("api_served",)

NUM_CALLERS = 50
SECONDS = float(os.environ.get("TIGHTFIT_CROWD_SECONDS", "4"))
WORDS = ("singer", "album", "town", "band", "fox", "dog", "lazy", "quick", "average", "name")


def _prompts() -> list[str]:
    drawn = random.Random(7)
    return [
        f"{number} " + " ".join(drawn.choices(WORDS, k=1 + number % 12))
        for number in range(NUM_CALLERS)
    ]


def _answer(client: OpenAI, model: str, prompt: str, *, is_streamed: bool) -> tuple[str, int]:
    """What was said, and the number of its tokens."""
    answer: Any = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=6 + len(prompt) % 7,
        temperature=0,
        stream=is_streamed,
        stream_options={"include_usage": True} if is_streamed else None,
    )
    if not is_streamed:
        return answer.choices[0].message.content, answer.usage.completion_tokens
    chunks = list(answer)
    said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    return said, chunks[-1].usage.completion_tokens


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with server.client as shared:
        yield shared


@pytest.mark.parametrize("model", MODELS)
def test_fifty_callers_get_each_his_own_answer(
    server: ServerProcess, client: OpenAI, model: str
) -> None:
    prompts = _prompts()
    alone = {prompt: _answer(client, model, prompt, is_streamed=False) for prompt in prompts}
    assert len({said for said, _ in alone.values()}) > NUM_CALLERS // 2
    end_s = time.monotonic() + SECONDS

    def call(number: int) -> list[bool]:
        drawn = random.Random(number)
        right: list[bool] = []
        while not right or time.monotonic() < end_s:
            prompt = drawn.choice(prompts)
            said = _answer(client, model, prompt, is_streamed=drawn.random() < 0.5)
            right.append(said == alone[prompt])
        return right

    with ThreadPoolExecutor(NUM_CALLERS) as pool:
        reported = [one for caller in pool.map(call, range(NUM_CALLERS)) for one in caller]

    print(f"{model}: {len(reported)} answers, {reported.count(False)} wrong")
    assert len(reported) >= NUM_CALLERS
    assert reported.count(False) == 0
    assert server.gauge("tightfit_answers_running") == 0
    assert server.gauge("tightfit_answers_waiting") == 0
