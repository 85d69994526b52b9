"""Our counts of kept activations against what autograd really saves, on tiny models on the CPU."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import pytest

from tightfit.core.strategy import Strategy
from tightfit.estimation.activations import estimate_activation_bytes, list_layers
from tightfit.estimation.weights import adapter_params
from tightfit.models.config import read_config
from tightfit.models.spec import ModelSpec

torch = pytest.importorskip("torch", reason="un-skip with: pip install 'tightfit[train]'")
transformers = pytest.importorskip("transformers", reason="un-skip: pip install 'tightfit[train]'")
peft = pytest.importorskip("peft", reason="un-skip: pip install 'tightfit[train]'")

# Warnings of the libraries under comparison are not ours to fix.
pytestmark = pytest.mark.filterwarnings("default")

BATCH, LENGTH, RANK = 2, 64, 4
SHAPE = {
    **{"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "vocab_size": 96},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
}


def _strategy(**fields: Any) -> Strategy:
    plain = {"weights": "fp32", "compute": "fp32", "adapter_dtype": "fp32", "lora_rank": RANK}
    shape = {"micro_batch": BATCH, "seq_len": LENGTH, "checkpointing": False}
    return Strategy(**(plain | shape | fields))


def _model(*, dora: bool, dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    config = peft.LoraConfig(
        r=RANK, target_modules="all-linear", use_dora=dora, lora_dropout=dropout
    )
    return peft.get_peft_model(base, config).train()


def _saved_bytes(model: Any, *, num_recomputed: int = 0) -> int:
    """Bytes of distinct storages that the graph keeps, parameters left out."""
    for layer in model.base_model.model.model.layers[:num_recomputed]:
        _recompute(layer)
    owned = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def pack(tensor: Any) -> _Saved:
        held = _Saved(tensor)
        saved.add(held)
        return held

    tokens = torch.randint(0, 96, (BATCH, LENGTH))
    embedded = model.get_input_embeddings()(tokens).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
        output = model(inputs_embeds=embedded, use_cache=False)
    # Of what was saved, only that which the output's graph still holds is alive.
    storages = {held.tensor.untyped_storage().data_ptr(): held.tensor for held in saved}
    assert output.logits.grad_fn is not None
    return sum(
        tensor.untyped_storage().nbytes()
        for address, tensor in storages.items()
        if address not in owned
    )


@dataclass(eq=False)
class _Saved:
    """What autograd gets in a tensor's place; it goes when the graph lets go of it."""

    tensor: Any


def _recompute(layer: Any) -> None:
    forward = layer.forward

    def again(*arguments: Any, **named: Any) -> Any:
        checkpoint = torch.utils.checkpoint.checkpoint
        return checkpoint(forward, *arguments, use_reentrant=False, **named)

    layer.forward = again


def _spec() -> ModelSpec:
    return read_config({"model_type": "llama", **SHAPE}, name="tiny", source="test")


def _kept_bytes(spec: ModelSpec, strategy: Strategy) -> int:
    layers = list_layers(spec, strategy, is_cpu=True)
    return estimate_activation_bytes(spec, strategy, layers).kept


@pytest.mark.parametrize("dora", [False, True])
def test_trained_values(dora: bool) -> None:
    trained = sum(p.numel() for p in _model(dora=dora).parameters() if p.requires_grad)
    assert adapter_params(_spec(), _strategy(dora=dora)) == trained


def test_dora_keeps_two_outputs_of_each_target() -> None:
    predicted = [_kept_bytes(_spec(), _strategy(dora=dora)) for dora in (False, True)]
    measured = [_saved_bytes(_model(dora=dora)) for dora in (False, True)]
    assert predicted[1] - predicted[0] == pytest.approx(measured[1] - measured[0], rel=0.05)


def test_recomputing_some_layers_drops_their_activations_alone() -> None:
    spec = _spec()
    predicted = [
        _kept_bytes(spec, _strategy(checkpointing=count > 0, recomputed_layers=count or None))
        for count in (0, 1, 3)
    ]
    measured = [_saved_bytes(_model(dora=False), num_recomputed=count) for count in (0, 1, 3)]
    for at in (1, 2):
        dropped = predicted[0] - predicted[at]
        assert dropped == pytest.approx(measured[0] - measured[at], rel=0.05)
