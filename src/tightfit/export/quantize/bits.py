"""nf4 and int8: a model packed by bitsandbytes and saved as a folder that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tightfit.core.dtypes import Dtype
from tightfit.core.files import write_atomic
from tightfit.export.quantize.targets import Target
from tightfit.runtime.companion_files import copy_companions
from tightfit.runtime.load import LoadRequest, load_base

MAX_SHARD_BYTES = 5 * 10**9
_KINDS = {Target.NF4: Dtype.NF4, Target.INT8: Dtype.INT8}


def pack_bits(source: Path, tokenizer: Path, target: Target, work: Path) -> None:
    """Fill `work` with the packed model, its config and the files it speaks with."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = json.loads((source / "config.json").read_bytes())
    request = LoadRequest(weights=_KINDS[target], compute=plain_dtype(config))
    model: Any = load_base(source, request, device)
    model.eval()
    model.save_pretrained(str(work), max_shard_size=MAX_SHARD_BYTES)
    _restore_config(work, config)
    copy_companions(source, work)
    copy_companions(tokenizer, work)


def plain_dtype(config: dict[str, Any]) -> Dtype:
    """What stays unpacked is stored in 16 bits: in the model's own kind, else in fp16."""
    stated = str(config.get("dtype") or config.get("torch_dtype") or "")
    return Dtype.BF16 if stated.endswith("bfloat16") else Dtype.FP16


def _restore_config(work: Path, original: dict[str, Any]) -> None:
    """The model's own config with the packing added; loading for work has changed other keys."""
    saved = json.loads((work / "config.json").read_bytes())
    added = {key: saved[key] for key in ("quantization_config", "dtype") if key in saved}
    original.pop("torch_dtype", None)
    write_atomic(work / "config.json", json.dumps(original | added, indent=2) + "\n")
