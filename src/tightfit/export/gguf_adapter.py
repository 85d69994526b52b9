"""Write a LoRA adapter as a GGUF file, which llama.cpp loads beside its base model's.

Source of the format: `convert_lora_to_gguf.py` and `src/llama-adapter.cpp` of ggml-org/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError
from tightfit.core.packages import require_packages
from tightfit.core.progress import Progress
from tightfit.export.gguf_writer import has_own_head, open_model
from tightfit.export.merge import ADAPTER, MergePlan, plan_merge
from tightfit.models.family import Family, GgufLayout, Rearrangement
from tightfit.runtime.gguf.file import find_parts, make_name_lookup
from tightfit.runtime.libraries import torch_dtype
from tightfit.runtime.output_folder import check_room, whole_file

if TYPE_CHECKING:
    from torch import Tensor

_HEADER_BYTES, _ENTRY_BYTES = 1024, 128
"""Of the file's metadata, and of a tensor's entry with its padding."""
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedMatrix:
    """One matrix of the base and its adapter's two."""

    name: str
    """In the base's GGUF file."""
    layer: Any
    """peft's layer."""
    change: Callable[[Tensor], Tensor] | None
    """Of the rows of B, which are those of the base's matrix."""
    change_columns: Callable[[Tensor], Tensor] | None
    """Of the columns of A, likewise."""

    @property
    def num_values(self) -> int:
        return sum(value.numel() for value in self._stored())

    def _stored(self) -> tuple[Tensor, Tensor]:
        return self.layer.lora_A[ADAPTER].weight.data, self.layer.lora_B[ADAPTER].weight.data

    def compute(self, alpha: float) -> Iterator[tuple[str, Tensor]]:
        """Both matrices. llama.cpp scales them by alpha / rank; what differs from that goes into B.

        So rank-stabilized scaling and an alpha of its own need no other format.
        """
        first, second = (value.float() for value in self._stored())
        second = second * (float(self.layer.scaling[ADAPTER]) * self.layer.r[ADAPTER] / alpha)
        num_experts = getattr(self.layer, "num_experts", 1)
        if num_experts > 1:
            # peft has the experts' ranks one after another in A, and rank by rank in B.
            first = first.reshape(num_experts, -1, first.shape[-1])
            second = second.reshape(len(second), -1, num_experts).permute(2, 0, 1)
            if not self.layer._did_swap_in_out_features:  # the base's experts lie transposed
                second = second.transpose(1, 2)
        first = first if self.change_columns is None else self.change_columns(first)
        second = second if self.change is None else self.change(second)
        yield f"{self.name}.lora_a", first
        yield f"{self.name}.lora_b", second


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufAdapterPlan:
    """A planned conversion of an adapter."""

    family: Family
    matrices: tuple[AdaptedMatrix, ...]
    alpha: float
    dtype: Dtype
    name: str
    base: Path

    @property
    def disk_bytes(self) -> int:
        values = sum(matrix.num_values for matrix in self.matrices)
        return (
            values * self.dtype.value_bytes + _HEADER_BYTES + 2 * len(self.matrices) * _ENTRY_BYTES
        )

    @property
    def extra_bytes(self) -> int:
        """Memory beside what the process holds: the file, and a matrix in fp32, twice."""
        return self.disk_bytes + 2 * 4 * max(matrix.num_values for matrix in self.matrices)

    def write(self, target: Path, report: Progress | None = None) -> tuple[str, ...]:
        """Write the file; returns what a user should know."""
        import gguf
        import torch

        check_room(target, self.disk_bytes)
        kind = gguf.GGMLQuantizationType[self.dtype.gguf_name.upper()]
        with whole_file(target) as partial, torch.no_grad():
            writer: Any = gguf.GGUFWriter(partial, self.family.architecture)
            try:
                writer.add_type(gguf.GGUFType.ADAPTER)
                writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
                writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, self.alpha)
                writer.add_name(self.name)
                writer.add_string(gguf.Keys.General.BASE_MODEL_NAME.format(id=0), self.base.name)
                for number, matrix in enumerate(self.matrices, start=1):
                    for name, values in matrix.compute(self.alpha):
                        stored = values.to(torch_dtype(self.dtype)).contiguous()
                        raw = stored.view(torch.uint8).numpy()
                        writer.add_tensor(name, raw, raw_dtype=kind)
                    if report is not None:
                        report("writing", number, len(self.matrices))
                writer.write_header_to_file()
                writer.write_kv_data_to_file()
                writer.write_tensors_to_file()
            finally:
                writer.close()
        return (
            f"It is the adapter alone, which llama.cpp loads beside the GGUF file of "
            f"{self.base.name}: llama-server -m BASE.gguf --lora {target.name}",
        )


def plan_gguf_adapter(adapter: Path, base: Path, *, dtype: Dtype, name: str) -> GgufAdapterPlan:
    """Check everything that decides the file, and refuse what llama.cpp cannot load."""
    require_packages("Writing GGUF", "torch", "transformers", "peft")
    require_packages("Writing GGUF", "gguf", extra="gguf")
    family, layout, config = open_model(base)
    merge = plan_merge(adapter, base)
    _check_adapter(merge)
    look_up = make_name_lookup(family, int(config.num_hidden_layers))
    matrices = []
    for parameter, layers in merge.layers.items():
        layer, attribute = layers[0]
        if len(layers) > 1 or attribute == "bias" or not len(getattr(layer, "lora_A", ())):
            raise _cannot(f"changes {parameter} by more than one product of matrices")
        for part in find_parts(layout, parameter, config):
            found = look_up(part.name)
            if found is None or part.index is not None or not part.takes_adapter:
                raise _cannot(f"changes {parameter}, which llama.cpp does not have")
            if found == _EMBEDDING or (found == _HEAD and not has_own_head(layout, config)):
                raise _cannot(f"changes {parameter}, which is embedding and head in one")
            change = _find_change(layout, part.take)
            matrices.append(
                AdaptedMatrix(
                    name=found,
                    layer=layer,
                    change=None if part.changes_columns else change,
                    change_columns=change if part.changes_columns else None,
                )
            )
    first = matrices[0].layer
    return GgufAdapterPlan(
        family=family,
        matrices=tuple(matrices),
        alpha=float(first.lora_alpha[ADAPTER]),
        dtype=dtype,
        name=name,
        base=base,
    )


def _find_change(
    layout: GgufLayout, take: Callable[[Tensor], Tensor] | None
) -> Callable[[Tensor], Tensor] | None:
    """GPT-2's matrices are transposed on the way, and its adapter's are as all others."""
    return None if layout.rearrangement is Rearrangement.TRANSPOSED else take


def _check_adapter(merge: MergePlan) -> None:
    if merge.is_dora:
        raise _cannot("is DoRA, which scales whole columns")
    if merge.vocab_size is not None:
        raise _cannot("has its own vocabulary")
    # With an adapted head or embedding, peft stores the base's values too.
    unlike = (name for name in merge.based if not _is_as_in_base(merge, name))
    whole = next(iter((*merge.saved, *unlike)), None)
    if whole is not None:
        raise _cannot(f"holds {whole} as a whole")
    if not merge.layers:
        raise _cannot("changes nothing")


def _is_as_in_base(merge: MergePlan, name: str) -> bool:
    import torch

    key = merge.sources.get(name)
    if key is None:
        return False
    return torch.equal(merge.stored.read(key).float(), merge.based[name].float())


def _cannot(what: str) -> InvalidInputError:
    return InvalidInputError(
        f"The adapter {what}; a GGUF adapter holds low-rank changes of matrices alone.",
        remedy="merge it and convert the model: tightfit merge ADAPTER",
    )
