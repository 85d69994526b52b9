"""Family: what the program knows of one architecture of transformers beyond its sizes.

The planner, the estimates, the tracer, the runtime and the exporters ask this record. A new family
is a record in `families/`, listed in `families/registry.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, Protocol

from tightfit.core.errors import InvalidInputError
from tightfit.models.families.parts import ConfigFields
from tightfit.models.spec import ModelSpec

Reader = Callable[[ConfigFields], ModelSpec]
Settings = dict[str, Any]
"""Of a config.json."""


class GgufMetadata(Protocol):
    """An open GGUF file."""

    @property
    def tensors(self) -> Collection[str]: ...

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the architecture, like `attention.head_count`."""
        ...


class Rearrangement(Enum):
    """How llama.cpp wants some tensors to lie, where that is not as transformers has them.

    Source: llama.cpp's own converter (ggml-org/llama.cpp, `conversion/`).
    """

    ROTARY = "rotary"
    """The rows of queries and keys: rotary pairs side by side, not half a head apart."""
    NORM_PLUS_ONE = "norm plus one"
    """Gemma scales by `1 + weight`; llama.cpp by the weight."""
    TRANSPOSED = "transposed"
    """GPT-2's Conv1D stores its matrix transposed."""
    GROUPED_QKV = "grouped qkv"
    """Queries, key and value per group of heads become all queries, all keys, all values."""
    ALTERNATING_EXPERTS = "alternating experts"
    """gpt-oss stores experts transposed, and gate and up in every other column of one tensor."""
    DELTA_NET = "delta net"
    """Qwen3-Next's linear attention: what it computes of its parameters is stored computed. Norms
    are as Gemma's."""
    TILED_DELTA_NET = "tiled delta net"
    """The same of Qwen 3.5, whose value heads change places: the first of each key head, then the
    second of each, and so on."""
    STATE_SPACE = "state space"
    """Mamba 2's: what it computes of its parameters is stored computed."""
    LATENT = "latent"
    """DeepSeek's keys and values, which come out of one matrix, become a matrix per head each."""


def read_usual_settings(file: GgufMetadata, rope: Settings) -> Settings:
    """A Llama-like config from a GGUF file's metadata."""
    sizes = _read_sizes(file, rope)
    shared = sizes["hidden_size"] // sizes["num_attention_heads"]
    return sizes | {
        "head_dim": int(file.get("attention.key_length", shared)),
        "rms_norm_eps": round_fp32(file.get("attention.layer_norm_rms_epsilon")),
    }


def read_usual_layernorm_settings(file: GgufMetadata, rope: Settings) -> Settings:
    """The same of a model with LayerNorm, whose heads share the hidden size."""
    epsilon = round_fp32(file.get("attention.layer_norm_epsilon"))
    return _read_sizes(file, rope) | {"layer_norm_eps": epsilon}


def _read_sizes(file: GgufMetadata, rope: Settings) -> Settings:
    """What both have, and the rotary settings as they are given."""
    heads = int(file.get("attention.head_count"))
    return {
        "hidden_size": int(file.get("embedding_length")),
        "intermediate_size": int(file.get("feed_forward_length")),
        "num_hidden_layers": int(file.get("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(file.get("attention.head_count_kv", heads)),
        "max_position_embeddings": int(file.get("context_length")),
        "rope_parameters": rope,
    }


def round_fp32(value: float) -> float:
    """1e-05 again from 9.999999747e-06, which 32 bits made of it."""
    return float(f"{float(value):.6g}")


def find_non_square_heads(config: Any) -> str | None:
    """For families whose heads llama.cpp takes to share the hidden size."""
    head_dim = getattr(config, "head_dim", None)
    if head_dim and head_dim * config.num_attention_heads != config.hidden_size:
        return f"heads of {head_dim} that do not add up to the hidden size"
    return None


def require_full_attention_period(config: Any, period: int) -> None:
    """Raise unless the last of every `period` layers, and no other, attends to all tokens."""
    for at, kind in enumerate(config.layer_types or ()):
        if (kind == "full_attention") != (at % period == period - 1):
            raise InvalidInputError(
                f"Layer {at} of this model is of the kind {kind}, where llama.cpp expects another: "
                f"it lets the last of every {period} layers attend to all tokens.",
                remedy="use the model with --engine transformers",
            )


def count_leading_dense(config: Any) -> int:
    """The layers before the first one with experts."""
    kinds = getattr(config, "mlp_layer_types", None)
    if kinds is not None:
        return next((at for at, kind in enumerate(kinds) if kind == "sparse"), len(kinds))
    return int(getattr(config, "first_k_dense_replace", None) or 0)


def _count_kv_heads(config: Any) -> int:
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufLayout:
    """How llama.cpp stores and computes a family; the defaults are Llama's."""

    activations: tuple[str, ...] = ("silu", "swish")
    """llama.cpp hard-codes the activation; the file does not name it."""
    can_untie: bool = True
    """Whether llama.cpp reads an output matrix of its own."""
    needs_head: bool = False
    """llama.cpp requires an output matrix: a tied one is written twice."""
    rearrangement: Rearrangement | None = None
    old_prefix: Literal["", "added", "removed"] = ""
    """What happens to `transformer.` before a tensor's name is looked up in gguf's map."""
    inner_key: str | None = "intermediate_size"
    """The config's name for the MLP's width. None, or nothing there: four times the hidden size."""
    expert_inner_key: str | None = None
    """The config's name for the width of an expert. None: the family has no experts."""
    find_inner: Callable[[Any], int] | None = None
    """The same where it is computed."""
    count_kv_heads: Callable[[Any], int] = _count_kv_heads
    list_kv_heads: Callable[[Any], list[int]] | None = None
    """Of each layer, where they differ: 0 where it does not attend."""
    find_obstacle: Callable[[Any], str | None] = lambda _config: None
    """What in a transformers config llama.cpp would silently ignore."""

    drops_later_layers: bool = False
    """Checkpoints have layers behind the last one, which predict several tokens at a time.
    transformers leaves them out too."""
    keeps_mxfp4: bool = False
    """Experts published in MXFP4 go into the file as they are."""
    has_rotary: bool = True
    states_head_dim: bool = True
    rope_theta: float = 10_000.0
    """llama.cpp's default."""
    reads_rope_factors: bool = False
    """llama.cpp takes a factor for each rotary frequency, as Llama 3 and LongRoPE need."""
    rope_spans_rotary_dim: bool = False
    """The tensors of frequency factors cover the rotary part of a head alone."""
    computes_windows: bool = False
    """llama.cpp slides where the model does."""
    write_attention: Callable[[Any, Any], None] | None = None
    """Writes what the family alone has: (GGUFWriter, transformers config)."""
    read_settings: Callable[[GgufMetadata, Settings], Settings] | None = read_usual_settings
    """The config of a GGUF file whose rotary settings are given. None: its files are not converted
    back."""


def read_attention_bias(_config: Mapping[str, Any], tensors: Collection[str]) -> Settings:
    return {"attention_bias": has_attention_bias(tensors)}


def has_attention_bias(tensors: Collection[str]) -> bool:
    return "blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture. The defaults are those of a Llama-like decoder.

    Facts about modelling code are those of transformers 5.22; `tests/unit/models/test_families.py`
    compares them with the installed one.
    """

    model_types: tuple[str, ...]
    """Values of `model_type` in config.json."""
    read: Reader | None = None
    """From the config to a ModelSpec. None: the generic reader, which warns."""
    is_known: bool = True
    """False where no record says so: then transformers' own flags decide at load."""

    # Attention
    has_sdpa: bool = True
    """`_supports_sdpa` of the model class."""
    has_flash: bool = True
    """`_supports_flash_attn` of the model class. False too where values are narrower than keys, as
    flash-attention over packed documents cannot have them."""
    accepts_custom_attention: bool = True
    """Attention is looked up by name, so that ours can be registered. False: the modelling code
    has classes of its own for each attention."""
    own_attention: bool = False
    """Such a family whose attention's forward is replaced by ours (runtime/own_attention.py), which
    looks it up."""
    has_sinks: bool = False
    """A learned logit per head joins the softmax; no kernel that we call has them."""
    has_position_bias: bool = False
    """A learned bias on the scores sends SDPA to its math kernel, which holds the scores."""
    default_softcap: bool = False
    """Attention logits are capped unless the config says null."""
    default_attention_dropout: float = 0.0
    """Where the config does not say."""
    alibi: Literal["never", "always", "ungrouped"] = "never"
    """Where scores get a fixed bias by distance. `ungrouped`: in models without grouped heads."""
    sdpa_always_masks: bool = False
    """Its own code always gives SDPA a mask, so that its flash kernel is never chosen."""
    is_causal: bool = True
    """False: tokens see those behind them, so padding needs a mask."""

    # Packing
    takes_positions: bool = True
    """The model's forward takes `position_ids`, by which packed documents are told apart. False
    too where the state of linear attention or Mamba runs on from one document to the next, and
    where chunks are counted from the start of the row."""
    mask_reads_positions: bool = True
    """The family's code makes its mask with the positions. False: we hand them to it
    (runtime/packed_masks.py)."""

    # Layers
    has_liger: bool = False
    """Liger has fused kernels for it (monkey_patch.py, 0.8)."""
    has_router_loss: bool = False
    """Its modelling file has `load_balancing_loss_func`. Other mixtures balance their experts by a
    bias, if at all."""
    scales_logits: bool = False
    """The head's output is changed before the loss, so the model makes all logits itself."""
    fuses_projections: bool = False
    """A norm feeds q, k, v and nothing else, and another gate and up, so that the matrices of each
    can be one product."""
    mlp_module: str = "mlp"
    """The name of each layer's MLP, which can run on some tokens at a time: a module that is called
    with the hidden states alone. Empty where it has none."""
    splits_rotary: bool = False
    """One projection is split and rotated: the values, a view of it, keep all of it alive."""
    composes_gelu: bool = False
    """The usual activation is `gelu_new`, which transformers writes as separate operations."""
    composes_norm: bool = False
    """LayerNorm is written as separate operations in fp32, as RMSNorm is elsewhere."""
    keeps_norm_output_fp32: bool = False
    """The norm multiplies in fp32, and keeps that product where its weight is trained."""
    quantizes_linears: bool = True
    """bitsandbytes packs its layers. False: they are a subclass of nn.Linear, which is left."""
    has_fp8_linears: bool = True
    """Its linear layers are `nn.Linear`, which fp8 products replace."""
    casts_to_weight_dtype: bool = False
    """Activations are cast to the dtype of the stored matrix, which must not be fp8."""

    rounding_factor: float = 1.0
    """How many times as far as in a Transformer rounding moves its scores."""
    frozen: tuple[str, ...] = ()
    """Parameters that no gradient reaches, by the last part of their name."""

    # LoRA
    lora_excludes: tuple[str, ...] = ()
    """Modules whose weight the modelling code reads by itself, so that an adapter on them is
    ignored, or fails."""

    # fp16
    overflows_fp16: bool = False
    """Activations exceed 65504 in practice (transformers pull 36832)."""
    may_overflow_fp16: bool = False
    """Trained in bf16, and known to overflow at times (transformers issue 9295)."""

    # GGUF
    gguf_name: str = ""
    """llama.cpp's name of the architecture, where it is not the `model_type`."""
    gguf_flags: Callable[[Mapping[str, Any], Collection[str]], Settings] = read_attention_bias
    """Settings that a GGUF file shows only by its sizes and the names of its tensors."""
    gguf: GgufLayout | None = None
    """None: the family is not written as GGUF."""
    gguf_problem: str = ""
    """What llama.cpp computes differently in a family that it knows."""

    @property
    def architecture(self) -> str:
        """In GGUF files."""
        return self.gguf_name or self.model_types[0]

    @property
    def can_tile_mlp(self) -> bool:
        return self.read is not None and bool(self.mlp_module)

    @property
    def has_fused_attention(self) -> bool:
        """Whether it runs with any attention but the eager one."""
        return self.has_sdpa or self.has_flash or self.own_attention
