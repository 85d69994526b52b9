"""The transformers engine as a whole: every kind of artefact, streams, stops, scores, closing."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from engine_batches import Collector, generate
from small_models import make_llama
from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError, UserError
from tightfit.core.sampling import Sampling
from tightfit.engines.open import EngineRequest
from tightfit.engines.protocol import Delta, Engine, FinishReason, Request
from tightfit.engines.transformers.engine import open_transformers
from tightfit.runtime.model_files import Artefact, ArtefactKind, find_artefact

library: Any = transformers
PROMPT = tuple(range(10, 40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return library.AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def engine(folder: Path) -> Any:
    opened = open_engine(find_artefact(str(folder)))
    yield opened
    opened.close()


def open_engine(artefact: Artefact, **changes: Any) -> Engine:
    return open_transformers(
        EngineRequest(artefact=artefact, device="cpu", **changes), why="for a test"
    )


def ask(engine: Engine, requests: list[Request]) -> Collector:
    collector = Collector()
    for number, request in enumerate(requests):
        engine.submit(request, collector.listener(number))
    collector.wait()
    return collector


def scores_of(model: Any, tokens: tuple[int, ...]) -> Any:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens])).logits[0].float().numpy()


def test_info_is_true(engine: Engine, model: Any) -> None:
    info = engine.info

    assert (info.engine, info.format, info.device, info.why) == (
        "transformers",
        "fp32",
        "cpu",
        "for a test",
    )
    assert info.num_params == sum(p.numel() for p in model.parameters())
    assert info.weight_bytes >= 4 * info.num_params
    assert info.weight_bytes < 4 * info.num_params + 1024  # rotary frequencies
    assert info.max_context == 1024
    with torch.inference_mode():
        kept = model(input_ids=torch.tensor([PROMPT]), use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in kept.layers)
    assert info.kv_bytes_per_token * len(PROMPT) == held


def test_answers_from_many_threads_are_each_their_own(engine: Engine, model: Any) -> None:
    stops = set(engine.prompter.stop_ids)
    requests = [
        Request(prompt=PROMPT[n % 9 :], sampling=Sampling(max_new_tokens=5 + n)) for n in range(18)
    ]
    collector = Collector()
    listeners = [collector.listener(n) for n in range(len(requests))]
    threads = [
        threading.Thread(target=engine.submit, args=(request, listener))
        for request, listener in zip(requests, listeners, strict=True)
    ]
    for thread in threads:
        thread.start()
    collector.wait()
    for thread in threads:
        thread.join()

    for number, request in enumerate(requests):
        expected = generate(model, request.prompt, request.sampling, stops)
        done = collector.done(number)
        assert collector.tokens(number) == expected
        assert collector.text(number) == done.text == engine.prompter.decode(expected)
        assert done.submitted_s <= done.first_token_s <= done.finished_s
        is_stopped = len(expected) < request.sampling.max_new_tokens
        assert done.reason is (FinishReason.STOP if is_stopped else FinishReason.LENGTH)
        assert done.num_new_tokens == len(expected) + is_stopped


def test_a_stop_text_ends_the_answer_and_is_not_part_of_it(engine: Engine) -> None:
    free = ask(engine, [Request(prompt=PROMPT, sampling=Sampling(max_new_tokens=40))])
    whole = free.done(0).text
    stop = whole[8:11]
    at = whole.find(stop)

    held = ask(engine, [Request(prompt=PROMPT, sampling=Sampling(max_new_tokens=40, stop=(stop,)))])

    done = held.done(0)
    assert done.text == held.text(0) == whole[:at]
    assert done.reason is FinishReason.STOP
    assert done.num_new_tokens < 40


def test_the_context_ends_an_answer(folder: Path) -> None:
    engine = open_engine(find_artefact(str(folder)), context=48, slots=2)
    sampling = Sampling(max_new_tokens=500, ignores_stop_tokens=True)
    collector = ask(engine, [Request(prompt=PROMPT, sampling=sampling)])
    engine.close()

    assert collector.done(0).num_new_tokens == 48 - len(PROMPT)
    assert collector.done(0).reason is FinishReason.LENGTH


def test_impossible_requests_are_refused_when_handed_in(engine: Engine) -> None:
    for prompt in ((), tuple([5] * 1024), (5, 400), (-1,)):
        with pytest.raises(InvalidInputError):
            engine.submit(Request(prompt=prompt), lambda _: None)


def test_scores_are_those_of_one_pass(engine: Engine, model: Any, monkeypatch: Any) -> None:
    from tightfit.engines.transformers import engine as engine_module

    whole = engine.logits(PROMPT)
    monkeypatch.setattr(engine_module, "_MAX_LOGITS", 1)
    in_pieces = engine.logits(PROMPT)

    assert whole.shape == (len(PROMPT), 382)
    assert whole.dtype == np.float32
    assert np.abs(whole - scores_of(model, PROMPT)).max() < 1e-4
    assert np.abs(whole - in_pieces).max() < 1e-4


def test_scores_can_be_had_while_answers_are_under_way(engine: Engine, model: Any) -> None:
    collector = Collector()
    sampling = Sampling(max_new_tokens=300, ignores_stop_tokens=True)
    for number in range(3):
        engine.submit(Request(prompt=PROMPT, sampling=sampling), collector.listener(number))

    found = engine.logits(PROMPT)

    assert not all(collector.events[n][-1:] and collector.tokens(n)[299:] for n in range(3))
    collector.wait()
    assert np.abs(found - scores_of(model, PROMPT)).max() < 1e-4
    assert collector.tokens(0) == collector.tokens(1) == collector.tokens(2)


def test_closing_ends_requests_and_refuses_new_ones(folder: Path) -> None:
    engine = open_engine(find_artefact(str(folder)))
    collector = Collector()
    started = threading.Event()
    sampling = Sampling(max_new_tokens=900, ignores_stop_tokens=True)
    engine.submit(
        Request(prompt=PROMPT, sampling=sampling), collector.listener(0, lambda _: started.set())
    )
    assert started.wait(30)
    engine.close()
    engine.close()
    collector.wait()

    done = collector.done(0)
    assert done.reason is FinishReason.CANCELLED
    assert done.text.startswith(collector.text(0)[:5])
    for refused in (
        lambda: engine.submit(Request(prompt=PROMPT), lambda _: None),
        lambda: engine.logits(PROMPT),
    ):
        with pytest.raises(UserError, match="closed"):
            refused()


def test_a_ticket_cancels(engine: Engine) -> None:
    collector = Collector()
    ticket: Any = None
    seen = threading.Event()
    sampling = Sampling(max_new_tokens=900, ignores_stop_tokens=True)
    ticket = engine.submit(
        Request(prompt=PROMPT, sampling=sampling), collector.listener(0, lambda _: seen.set())
    )
    assert seen.wait(30)
    ticket.cancel()
    collector.wait()
    ticket.cancel()

    assert collector.done(0).reason is FinishReason.CANCELLED
    assert 0 < collector.done(0).num_new_tokens < 900


def make_adapter(folder: Path, out: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    from peft import LoraConfig, get_peft_model

    make: Any = LoraConfig
    base = library.AutoModelForCausalLM.from_pretrained(folder)
    adapted: Any = get_peft_model(
        base, make(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    torch.manual_seed(9)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = (torch.randn_like(parameter) * 0.1).to(dtype)
    adapted.save_pretrained(out)
    settings = json.loads((out / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(folder)
    (out / "adapter_config.json").write_text(json.dumps(settings))
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_answers_as_its_merged_model(
    folder: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    """Within float noise, though a 16-bit adapter lies beside fp32 weights."""
    from peft import PeftModel

    adapter = make_adapter(folder, tmp_path, dtype=dtype)
    merged: Any = PeftModel.from_pretrained(
        library.AutoModelForCausalLM.from_pretrained(folder), str(adapter)
    )
    merged = merged.merge_and_unload().eval()
    base = library.AutoModelForCausalLM.from_pretrained(folder).eval()
    engine = open_engine(find_artefact(str(adapter)))

    found = engine.logits(PROMPT)
    stops = set(engine.prompter.stop_ids)
    sampling = Sampling(max_new_tokens=20)
    collector = ask(engine, [Request(prompt=PROMPT, sampling=sampling)])
    engine.close()

    assert np.abs(found - scores_of(merged, PROMPT)).max() < 1e-3
    assert np.abs(found - scores_of(base, PROMPT)).max() > 1
    assert collector.tokens(0) == generate(merged, PROMPT, sampling, stops)


@pytest.mark.parametrize("weights", [Dtype.NF4, Dtype.INT8, Dtype.BF16])
def test_weights_that_were_asked_for(folder: Path, model: Any, weights: Dtype) -> None:
    engine = open_engine(find_artefact(str(folder)), weights=weights)
    found = engine.logits(PROMPT)
    info = engine.info
    engine.close()

    expected = scores_of(model, PROMPT)
    lost = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    assert info.format == weights.value
    assert info.num_params == sum(p.numel() for p in model.parameters())
    assert info.weight_bytes < 4 * info.num_params * 0.75
    assert 0 < lost < 0.6


def test_a_folder_that_was_saved_packed(folder: Path, tmp_path: Path) -> None:
    make: Any = transformers.BitsAndBytesConfig
    packing = make(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    packed = library.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=packing, dtype=torch.float32
    )
    packed.save_pretrained(tmp_path)
    library.AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    artefact = find_artefact(str(tmp_path))
    assert artefact.kind is ArtefactKind.BITSANDBYTES

    direct = open_engine(find_artefact(str(folder)), weights=Dtype.NF4)
    expected = direct.logits(PROMPT)
    direct.close()
    engine = open_engine(artefact)
    found = engine.logits(PROMPT)
    info = engine.info
    engine.close()

    assert info.format == "nf4"
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


def test_deltas_come_one_by_one(engine: Engine) -> None:
    sampling = Sampling(max_new_tokens=30, ignores_stop_tokens=True)
    collector = ask(engine, [Request(prompt=PROMPT, sampling=sampling)])

    deltas = [event for event in collector.events[0] if isinstance(event, Delta)]
    assert len(deltas) > 5
    assert sum(len(delta.tokens) for delta in deltas) == 30
