"""Other trainers: one record each, for estimates and plans of jobs that they will run.

A record says what its trainer does where the user does not say otherwise, what it lacks, and where
each of that is written. Light on purpose: the command line lists the names.
"""

# ruff: noqa: ARG001, ARG005  every condition takes the strategy and the model type

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from tightfit.core.attention import Attention
from tightfit.core.dtypes import Dtype
from tightfit.core.errors import UsageError
from tightfit.core.objectives import Objective
from tightfit.core.optimizers import Optimizer
from tightfit.core.settings import Loss, Method, Sharding
from tightfit.core.text import did_you_mean, shorten

if TYPE_CHECKING:
    from tightfit.core.strategy import Strategy

Settings = Mapping[str, object]


class AsIn(NamedTuple):
    """The value that another setting has."""

    setting: str


def _always(s: Strategy, model_type: str) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One thing that a trainer does, and where that is written."""

    source: str
    sets: Settings = field(default_factory=dict)
    """Settings of the strategy. What the user states wins."""
    is_choice: bool = False
    """Its own configuration has a word for these settings: the planner may choose another value."""
    quirks: tuple[str, ...] = ()
    """Of `core.strategy.Quirks`."""
    model: Settings = field(default_factory=dict)
    """What its own modelling code does otherwise than the model's `config.json` says."""
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """All that it offers of a setting."""
    allows: tuple[str, ...] = ()
    """Rules of `planning/rules.py` that are ours and not this trainer's."""
    when: Callable[[Strategy, str], bool] = _always
    """Asked with the strategy so far, and the model's type."""
    since: str = ""
    until: str = ""
    """Versions of the trainer: from the first, below the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """Everything the program knows of one trainer."""

    name: str
    title: str
    latest: str
    """The version that was looked at, and is meant where none is stated."""
    earliest: str = ""
    """The earliest that was looked at, where that is not the same one."""
    facts: tuple[Fact, ...]
    objectives: tuple[Objective, ...] = (Objective.SFT,)
    """Those that were looked at."""
    config: str = ""
    """`module:function` that writes a plan as its own configuration."""


class TrainerVersion(NamedTuple):
    """A trainer at one version."""

    trainer: Trainer
    version: str

    @property
    def spelling(self) -> str:
        return f"{self.trainer.name}@{self.version}"

    @property
    def title(self) -> str:
        return f"{self.trainer.title} {self.version}"

    @property
    def reservation(self) -> str | None:
        """What to doubt where this version lies outside those that were looked at."""
        first, last = self.trainer.earliest or self.trainer.latest, self.trainer.latest
        read = _read_version(self.version)
        if _read_version(first) <= read <= _read_version(last):
            return None
        nearest = first if read < _read_version(first) else last
        return f"{self.title} was not looked at: it is taken to do as {nearest} does"

    @property
    def facts(self) -> tuple[Fact, ...]:
        """Those that hold at this version."""
        return _list_facts(self.spelling)

    def follow(
        self,
        strategy: Strategy,
        model_type: str,
        *,
        given: Collection[str],
        is_planning: bool = False,
    ) -> Strategy:
        """The strategy as this trainer runs it; settings that are `given` stay.

        `is_planning`: of its choices, only those count that the planner does not make.
        """
        quirks = {"plain_modelling": True}
        for fact in self.facts:
            if fact.when(strategy, model_type):
                quirks |= dict.fromkeys(fact.quirks, True)
                if not (fact.is_choice and is_planning):
                    update = {name: value for name, value in fact.sets.items() if name not in given}
                    strategy = strategy.model_copy(update=_resolve(update, strategy))
        held = strategy.quirks.model_copy(update=quirks)
        return strategy.model_copy(update={"trainer": self.spelling, "quirks": held})

    def list_model_changes(self, activation: str) -> dict[str, object]:
        """What its own modelling code changes in a model, by field of the model's spec."""
        return {
            name: value.get(activation, activation) if isinstance(value, dict) else value
            for fact in self.facts
            for name, value in fact.model.items()
        }

    def list_fixed(self) -> dict[str, object]:
        """Settings that it offers one value of."""
        return {
            name: values[0]
            for fact in self.facts
            for name, values in fact.only.items()
            if len(values) == 1 and fact.when is _always
        }

    def find_lacking(self, strategy: Strategy, model_type: str) -> str | None:
        """What the strategy asks of this trainer that it does not have, as a reason."""
        known = self.trainer.objectives
        if strategy.objective not in known:
            has = ", ".join(one.value for one in known)
            return f"{self.title} was not looked at for {strategy.objective.value}, only for {has}"
        for fact in self.facts:
            for name, values in fact.only.items():
                wanted = getattr(strategy, name)
                if wanted not in values and fact.when(strategy, model_type):
                    has = ", ".join(_show(value) for value in values)
                    return f"{self.title} has no {name}={_show(wanted)}, only {has}"
        return None

    @property
    def allows(self) -> frozenset[str]:
        return frozenset(rule for fact in self.facts for rule in fact.allows)


def _resolve(update: Settings, strategy: Strategy) -> dict[str, Any]:
    return {
        name: getattr(strategy, value.setting) if isinstance(value, AsIn) else value
        for name, value in update.items()
    }


def _show(value: object) -> str:
    word = getattr(value, "value", value)
    return str(word).lower() if isinstance(word, bool) else str(word)


def find_trainer(spelling: str) -> TrainerVersion:
    """`trl`, or `trl@0.13` for an earlier version. UsageError where there is no such trainer."""
    name, at, version = spelling.strip().lower().partition("@")
    trainer = next((one for one in TRAINERS if one.name == name), None)
    if trainer is None:
        names = [one.name for one in TRAINERS]
        raise UsageError(
            f"`--trainer {shorten(spelling)}` is not known.{did_you_mean(name, names)}",
            remedy="--trainer " + "|".join(names),
        )
    if at and not re.fullmatch(r"\d+(\.\d+){0,3}", version):
        raise UsageError(
            f"`--trainer {shorten(spelling)}`: `{shorten(version)}` is no version number.",
            remedy=f"--trainer {name}@{trainer.latest}",
        )
    return TrainerVersion(trainer, version or trainer.latest)


@cache
def _list_facts(spelling: str) -> tuple[Fact, ...]:
    trainer, version = find_trainer(spelling)
    return tuple(fact for fact in trainer.facts if _holds(fact, version))


def _holds(fact: Fact, version: str) -> bool:
    read = _read_version(version)
    is_begun = not fact.since or read >= _read_version(fact.since)
    return is_begun and (not fact.until or read < _read_version(fact.until))


def _read_version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


# Conditions


def _is_full(s: Strategy, model_type: str) -> bool:
    return s.method is Method.FULL


def _is_lora(s: Strategy, model_type: str) -> bool:
    return s.method is Method.LORA


def _is_zero(s: Strategy, model_type: str) -> bool:
    return s.sharding.is_zero


def _is_one_gpu(s: Strategy, model_type: str) -> bool:
    return s.world_size == 1


def _is_quantized(s: Strategy, model_type: str) -> bool:
    return s.weights.is_quantized


def _is_bnb(s: Strategy, model_type: str) -> bool:
    return s.weights in (Dtype.NF4, Dtype.INT8)


def _is_bnb_unsharded(s: Strategy, model_type: str) -> bool:
    return _is_bnb(s, model_type) and not s.sharding.shards_weights


def _is_padded(s: Strategy, model_type: str) -> bool:
    return not s.packing


def _is_trained_16bit_in_fsdp(s: Strategy, model_type: str) -> bool:
    return s.method is Method.FULL and s.sharding.is_fsdp and s.autocast


# What several trainers have in common

_OURS = Fact(
    source="kernels and levers of tightfit's own",
    only={
        "fused_lora": (False,),
        "dequantized_base": (False,),
        "fp8": (False,),
        "fp8_gradients": (False,),
        "loss_chunk_factor": (1,),
        "recomputed_layers": (None,),
        "offloaded_inputs": (0,),
        "mlp_tiles": (1,),
    },
)
_HF_OPTIMIZERS = tuple(one for one in Optimizer if one.record.transformers_name is not None)
_HF_SHARDINGS = tuple(one for one in Sharding if one is not Sharding.FSDP_HYBRID)


def _share_hf(
    *, transformers_5: str, fused_adamw: str, padded_labels: str, bitsandbytes_0_43_2: str
) -> tuple[Fact, ...]:
    """What transformers' Trainer does under every trainer built on it.

    Each is the first version of that trainer with transformers 5, with torch's fused AdamW as its
    default, with a loss that shifts the labels and not the logits, and with bitsandbytes 0.43.2.
    """
    return (
        _OURS,
        Fact(
            source="transformers 5.22, training_args.py: OptimizerNames; torch_compile compiles "
            "the whole model",
            only={
                "optimizer": _HF_OPTIMIZERS,
                "sharding": _HF_SHARDINGS,
                "compile": (False,),
                "loss": (Loss.PLAIN, Loss.KERNEL, Loss.FUSED),
            },
        ),
        Fact(
            source="transformers 5.22, modeling_utils and sdpa_attention: the collator's mask is "
            "given to attention wherever a row is padded",
            quirks=("padding_mask",),
        ),
        Fact(
            source="transformers 5.22, optimization.py: Adafactor works in fp32",
            quirks=("wide_adafactor",),
        ),
        Fact(
            source="transformers 4.33, training_args.py: optim is adamw_torch, which is torch's "
            "foreach AdamW",
            sets={"optimizer": Optimizer.ADAMW_FOREACH},
            is_choice=True,
            until=fused_adamw,
        ),
        Fact(
            source="accelerate 0.24 and 1.15, accelerator.py: bf16 and fp16 mean autocast, without "
            "DeepSpeed, which casts the module",
            sets={"autocast": True},
            when=lambda s, m: not s.sharding.is_zero and s.compute is not Dtype.FP32,
        ),
        Fact(
            source="accelerate 0.24, accelerator.py:423; deepspeed, engine.py: the module is cast "
            "with its adapters, and FusedAdam steps fp32 copies",
            sets={"autocast": False, "adapter_dtype": AsIn("compute")},
            when=_is_zero,
        ),
        Fact(
            source="deepspeed, ops/adam/fused_adam.py",
            sets={"optimizer": Optimizer.ADAMW},
            is_choice=True,
            when=_is_zero,
        ),
        Fact(
            source="accelerate 1.0.1, accelerator.py:1577, and 1.15, fsdp_utils.py: under mixed "
            "precision FSDP keeps trained weights in fp32",
            sets={"weights": Dtype.FP32},
            when=_is_trained_16bit_in_fsdp,
        ),
        Fact(
            source="transformers 4, modeling_utils.py: gradient_checkpointing_enable takes torch's "
            "own default, and calls the FSDP-wrapped layer",
            quirks=("reentrant", "recomputes_shards"),
            until=transformers_5,
        ),
        Fact(
            source="accelerate, dataclasses.py: FSDP version 1 unless it is asked for 2",
            quirks=("flat_shards",),
            until=transformers_5,
        ),
        Fact(
            source="transformers 4, integrations/bitsandbytes.py: replaces subclasses of nn.Linear",
            quirks=("packs_subclasses",),
            until=transformers_5,
        ),
        Fact(
            source="transformers 4.48, loss_utils.py: cross entropy of a shifted copy of the "
            "logits",
            quirks=("keeps_logits",),
            until=padded_labels,
        ),
        Fact(
            source="transformers 4, modeling_gpt_bigcode.py and Qwen's modeling_qwen.py: cross "
            "entropy of 16-bit logits",
            quirks=("narrow_loss",),
            when=lambda s, m: m in ("qwen", "gpt_bigcode"),
            until=transformers_5,
        ),
        Fact(
            source="transformers 4, modeling_gpt_bigcode.py: the cache stays on",
            quirks=("use_cache",),
            when=lambda s, m: m == "gpt_bigcode",
            until=transformers_5,
        ),
        Fact(
            source="bitsandbytes issue 1270, gone in 0.43.2: MatMul4Bit keeps its input",
            quirks=("keeps_quantized_inputs",),
            until=bitsandbytes_0_43_2,
        ),
        Fact(
            source="torch.cuda.is_bf16_supported() counts emulation, and so does transformers",
            allows=("bf16-capability",),
            until=transformers_5,
        ),
    )


_PEFT_ADAPTERS = Fact(
    source="peft 0.5, lora/layer.py, and from 0.12 autocast_adapter_dtype=True: adapters are fp32",
    sets={"adapter_dtype": Dtype.FP32},
    when=lambda s, m: s.method is Method.LORA and not s.sharding.is_zero,
)
_PEFT_TARGETS = Fact(
    source="peft 0.21, utils/constants.py: target modules where none are named",
    sets={"lora_targets": ("q_proj", "v_proj")},
    is_choice=True,
    when=lambda s, m: (
        m in ("llama", "mistral", "mixtral", "gemma", "gemma2", "gemma3_text", "qwen2", "qwen3")
    ),
)
_SPLITS_QKV = ("llama", "mistral", "mixtral", "gemma", "gemma2", "phi", "qwen2", "qwen3")
_KBIT = "peft, utils/other.py prepare_model_for_kbit_training: all 16-bit parameters become fp32"

TRL = Trainer(
    name="trl",
    title="TRL",
    latest="1.16",
    earliest="0.4",
    # orpo and cpo are in trl.experimental, and hold all logits
    objectives=(Objective.SFT, Objective.DPO, Objective.IPO, Objective.KTO),
    config="tightfit.planning.trainer_configs:write_trl",
    facts=(
        *_share_hf(
            transformers_5="0.29",
            fused_adamw="0.22",
            padded_labels="0.16",
            bitsandbytes_0_43_2="0.9.6",
        ),
        Fact(
            source="trl 0.22, sft_config.py (PR 3510): gradient_checkpointing=True; before it, "
            "transformers' default",
            sets={"checkpointing": False},
            is_choice=True,
            until="0.22",
        ),
        Fact(
            source="trl 1.16, model_config.py: dtype is float32 unless it is stated",
            sets={"weights": Dtype.FP32},
            is_choice=True,
            when=lambda s, m: not s.weights.is_quantized,
            since="1.0",
        ),
        Fact(
            source="trl 1.16, model_config.py: use_bnb_nested_quant is off, and what is not "
            "quantized is loaded in dtype, float32",
            sets={"double_quant": False, "upcast_unquantized": True},
            is_choice=True,
            when=_is_bnb,
            since="1.0",
        ),
        Fact(
            source="trl 0.4.2 to 0.25, sft_trainer.py: " + _KBIT + "; not where FSDP or ZeRO-3 "
            "shards them",
            sets={"upcast_unquantized": True},
            when=_is_bnb_unsharded,
            until="0.26",
        ),
        _PEFT_ADAPTERS,
        Fact(
            source="trl 0.26 (PR 4577) to 1.16, sft_trainer.py: adapters over quantized weights "
            "are bf16",
            sets={"adapter_dtype": Dtype.BF16},
            when=lambda s, m: _is_lora(s, m) and _is_bnb(s, m),
            since="0.26",
        ),
        Fact(
            source="trl 1.16, model_config.py: lora_r 16, lora_dropout 0.05",
            sets={"lora_rank": 16, "lora_dropout": 0.05},
            is_choice=True,
            when=_is_lora,
            since="0.8",
        ),
        Fact(
            source="trl 0.4.2, peft 0.3: r 8 unless it is stated",
            sets={"lora_rank": 8},
            is_choice=True,
            when=_is_lora,
            until="0.8",
        ),
        _PEFT_TARGETS,
        Fact(
            source="trl 1.16, sft_config.py: max_length 1024; transformers, training_args.py: "
            "per_device_train_batch_size 8",
            sets={"seq_len": 1024, "micro_batch": 8},
            is_choice=True,
        ),
        Fact(
            source="trl 1.7 (PR 5846): chunked_nll, and 1.16, utils.py add_fused_lm_head: the loss "
            "is computed with the head, a chunk of tokens at a time",
            sets={"loss": Loss.FUSED},
            only={"loss": (Loss.FUSED,)},
            allows=("fused-loss-family", "cpu-loss"),
            since="1.7",
        ),
        Fact(
            source="trl 1.16, dpo_trainer.py and kto_trainer.py, _compute_loss: the trained model "
            "first; kernels/chunked_logprob.py: tiles of 4096 x 32768, fp32 gradients",
            quirks=("late_reference", "tiled_log_probs"),
            only={"packing": (False,)},
            allows=("reference-copy-sharded", "objective-zero3"),
            when=lambda s, m: s.objective is not Objective.SFT,
        ),
    ),
)

FMS = Trainer(
    name="fms-hf-tuning",
    title="fms-hf-tuning",
    latest="2.2",
    facts=(
        *(
            replace(fact, since="", until="")
            for fact in TRL.facts
            if _holds(fact, "0.13")  # its own pin of trl
        ),
        Fact(
            source="fms-acceleration, plugins/fused-ops-and-kernels and accelerated-peft: kernels "
            "for GPTBigCode too, and GPTQ's packed integers sharded as floats",
            allows=("fused-family", "fused-loss-family", "gptq-sharded"),
        ),
    ),
)

TRANSFORMERS = Trainer(
    name="transformers",
    title="transformers Trainer",
    latest="5.22",
    earliest="4.33",
    facts=(
        *_share_hf(
            transformers_5="5.0",
            fused_adamw="4.54",
            padded_labels="4.50",
            bitsandbytes_0_43_2="4.44",
        ),
        _PEFT_ADAPTERS,
        _PEFT_TARGETS,
        Fact(
            source="transformers 5.22, training_args.py: gradient_checkpointing is off, "
            "per_device_train_batch_size 8",
            sets={"checkpointing": False, "micro_batch": 8},
            is_choice=True,
        ),
        Fact(
            source="peft 0.21, lora/config.py: r 8",
            sets={"lora_rank": 8},
            is_choice=True,
            when=_is_lora,
        ),
    ),
)

MS_SWIFT = Trainer(
    name="ms-swift",
    title="ms-swift",
    latest="1.7",
    facts=(
        *_share_hf(
            transformers_5="4.0",
            fused_adamw="4.0",
            padded_labels="3.0",
            bitsandbytes_0_43_2="2.3",
        ),
        Fact(
            source="ms-swift 97e4d198b, llm/utils: pads to the batch's longest row, on torch 2.1 "
            "without expandable segments. TRL 1.16 on torch 2.11 with Alpaca's lengths does not "
            "keep outgrown blocks (benchmarks/results/h200_throughput.json)",
            quirks=("varying_lengths",),
            when=_is_padded,
        ),
        Fact(
            source="ms-swift 97e4d198b, swift/llm/tuner.py: never prepares for k-bit training, and "
            "peft of that time makes adapters in the base weights' dtype",
            sets={"adapter_dtype": AsIn("compute")},
            when=_is_lora,
        ),
        Fact(
            source="ms-swift 97e4d198b, fix_fp16_trainable_bug: GPTQ checkpoints are loaded in "
            "fp16, and their adapters are made fp32",
            sets={"compute": Dtype.FP16, "adapter_dtype": Dtype.FP32},
            when=lambda s, m: s.weights is Dtype.GPTQ4,
        ),
        Fact(
            source="ms-swift 97e4d198b, argument.py: lora_rank 8, lora_dropout_p 0.05",
            sets={"lora_rank": 8, "lora_dropout": 0.05},
            is_choice=True,
            when=_is_lora,
        ),
        Fact(
            source="ms-swift 97e4d198b, utils/model.py: LoRATM",
            sets={"lora_targets": ("c_attn",)},
            is_choice=True,
            when=lambda s, m: m == "qwen",
        ),
        Fact(
            source="ms-swift 97e4d198b, argument.py: gradient_checkpointing on, batch_size 1",
            sets={"checkpointing": True, "micro_batch": 1},
            is_choice=True,
        ),
    ),
)

AXOLOTL = Trainer(
    name="axolotl",
    title="Axolotl",
    latest="0.18",
    config="tightfit.planning.trainer_configs:write_axolotl",
    facts=(
        *_share_hf(
            transformers_5="0.14",
            fused_adamw="0.8",
            padded_labels="0.8",
            bitsandbytes_0_43_2="0.5",
        ),
        _PEFT_ADAPTERS,
        Fact(
            source="axolotl 0.18, loaders/model.py and monkeypatch/peft/utils.py: prepares for "
            "k-bit training, then converts norms and embeddings back to torch_dtype",
            sets={"upcast_unquantized": False},
            when=_is_bnb,
        ),
        Fact(
            source="axolotl 0.18, utils/schemas: gradient_checkpointing false, micro_batch_size 1, "
            "sequence_len 512",
            sets={"checkpointing": False, "micro_batch": 1, "seq_len": 512},
            is_choice=True,
        ),
    ),
)

LLAMA_FACTORY = Trainer(
    name="llama-factory",
    title="LLaMA-Factory",
    latest="0.9.6",
    config="tightfit.planning.trainer_configs:write_llama_factory",
    facts=(
        *_share_hf(
            transformers_5="0.9.5",
            fused_adamw="0.9.5",
            padded_labels="0.9.3",
            bitsandbytes_0_43_2="0.8.4",
        ),
        Fact(
            source="LLaMA-Factory 0.9.6, model_args.py: use_reentrant_gc is true, and "
            "checkpointing.py turns it off under FSDP2",
            quirks=("reentrant",),
            when=lambda s, m: not s.sharding.is_fsdp,
            since="0.9.5",
        ),
        Fact(
            source="LLaMA-Factory 0.9.6, adapter.py: trained parameters are made fp32, also all "
            "weights of full tuning; DeepSpeed casts them down again",
            sets={"weights": Dtype.FP32},
            when=lambda s, m: s.method is Method.FULL and not s.sharding.is_zero,
        ),
        _PEFT_ADAPTERS,
        Fact(
            source="LLaMA-Factory 0.9.6, finetuning_args.py: lora_rank 8, lora_target all",
            sets={"lora_rank": 8},
            is_choice=True,
            when=_is_lora,
        ),
        Fact(
            source="LLaMA-Factory 0.9.6: disable_gradient_checkpointing is false; transformers, "
            "training_args.py: per_device_train_batch_size 8",
            sets={"checkpointing": True, "micro_batch": 8},
            is_choice=True,
        ),
    ),
)

TORCHTUNE = Trainer(
    name="torchtune",
    title="torchtune",
    latest="0.7",
    earliest="0.3",
    facts=(
        _OURS,
        Fact(
            source="torchtune 0.7, recipes: FSDP2 or one device; losses keep the logits",
            only={
                "sharding": (Sharding.SINGLE, Sharding.FSDP, Sharding.FSDP_GRAD_OP),
                "loss": (Loss.PLAIN, Loss.CHUNKED),
                "fused_kernels": (False,),
            },
        ),
        Fact(
            source="torchtune 0.4, training/precision.py: model, adapters and state in `dtype`, "
            "bf16, without autocast",
            sets={"autocast": False, "adapter_dtype": AsIn("compute")},
        ),
        Fact(
            source="torchtune 0.3 to 0.7, configs: CEWithChunkedOutputLoss, then "
            "LinearCrossEntropyLoss",
            sets={"loss": Loss.CHUNKED},
            is_choice=True,
            since="0.3",
        ),
        Fact(
            source="torchtune 0.7, llama3_1/8B_*.yaml: batch_size 2, activation checkpointing",
            sets={"micro_batch": 2, "checkpointing": True},
            is_choice=True,
        ),
        Fact(
            source="torchtune 0.7, llama3_1/8B_lora_single_device.yaml: rank 8 on all of "
            "attention and MLP but the output",
            sets={"lora_rank": 8},
            is_choice=True,
            when=_is_lora,
        ),
        Fact(
            source="torchtune 0.7, llama3_1/8B_full_single_device.yaml: PagedAdamW8bit",
            sets={"optimizer": Optimizer.ADAMW_PAGED_8BIT},
            is_choice=True,
            when=lambda s, m: _is_full(s, m) and _is_one_gpu(s, m),
        ),
        Fact(
            source="the same: optimizer_in_bwd true",
            quirks=("optimizer_in_backward",),
            when=lambda s, m: (
                _is_full(s, m) and _is_one_gpu(s, m) and s.optimizer is Optimizer.ADAMW_PAGED_8BIT
            ),
        ),
    ),
)

TORCHTITAN = Trainer(
    name="torchtitan",
    title="torchtitan",
    latest="0.2.2",
    facts=(
        _OURS,
        Fact(
            source="torchtitan 0.2.2, train.py: full training, FSDP2, cross entropy of fp32 logits",
            only={
                "method": (Method.FULL,),
                "sharding": (
                    Sharding.SINGLE,
                    Sharding.DDP,
                    Sharding.FSDP,
                    Sharding.FSDP_GRAD_OP,
                    Sharding.FSDP_HYBRID,
                ),
                "loss": (Loss.PLAIN,),
                "fused_kernels": (False,),
                "optimizer": (Optimizer.ADAMW, Optimizer.ADAMW_FOREACH),
            },
        ),
        Fact(
            source="torchtitan 0.2.2, job_config.py: parameters are fp32; mixed_precision_param "
            "bfloat16",
            sets={"weights": Dtype.FP32, "compute": Dtype.BF16},
            when=_is_full,
        ),
        Fact(
            source="torchtitan 0.2.2, job_config.py: local_batch_size 8, seq_len 2048",
            sets={"micro_batch": 8, "seq_len": 2048},
            is_choice=True,
        ),
    ),
)

LITGPT = Trainer(
    name="litgpt",
    title="LitGPT",
    latest="0.5.13",
    earliest="0.4",
    facts=(
        _OURS,
        Fact(
            source="litgpt 0.5, finetune/lora.py: FSDP, chunked_cross_entropy, one loop",
            only={
                "sharding": (Sharding.SINGLE, Sharding.FSDP),
                "loss": (Loss.CHUNKED,),
                "fused_kernels": (False,),
                "packing": (False,),
            },
            sets={"loss": Loss.CHUNKED},
        ),
        Fact(
            source="litgpt 0.5, utils.py chunked_cross_entropy: 16-bit logits, never upcast; the "
            "loop keeps the logits",
            quirks=("narrow_loss", "keeps_logits"),
        ),
        Fact(
            source="litgpt 0.5, finetune/lora.py: FSDP over Block with the adapters inside, "
            "no_backward_sync while accumulating",
            quirks=("flat_shards", "mixes_frozen", "no_sync"),
        ),
        Fact(
            source="litgpt 0.5, finetune/lora.py: bf16-true, adapters too",
            sets={"autocast": False, "adapter_dtype": AsIn("compute")},
        ),
        Fact(
            source="litgpt 0.5, finetune/*.py: Blocks are checkpointed under FSDP alone",
            sets={"checkpointing": True},
            when=lambda s, m: s.sharding.is_fsdp,
        ),
        Fact(
            source="litgpt 0.5, finetune/lora.py: quantization is refused on several GPUs",
            only={"weights": (Dtype.BF16, Dtype.FP16, Dtype.FP32)},
            when=lambda s, m: s.world_size > 1,
        ),
        Fact(
            source="litgpt 0.5, finetune/*.py: nothing is checkpointed on one device",
            sets={"checkpointing": False},
            when=lambda s, m: not s.sharding.is_fsdp,
        ),
        Fact(
            source="litgpt 0.5: torch.optim.AdamW, which is foreach; with --quantize bnb.*, "
            "PagedAdamW of 32 bit",
            sets={"optimizer": Optimizer.ADAMW_FOREACH},
            is_choice=True,
            when=lambda s, m: not s.weights.is_quantized,
        ),
        Fact(
            source="litgpt 0.5, finetune/lora.py: lora_r 8 on query and value, lora_dropout 0.05",
            sets={"lora_rank": 8, "lora_dropout": 0.05, "lora_targets": ("q_proj", "v_proj")},
            is_choice=True,
            when=lambda s, m: _is_lora(s, m) and m in _SPLITS_QKV,
        ),
        Fact(
            source="litgpt 0.5, model.py: softcapped scores are computed by hand",
            sets={"attention": Attention.EAGER},
            when=lambda s, m: m == "gemma2",
        ),
        Fact(
            source="litgpt 0.5, finetune/*.py refuse tie_embeddings; model.py calls "
            "torch.nn.functional.gelu",
            model={"tie_embeddings": False, "activation": {"gelu_new": "gelu_pytorch_tanh"}},
        ),
        Fact(
            source="lightning's BitsandbytesPrecision replaces every nn.Linear",
            quirks=("packs_subclasses",),
        ),
        Fact(
            source="pyproject.toml before d2ed13c3: bitsandbytes 0.42, where MatMul4Bit keeps its "
            "input (issue 1270)",
            quirks=("keeps_quantized_inputs",),
            until="0.5.4",
        ),
    ),
)

FSDP_QLORA = Trainer(
    name="fsdp-qlora",
    title="fsdp_qlora",
    latest="2024.3",
    facts=(
        _OURS,
        Fact(
            source="fsdp_qlora 05ed9f2a60f9, train.py: FSDP1 or DDP, one loss of its own",
            only={
                "sharding": (Sharding.FSDP, Sharding.FSDP_GRAD_OP, Sharding.DDP),
                "fused_kernels": (False,),
                "loss": (Loss.PLAIN,),
            },
        ),
        Fact(
            source="fsdp_qlora 05ed9f2a60f9, train.py: precision bf16 without a mixed-precision "
            "policy, AdamW fused=False",
            sets={
                "autocast": False,
                "adapter_dtype": AsIn("compute"),
                "optimizer": Optimizer.ADAMW_FOREACH,
            },
        ),
        Fact(
            source="fsdp_qlora, benchmarks_03_2024.md and README: --reentrant_checkpointing True; "
            "apply_activation_checkpointing puts it inside the FSDP unit",
            quirks=("reentrant", "flat_shards", "padding_mask"),
        ),
        Fact(
            source="fsdp_qlora, README: bitsandbytes 0.43.0, whose MatMul4Bit keeps its input "
            "(issue 1270)",
            quirks=("keeps_quantized_inputs",),
        ),
        Fact(
            source="fsdp_qlora 05ed9f2a60f9, train.py: lora_rank 64, lora_dropout 0.1, "
            "gradient checkpointing as the README runs it",
            sets={"lora_rank": 64, "lora_dropout": 0.1, "checkpointing": True},
            is_choice=True,
        ),
    ),
)

LLAMA_RECIPES = Trainer(
    name="llama-recipes",
    title="llama-recipes",
    latest="0.0.5",
    earliest="0.0.2",
    facts=(
        _OURS,
        Fact(
            source="llama-recipes 0.0.5, finetuning.py: one GPU or FSDP1; the model's own loss; "
            "torch.optim.AdamW, which is foreach",
            only={
                "sharding": (
                    Sharding.SINGLE,
                    Sharding.FSDP,
                    Sharding.FSDP_GRAD_OP,
                    Sharding.FSDP_HYBRID,
                ),
                "loss": (Loss.PLAIN,),
                "optimizer": (Optimizer.ADAMW_FOREACH,),
                "fused_kernels": (False,),
                "compile": (False,),
            },
            sets={"optimizer": Optimizer.ADAMW_FOREACH, "loss": Loss.PLAIN},
        ),
        Fact(
            source="llama-recipes 0.0.2, finetuning.py: from_pretrained without a dtype, which is "
            "fp32; FSDP's mixed precision casts to bf16",
            sets={"weights": Dtype.FP32, "compute": Dtype.BF16},
            when=lambda s, m: s.sharding.is_fsdp and not s.weights.is_quantized,
            until="0.0.3",
        ),
        Fact(
            source="the same, on one GPU, where nothing casts",
            sets={"weights": Dtype.FP32, "compute": Dtype.FP32},
            when=lambda s, m: not s.sharding.is_fsdp and not s.weights.is_quantized,
            until="0.0.3",
        ),
        Fact(
            source="llama-recipes 0.0.3 to 0.0.5, finetuning.py: torch_dtype bfloat16; "
            "train_utils.py: autocast with use_fp16 alone",
            sets={"weights": Dtype.BF16, "compute": Dtype.BF16, "autocast": False},
            when=lambda s, m: not s.weights.is_quantized,
            since="0.0.3",
        ),
        Fact(
            source="llama-recipes 0.0.2, finetuning.py: " + _KBIT,
            sets={"upcast_unquantized": True},
            when=_is_bnb,
            until="0.0.3",
        ),
        Fact(
            source="llama-recipes 0.0.2, finetuning.py: load_in_8bit is its one quantization",
            only={"weights": (Dtype.BF16, Dtype.FP16, Dtype.FP32, Dtype.INT8)},
            until="0.0.3",
        ),
        Fact(
            source="llama-recipes 0.0.3 to 0.0.5, configs/quantization.py: 4 bits without double "
            "quantization; nothing is upcast",
            sets={"double_quant": False, "upcast_unquantized": False},
            when=_is_bnb,
            since="0.0.3",
        ),
        Fact(
            source="llama-recipes 0.0.5, finetuning.py: 8 bits are refused under FSDP",
            only={"weights": (Dtype.BF16, Dtype.FP16, Dtype.FP32, Dtype.NF4)},
            when=lambda s, m: s.sharding.is_fsdp,
        ),
        _PEFT_ADAPTERS,
        Fact(
            source="llama-recipes 0.0.5, configs/peft.py: r 8 on q_proj and v_proj, dropout 0.05",
            sets={"lora_rank": 8, "lora_dropout": 0.05, "lora_targets": ("q_proj", "v_proj")},
            is_choice=True,
            when=_is_lora,
        ),
        Fact(
            source="llama-recipes 0.0.5, finetuning.py: FullyShardedDataParallel; adapters are "
            "units of their own (fsdp_utils.py)",
            quirks=("flat_shards",),
            when=lambda s, m: s.sharding.is_fsdp,
        ),
        Fact(
            source="llama-recipes 0.0.5, configs/fsdp.py: fsdp_activation_checkpointing is on",
            sets={"checkpointing": True},
            is_choice=True,
            when=lambda s, m: s.sharding.is_fsdp,
        ),
        Fact(
            source="llama-recipes 0.0.3 to 0.0.5, finetuning.py: gradient_checkpointing_enable "
            "around the FSDP unit, beside the checkpoint inside it",
            quirks=("reentrant", "recomputes_shards"),
            when=lambda s, m: s.sharding.is_fsdp and s.checkpointing,
            since="0.0.3",
        ),
        Fact(
            source="llama-recipes 0.0.5, finetuning.py: nothing is checkpointed on one GPU",
            sets={"checkpointing": False},
            only={"checkpointing": (False,)},
            when=lambda s, m: not s.sharding.is_fsdp,
        ),
        Fact(
            source="llama-recipes 0.0.5, configs/training.py: batch_size_training 4, "
            "context_length 4096, batching_strategy packing",
            sets={"micro_batch": 4, "seq_len": 4096, "packing": True},
            is_choice=True,
        ),
    ),
)

DEEPSPEED = Trainer(
    name="deepspeed",
    title="DeepSpeed",
    latest="0.19.8",
    config="tightfit.planning.trainer_configs:write_deepspeed",
    facts=(
        _OURS,
        Fact(
            source="deepspeed.ai, ZeRO: stage 3 is what FSDP does, where the user names neither",
            sets={"sharding": Sharding.ZERO3},
            is_choice=True,
            when=lambda s, m: s.sharding.is_fsdp,
        ),
        Fact(
            source="deepspeed 0.19.8, runtime/engine.py: data parallel or ZeRO",
            only={
                "sharding": (
                    Sharding.SINGLE,
                    Sharding.DDP,
                    Sharding.ZERO1,
                    Sharding.ZERO2,
                    Sharding.ZERO3,
                )
            },
        ),
        Fact(
            source="deepspeed 0.19.8, runtime/engine.py _configure_distributed_model: the module "
            "is cast with its adapters; nothing is autocast unless torch_autocast is on",
            sets={"autocast": False, "adapter_dtype": AsIn("compute")},
        ),
        Fact(
            source="deepspeed 0.19.8, runtime/engine.py: Adam and AdamW are FusedAdam, or "
            "DeepSpeedCPUAdam where the optimizer is offloaded",
            sets={"optimizer": Optimizer.ADAMW},
            only={"optimizer": (Optimizer.ADAMW,)},
        ),
        Fact(
            source="transformers 5.22, modeling_utils.py: gradient_checkpointing_enable is the "
            "loop's own call; padded rows come with a mask",
            sets={"checkpointing": False},
            is_choice=True,
            quirks=("padding_mask",),
        ),
        _PEFT_TARGETS,
        Fact(
            source="peft 0.21, lora/config.py: r 8",
            sets={"lora_rank": 8},
            is_choice=True,
            when=_is_lora,
        ),
    ),
)

TRAINERS = (
    TRL,
    FMS,
    TRANSFORMERS,
    AXOLOTL,
    LLAMA_FACTORY,
    MS_SWIFT,
    TORCHTUNE,
    TORCHTITAN,
    LITGPT,
    FSDP_QLORA,
    LLAMA_RECIPES,
    DEEPSPEED,
)
