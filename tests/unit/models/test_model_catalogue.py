"""Every catalogue row loads, and counts what the public says it counts."""

from __future__ import annotations

import csv
import hashlib
from importlib.resources import files
from pathlib import Path

import pytest

from tightfit.core.dtypes import Dtype
from tightfit.models.catalogue import CatalogueRow, list_models, load_row
from tightfit.models.resolve import resolve_model, search_models
from tightfit.models.spec import explain_parameter_count

GOLDEN = Path(__file__).parents[2] / "golden" / "model_parameters.csv"


def golden_rows() -> list[dict[str, str]]:
    with GOLDEN.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def rows_with_a_public_count() -> list[CatalogueRow]:
    return [row for row in list_models() if row.params_stated is not None]


def test_every_row_has_a_file_and_every_file_a_row() -> None:
    named = sorted(row.file for row in list_models())

    folder = files("tightfit.catalogue").joinpath("models")
    assert named == sorted(one.name for one in folder.iterdir() if one.name.endswith(".json"))
    assert len(named) == len(set(named)) >= 79


def test_model_names_are_unique_whatever_the_case() -> None:
    folded = [row.model.casefold() for row in list_models()]

    assert len(folded) == len(set(folded))


@pytest.mark.parametrize("row", list_models(), ids=lambda row: row.model)
def test_row_loads_and_names_its_sources(row: CatalogueRow) -> None:
    spec = load_row(row)

    assert spec.name == row.model
    assert spec.num_params > 1_000_000
    assert row.config_source
    assert row.config_kind in {"verbatim", "built", "rebuilt", "unverified"}
    assert sum(part.num_params for part in explain_parameter_count(spec)) == spec.num_params


@pytest.mark.parametrize("row", [row for row in list_models() if row.sha256], ids=lambda r: r.model)
def test_config_files_are_those_that_were_recorded(row: CatalogueRow) -> None:
    data = files("tightfit.catalogue").joinpath("models").joinpath(row.file).read_bytes()

    assert hashlib.sha256(data).hexdigest() == row.sha256


def test_counts_equal_the_public_statement_wherever_the_two_agree() -> None:
    agreeing = [row for row in golden_rows() if row["agree"] == "yes"]
    ours = {row["model"]: resolve_model(row["model"]).num_params for row in agreeing}

    assert ours == {row["model"]: int(row["params_stated"]) for row in agreeing}
    assert len(ours) == 53


def test_counts_and_shapes_equal_the_recorded_facts_for_every_model() -> None:
    rows = golden_rows()
    for row in rows:
        spec = resolve_model(row["model"])
        inner = row["moe_intermediate"] or row["intermediate"]
        assert spec.num_params == int(row["params_computed"]), row["model"]
        assert spec.hidden_size == int(row["hidden_size"]), row["model"]
        assert spec.num_heads == int(row["heads"]), row["model"]
        assert spec.num_kv_heads == int(row["kv_heads"]), row["model"]
        assert spec.head_dim == int(row["head_dim"]), row["model"]
        assert spec.intermediate_size == int(inner), row["model"]
        assert spec.vocab_size == int(row["vocab"]), row["model"]
        assert spec.tie_embeddings == (row["tie_embeddings"] == "True"), row["model"]
        assert spec.is_rms_norm == (row["norm"] == "RMSNorm"), row["model"]
        decoders = [block for block in spec.blocks if block.kind == "decoder"]
        assert sum(block.num_layers for block in decoders) == int(row["layers"]), row["model"]

    assert len(rows) == 79


@pytest.mark.parametrize("row", rows_with_a_public_count(), ids=lambda row: row.model)
def test_a_count_that_differs_from_the_public_one_says_why(row: CatalogueRow) -> None:
    if load_row(row).num_params != row.params_stated:
        assert row.agree != "yes"
        assert row.note


def test_falcon_7b_is_tied_in_memory_though_its_file_stores_the_head_again() -> None:
    spec = resolve_model("tiiuae/falcon-7b")
    head = explain_parameter_count(spec)[-1]

    assert spec.num_params == 6_921_720_704
    assert (head.part, head.num_params) == ("lm_head", 0)
    assert "7,217,189,760" in head.note


def test_qwen3_06b_names_the_figure_that_counts_the_head_twice() -> None:
    head = explain_parameter_count(resolve_model("Qwen3-0.6B"))[-1]

    assert "751,632,384" in head.note


def test_codegen_has_a_head_of_its_own_with_a_bias() -> None:
    spec = resolve_model("codegen2-1B")

    assert not spec.tie_embeddings
    assert explain_parameter_count(spec)[-1].num_params == 51_200 * (2_048 + 1)


def test_mixtral_uses_the_published_number_of_active_parameters() -> None:
    assert resolve_model("Mixtral-8x7B").num_active_params == 12_879_925_248


def test_stored_dtype_is_read_unless_the_file_is_quantized() -> None:
    assert resolve_model("falcon-40b").stored_dtype is Dtype.BF16
    assert resolve_model("gpt-oss-20b").stored_dtype is None
    assert any("mxfp4" in warning for warning in resolve_model("gpt-oss-20b").warnings)


@pytest.mark.parametrize(
    ("model", "window", "num_sliding"),
    [
        ("gemma-2-2b", 4096, 13),
        ("gemma-3-1b-it", 512, 22),
        ("gemma-3-27b-it", 1024, 52),
        ("gpt-oss-20b", 128, 12),
        ("Mistral-7B-Instruct-v0.3", None, 0),
        ("Qwen2.5-72B-Instruct", None, 0),
    ],
)
def test_sliding_layers_follow_the_family_pattern(
    model: str, window: int | None, num_sliding: int
) -> None:
    spec = resolve_model(model)

    assert (spec.sliding_window, spec.num_sliding_layers) == (window, num_sliding)


def test_unverified_config_warns() -> None:
    assert any("not verified" in warning for warning in resolve_model("codegen2-7B").warnings)


def test_search_finds_by_any_part_in_any_case() -> None:
    names = {row.model for row in search_models("LLAMA 70b")}

    assert {"meta-llama/Llama-2-70b-hf", "meta-llama/Meta-Llama-3-70B"} <= names
    assert all("70b" in name.lower() for name in names)
    assert search_models("no-such-thing") == []
    assert len(search_models("")) == len(list_models())
