"""A mixture's experts in nf4: packed as they are read, and multiplied as their values are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tightfit.core.attention import Attention
from tightfit.core.dtypes import Dtype
from tightfit.core.settings import ALL_LINEAR, EXPERTS, Method
from tightfit.core.strategy import Quirks, Strategy, Training
from tightfit.estimation.weights import count_quantized_values, estimate_weight_bytes
from tightfit.export.merge import MergeRequest, merge_adapter
from tightfit.models.config import read_config, read_config_file
from tightfit.models.spec import Role
from tightfit.runtime.adapters import add_adapters, load_adapter, save_adapter
from tightfit.runtime.kernels import experts
from tightfit.runtime.layers import dequantize_base
from tightfit.runtime.load import load_base, load_meta
from tightfit.runtime.model_files import Artefact, ArtefactKind
from tightfit.runtime.packed_experts import Packed, list_packable, list_packed, unpack_all
from tiny_configs import TINY, tiny_config

CPU = torch.device("cpu")
NF4 = Strategy(
    weights=Dtype.NF4, compute=Dtype.BF16, attention=Attention.EAGER, upcast_unquantized=False
)
IDS = torch.arange(40).view(2, 20)
WIDE = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "head_dim": 16}
"""Rows that bitsandbytes packs rightly on a CPU."""


def write_mixture(folder: Path, model_type: str, *, num_experts: int | None = None) -> Path:
    auto: Any = AutoConfig
    torch.manual_seed(0)
    count = "num_local_experts" if model_type == "gpt_oss" else "num_experts"
    more = {} if num_experts is None else {count: num_experts}
    config = auto.for_model(**(tiny_config(model_type) | WIDE | more))
    library: Any = AutoModelForCausalLM
    model: Any = library.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return folder


def loss_and_gradient(model: Any) -> tuple[Tensor, Tensor]:
    """The gradient of the embedding has passed through every layer's experts."""
    model.requires_grad_(False)
    embedding = model.get_input_embeddings().weight.requires_grad_()
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    gradient, embedding.grad = embedding.grad, None
    return loss.detach(), gradient


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "olmoe", "granitemoe", "lfm2_moe"])
def test_codes_multiply_as_their_values(model_type: str, tmp_path: Path) -> None:
    model = load_base(write_mixture(tmp_path / "model", model_type), NF4, CPU)
    num_packed = len(list_packed(model))
    loss, gradient = loss_and_gradient(model)

    assert num_packed == len(list_packable(model)) > 0
    assert unpack_all(model) == num_packed
    assert not list_packed(model)
    exact, wanted = loss_and_gradient(model)
    assert torch.equal(loss, exact)
    assert torch.equal(gradient, wanted)


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_few_tokens_unpack_the_chosen_experts_alone(
    model_type: str, double_quant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in generation; with adapters of experts too."""
    strategy = NF4.model_copy(
        update={
            "method": Method.LORA,
            "lora_targets": (ALL_LINEAR, EXPERTS),
            "double_quant": double_quant,
        }
    )
    folder = write_mixture(tmp_path / "model", model_type, num_experts=16)
    training = Training(model_path=str(folder), learning_rate=1e-3)
    model: Any = add_adapters(load_base(folder, strategy, CPU), strategy, training)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    unpacked: list[int] = []
    unpack, choose = Packed.unpack, Packed.unpack_chosen

    def count_all(packed: Packed, codes: Tensor) -> Tensor:
        unpacked.append(packed.shape[0])
        return unpack(packed, codes)

    def count_chosen(packed: Packed, codes: Tensor, experts: Tensor) -> Tensor:
        unpacked.append(len(experts))
        return choose(packed, codes, experts)

    monkeypatch.setattr(Packed, "unpack", count_all)
    monkeypatch.setattr(Packed, "unpack_chosen", count_chosen)
    with torch.no_grad():
        few = model(input_ids=IDS[:, :1]).logits
        assert set(unpacked) == {4}  # two tokens, two experts each
        monkeypatch.setattr(experts, "_reads_few", lambda *_: False)
        exact = model(input_ids=IDS[:, :1]).logits
    assert set(unpacked) == {4, 16}
    torch.testing.assert_close(few, exact)


def test_values_are_near_those_of_the_files(tmp_path: Path) -> None:
    """Each expert at its own place; nf4 loses about a tenth of normal values."""
    folder = write_mixture(tmp_path / "model", "qwen3_moe")
    plain = Strategy(weights=Dtype.BF16, compute=Dtype.BF16, attention=Attention.EAGER)
    exact: Any = load_base(folder, plain, CPU)
    packed = load_base(folder, NF4, CPU)

    assert dequantize_base(packed) > len(list_packable(packed))
    for path, _, _ in list_packable(exact):
        original = exact.get_parameter(path).detach().float()
        error = (packed.get_parameter(path).float() - original).flatten(1).norm(dim=1)
        assert (error / original.flatten(1).norm(dim=1)).max() < 0.15, path


def test_random_weights_are_packed_alike(tmp_path: Path) -> None:
    folder = write_mixture(tmp_path / "model", "gpt_oss")
    read, drawn = (load_base(folder, NF4, CPU, random_weights=way) for way in (False, True))

    shapes = [{n: (p.dtype, p.shape) for n, p in m.named_parameters()} for m in (read, drawn)]
    assert shapes[0] == shapes[1]
    assert torch.isfinite(loss_and_gradient(drawn)[0])


def test_as_other_libraries_load_it_experts_stay_whole(tmp_path: Path) -> None:
    folder = write_mixture(tmp_path / "model", "qwen3_moe")
    theirs = NF4.model_copy(update={"quirks": Quirks(plain_modelling=True)})

    assert not list_packed(load_base(folder, theirs, CPU))


@pytest.mark.parametrize("strategy", [NF4, NF4.model_copy(update={"double_quant": True})])
def test_the_estimate_counts_what_is_held(strategy: Strategy, tmp_path: Path) -> None:
    folder = write_mixture(tmp_path / "model", "gpt_oss")
    spec = read_config_file(folder / "config.json", name="tiny")
    model = load_base(folder, strategy, CPU)

    codes = sum(p.numel() for p in model.parameters() if p.dtype is torch.uint8)
    others = sum(p.nbytes for p in model.parameters() if p.dtype is not torch.uint8)
    predicted = estimate_weight_bytes(spec, strategy)
    assert 2 * codes == count_quantized_values(spec, strategy)
    assert (predicted.packed, predicted.plain) == (codes, others)


def has_experts(model_type: str) -> bool:
    blocks = read_config(tiny_config(model_type), name="", source="").blocks
    return any(part.role is Role.EXPERT for block in blocks for part in block.linears)


@pytest.mark.parametrize("model_type", [name for name in TINY if has_experts(name)])
def test_the_record_knows_which_experts_can_be_packed(model_type: str, tmp_path: Path) -> None:
    config = tiny_config(model_type)
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_config_file(tmp_path / "config.json", name="tiny")
    model = load_meta(tmp_path, NF4)

    values = sum(module.get_parameter(name).numel() for _, module, name in list_packable(model))
    assert values == spec.grouped_params


def write_mxfp4(folder: Path) -> dict[str, Tensor]:
    """gpt-oss as it is published; returns transformers' own values of the codes."""
    write_mixture(folder, "gpt_oss")
    state = load_file(folder / "model.safetensors")
    random, values = torch.Generator().manual_seed(5), {}
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, width, rows = state.pop(name).shape
        size = (experts, rows, width // 32)
        codes = torch.randint(0, 256, (*size, 16), dtype=torch.uint8, generator=random)
        scales = torch.randint(121, 124, size, dtype=torch.uint8, generator=random)
        state |= {f"{name}_blocks": codes, f"{name}_scales": scales}
        unpack: Any = convert_moe_packed_tensors
        values[name] = unpack(codes, scales, dtype=torch.float32)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    return values


def test_mxfp4_is_read_as_plain_values_and_into_nf4(tmp_path: Path) -> None:
    values = write_mxfp4(tmp_path / "model")
    plain = Strategy(weights=Dtype.BF16, compute=Dtype.BF16, attention=Attention.EAGER)
    exact = load_base(tmp_path / "model", plain, CPU)
    packed = load_base(tmp_path / "model", NF4, CPU)

    assert unpack_all(packed) == len(values) == 4
    for name, wanted in values.items():
        assert torch.equal(exact.get_parameter(name).detach().float(), wanted)
        error = packed.get_parameter(name).float() - wanted
        assert 0.01 < float(error.norm() / wanted.norm()) < 0.15


def test_adapters_of_packed_experts_are_as_beside_their_values(tmp_path: Path) -> None:
    folder = write_mixture(tmp_path / "model", "qwen3_moe")
    strategy = NF4.model_copy(
        update={
            "method": Method.LORA,
            "adapter_dtype": Dtype.BF16,
            "lora_rank": 8,
            "lora_targets": ("all-linear", "experts"),
        }
    )
    training = Training(model_path=str(folder), learning_rate=1e-3)
    adapted: Any = add_adapters(load_base(folder, strategy, CPU), strategy, training)
    torch.manual_seed(2)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert all(parameter.dtype is torch.bfloat16 for parameter in trained.values())
    assert sum(p.numel() for name, p in trained.items() if "experts" in name) > 0
    loss = adapted(input_ids=IDS, labels=IDS).loss
    loss.backward()
    save_adapter(adapted, tmp_path / "adapter")
    gradients = {name: parameter.grad.clone() for name, parameter in trained.items()}
    unpack_all(adapted)
    adapted.zero_grad()
    again = adapted(input_ids=IDS, labels=IDS).loss
    again.backward()

    assert torch.equal(loss, again)
    for name, parameter in trained.items():
        assert torch.equal(gradients[name], parameter.grad), name
    loaded: Any = load_adapter(load_base(folder, strategy, CPU), tmp_path / "adapter")
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=IDS, labels=IDS).loss, loss)


@pytest.mark.parametrize("targets", [("q_proj", "o_proj"), ("all-linear", "experts")])
def test_an_adapter_is_merged_into_mxfp4(targets: tuple[str, ...], tmp_path: Path) -> None:
    """Experts that are not adapted stay as they are; else all are unpacked."""
    values = write_mxfp4(tmp_path / "model")
    strategy = NF4.model_copy(
        update={
            "method": Method.LORA,
            "weights": Dtype.BF16,
            "adapter_dtype": Dtype.BF16,
            "lora_targets": targets,
        }
    )
    training = Training(model_path=str(tmp_path / "model"), learning_rate=1e-3)
    adapted: Any = add_adapters(load_base(tmp_path / "model", strategy, CPU), strategy, training)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    save_adapter(adapted, tmp_path / "adapter")
    with torch.no_grad():
        base = load_base(tmp_path / "model", strategy, CPU)(input_ids=IDS).logits
        expected = adapted(input_ids=IDS).logits

    artefact = Artefact(
        name="tiny",
        kind=ArtefactKind.ADAPTER,
        path=tmp_path / "adapter",
        tokenizer=tmp_path / "model",
        base=tmp_path / "model",
    )
    merge_adapter(MergeRequest(artefact=artefact, target=tmp_path / "merged"))

    loaded: Any = load_base(tmp_path / "merged", strategy, CPU)
    if "experts" not in targets:
        for name, wanted in values.items():
            assert torch.equal(loaded.get_parameter(name).detach().float(), wanted)
    with torch.no_grad():
        found = loaded(input_ids=IDS).logits
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()
    assert (base - expected).abs().max() > 0.1 * expected.abs().max()
