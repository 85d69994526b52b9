"""fp8 products: near to fp32's, harmless to the loss, and bf16's own wherever they cannot be."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import model_folder
from torch import Tensor, nn

from tightfit.core.settings import Method
from tightfit.core.strategy import Strategy, Training
from tightfit.runtime.adapters import load_adapter, save_adapter
from tightfit.runtime.kernels import fp8
from tightfit.runtime.kernels.fp8 import Fp8Linear, takes_fp8, use_fp8
from tightfit.runtime.load import load_base
from tightfit.training.model import prepare_model

CPU = torch.device("cpu")
IDS = torch.arange(3, 51).reshape(3, 16)
TRAINING = Training(model_path="model", learning_rate=1e-4)
BF16 = torch.bfloat16
NUM_LINEARS = 14
"""Of two layers of a Llama."""
ROUNDED = 0.045
"""Two operands of four significant bits, each 2.6% off in the mean of squares, or a little more
where one row is most of all."""


def strategy_of(method: Method, **fields: Any) -> Strategy:
    folded = {"fused_lora": True} if method is Method.LORA else {}
    plain: dict[str, Any] = {"lora_rank": 8, "checkpointing": False, "fp8": True}
    return Strategy(method=method, **(plain | folded | fields))


def finished(method: Method, **fields: Any) -> Any:
    strategy = strategy_of(method, **fields)
    torch.manual_seed(0)
    return prepare_model(load_base(model_folder("llama"), strategy, CPU), strategy, TRAINING)


def distance(found: Tensor, wanted: Tensor) -> float:
    """Relative, over all values."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def inside(module: nn.Module, name: str = "0") -> Any:
    """As the only layer of a model that has blocks."""
    return nn.ModuleList([nn.ModuleDict({name: module})])


# One layer


@pytest.mark.parametrize("spread", [0.0, 4.0], ids=["even rows", "rows of any size"])
@pytest.mark.parametrize("is_trained", [True, False], ids=["trained", "frozen"])
def test_a_layer_is_as_near_to_fp32_as_fp8_can_be(is_trained: bool, spread: float) -> None:
    torch.manual_seed(1)
    linear = nn.Linear(256, 384, dtype=BF16)
    linear.requires_grad_(is_trained)
    sizes = 2.0 ** (spread * torch.randn(2, 56, 1))  # of tokens, and of their gradients
    x, g = (torch.randn(2, 56, n).mul(sizes).to(BF16) for n in (256, 384))
    model = inside(linear)
    wanted = run(copy.deepcopy(linear).float(), x.float(), g.float())
    assert use_fp8(model) == 1
    found = run(model[0]["0"], x, g)

    assert found.keys() == wanted.keys()
    for name in found.keys() - {"bias"}:
        assert 0.01 < distance(found[name], wanted[name]) < ROUNDED, name
    if is_trained:
        assert distance(found["bias"], wanted["bias"]) < 0.005, "a bf16 sum"


def test_a_weight_s_gradient_is_bf16_s_where_tokens_fill_no_row() -> None:
    linear = nn.Linear(32, 48, dtype=BF16)
    x, g = torch.randn(50, 32).to(BF16), torch.randn(50, 48).to(BF16)
    model = inside(linear)
    use_fp8(model)
    found = run(model[0]["0"], x, g)
    assert torch.equal(found["weight"], g.t() @ x)


def run(layer: Any, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    inputs = x.clone().requires_grad_()
    y = layer(inputs)
    y.backward(g)
    assert inputs.grad is not None
    assert y.dtype is inputs.grad.dtype is x.dtype
    of_weights = {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": inputs.grad, **of_weights}


def test_fast_sums_are_for_the_forward_pass_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    multiply = torch._scaled_mm

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(kwargs["use_fast_accum"])
        return multiply(*args, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", spy)
    for is_trained in (True, False):
        linear = nn.Linear(32, 32, dtype=BF16).requires_grad_(is_trained)
        model = inside(linear)
        use_fp8(model)
        run(model[0]["0"], torch.randn(16, 32).to(BF16), torch.randn(16, 32).to(BF16))
    assert seen == [True, False, False, True, False]


# The backward pass alone


GRADIENTS: dict[str, Any] = {"fp8": False, "fp8_gradients": True}


def test_results_are_bf16_s_and_gradients_fp8_s() -> None:
    torch.manual_seed(1)
    linear = nn.Linear(256, 384, dtype=BF16)
    x, g = torch.randn(2, 56, 256).to(BF16), torch.randn(2, 56, 384).to(BF16)
    model, both = inside(copy.deepcopy(linear)), inside(copy.deepcopy(linear))
    use_fp8(model, is_backward_alone=True)
    use_fp8(both)
    found, wanted = run(model[0]["0"], x, g), run(both[0]["0"], x, g)

    assert torch.equal(found.pop("y"), linear(x))
    assert not torch.equal(wanted.pop("y"), linear(x))
    assert found.keys() == wanted.keys() == {"x", "weight", "bias"}
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_model_s_loss_is_bf16_s_own() -> None:
    found, plain = finished(Method.FULL, **GRADIENTS), finished(Method.FULL, fp8=False)
    one, other = (model(input_ids=IDS, labels=IDS).loss for model in (found, plain))
    assert torch.equal(one, other)
    assert train(found, rate=3e-3)[1:] != train(plain, rate=3e-3)[1:]


# Where fp8 cannot be


REFUSED: dict[str, tuple[str, nn.Module]] = {
    "inputs": ("q_proj", nn.Linear(40, 32, dtype=BF16)),
    "outputs": ("q_proj", nn.Linear(32, 40, dtype=BF16)),
    "fp32": ("q_proj", nn.Linear(32, 32)),
    "adapter": ("q_proj.lora_A.default", nn.Linear(32, 16, dtype=BF16)),
    "router": ("mlp.gate", nn.Linear(32, 16, dtype=BF16)),
    "adapted router": ("mlp.gate.base_layer", nn.Linear(32, 16, dtype=BF16)),
    "router inside of one": ("moe.router.layer", nn.Linear(32, 16, dtype=BF16)),
    "no linear": ("norm", nn.LayerNorm(32, dtype=BF16)),
}


@pytest.mark.parametrize(("name", "module"), REFUSED.values(), ids=REFUSED)
def test_other_layers_stay_as_they_are(name: str, module: nn.Module) -> None:
    assert not takes_fp8(name, module)
    assert takes_fp8("mlp.gate_proj.base_layer", nn.Linear(32, 16, dtype=BF16))


@pytest.mark.parametrize("is_trained", [True, False], ids=["trained", "frozen"])
def test_other_calls_are_plain_products(is_trained: bool) -> None:
    linear = nn.Linear(32, 48, dtype=BF16).requires_grad_(is_trained)
    model = inside(linear)
    use_fp8(model)
    layer: Any = model[0]["0"]
    matrix = linear.weight if is_trained else layer.unpack(BF16)
    x = torch.randn(5, 32).to(BF16)
    with torch.autocast("cpu", dtype=BF16):
        assert torch.equal(layer(x), nn.functional.linear(x, matrix, linear.bias))
    assert layer(x[:0]).shape == (0, 48)
    if not is_trained:
        layer.bias.data = layer.bias.data.float()
        wanted = nn.functional.linear(x.float(), matrix.float(), layer.bias)
        assert torch.equal(layer(x.float()), wanted)


# Whole models


@pytest.mark.parametrize("method", [Method.FULL, Method.LORA])
def test_every_linear_layer_of_the_blocks_and_no_other(method: Method) -> None:
    model = finished(method)
    if method is Method.FULL:
        taken = {n for n, m in model.named_modules() if "forward" in vars(m)}
    else:
        taken = {n for n, m in model.named_modules() if isinstance(m, Fp8Linear)}
    assert len(taken) == NUM_LINEARS
    assert all(".layers." in name and "lora" not in name for name in taken)
    assert "lm_head" not in taken


def test_one_matrix_at_a_time_is_there_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else loading would take half as much again as the estimate allows for."""
    model = finished(Method.LORA, fp8=False, fused_lora=False)
    matrices = [weakref.ref(m.weight) for n, m in model.named_modules() if takes_fp8(n, m)]
    alive = []
    cast = fp8.scale_matrix

    def count(weight: Tensor) -> Any:
        alive.append(sum(matrix() is not None for matrix in matrices))
        return cast(weight)

    monkeypatch.setattr(fp8, "scale_matrix", count)
    use_fp8(model)
    left = len(matrices) - NUM_LINEARS  # outside of the blocks
    assert alive == [left + number for number in range(NUM_LINEARS, 0, -1)]


def test_frozen_matrices_take_half_the_memory() -> None:
    plain, found = finished(Method.LORA, fp8=False), finished(Method.LORA)
    matrices = sum(m.weight.numel() for m in found.modules() if isinstance(m, Fp8Linear))
    assert matrices > 0

    def size(model: Any) -> int:
        return sum(p.numel() * p.element_size() for p in model.parameters())

    assert size(plain) - size(found) == matrices


@pytest.mark.parametrize(
    ("method", "fields"), [(Method.FULL, {}), (Method.LORA, {}), (Method.FULL, GRADIENTS)]
)
def test_recomputed_layers_have_the_same_gradients(method: Method, fields: dict[str, Any]) -> None:
    found, wanted = (gradients(finished(method, checkpointing=c, **fields)) for c in (True, False))
    assert found.keys() == wanted.keys()
    assert len(found) > NUM_LINEARS
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def gradients(model: Any) -> dict[str, Tensor]:
    model(input_ids=IDS, labels=IDS).loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("method", "rate", "fields"),
    [(Method.FULL, 3e-3, {}), (Method.LORA, 1e-2, {}), (Method.FULL, 3e-3, GRADIENTS)],
)
def test_fifty_steps_go_down_the_curve_of_bf16(
    method: Method, rate: float, fields: dict[str, Any]
) -> None:
    """Far nearer to it than bf16 comes to itself when the same data is drawn anew."""
    curve = train(finished(method, **fields), rate=rate)
    plain = train(finished(method, fp8=False), rate=rate)
    again = train(finished(method, fp8=False), rate=rate, seed=2)
    assert mean(plain[-10:]) < 0.5 * plain[0]
    assert 0 < apart(curve, plain) < 0.5 * apart(again, plain)
    assert mean(curve[-10:]) - mean(plain[-10:]) < 0.04 * mean(plain[-10:])


def mean(losses: list[float]) -> float:
    return sum(losses) / len(losses)


def apart(losses: list[float], others: list[float]) -> float:
    return mean([abs(one - other) for one, other in zip(losses, others, strict=True)])


def train(model: Any, *, rate: float = 1e-2, seed: int = 1, num_steps: int = 50) -> list[float]:
    drawn = torch.Generator().manual_seed(seed)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate)
    losses = []
    for _ in range(num_steps):
        ids = draw_rows(drawn)
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def draw_rows(drawn: torch.Generator, *, num_rows: int = 8, length: int = 24) -> Tensor:
    """Each token follows from the one before it, four times of five: something can be learnt, and
    nothing by heart."""
    columns = [torch.randint(3, 51, (num_rows,), generator=drawn)]
    for _ in range(length - 1):
        other = torch.randint(3, 51, (num_rows,), generator=drawn)
        is_next = torch.rand(num_rows, generator=drawn) < 0.8
        columns.append(torch.where(is_next, (5 * columns[-1] + 7) % 48 + 3, other))
    return torch.stack(columns, dim=1)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's
@pytest.mark.parametrize(
    ("method", "fields"), [(Method.FULL, {}), (Method.LORA, {}), (Method.FULL, GRADIENTS)]
)
def test_the_compiler_sees_one_graph(method: Method, fields: dict[str, Any]) -> None:
    model = finished(method, **fields)
    base = model.base_model.model if method is Method.LORA else model
    layer = base.model.layers[0].mlp
    compiled: Any = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, g = torch.randn(2, 8, 64).to(BF16), torch.randn(2, 8, 64).to(BF16)
    found = run(compiled, x, g)
    layer.zero_grad(set_to_none=True)
    wanted = run(layer, x, g)
    assert distance(found["y"], wanted["y"]) < 0.01
    assert distance(found["x"], wanted["x"]) < 0.01


# Names and files


def test_full_tuning_keeps_its_weights() -> None:
    found, plain = (finished(Method.FULL, fp8=f).state_dict() for f in (True, False))
    assert list(found) == list(plain)
    assert all(torch.equal(found[name], plain[name]) for name in plain)


def test_adapters_are_written_and_read_as_ever(tmp_path: Path) -> None:
    """And what they do on the bf16 base is what they did on the fp8 one."""
    found, plain = finished(Method.LORA), finished(Method.LORA, fp8=False)
    assert list(found.state_dict()) == list(plain.state_dict())
    train(found, num_steps=20)
    save_adapter(found, tmp_path / "fp8")
    save_adapter(plain, tmp_path / "plain")
    mine, theirs = (
        load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("fp8", "plain")
    )
    assert {n: (t.shape, t.dtype) for n, t in mine.items()} == {
        n: (t.shape, t.dtype) for n, t in theirs.items()
    }
    strategy = strategy_of(Method.LORA)
    read = load_adapter(load_base(model_folder("llama"), strategy, CPU), tmp_path / "fp8")
    merged: Any = read.merge_and_unload()
    ids = draw_rows(torch.Generator().manual_seed(3))
    with torch.no_grad():
        base, wanted, found_loss = (
            float(one.eval()(input_ids=ids, labels=ids).loss) for one in (plain, found, merged)
        )
    assert wanted < 0.6 * base
    assert found_loss == pytest.approx(wanted, rel=0.02)


def test_a_copy_computes_with_its_own_weights() -> None:
    model = finished(Method.FULL)
    other = copy.deepcopy(model)
    with torch.no_grad():
        before = other(input_ids=IDS).logits
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(other(input_ids=IDS).logits, before)


def test_without_its_adapters_the_model_is_the_frozen_one() -> None:
    model = finished(Method.LORA)
    with torch.no_grad():
        before = model(input_ids=IDS).logits
        train_b(model)
        assert not torch.equal(model(input_ids=IDS).logits, before)
        with model.disable_adapter():
            assert torch.equal(model(input_ids=IDS).logits, before)


def train_b(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.fill_(0.1)


# Inputs that layers share


CASTS_OF_INPUTS = 8
"""Of two layers: queries, keys and values have the same input, gates and what they gate too."""


@pytest.mark.parametrize("folded", [True, False], ids=["folded", "peft's"])
@pytest.mark.parametrize("checkpointing", [True, False], ids=["recomputed", "kept"])
def test_an_input_is_cast_once(
    monkeypatch: pytest.MonkeyPatch, folded: bool, checkpointing: bool
) -> None:
    model = finished(Method.LORA, fused_lora=folded, checkpointing=checkpointing)
    model.enable_input_require_grads()
    calls = count_casts(monkeypatch)
    loss = model(input_ids=IDS, labels=IDS).loss
    assert len(calls) == CASTS_OF_INPUTS
    loss.backward()
    assert len(calls) == (1 + checkpointing) * CASTS_OF_INPUTS + NUM_LINEARS


def test_trained_weights_are_cast_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = finished(Method.FULL)
    calls = count_casts(monkeypatch)
    model(input_ids=IDS, labels=IDS)
    assert len(calls) == CASTS_OF_INPUTS + NUM_LINEARS


def test_columns_of_an_input_are_cast_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside those of every weight, and of every gradient that comes to a layer. Not where layers
    are recomputed: each product is then handed a tensor of its own."""
    model = finished(Method.FULL)
    calls = count_casts(monkeypatch, "cast_columns")
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert len(calls) == CASTS_OF_INPUTS + 2 * NUM_LINEARS


def count_casts(monkeypatch: pytest.MonkeyPatch, name: str = "cast_rows") -> list[torch.Size]:
    """Shapes of what is cast in this way from now on."""
    calls = []
    cast = getattr(fp8, name)

    def spy(x: Tensor) -> Any:
        calls.append(x.shape)
        return cast(x)

    for module in (fp8, fp8):
        monkeypatch.setattr(module, name, spy)
    return calls


@pytest.mark.parametrize("checkpointing", [True, False], ids=["recomputed", "kept"])
@pytest.mark.parametrize("method", [Method.FULL, Method.LORA])
def test_shared_casts_change_nothing(
    monkeypatch: pytest.MonkeyPatch, method: Method, checkpointing: bool
) -> None:
    """Over several batches: a cast of another tensor would show."""
    found = gradients_of_batches(method, checkpointing=checkpointing)
    monkeypatch.setattr(fp8._CastCache, "keep", lambda *_: None)
    wanted = gradients_of_batches(method, checkpointing=checkpointing)
    assert len(found) > NUM_LINEARS
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def gradients_of_batches(method: Method, *, checkpointing: bool) -> dict[str, Tensor]:
    model = finished(method, checkpointing=checkpointing)
    for step in range(3):
        ids = IDS + step
        model(input_ids=ids, labels=ids).loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("method", [Method.FULL, Method.LORA])
def test_nothing_is_kept_when_the_layers_are_done(method: Method) -> None:
    """The loss is computed where memory is scarcest."""
    model = finished(method)
    seen = []
    model.lm_head.register_forward_pre_hook(lambda *_: seen.append(fp8._kept_rows._entry))
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    assert seen == [None]
    assert fp8._kept_rows._entry is fp8._kept_columns._entry is None
