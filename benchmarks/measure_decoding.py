"""The transformers engine on a 7B shape: tokens/s with 1, 8 and 64 answers at a time, and how long
the first token takes, beside transformers' own `generate`.

    python benchmarks/measure_decoding.py --out benchmarks/results/h200_decoding.json
    python benchmarks/measure_decoding.py --device cpu --tiny --out tiny.json
    python benchmarks/measure_decoding.py --check     # fails where a prediction is too far off

Weights are drawn on the device: rates do not depend on their values. Every answer has a prompt of
512 tokens and 128 new ones; a rate is that of new tokens between the first and the last of all
answers, so that prompts do not count.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from _provenance import provenance
from measure_training import LLAMA_2, read_catalogue, write_model
from tightfit.core.dtypes import Dtype
from tightfit.core.sampling import Sampling
from tightfit.core.strategy import Strategy
from tightfit.core.units import GIB
from tightfit.data.templates import Prompter
from tightfit.data.tokenizer import load_tokenizer
from tightfit.engines.open import EngineRequest
from tightfit.engines.protocol import Done, Event, Failed, Request
from tightfit.engines.transformers.engine import TransformersEngine
from tightfit.engines.transformers.rows import PREFILL_TOKENS
from tightfit.estimation.inference import InferenceEstimate, InferenceJob, estimate_inference
from tightfit.estimation.weights import estimate_weight_bytes
from tightfit.hardware.catalogue import find_gpu
from tightfit.models.config import read_config
from tightfit.runtime.attention import name_inference_attention
from tightfit.runtime.inference import LoadedModel
from tightfit.runtime.model_files import Artefact, ArtefactKind

NUM_PROMPT, NUM_NEW, CONTEXT = 512, 128, 1024
CASES = {"bf16": (1, 8, 64), "nf4": (1, 8)}
RESULT = Path(__file__).resolve().parent / "results" / "h200_decoding.json"
GPU = "H200"
MOST_ERROR = 0.12
"""Of a prediction."""
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def draw_model(settings: dict[str, Any], device: str) -> Any:
    import torch
    import transformers

    kinds: Any = transformers
    config = kinds.AutoConfig.for_model(**settings)
    config._attn_implementation = name_inference_attention(config)
    torch.manual_seed(0)
    with torch.device(device):
        model = kinds.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval().requires_grad_(False)


def quantize(model: Any) -> Any:
    """The linear layers of the blocks in nf4, as bitsandbytes packs them on loading."""
    import bitsandbytes
    import torch

    library: Any = bitsandbytes.nn
    for block in model.model.layers:
        for owner in (block.self_attn, block.mlp):
            for name, layer in list(owner.named_children()):
                if type(layer) is not torch.nn.Linear:
                    continue
                packed = library.Linear4bit(
                    layer.in_features,
                    layer.out_features,
                    bias=False,
                    compute_dtype=torch.bfloat16,
                    quant_type="nf4",
                    device="meta",
                )
                plain = layer.weight.data
                packed.weight = library.Params4bit(
                    plain, requires_grad=False, quant_type="nf4", module=packed
                )._quantize(plain.device)
                setattr(owner, name, packed)
    return model


class Stopwatch:
    """When each answer's first and last token came."""

    def __init__(self, count: int) -> None:
        self.first: dict[int, float] = {}
        self.last: dict[int, float] = {}
        self.num_new = 0
        self.error: Exception | None = None
        self._left = count
        self.is_over = threading.Event()

    def listener(self, number: int) -> Any:
        def hear(event: Event) -> None:
            now = time.monotonic()
            self.first.setdefault(number, now)
            if isinstance(event, (Done, Failed)):
                self.last[number] = now
                if isinstance(event, Failed):
                    self.error = event.error
                else:
                    self.num_new += event.num_new_tokens
                self._left -= 1
                if not self._left:
                    self.is_over.set()

        return hear


def ask(engine: TransformersEngine, count: int, num_new: int, vocabulary: int) -> dict[str, float]:
    rng = random.Random(count)
    watch = Stopwatch(count)
    began = time.monotonic()
    for number in range(count):
        prompt = tuple(rng.randrange(4, vocabulary) for _ in range(NUM_PROMPT))
        sampling = Sampling(max_new_tokens=num_new, ignores_stop_tokens=True)
        engine.submit(Request(prompt=prompt, sampling=sampling), watch.listener(number))
    watch.is_over.wait()
    if watch.error:
        raise watch.error
    # All run from the last first token on.
    seconds = max(watch.last.values()) - max(watch.first.values())
    return {
        "new_tokens_per_second": count * (num_new - 1) / seconds,
        "with_prompts_per_second": watch.num_new / (max(watch.last.values()) - began),
        "first_token_seconds": min(watch.first.values()) - began,
    }


def predict(kind: str, count: int) -> InferenceEstimate:
    """As `tightfit generate` does for the card that the committed result names."""
    settings = read_catalogue(LLAMA_2)
    spec = read_config(settings, name=LLAMA_2, source="the catalogue")
    weights = Dtype(kind)
    size = estimate_weight_bytes(spec, Strategy(weights=weights, compute=Dtype.BF16)).total
    together = min(count * NUM_PROMPT, PREFILL_TOKENS["cuda"])
    job = InferenceJob(
        weight_bytes=size,
        compute=Dtype.BF16,
        num_slots=count,
        num_columns=CONTEXT,
        prompt_tokens=NUM_PROMPT,
        new_tokens=NUM_NEW,
        pass_tokens=together,
        joining_tokens=together,
        is_quantized=weights.is_quantized,
        replays_steps=True,
    )
    return estimate_inference(spec, job, find_gpu(GPU))


def check(result: Path) -> int:
    """Compare today's predictions with what was measured; 1 where one is too far off."""
    worst = 0.0
    for kind, found in json.loads(result.read_text())["results"].items():
        for count, case in found["cases"].items():
            predicted = int(count) / predict(kind, int(count)).pass_seconds
            error = predicted / case["new_tokens_per_second"] - 1
            worst = max(worst, abs(error))
            print(f"{kind} {count}: {predicted:,.0f} tokens/s predicted, {error:+.1%}")
        if "allocated_bytes" in found:
            estimate = predict(kind, max(CASES[kind]))
            own = estimate.peak_bytes - estimate.components["cuda_context"]
            error = own / found["allocated_bytes"] - 1
            worst = max(worst, abs(error))
            print(f"{kind}: {own / GIB:.1f} GiB predicted, {error:+.1%}")
    print("decoding: all good" if worst <= MOST_ERROR else f"error: {worst:.1%} off")
    return 0 if worst <= MOST_ERROR else 1


def most_allocated(*, starts_anew: bool = False) -> int:
    """Bytes at the peak of the device since the last call that started anew."""
    import torch

    if not torch.cuda.is_available():
        return 0
    if starts_anew:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated()


def measure_peer(model: Any, count: int, num_new: int, vocabulary: int) -> dict[str, float]:
    """transformers' `generate` with its default cache, on one batch of equally long prompts."""
    import torch
    from transformers import GenerationConfig

    tokens = torch.randint(4, vocabulary, (count, NUM_PROMPT), device=model.device)
    make: Any = GenerationConfig

    def run(length: int) -> float:
        began = time.monotonic()
        settings = make(
            do_sample=False, max_new_tokens=length, min_new_tokens=length, pad_token_id=3
        )
        with torch.inference_mode():
            model.generate(tokens, generation_config=settings)
        return time.monotonic() - began

    run(2)
    first = run(1)
    return {
        "new_tokens_per_second": count * (num_new - 1) / (run(num_new) - first),
        "first_token_seconds": first,
    }


def measure(kind: str, settings: dict[str, Any], folder: Path, device: str) -> dict[str, Any]:
    model = draw_model(settings, device)
    if kind == "nf4":
        model = quantize(model)
    vocabulary, num_new = int(settings["vocab_size"]), NUM_NEW
    found: dict[str, Any] = {"peer": {}, "cases": {}}
    if kind == "bf16":
        for count in CASES[kind]:
            found["peer"][count] = measure_peer(model, count, 32, vocabulary)
            print("generate", count, found["peer"][count], flush=True)
    artefact = Artefact(name=LLAMA_2, kind=ArtefactKind.MODEL, path=folder, tokenizer=folder)
    request = EngineRequest(artefact=artefact, context=CONTEXT, slots=max(CASES[kind]))
    loaded = LoadedModel(model=model, format=kind, device=device)
    most_allocated(starts_anew=True)
    began = time.monotonic()
    engine = TransformersEngine(loaded, Prompter(load_tokenizer(folder)), request, why="measured")
    engine.call(lambda _: None)
    found["warm_seconds"] = time.monotonic() - began
    for count in CASES[kind]:
        ask(engine, count, 8, vocabulary)  # its graph is captured
        case: dict[str, Any] = {**ask(engine, count, num_new, vocabulary)}
        # Slots are allocated for as many answers as there may be. Nothing else has run before bf16.
        if count == max(CASES[kind]) and kind == "bf16":
            found["allocated_bytes"] = most_allocated()
        if count in found["peer"]:
            peer = found["peer"][count]["new_tokens_per_second"]
            case["of_generate"] = case["new_tokens_per_second"] / peer
        found["cases"][count] = case
        print(kind, count, case, flush=True)
    engine.close()
    return found


def start_again(folder: Path, device: str) -> float:
    """Seconds from making the engine to the first token in a process of its own, whose kernels an
    earlier one has compiled."""
    words = [sys.executable, __file__, "--start", str(folder), "--device", device]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def start(folder: Path, device: str) -> None:
    settings = json.loads((folder / "config.json").read_text())
    loaded = LoadedModel(model=draw_model(settings, device), format="bf16", device=device)
    artefact = Artefact(name=LLAMA_2, kind=ArtefactKind.MODEL, path=folder, tokenizer=folder)
    began = time.monotonic()
    request = EngineRequest(artefact=artefact, context=CONTEXT, slots=1)
    engine = TransformersEngine(loaded, Prompter(load_tokenizer(folder)), request, why="measured")
    ask(engine, 1, 2, int(settings["vocab_size"]))
    print(time.monotonic() - began)
    engine.close()


def name_device(device: str) -> str:
    import torch

    return device if device == "cpu" else str(torch.cuda.get_device_name(device))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--check", action="store_true", help="only compare with predictions")
    parser.add_argument("--start", type=Path, help="only start the engine on this folder's shape")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="a shape for trying the script")
    parser.add_argument("--kinds", default=",".join(CASES))
    options = parser.parse_args()
    if options.check:
        sys.exit(check(options.out))
    if options.start:
        start(options.start, options.device)
        return
    settings = read_catalogue(LLAMA_2) | (TINY if options.tiny else {})
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "model"
        write_model(folder, settings)
        results = {
            kind: measure(kind, settings, folder, options.device)
            for kind in options.kinds.split(",")
        }
        second_start_seconds = start_again(folder, options.device)
    document = {
        "about": provenance("benchmarks/measure_decoding.py")
        | {package: version(package) for package in ("torch", "transformers")}
        | {"gpu": name_device(options.device)},
        "model": LLAMA_2,
        "prompt_tokens": NUM_PROMPT,
        "new_tokens": NUM_NEW,
        "second_start_seconds": second_start_seconds,
        "results": results,
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
