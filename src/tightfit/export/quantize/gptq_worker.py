"""The process that quantizes for vLLM and transformers: `python -m ...gptq_worker job.json PARENT`.

It writes GPTQ's layout, or compressed-tensors'.

It imports nothing of this package, so that it can be run by the Python of another environment,
where the quantizer's version demands do not clash with ours. Progress goes to stdout, a JSON object
per line; what the libraries say goes to stderr. It ends with PARENT, the process that started it.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

AUTO_ROUND, GPTQMODEL = "auto-round", "gptqmodel"
MAX_BATCH = 8
EXIT_MISSING = 21
EXIT_MEMORY = 22
EXIT_ALONE = 23
EXIT_REFUSED = 24
LARGEST_FP16 = 65504.0
SHARD_BYTES = 5 * 10**9
_FP8 = {"bits": 8, "data_type": "fp", "sym": True, "group_size": -1}
_FP8_INPUTS = {"act_bits": 8, "act_data_type": "fp", "act_group_size": -1}
SCHEMES: dict[str, dict[str, Any]] = {
    # A scale per row of weights, and one per token of inputs, found while the model runs.
    "fp8": {**_FP8, **_FP8_INPUTS, "act_dynamic": True, "act_sym": True},
    "w4a16": {"scheme": "W4A16", "sym": True},
    "mxfp4": {"scheme": "MXFP4"},
    "nvfp4": {"scheme": "NVFP4"},
}
"""Formats in the library's words. Source: auto-round 0.16.1, `auto_round/schemes.py`."""
PACKED = ("weight_packed", "weight_scale", "qweight")
"""Tensors that only a quantized matrix has."""
Send = Callable[[dict[str, Any]], None]
"""Writes one message to the parent."""


@dataclass(frozen=True)
class GptqJob:
    """What to quantize and how."""

    model: str
    """Folder with config.json and weights."""
    rows: str
    """A .npy file: calibration tokens, one row of equal length each. Empty: without calibration."""
    out: str
    """Folder for the result; made here."""
    resume: str
    """Folder for what is done so far."""
    bits: int
    group_size: int
    """-1: one scale for a whole row."""
    iters: int
    tool: str = AUTO_ROUND
    device: str = "auto"
    scheme: str = ""
    """Of `SCHEMES`, in compressed-tensors' layout. Empty: GPTQ."""
    plain: str = ""
    """Names of matrices that stay in 16 bits, with commas."""
    key: str = ""
    """Of the model's and the rows' content: a job with another key does not resume this one."""


def read_job(path: Path) -> GptqJob:
    return GptqJob(**json.loads(path.read_text()))


def main(words: list[str]) -> int:
    # Run by its path, this folder would come first in the search for modules.
    here = Path(__file__).resolve().parent
    sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != here]
    # Read by its path: in another environment this package cannot be imported.
    shared = runpy.run_path(str(here.parents[1] / "core" / "child_process.py"))
    send = shared["open_output"]()
    # By the kernel where it can: a library may keep our threads waiting for minutes.
    shared["end_with_parent"](int(words[1]))
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    job = read_job(Path(words[0]))
    started = time.monotonic()
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ[name] = "1"
    try:
        quantize = _with_gptqmodel if job.tool == GPTQMODEL else _with_auto_round
        quantize(job, send)
    except ImportError as error:
        send({"problem": str(error)})
        return EXIT_MISSING
    except UnsupportedModelError as error:
        send({"problem": str(error)})
        return EXIT_REFUSED
    except (MemoryError, RuntimeError) as error:
        send({"problem": str(error).splitlines()[0] if str(error) else repr(error)})
        if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
            return EXIT_MEMORY
        raise
    send({"seconds": time.monotonic() - started, "peak_rss_bytes": _peak_rss()})
    return 0


class UnsupportedModelError(Exception):
    """The model has layers that the layout cannot hold."""


def auto_round_arguments(job: GptqJob, rows: Any, device: str) -> dict[str, Any]:
    """Our job in the library's words. Source: auto-round 0.16.1, `AutoRound`."""
    import torch

    samples = [torch.as_tensor(row, dtype=torch.long)[None] for row in rows]
    words: dict[str, Any] = {"bits": job.bits, "sym": True}
    if job.scheme:
        words = SCHEMES[job.scheme] | ({"ignore_layers": job.plain} if job.plain else {})
    return {
        "group_size": job.group_size,
        **words,
        "iters": job.iters,
        "seqlen": int(rows.shape[1]),
        "nsamples": len(rows),
        "batch_size": min(MAX_BATCH, len(rows)),
        # Masks of our own: without them every end mark would pass for padding where the
        # tokenizer pads with it.
        "dataset": [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in samples],
        "device_map": device,
        "enable_torch_compile": False,
    }


def gptqmodel_arguments(job: GptqJob) -> dict[str, Any]:
    """Our job in the other library's words. Source: gptqmodel 7.6, `QuantizeConfig`."""
    return {"bits": job.bits, "group_size": job.group_size, "sym": True, "desc_act": False}


def _with_auto_round(job: GptqJob, send: Send) -> None:
    os.environ["AR_RESUME_DIR"] = job.resume
    # Otherwise `ar_work_space` in the user's current folder.
    os.environ["AR_WORK_SPACE"] = str(Path(job.resume).with_name("work_space"))
    import numpy as np

    # Without calibration one row stands in for the library's own text, which it would fetch.
    rows = np.load(job.rows, allow_pickle=False) if job.rows else np.ones((1, 8), np.int32)
    import torch
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if job.scheme:
        import compressed_tensors  # noqa: F401  # which the library needs to write the layout

    _follow_bars(send)
    device = job.device
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        device = "cuda:0"
    elif device == "auto":
        device = "cpu"
    tokenizer = AutoTokenizer.from_pretrained(
        job.model, local_files_only=True, trust_remote_code=False
    )
    tokenizer.pad_token = None  # or its places in our rows, which hold none, would be left out
    model = AutoModelForCausalLM.from_pretrained(
        job.model, dtype="auto", local_files_only=True, trust_remote_code=False
    )
    linears = _list_linears(model) if job.scheme else []
    quantizer = AutoRound(model, tokenizer, **auto_round_arguments(job, rows, device))
    quantizer.quantize_and_save(job.out, format="llm_compressor" if job.scheme else "auto_gptq")
    if job.scheme:
        send({"plain": _settle_compressed(Path(job.out), job, linears)})
    else:
        _settle(Path(job.out), job)


def _with_gptqmodel(job: GptqJob, send: Send) -> None:
    import numpy as np
    from gptqmodel import GPTQModel, QuantizeConfig

    _follow_bars(send)
    rows = np.load(job.rows, allow_pickle=False).tolist()
    samples = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows]
    model = GPTQModel.load(job.model, QuantizeConfig(**gptqmodel_arguments(job)))
    model.quantize(samples, batch_size=min(MAX_BATCH, len(samples)))
    model.save(job.out)
    _settle(Path(job.out), job)


def _list_linears(model: Any) -> list[str]:
    """Names of the linear layers; raises where there are none that the layout can hold."""
    import torch

    found = [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)]
    head = model.get_output_embeddings()
    if not [name for name in found if model.get_submodule(name) is not head]:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no plain linear layers, which compressed-tensors needs"
        )
    return found


def _settle_compressed(out: Path, job: GptqJob, linears: list[str]) -> list[str]:
    """One flat folder and a config that names what is plain; returns plain matrices of layers."""
    made = out if (out / "config.json").is_file() else next(out.rglob("config.json")).parent
    packed = _gather(made)
    plain = [name for name in linears if name not in packed]
    if not packed:
        raise UnsupportedModelError(f"none of its {len(linears)} matrices were quantized")
    config = json.loads((made / "config.json").read_text())
    source = json.loads((Path(job.model) / "config.json").read_text())
    stated = str(source.get("dtype") or source.get("torch_dtype") or "")
    # As the plain values are stored.
    dtype = "bfloat16" if stated.endswith("bfloat16") else "float16"
    config["dtype"] = config["torch_dtype"] = dtype
    # The library leaves out what it skipped by itself, and loaders would look for codes of it.
    config["quantization_config"]["ignore"] = plain
    (made / "quantization_config.json").unlink(missing_ok=True)  # its own copy, which differs
    (made / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _flatten(made, out)
    return sorted({name.rpartition(".")[2] for name in plain if "." in name})


def _settle(out: Path, job: GptqJob) -> None:
    """One flat folder, what is not packed in fp16, and the config as every loader reads it."""
    made = out if (out / "config.json").is_file() else next(out.rglob("config.json")).parent
    _gather(made)
    config = json.loads((made / "config.json").read_text())
    # vLLM and transformers agree on the value, not on the name of the dtype's key.
    config["dtype"] = config["torch_dtype"] = "float16"
    stated = config["quantization_config"]
    stated |= {"bits": job.bits, "group_size": job.group_size, "sym": True, "desc_act": False}
    stated |= {"quant_method": "gptq", "checkpoint_format": "gptq", "lm_head": False}
    (made / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (made / "quantize_config.json").write_text(json.dumps(stated, indent=2) + "\n")
    _flatten(made, out)


def _flatten(made: Path, out: Path) -> None:
    """The files of `made`, which lies in `out`, to `out` itself."""
    if made != out:
        for path in made.iterdir():
            path.rename(out / path.name)
        made.rmdir()


def _gather(folder: Path) -> set[str]:
    """The library's file per layer as a few large ones, without what a resumed job left double.

    Returns the names of the quantized matrices.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    homes: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118
                homes[name] = path
    packed = {name.rpartition(".")[0] for name in homes if name.rpartition(".")[2] in PACKED}
    shards: list[tuple[Path, list[str]]] = []
    held: dict[str, Any] = {}
    held_bytes = total = 0

    def flush() -> None:
        path = folder / f"shard-{len(shards)}.fresh"
        save_file(held, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors keeps others out
        shards.append((path, list(held)))
        held.clear()

    for name, path in homes.items():
        layer, _, part = name.rpartition(".")
        is_replaced = any(f"{layer}.{codes}" in homes for codes in ("qweight", "weight_packed"))
        if part == "weight" and is_replaced:
            continue
        with safe_open(path, "pt") as stored:
            tensor = stored.get_tensor(name)
        # Scales of compressed-tensors keep their dtype: those of FP8 are tiny in fp16.
        if part in ("weight", "bias") or layer not in packed or f"{layer}.qweight" in homes:
            tensor = _narrow(tensor)
        size = tensor.numel() * tensor.element_size()
        if held and held_bytes + size > SHARD_BYTES:
            flush()
            held_bytes = 0
        held[name] = tensor
        held_bytes += size
        total += size
    flush()
    for path in set(homes.values()):
        path.unlink()
    # As transformers names them: one file, or several and an index.
    index = folder / "model.safetensors.index.json"
    index.unlink(missing_ok=True)
    if len(shards) == 1:
        shards[0][0].rename(folder / "model.safetensors")
        return packed
    weight_map: dict[str, str] = {}
    for number, (path, names) in enumerate(shards, start=1):
        title = f"model-{number:05}-of-{len(shards):05}.safetensors"
        path.rename(folder / title)
        weight_map |= dict.fromkeys(names, title)
    document = {"metadata": {"total_size": total}, "weight_map": weight_map}
    index.write_text(json.dumps(document, indent=2) + "\n")
    return packed


def _narrow(tensor: Any) -> Any:
    """fp32 beside packed weights doubles the file for nothing: every loader computes in 16 bit."""
    import torch

    is_wide = tensor.dtype == torch.float32 and float(tensor.abs().max()) < LARGEST_FP16
    return tensor.half() if is_wide else tensor


def _follow_bars(send: Send) -> None:
    """Both libraries show layers done by tqdm: pass its counts on."""
    import importlib

    try:
        bar: Any = importlib.import_module("tqdm.std").tqdm
    except ImportError:
        return
    update = bar.update

    def report_update(self: Any, n: float = 1) -> Any:
        result = update(self, n)
        if "quantizing" in str(self.desc).lower() and self.total:
            send({"done": min(int(self.n), int(self.total)), "of": int(self.total)})
        return result

    bar.update = report_update


def _end_with_stdin() -> None:
    """The parent holds our stdin open for as long as it wants us."""
    while os.read(0, 1):  # not sys.stdin, whose lock Python wants back when it ends
        pass
    os._exit(EXIT_ALONE)


def _peak_rss() -> int:
    """The most this program was resident with: `ru_maxrss` would count what started it."""
    status = Path("/proc/self/status").read_text("ascii", errors="replace")
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
