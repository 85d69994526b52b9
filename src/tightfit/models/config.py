"""From a `config.json`, whatever is in it, to a ModelSpec or one error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tightfit.core.dtypes import Dtype, find_plain_dtype
from tightfit.core.errors import InvalidInputError, SetupError
from tightfit.core.reading import UnreadableFileError, parse_json, read_bytes
from tightfit.core.text import printable
from tightfit.models.attention import read_attention_extras
from tightfit.models.families.parts import ConfigFields, shown
from tightfit.models.families.registry import find_family, read_generic, reader_for
from tightfit.models.family import Reader
from tightfit.models.spec import Block, ModelSpec


def read_config(
    config: object, *, name: str, source: str, read_unknown: Reader = read_generic
) -> ModelSpec:
    """Read parsed JSON; `read_unknown` reads a family that has no reader.

    Raises only UserError, whatever `config` is.
    """
    if not isinstance(config, Mapping):
        raise InvalidInputError(
            f"{source} holds {shown(config)}, not a model's config.",
            remedy="name a config.json that starts with { and has a `model_type`",
        )
    outer = ConfigFields(config, name=_clean(name), source=_clean(source))
    inner = _text_part(outer)
    model_type = inner.text("model_type", default="") or outer.text("model_type", default="")
    dtype = _stored_dtype(inner) or _stored_dtype(outer)
    is_quantized, packed = _quantized_dtype(outer)
    try:
        spec = reader_for(model_type, otherwise=read_unknown)(inner)
    except ValidationError as error:
        raise InvalidInputError(
            f"{source}: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}.",
            remedy="correct the config, or name a model that `tightfit models` lists",
        ) from error
    family = find_family(model_type)
    return spec.model_copy(
        update={
            "model_type": model_type or spec.model_type,
            "blocks": tuple(
                _without_adapters(block, family.lora_excludes) for block in spec.blocks
            ),
            "attention_extras": tuple(
                sorted({*spec.attention_extras, *read_attention_extras(inner.values, family)})
            ),
            "warnings": tuple(dict.fromkeys(outer.warnings)),
            "stored_dtype": packed if is_quantized else dtype,
        }
    )


def read_config_file(path: Path, *, name: str, read_unknown: Reader = read_generic) -> ModelSpec:
    """Read a config.json on disk."""
    source = printable(str(path), most=4096)
    # Published configs hold Infinity, as `time_step_limit` of Mamba-2.
    config = parse_json(_read_bytes(path), source=source, allows_infinity=True)
    return read_config(config, name=name, source=source, read_unknown=read_unknown)


def _read_bytes(path: Path) -> bytes:
    remedy = "put the model's config.json there as a file"
    try:
        return read_bytes(path, remedy=remedy)
    except UnreadableFileError:
        raise
    except PermissionError as error:
        raise forbidden(path, error) from error
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInputError(
            f"Cannot read {printable(str(path), most=400)}: {reason}.", remedy=remedy
        ) from error


def forbidden(path: Path, error: OSError) -> SetupError:
    return SetupError(
        f"Cannot read {printable(str(path), most=400)}: {(error.strerror or str(error)).lower()}.",
        remedy="ask its owner for permission to read the folder and its files",
    )


def _text_part(outer: ConfigFields) -> ConfigFields:
    """A multimodal config keeps the language model's numbers one level down."""
    for key in ("text_config", "language_config", "llm_config"):
        inner = outer.part(key)
        if inner is not None and not outer.has("num_hidden_layers", "n_layer", "num_layers"):
            outer.warnings.append("Only the language model is counted, not vision or audio parts.")
            return inner.with_fallback(outer, "tie_word_embeddings")
    return outer


def _without_adapters(block: Block, names: tuple[str, ...]) -> Block:
    """The same layers, of which the modules named take no adapter."""
    if not names:
        return block
    linears = tuple(
        part.model_copy(update={"takes_adapter": False}) if part.name in names else part
        for part in block.linears
    )
    return block.model_copy(update={"linears": linears})


def _stored_dtype(f: ConfigFields) -> Dtype | None:
    for key in ("dtype", "torch_dtype"):
        if f.has(key):
            return find_plain_dtype(f.text(key, default=""))
    return None


def read_quant_method(config: Mapping[str, Any]) -> str | None:
    """Of a config.json; None: the model is not quantized."""
    stated = config.get("quantization_config")
    return str(stated.get("quant_method", "")).lower() if isinstance(stated, dict) else None


def _quantized_dtype(f: ConfigFields) -> tuple[bool, Dtype | None]:
    """Whether the checkpoint is packed, and in which of the formats that a plan can train on."""
    part = f.part("quantization_config")
    if part is None:
        return False, None
    method = part.text("quant_method", default="an unnamed method")
    bits = part.optional_size("bits", most=64)
    for key, width in (("load_in_4bit", 4), ("load_in_8bit", 8)):
        if part.flag(key, default=False):
            bits = width
    f.warnings.append(
        f"The checkpoint is quantized ({method}{f', {bits} bits' if bits else ''}); "
        "the counts are those of the unpacked weights."
    )
    return True, Dtype.GPTQ4 if (method, bits) == ("gptq", 4) else None


def _clean(text: str) -> str:
    """Names from argv may hold bytes no JSON file can keep and characters a terminal obeys."""
    return printable(text.encode("utf-8", "replace").decode(), most=4096)
