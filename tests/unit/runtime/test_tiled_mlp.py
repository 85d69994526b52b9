"""MLPs in tiles: the values and gradients of whole ones, in every family that says it has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tightfit.core.settings import Method
from tightfit.core.strategy import Strategy
from tightfit.models.families.registry import find_family
from tightfit.runtime.kernels.tiled_mlp import tile_mlps
from tightfit.runtime.layers import decoder_layers
from tightfit.training.recompute import recompute_as_planned
from tightfit.training.routing import Routing
from tiny_configs import TINY, tiny_config

TILED = [name for name in TINY if find_family(name).can_tile_mlp]


def _build(family: str) -> Any:
    config = tiny_config(family)
    made = AutoConfig.for_model(config.pop("model_type"), **config)
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    return auto.from_config(made, dtype=torch.float32).train()


def _gradients(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(1)
    ids = torch.randint(3, 64, (2, 11))
    outputs = model(input_ids=ids, labels=ids, use_cache=False)
    outputs.loss.backward()
    made = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return outputs.logits.detach(), made


# GPT-BigCode's modelling file uses torch.jit.script, which torch 2.13 deprecates.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("family", TILED)
def test_tiles_compute_what_the_whole_does(family: str) -> None:
    """In layers that are recomputed from host copies: 22 tokens in tiles of 8, 8 and 6."""
    model = _build(family)
    for part in model.modules():  # tiles draw dropout in another order
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    logits, gradients = _gradients(model)
    long_rows = Strategy(method=Method.FULL, seq_len=11, mlp_tiles=3, offloaded_inputs=1)
    recompute_as_planned(model, long_rows)
    again_logits, again = _gradients(model)
    torch.testing.assert_close(again_logits, logits, atol=1e-5, rtol=1e-4)
    assert again.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(again[name], gradient, atol=2e-5, rtol=1e-3, msg=name)


def test_every_mlp_runs_twice_and_a_recomputed_layer_runs_it_no_third_time() -> None:
    model = _build("llama")
    sizes: list[int] = []
    layers: list[Any] = list(decoder_layers(model))
    for layer in layers:
        layer.mlp.gate_proj.register_forward_hook(
            lambda _module, args, _output: sizes.append(args[0].shape[1])
        )
    recompute_as_planned(model, Strategy(method=Method.FULL, seq_len=11, mlp_tiles=2))
    _gradients(model)
    assert sizes == [11] * (2 * 2 * 2)  # two layers, two passes, two tiles


def test_dropout_is_drawn_alike_in_both_passes() -> None:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 8)

        def forward(self, hidden: Tensor) -> Tensor:
            return nn.functional.dropout(self.up(hidden), 0.5, self.training)

    layer = nn.Module()
    layer.mlp = Mlp()
    tile_mlps([layer], "mlp", num_tiles=2)
    hidden = torch.ones(1, 6, 8, requires_grad=True)
    output = layer.mlp(hidden)
    output.sum().backward()
    # Each kept value adds twice its row of the weight to the gradient of its token.
    kept = (output.detach() != 0).float() * 2
    torch.testing.assert_close(hidden.grad, kept @ layer.mlp.up.weight.detach())


def test_experts_are_counted_tile_by_tile() -> None:
    ids = torch.randint(3, 64, (2, 11), generator=torch.Generator().manual_seed(1))
    counts = []
    for num_tiles in (1, 3):
        model = _build("qwen3_moe")
        strategy = Strategy(method=Method.FULL, seq_len=11, mlp_tiles=num_tiles)
        recompute_as_planned(model, strategy)
        routing = Routing.attach(model, strategy)
        assert routing is not None
        mask = torch.ones_like(ids)
        mask[1, 7:] = 0
        outputs, _ = routing.run(model, {"input_ids": ids}, mask, is_counted=True)
        outputs.logits.sum().backward()
        sums = routing.take()
        assert sums is not None
        counts.append(sums.expert_tokens)
    assert counts[0].sum() == 18 * 2
    assert torch.equal(*counts)
