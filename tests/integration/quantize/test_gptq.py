"""GPTQ files read with plain torch, against auto-round's layers and a plain reference."""

from __future__ import annotations

import importlib
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from small_models import make_llama
from tightfit.core.errors import InvalidInputError
from tightfit.runtime.gptq import (
    GptqConfig,
    GptqLinear,
    PackedMatrix,
    _read_parts,
    load_gptq,
    read_gptq_config,
    unpack_bits,
)

library: Any = transformers
CPU = torch.device("cpu")
TOKENS = torch.arange(5, 60)[None]


def pack_reference(codes: list[int], bits: int) -> list[int]:
    """One column of codes as signed 32-bit words, by way of one very long integer."""
    whole = sum(code << (bits * place) for place, code in enumerate(codes))
    words = [(whole >> (32 * place)) & 0xFFFFFFFF for place in range(len(codes) * bits // 32)]
    return [word - (1 << 32) if word >> 31 else word for word in words]


def pack_columns(codes: torch.Tensor, bits: int) -> torch.Tensor:
    columns = [pack_reference(column.tolist(), bits) for column in codes.t()]
    return torch.tensor(columns, dtype=torch.int32).t().contiguous()


@settings(max_examples=60, deadline=None)
@given(bits=st.sampled_from([2, 3, 4, 5, 8]), seed=st.integers(0, 1000))
def test_codes_come_back_from_the_stream_of_bits(bits: int, seed: int) -> None:
    torch.manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (64, 5))

    assert torch.equal(unpack_bits(pack_columns(codes, bits), bits).long(), codes)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("has_act_order", [False, True])
@pytest.mark.parametrize("shift", [0, 1])
def test_a_matrix_is_scale_times_code_less_zero(bits: int, has_act_order: bool, shift: int) -> None:
    torch.manual_seed(bits)
    num_in, num_out, size = 96, 32, 32
    codes = torch.randint(0, 1 << bits, (num_in, num_out))
    zeros = torch.randint(shift, 1 << bits, (num_in // size, num_out))
    scales = torch.rand(num_in // size, num_out).half()
    order = torch.randperm(num_in) if has_act_order else torch.arange(num_in)
    groups = (order // size).to(torch.int32)
    expected = torch.empty(num_in, num_out)
    for row in range(num_in):
        group = int(groups[row])
        expected[row] = scales[group].float() * (codes[row] - zeros[group]).float()

    packed = PackedMatrix(
        qweight=pack_columns(codes, bits),
        qzeros=pack_columns((zeros - shift).t(), bits).t().contiguous(),
        scales=scales,
        g_idx=groups if has_act_order else None,
        zeros_shift=shift,
    )

    assert (packed.bits, packed.in_features, packed.out_features) == (bits, num_in, num_out)
    assert torch.equal(packed.unpack(torch.float32), expected)
    values = torch.randn(3, num_in)
    bias = torch.randn(num_out)
    layer = GptqLinear(packed, bias)
    assert torch.allclose(layer(values), values @ expected + bias, atol=1e-5)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("plain"))


def quantize(plain: Path, out: Path, *, bits: int, sym: bool) -> Path:
    """By auto-round, without tuning; one folder with its files."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from auto_round import AutoRound

        rounding = AutoRound(
            library.AutoModelForCausalLM.from_pretrained(plain),
            library.AutoTokenizer.from_pretrained(plain),
            bits=bits,
            group_size=32,
            sym=sym,
            iters=0,
            disable_opt_rtn=True,
        )
        rounding.quantize_and_save(str(out), format="auto_gptq")
    return next(iter(sorted(out.rglob("config.json")))).parent


@pytest.mark.parametrize(("bits", "sym"), [(8, True), (4, False), (3, True), (2, False)])
def test_what_auto_round_writes_is_what_its_own_layers_read(
    plain: Path, tmp_path: Path, bits: int, sym: bool
) -> None:
    folder = quantize(plain, tmp_path, bits=bits, sym=sym)
    theirs_module: Any = importlib.import_module("auto_round_extension.torch.qlinear_torch_zp")
    state = load_file(folder / "model.safetensors")
    original = load_file(plain / "model.safetensors")
    most_lost = {8: 0.01, 4: 0.1, 3: 0.25, 2: 0.5}[bits]
    num_compared = 0
    for name, packed in _read_parts(folder, read_gptq_config(folder)):
        if not isinstance(packed, PackedMatrix):
            continue
        theirs: Any = theirs_module.QuantLinear(
            bits, 32, packed.in_features, packed.out_features, False
        )
        for part in ("qweight", "qzeros", "scales"):
            setattr(theirs, part, state[f"{name}.{part}"])
        expected = theirs(torch.eye(packed.in_features))
        found = packed.unpack(torch.float32)
        # Theirs multiplies in fp16; the scale of one code is the largest step between values.
        step = float(packed.scales.float().max()) * (1 << bits)
        assert float((found - expected).abs().max()) <= step * 2**-10
        values = original[f"{name}.weight"].t()
        assert 0 < float((found - values).norm() / values.norm()) < most_lost
        num_compared += 1
    assert num_compared == 14

    dense = load_gptq(folder, dtype=torch.float32, device=CPU)
    kept = load_gptq(folder, dtype=torch.float32, device=CPU, is_packed=True)
    with torch.inference_mode():
        scores = [model(input_ids=TOKENS).logits for model in (dense, kept)]
    assert torch.allclose(scores[0], scores[1], atol=1e-4)
    is_smaller = sum(b.numel() * b.element_size() for b in kept.buffers()) < sum(
        p.numel() * p.element_size() for p in dense.model.layers.parameters()
    )
    assert is_smaller


def write_gptq(plain: Path, out: Path, *, shift: int, **stated: Any) -> torch.Tensor:
    """4-bit codes of the plain model's matrices in our own hand, with act order."""
    library.AutoTokenizer.from_pretrained(plain).save_pretrained(out)
    model = library.AutoModelForCausalLM.from_pretrained(plain)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(4)
    for name in [n for n in state if ".layers." in n and state[n].dim() == 2]:
        matrix = state.pop(name).t()
        groups = (torch.randperm(matrix.shape[0]) // 32).to(torch.int32)
        num_groups = matrix.shape[0] // 32
        low = torch.stack([matrix[groups == g].amin(0) for g in range(num_groups)])
        high = torch.stack([matrix[groups == g].amax(0) for g in range(num_groups)])
        scales = ((high - low) / 15).half()
        zeros = (-low / scales.float()).round().clamp(1, 15)
        codes = (matrix / scales.float()[groups.long()] + zeros[groups.long()]).round().clamp(0, 15)
        layer = name.removesuffix(".weight")
        model.get_submodule(layer).weight.data = (
            scales.float()[groups.long()] * (codes - zeros[groups.long()])
        ).t()
        state[f"{layer}.qweight"] = pack_columns(codes.long(), 4)
        state[f"{layer}.qzeros"] = pack_columns((zeros.long() - shift).t(), 4).t().contiguous()
        state[f"{layer}.scales"], state[f"{layer}.g_idx"] = scales, groups
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"bits": 4, "group_size": 32, "desc_act": True} | stated
    (out / "config.json").write_text(json.dumps(config))
    with torch.inference_mode():
        scores: torch.Tensor = model(input_ids=TOKENS).logits
    return scores


@pytest.mark.parametrize(
    ("shift", "stated"),
    [
        (1, {"quant_method": "gptq"}),
        (1, {"quant_method": "gptq", "checkpoint_format": "gptq"}),
        (0, {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}),
        (1, {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}),
        (0, {"quant_method": "auto-round", "packing_format": "auto_round"}),
    ],
)
@pytest.mark.parametrize("is_packed", [False, True])
def test_every_layout_gives_the_scores_of_the_rounded_model(
    plain: Path, tmp_path: Path, shift: int, stated: dict[str, Any], is_packed: bool
) -> None:
    expected = write_gptq(plain, tmp_path, shift=shift, **stated)

    model: Any = load_gptq(tmp_path, dtype=torch.float32, device=CPU, is_packed=is_packed)

    with torch.inference_mode():
        found = model(input_ids=TOKENS).logits
    assert torch.allclose(found, expected, atol=2e-4)


def test_transposed_layers_of_gpt2_are_unpacked_rightly(tmp_path: Path) -> None:
    library.set_seed(2)
    config = library.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50, n_positions=64)
    model = library.GPT2LMHeadModel(config).eval()
    layer = model.transformer.h[0].mlp.c_fc
    codes = torch.randint(0, 16, tuple(layer.weight.shape))
    scales = torch.full((1, layer.weight.shape[1]), 0.01).half()
    layer.weight.data = 0.01 * (codes - 8.0) * float(scales[0, 0]) / 0.01
    name = "transformer.h.0.mlp.c_fc"
    state = {k: v.clone() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    del state[f"{name}.weight"]
    state[f"{name}.qweight"] = pack_columns(codes, 4)
    state[f"{name}.qzeros"] = pack_columns(torch.full((1, 128), 7).t(), 4).t().contiguous()
    state[f"{name}.scales"] = scales
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    document = config.to_dict() | {"architectures": ["GPT2LMHeadModel"]}
    document["quantization_config"] = {"bits": 4, "group_size": -1, "quant_method": "gptq"}
    (tmp_path / "config.json").write_text(json.dumps(document))
    tokens = torch.arange(1, 30)[None]

    for is_packed in (False, True):
        loaded: Any = load_gptq(tmp_path, dtype=torch.float32, device=CPU, is_packed=is_packed)
        with torch.inference_mode():
            assert torch.allclose(
                loaded(input_ids=tokens).logits, model(input_ids=tokens).logits, atol=1e-4
            )


def test_what_is_no_gptq_is_refused(plain: Path, tmp_path: Path) -> None:
    write_gptq(plain, tmp_path, shift=1, quant_method="gptq")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for change in (
        {"bits": 16},
        {"checkpoint_format": "marlin"},
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"},
    ):
        held = config["quantization_config"] | change
        path.write_text(json.dumps(config | {"quantization_config": held}))
        with pytest.raises(InvalidInputError):
            read_gptq_config(tmp_path)
    path.write_text(json.dumps({k: v for k, v in config.items() if k != "quantization_config"}))
    with pytest.raises(InvalidInputError, match="does not say"):
        read_gptq_config(tmp_path)


def test_a_lost_tensor_is_named(plain: Path, tmp_path: Path) -> None:
    write_gptq(plain, tmp_path, shift=1, quant_method="gptq")
    state = load_file(tmp_path / "model.safetensors")
    for lost, is_packed in (
        ("model.norm.weight", False),
        ("model.norm.weight", True),
        ("model.layers.0.mlp.up_proj.scales", False),
    ):
        kept = {name: value for name, value in state.items() if name != lost}
        save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(InvalidInputError, match=lost.replace(".", r"\.")):
            load_gptq(tmp_path, dtype=torch.float32, device=CPU, is_packed=is_packed)


def test_settings_are_read(plain: Path, tmp_path: Path) -> None:
    write_gptq(plain, tmp_path, shift=1, quant_method="gptq", checkpoint_format="gptq_v2")

    assert read_gptq_config(tmp_path) == GptqConfig(bits=4, zeros_shift=0)
