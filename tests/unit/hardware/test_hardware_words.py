"""Hardware in words: what is understood, and what is refused with a remedy."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightfit.core.errors import InvalidInputError, NotFoundError, UserError
from tightfit.hardware.resolve import parse_hardware


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("V100-32GB", [(1, 1, "Tesla V100-SXM2-32GB")]),
        ("4xV100-32GB", [(1, 4, "Tesla V100-SXM2-32GB")]),
        ("4 x V100-32GB", [(1, 4, "Tesla V100-SXM2-32GB")]),
        ("4*V100", [(1, 4, "Tesla V100-SXM2-16GB")]),
        ("4×T4", [(1, 4, "Tesla T4")]),
        ("2n x 4xA100-40GB", [(2, 4, "A100-SXM4-40GB")]),
        ("2nx4xA100", [(2, 4, "A100-SXM4-40GB")]),
        ("2N X 4XA100", [(2, 4, "A100-SXM4-40GB")]),
        ("2 nodes x 4xA100-40GB", [(2, 4, "A100-SXM4-40GB")]),
        ("1 node x 8xH100", [(1, 8, "H100-SXM5-80GB")]),
        ("3n x T4", [(3, 1, "Tesla T4")]),
        ("4090", [(1, 1, "GeForce RTX 4090")]),
        ("2x4090", [(1, 2, "GeForce RTX 4090")]),
        ("2 x RTX 4090-24GB", [(1, 2, "GeForce RTX 4090")]),
        ("6xT4 + 2xRTX 6000", [(1, 6, "Tesla T4"), (1, 2, "Quadro RTX 6000")]),
        ("6xT4,2xRTX6000", [(1, 6, "Tesla T4"), (1, 2, "Quadro RTX 6000")]),
        ("65536xT4", [(1, 65536, "Tesla T4")]),
    ],
)
def test_words_are_understood(text: str, expected: list[tuple[int, int, str]]) -> None:
    cluster = parse_hardware(text)
    assert [
        (group.num_nodes, group.node.num_gpus, group.node.gpu.name) for group in cluster.groups
    ] == expected
    assert cluster.source == "words"


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("", InvalidInputError, "No hardware"),
        ("T4+", InvalidInputError, "empty group"),
        ("0xT4", InvalidInputError, "`0`"),
        ("-1xT4", InvalidInputError, "`-1`"),
        ("65537xT4", InvalidInputError, "65537"),
        ("0n x 4xT4", InvalidInputError, "`0` nodes"),
        ("9" * 500 + "xT4", InvalidInputError, "must be 1 to"),
        ("T4" * 600, InvalidInputError, "too long"),
        ("V100-24GB", InvalidInputError, "16 or 32 GB"),
        ("RTX 4090-48GB", InvalidInputError, "24 GB, not 48 GB"),
        ("4xV1000", NotFoundError, "Did you mean"),
        ("GPU-24GB", NotFoundError, "Cards with 24 GB"),
        ("gibberish", NotFoundError, "No GPU named"),
    ],
)
def test_bad_words_are_refused(text: str, kind: type[UserError], said: str) -> None:
    with pytest.raises(kind) as caught:
        parse_hardware(text)
    assert said in caught.value.problem
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("V100x4", "4xV100"),
        ("V100:4", "4xV100"),
        ("4 V100", "4xV100"),
        ("2x4xA100", "2n x 4xA100"),
    ],
)
def test_words_in_the_wrong_order_are_put_right(text: str, right: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        parse_hardware(text)
    assert right in caught.value.remedy
    parse_hardware(right)


def test_the_chosen_variant_is_said() -> None:
    assert "Tesla V100-SXM2-16GB" in parse_hardware("4xV100").warnings[0]
    assert parse_hardware("4xV100-PCIE-32GB").warnings == ()


def test_more_gpus_than_a_node_holds_are_pointed_out() -> None:
    [warning] = parse_hardware("64xT4").warnings
    assert "one node" in warning
    assert "8n x 8xT4" in warning
    assert parse_hardware("8n x 8xT4").num_gpus == 64


@given(st.text(max_size=60))
def test_any_text_is_understood_or_refused(text: str) -> None:
    with contextlib.suppress(UserError):
        assert parse_hardware(text).num_gpus >= 1


_PIECES = st.sampled_from(
    [
        "4",
        "x",
        "n",
        " ",
        "nodes",
        "V100",
        "-32GB",
        "+",
        ",",
        "0",
        "-",
        "RTX",
        "T4",
        "*",
        "99999999999",
    ]
)


@given(st.lists(_PIECES, max_size=10).map("".join))
def test_any_arrangement_of_the_grammar_is_understood_or_refused(text: str) -> None:
    with contextlib.suppress(UserError):
        assert parse_hardware(text).num_gpus >= 1
