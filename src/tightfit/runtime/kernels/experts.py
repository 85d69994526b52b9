"""A layer's experts as two grouped products, each token's row beside those of its expert.

transformers' `grouped_mm` keeps the gathered rows, both products and each operation between them
for the backward pass. Here the first product alone is kept: what lies between the products is one
kernel, computed again, and the router's gradient is taken before the second product, where rows are
narrower. Frozen experts get no gradients, and nothing is kept for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from tightfit.runtime.kernels.gating import CLAMP_LIMIT, CLAMP_SLOPE, Gating

if TYPE_CHECKING:
    from transformers import PretrainedConfig

EXPERTS = "tightfit_experts"
"""The name that transformers knows it by."""
PACKED = "packed_experts"
"""Attribute of a module with experts in nf4: `runtime/packed_experts.py` sets it."""
EXPERT_MATRICES = ("gate_up_proj", "down_proj")
"""Parameters of all experts of a layer, as transformers names them."""
ADAPTED = "adapters_of_experts"
"""Attribute of a module whose experts have adapters: peft's wrappers, by parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Which rows go to which expert: `pair` counts (token, choice), `place` rows by expert."""

    chosen: Tensor
    """[tokens, choices]: the expert of each pair."""
    experts: Tensor
    """[pairs]: the expert of each place, in ascending order."""
    tokens: Tensor
    """[pairs]: the token of each place."""
    places: Tensor
    """[tokens, choices]: the place of each pair."""
    pairs: Tensor
    """[pairs]: the pair of each place."""
    ends: Tensor
    """[experts], int32: where the places of each expert end."""


def sort_by_expert(chosen: Tensor, num_experts: int) -> Routing:
    """The routing of `[tokens, choices]` chosen experts; the host does not wait for it."""
    num_choices = chosen.shape[1]
    experts, pairs = torch.sort(chosen.reshape(-1), stable=True)
    places = torch.empty_like(pairs)
    places[pairs] = torch.arange(len(pairs), device=pairs.device)
    numbers = torch.arange(num_experts, device=pairs.device, dtype=experts.dtype)
    return Routing(
        chosen=chosen,
        experts=experts,
        tokens=pairs // num_choices,
        places=places.view(chosen.shape),
        pairs=pairs,
        ends=torch.searchsorted(experts, numbers, right=True, out_int32=True),
    )


_ALIGNMENT = 8


def multiply_groups(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Each group of rows times its own matrix `[experts, in, out]`."""
    if _has_grouped_kernel(rows, matrices.shape[-1]):
        return torch.nn.functional.grouped_mm(rows, matrices, offs=ends)
    from transformers.integrations import moe  # noqa: F401  (registers the operation)

    made: Tensor = torch.ops.transformers.grouped_mm_fallback(rows, matrices, ends)
    return made


def multiply_within_groups(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """`left[group].T @ right[group]` of each group: the gradient of its matrix."""
    if _has_grouped_kernel(left, right.shape[-1]):
        return torch.nn.functional.grouped_mm(left.t(), right, offs=ends)
    made = left.new_zeros(len(ends), left.shape[1], right.shape[1])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(left[start:end].t(), right[start:end], out=made[expert])
        start = end
    return made


def _has_grouped_kernel(rows: Tensor, width: int) -> bool:
    """torch has the kernel from compute capability 8.0 on, in bf16, for rows of whole 16 bytes."""
    if rows.shape[1] % _ALIGNMENT or width % _ALIGNMENT:
        return False
    if not hasattr(torch.nn.functional, "grouped_mm") or rows.dtype is not torch.bfloat16:
        return False
    return not rows.is_cuda or torch.cuda.get_device_capability(rows.device) >= (8, 0)


class Adapter(NamedTuple):
    """LoRA's two matrices for each expert, its scale in the second."""

    first: Tensor
    """[experts, in, rank]."""
    second: Tensor
    """[experts, rank, out]."""

    def add_to(self, product: Tensor, rows: Tensor, ends: Tensor) -> None:
        between = multiply_groups(rows, self.first, ends)
        product += multiply_groups(between, self.second, ends)

    def pull(self, gradient: Tensor, of_rows: Tensor | None, ends: Tensor) -> Tensor:
        """The gradient of what lies between both matrices; its part in that of the rows is added to
        `of_rows`."""
        between = multiply_groups(gradient, self.second.transpose(-2, -1), ends)
        if of_rows is not None:
            of_rows += multiply_groups(between, self.first.transpose(-2, -1), ends)
        return between

    def gradients(
        self, rows: Tensor, gradient: Tensor, between: Tensor, ends: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Of both matrices; `between` is what `pull` returned."""
        first = multiply_within_groups(rows, between, ends)
        narrow = multiply_groups(rows, self.first, ends)
        return first, multiply_within_groups(narrow, gradient, ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a layer's experts are called: what is no tensor with a gradient."""

    routing: Routing
    gating: Gating
    unpack_gate_up: Callable[[Tensor], Tensor] | None = None
    """Makes matrices `[experts, in, out]` of a parameter's nf4 codes."""
    unpack_down: Callable[[Tensor], Tensor] | None = None

    def read_gate_up(self, stored: Tensor) -> Tensor:
        return stored if self.unpack_gate_up is None else self.unpack_gate_up(stored)

    def read_down(self, stored: Tensor) -> Tensor:
        return stored if self.unpack_down is None else self.unpack_down(stored)


class _Experts(torch.autograd.Function):
    """Both products of all experts, and what is between them.

    Codes are kept as such, and unpacked for each product: one of both matrices is there at a time.
    """

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917  (tensors that get gradients are arguments)
        ctx: Any,
        hidden: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        layout: Layout,
        *adapters: Tensor | None,
    ) -> Tensor:
        """`adapters`: the matrices of both products' adapters, where there are any."""
        ctx.layout = layout
        routing, ends = layout.routing, layout.routing.ends
        of_inner, of_outer = _read_adapters(adapters)
        rows = hidden[routing.tokens]
        inner = multiply_groups(rows, layout.read_gate_up(gate_up), ends)
        if of_inner is not None:
            of_inner.add_to(inner, rows, ends)
        del rows
        activated = apply_gate(inner, gate_up_bias, routing.experts, layout.gating)
        outer = multiply_groups(activated, layout.read_down(down), ends)
        if of_outer is not None:
            of_outer.add_to(outer, activated, ends)
        biases = (gate_up_bias, down_bias)
        ctx.save_for_backward(hidden, weights, inner, gate_up, down, *biases, *adapters)
        return combine(outer, routing, weights, down_bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        hidden, weights, inner, gate_up, down, gate_up_bias, down_bias, *adapters = (
            ctx.saved_tensors
        )
        layout, needs = ctx.layout, ctx.needs_input_grad
        routing, ends = layout.routing, layout.routing.ends
        of_inner, of_outer = _read_adapters(adapters)
        found: list[Tensor | None] = [None] * len(needs)
        gradient = gradients[0].contiguous()
        # Unweighted: its product with what was activated is the router's gradient.
        rows = gradient[routing.tokens]
        narrow = multiply_groups(rows, layout.read_down(down).transpose(-2, -1), ends)
        between = None if of_outer is None else of_outer.pull(rows, narrow, ends)
        weight_of = weights.reshape(-1)[routing.pairs]
        grad_inner, grad_weight, activated = gate_backward(
            (inner, gate_up_bias, narrow, weight_of, routing.experts),
            layout.gating,
            needs_values=needs[3] or of_outer is not None,
        )
        if activated is not None and needs[3]:
            found[3] = multiply_within_groups(activated, rows, ends)
        if activated is not None and of_outer is not None and between is not None:
            found[9], found[10] = of_outer.gradients(activated, rows, between, ends)
        if needs[5]:
            found[5] = _sum_rows(rows * weight_of[:, None], routing)
        del narrow, activated, between
        grad_weights = grad_weight[routing.places.reshape(-1)].view(weights.shape)
        if down_bias is not None:
            grad_weights = grad_weights + (gradient @ down_bias.t()).gather(1, routing.chosen)
        found[1] = grad_weights.to(weights.dtype)
        if needs[2]:
            found[2] = multiply_within_groups(hidden[routing.tokens], grad_inner, ends)
        if needs[4]:
            found[4] = _sum_rows(grad_inner, routing)
        del rows
        of_rows = None
        if needs[0]:
            matrices = layout.read_gate_up(gate_up).transpose(-2, -1)
            of_rows = multiply_groups(grad_inner, matrices, ends)
            del matrices
        if of_inner is not None:
            between = of_inner.pull(grad_inner, of_rows, ends)
            inputs = hidden[routing.tokens]
            found[7], found[8] = of_inner.gradients(inputs, grad_inner, between, ends)
            del inputs
        del grad_inner
        if of_rows is not None:
            found[0] = combine(of_rows, routing)
        return tuple(found)


def _read_adapters(matrices: Sequence[Tensor | None]) -> tuple[Adapter | None, Adapter | None]:
    first, second, third, fourth = matrices
    return (
        None if first is None or second is None else Adapter(first, second),
        None if third is None or fourth is None else Adapter(third, fourth),
    )


def _sum_rows(rows: Tensor, routing: Routing) -> Tensor:
    total = torch.zeros(len(routing.ends), rows.shape[1], dtype=torch.float32, device=rows.device)
    return total.index_add_(0, routing.experts, rows.float()).to(rows.dtype)


# Between the products


def _runs_kernels(x: Tensor) -> bool:
    return x.is_cuda


def apply_gate(inner: Tensor, bias: Tensor | None, experts: Tensor, gating: Gating) -> Tensor:
    """The gated activation of the first product, to which its expert's bias is added."""
    if _runs_kernels(inner):
        from tightfit.runtime.kernels import experts_triton

        return experts_triton.apply_gate(inner, bias, experts, gating)
    return _activate(_add_bias(inner, bias, experts), gating).to(inner.dtype)


def gate_backward(
    saved: tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor],
    gating: Gating,
    *,
    needs_values: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """From the first product, its bias, the gradient of what was activated without the router's
    weight, that weight, and the experts: the gradient of the first product, that of the weight,
    and what was activated times the weight."""
    inner, bias, narrow, weight, experts = saved
    if _runs_kernels(inner):
        from tightfit.runtime.kernels import experts_triton

        return experts_triton.gate_backward(saved, gating, needs_values=needs_values)
    with torch.enable_grad():
        wide = _add_bias(inner, bias, experts).detach().requires_grad_()
        activated = _activate(wide, gating)
    activated.backward(narrow.float() * weight.float()[:, None])  # type: ignore[no-untyped-call]
    activated = activated.detach()
    grad_weight = (activated * narrow.float()).sum(-1)
    values = (activated * weight.float()[:, None]).to(inner.dtype) if needs_values else None
    assert wide.grad is not None
    return wide.grad.to(inner.dtype), grad_weight, values


def combine(
    rows: Tensor, routing: Routing, weights: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """The sum of each token's rows, times its weights, its experts' bias added before."""
    if _runs_kernels(rows):
        from tightfit.runtime.kernels import experts_triton

        return experts_triton.combine(rows, routing.places, routing.chosen, weights, bias)
    found = rows[routing.places].float()
    if bias is not None:
        found = found + bias[routing.chosen].float()
    if weights is not None:
        found = found * weights.float()[..., None]
    return found.sum(1).to(rows.dtype)


def _add_bias(inner: Tensor, bias: Tensor | None, experts: Tensor) -> Tensor:
    return inner.float() if bias is None else inner.float() + bias[experts].float()


def _activate(inner: Tensor, gating: Gating) -> Tensor:
    if gating is Gating.CLAMPED:
        gate = inner[:, ::2].clamp(max=CLAMP_LIMIT)
        up = inner[:, 1::2].clamp(-CLAMP_LIMIT, CLAMP_LIMIT)
        return (up + 1) * gate * torch.sigmoid(gate * CLAMP_SLOPE)
    gate, up = inner.chunk(2, dim=-1)
    if gating is Gating.SILU:
        return nn.functional.silu(gate) * up
    return nn.functional.gelu(gate, approximate="tanh") * up


# In place of transformers' own


def run_experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The forward of a family's experts, as transformers calls it."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    gating = find_gating(module)
    is_own = not {PACKED, ADAPTED}.isdisjoint(vars(module))  # transformers' would read codes
    if gating is None or (torch.compiler.is_compiling() and not is_own):
        usual: Any = grouped_mm_experts_forward
        made: Tensor = usual(module, hidden, chosen, weights)
        return made
    outside_graphs: Any = torch.compiler.disable  # not annotated
    run: Any = outside_graphs(_run) if is_own else _run
    summed: Tensor = run(module, hidden, chosen, weights, gating)
    return summed


def _run(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor, gating: Gating) -> Tensor:
    dtype = hidden.dtype if PACKED in vars(module) else module.gate_up_proj.dtype
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    adapters = [
        *_find_adapter(module, "gate_up_proj", dtype),
        *_find_adapter(module, "down_proj", dtype),
    ]
    biases: list[Tensor | None] = [None, None]
    if module.has_bias:
        biases = [module.gate_up_proj_bias, module.down_proj_bias]
    num_experts, picked = module.num_experts, None
    if _reads_few(module, chosen):
        # Each choice is an expert of its own, which the host can count.
        picked, num_experts = chosen.reshape(-1), chosen.numel()
        chosen = torch.arange(num_experts, device=chosen.device).view(chosen.shape)
        adapters = [part if part is None else part[picked] for part in adapters]
        biases = [part if part is None else part[picked] for part in biases]
    gate_up, unpack_gate_up = _prepare(module, "gate_up_proj", dtype, picked)
    down, unpack_down = _prepare(module, "down_proj", dtype, picked)
    layout = Layout(
        routing=sort_by_expert(chosen, num_experts),
        gating=gating,
        unpack_gate_up=unpack_gate_up,
        unpack_down=unpack_down,
    )
    apply: Any = _Experts.apply
    summed: Tensor = apply(
        hidden.to(dtype),
        weights,
        gate_up,
        down,
        *(bias if bias is None else bias.to(dtype) for bias in biases),
        layout,
        *adapters,
    )
    return summed.to(hidden.dtype)


def _reads_few(module: Any, chosen: Tensor) -> bool:
    """Whether unpacking a matrix for each choice is less than unpacking all: in generation."""
    return (
        PACKED in vars(module)
        and not torch.is_grad_enabled()
        and 2 * chosen.numel() <= module.num_experts
    )


def _prepare(
    module: Any, name: str, dtype: torch.dtype, picked: Tensor | None
) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
    """The matrices `[experts, in, out]` of a parameter, or its codes and what unpacks them: all, or
    those of the experts that are `picked`."""

    def orient(values: Tensor) -> Tensor:
        values = values.to(dtype)
        return values if module.is_transposed else values.transpose(-2, -1)

    stored = getattr(module, name)
    packed = vars(module).get(PACKED, {}).get(name)
    if packed is None:
        return orient(stored), None
    if picked is not None:
        return stored, lambda codes: orient(packed.unpack_chosen(codes, picked))
    return stored, lambda codes: orient(packed.unpack(codes))


def _find_adapter(
    module: Any, name: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Both matrices of peft's adapter of this parameter, where it has an active one."""
    wrapper = vars(module).get(ADAPTED, {}).get(name)
    if wrapper is None or wrapper.disable_adapters or wrapper.merged:
        return None, None
    [active] = wrapper.active_adapters
    first, second = wrapper.lora_A[active].weight, wrapper.lora_B[active].weight
    num_experts = module.num_experts
    # Of all experts: [experts * rank, in], and [out, rank * experts] with the experts in between.
    first = first.view(num_experts, -1, first.shape[1]).transpose(1, 2)
    second = second.view(second.shape[0], -1, num_experts).permute(2, 1, 0)
    scaled = second.to(dtype) * wrapper.scaling[active]
    return first.to(dtype), scaled.contiguous()


def group_adapters(model: nn.Module) -> None:
    """Let experts multiply with peft's adapters of them as grouped products.

    peft adds each adapter's product to the weights of all experts, in every pass.
    """
    for module in model.modules():
        wrapper: Any = module
        name = getattr(wrapper, "parameter_name", None)
        if name not in EXPERT_MATRICES or not runs_here(experts := wrapper.get_base_layer()):
            continue
        vars(experts).setdefault(ADAPTED, {})[name] = wrapper
        wrapper.forward = partial(_pass_on, wrapper)


def _pass_on(wrapper: Any, *args: Any, **options: Any) -> Any:
    return wrapper.base_layer(*args, **options)


def runs_here(module: Any) -> bool:
    """Whether these are experts that `run_experts` multiplies itself."""
    is_ours = getattr(module.config, "_experts_implementation", None) == EXPERTS
    return is_ours and find_gating(module) is not None


def find_gating(module: Any) -> Gating | None:
    """What this family's experts do between the products; None for what is not known here."""
    if not module.has_gate or getattr(module, "has_post_expert_norm", False):
        return None
    own = type(module)._apply_gate
    if own.__module__.endswith("modeling_gpt_oss"):
        is_usual = (module.limit, module.alpha) == (CLAMP_LIMIT, CLAMP_SLOPE)
        return Gating.CLAMPED if is_usual else None
    if own.__name__ != "_default_apply_gate" or not module.is_concatenated:
        return None
    name = getattr(module.act_fn, "__name__", type(module.act_fn).__name__)
    if name in ("silu", "SiLU", "SiLUActivation"):
        return Gating.SILU
    return Gating.GELU_TANH if name == "GELUTanh" else None


def use_grouped_experts(config: PretrainedConfig) -> None:
    """The experts of models made from this config run here, where it has any."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(EXPERTS, run_experts)
    config._experts_implementation = EXPERTS
