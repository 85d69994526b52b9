"""The module that is trained: a loaded model prepared as the plan says, and its objective."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from inspect import signature
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from tightfit.core.errors import SetupError
from tightfit.core.objectives import Objective as ObjectiveKind
from tightfit.core.optimizers import Optimizer as OptimizerKind
from tightfit.core.settings import Loss, Method
from tightfit.core.strategy import Strategy, Training
from tightfit.estimation.activations import NUM_LOSS_CHUNKS
from tightfit.estimation.weights import can_fuse_trained_projections, uses_augmented_weights
from tightfit.models.families.registry import find_family
from tightfit.runtime.adapters import add_adapters
from tightfit.runtime.attention import check_packable
from tightfit.runtime.embedding_adapters import head_weight
from tightfit.runtime.kernels.fp8 import use_fp8
from tightfit.runtime.kernels.fused_lora import (
    fuse_lora,
    fuse_lora_projections,
    fuse_trained_projections,
)
from tightfit.runtime.kernels.liger import apply_fused_kernels
from tightfit.runtime.layers import (
    decoder_layers,
    dequantize_base,
    dequantize_deferred,
    find_decoder,
)
from tightfit.runtime.packed_masks import hand_positions_to_masks
from tightfit.training.batches import IGNORED
from tightfit.training.context_parallel import find_context, share_rows
from tightfit.training.recompute import recompute_as_planned
from tightfit.training.routing import Routing, mark_tokens

_LOGIT_CHANGES = (
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "mup_width_multiplier",
    "output_multiplier_scale",
)
"""Config fields that scale the head's output; such families use their own forward."""


class Predictions(NamedTuple):
    """Of the tokens with loss."""

    values: Tensor
    """Hidden states; logits, where the model changes what its head puts out."""
    head: Any
    """None where `values` are logits."""
    softcap: float | None
    balance: Tensor | None
    """A mixture's router loss."""

    def logits(self) -> Tensor:
        if self.head is None:
            return self.values
        logits: Tensor = self.head(self.values)
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


class Objective(nn.Module):
    """The summed cross-entropy of a batch's trained tokens.

    The head runs on trained positions only: prompts and padding cost no logits. A sum, not a mean:
    micro-batches and ranks add up to the loss of the whole step, each token with the same weight.
    DDP and FSDP wrap this module, so head and loss run inside the wrapped forward.

    In training mode a mixture's router loss is added, and its experts' tokens are counted.
    """

    def __init__(
        self,
        model: Any,
        loss: Loss,
        *,
        loss_chunk_factor: int = 1,
        routing: Routing | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.routing = routing
        self._loss = loss
        self._loss_chunk_factor = loss_chunk_factor

    @classmethod
    def from_strategy(cls, model: Any, strategy: Strategy) -> Objective:
        return cls(
            model,
            strategy.loss,
            loss_chunk_factor=strategy.loss_chunk_factor,
            routing=Routing.attach(model, strategy),
        )

    def forward(self, labels: Tensor, lengths: Tensor | None = None, **inputs: Tensor) -> Tensor:
        """`lengths`: of each sequence without its padding; None where none is padded."""
        # The transformers model inside peft's.
        model = self.model
        model = model.get_base_model() if hasattr(model, "peft_config") else model
        if model.config.is_encoder_decoder:
            decoder_ids = model.prepare_decoder_input_ids_from_labels(labels)
            logits = self.model(**inputs, decoder_input_ids=decoder_ids, use_cache=False).logits
            return self._sum_losses(logits[labels != IGNORED], labels[labels != IGNORED])
        wanted = labels[:, 1:] != IGNORED
        targets = labels[:, 1:][wanted]
        # A rank that has no rows left repeats some without loss.
        is_counted = len(targets) > 0
        context = find_context(model)
        if context is not None:
            labels, following, lengths, inputs = context.cut_batch(labels, lengths, inputs)
            wanted = following != IGNORED
            targets = following[wanted]
        found = self._predict(self.model, wanted, labels, lengths, inputs, is_counted=is_counted)
        if self._loss is Loss.FUSED and found.head is not None:
            loss = _fused_loss(
                found.head, found.values, targets, found.softcap, self._loss_chunk_factor
            )
        else:
            loss = self._sum_losses(found.logits(), targets)
        if self.routing is not None and found.balance is not None:
            loss = self.routing.add_loss(loss, found.balance, len(targets))
        return loss

    def _predict(
        self,
        module: Any,
        wanted: Tensor,
        labels: Tensor,
        lengths: Tensor | None,
        inputs: dict[str, Tensor],
        *,
        is_counted: bool,
    ) -> Predictions:
        """What `module` predicts at the positions before the `wanted` tokens."""
        model = module.get_base_model() if hasattr(module, "peft_config") else module
        is_plain = has_plain_head(model)
        call = getattr(model, model.base_model_prefix) if is_plain else module
        if self.routing is None or not (self.training and torch.is_grad_enabled()):
            outputs, balance = call(**inputs, use_cache=False), None
        else:
            is_token = inputs.get("attention_mask", mark_tokens(labels, lengths))
            outputs, balance = self.routing.run(
                call, inputs, is_token, is_counted=is_counted, context=find_context(model)
            )
        # All but the last, which predicts nothing; all of a slice of a row.
        num_places = wanted.shape[1]
        if not is_plain:
            return Predictions(outputs.logits[:, :num_places][wanted], None, None, balance)
        softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        hidden = outputs.last_hidden_state[:, :num_places][wanted]
        return Predictions(hidden, model.get_output_embeddings(), softcap, balance)

    def _sum_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        if not len(targets):
            # No trained token, but every parameter must take part in the backward pass.
            return logits.float().sum() * 0.0
        if self._loss is Loss.KERNEL:
            from liger_kernel.transformers import LigerCrossEntropyLoss

            summed: Tensor = LigerCrossEntropyLoss(reduction="sum")(logits.float(), targets)
            return summed
        if self._loss is Loss.CHUNKED:
            # The upcast to fp32 takes one chunk at a time.
            pairs = zip(logits.chunk(NUM_LOSS_CHUNKS), targets.chunk(NUM_LOSS_CHUNKS), strict=True)
            losses = [cross_entropy(part.float(), own, reduction="sum") for part, own in pairs]
            return torch.stack(losses).sum()
        return cross_entropy(logits.float(), targets, reduction="sum")


def find_routing(module: nn.Module) -> Routing | None:
    """Of the Objective inside what DDP or DeepSpeed wrapped."""
    return next((part.routing for part in module.modules() if isinstance(part, Objective)), None)


def has_plain_head(model: Any) -> bool:
    """Whether logits are the head's output on the backbone's, apart from a softcap."""
    config = model.config.get_text_config()  # of a model with a vision part too
    changed = any(getattr(config, name, None) not in (None, 1, 1.0) for name in _LOGIT_CHANGES)
    backbone = getattr(model, model.base_model_prefix, None)
    return not changed and backbone is not None and backbone is not model


def _fused_loss(
    head: Any, hidden: Tensor, targets: Tensor, softcap: float | None, loss_chunk_factor: int
) -> Tensor:
    """Liger's head and loss in one kernel, chunk by chunk, without the full logits."""
    weight = head_weight(head)
    if not len(targets):
        nothing: Tensor = (weight.sum() + hidden.sum()) * 0.0
        return nothing
    from liger_kernel.transformers import functional

    bias = getattr(head, "bias", None)
    chunked = functional.liger_fused_linear_cross_entropy
    # Older versions of Liger have a fixed chunk size, and then need less memory than planned.
    if loss_chunk_factor > 1 and "chunk_mem_const" in signature(chunked).parameters:
        total: Tensor = chunked(
            hidden,
            weight,
            targets,
            bias,
            reduction="sum",
            softcap=softcap,
            chunk_mem_const=loss_chunk_factor,
        )
        return total
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(reduction="sum", softcap=softcap)
    summed: Tensor = loss(weight, hidden, targets, bias)
    return summed


# Preparation: kernels, adapters, compilation, activation checkpointing


def prepare_model(model: Any, strategy: Strategy, training: Training) -> Any:
    """Apply the plan's kernels, adapters and checkpointing; on any device, meta included.

    Adapters are initialized from the run's seed, independent of earlier random numbers. The order
    matters: Liger's kernels before adapters, adapters before fp8, both before fused LoRA.
    """
    if strategy.packing:
        check_packable(model)
        if not find_family(model.config.model_type).mask_reads_positions:
            hand_positions_to_masks(model)
    share_rows(model, strategy)
    if strategy.fused_kernels:
        apply_fused_kernels(model)
    if strategy.dequantized_base:
        dequantize_base(model, is_deferred=strategy.stores_fp8)
    if strategy.objective is not ObjectiveKind.SFT:
        disable_dropout(model)
    if strategy.method is Method.LORA:
        torch.manual_seed(training.seed)
        model = add_adapters(model, strategy, training)
    if strategy.has_fp8:
        use_fp8(model, is_backward_alone=strategy.fp8_gradients)
        dequantize_deferred(model)
    if strategy.fused_lora:
        fuse_lora(model)
    if uses_augmented_weights(model.config.model_type, strategy):
        fuse_lora_projections(model)
    if can_fuse_trained_projections(model.config.model_type, strategy):
        fuse_trained_projections(model)
    # In eval mode bitsandbytes repacks weights into a layout without gradients.
    model.train()
    if strategy.compile:
        # Layer by layer: all share one graph, and wrappers stay outside of it.
        for layer in decoder_layers(find_decoder(model)):
            # A bound method: a deep copy of the model binds it to the copied layer.
            forward: Any = layer.forward
            layer.forward = MethodType(torch.compile(forward.__func__), layer)
    recompute_as_planned(model, strategy)
    return model


def disable_dropout(model: nn.Module) -> None:
    """As trl does for preferences: a log-ratio compares the model with its reference, not one
    dropout mask with another. Adapters, added afterwards, keep theirs."""
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        # OPT, BLOOM and StarCoder2 drop by a number of their own (transformers 5.22).
        for name, value in vars(part).items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]], kind: OptimizerKind, training: Training
) -> Optimizer:
    """The optimizer of all trained parameters, without weight decay for vectors (norms, biases)."""
    record = kind.record
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for _, parameter in named_parameters:
        if parameter.requires_grad:
            # A parameter partitioned by ZeRO-3 is flat, with its shape in `ds_shape`.
            shape = getattr(parameter, "ds_shape", parameter.shape)
            (matrices if len(shape) >= 2 else vectors).append(parameter)
    groups = [
        {"params": parameters, "weight_decay": decay}
        for parameters, decay in ((matrices, training.weight_decay), (vectors, 0.0))
        if parameters
    ]
    module, _, name = record.factory.partition(":")
    try:
        factory: Any = getattr(import_module(module), name)
    except ImportError as error:
        package = record.package or module
        raise SetupError(
            f"The plan's optimizer {kind.value} needs {package}, which is not installed.",
            remedy=f"pip install {package}, or --set optimizer=adamw",
        ) from error
    made: Optimizer = factory(groups, lr=training.learning_rate, **record.options)
    return made
