"""Read GPTQ-format folders with plain torch: 2 to 8 bits, groups, zero points, act order.

Codes are a little-endian bit stream over int32 words, 32 codes in `bits` words. The layouts differ
only in the zero points: `gptq` stores them minus one, `gptq_v2` as they are; auto-round names the
layout in its packing format. Sources: GPTQ, arXiv:2210.17323; the
torch layers of AutoGPTQ and auto-round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from tightfit.core.errors import InvalidInputError, first_line
from tightfit.core.reading import read_json_file
from tightfit.runtime.attention import choose_inference_attention, read_model_config
from tightfit.runtime.libraries import is_out_of_memory, silence_libraries
from tightfit.runtime.load import auto_class, check_missing, fill_buffers
from tightfit.runtime.tensor_files import read_safetensors_header

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_UNSUPPORTED = "quantize the model again: tightfit quantize MODEL --to gptq-4"


class GptqConfig(NamedTuple):
    """The quantization settings in config.json."""

    bits: int
    zeros_shift: int
    """Added to a stored zero point: 1, or 0 in `gptq_v2`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMatrix:
    """One linear layer's codes as stored."""

    qweight: torch.Tensor
    """(in x bits / 32, out), int32."""
    qzeros: torch.Tensor
    """(groups, out x bits / 32), int32."""
    scales: torch.Tensor
    """(groups, out)."""
    g_idx: torch.Tensor | None
    """Group of every input. None: consecutive groups."""
    zeros_shift: int

    @property
    def out_features(self) -> int:
        return int(self.scales.shape[1])

    @property
    def bits(self) -> int:
        return int(self.qzeros.shape[1]) * 32 // self.out_features

    @property
    def in_features(self) -> int:
        return int(self.qweight.shape[0]) * 32 // self.bits

    def groups(self) -> torch.Tensor:
        """Group of every input."""
        if self.g_idx is not None:
            return self.g_idx.long()
        num_groups = int(self.scales.shape[0])
        size = -(-self.in_features // num_groups)
        return torch.arange(self.in_features, device=self.scales.device) // size

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix as (in, out): scale x (code - zero point), each input by its group."""
        codes = unpack_bits(self.qweight, self.bits)
        zeros = unpack_bits(self.qzeros.t(), self.bits).t() + self.zeros_shift
        groups = self.groups()
        # In fp32: fp16 scales times a difference of codes would round twice.
        return (self.scales.float()[groups] * (codes - zeros[groups])).to(dtype)


def unpack_bits(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes along the first dimension: (words x 32 / bits, ...), int32."""
    device = words.device
    starts = torch.arange(words.shape[0] * 32 // bits, device=device) * bits
    first, shift = starts // 32, (starts % 32).to(torch.int32)
    mask = (1 << bits) - 1
    shape = (-1, *[1] * (words.dim() - 1))
    low = words[first] >> shift.view(shape)
    if 32 % bits == 0:
        return low & mask
    # A code that crosses a word's end has its upper bits in the next one. int32 shifts keep the
    # sign, so the lower part is masked to its own bits.
    num_low = (32 - shift).clamp(max=bits)
    low = low & ((1 << num_low) - 1).to(torch.int32).view(shape)
    following = words[(first + 1).clamp(max=words.shape[0] - 1)]
    high = following << num_low.to(torch.int32).view(shape)
    is_split = (num_low < bits).view(shape)
    return torch.where(is_split, low | high, low) & mask


class GptqLinear(nn.Module):
    """A linear layer that keeps its codes and dequantizes them at every use.

    Slower than a dequantized one, with a quarter or less of its memory.
    """

    def __init__(self, packed: PackedMatrix, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.in_features, self.out_features = packed.in_features, packed.out_features
        self.bits, self.zeros_shift = packed.bits, packed.zeros_shift
        for name in _PARTS:
            self.register_buffer(name, getattr(packed, name))
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        buffers = {name: getattr(self, name) for name in _PARTS}
        return PackedMatrix(**buffers, zeros_shift=self.zeros_shift).unpack(dtype)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        product = values @ self.unpack(values.dtype)
        return product if self.bias is None else product + self.bias


def read_gptq_config(folder: Path) -> GptqConfig:
    """The folder's bits and layout. Raises for layouts that are not supported."""
    stated = _read_stated(folder)
    bits, size = stated.get("bits"), stated.get("group_size", -1)
    if bits not in (2, 3, 4, 5, 6, 7, 8) or not isinstance(size, int):
        raise InvalidInputError(
            f"{folder / 'config.json'} says {bits} bits in groups of {size}, which is no GPTQ "
            "format.",
            remedy=_UNSUPPORTED,
        )
    method = str(stated.get("quant_method", "")).lower()
    layout = str(stated.get("checkpoint_format") or "gptq").lower()
    if method in ("auto-round", "auto_round"):
        packing = str(stated.get("packing_format") or stated.get("backend") or "auto_round")
        layout = "gptq" if "gptq" in packing else "gptq_v2"
        if "awq" in packing:
            layout = packing
    if layout not in ("gptq", "gptq_v2"):
        raise InvalidInputError(
            f"{folder} is packed as `{layout}`, which is not read here.", remedy=_UNSUPPORTED
        )
    return GptqConfig(bits=bits, zeros_shift=1 if layout == "gptq" else 0)


def load_gptq(
    folder: Path, *, dtype: torch.dtype, device: torch.device, is_packed: bool | None = None
) -> PreTrainedModel:
    """The folder's model on `device`, in eval mode.

    `is_packed` keeps the codes and dequantizes them per use; None: on GPUs only. Otherwise
    matrices are dequantized once, to `dtype`.
    """
    silence_libraries()
    settings = read_gptq_config(folder)
    config: Any = read_model_config(folder)
    if hasattr(config, "quantization_config"):  # for which transformers would require packages
        del config.quantization_config
    config._attn_implementation = choose_inference_attention(folder)
    keep = device.type == "cuda" if is_packed is None else is_packed
    with torch.device("meta"):
        shell = auto_class(config).from_config(
            config, dtype=dtype, attn_implementation=config._attn_implementation
        )
    load = _load_packed if keep else _load_dense
    try:
        model = load(folder, shell, settings, dtype)
    except (RuntimeError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        if is_out_of_memory(error):
            raise
        raise InvalidInputError(
            f"The weights in {folder} are not those of its config.json: {first_line(error)}.",
            remedy="fetch or make the model again",
        ) from error
    return model.to(device).eval()  # type: ignore[no-any-return]


def _read_parts(
    folder: Path, settings: GptqConfig
) -> Iterator[tuple[str, PackedMatrix | torch.Tensor]]:
    """Quantized matrices by their layers' names, and all other tensors by their own."""
    from safetensors import safe_open

    homes: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        read_safetensors_header(path)  # raises before the library believes it
        stream: Any = safe_open(str(path), framework="pt")
        homes |= dict.fromkeys(stream.keys(), stream)
    layers = [name.removesuffix(".qweight") for name in homes if name.endswith(".qweight")]
    taken = {f"{layer}.{part}" for layer in layers for part in _PARTS}
    for name, stream in homes.items():
        if name not in taken:
            yield name, stream.get_tensor(name)
    for layer in layers:
        stored = {
            part: homes[f"{layer}.{part}"].get_tensor(f"{layer}.{part}")
            for part in _PARTS
            if f"{layer}.{part}" in homes
        }
        lost = [part for part in _PARTS[:3] if part not in stored]
        if lost:
            raise InvalidInputError(
                f"{folder} lacks {layer}.{lost[0]}.", remedy="fetch or make the model again"
            )
        # Without act order the groups are consecutive, and need no index.
        index, num_groups = stored.get("g_idx"), stored["scales"].shape[0]
        if index is not None:
            plain = torch.arange(index.numel(), dtype=index.dtype)
            if not index.numel() or torch.equal(index, plain // -(-index.numel() // num_groups)):
                index = None
        yield layer, PackedMatrix(**stored | {"g_idx": index}, zeros_shift=settings.zeros_shift)


def _load_dense(folder: Path, shell: Any, settings: GptqConfig, dtype: torch.dtype) -> Any:
    """Load with transformers, from a state dict that is dequantized one tensor at a time."""
    from transformers.pytorch_utils import Conv1D

    config = shell.config
    transposed = {name for name, part in shell.named_modules() if isinstance(part, Conv1D)}
    state: dict[str, torch.Tensor] = {}
    for name, part in _read_parts(folder, settings):
        if isinstance(part, PackedMatrix):
            matrix = part.unpack(dtype)
            state[f"{name}.weight"] = matrix if name in transposed else matrix.t().contiguous()
        else:
            state[name] = part.to(dtype) if part.is_floating_point() else part
    model, info = type(shell).from_pretrained(
        None,
        config=config,
        state_dict=state,
        dtype=dtype,
        attn_implementation=config._attn_implementation,
        output_loading_info=True,
    )
    check_missing(folder, sorted(info["missing_keys"]))
    return model


def _load_packed(folder: Path, model: Any, settings: GptqConfig, dtype: torch.dtype) -> Any:
    """Fill the model, with GptqLinear in place of its linear layers."""
    state: dict[str, torch.Tensor] = {}
    packed: dict[str, PackedMatrix] = {}
    for name, part in _read_parts(folder, settings):
        if isinstance(part, PackedMatrix):
            packed[name] = part
        else:
            state[name] = part.to(dtype) if part.is_floating_point() else part
    known = dict(model.named_modules())
    strange = [name for name in packed if name not in known]
    if strange:
        raise InvalidInputError(
            f"{folder} holds {strange[0]}, which a {model.config.model_type} model does not have.",
            remedy="load it on the CPU (--device cpu), where its matrices are unpacked",
        )
    for name, part in packed.items():
        model.set_submodule(name, GptqLinear(part, state.pop(f"{name}.bias", None)))
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    fill_buffers(model, torch.device("cpu"))
    check_missing(folder, [name for name, value in model.named_parameters() if value.is_meta])
    return model


def _read_stated(folder: Path) -> dict[str, Any]:
    for name, key in (("config.json", "quantization_config"), ("quantize_config.json", None)):
        try:
            found = read_json_file(folder / name, allows_infinity=True)
        except (OSError, ValueError):
            continue
        stated = found.get(key) if key else found
        if isinstance(stated, dict):
            return stated
    raise InvalidInputError(f"{folder} does not say how it is quantized.", remedy=_UNSUPPORTED)
