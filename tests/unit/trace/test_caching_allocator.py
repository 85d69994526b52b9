"""The allocator model: torch's rules by hand, and a slow second model to agree with."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slow_allocator import SlowAllocator
from tightfit.core.units import MIB
from tightfit.trace.caching_allocator import (
    AllocatorSettings,
    CachingAllocator,
    CapacityExceeded,
    estimate_least_bytes,
    find_smallest_capacity,
    replay,
)

EXPANDABLE = AllocatorSettings()
CLASSIC = AllocatorSettings(expandable_segments=False)
ALL = [EXPANDABLE, CLASSIC]


def run(
    settings: AllocatorSettings, *sizes_in_mib: float, capacity_in_mib: int | None = None
) -> CachingAllocator:
    """An allocator that serves requests 1, 2, ...; a negative number frees that request."""
    capacity = None if capacity_in_mib is None else capacity_in_mib * MIB
    allocator = CachingAllocator(settings, capacity_bytes=capacity)
    key = 0
    for size in sizes_in_mib:
        if size < 0:
            allocator.free(-int(size))
        else:
            key += 1
            allocator.allocate(key, int(size * MIB))
    return allocator


def held(allocator: CachingAllocator) -> tuple[float, float]:
    """Allocated and reserved MiB."""
    return allocator.allocated_bytes / MIB, allocator.reserved_bytes / MIB


@pytest.mark.parametrize(
    ("num_bytes", "allocated", "reserved"),
    [
        (0, 0, 0),
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 1, 10 * MIB, 10 * MIB),  # rounded first, so it is no longer below 10 MiB
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # a rest of 1 MiB is not split off, and counts
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
        (13 * MIB, 14 * MIB, 14 * MIB),
    ],
)
def test_a_first_request_classic(num_bytes: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator(CLASSIC)
    allocator.allocate(1, num_bytes)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved)
    allocator.free(1)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, reserved)


@pytest.mark.parametrize(
    ("num_bytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (11 * MIB, 11 * MIB, 20 * MIB),
        (20 * MIB, 20 * MIB, 20 * MIB),
        (20 * MIB + 1, 20 * MIB + 512, 40 * MIB),
    ],
)
def test_a_first_request_expandable(num_bytes: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator(EXPANDABLE)
    allocator.allocate(1, num_bytes)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved)


def test_small_and_large_blocks_do_not_mix() -> None:
    assert held(run(CLASSIC, 5, -1, 0.5)) == (0.5, 22)
    assert held(run(EXPANDABLE, 5, -1, 0.5)) == (0.5, 22)


def test_the_smallest_block_that_fits_serves() -> None:
    allocator = run(CLASSIC, 30, 40, -2, -1, 28)
    assert held(allocator) == (28, 70)
    allocator.allocate(4, 40 * MIB)
    assert held(allocator) == (68, 70), "the 40 MiB block was still whole"


def test_freed_neighbours_become_one_block() -> None:
    three = run(CLASSIC, 5, 5, 5, -1, -3, -2)
    three.allocate(4, 18 * MIB)
    assert held(three) == (18, 20)
    kept = run(CLASSIC, 5, 5, 5, -1, -3)
    kept.allocate(4, 11 * MIB)
    assert held(kept) == (17, 32), "a block in use keeps its neighbours apart"


def test_streams_keep_their_free_blocks() -> None:
    allocator = run(CLASSIC, 40, -1)
    allocator.allocate(2, 40 * MIB, stream=7)
    assert held(allocator) == (40, 80)
    sizes, events = [40 * MIB, 40 * MIB], [1, -1, 2]
    apart, shared = (replay(sizes, events, CLASSIC, streams=s) for s in ([0, 7], []))
    assert apart is not None
    assert shared is not None
    assert (apart.peak_reserved_bytes, shared.peak_reserved_bytes) == (80 * MIB, 40 * MIB)


def test_a_full_capacity_releases_whole_free_segments() -> None:
    allocator = run(CLASSIC, 40, 5, -1, -2, 50, capacity_in_mib=60)
    assert held(allocator) == (50, 50)
    assert (allocator.num_retries, allocator.peak_reserved_bytes) == (1, 60 * MIB)
    with pytest.raises(CapacityExceeded):
        run(CLASSIC, 5, 6, -1, 50, capacity_in_mib=60)  # the segment of 20 is partly in use


def test_an_expandable_segment_maps_only_what_is_missing() -> None:
    assert held(run(EXPANDABLE, 30)) == (30, 40)
    assert held(run(EXPANDABLE, 30, 15)) == (45, 60)
    assert held(run(EXPANDABLE, 30, -1, 50)) == (50, 60)
    assert held(run(EXPANDABLE, 0.75, 0.75, 0.75)) == (2.25, 4)


def test_a_block_that_can_grow_is_the_last_choice() -> None:
    allocator = run(EXPANDABLE, 12, 18, -1, 9)
    assert held(allocator) == (27, 40)
    allocator.allocate(4, 12 * MIB)
    assert held(allocator) == (39, 60), "the 9 MiB lie in the gap of 12, not in the end of 10"


def test_free_pages_are_unmapped_and_mapped_elsewhere() -> None:
    allocator = run(EXPANDABLE, 40, 40, -1, 60, capacity_in_mib=100)
    assert held(allocator) == (100, 100)
    assert allocator.num_retries == 1
    with pytest.raises(CapacityExceeded):
        run(EXPANDABLE, 40, 40, -1, 60, capacity_in_mib=98)


def test_a_page_that_is_partly_in_use_stays() -> None:
    allocator = run(EXPANDABLE, 5, 70, 5, -2)
    allocator.release_cached()
    assert held(allocator) == (10, 40), "of 0..80, the pages 20..60 are free"
    allocator.allocate(4, 15 * MIB)
    assert held(allocator) == (25, 40), "the rest of the first page"
    allocator.allocate(5, 30 * MIB)
    assert held(allocator) == (55, 60), "20 MiB more, before the 15 MiB left of the last page"


def test_the_limit_is_compared_with_a_whole_segment_not_with_pages() -> None:
    over = run(EXPANDABLE, 30, 15, capacity_in_mib=58)
    assert held(over) == (45, 60), "40 + 16 passed, then a page of 20 was mapped"
    with pytest.raises(CapacityExceeded):
        run(EXPANDABLE, 30, 25, capacity_in_mib=62)  # 40 + 26, though only 20 would be mapped


def test_the_smallest_fraction_may_lie_below_the_live_bytes() -> None:
    sizes, events = [1, 11 * MIB, 3 * MIB], [1, -1, 2, 3]
    assert estimate_least_bytes(sizes, events) == 14 * MIB
    assert find_smallest_capacity(sizes, events, EXPANDABLE) == 12 * MIB, "12 pass, 20 are mapped"


SIZES = st.sampled_from([1, 512, 4000, MIB // 2, MIB - 512, MIB, MIB + 1]) | st.sampled_from(
    [3, 5, 9, 10, 11, 12, 15, 19, 20, 21, 30, 40, 41, 60, 100, 127, 128, 129, 150, 200]
).map(lambda size: size * MIB)
STEPS = st.lists(
    st.tuples(st.booleans(), SIZES, st.integers(min_value=0, max_value=1000)), max_size=60
)
SETTINGS = st.sampled_from(ALL)
CAPACITIES = st.none() | st.integers(min_value=10, max_value=400).map(lambda size: size * 2 * MIB)


def as_events(steps: list[tuple[bool, int, int]]) -> tuple[list[int], list[int]]:
    """Random requests, and frees of random live ones, in a recording's form."""
    sizes: list[int] = []
    events: list[int] = []
    live: list[int] = []
    for is_free, size, choice in steps:
        if is_free and live:
            events.append(-live.pop(choice % len(live)))
        else:
            sizes.append(size)
            live.append(len(sizes))
            events.append(len(sizes))
    return sizes, events


@given(steps=STEPS, settings=SETTINGS, capacity=CAPACITIES)
def test_agrees_with_the_slow_model_after_every_event(
    steps: list[tuple[bool, int, int]], settings: AllocatorSettings, capacity: int | None
) -> None:
    sizes, events = as_events(steps)
    model = CachingAllocator(settings, capacity_bytes=capacity)
    slow = SlowAllocator(settings, capacity)
    for event in events:
        if event < 0:
            model.free(-event)
            slow.free(-event)
        else:
            try:
                slow.allocate(event, sizes[event - 1])
            except CapacityExceeded:
                with pytest.raises(CapacityExceeded):
                    model.allocate(event, sizes[event - 1])
                break
            model.allocate(event, sizes[event - 1])
        assert model.allocated_bytes == slow.total(used=True)
        assert model.reserved_bytes == slow.total(used=False)
        assert model.num_retries == slow.retries


@given(steps=STEPS, settings=st.sampled_from(ALL))
def test_the_reserve_covers_blocks_and_goes_when_they_do(
    steps: list[tuple[bool, int, int]], settings: AllocatorSettings
) -> None:
    sizes, events = as_events(steps)
    allocator = CachingAllocator(settings)
    for event in events:
        if event < 0:
            allocator.free(-event)
        else:
            allocator.allocate(event, sizes[event - 1])
        assert allocator.reserved_bytes >= allocator.allocated_bytes
    for key in range(1, len(sizes) + 1):
        allocator.free(key)
    assert allocator.allocated_bytes == 0
    allocator.release_cached()
    assert allocator.reserved_bytes == 0


@given(steps=STEPS, settings=st.sampled_from(ALL))
def test_the_smallest_capacity_survives_and_less_does_not(
    steps: list[tuple[bool, int, int]], settings: AllocatorSettings
) -> None:
    sizes, events = as_events(steps)
    smallest = find_smallest_capacity(sizes, events, settings)
    assert replay(sizes, events, settings, capacity_bytes=smallest) is not None
    passing = 18 * MIB if settings is EXPANDABLE else 0  # a fraction's check sees no page of 20
    assert smallest >= estimate_least_bytes(sizes, events) - passing
    if sizes:
        less = max(0, smallest - 2 * MIB)
        assert replay(sizes, events, settings, capacity_bytes=less) is None


def test_a_failure_above_the_smallest_capacity_raises_the_answer() -> None:
    """Random jobs, until survival is seen to be no threshold: then the answer must be above."""
    seen = 0
    for seed in range(400):
        rng = random.Random(seed)
        steps = [
            (rng.random() < 0.5, rng.choice([5, 9, 12, 15, 21, 30, 41, 60]) * MIB, rng.randrange(9))
            for _ in range(40)
        ]
        sizes, events = as_events(steps)
        unbounded = replay(sizes, events, CLASSIC)
        assert unbounded is not None
        top = unbounded.peak_reserved_bytes
        capacities = range(
            -(-estimate_least_bytes(sizes, events) // (2 * MIB)) * 2 * MIB, top, 2 * MIB
        )
        survived = [
            replay(sizes, events, CLASSIC, capacity_bytes=c) is not None for c in capacities
        ]
        if any(early and not late for early, late in pairwise(survived)):
            seen += 1
            smallest = find_smallest_capacity(sizes, events, CLASSIC)
            points = [smallest + (top - smallest) * k // 5 for k in range(6)]
            assert all(replay(sizes, events, CLASSIC, capacity_bytes=p) for p in points)
    assert seen > 3
