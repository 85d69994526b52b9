"""adapter_config.json of a stranger: peft matches its regexes with every module's name."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tightfit.core.errors import InvalidInputError
from tightfit.runtime.adapters import check_adapter_config

CONFIG = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "bias": "none"}
HOSTILE = (
    {"target_modules": r"(\w+\.?)+!"},
    {"target_modules": r"(a|a.)*b"},
    {"exclude_modules": r".*.*.*.*.*.*.*!"},
    {"target_modules": ["q_proj"], "layers_pattern": [r"(x+x+)+y"]},
    {"target_modules": ["q_proj"], "rank_pattern": {r"(\w*)*!": 4}},
    {"target_modules": "(" * 5000 + ")" * 5000},
    {"target_modules": "("},
)
PUBLISHED = (
    {"target_modules": ["q_proj", "v_proj"]},
    {"target_modules": "all-linear"},
    {"target_modules": r".*\.(q|k|v|o)_proj", "exclude_modules": r"vision\..*|(.*\.)?router"},
    {"target_modules": r"^(?!.*visual).*(?:q_proj|k_proj|v_proj).*"},
    {
        "target_modules": r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|up_proj).*?)"
        r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|up_proj)))"
    },
    {"target_modules": ["q_proj"], "rank_pattern": {r"layers\.\d+\.mlp": 4}},
)


def write(folder: Path, settings: dict[str, object]) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **settings}))
    return folder


@pytest.mark.parametrize("settings", HOSTILE)
def test_a_regex_that_never_ends_is_refused(tmp_path: Path, settings: dict[str, object]) -> None:
    began = time.process_time()
    with pytest.raises(InvalidInputError):
        check_adapter_config(write(tmp_path, settings))
    assert time.process_time() - began < 1


@pytest.mark.parametrize("settings", PUBLISHED)
def test_regexes_of_published_adapters_are_taken(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    check_adapter_config(write(tmp_path, settings))
