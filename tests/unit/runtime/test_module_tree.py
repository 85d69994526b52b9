"""Families without a reader: their spec is that of the modules transformers makes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from module_trees import (
    SIZES,
    count_real,
    list_types,
    our_linears,
    pick_llama_like,
    real_linears,
    try_build,
)
from tightfit.cli.app import main
from tightfit.core.attention import Attention
from tightfit.core.errors import UserError
from tightfit.models.attention import find_attention_problem, list_proposed, needs_of
from tightfit.models.catalogue import list_models, load_row, read_row
from tightfit.models.families.parts import ConfigFields
from tightfit.models.families.registry import read_generic
from tightfit.models.spec import Role
from tightfit.runtime import resolve
from tightfit.runtime.module_tree import build, read_tree
from tightfit.runtime.resolve import read_unknown, resolve_model

# GPT-BigCode's modelling file uses torch.jit.script, which torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore")

NUM_SAMPLED = 10
WITH_BOTH = """
    Qwen/Qwen3-0.6B Qwen/Qwen3-30B-A3B mistralai/Mixtral-8x7B-v0.1 openai/gpt-oss-20b
    EleutherAI/pythia-1b openai-community/gpt2-xl google/gemma-2-27b microsoft/phi-2
""".split()  # noqa: SIM905 - a list of names reads better than a column of quotes


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "cache"))
    resolve._ask.cache_clear()


def write_config(folder: Path, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_counts_and_matrices_are_those_of_the_modules() -> None:
    """A sample; `tests/integration/tracing/test_module_trees.py` has all."""
    unread = list_types(with_reader=False)
    num_read = 0
    for model_type in unread[:: max(1, len(unread) // NUM_SAMPLED)]:
        if (built := try_build(model_type)) is None:
            continue
        spec = read_tree(*built)
        assert spec.num_params == count_real(built[0]), model_type
        assert all(block.extra_params >= 0 for block in spec.blocks), model_type
        assert our_linears(spec) - real_linears(built[0]) == {}, model_type
        num_read += 1
    assert num_read >= min(len(unread), NUM_SAMPLED) // 2


@pytest.mark.parametrize("name", WITH_BOTH)
def test_a_tree_says_what_the_family_s_reader_says(name: str) -> None:
    row = next(row for row in list_models() if row.model == name)
    ours = load_row(row)
    tree = read_tree(*build(json.loads(read_row(row))))
    for key in ("hidden_size", "vocab_size", "num_heads", "num_kv_heads", "head_dim", "num_params"):
        assert getattr(tree, key) == getattr(ours, key), key
    for key in ("tie_embeddings", "is_gated_mlp", "is_rms_norm", "is_parallel_residual"):
        assert getattr(tree, key) == getattr(ours, key), key
    for key in ("intermediate_size", "num_active_params", "num_sliding_layers", "outer_params"):
        assert getattr(tree, key) == getattr(ours, key), key
    for mine, read in zip(tree.blocks, ours.blocks, strict=True):
        assert set(mine.linears) == set(read.linears)
        assert mine.model_copy(update={"linears": ()}) == read.model_copy(update={"linears": ()})
        # The closed forms take the last one of a role as the one that leads back.
        for role in Role:
            last = [[p for p in one.linears if p.role is role][-1:] for one in (mine, read)]
            assert last[0] == last[1]


def test_a_family_with_attention_of_its_own_is_never_given_another() -> None:
    built = build({"model_type": "mamba2", "num_hidden_layers": 2})
    needs = needs_of(read_tree(*built))
    assert list_proposed(needs) == [Attention.EAGER]
    assert find_attention_problem(Attention.SDPA, needs, is_packed=False)


def test_estimate_and_plan_read_a_folder_of_such_a_family(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type = pick_llama_like()
    folder = write_config(tmp_path / "model", model_type=model_type, **SIZES)
    model, _ = build({"model_type": model_type, **SIZES})

    assert main(["models", str(folder), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert f"{count_real(model)}" in json.dumps(shown)
    assert main(["estimate", str(folder), "--on", "T4"]) == 0
    assert f"`{model_type}` has no config reader here" in " ".join(capsys.readouterr().out.split())

    # From the cache now: no process, no torch.
    resolve._ask.cache_clear()
    monkeypatch.setattr(resolve, "_run", lambda _: pytest.fail("a process was started"))
    assert main(["plan", str(folder), "--on", "T4", "--seq-len", "256"]) == 0
    assert f"`{model_type}`" in capsys.readouterr().out


def test_hostile_configs_end_in_one_error_or_in_the_generic_reader(tmp_path: Path) -> None:
    model_type = pick_llama_like()
    started = time.monotonic()
    wrong: list[tuple[str, Any]] = [
        ("num_hidden_layers", 10**9),
        ("hidden_size", 10**9),
        ("vocab_size", 10**9),
        ("num_hidden_layers", "many"),
        ("num_hidden_layers", -4),
    ]
    for key, value in wrong:
        config: dict[str, Any] = {"model_type": model_type, **SIZES, key: value}
        folder = write_config(tmp_path / "hostile", **config)
        with pytest.raises(UserError) as raised:
            resolve_model(str(folder))
        assert key in raised.value.problem
        assert raised.value.remedy
    assert time.monotonic() - started < 60


def read(**config: Any) -> tuple[Any, list[str]]:
    f = ConfigFields(config, name="it", source="config.json")
    return read_unknown(f), f.warnings


def test_a_family_that_transformers_lacks_is_read_generically() -> None:
    spec, warnings = read(model_type="brand_new", **SIZES)
    config = {**SIZES, "model_type": "brand_new"}
    assert spec == read_generic(ConfigFields(config, name="it", source="config.json"))
    assert len(warnings) == 1
    assert "is not known" in warnings[0]


def test_what_takes_too_long_is_read_generically(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "TIMEOUT_SECONDS", 0.2)
    spec, warnings = read(model_type=pick_llama_like(), **SIZES)
    assert spec.num_params > 0
    assert any("cannot make a model" in warning for warning in warnings)


def test_without_torch_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "list_versions", lambda: {"pydantic": "2"})
    monkeypatch.setattr(resolve, "_run", lambda _: pytest.fail("a process was started"))
    _, warnings = read(model_type=pick_llama_like(), **SIZES)
    assert "is not known" in warnings[0]
