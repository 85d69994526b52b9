"""What config readers share: checked access to config values, attention, MLP, experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from tightfit.core.errors import InvalidInputError
from tightfit.models.spec import Block, Linear, ModelSpec, Role

# Checked access to the values of a model's config: nothing unchecked gets past this file.

MAX_WIDTH = 1_000_000
"""Of hidden states. The widest public model has 18,432."""
MAX_INNER_WIDTH = 16 * MAX_WIDTH
MAX_LAYERS = 10_000
MAX_COUNT = 65_536
"""Of heads, experts, buckets."""
MAX_VOCAB = 100_000_000
MAX_POSITIONS = 10_000_000_000


_Item = TypeVar("_Item", str, int)
_Kind = TypeVar("_Kind", bound=Hashable)


class ConfigFields:
    """The values of one config. Each read names the key, so each error can name it too."""

    def __init__(self, values: Mapping[str, object], *, name: str, source: str) -> None:
        self.values = values
        self.name = name
        self.source = source
        self.warnings: list[str] = []

    def has(self, *keys: str) -> bool:
        """Whether any of the keys holds a value; null counts as absent."""
        return self._first(keys) is not None

    def mentions(self, key: str) -> bool:
        """Whether the key is there at all, null or not."""
        return key in self.values

    def need(self, *groups: tuple[str, ...]) -> None:
        """Name every missing key at once. A group holds the spellings of one key."""
        missing = [f"`{group[0]}`" for group in groups if not self.has(*group)]
        if missing:
            raise InvalidInputError(
                f"{self.source} does not say {', '.join(missing)}.",
                remedy=f"add {'it' if len(missing) == 1 else 'them'}, or name a model that "
                "`tightfit models` lists",
            )

    def size(self, *keys: str, most: int = MAX_WIDTH) -> int:
        """A whole number from 1 to `most`, under the first of the keys that is there."""
        value = self.optional_size(*keys, most=most)
        if value is None:
            self.need(keys)
            raise AssertionError("unreachable: `need` raises")
        return value

    def size_or_default(self, *keys: str, default: int, most: int = MAX_WIDTH) -> int:
        """As `size`; where the config is silent, the library's default, with a warning."""
        value = self.optional_size(*keys, most=most)
        if value is None:
            self.warnings.append(f"`{keys[0]}` is not in the config; {default} assumed.")
            return default
        return value

    def optional_size(self, *keys: str, most: int = MAX_WIDTH) -> int | None:
        """As `size`, or None where no key holds a value."""
        key = self._first(keys)
        if key is None:
            return None
        value = self.values[key]
        if type(value) is not int:
            raise self._wrong(key, "a whole number")
        if not 1 <= value <= most:
            raise self._wrong(key, "1 or more" if value < 1 else f"at most {most:,}")
        return value

    def window(self, key: str, *, default: int | None) -> int | None:
        """A size where null means none and only a missing key means the default."""
        if key not in self.values:
            return default
        return self.optional_size(key, most=MAX_POSITIONS)

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false; null counts as absent."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def text(self, key: str, *, default: str) -> str:
        """Short printable text; null counts as absent."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str) or len(value) > 100 or not value.isprintable():
            raise self._wrong(key, "a short word")
        return value

    def texts(self, key: str) -> tuple[str, ...] | None:
        """A list of words, or None where the config is silent."""
        return self._items(key, str, "a list of words")

    def numbers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers; empty where the config is silent."""
        return self._items(key, int, "a list of whole numbers") or ()

    def _items(self, key: str, kind: type[_Item], expected: str) -> tuple[_Item, ...] | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or not all(type(item) is kind for item in value):
            raise self._wrong(key, expected)
        return tuple(value)

    def number(self, key: str) -> float | None:
        """Any finite number, or None."""
        value = self.values.get(key)
        if value is None:
            return None
        # The bound is written so that NaN is refused too.
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= 1e18:
            return float(value)
        raise self._wrong(key, "a number")

    def part(self, key: str) -> ConfigFields | None:
        """A nested config that shares this one's warnings, or None."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self._wrong(key, "an object with keys")
        inner = ConfigFields(value, name=self.name, source=self.source)
        inner.warnings = self.warnings
        return inner

    def with_fallback(self, other: ConfigFields, *keys: str) -> ConfigFields:
        """These values, with some keys taken from `other` where these are silent."""
        borrowed = {key: other.values[key] for key in keys if other.has(key)}
        merged = ConfigFields({**borrowed, **self.values}, name=self.name, source=self.source)
        merged.warnings = self.warnings
        return merged

    def with_values(self, **values: object) -> ConfigFields:
        """These values with some replaced; the warnings are shared."""
        changed = ConfigFields({**self.values, **values}, name=self.name, source=self.source)
        changed.warnings = self.warnings
        return changed

    def quotient(self, whole: int, parts: int, what: str) -> int:
        """`whole / parts`, refused where it is not whole."""
        if whole % parts:
            raise InvalidInputError(
                f"{self.source}: {what}: {parts:,} does not divide {whole:,}.",
                remedy="correct the config, or name a model that `tightfit models` lists",
            )
        return whole // parts

    def _first(self, keys: tuple[str, ...]) -> str | None:
        return next((key for key in keys if self.values.get(key) is not None), None)

    def _wrong(self, key: str, expected: str) -> InvalidInputError:
        return InvalidInputError(
            f"{self.source}: `{key}` is {shown(self.values[key])}; it must be {expected}.",
            remedy=f"correct `{key}` in the config",
        )


def shown(value: object) -> str:
    """A value for a message: short, printable, whatever it is."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, int) and abs(value) > 10**40:
        return "an integer of more than 40 digits"
    text = ascii(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


HIDDEN = ("hidden_size", "n_embd", "d_model", "n_embed", "dim")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads")
INNER = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "inner_hidden_size")
VOCAB = ("vocab_size", "padded_vocab_size")
POSITIONS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    *("max_sequence_length", "model_max_length", "n_ctx"),
)
ACTIVATIONS = ("hidden_activation", "hidden_act", "activation_function", "activation")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """The numbers every decoder has."""

    fields: ConfigFields
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    positions: int | None
    activation: str

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    def numbers(self) -> dict[str, Any]:
        """As a ModelSpec names them."""
        return {
            "name": self.fields.name,
            "source": self.fields.source,
            "hidden_size": self.hidden,
            "vocab_size": self.vocab,
            "num_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.inner,
            "max_positions": self.positions,
            "activation": self.activation,
        }


def read_decoder_shape(
    f: ConfigFields,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    inner: int | None = None,
    inner_factor: int | None = None,
    activation: str = "silu",
) -> DecoderShape:
    """Read the usual names.

    `kv_heads`, `head_dim` and `inner` are what the family fixes whatever the config
    says. `inner_factor` (the MLP's width in hidden sizes) and `activation` are for
    configs that are silent.
    """
    f.need(HIDDEN, LAYERS, HEADS, VOCAB, *([INNER] if (inner or inner_factor) is None else []))
    hidden = f.size(*HIDDEN)
    heads = f.size(*HEADS, most=MAX_COUNT)
    if head_dim is None:
        head_dim = f.optional_size("head_dim", "kv_channels")
    if head_dim is None:
        head_dim = f.quotient(hidden, heads, "the heads must share the hidden size evenly")
    if kv_heads is None:
        kv_heads = f.optional_size(*KV_HEADS, most=MAX_COUNT) or heads
    f.quotient(heads, kv_heads, "the heads must share the key/value heads evenly")
    if inner is None:
        inner = f.optional_size(*INNER, most=MAX_INNER_WIDTH) or hidden * (inner_factor or 4)
    return DecoderShape(
        fields=f,
        hidden=hidden,
        layers=f.size(*LAYERS, most=MAX_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        inner=inner,
        vocab=f.size(*VOCAB, most=MAX_VOCAB),
        positions=f.optional_size(*POSITIONS, most=MAX_POSITIONS),
        activation=next((f.text(k, default="") for k in ACTIVATIONS if f.has(k)), activation),
    )


def linear(
    name: str, ins: int, outs: int, role: Role, *, bias: bool = False, is_module: bool = True
) -> Linear:
    """One matrix, on one line."""
    return Linear(
        name=name, in_features=ins, out_features=outs, bias=bias, role=role, is_module=is_module
    )


def split_attention(
    stem: DecoderShape,
    *,
    bias: bool = False,
    out_bias: bool | None = None,
    out_name: str = "o_proj",
) -> tuple[Linear, ...]:
    """Separate query, key, value and output matrices; `out_bias` where it differs from `bias`."""
    role, wide = Role.ATTENTION, stem.query_width
    out_bias = bias if out_bias is None else out_bias
    return (
        linear("q_proj", stem.hidden, wide, role, bias=bias),
        linear("k_proj", stem.hidden, stem.kv_width, role, bias=bias),
        linear("v_proj", stem.hidden, stem.kv_width, role, bias=bias),
        linear(out_name, wide, stem.hidden, role, bias=out_bias),
    )


def fused_attention(
    stem: DecoderShape, *, names: tuple[str, str], bias: bool = False, out_bias: bool | None = None
) -> tuple[Linear, ...]:
    """One matrix for query, key and value, one for the output."""
    role, wide = Role.ATTENTION, stem.query_width
    out_bias = bias if out_bias is None else out_bias
    return (
        linear(names[0], stem.hidden, wide + 2 * stem.kv_width, role, bias=bias),
        linear(names[1], wide, stem.hidden, role, bias=out_bias),
    )


def gated_mlp(
    stem: DecoderShape, *, bias: bool = False, inner: int | None = None
) -> tuple[Linear, ...]:
    """Gate, up and down; `inner` where its width is not the usual one."""
    inner = inner or stem.inner
    return (
        linear("gate_proj", stem.hidden, inner, Role.MLP, bias=bias),
        linear("up_proj", stem.hidden, inner, Role.MLP, bias=bias),
        linear("down_proj", inner, stem.hidden, Role.MLP, bias=bias),
    )


def plain_mlp(
    stem: DecoderShape,
    *,
    names: tuple[str, str],
    bias: bool,
    up_factor: int = 1,
    inner: int | None = None,
) -> tuple[Linear, ...]:
    """Up and down; `up_factor` 2 where the first matrix holds the gate as well."""
    up, down = names
    inner = inner or stem.inner
    return (
        linear(up, stem.hidden, up_factor * inner, Role.MLP, bias=bias),
        linear(down, inner, stem.hidden, Role.MLP, bias=bias),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts: how many there are, how many a token meets, how wide each is."""

    count: int
    per_token: int
    inner: int


def read_experts(
    f: ConfigFields, *, inner: int, count_default: int, per_token_default: int
) -> Experts:
    """Counts of experts, under the names in use."""
    count_keys = ("num_local_experts", "num_experts", "n_routed_experts")
    count = f.size_or_default(*count_keys, default=count_default, most=MAX_COUNT)
    per_token_keys = ("num_experts_per_tok", "experts_per_token", "moe_topk")
    per_token = f.size_or_default(*per_token_keys, default=per_token_default, most=MAX_COUNT)
    if per_token > count:
        raise InvalidInputError(
            f"{f.source}: `num_experts_per_tok` is {per_token}, of {count} experts.",
            remedy="correct the config, or name a model that `tightfit models` lists",
        )
    return Experts(count=count, per_token=per_token, inner=inner)


def expert_linears(
    stem: DecoderShape,
    experts: Experts,
    *,
    router: str,
    bias: bool = False,
    adapted: bool = False,
    has_linear_router: bool = False,
) -> tuple[Linear, ...]:
    """Router and experts as transformers 5 keeps them: bare 3-D parameters, not modules.

    `adapted`: peft's `all-linear` attaches LoRA to them. Source: peft's weight conversion for
    transformers 5, which gives the fused gate and up projection twice the rank.
    `has_linear_router`: the router is an `nn.Linear`.
    """

    def stacked(name: str, ins: int, outs: int, *, rank_factor: int) -> Linear:
        return Linear(
            name=name,
            in_features=ins,
            out_features=outs,
            bias=bias,
            role=Role.EXPERT,
            copies=experts.count,
            copies_per_token=experts.per_token,
            is_module=False,
            is_grouped=True,
            lora_rank_factor=rank_factor if adapted else 1,
        )

    routing = linear(
        router, stem.hidden, experts.count, Role.ROUTER, bias=bias, is_module=has_linear_router
    )
    return (
        routing.model_copy(update={"lora_rank_factor": int(adapted)}),
        stacked("gate_up_proj", stem.hidden, 2 * experts.inner, rank_factor=2),
        stacked("down_proj", experts.inner, stem.hidden, rank_factor=1),
    )


def ungrouped(linears: tuple[Linear, ...]) -> tuple[Linear, ...]:
    """The same matrices, where only the family's own code multiplies its experts."""
    changes = {"is_grouped": False, "lora_rank_factor": 0}
    return tuple(part.model_copy(update=changes) if part.is_grouped else part for part in linears)


def without_adapter(linears: tuple[Linear, ...]) -> tuple[Linear, ...]:
    """The same matrices, where peft's `all-linear` leaves them out."""
    return tuple(part.model_copy(update={"lora_rank_factor": 0}) for part in linears)


def blocks(kinds: Iterable[_Kind], make: Callable[[_Kind], Block]) -> tuple[Block, ...]:
    """A block for each kind of layer, as `make` has it, with as many layers as there are."""
    return tuple(
        make(kind).model_copy(update={"num_layers": count})
        for kind, count in Counter(kinds).items()
    )


def decoder(
    stem: DecoderShape,
    linears: tuple[Linear, ...],
    *,
    num_norms: int = 2,
    norm_bias: bool = False,
    head_norm_params: int = 0,
    extra_params: int = 0,
) -> Block:
    """All layers alike, each norm as wide as the hidden stream."""
    return Block(
        kind="decoder",
        num_layers=stem.layers,
        linears=linears,
        norm_widths=(stem.hidden,) * num_norms,
        norm_bias=norm_bias,
        head_norm_params=head_norm_params,
        extra_params=extra_params,
    )


def make_spec(
    stem: DecoderShape,
    block: Block | tuple[Block, ...],
    *,
    tied: bool = False,
    has_layer_norm: bool = False,
    **others: Any,
) -> ModelSpec:
    """A decoder and one norm behind it, LayerNorm's with a plain MLP.

    `tied`: whether the head is the embedding where the config is silent.
    """
    fields = stem.fields
    usual = stem.numbers() | {
        "is_rms_norm": not has_layer_norm,
        "is_gated_mlp": not has_layer_norm,
        "outer_params": stem.hidden * (2 if has_layer_norm else 1),
    }
    return ModelSpec(
        model_type=fields.text("model_type", default="generic"),
        blocks=block if isinstance(block, tuple) else (block,),
        tie_embeddings=fields.flag("tie_word_embeddings", default=tied),
        **(usual | others),
    )


def count_sliding(f: ConfigFields, *, layers: int, otherwise: int) -> int:
    """Layers with a window: from `layer_types` where given, else the family's own pattern."""
    kinds = read_layer_types(f, layers=layers)
    if kinds is None:
        return otherwise
    return sum(kind == "sliding_attention" for kind in kinds)


def read_layer_types(
    f: ConfigFields, *, layers: int, key: str = "layer_types"
) -> tuple[str, ...] | None:
    """The kind of each layer, where the config lists them."""
    kinds = f.texts(key)
    if kinds is not None and len(kinds) != layers:
        raise InvalidInputError(
            f"{f.source}: `{key}` names {len(kinds)} layers of {layers}.",
            remedy=f"correct `{key}` or the number of layers in the config",
        )
    return kinds
