"""StopTexts against the plain truth: cut the whole text at the first stop."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tightfit.data.templates import StopTextFilter

LETTERS = st.text(alphabet="ab<|>", max_size=30)
STOPS = st.lists(st.text(alphabet="ab<|>", max_size=4), max_size=3)


@given(text=LETTERS, stops=STOPS, data=st.data())
def test_any_way_of_cutting_it_up_gives_the_same(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    stream = StopTextFilter(stops)
    shown, at = "", 0
    while at < len(text) and not stream.is_stopped:
        size = data.draw(st.integers(1, 5))
        shown += stream.push(text[at : at + size])
        at += size
        assert not any(stop and stop in shown for stop in stops)
    shown += stream.finish()

    seen = text[:at]
    ends = [seen.index(stop) for stop in stops if stop and stop in seen]
    # Pieces are searched as they come: of two stops in one piece the earlier one counts.
    assert shown == stream.text
    assert stream.is_stopped == bool(ends)
    assert seen.startswith(shown)
    if ends:
        assert shown == seen[: min(ends)]
    else:
        assert shown == seen
    assert stream.push("more") == "" or not stream.is_stopped
