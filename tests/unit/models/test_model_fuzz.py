"""Whatever JSON comes, a reader answers with a spec or with an error a user can act on."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tightfit.core.errors import UserError
from tightfit.core.reading import parse_json
from tightfit.models.catalogue import list_models
from tightfit.models.config import read_config
from tightfit.models.families.registry import FAMILIES
from tightfit.models.spec import ModelSpec, explain_parameter_count

FAST = settings(
    max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
_FOLDER = files("tightfit.catalogue").joinpath("models")
_CONFIGS: list[dict[str, Any]] = [
    json.loads(_FOLDER.joinpath(name).read_bytes())
    for name in sorted(row.file for row in list_models())[::5]
]
_KEYS = [
    *sorted({key for config in _CONFIGS for key in config}),
    "text_config",
    "quantization_config",
    "layer_types",
    "mlp_only_layers",
    "num_experts",
    "word_embed_proj_dim",
    "inner_hidden_size",
    "multi_query_group_num",
    "expansion_ratio",
]
_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=1, max_value=300)
    | st.sampled_from([0, -1, 10**6, 10**6 + 1, 10**30, 10**4000])
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["relu", "gated-gelu", "\ud800", "float16", "sliding_attention"])
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(_KEYS), inner, max_size=4)
    ),
    max_leaves=6,
)
_TYPES = st.sampled_from([*FAMILIES, "unknown", ""])


def attempt(config: object) -> ModelSpec | UserError:
    try:
        return read_config(config, name="fuzz", source="config.json")
    except UserError as error:
        return error


def check(config: object) -> None:
    result = attempt(config)
    if isinstance(result, UserError):
        assert result.problem.isprintable()
        assert len(result.problem) < 2000
        assert result.remedy
        return
    assert result.num_params == sum(row.num_params for row in explain_parameter_count(result))
    assert 0 < result.num_active_params <= result.num_params
    assert ModelSpec.model_validate_json(result.model_dump_json()) == result


@FAST
@given(_VALUES)
def test_any_json_value(value: object) -> None:
    check(value)


@FAST
@given(st.sampled_from(_CONFIGS), st.dictionaries(st.sampled_from(_KEYS), _VALUES, max_size=3))
def test_real_configs_with_values_swapped(config: dict[str, Any], changes: dict[str, Any]) -> None:
    check({**config, **changes})


@FAST
@given(st.sampled_from(_CONFIGS), _TYPES, st.sets(st.sampled_from(_KEYS), max_size=4))
def test_real_configs_read_as_another_family_with_keys_missing(
    config: dict[str, Any], model_type: str, dropped: set[str]
) -> None:
    check({key: config[key] for key in config if key not in dropped} | {"model_type": model_type})


@FAST
@given(st.sampled_from(_CONFIGS), st.data())
def test_files_cut_short_or_damaged(config: dict[str, Any], data: st.DataObject) -> None:
    content = bytearray(json.dumps(config).encode())
    end = data.draw(st.integers(min_value=0, max_value=len(content)))
    for at in data.draw(st.lists(st.integers(0, max(0, len(content) - 1)), max_size=5)):
        content[at] = data.draw(st.integers(min_value=0, max_value=255))
    try:
        parsed = parse_json(bytes(content[:end]), source="config.json")
    except UserError:
        return
    check(parsed)
