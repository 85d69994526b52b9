"""Settings are declared once: the strategy, its words and the lists that are derived of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tightfit.core.recipe import StrategyOverrides
from tightfit.core.settings import list_settings, names_where
from tightfit.core.strategy import Strategy


def test_the_strategy_has_every_declared_setting_and_its_default() -> None:
    declared = list_settings()
    assert [*declared, "trainer", "quirks"] == list(Strategy.model_fields)
    assert {name: getattr(Strategy(), name) for name in declared} == {
        name: setting.default for name, setting in declared.items()
    }


@pytest.mark.parametrize("name", list_settings())
def test_a_setting_says_what_it_is_for(name: str) -> None:
    declared = list_settings()[name]
    assert declared.setting.help
    for word in declared.words:
        assert Strategy.model_validate({name: word})
    if declared.most is not None:
        assert Strategy.model_validate({name: declared.most})
        with pytest.raises(ValueError, match="less than or equal"):
            Strategy.model_validate({name: declared.most + 1})


def test_lists_are_derived() -> None:
    assert "optimizer" in names_where(changes_learning=True)
    assert "micro_batch" not in names_where(changes_learning=True)
    assert names_where(is_of_adapters=True) == ("adapter_dtype",)
    elsewhere = {name for name, found in list_settings().items() if found.setting.recipe_key}
    recipe = elsewhere | set(StrategyOverrides.model_fields)
    assert recipe == set(Strategy.model_fields) - {"trainer"}


def test_declarations_need_no_pydantic() -> None:
    code = "import sys, tightfit.core.settings; print('pydantic' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
