"""One round of comparing: a prompt, two answers, what differs, and the vote on it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from urllib.parse import quote

from tightfit.core.errors import InvalidInputError
from tightfit.serve.compare.diff import Difference, Piece, find_difference
from tightfit.serve.compare.html import Card, render_card, render_note, render_tally
from tightfit.serve.compare.models import Models
from tightfit.serve.compare.settings import Defaults, make_sampling
from tightfit.serve.compare.stream import Side, make_messages
from tightfit.serve.compare.votes import Choice, Vote, VoteBox, VoteSettings, now

LEAST_SHARED = 0.1
"""Of the words: answers with less in common are different throughout, and marks say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One prompt and what became of it. Lives on the server; only cards reach the browser."""

    id: str
    prompt: str
    system: str
    settings: VoteSettings
    order: tuple[int, int]
    """Which model stands on the left and which on the right."""
    is_blind: bool
    sides: tuple[Side, Side] = (Side(), Side())
    """By place on the page."""
    is_voted: bool = False

    @property
    def has_ended(self) -> bool:
        return all(side.has_ended for side in self.sides)

    @property
    def can_vote(self) -> bool:
        return not self.is_voted and all(side.done is not None for side in self.sides)

    @property
    def difference(self) -> Difference | None:
        """Once both answers are there."""
        if any(side.done is None for side in self.sides):
            return None
        return find_difference(self.sides[0].text, self.sides[1].text)

    @property
    def are_names_hidden(self) -> bool:
        return self.is_blind and not self.is_voted


class CompareDesk:
    """What the tab does, without its looks."""

    def __init__(self, models: Models, votes: VoteBox, defaults: Defaults) -> None:
        self.models = models
        self.votes = votes
        self.defaults = defaults

    def open_round(
        self, prompt: str, system: str, settings: VoteSettings, *, is_blind: bool
    ) -> Round:
        if not prompt.strip():
            raise InvalidInputError("The prompt is empty.", remedy="write one, or take an example")
        is_swapped = is_blind and secrets.randbelow(2) == 1
        return Round(
            id=secrets.token_hex(8),
            prompt=prompt,
            system=system.strip(),
            settings=settings,
            order=(1, 0) if is_swapped else (0, 1),
            is_blind=is_blind,
        )

    def play(self, opened: Round, visitor: str) -> Iterator[Round]:
        """The round as its answers grow."""
        sampling = make_sampling(opened.settings, self.defaults.sampling)
        messages = make_messages(opened.system, opened.prompt)
        for left, right in self.models.stream(opened.order, messages, sampling, visitor=visitor):
            yield replace(opened, sides=(left, right))

    def cast(self, played: Round, button: int) -> tuple[Round, bool]:
        """Count a vote, given by the button's place; False where it had been counted before."""
        by_model = {model: played.sides[place] for place, model in enumerate(played.order)}
        if button < len(played.order):
            choice = (Choice.A, Choice.B)[played.order[button]]
        else:
            choice = (Choice.TIE, Choice.BOTH_BAD)[button - len(played.order)]
        vote = Vote(
            id=played.id,
            time=now(),
            prompt=played.prompt,
            system=played.system,
            settings=played.settings,
            name_a=self.models.names[0],
            name_b=self.models.names[1],
            answer_a=by_model[0].text,
            answer_b=by_model[1].text,
            vote=choice,
            blind=played.is_blind,
            left="a" if played.order[0] == 0 else "b",
        )
        return replace(played, is_voted=True), self.votes.cast(vote)

    def cards(self, shown: Round | None, *, is_marked: bool) -> tuple[str, str]:
        """Both sides as markup."""
        found = shown.difference if shown is not None and is_marked else None
        is_worth_it = found is not None and found.shared_fraction >= LEAST_SHARED
        pieces = (found.left, found.right) if found is not None and is_worth_it else (None, None)
        return self._card(shown, 0, pieces[0]), self._card(shown, 1, pieces[1])

    def verdict(self, shown: Round | None, *, is_marked: bool) -> str:
        """One line on how much the answers have in common."""
        found = shown.difference if shown is not None and is_marked else None
        if shown is None or found is None:
            return ""
        if shown.sides[0].text == shown.sides[1].text:
            return render_note("Both answers are the same.")
        shared = f"{found.shared_fraction:.0%} of the words are in both answers"
        if found.shared_fraction < LEAST_SHARED:
            return render_note(f"Only {shared}; to mark all the rest would show nothing.")
        return render_note(f"{shared}; the rest is marked.")

    def tally(self, *, said: str = "") -> str:
        names, path = self.models.names, self.votes.path
        export = f"gradio_api/file={quote(str(path.resolve()))}" if path.exists() else None
        counted = self.votes.count(names[0], names[1])
        return render_tally(counted, names, said=said, export=export)

    def _card(self, shown: Round | None, place: int, pieces: tuple[Piece, ...] | None) -> str:
        if shown is None:
            card = Card(
                number=place + 1, name=self.models.names[place], info=self.models.info(place)
            )
            return render_card(card)
        model, is_hidden = shown.order[place], shown.are_names_hidden
        card = Card(
            number=place + 1,
            name=None if is_hidden else self.models.names[model],
            info=self.models.info(model),
            side=shown.sides[place],
            pieces=pieces,
            are_figures_shown=not is_hidden,
        )
        return render_card(card)
