"""A tuned model through every step after training: cost and loss, compared with peers.

python benchmarks/measure_artefacts.py RUN --data test.jsonl --text wiki.test.raw
    [--llama-bin FOLDER] --out benchmarks/results/artefacts.json

RUN is a finished LoRA run, the demo's for instance. It is merged, converted and quantized to every
format; `verify` scores all of them on the text, `eval` on the data. With `--llama-bin`, a folder
with llama.cpp's own tools, the same F16 file is quantized by `llama-quantize` too, and both files
are scored by the same code. auto-round is called once more without us, with the same rows.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from _provenance import provenance

GGUF_TYPES = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "q2_k")
OTHERS = (
    *("gptq-8", "gptq-4", "gptq-3", "gptq-2", "int8", "nf4"),
    *("fp8", "w4a16", "mxfp4", "nvfp4"),
)


def run(words: list[str]) -> tuple[str, float, float]:
    """Output, wall seconds and CPU seconds of a command that must succeed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    wall = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{' '.join(words)[-120:]}: {done.returncode}, {wall:.0f} s", flush=True)
    if done.returncode not in (0, 8):
        raise SystemExit(done.stderr[-3000:] + done.stdout[-2000:])
    return done.stdout, wall, cpu


def tightfit(*words: str) -> tuple[Any, float, float]:
    text, wall, cpu = run([sys.executable, "-m", "tightfit", *words, "--json"])
    return json.loads(text), wall, cpu


def make_ours(
    model: Path, work: Path, formats: list[str], calibrate: str | None
) -> dict[str, dict[str, Any]]:
    """Every format by `tightfit quantize`, one command each, so that each has its own cost."""
    found: dict[str, dict[str, Any]] = {}
    rows = ["--calibrate", calibrate] if calibrate else []
    for name in formats:
        out = work / (f"{name}.gguf" if name in GGUF_TYPES else name)
        words = ["quantize", str(model), "--to", name, "--out", str(out), "--no-verify", *rows]
        _, wall, cpu = tightfit(*words)
        found[name] = {"path": str(out), "seconds": wall, "cpu_seconds": cpu}
    return found


def make_peers(f16: Path, work: Path, tools: Path) -> dict[str, dict[str, Any]]:
    """llama-quantize and ours on the same file, both without an importance matrix."""
    found: dict[str, dict[str, Any]] = {}
    for name in GGUF_TYPES:
        theirs, ours = work / f"peer-{name}.gguf", work / f"plain-{name}.gguf"
        _, wall, cpu = run(
            [str(tools / "llama-quantize"), str(f16), str(theirs), name.upper(), "1"]
        )
        words = ["quantize", str(f16), "--to", name, "--out", str(ours), "--threads", "1"]
        _, our_wall, our_cpu = tightfit(*words, "--no-importance", "--no-verify")
        found[name] = {
            "peer_path": str(theirs),
            "our_path": str(ours),
            "peer_seconds": wall,
            "peer_cpu_seconds": cpu,
            "our_seconds": our_wall,
            "our_cpu_seconds": our_cpu,
        } | compare_tensors(theirs, ours)
    return found


def compare_tensors(theirs: Path, ours: Path) -> dict[str, int]:
    from gguf import GGUFReader

    mine = {tensor.name: tensor for tensor in GGUFReader(ours).tensors}
    peers = list(GGUFReader(theirs).tensors)
    same = sum(
        tensor.name in mine
        and tensor.tensor_type == mine[tensor.name].tensor_type
        and tensor.data.tobytes() == mine[tensor.name].data.tobytes()
        for tensor in peers
    )
    return {"num_tensors": len(peers), "num_identical_tensors": same}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", required=True, help="rows for `eval`")
    parser.add_argument("--text", required=True, help="text for `verify`")
    parser.add_argument("--tokens", default="4096")
    parser.add_argument("--rows", default="1000000", help="most rows of the data")
    parser.add_argument("--formats", default=",".join((*GGUF_TYPES, *OTHERS)))
    parser.add_argument("--calibrate", help="text or rows to calibrate on")
    parser.add_argument("--llama-bin", type=Path, help="folder with llama-quantize")
    parser.add_argument("--work", type=Path, required=True, help="folder for the artefacts")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    work = options.work
    work.mkdir(parents=True, exist_ok=True)
    merged, f16 = work / "merged", work / "f16.gguf"
    document: dict[str, Any] = {
        "about": provenance("benchmarks/measure_artefacts.py")
        | {name: version(name) for name in ("torch", "transformers", "xllamacpp", "auto-round")}
        | {"cores": os.cpu_count()},
    }
    score = ["--text", options.text, "--tokens", options.tokens]
    _, merge_wall, merge_cpu = tightfit("merge", str(options.run), "--out", str(merged), "--force")
    _, f16_wall, f16_cpu = tightfit("convert", str(merged), "--out", str(f16), "--force")
    ours = make_ours(merged, work, options.formats.split(","), options.calibrate)
    document["made"] = {
        "merged": {"path": str(merged), "seconds": merge_wall, "cpu_seconds": merge_cpu},
        "f16": {"path": str(f16), "seconds": f16_wall, "cpu_seconds": f16_cpu},
        **ours,
    }
    paths = [str(f16), *(item["path"] for item in ours.values())]
    document["merge"], _, _ = tightfit("verify", str(options.run), str(merged), *score)
    document["chain"], _, _ = tightfit("verify", str(merged), *paths, *score)
    write(document, options.out, work)
    if options.llama_bin:
        peers = make_peers(f16, work, options.llama_bin)
        pairs = [item[key] for item in peers.values() for key in ("peer_path", "our_path")]
        document["llama_quantize"] = peers
        document["llama_quantize_scores"], _, _ = tightfit("verify", str(f16), *pairs, *score)
    write(document, options.out, work)
    beside = [word for path in [str(merged), *paths] for word in ("--beside", path)]
    rows = ["--data", options.data, "--limit", options.rows, "--metric", "execution"]
    document["task"], _, _ = tightfit("eval", str(options.run), *rows, *beside)
    write(document, options.out, work)


def write(document: dict[str, Any], out: Path, work: Path) -> None:
    """Results so far. Files are given by name."""
    text = json.dumps(document, indent=1)
    out.write_text(text.replace(f"{work}/", "") + "\n")


if __name__ == "__main__":
    main()
