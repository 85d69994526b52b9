"""Steps that are written down again without being run."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tightfit.trace.recording import repeat_events


def test_a_step_is_repeated_with_numbers_of_its_own() -> None:
    assert repeat_events([5, 6, -5, 7, -7, -6], first=20) == [20, 21, -20, 22, -22, -21]


def test_a_step_that_leaves_something_standing_is_not_repeated() -> None:
    assert repeat_events([5, 6, -5], first=20) is None


def test_a_step_that_ends_something_older_is_not_repeated() -> None:
    assert repeat_events([5, -2, -5], first=20) is None
    assert repeat_events([5, -2], first=20) is None, "as many ends as beginnings"


@given(st.lists(st.integers(1, 8), max_size=12), st.randoms())
def test_what_is_repeated_repeats_itself(sizes: list[int], chance: Random) -> None:
    """Each end comes as long after its beginning as before, and twice is as good as once."""
    events: list[int] = []
    for number, _ in enumerate(sizes, start=1):
        events.insert(chance.randint(0, len(events)), number)
        at = events.index(number)
        events.insert(chance.randint(at + 1, len(events)), -number)

    once = repeat_events(events, first=100)

    assert once is not None
    assert [event > 0 for event in once] == [event > 0 for event in events]
    begun = [event for event in once if event > 0]
    assert begun == list(range(100, 100 + len(sizes))), "numbered in the order of beginnings"
    ends = [events.index(-event) - place for place, event in enumerate(events) if event > 0]
    again = [once.index(-event) - place for place, event in enumerate(once) if event > 0]
    assert again == ends
    assert repeat_events(once, first=100) == once
