"""The cost model: what it must say whatever the rates are, and cases worked by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightfit.clusters.staging import CopyMethod
from tightfit.clusters.staging.cost import (
    BETTER_FRACTION,
    MAX_BLOCK_BYTES,
    MIN_BLOCK_BYTES,
    CopyLoad,
    CopyRates,
    choose_block_bytes,
    choose_method,
    estimate_seconds,
)
from tightfit.clusters.staging.nodes import list_children

GB = 10**9
rates = st.floats(1e5, 1e11)
loads = st.builds(
    lambda nodes, size, block: CopyLoad(
        num_nodes=nodes, direct_bytes=size, head_bytes=size, relay_bytes=size, block_bytes=block
    ),
    st.integers(1, 2000),
    st.integers(1, 10**12),
    st.sampled_from([1 << 20, 1 << 23, 1 << 24]),
)
measured = st.builds(
    lambda one, share, link: CopyRates(one_reader=one, all_readers=one * share, link=link),
    rates,
    st.floats(0.001, 1.0),
    rates,
)


def load(num_nodes: int, num_bytes: int = 14 * GB, block: int = 8 << 20) -> CopyLoad:
    return CopyLoad(
        num_nodes=num_nodes,
        direct_bytes=num_bytes,
        head_bytes=num_bytes,
        relay_bytes=num_bytes,
        block_bytes=block,
    )


def test_the_formulas_worked_by_hand() -> None:
    seconds = estimate_seconds(
        load(5, 10 * GB, 10**7), CopyRates(one_reader=2e9, all_readers=0.5e9, link=1e9)
    )

    assert seconds[CopyMethod.ALL_READ] == pytest.approx(20.0)
    assert seconds[CopyMethod.CHAIN] == pytest.approx(10.0 + 4 * 0.01)
    assert seconds[CopyMethod.TREE] == pytest.approx(20.0 + 2 * 2 * 0.01)


@given(load=loads, rates=measured)
def test_the_choice_is_the_best_or_all_read_within_its_margin(
    load: CopyLoad, rates: CopyRates
) -> None:
    choice = choose_method(load, rates)
    best = min(choice.seconds.values())

    assert choice.seconds[choice.how] <= best / BETTER_FRACTION * (1 + 1e-9)
    assert choice.why
    if load.num_nodes == 1:
        assert choice.how is CopyMethod.ALL_READ


@given(load=loads, rates=measured, factor=st.floats(1.0, 50.0))
def test_faster_links_and_smaller_models_never_take_longer(
    load: CopyLoad, rates: CopyRates, factor: float
) -> None:
    assert rates.link is not None
    before = estimate_seconds(load, rates)
    faster = estimate_seconds(load, rates.model_copy(update={"link": rates.link * factor}))
    smaller = estimate_seconds(
        replace(load, direct_bytes=load.direct_bytes // 2, head_bytes=load.head_bytes // 2), rates
    )

    assert all(faster[how] <= before[how] * (1 + 1e-9) for how in before)
    assert all(smaller[how] <= before[how] * (1 + 1e-9) for how in before)


@given(rates=measured, nodes=st.integers(2, 500))
def test_one_more_node_never_makes_it_faster(rates: CopyRates, nodes: int) -> None:
    few, many = estimate_seconds(load(nodes), rates), estimate_seconds(load(nodes + 1), rates)

    assert all(many[how] >= few[how] * (1 - 1e-9) for how in few)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (CopyRates(one_reader=2e9, all_readers=0.1e9, link=1.2e9), CopyMethod.CHAIN),
        (CopyRates(one_reader=2e9, all_readers=1.1e9, link=1.2e9), CopyMethod.ALL_READ),
        (CopyRates(one_reader=0.3e9, all_readers=0.003e9, link=1.2e9), CopyMethod.TREE),
    ],
)
def test_a_thousand_nodes(found: CopyRates, expected: CopyMethod) -> None:
    """A slow reader leaves the links idle: a tree then costs nothing and saves 999 steps."""
    assert choose_method(load(1000), found).how is expected


def test_a_head_with_a_copy_needs_no_storage() -> None:
    some = replace(load(3), head_bytes=0)
    choice = choose_method(some, CopyRates(one_reader=None, all_readers=0.2e9, link=1e9))

    assert choice.how is CopyMethod.CHAIN
    assert "has a copy already" in choice.why


def test_nodes_that_cannot_all_read_are_not_made_to() -> None:
    choice = choose_method(load(4), CopyRates(one_reader=1e9, all_readers=None, link=1e6))

    assert CopyMethod.ALL_READ not in choice.seconds
    assert choice.how is CopyMethod.CHAIN


def test_checking_is_part_of_the_prediction() -> None:
    plain = estimate_seconds(load(2), CopyRates(one_reader=1e9, all_readers=1e9, link=1e9))
    checked = estimate_seconds(
        replace(load(2), checked_bytes=14 * GB),
        CopyRates(one_reader=1e9, all_readers=1e9, link=1e9, check=7e9),
    )

    assert all(checked[how] == pytest.approx(plain[how] + 2.0) for how in plain)


@given(num_bytes=st.integers(0, 10**13))
def test_blocks_are_of_a_bounded_power_of_two(num_bytes: int) -> None:
    size = choose_block_bytes(num_bytes)

    assert MIN_BLOCK_BYTES <= size <= MAX_BLOCK_BYTES
    assert size & (size - 1) == 0


@given(num_nodes=st.integers(1, 300), how=st.sampled_from([CopyMethod.CHAIN, CopyMethod.TREE]))
def test_everybody_is_fed_once(num_nodes: int, how: CopyMethod) -> None:
    fed = [child for place in range(num_nodes) for child in list_children(how, place, num_nodes)]

    assert sorted(fed) == list(range(1, num_nodes))


def test_the_page_says_what_the_formulas_say() -> None:
    page = (Path(__file__).parents[3] / "docs" / "staging.md").read_text()
    storages = {"one server": (1e9, 1e9), "40 GB/s": (2e9, 40e9), "0.2 GB/s": (0.2e9, 0.2e9)}
    rows = re.findall(r"^\| ([^|]+ nodes at ([\d.]+) GB/s[^|]*) \|(.+)\|$", page, re.M)

    assert len(rows) == 7
    for name, link_text, rest in rows:
        nodes, *written = [cell.strip() for cell in rest.split("|")]
        one, everything = next(value for start, value in storages.items() if start in name[:11])
        num_nodes, link = int(nodes.replace(",", "")), float(link_text) * 1e9
        reader = min(one, link)
        found = CopyRates(
            one_reader=reader, all_readers=min(reader, everything / num_nodes), link=link
        )
        choice = choose_method(load(num_nodes), found)
        seconds = [
            f"{choice.seconds[how]:,.0f} s"
            for how in (CopyMethod.ALL_READ, CopyMethod.TREE, CopyMethod.CHAIN)
        ]
        assert written == [*seconds, choice.how.value], name
