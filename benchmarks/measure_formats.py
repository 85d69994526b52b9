"""Random JSON schemas, patterns and required calls: how many answers are valid, on each engine.

python benchmarks/measure_formats.py --out benchmarks/results/formats.json [--count 1000]

The model has two layers of random weights: it wants nothing of what the schemas ask for. `tightfit
serve` answers at temperature 1; validity is decided by the jsonschema package, formats included.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema

from _provenance import provenance
from _served import served

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import tightfit  # noqa: E402
from random_schemas import WORDS, draw_schema  # noqa: E402
from small_models import make_llama  # noqa: E402
from tightfit.core.dtypes import Dtype  # noqa: E402
from tightfit.export.convert import convert_to_gguf  # noqa: E402

SEED = 20
NUM_CLIENTS = 8
MAX_TOKENS = 900
CALLS_EVERY = 5
"""Every so many requests ask for a call with the schema as its arguments'."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=1000)
    options = parser.parse_args()
    about = provenance("benchmarks/measure_formats.py")
    result: dict[str, Any] = {**about, "num_schemas": options.count, "seed": SEED, "engines": {}}
    with tempfile.TemporaryDirectory() as home:
        folder = make_llama(Path(home) / "tiny", max_position_embeddings=2048)
        templates = Path(tightfit.__file__).parent / "catalogue" / "templates"
        shutil.copy(templates / "hermes.jinja", folder / "chat_template.jinja")
        file = convert_to_gguf(folder, Path(home) / "file.gguf", dtype=Dtype.FP32)
        for engine, model in (("llama.cpp", file), ("transformers", folder)):
            with served(model) as url:
                result["engines"][engine] = measure(url, options.count)
            print(engine, result["engines"][engine], flush=True)
            options.out.write_text(json.dumps(result, indent=1) + "\n")


def measure(url: str, count: int) -> dict[str, Any]:
    """Requests of all kinds and how their answers ended."""
    drawn = random.Random(SEED)
    asked = [(number, draw_schema(drawn), drawn.choice(WORDS)) for number in range(count)]
    began_s = time.monotonic()
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        ends = Counter(pool.map(lambda one: ask(url, *one), asked))
    return {
        "answers": dict(sorted(ends.items())),
        "seconds": round(time.monotonic() - began_s, 1),
    }


def ask(url: str, number: int, schema: dict[str, Any], word: str) -> str:
    """One answer: `valid`, `cut off`, or what is wrong with it."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"Tell me the {word} of number {number}."}],
        "max_tokens": MAX_TOKENS,
        "seed": number,
    }
    is_call = number % CALLS_EVERY == 0
    if is_call:
        tool = {"type": "function", "function": {"name": "note", "parameters": schema}}
        body |= {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    else:
        wrapped = {"name": "it", "schema": schema}
        body["response_format"] = {"type": "json_schema", "json_schema": wrapped}
    sent = urllib.request.Request(
        f"{url}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(sent, timeout=600) as response:
            choice = json.loads(response.read())["choices"][0]
    except urllib.error.HTTPError as error:
        return f"refused: {error.read().decode()[:200]}"
    if choice["finish_reason"] == "length":
        return "cut off"
    message = choice["message"]
    try:
        text = message["tool_calls"][0]["function"]["arguments"] if is_call else message["content"]
        check = jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        check.validate(json.loads(text))
    except (ValueError, KeyError, jsonschema.ValidationError) as error:
        return f"invalid: {str(error)[:200]}"
    return "valid call" if is_call else "valid"


if __name__ == "__main__":
    main()
