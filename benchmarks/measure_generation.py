"""`tightfit generate` on a 7B shape: rates, bandwidth and memory, and those of transformers.

python benchmarks/measure_generation.py --out benchmarks/results/h200_generation.json

Weights are drawn, not read: rates and memory do not depend on their values. Both sides get the
same prompts, the same number of new tokens and the same model folder, one after the other in the
same call. The peers are transformers' `generate` on one padded batch after another, and its
`generate_batch` (continuous batching).
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from _provenance import provenance
from measure_training import LLAMA_2, read_catalogue, write_model

PROMPT_WORDS = (128, 384)
NUM_NEW = 128

CASES: dict[str, dict[str, Any]] = {
    "one-at-a-time": {"parallel": 1, "prompts": 3},
    "eight": {"parallel": 8, "prompts": 24},
    "thirty-two": {"parallel": 32, "prompts": 96},
    "sixty-four": {"parallel": 64, "prompts": 128},
    "nf4-eight": {"parallel": 8, "prompts": 16, "weights": "nf4"},
    "int8-eight": {"parallel": 8, "prompts": 16, "weights": "int8"},
}


def write_weights(folder: Path) -> None:
    """Drawn bf16 weights in the folder's shape; on the GPU, where drawing takes seconds."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(folder))
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        make: Any = AutoModelForCausalLM
        model = make.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(str(folder))
    del model


def write_prompts(path: Path, num_prompts: int) -> list[str]:
    rng = random.Random(0)
    texts = [
        " ".join(f"w{rng.randrange(30_000)}" for _ in range(rng.randint(*PROMPT_WORDS)))
        for _ in range(num_prompts)
    ]
    path.write_text("".join(text + "\n" for text in texts))
    return texts


def run_ours(name: str, case: dict[str, Any], model: Path, work: Path) -> dict[str, Any]:
    """One `tightfit generate`; its statistics, or what it said when it failed."""
    prompts = work / f"{name}.txt"
    write_prompts(prompts, case["prompts"])
    words = ["--prompts", str(prompts), "--out", str(work / f"{name}.jsonl"), "--raw", "--json"]
    words += ["--parallel", str(case["parallel"]), "--max-new-tokens", str(NUM_NEW)]
    words += ["--weights", case["weights"]] if "weights" in case else []
    words += ["--context", "1024"]
    done = subprocess.run(
        [sys.executable, "-m", "tightfit", "generate", str(model), *words],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        print(name, done.returncode, done.stderr[-3000:], done.stdout[-1000:], flush=True)
        return {"exit_code": done.returncode, "said": done.stderr[-1500:]}
    found: dict[str, Any] = json.loads(done.stdout)
    memory, traffic = found["memory"], found["traffic"]
    print(
        name,
        f"{found['rates']['new_per_second']:.0f} new tokens/s",
        f"predicted {found['predicted_new_tokens_per_second'] or 0:.0f};",
        f"device {(memory['device_bytes'] or 0) / 2**30:.2f} GiB,",
        f"predicted {(memory['predicted_bytes'] or 0) / 2**30:.2f};",
        f"bandwidth {traffic['average_fraction']}, peak {traffic['peak_fraction']};",
        found["sentence"],
        flush=True,
    )
    return found


def run_peers(case: dict[str, Any], model: Any, folder: Path) -> dict[str, Any]:
    """transformers' own two ways, on a model that is loaded once. Seconds without loading."""
    import torch
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with tempfile.TemporaryDirectory() as work:
        texts = write_prompts(Path(work) / "prompts.txt", case["prompts"])
    prompts = [[1, *tokenizer.encode(text).ids] for text in texts]
    found: dict[str, Any] = {}
    for name, answer in (("generate", _padded), ("generate_batch", _continuous)):
        try:
            answer(model, prompts[: case["parallel"]], case["parallel"], 4)  # warm
            torch.cuda.synchronize()
            began = time.monotonic()
            num_new = answer(model, prompts, case["parallel"], NUM_NEW)
            torch.cuda.synchronize()
            took = time.monotonic() - began
            found[name] = {
                "seconds": took,
                "new_tokens": num_new,
                "new_per_second": num_new / took,
            }
        except Exception as error:  # a peer that cannot run is a result too
            found[name] = {"failed": f"{type(error).__name__}: {error}"[:400]}
        print("  peer", name, found[name], flush=True)
    return found


def _settings(num_new: int) -> Any:
    from transformers import GenerationConfig

    make: Any = GenerationConfig
    return make(
        do_sample=False, max_new_tokens=num_new, eos_token_id=-1, pad_token_id=3, use_cache=True
    )


def _padded(model: Any, prompts: list[list[int]], batch: int, num_new: int) -> int:
    import torch

    count = 0
    for start in range(0, len(prompts), batch):
        rows = prompts[start : start + batch]
        longest = max(map(len, rows))
        tokens = torch.tensor([[3] * (longest - len(row)) + row for row in rows], device="cuda")
        mask = torch.tensor(
            [[0] * (longest - len(row)) + [1] * len(row) for row in rows], device="cuda"
        )
        with torch.inference_mode():
            output = model.generate(
                input_ids=tokens, attention_mask=mask, generation_config=_settings(num_new)
            )
        count += (output.shape[1] - longest) * len(rows)
    return count


def _continuous(model: Any, prompts: list[list[int]], batch: int, num_new: int) -> int:
    from transformers import ContinuousBatchingConfig

    make: Any = ContinuousBatchingConfig
    config = make(max_requests_per_batch=batch)
    outputs = model.generate_batch(
        inputs=prompts,
        generation_config=_settings(num_new),
        continuous_batching_config=config,
        progress_bar=False,
    )
    return sum(len(output.generated_tokens) for output in outputs.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="names of cases, separated by commas")
    parser.add_argument("--model", type=Path, help="folder to keep the drawn model in")
    parser.add_argument("--no-peers", action="store_true")
    options = parser.parse_args()
    names = [name for name in CASES if not options.only or name in options.only.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model = options.model or work / "model"
        if not (model / "config.json").is_file():
            write_model(model, read_catalogue(LLAMA_2))
        if not list(model.glob("*.safetensors")):
            began = time.monotonic()
            write_weights(model)
            print(f"drew the weights in {time.monotonic() - began:.0f} s", flush=True)
        results = {name: {"ours": run_ours(name, CASES[name], model, work)} for name in names}
        if not options.no_peers:
            _add_peers(results, model)
    document = {
        "about": provenance("benchmarks/measure_generation.py")
        | {package: version(package) for package in ("torch", "transformers")},
        "model": LLAMA_2,
        "prompt_words": PROMPT_WORDS,
        "new_tokens": NUM_NEW,
        "cases": {name: CASES[name] | result for name, result in results.items()},
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n")


def _add_peers(results: dict[str, dict[str, Any]], folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    make: Any = AutoModelForCausalLM
    model = make.from_pretrained(str(folder), dtype=torch.bfloat16, device_map={"": "cuda"}).eval()
    for name, result in results.items():
        if "weights" in CASES[name]:
            continue
        print(name, flush=True)
        peers = run_peers(CASES[name], model, folder)
        result["peers"] = peers
        best = max((peer.get("new_per_second", 0.0) for peer in peers.values()), default=0.0)
        ours = result["ours"].get("rates", {}).get("new_per_second")
        if best and ours:
            result["of_best_peer"] = ours / best
            print(f"  ours / best peer: {ours / best:.2f}", flush=True)


if __name__ == "__main__":
    main()
