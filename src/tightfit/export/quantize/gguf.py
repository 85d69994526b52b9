"""Quantize a 16 or 32 bit GGUF file with ggml, tensor by tensor, with llama.cpp's type mixtures."""

from __future__ import annotations

import ctypes
import mmap
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.dtypes import PLAIN_DTYPES, Dtype
from tightfit.core.errors import InvalidInputError, SetupError, first_line
from tightfit.core.files import atomic_file
from tightfit.core.progress import CountProgress
from tightfit.export.convert import convert_to_gguf
from tightfit.export.formats import Q2_K, Q3_K_M, Q4_K_M, Q5_K_M, Q6_K, Q8_0, ExportFormat
from tightfit.export.quantize.calibration import Importance, measure_importance, read_importance
from tightfit.export.quantize.job import (
    PROCESS_BYTES,
    FormatWriter,
    QuantizeForecast,
    QuantizeJob,
    QuantizeMeasurement,
)
from tightfit.hardware.machine import read_peak_memory_bytes, reset_peak_memory
from tightfit.models.spec import ModelSpec
from tightfit.runtime.llama_cpp import REMEDY, load_library
from tightfit.runtime.model_files import locate_model

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


# The type of each tensor, by the rules of llama.cpp's own quantizer.
# Source: `llama_tensor_get_type_impl`, `tensor_allows_quantization` and `tensor_type_fallback` in
# github.com/ggml-org/llama.cpp, src/llama-quant.cpp, commit b21e4de (August 2026).


@dataclass(frozen=True, slots=True, kw_only=True)
class GgmlType:
    """A type of ggml's. Source: block sizes in ggml-common.h."""

    bits: float
    """Per weight, with scales."""
    block: int
    """A row's width must be a multiple of this."""
    narrower: str = "F16"
    """The type in its place where it is not."""


GGML_TYPES = {
    "F16": GgmlType(bits=16.0, block=1),
    "Q8_0": GgmlType(bits=8.5, block=32),
    "Q6_K": GgmlType(bits=6.5625, block=256, narrower="Q8_0"),
    "Q5_1": GgmlType(bits=6.0, block=32),
    "Q5_0": GgmlType(bits=5.5, block=32),
    "Q5_K": GgmlType(bits=5.5, block=256, narrower="Q5_1"),
    "Q4_0": GgmlType(bits=4.5, block=32),
    "Q4_K": GgmlType(bits=4.5, block=256, narrower="Q5_0"),
    "Q3_K": GgmlType(bits=3.4375, block=256, narrower="Q4_0"),
    "Q2_K": GgmlType(bits=2.625, block=256, narrower="Q4_0"),
}
_KEPT = (
    "_norm.weight", "ffn_gate_inp.weight", "ffn_gate_tid2eid.weight", "altup", "laurel",
    "per_layer_model_proj", "ssm_conv1d", "shortconv.conv.weight", "indexer.k_proj.weight",
    "indexer.q_proj.weight", "time_mix_first.weight", "time_mix_w0.weight", "time_mix_w1.weight",
    "time_mix_w2.weight", "time_mix_v0.weight", "time_mix_v1.weight", "time_mix_v2.weight",
    "time_mix_a0.weight", "time_mix_a1.weight", "time_mix_a2.weight", "time_mix_g1.weight",
    "time_mix_g2.weight", "time_mix_decay_w1.weight", "time_mix_decay_w2.weight",
    "time_mix_lerp_fused.weight", "attn_rel_b.weight", ".position_embd", ".rel_pos",
    ".patch_embd", ".patch_merger",
)  # fmt: skip
_KEPT_WHOLE = ("position_embd.weight", "token_types.weight")
_LAYER = re.compile(r"blk\.(\d+)\.")
_SEVENTY_LAYERS = {"llama": 80, "qwen2": 80, "olmo": 80, "deci": 80, "jais2": 68}
"""Layers by which llama.cpp takes a model for its 70B type."""


class Role(Enum):
    """The role of a tensor in the rules."""

    OUTPUT = "output"
    EMBEDDING = "embedding"
    VALUE = "value"
    KEY = "key"
    ATTENTION_OUTPUT = "attention output"
    DOWN = "down"
    OTHER = "other"


_ROLES = (
    ("attn_qkv.weight", Role.VALUE),
    ("attn_kv_b.weight", Role.VALUE),
    ("attn_v.weight", Role.VALUE),
    ("attn_k.weight", Role.KEY),
    ("attn_output.weight", Role.ATTENTION_OUTPUT),
    ("ffn_down", Role.DOWN),
)
Shape = tuple[int, ...]
"""As numpy has it: rows first, the width of a row last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The facts of a model that the rules use."""

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    num_experts: int = 0

    @property
    def is_seventy(self) -> bool:
        if self.num_layers != _SEVENTY_LAYERS.get(self.architecture):
            return False
        return self.architecture != "llama" or self.num_heads != self.num_kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """A type for each tensor that is quantized."""

    types: Mapping[str, str]
    """By tensor; others keep their type."""
    fallen: Mapping[str, str]
    """Tensors whose width does not fit the wanted type, and that type."""


def choose_mixture(
    tensors: Mapping[str, Shape], model: ModelFacts, target: ExportFormat
) -> Mixture:
    """llama.cpp's type for each tensor of a file of this kind."""
    is_tied = "output.weight" not in tensors
    num_values = sum(_role_of(name) is Role.VALUE for name in tensors)
    seen: Counter[Role] = Counter()
    types: dict[str, str] = {}
    fallen: dict[str, str] = {}
    # The rules count tensors of a role in the order of llama.cpp's tensor map.
    for name, shape in sorted(tensors.items(), key=lambda item: (_layer(item[0]), item[0])):
        if not _is_quantized(name, shape):
            continue
        role, wanted, width = _role_of(name), target.ggml_type, shape[-1]
        number = seen[role]
        seen[role] += 1
        if role is Role.OUTPUT or (is_tied and role is Role.EMBEDDING):
            is_odd = width % GGML_TYPES[wanted].block != 0
            is_wide = model.architecture == "falcon" or is_odd or wanted == "Q8_0"
            wanted = "Q8_0" if is_wide else "Q6_K"
        elif role is Role.VALUE:
            wanted = _value_type(model, target, number, num_values)
        elif role is Role.KEY:
            wanted = "Q8_0" if model.num_experts == 8 else wanted
        elif role is Role.DOWN:
            wanted = _down_type(model, target, _layer(name) if model.num_experts > 1 else number)
        elif role is Role.ATTENTION_OUTPUT and model.architecture != "falcon":
            wanted = _attention_output_type(model, target)
        types[name] = fit_width(wanted, width)
        if types[name] != wanted:
            fallen[name] = wanted
    return Mixture(types=types, fallen=fallen)


def fit_width(kind: str, width: int) -> str:
    """The type itself where a row divides into its blocks, else the next one that fits."""
    if width % GGML_TYPES[kind].block == 0:
        return kind
    narrower = GGML_TYPES[kind].narrower
    return narrower if width % GGML_TYPES[narrower].block == 0 else "F16"


def _is_quantized(name: str, shape: Shape) -> bool:
    """Whether it is a matrix other than norms, routers, positions and a few small ones."""
    if all(size <= 1 for size in shape[:-1]) or not name.endswith("weight"):
        return False
    return name not in _KEPT_WHOLE and not any(part in name for part in _KEPT)


def _role_of(name: str) -> Role:
    if name == "output.weight":
        return Role.OUTPUT
    if name in ("token_embd.weight", "per_layer_token_embd.weight"):
        return Role.EMBEDDING
    return next((role for part, role in _ROLES if part in name), Role.OTHER)


def _value_type(model: ModelFacts, target: ExportFormat, number: int, num_values: int) -> str:
    kind = target.ggml_type
    if target is Q2_K:
        is_shared = model.num_kv_heads and model.num_heads // model.num_kv_heads >= 4
        kind = "Q4_K" if is_shared else "Q3_K"
    elif target is Q3_K_M:
        kind = "Q5_K" if number < 2 else "Q4_K"
    elif target in (Q4_K_M, Q5_K_M) and _is_sensitive(number, num_values):
        kind = "Q6_K"
    if model.is_seventy and kind in ("Q3_K", "Q4_K"):
        kind = "Q5_K"
    return "Q8_0" if model.num_experts == 8 else kind


def _down_type(model: ModelFacts, target: ExportFormat, layer: int) -> str:
    count = model.num_layers
    is_falcon, is_sensitive = model.architecture == "falcon", _is_sensitive(layer, count)
    if target is Q2_K:
        return "Q3_K"
    if target is Q3_K_M:
        usual = "Q4_K" if not is_falcon or is_sensitive else "Q3_K"
        return "Q5_K" if layer < count // 16 else usual
    if target is Q4_K_M and is_falcon:
        usual = "Q5_K" if is_sensitive else "Q4_K"
        return "Q6_K" if layer < count // 16 else usual
    is_raised = target in (Q4_K_M, Q5_K_M) and is_sensitive
    return "Q6_K" if is_raised else target.ggml_type


def _attention_output_type(model: ModelFacts, target: ExportFormat) -> str:
    if model.num_experts == 8:
        return "Q5_K" if target in (Q2_K, Q3_K_M, Q4_K_M) else target.ggml_type
    return {Q2_K: "Q3_K", Q3_K_M: "Q4_K"}.get(target, target.ggml_type)


def _is_sensitive(layer: int, count: int) -> bool:
    """The first and last eighth of the layers, and every third between them."""
    eighth = count // 8
    return layer < eighth or layer >= 7 * count // 8 or (layer - eighth) % 3 == 2


def _layer(name: str) -> int:
    found = _LAYER.match(name)
    return int(found.group(1)) if found else -1


# The file, tensor by tensor.

SLICE_VALUES = 1 << 20
"""Values that a thread quantizes at a time, which bounds the memory for any tensor."""
_PLAIN = ("F32", "F16", "BF16")
_LEFT_OUT = (
    *("GGUF.", "general.architecture", "general.file_type", "general.quantization_version"),
    *("quantize.", "split.no", "split.count", "split.tensors.count"),
)
"""Beginnings of keys that are written anew, or dropped: the result is one file."""


def requantize_gguf(
    source: Path,
    target: Path,
    kind: ExportFormat,
    *,
    importance: Importance | None = None,
    num_threads: int = 1,
    report: CountProgress | None = None,
) -> tuple[Mixture, int]:
    """Write `target` whole or not at all; returns the types and how many tensors were weighed.

    The memory needed does not grow with the model.
    """
    import gguf
    import numpy as np

    reader = open_plain_gguf(source)
    mixture = plan_mixture(reader, kind)
    total = sum(int(tensor.n_elements) for tensor in reader.tensors)
    done = num_weighted = 0
    with atomic_file(target) as partial:
        writer: Any = gguf.GGUFWriter(partial, read_facts(reader).architecture)
        try:
            _copy_metadata(reader, writer, kind, importance)
            for tensor in reader.tensors:
                # numpy's type is required and unused beside a raw one; uint8 would mean raw bytes.
                new = _type_of(tensor, mixture)
                size = _size(tensor, new)
                writer.add_tensor_info(
                    tensor.name, shape_of(tensor), np.dtype(np.float32), size, raw_dtype=new
                )
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            stream = writer.fout[0]
            with ThreadPoolExecutor(num_threads) as pool:
                for tensor in reader.tensors:
                    weights = _weights_for(tensor, mixture, importance)
                    num_weighted += weights is not None
                    writer.write_padding(stream, stream.tell())
                    start = stream.tell()
                    for piece, num_values in _pieces(tensor, mixture, weights, pool, num_threads):
                        piece.tofile(stream)
                        done += num_values
                        if report is not None:
                            report(done, total)
                    writer.write_padding(stream, stream.tell() - start)
                    _release_pages(reader)
        finally:
            writer.close()
    return mixture, num_weighted


def open_plain_gguf(path: Path) -> Any:
    """gguf's reader of a file whose matrices are not quantized yet."""
    import gguf

    try:
        reader = gguf.GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise InvalidInputError(
            f"{path} cannot be read as GGUF: {first_line(error)}.",
            remedy="make the file again: tightfit convert MODEL --to gguf",
        ) from error
    split = reader.fields.get("split.count")
    if split is not None and int(split.contents()) > 1:
        raise InvalidInputError(
            f"{path} is one of {int(split.contents())} parts of a model.",
            remedy="join the parts first: llama-gguf-split --merge FIRST_PART WHOLE.gguf",
        )
    kinds = [t.tensor_type.name for t in reader.tensors if len(shape_of(t)) > 1]
    packed = [kind for kind in kinds if kind not in _PLAIN]
    if packed:
        raise InvalidInputError(
            f"{path} is quantized already ({packed[0]}); quantizing it again would lose more than "
            "its size shows.",
            remedy="name the model it was made from, or its F16, BF16 or F32 GGUF file",
        )
    return reader


def plan_mixture(reader: Any, kind: ExportFormat) -> Mixture:
    """The type of each tensor."""
    shapes = {tensor.name: shape_of(tensor) for tensor in reader.tensors}
    return choose_mixture(shapes, read_facts(reader), kind)


def read_facts(reader: Any) -> ModelFacts:
    """What the mixture's rules ask, from the file's metadata."""
    stated = reader.fields.get("general.architecture")
    if stated is None:
        raise InvalidInputError(
            "The GGUF file does not state its general.architecture.",
            remedy="make the file again: tightfit convert MODEL --to gguf",
        )
    name = str(stated.contents())

    def number(key: str, otherwise: int) -> int:
        field = reader.fields.get(f"{name}.{key}")
        if field is None:
            return otherwise
        value = field.contents()
        return int(value[0] if isinstance(value, list) else value)

    heads = number("attention.head_count", 0)
    return ModelFacts(
        architecture=name,
        num_layers=number("block_count", 0),
        num_heads=heads,
        num_kv_heads=number("attention.head_count_kv", heads),
        num_experts=number("expert_count", 0),
    )


def shape_of(tensor: Any) -> Shape:
    """Rows first, as numpy has it; gguf's reader gives ggml's order."""
    return tuple(int(size) for size in reversed(tensor.shape.tolist()))


def quantize_rows(
    values: NDArray[np.float32], kind: Any, importance: NDArray[np.float32] | None = None
) -> NDArray[np.uint8]:
    """Rows in a ggml type, by ggml. Runs without the interpreter lock."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES

    try:
        quantize = load_library().ggml_quantize_chunk
    except AttributeError as error:
        raise SetupError(
            "The installed llama.cpp does not hand out its quantizer.", remedy=REMEDY
        ) from error
    whole, pointer = ctypes.c_int64, ctypes.c_void_p  # source: ggml.h
    quantize.restype = ctypes.c_size_t
    quantize.argtypes = [ctypes.c_int, pointer, pointer, whole, whole, whole, pointer]
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    num_rows, width = values.shape
    packed = np.empty(num_rows * (width // block_values) * block_bytes, dtype=np.uint8)
    weights = None if importance is None else importance.ctypes.data
    written = quantize(
        int(kind), values.ctypes.data, packed.ctypes.data, 0, num_rows, width, weights
    )
    if written != packed.size:
        raise RuntimeError(f"ggml_quantize_chunk wrote {written} of {packed.size} bytes")
    return packed


def _release_pages(reader: Any) -> None:
    """Release the mapped source's pages, or the whole file would count as resident."""
    mapped = getattr(reader.data, "_mmap", None)
    if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


def _pieces(
    tensor: Any,
    mixture: Mixture,
    weights: NDArray[np.float32] | None,
    pool: ThreadPoolExecutor,
    num_threads: int,
) -> Iterator[tuple[NDArray[Any], int]]:
    """The tensor's bytes in the new type, in order, a few slices ahead of the writer."""
    import numpy as np

    kind = _type_of(tensor, mixture)
    if kind == tensor.tensor_type:
        yield tensor.data, int(tensor.n_elements)
        return
    values = np.asarray(tensor.data)
    if tensor.tensor_type.name == "BF16":
        values = values.view(np.uint16)
    values = values.reshape(-1, shape_of(tensor)[-1])
    width = values.shape[-1]
    num_matrices = 1 if weights is None else weights.size // width
    rows_each = len(values) // num_matrices
    step = max(1, SLICE_VALUES // width)

    def convert(task: tuple[int, int]) -> tuple[NDArray[Any], int]:
        matrix, first = task
        start, end = matrix * rows_each + first, matrix * rows_each + min(first + step, rows_each)
        rows = values[start:end]
        if rows.dtype == np.uint16:  # the upper halves of fp32 numbers
            rows = (rows.astype(np.uint32) << 16).view(np.float32)
        rows = np.ascontiguousarray(rows, dtype=np.float32)
        if not np.isfinite(rows).all():
            raise InvalidInputError(
                f"The tensor {tensor.name} holds NaN or infinity, which no format can store.",
                remedy="the training diverged or the file is damaged: take an earlier checkpoint",
            )
        if kind.name == "F16":
            return rows.astype(np.float16), rows.size
        own = None if weights is None else weights[matrix * width : (matrix + 1) * width]
        return quantize_rows(rows, kind, own), rows.size

    tasks = [(m, first) for m in range(num_matrices) for first in range(0, rows_each, step)]
    ahead = 4 * num_threads
    for group in range(0, len(tasks), ahead):
        yield from pool.map(convert, tasks[group : group + ahead])


def _weights_for(
    tensor: Any, mixture: Mixture, importance: Importance | None
) -> NDArray[np.float32] | None:
    """The tensor's importance: one row of numbers, or one per expert."""
    import numpy as np

    if importance is None or tensor.name not in mixture.types:
        return None
    found = importance.values.get(tensor.name)
    if found is None:
        return None
    shape = shape_of(tensor)
    num_matrices = shape[0] if len(shape) == 3 else 1
    if found.size != shape[-1] * num_matrices:
        raise InvalidInputError(
            f"The importance of {tensor.name} has {found.size} values for {shape[-1]} inputs.",
            remedy="measure it again: delete the importance folder in the cache",
        )
    return np.ascontiguousarray(found, dtype=np.float32).reshape(-1)


def _copy_metadata(
    reader: Any, writer: Any, target: ExportFormat, importance: Importance | None
) -> None:
    import gguf

    for key, field in reader.fields.items():
        if key.startswith(_LEFT_OUT):
            continue
        kind = field.types[0]
        sub_type = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, sub_type=sub_type)
        if key == "general.alignment":
            writer.data_alignment = int(field.contents())
    writer.add_file_type(int(gguf.LlamaFileType[f"MOSTLY_{target.engine_name}"]))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    if importance is not None:
        # The names llama-quantize gives them: tools/quantize/quantize.cpp. Without the file's: the
        # cache names it by times, and the same model gives the same result.
        writer.add_string("quantize.imatrix.dataset", importance.dataset)
        writer.add_uint32("quantize.imatrix.entries_count", len(importance.values))
        writer.add_uint32("quantize.imatrix.chunks_count", importance.num_chunks)


def _type_of(tensor: Any, mixture: Mixture) -> Any:
    from gguf import GGMLQuantizationType

    name = mixture.types.get(tensor.name)
    return tensor.tensor_type if name is None else GGMLQuantizationType[name]


def _size(tensor: Any, kind: Any) -> int:
    from gguf import GGML_QUANT_SIZES

    if kind == tensor.tensor_type:
        return int(tensor.n_bytes)
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    return int(tensor.n_elements) // block_values * block_bytes


# The writer of GGUF formats.

MIXED_MORE = 1.12
"""A file's mean bits over its main type's: some tensors get more bits."""
VOCABULARY_BYTES = 40
"""Of a token in the file's metadata: its text, score, type and share of the merges."""
Q8_VALUES_PER_SECOND, K_VALUES_PER_SECOND = 80e6, 8e6
"""Of one core of a server CPU, importance included; measured, and rough."""


class GgufWriter(FormatWriter):
    """Quantizes the source's GGUF file; a Hugging Face folder is converted to one first."""

    def __init__(self, job: QuantizeJob) -> None:
        self._job = job
        self._converted: Path | None = None

    def forecast(self, wanted: ExportFormat) -> QuantizeForecast:
        """Slices of fp32 for each thread; measuring importance holds the model in memory."""
        job, spec, num_threads = self._job, self._job.source.spec, self._job.request.num_threads
        host = PROCESS_BYTES + num_threads * 4 * SLICE_VALUES * 6
        rate = Q8_VALUES_PER_SECOND if wanted is Q8_0 else K_VALUES_PER_SECOND
        seconds = spec.num_params / (rate * num_threads)
        if job.calibrates(wanted):
            host = max(host, PROCESS_BYTES + (2 if job.has_gpu else 4) * spec.num_params)
            seconds += job.forward_seconds(job.num_calibration_tokens(wanted))
        return QuantizeForecast(
            host_bytes=host, disk_bytes=_estimate_file_bytes(spec, wanted), seconds=seconds
        )

    def write(self, wanted: ExportFormat, path: Path) -> QuantizeMeasurement:
        reset_peak_memory()
        started = time.monotonic()
        job = self._job
        plain = self._plain_file()
        importance = self._importance(plain) if job.calibrates(wanted) else None
        mixture, num_weighted = requantize_gguf(
            plain,
            path,
            wanted,
            importance=importance,
            num_threads=job.request.num_threads,
            report=job.stage(wanted.name),
        )
        notes = []
        if mixture.fallen:
            refused = ", ".join(sorted(set(mixture.fallen.values())))
            given = ", ".join(sorted({mixture.types[name] for name in mixture.fallen}))
            notes.append(
                f"{wanted.name}: {len(mixture.fallen)} of {len(mixture.types)} matrices have rows "
                f"that are no multiple of 256 wide; they are {given} instead of {refused}."
            )
        if importance is not None:
            notes += job.calibration.notes
        return QuantizeMeasurement(
            seconds=time.monotonic() - started,
            peak_host_bytes=read_peak_memory_bytes(),
            importance=num_weighted > 0,
            notes=tuple(notes),
        )

    def scratch_bytes(self) -> int:
        source = self._job.source
        return 0 if source.is_gguf else source.artefact.size_bytes

    def close(self) -> None:
        if self._converted is not None:
            self._converted.unlink(missing_ok=True)
            self._converted = None

    def _plain_file(self) -> Path:
        """The source itself, or its exact copy as a GGUF file, made once per job."""
        source = self._job.source
        if source.is_gguf:
            return source.path
        if self._converted is None:
            stored = source.spec.stored_dtype
            dtype = stored if stored in PLAIN_DTYPES else Dtype.FP16
            name = f".{source.name}-{source.stamp}-{dtype.gguf_name}.gguf"
            self._converted = self._job.folder / name
            if not self._converted.is_file():
                convert_to_gguf(
                    source.path,
                    self._converted,
                    dtype=dtype,
                    tokenizer=source.artefact.tokenizer,
                    report=self._job.request.report,
                )
        return self._converted

    def _importance(self, plain: Path) -> Importance:
        import torch

        source, device = self._job.source, self._job.request.device
        measured = measure_importance(
            locate_model(str(plain)) if source.is_gguf else source.path,
            self._job.calibration,
            architecture=read_facts(open_plain_gguf(plain)).architecture,
            device=None if device == "auto" else torch.device(device),
            report=self._job.stage("importance"),
        )
        return read_importance(measured)


def _estimate_file_bytes(spec: ModelSpec, wanted: ExportFormat) -> int:
    """The main type, or what rows of odd width get instead, and a head of six or eight bits."""

    def bits(kind: str, width: int) -> float:
        return GGML_TYPES[fit_width(kind, width)].bits

    kind = wanted.ggml_type
    layers = sum(
        block.num_layers * part.num_params * bits(kind, part.in_features)
        for block in spec.blocks
        for part in block.linears
    )
    head = bits("Q8_0" if kind == "Q8_0" else "Q6_K", spec.hidden_size)
    own_head_params = 0 if spec.tie_embeddings else spec.lm_head_params
    embedding = head if spec.tie_embeddings else bits(kind, spec.hidden_size)
    mixed = 1.0 if wanted in (Q8_0, Q6_K) else MIXED_MORE
    total = mixed * layers + own_head_params * head + spec.embedding_params * embedding
    rest = spec.position_params + spec.outer_params
    return ceil(total / 8 + 4 * rest) + spec.vocab_size * VOCABULARY_BYTES
