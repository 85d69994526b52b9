"""The process that makes a GPTQ-format model: `python -m ...gptq_worker job.json PARENT`.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

AUTO_ROUND, GPTQMODEL = "auto-round", "gptqmodel"
MAX_BATCH = 8
EXIT_MISSING = 21
EXIT_MEMORY = 22
EXIT_ALONE = 23
LARGEST_FP16 = 65504.0
SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class GptqJob:
    """What to quantize and how."""

    model: str
    """Folder with config.json and weights."""
    rows: str
    """A .npy file: calibration tokens, one row of equal length each."""
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
    key: str = ""
    """Of the model's and the rows' content: a job with another key does not resume this one."""


def read_job(path: Path) -> GptqJob:
    return GptqJob(**json.loads(path.read_text()))


def main(words: list[str]) -> int:
    # Run by its path, this folder would come first in the search for modules.
    here = Path(__file__).resolve().parent
    sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != here]
    output = _take_stdout()
    _end_with_parent(int(words[1]))
    job = read_job(Path(words[0]))
    started = time.monotonic()
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ[name] = "1"
    try:
        quantize = _with_gptqmodel if job.tool == GPTQMODEL else _with_auto_round
        quantize(job, output)
    except ImportError as error:
        _report(output, problem=str(error))
        return EXIT_MISSING
    except (MemoryError, RuntimeError) as error:
        _report(output, problem=str(error).splitlines()[0] if str(error) else repr(error))
        if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
            return EXIT_MEMORY
        raise
    _report(output, seconds=time.monotonic() - started, peak_rss_bytes=_peak_rss())
    return 0


def auto_round_arguments(job: GptqJob, rows: Any, device: str) -> dict[str, Any]:
    """Our job in the library's words. Source: auto-round 0.16.1, `AutoRound`."""
    import torch

    samples = [torch.as_tensor(row, dtype=torch.long)[None] for row in rows]
    return {
        "bits": job.bits,
        "group_size": job.group_size,
        "sym": True,
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


def _with_auto_round(job: GptqJob, output: TextIO) -> None:
    os.environ["AR_RESUME_DIR"] = job.resume
    import numpy as np

    rows = np.load(job.rows, allow_pickle=False)
    import torch
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _follow_bars(output)
    device = _device(job, torch.cuda.is_available())
    tokenizer = AutoTokenizer.from_pretrained(job.model, local_files_only=True)
    tokenizer.pad_token = None  # or its places in our rows, which hold none, would be left out
    model = AutoModelForCausalLM.from_pretrained(
        job.model, dtype="auto", local_files_only=True, trust_remote_code=False
    )
    quantizer = AutoRound(model, tokenizer, **auto_round_arguments(job, rows, device))
    quantizer.quantize_and_save(job.out, format="auto_gptq")
    _settle(Path(job.out), job)


def _with_gptqmodel(job: GptqJob, output: TextIO) -> None:
    import numpy as np
    from gptqmodel import GPTQModel, QuantizeConfig

    _follow_bars(output)
    rows = np.load(job.rows, allow_pickle=False).tolist()
    samples = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows]
    model = GPTQModel.load(job.model, QuantizeConfig(**gptqmodel_arguments(job)))
    model.quantize(samples, batch_size=min(MAX_BATCH, len(samples)))
    model.save(job.out)
    _settle(Path(job.out), job)


def _device(job: GptqJob, has_cuda: bool) -> str:
    if job.device == "auto":
        return "cuda:0" if has_cuda else "cpu"
    return "cuda:0" if job.device == "cuda" else job.device


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
    if made != out:
        for path in made.iterdir():
            path.rename(out / path.name)
        made.rmdir()


def _gather(folder: Path) -> None:
    """The library's file per layer as a few large ones, without what a resumed job left double."""
    from safetensors import safe_open

    homes: dict[str, Path] = {}
    sizes: dict[str, int] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118
                homes[name] = path
    packed = {name.removesuffix(".qweight") for name in homes if name.endswith(".qweight")}
    kept = {
        name: path for name, path in homes.items() if name.removesuffix(".weight") not in packed
    }
    shards: list[dict[str, Any]] = [{}]
    room = SHARD_BYTES
    fresh: list[Path] = []
    for name, path in kept.items():
        with safe_open(path, "pt") as stored:
            tensor = _narrow(stored.get_tensor(name))
        sizes[name] = tensor.numel() * tensor.element_size()
        if sizes[name] > room and shards[-1]:
            fresh.append(_flush(folder, len(fresh), shards[-1]))
            shards[-1] = dict.fromkeys(shards[-1])  # names stay, values go
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = tensor
        room -= sizes[name]
    fresh.append(_flush(folder, len(fresh), shards[-1]))
    for path in set(homes.values()):
        path.unlink()
    _name_shards(folder, fresh, [list(shard) for shard in shards], sum(sizes.values()))


def _flush(folder: Path, number: int, tensors: dict[str, Any]) -> Path:
    from safetensors.torch import save_file

    path = folder / f"shard-{number}.fresh"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors keeps others out
    return path


def _name_shards(folder: Path, fresh: list[Path], names: list[list[str]], size: int) -> None:
    """As transformers names them: one file, or several and an index."""
    index = folder / "model.safetensors.index.json"
    index.unlink(missing_ok=True)
    if len(fresh) == 1:
        fresh[0].rename(folder / "model.safetensors")
        return
    places: dict[str, str] = {}
    for number, (path, held) in enumerate(zip(fresh, names), start=1):  # noqa: B905
        title = f"model-{number:05}-of-{len(fresh):05}.safetensors"
        path.rename(folder / title)
        places |= dict.fromkeys(held, title)
    document = {"metadata": {"total_size": size}, "weight_map": places}
    index.write_text(json.dumps(document, indent=2) + "\n")


def _narrow(tensor: Any) -> Any:
    """fp32 beside packed weights doubles the file for nothing: every loader computes in 16 bit."""
    import torch

    is_wide = tensor.dtype == torch.float32 and float(tensor.abs().max()) < LARGEST_FP16
    return tensor.half() if is_wide else tensor


def _follow_bars(output: TextIO) -> None:
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
            _report(output, done=min(int(self.n), int(self.total)), of=int(self.total))
        return result

    bar.update = report_update


def _take_stdout() -> TextIO:
    """Stdout for us alone: what libraries print goes to stderr, below Python too."""
    own = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return own


def _end_with_parent(parent_pid: int) -> None:
    """By the kernel where it can: a library may keep our threads waiting for minutes.

    The parent holds our stdin open as long as it wants us, whatever it dies of.
    """
    helper = Path(__file__).resolve().parents[2] / "core" / "with_parent.py"
    runpy.run_path(str(helper))["end_with_parent"](parent_pid)

    def wait() -> None:
        while os.read(0, 1):  # not sys.stdin, whose lock Python wants back when it ends
            pass
        os._exit(EXIT_ALONE)

    threading.Thread(target=wait, daemon=True).start()


def _report(output: TextIO, **facts: object) -> None:
    output.write(json.dumps(facts) + "\n")
    output.flush()


def _peak_rss() -> int:
    """The most this program was resident with: `ru_maxrss` would count what started it."""
    status = Path("/proc/self/status").read_text("ascii", errors="replace")
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
