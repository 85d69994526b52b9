"""Differences between two answers: nothing lost, nothing invented, quick on long ones."""

from __future__ import annotations

import re
import time

from hypothesis import example, given
from hypothesis import strategies as st

from machine_pace import allow
from tightfit.serving.page.components import MAX_DIFF_WORDS, DiffPiece, find_difference

TEXTS = st.lists(
    st.sampled_from(
        ["SELECT", "name", "from", " ", "\n", "\t", ".", ",", "é", "名", "\u2028", "ab"]
    ),
    max_size=40,
).map("".join)


def _words(pieces: tuple[DiffPiece, ...], *, is_shared: bool) -> list[str]:
    text = " ".join(piece.text for piece in pieces if piece.is_shared == is_shared)
    return re.findall(r"\w+|[^\w\s]", text)


@given(TEXTS, TEXTS)
@example("", "")
@example("  ", "a  ")
def test_pieces_are_the_answers_and_shared_ones_say_the_same(left: str, right: str) -> None:
    found = find_difference(left, right)

    assert "".join(piece.text for piece in found.left) == left
    assert "".join(piece.text for piece in found.right) == right
    assert _words(found.left, is_shared=True) == _words(found.right, is_shared=True)


@given(TEXTS)
def test_an_answer_differs_from_itself_in_nothing(text: str) -> None:
    found = find_difference(text, text)

    assert found.shared_fraction == 1
    assert all(piece.is_shared for piece in found.left + found.right)


def test_only_the_changed_words_are_marked() -> None:
    found = find_difference(
        "SELECT name FROM singer WHERE age > 20;", "SELECT count(*) FROM singer WHERE age > 20;"
    )

    assert [piece.text for piece in found.left if not piece.is_shared] == [" name"]
    assert [piece.text for piece in found.right if not piece.is_shared] == [" count(*)"]


def test_spaces_and_line_ends_alone_are_no_difference() -> None:
    assert find_difference("a b\nc", "a  b c\n").shared_fraction == 1


def test_long_answers_are_compared_by_the_line_and_in_time() -> None:
    lines = [f"line {number} of a long and tedious answer" for number in range(MAX_DIFF_WORDS)]
    changed = [*lines[:100], "another line", *lines[101:]]
    began = time.process_time()  # a pause of the machine is not ours

    found = find_difference("\n".join(lines), "\n".join(changed))

    assert time.process_time() - began < allow(5)
    assert [piece.text.strip() for piece in found.right if not piece.is_shared] == ["another line"]
