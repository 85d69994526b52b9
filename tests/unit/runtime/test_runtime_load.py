"""Loading: right values, right formats, training mode, and errors said in one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_model, model_folder
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError, SetupError, UsageError
from tightfit.core.settings import Sharding
from tightfit.core.strategy import Strategy
from tightfit.runtime.layers import decoder_layers
from tightfit.runtime.load import (
    MAX_NF4_ERROR,
    fill_buffers,
    load_base,
    load_meta,
    materialize_empty,
    quantize_and_dequantize,
)

CPU = torch.device("cpu")
PLAIN = Strategy(weights=Dtype.FP32, compute=Dtype.FP32)
NF4 = Strategy(weights=Dtype.NF4, compute=Dtype.FP32)
INT8 = Strategy(weights=Dtype.INT8, compute=Dtype.BF16)
IDS = torch.arange(3, 19)[None]


def answer(model: Any) -> torch.Tensor:
    extra = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    model.eval()
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=IDS, **extra).logits
    return logits


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5", "gemma3"])
def test_loads_what_transformers_loads(family: str) -> None:
    folder = model_folder(family)
    auto = AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM
    theirs = auto.from_pretrained(folder, dtype=torch.float32)
    ours = load_base(folder, PLAIN, CPU)

    assert ours.training
    assert ours.config.use_cache is False
    assert torch.equal(answer(ours), answer(theirs))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(Dtype.FP32, torch.float32), (Dtype.BF16, torch.bfloat16), (Dtype.FP16, torch.float16)],
)
def test_every_value_has_the_asked_dtype(dtype: Dtype, expected: torch.dtype) -> None:
    model = load_base(model_folder("llama"), Strategy(weights=dtype, compute=dtype), CPU)

    assert {p.dtype for p in model.parameters()} == {expected}


def packed_kinds(model: Any) -> dict[str, str]:
    return {
        name: type(p).__name__
        for name, p in model.named_parameters()
        if "Params" in type(p).__name__
    }


@pytest.mark.parametrize("is_random", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
@pytest.mark.parametrize("strategy", [NF4, INT8], ids=["nf4", "int8"])
def test_random_packs_what_loading_packs(strategy: Strategy, family: str, is_random: bool) -> None:
    model = load_base(model_folder(family), strategy, CPU, random_weights=is_random)
    loaded = load_base(model_folder(family), strategy, CPU)
    kind = "Int8Params" if strategy.weights is Dtype.INT8 else "Params4bit"

    assert set(packed_kinds(model).values()) == {kind}
    assert packed_kinds(model) == packed_kinds(loaded)
    assert {n: (p.dtype, p.shape) for n, p in model.named_parameters()} == {
        n: (p.dtype, p.shape) for n, p in loaded.named_parameters()
    }
    assert not any(p.requires_grad for n, p in model.named_parameters() if n in packed_kinds(model))
    assert torch.isfinite(answer(model)).all()


def test_nf4_stays_near_the_original() -> None:
    """Normal values lose about a tenth in nf4 (arXiv:2305.14314); zeros or noise would lose all."""
    from bitsandbytes.functional import dequantize_4bit

    exact: Any = load_base(model_folder("llama"), PLAIN, CPU)
    packed: Any = load_base(model_folder("llama"), NF4, CPU)
    for layer, twin in zip(exact.model.layers, packed.model.layers, strict=True):
        weight = twin.mlp.up_proj.weight
        values = dequantize_4bit(weight.data, weight.quant_state)
        original = layer.mlp.up_proj.weight.detach()
        error = (values - original).norm() / original.norm()
        assert 0.01 < float(error) < 0.15


@pytest.mark.parametrize("width", [64, 96, 128])
def test_packing_that_cannot_be_undone_is_refused(width: int, tmp_path: Path) -> None:
    """Either this bitsandbytes unpacks rows of 96 rightly, or a model that has them is refused."""
    from bitsandbytes.functional import dequantize_4bit

    folder = tmp_path / "model"
    make_model("llama", intermediate_size=width).save_pretrained(folder)
    exact: Any = load_base(folder, PLAIN, CPU)
    if float(quantize_and_dequantize(width, CPU)) > MAX_NF4_ERROR:
        assert width % 64
        with pytest.raises(SetupError, match=f"width {width}"):
            load_base(folder, NF4, CPU)
        return
    packed: Any = load_base(folder, NF4, CPU)
    weight = packed.model.layers[0].mlp.down_proj.weight
    original = exact.model.layers[0].mlp.down_proj.weight.detach()
    error = (dequantize_4bit(weight.data, weight.quant_state) - original).norm() / original.norm()
    assert float(error) < 0.15


@pytest.mark.parametrize("double_quant", [True, False])
def test_double_quantization_as_asked(double_quant: bool) -> None:
    for is_random in (False, True):
        strategy = NF4.model_copy(update={"double_quant": double_quant})
        model: Any = load_base(model_folder("llama"), strategy, CPU, random_weights=is_random)
        weight = model.model.layers[0].mlp.up_proj.weight

        assert weight.quant_state.nested is double_quant
        assert model.model.layers[0].mlp.up_proj.compute_dtype is torch.float32


def test_nf4_codes_for_zero3_are_stored_in_the_compute_dtype() -> None:
    strategy = NF4.model_copy(update={"sharding": Sharding.ZERO3})
    model: Any = load_base(model_folder("llama"), strategy, CPU)

    assert model.model.layers[0].mlp.up_proj.weight.dtype is torch.float32
    plain = load_base(model_folder("llama"), NF4, CPU)
    assert torch.equal(answer(model), answer(plain))


def test_evaluating_does_not_repack_nf4() -> None:
    """bitsandbytes repacks in eval mode on CPUs with bf16 units; training would then fail."""
    model: Any = load_base(model_folder("llama"), NF4, CPU)
    weight = model.model.layers[0].mlp.up_proj.weight
    before = weight.data.clone()
    answer(model)

    assert torch.equal(weight.data, before)
    assert not getattr(weight.quant_state, "packing_format_for_cpu", False)
    assert not any(getattr(m, "support_avx512bf16_for_cpu", False) for m in model.modules())


def test_upcasting_what_is_not_packed() -> None:
    strategy = Strategy(weights=Dtype.NF4, compute=Dtype.BF16)
    low: Any = load_base(model_folder("llama"), strategy, CPU)
    high: Any = load_base(
        model_folder("llama"), strategy.model_copy(update={"upcast_unquantized": True}), CPU
    )

    assert low.model.norm.weight.dtype is torch.bfloat16
    assert high.model.norm.weight.dtype is torch.float32
    assert high.lm_head.weight.dtype is torch.float32
    assert high.model.layers[0].mlp.up_proj.weight.dtype is torch.uint8


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gpt2", "t5", "gemma3"])
def test_random_weights_are_a_whole_model(family: str) -> None:
    """Needs no weights on disk, and is initialized as the family says: norms one, ties kept."""
    folder = model_folder(family)
    torch.manual_seed(3)
    model: Any = load_base(folder, PLAIN, CPU, random_weights=True)
    torch.manual_seed(3)
    again = load_base(folder, PLAIN, CPU, random_weights=True)
    loaded: Any = load_base(folder, PLAIN, CPU)

    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    assert torch.equal(answer(model), answer(again))
    assert not torch.equal(answer(model), answer(loaded))
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in loaded.named_parameters()]
    for (name, ours), theirs in zip(model.named_buffers(), loaded.buffers(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5", "gemma3"])
def test_meta_model_filled_from_a_state_dict(family: str) -> None:
    """What sharded loading does: no values at first, parameters from elsewhere, own buffers."""
    loaded: Any = load_base(model_folder(family), PLAIN, CPU)
    model: Any = load_meta(model_folder(family), PLAIN)
    assert all(p.is_meta for p in model.parameters())
    state = loaded.state_dict()
    fill_buffers(model, CPU)
    materialize_empty(model, CPU)
    model.load_state_dict(state)

    assert torch.equal(answer(model), answer(loaded))


@pytest.mark.parametrize(
    ("family", "expected"),
    [("llama", "LlamaDecoderLayer"), ("gpt2", "GPT2Block"), ("t5", "T5Block")],
)
def test_layers_of_a_family(family: str, expected: str) -> None:
    from peft import LoraConfig, get_peft_model

    model: Any = load_base(model_folder(family), PLAIN, CPU)
    plain = decoder_layers(model)
    is_turned = family == "gpt2"
    config = LoraConfig(target_modules="all-linear", fan_in_fan_out=is_turned)
    wrapped = decoder_layers(get_peft_model(model, config))

    assert [type(layer).__name__ for layer in plain] == [expected] * (4 if family == "t5" else 2)
    assert [id(layer) for layer in wrapped] == [id(layer) for layer in plain]


def test_a_loaded_model_keeps_packed_documents_apart() -> None:
    """transformers sees restarted positions only where no cache is filled, which is its default."""
    model: Any = load_base(model_folder("llama"), PLAIN, CPU)
    model.eval()
    positions = torch.cat([torch.arange(9), torch.arange(7)])[None]
    with torch.no_grad():
        packed = model(input_ids=IDS, position_ids=positions).logits[:, 9:]
        apart = model(input_ids=IDS[:, 9:]).logits

    assert torch.allclose(packed, apart, atol=1e-5)


def test_missing_tensors_are_an_error(tmp_path: Path) -> None:
    """transformers would only mention it, and train noise."""
    folder = tmp_path / "model"
    shutil.copytree(model_folder("llama"), folder)
    state = load_file(folder / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(InvalidInputError, match=r"layers\.1\.mlp\.up_proj"):
        load_base(folder, PLAIN, CPU)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 128}, "cannot load"),
        ({"model_type": "nobody-knows"}, "cannot read"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "already quantized"),
    ],
)
def test_a_config_that_does_not_fit(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder("llama"), folder)
    fields = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(fields))

    with pytest.raises(InvalidInputError, match=message):
        load_base(folder, PLAIN, CPU)


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("code ran",))


def test_pickles_are_loaded_as_tensors_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder("llama"), folder)
    state: dict[str, Any] = dict(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    expected = answer(load_base(model_folder("llama"), PLAIN, CPU))
    assert torch.equal(answer(load_base(folder, PLAIN, CPU)), expected)

    torch.save(state | {"evil": _Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(InvalidInputError, match="more than tensors"):
        load_base(folder, PLAIN, CPU)
    assert "code ran" not in capsys.readouterr().out


def test_gptq_weights_are_refused() -> None:
    strategy = Strategy(weights=Dtype.GPTQ4, compute=Dtype.BF16)
    with pytest.raises(UsageError, match="gptq4"):
        load_base(model_folder("llama"), strategy, CPU)


def test_loading_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    load_base(model_folder("llama"), NF4, CPU)
    answer(load_base(model_folder("llama"), PLAIN, CPU))
    captured = capfd.readouterr()

    assert captured.out == ""
    assert captured.err == ""
