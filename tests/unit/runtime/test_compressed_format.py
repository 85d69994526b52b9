"""The names of compressed-tensors formats, from config.json as llm-compressor writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tightfit.core.errors import InvalidInputError
from tightfit.export.formats import StepKind
from tightfit.export.verify.scores import recognise_step
from tightfit.runtime.model_files import read_compressed_format


def write_config(folder: Path, layout: str, weights: dict[str, Any], **other: Any) -> Path:
    group = {"targets": ["Linear"], "weights": weights, **other}
    stated = {"quant_method": "compressed-tensors", "format": layout}
    document = {"quantization_config": {**stated, "config_groups": {"group_0": group}}}
    (folder / "config.json").write_text(json.dumps(document))
    return folder


@pytest.mark.parametrize(
    ("layout", "weights", "activations", "name", "step"),
    [
        ("float-quantized", {"type": "float", "num_bits": 8}, 8, "fp8", StepKind.FP8),
        ("pack-quantized", {"type": "int", "num_bits": 4}, None, "w4a16", StepKind.GPTQ4),
        (
            "pack-quantized",
            {"type": "int", "num_bits": 4, "symmetric": False},
            None,
            "w4a16-asym",
            StepKind.GPTQ4,
        ),
        ("int-quantized", {"type": "int", "num_bits": 8}, 8, "w8a8", StepKind.INT8),
        ("mxfp4-pack-quantized", {"type": "float", "num_bits": 4}, 4, "mxfp4", StepKind.FP4),
        ("nvfp4-pack-quantized", {"type": "float", "num_bits": 4}, 4, "nvfp4", StepKind.FP4),
    ],
)
def test_formats_are_named_as_vllm_names_them(
    layout: str,
    weights: dict[str, Any],
    activations: int | None,
    name: str,
    step: StepKind,
    tmp_path: Path,
) -> None:
    inputs = None if activations is None else {"num_bits": activations}
    folder = write_config(tmp_path, layout, weights, input_activations=inputs)

    assert read_compressed_format(folder) == name
    assert recognise_step("bf16", name, is_same_engine=True) is step


@pytest.mark.parametrize(
    "weights", [None, [], {"type": "int", "num_bits": "four"}, {"type": "int"}]
)
def test_what_does_not_say_its_format_is_refused(weights: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="how the weights are packed"):
        read_compressed_format(write_config(tmp_path, "pack-quantized", weights))
