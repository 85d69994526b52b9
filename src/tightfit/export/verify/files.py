"""Comparison of two artefacts' files: settings, stored dtypes, sizes, and differing tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import UserError
from tightfit.export.verify.verdict import Finding, Level
from tightfit.models.gguf import GgufHeader, read_gguf_header
from tightfit.runtime.artefacts import Artefact, ArtefactKind

if TYPE_CHECKING:
    import torch


_FREE = {
    "_name_or_path",
    "architectures",
    "attn_implementation",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "model_type",
    "pad_token_id",
    "quantization_config",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "vocab_size",
}
"""May differ, or are compared elsewhere."""
_REMEDY = "copy the setting from the reference's config.json, or make this one again"
_CLOSE = 1e-5


def compare_settings(reference: Artefact, other: Artefact) -> list[Finding]:
    """RoPE differences fail: they may show only beyond the sample's length. Others warn."""
    config = _read_config(reference)
    if config is None or reference.kind is ArtefactKind.GGUF:
        return []
    if other.kind is ArtefactKind.GGUF:
        return list(_compare_gguf(config, read_gguf_header(other.path)))
    found = _read_config(other)
    return [] if found is None else list(_compare_configs(config, found))


def _read_config(artefact: Artefact) -> dict[str, Any] | None:
    """As transformers understands it, so that old and new spellings are one."""
    from transformers import AutoConfig

    folder = artefact.base or artefact.path
    if not folder.is_dir():
        return None
    try:
        config = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        # Tuples become lists, as both sides must be comparable.
        return dict(json.loads(json.dumps(config.to_dict(), default=str)))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _compare_configs(one: dict[str, Any], two: dict[str, Any]) -> Iterator[Finding]:
    for key in sorted(set(one) | set(two)):
        if key in _FREE or _same(one.get(key), two.get(key)):
            continue
        is_rope = key.startswith("rope") or key in ("partial_rotary_factor", "sliding_window")
        what = "Rope settings differ" if key.startswith("rope") else "A setting differs"
        yield Finding(
            level=Level.FAIL if is_rope else Level.WARNING,
            text=f"{what}: {key} is {_short(two.get(key))} instead of {_short(one.get(key))}.",
            remedy=_REMEDY,
        )


def _compare_gguf(config: dict[str, Any], header: GgufHeader) -> Iterator[Finding]:
    stated = header.metadata
    architecture = stated.get("general.architecture")
    rope = config.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        return  # by kind of layer, as in Gemma 3: only the scores can show a difference
    theta = rope.get("rope_theta", config.get("rope_theta"))
    found = stated.get(f"{architecture}.rope.freq_base")
    if theta is not None and found is not None and not _same(float(theta), found):
        yield _rope(f"rope's base is {found} instead of {theta}")
    kind = rope.get("rope_type", "default")
    scaling = stated.get(f"{architecture}.rope.scaling.type")
    factor = stated.get(f"{architecture}.rope.scaling.factor")
    has_table = any(tensor.name.startswith("rope_f") for tensor in header.tensors)
    if kind in ("linear", "yarn"):
        if not _same(float(rope.get("factor", 1.0)), factor):
            yield _rope(f"rope scaling by {rope.get('factor')} has become {factor}")
    elif kind in ("llama3", "longrope"):
        if not has_table:
            yield _rope(f"rope scaling of type {kind} is lost")
    elif scaling not in (None, "none") and factor not in (None, 1.0, 0.0):
        yield _rope(f"rope is scaled by {factor} where the reference's is not")


def _rope(what: str) -> Finding:
    return Finding(
        level=Level.FAIL,
        text=f"Rope settings differ: {what}.",
        remedy="convert it again from the reference: tightfit convert REFERENCE --out FILE.gguf",
    )


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, float | int) and isinstance(two, float | int):
        return abs(one - two) <= _CLOSE * max(abs(one), abs(two))
    if isinstance(one, dict) and isinstance(two, dict):
        return all(_same(one.get(key), two.get(key)) for key in {*one, *two})
    return bool(one == two) or (not one and not two)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def read_stored_dtype(artefact: Artefact) -> str | None:
    """The dtype of most bytes of an unquantized folder. None: quantized, or GGUF."""
    if artefact.kind not in (ArtefactKind.MODEL, ArtefactKind.ADAPTER):
        return None
    from tightfit.runtime.tensor_files import StoredWeights

    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    sizes: dict[str, int] = {}
    for tensor in StoredWeights(artefact.base or artefact.path).tensors.values():
        name = names.get(str(tensor.dtype).removeprefix("torch."))
        if name is not None:
            sizes[name] = sizes.get(name, 0) + tensor.num_bytes
    return max(sizes, key=lambda name: sizes[name], default=None)


def measure_size(artefact: Artefact) -> int:
    """Bytes of the weights on disk; of an adapter its base's too."""
    folders: list[Path] = [artefact.path, *([artefact.base] if artefact.base else [])]
    total = 0
    for folder in folders:
        if folder.is_file():
            total += folder.stat().st_size
            continue
        files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
        total += sum(path.stat().st_size for path in files)
    return total


# Diagnosis: which tensors of a failed artefact differ, and how.

Read = Callable[[str], "torch.Tensor | None"]
MOST_NAMED = 4
FAR_FRACTION = 0.5
"""Of a tensor's norm: no usable quantization moves it this far."""
CLOSE_FRACTION = 0.02


def diagnose(reference: Artefact, other: Artefact, *, far: float = FAR_FRACTION) -> list[Finding]:
    """Findings that name tensors; none where the two cannot be compared tensor by tensor."""
    try:
        names, expected = _open(reference)
        held, found = _open(other)
    except UserError:
        return []
    import torch

    bad: dict[str, list[str]] = {}
    with torch.no_grad():
        for name in names:
            if name not in held:
                continue
            one, two = expected(name), found(name)
            if one is None or two is None or one.ndim > 2:
                continue
            what = _describe(one.float(), two.float(), far)
            if what is not None:
                bad.setdefault(what, []).append(name)
    return [_make_finding(what, tensors) for what, tensors in bad.items()]


def _describe(one: torch.Tensor, two: torch.Tensor, far: float) -> str | None:
    if one.shape != two.shape:
        is_turned = one.ndim == 2 and one.T.shape == two.shape
        is_padded = one.shape[1:] == two.shape[1:]
        return "transposed" if is_turned else None if is_padded else "of another shape"
    if float((one - two).norm()) <= far * float(one.norm()):
        return None
    what = "with other values"
    if not bool(two.isfinite().all()):
        what = "not finite"
    elif not float(two.norm()):
        what = "all zero"
    elif one.ndim == 2 and one.shape[0] == one.shape[1] and _close(one.T, two):
        what = "transposed"
    elif one.ndim == 2 and _close(one.norm(dim=1).sort()[0], two.norm(dim=1).sort()[0]):
        what = "with rows in another order"
    return what


def _close(one: torch.Tensor, two: torch.Tensor) -> bool:
    return float((one - two).norm()) <= CLOSE_FRACTION * float(one.norm())


def _make_finding(what: str, names: list[str]) -> Finding:
    shown = ", ".join(names[:MOST_NAMED])
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    is_attention = all("q_proj" in name or "k_proj" in name for name in names)
    remedy = "make this one again from the reference"
    if what == "with rows in another order" and is_attention:
        remedy = "the q and k rows look permuted for another rope layout: convert it again"
    elif what == "all zero":
        remedy = "the file lost these weights: copy it or make it again"
    return Finding(level=Level.NOTE, text=f"{shown}{more}: {what}.", remedy=remedy)


def _open(artefact: Artefact) -> tuple[list[str], Read]:
    """Names as the model has them, and a reader; an adapter's are those of its merge."""
    from tightfit.export.adapter_changes import plan_merge, read_changes
    from tightfit.runtime.tensor_files import StoredWeights

    if artefact.kind is ArtefactKind.ADAPTER and artefact.base is not None:
        changes, stored = read_changes(artefact.path, artefact.base), StoredWeights(artefact.base)
        plan = plan_merge(changes, stored, None)

        def read_merged(name: str) -> torch.Tensor | None:
            key = plan.sources[name]
            held = stored.read(key) if key is not None else None
            return changes.apply(name, held) if changes.is_changed(name) else held

        return [output.name for output in plan.outputs], read_merged
    folder = artefact.path
    if artefact.kind is ArtefactKind.GGUF:
        from tightfit.runtime.model_files import import_gguf

        folder = import_gguf(artefact.path)
    elif artefact.kind is not ArtefactKind.MODEL:
        return [], lambda _: None
    whole = StoredWeights(folder)
    return list(whole.tensors), whole.read


# The dtype in which unquantized artefacts are compared: fp32 where it fits, for least noise.

_ROOM_FRACTION = 0.7
"""Of the free memory that weights may take; the rest is for scores and arithmetic."""


def choose_weights(artefact: Artefact, wanted: Dtype | None, device: str) -> Dtype | None:
    """For an unquantized folder, or an adapter on one. None: as stored."""
    if artefact.kind not in (ArtefactKind.MODEL, ArtefactKind.ADAPTER):
        return None
    if wanted is not None:
        return wanted
    from tightfit.runtime.tensor_files import StoredWeights

    stored = StoredWeights(artefact.base or artefact.path).tensors.values()
    needed = 4 * sum(tensor.num_values for tensor in stored)
    if needed <= _ROOM_FRACTION * _free_bytes(device):
        return Dtype.FP32
    return Dtype(read_stored_dtype(artefact) or Dtype.BF16.value)


def _free_bytes(device: str) -> int:
    import torch

    if device != "cpu" and torch.cuda.is_available():
        return sum(torch.cuda.mem_get_info(n)[0] for n in range(torch.cuda.device_count()))
    import psutil

    return int(psutil.virtual_memory().available)
