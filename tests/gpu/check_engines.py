"""The transformers engine on a real GPU: recorded steps, packed weights, against plain generate.

python tests/gpu/check_engines.py [GPTQ FOLDER]

Prints one JSON document; exits 1 where an answer differs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "support"), str(ROOT / "unit" / "engines")]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "phi3", "gpt2", "gemma2", "bloom")


def check_family(family: str, prompter: Any) -> dict[str, Any]:
    """A changing batch on the GPU, each answer against transformers' own for that prompt."""
    import torch
    from asked_batch import generate
    from test_transformers_rows import ask, make_model, make_prompts, open_batch

    from tightfit.core.sampling import Sampling
    from tightfit.engines.protocol import Request
    from tightfit.engines.transformers.rows import open_rows

    torch.backends.cuda.matmul.allow_tf32 = False
    model = make_model(family).cuda()
    requests = [
        Request(prompt=prompt, sampling=Sampling(max_new_tokens=3 + 7 * (n % 5)))
        for n, prompt in enumerate(make_prompts(14))
    ]
    stops = set(prompter.stop_ids)
    expected = [_generate_there(generate, model, r, stops) for r in requests]
    rows: Any = open_rows(model, most_rows=4)
    with open_batch(rows) as batch:
        collector, _ = ask(batch, prompter, requests)
        collector.wait()
    found = [collector.tokens(n) for n in range(len(requests))]
    graphs = getattr(rows, "_cuda_graphs", None)
    return {
        "same": sum(a == b for a, b in zip(found, expected, strict=True)),
        "of": len(requests),
        "rows": type(rows).__name__,
        "recordings": graphs.num_graphs if graphs is not None else 0,
    }


def _generate_there(generate: Any, model: Any, request: Any, stops: set[int]) -> list[int]:
    """`generate` makes its prompt on the default device."""
    import torch

    with torch.device("cuda"):
        answer: list[int] = generate(model, request.prompt, request.sampling, stops)
    return answer


def check_gptq(folder: Path) -> dict[str, float]:
    """Codes unpacked in every pass against weights unpacked once."""
    import torch

    from tightfit.runtime.gptq import load_gptq

    tokens = torch.arange(5, 60, device="cuda")[None]
    device = torch.device("cuda", 0)
    found = {}
    for name, is_packed in (("dense", False), ("packed", True)):
        model: Any = load_gptq(folder, dtype=torch.float32, device=device, is_packed=is_packed)
        with torch.inference_mode():
            found[name] = model.eval()(tokens).logits
    worst = float((found["dense"] - found["packed"]).abs().max())
    return {"worst_difference": worst, "largest_score": float(found["dense"].abs().max())}


def main() -> int:
    from small_models import make_tokenizer
    from tightfit.data.prompter import Prompter
    from tightfit.data.tokenizer import load_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer(Path(folder))
        prompter = Prompter(load_tokenizer(Path(folder)))
    reported: dict[str, Any] = {family: check_family(family, prompter) for family in FAMILIES}
    is_good = all(item["same"] == item["of"] for item in reported.values())
    if len(sys.argv) > 1:
        reported["gptq"] = check_gptq(Path(sys.argv[1]))
        is_good &= reported["gptq"]["worst_difference"] < 1e-3 * reported["gptq"]["largest_score"]
    print(json.dumps(reported, indent=1))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
