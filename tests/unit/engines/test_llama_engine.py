"""llama.cpp behind the engine protocol, against transformers and against its own scores."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from small_models import make_llama
from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError, SetupError, UserError
from tightfit.core.sampling import Sampling
from tightfit.engines.llama_cpp import LlamaEngine
from tightfit.engines.open import EngineRequest, open_engine
from tightfit.engines.protocol import (
    Delta,
    Done,
    Engine,
    EngineLostError,
    Event,
    Failed,
    FinishReason,
    Request,
    answer,
    answer_all,
    stream,
)
from tightfit.export.convert import convert_to_gguf
from tightfit.runtime.model_files import Artefact, find_artefact

CONTEXT = 256
PROMPTS = [tuple(10 + (7 * n + 3 * k) % 300 for k in range(5 + n % 9)) for n in range(20)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def artefact(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Artefact]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIGHTFIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        target = tmp_path_factory.mktemp("gguf") / "small.gguf"
        convert_to_gguf(folder, target, dtype=Dtype.FP32)
        yield find_artefact(str(target))


@pytest.fixture(scope="module")
def engine(artefact: Artefact) -> Iterator[Engine]:
    opened = open_engine(EngineRequest(artefact=artefact, context=CONTEXT, slots=4, threads=1))
    yield opened
    opened.close()


def greedy(num_tokens: int, **changes: Any) -> Sampling:
    return Sampling(**{"max_new_tokens": num_tokens, "ignores_stop_tokens": True} | changes)


def collect(engine: Engine, request: Request) -> tuple[list[Delta], Done]:
    events = list(stream(engine, request))
    assert isinstance(events[-1], Done)
    return [event for event in events if isinstance(event, Delta)], events[-1]


def test_greedy_answers_are_those_of_transformers(engine: Engine, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt in PROMPTS[:4]:
        ids = torch.tensor([prompt])
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
        )
        expected = made[0, len(prompt) :].tolist()
        done = answer(engine, Request(prompt=prompt, sampling=Sampling(max_new_tokens=12)))

        assert done.text == engine.prompter.decode(expected).rstrip("\ufffd")
        assert done.num_new_tokens == len(expected)


def test_greedy_is_the_argmax_of_the_scores_step_by_step(engine: Engine) -> None:
    tokens = list(PROMPTS[1])
    barred = {0, 2, 3}  # what llama.cpp forbids when told to go on
    for _ in range(8):
        scores = engine.logits(tokens)[-1]
        scores[list(barred)] = -np.inf
        tokens.append(int(scores.argmax()))
    chosen = tokens[len(PROMPTS[1]) :]
    done = answer(engine, Request(prompt=PROMPTS[1], sampling=greedy(8)))

    assert done.text == engine.prompter.decode(chosen).rstrip("\ufffd")


def test_twenty_at_once_answer_as_each_alone(engine: Engine) -> None:
    requests = [Request(prompt=prompt, sampling=greedy(16)) for prompt in PROMPTS]
    alone = [answer(engine, request).text for request in requests]
    together = dict(answer_all(engine, requests, in_flight=20))

    assert len(set(alone)) > 15  # or a mix-up would not show
    ends = [together[number] for number in range(20)]
    assert [end.text for end in ends if isinstance(end, Done)] == alone
    assert [e.num_prompt_tokens for e in ends if isinstance(e, Done)] == [len(p) for p in PROMPTS]


def test_deltas_add_up_and_a_repeated_prompt_is_cached(engine: Engine) -> None:
    prompt = tuple(range(40, 140))
    first, done = collect(engine, Request(prompt=prompt, sampling=greedy(20)))
    again = answer(engine, Request(prompt=prompt, sampling=greedy(20)))

    assert "".join(delta.text for delta in first) == done.text == again.text
    assert done.num_new_tokens == again.num_new_tokens == 20
    assert done.reason is FinishReason.LENGTH
    assert done.num_cached_tokens < 50 < again.num_cached_tokens < len(prompt)
    assert done.submitted_s < done.first_token_s <= done.finished_s


def test_characters_of_several_tokens_come_whole(engine: Engine) -> None:
    """A random model's bytes are mostly halves of characters: no delta may hold a half of one."""
    num_unnamed = 0
    for prompt in PROMPTS[:8]:
        deltas, done = collect(engine, Request(prompt=prompt, sampling=greedy(40)))
        assert "".join(delta.text for delta in deltas) == done.text
        assert done.num_new_tokens == 40
        num_unnamed += 40 - sum(len(delta.tokens) for delta in deltas)
    assert num_unnamed > 0  # some tokens ended inside a character, or this tests nothing


def test_control_tokens_have_a_text_only_where_they_are_kept(engine: Engine) -> None:
    """Calls of Mistral, gpt-oss and Gemma are written with control tokens."""
    prompter = engine.prompter
    kept = tuple(sorted(prompter.control_ids))
    names = [prompter.tokenizer.token_name(token) for token in kept]
    found = {(): 0, kept: 0}
    for control in found:
        for seed, prompt in enumerate(PROMPTS[:6]):
            sampling = greedy(40, temperature=2.0, seed=seed)
            request = Request(prompt=prompt, sampling=sampling, kept_control=control)
            text = answer(engine, request).text
            found[control] += sum(text.count(name) for name in names)

    assert found[()] == 0
    assert found[kept] > 0


def test_a_stop_text_ends_the_answer_before_it(engine: Engine) -> None:
    whole = answer(engine, Request(prompt=PROMPTS[2], sampling=greedy(40)))
    at = next(n for n in range(4, len(whole.text) - 3) if whole.text[n : n + 2].isascii())
    stop = whole.text[at : at + 2]
    done = answer(engine, Request(prompt=PROMPTS[2], sampling=greedy(40, stop=("zzzz", stop))))

    assert done.reason is FinishReason.STOP
    assert done.text == whole.text[: whole.text.index(stop)]
    assert done.num_new_tokens < whole.num_new_tokens


def test_the_models_own_end_is_no_part_of_the_answer(engine: Engine) -> None:
    """With a drawn token in five an end token, some answers stop by themselves."""
    reasons = set()
    for seed in range(30):
        sampling = Sampling(max_new_tokens=60, temperature=3.0, seed=seed)
        done = answer(engine, Request(prompt=PROMPTS[0], sampling=sampling))
        reasons.add(done.reason)
        assert "<|im_end|>" not in done.text
        assert (done.num_new_tokens == 60) or done.reason is FinishReason.STOP
    assert FinishReason.STOP in reasons


def test_a_seed_repeats_and_none_does_not(engine: Engine) -> None:
    def draw(seed: int | None) -> str:
        sampling = greedy(24, temperature=1.5, seed=seed)
        return answer(engine, Request(prompt=PROMPTS[3], sampling=sampling)).text

    draw(1)  # from here on the prompt is cached alike
    assert draw(7) == draw(7) != draw(8)
    assert len({draw(None) for _ in range(4)}) > 1


def test_top_k_of_one_is_greedy_and_defaults_cut_nothing(engine: Engine) -> None:
    prompt = PROMPTS[4]
    plain = answer(engine, Request(prompt=prompt, sampling=greedy(12))).text
    cut = greedy(12, temperature=5.0, top_k=1, seed=3)
    assert answer(engine, Request(prompt=prompt, sampling=cut)).text == plain

    # llama.cpp's own defaults leave at most 40 tokens; so hot, ours must reach far more.
    sampling = greedy(1, temperature=100.0)
    requests = [Request(prompt=prompt, sampling=sampling) for _ in range(300)]
    texts = {end.text for _, end in answer_all(engine, requests) if isinstance(end, Done)}
    assert len(texts) > 60


def test_a_repetition_penalty_counts_the_prompt(engine: Engine) -> None:
    """By transformers' rule: positive scores are divided by it, negative multiplied."""
    prompt = PROMPTS[5]
    scores = engine.logits(prompt)[-1]
    scores[[0, 2, 3]] = -np.inf
    seen = list(set(prompt))
    scores[seen] = np.where(scores[seen] > 0, scores[seen] / 8, scores[seen] * 8)
    done = answer(engine, Request(prompt=prompt, sampling=greedy(1, repetition_penalty=8.0)))

    expected = engine.prompter.decode([int(scores.argmax())])
    assert done.text == expected.rstrip("\ufffd")


def test_cancelling_ends_soon_and_frees_the_slot(engine: Engine) -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    running = [
        engine.submit(Request(prompt=PROMPTS[n], sampling=greedy(240)), events.put)
        for n in range(8)
    ]
    for ticket in running:
        ticket.cancel()
        ticket.cancel()
    ends: list[Event] = []
    while len(ends) < 8:
        event = events.get(timeout=30)
        if not isinstance(event, Delta):
            ends.append(event)
    assert {end.reason for end in ends if isinstance(end, Done)} == {FinishReason.CANCELLED}
    assert all(end.num_new_tokens < 240 for end in ends if isinstance(end, Done))

    pieces = stream(engine, Request(prompt=PROMPTS[0], sampling=greedy(240)))
    next(iter(pieces))
    pieces.close()  # type: ignore[attr-defined]
    assert answer(engine, Request(prompt=PROMPTS[0], sampling=greedy(2))).num_new_tokens == 2


def test_a_listener_that_fails_harms_no_other(engine: Engine) -> None:
    def refuse(_: Event) -> None:
        raise RuntimeError("not today")

    for _ in range(6):
        engine.submit(Request(prompt=PROMPTS[0], sampling=greedy(5)), refuse)
    assert answer(engine, Request(prompt=PROMPTS[1], sampling=greedy(3))).num_new_tokens == 3


def test_every_slot_has_the_whole_context(engine: Engine) -> None:
    prompt = tuple(range(20, 20 + CONTEXT - 10))
    requests = [Request(prompt=(n, *prompt[1:]), sampling=greedy(512)) for n in range(30, 34)]
    ends = [end for _, end in answer_all(engine, requests)]

    assert [end.num_new_tokens for end in ends if isinstance(end, Done)] == [10] * 4
    assert {end.reason for end in ends if isinstance(end, Done)} == {FinishReason.LENGTH}


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ((5,) * CONTEXT, "256 tokens"),
        ((), "empty"),
        ((5, 400_000), "400000"),
        ((-1,), "-1"),
    ],
)
def test_what_can_never_run_is_refused_at_once(
    engine: Engine, prompt: tuple[int, ...], words: str
) -> None:
    with pytest.raises(InvalidInputError, match=words):
        engine.submit(Request(prompt=prompt), lambda _: None)


def test_too_many_positions_to_score_are_the_callers_matter(engine: Engine) -> None:
    assert engine.logits((5,) * CONTEXT).shape[0] == CONTEXT
    with pytest.raises(InvalidInputError, match="257"):
        engine.logits((5,) * (CONTEXT + 1))


def test_its_own_tokenizer_agrees_with_ours(engine: Engine) -> None:
    text = "<|im_start|>user\nHow many singers are older? Ünïcode ✓<|im_end|>"
    assert engine.tokenize(text) == engine.prompter.tokenizer.encode(text)


def test_the_facts_are_those_of_the_file(engine: Engine, folder: Path, artefact: Artefact) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    info = engine.info
    assert info.num_params == sum(p.numel() for p in model.parameters())
    assert info.weight_bytes == 4 * info.num_params
    assert info.weight_bytes < artefact.path.stat().st_size < info.weight_bytes * 1.3
    assert info.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2  # k and v, layers, heads, width, fp16
    assert (info.engine, info.format, info.device) == ("llama.cpp", "F32", "cpu")
    assert (info.max_context, info.num_slots) == (CONTEXT, 4)


def test_no_port_is_opened(engine: Engine) -> None:
    import psutil

    assert isinstance(engine, LlamaEngine)
    for process in (psutil.Process(), psutil.Process(engine.process.pid)):
        ports = [one for one in process.net_connections("inet") if one.status == "LISTEN"]
        assert ports == []


def test_a_crash_is_one_error_and_the_next_answer_comes_from_a_new_process(engine: Engine) -> None:
    assert isinstance(engine, LlamaEngine)
    before = engine.process.pid
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    for number in range(6):  # four are computed, two wait
        engine.submit(Request(prompt=PROMPTS[number], sampling=greedy(200)), events.put)
    while not isinstance(events.get(timeout=30), Delta):
        pass
    os.kill(before, signal.SIGSEGV)
    ends: list[Event] = []
    while len(ends) < 6:
        event = events.get(timeout=60)
        ends += [] if isinstance(event, Delta) else [event]
    lost = [end.error for end in ends if isinstance(end, Failed)]

    assert 1 <= len(lost) <= 4
    assert {type(error) for error in lost} == {EngineLostError}
    assert "SIGSEGV" in str(lost[0])
    assert sum(isinstance(end, Done) for end in ends) == 6 - len(lost)
    assert engine.process.pid != before
    assert engine.logits(PROMPTS[0]).shape[0] == len(PROMPTS[0])


@pytest.mark.parametrize(
    ("ended_by", "error"), [(signal.SIGKILL, SetupError), (signal.SIGSEGV, InvalidInputError)]
)
def test_a_process_that_was_killed_says_nothing_about_the_file(
    artefact: Artefact,
    monkeypatch: pytest.MonkeyPatch,
    ended_by: signal.Signals,
    error: type[UserError],
) -> None:
    """A result that crashes llama.cpp is rejected; one whose process was killed is not."""
    command = ["bash", "-c", f"kill -{int(ended_by)} $$"]
    monkeypatch.setattr("tightfit.engines.llama_process.bind_command", lambda _: command)
    with pytest.raises(error):
        open_engine(EngineRequest(artefact=artefact, context=64))


def test_it_ends_with_the_process_that_opened_it(artefact: Artefact) -> None:
    import psutil

    opener = (
        "import os, sys; from tightfit.engines.open import *; "
        "from tightfit.runtime.model_files import find_artefact; "
        "engine = open_engine(EngineRequest(artefact=find_artefact(sys.argv[1]), context=64)); "
        "print(engine.process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    words = [sys.executable, "-c", opener, str(artefact.path)]
    done = subprocess.run(words, stdout=subprocess.PIPE, check=False)
    assert done.returncode == -signal.SIGKILL
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(timeout=30)


def test_closing_while_busy_ends_every_request(artefact: Artefact) -> None:
    opened = open_engine(EngineRequest(artefact=artefact, context=512, slots=2, threads=1))
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    for number in range(10):
        opened.submit(Request(prompt=PROMPTS[number], sampling=greedy(480)), events.put)
    closers = [threading.Thread(target=opened.close) for _ in range(2)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(timeout=60)
    found = [events.get_nowait() for _ in range(events.qsize())]
    ends = [event for event in found if not isinstance(event, Delta)]

    assert len(ends) == 10
    assert not any(isinstance(end, Failed) for end in ends)
    opened.close()
    with pytest.raises(UserError, match="closed"):
        opened.submit(Request(prompt=(5,)), lambda _: None)
    with pytest.raises(UserError, match="closed"):
        opened.logits((5,))


def test_a_listener_may_close(artefact: Artefact) -> None:
    opened = open_engine(EngineRequest(artefact=artefact, context=512, slots=2, threads=1))
    ends: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def close(event: Event) -> None:
        opened.close()
        if not isinstance(event, Delta):
            ends.put(event)

    opened.submit(Request(prompt=PROMPTS[0], sampling=greedy(480)), close)
    opened.submit(Request(prompt=PROMPTS[1], sampling=greedy(480)), close)
    found = [ends.get(timeout=30), ends.get(timeout=30)]
    assert [end.reason for end in found if isinstance(end, Done)] == [FinishReason.CANCELLED] * 2
    opened.close()


def test_two_engines_live_side_by_side(artefact: Artefact, engine: Engine) -> None:
    other = open_engine(EngineRequest(artefact=artefact, context=64, slots=1, threads=1))
    request = Request(prompt=PROMPTS[6], sampling=greedy(10))
    assert answer(other, request).text == answer(engine, request).text
    other.close()
    assert answer(engine, request).num_new_tokens == 10


def test_a_damaged_file_is_one_sentence(artefact: Artefact, tmp_path: Path) -> None:
    from dataclasses import replace

    data = artefact.path.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(data[:-40_000])
    with pytest.raises(InvalidInputError, match=r"cut\.gguf"):
        open_engine(EngineRequest(artefact=replace(artefact, path=cut), context=64))


def test_a_longer_context_than_the_models_is_refused(artefact: Artefact) -> None:
    with pytest.raises(InvalidInputError, match="made for 1,024"):
        open_engine(EngineRequest(artefact=artefact, context=4096))


def test_other_hosts_need_another_build(artefact: Artefact) -> None:
    with pytest.raises(SetupError, match="RPC") as caught:
        open_engine(EngineRequest(artefact=artefact, context=64, hosts=("node1:50052",)))
    assert "tightfit.runtime.build_rpc" in caught.value.remedy
    assert "private network" in caught.value.remedy


def test_a_missing_llama_says_how_to_get_it(
    artefact: Artefact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tightfit.runtime.llama_cpp.importlib.util.find_spec", lambda _: None)
    with pytest.raises(SetupError, match=r"llama\.cpp") as caught:
        open_engine(EngineRequest(artefact=artefact, context=64))
    assert "tightfit[gguf]" in caught.value.remedy


def test_a_template_of_the_users_is_taken(artefact: Artefact, tmp_path: Path) -> None:
    from tightfit.data.formats import Message

    file = tmp_path / "shout.jinja"
    file.write_text("{% for m in messages %}HEY {{ m['content'] }}{% endfor %}", encoding="utf-8")
    request = EngineRequest(artefact=artefact, context=64, slots=1, threads=1, template=str(file))
    opened = open_engine(request)
    assert opened.prompter.render([Message(role="user", content="you")]) == "HEY you"
    opened.close()
