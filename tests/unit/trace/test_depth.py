"""Recordings of toy jobs, extended in depth, beside those of the deep toy job itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from tightfit.trace.depth import (
    CannotExtend,
    DepthExtrapolation,
    find_fewest_recomputed,
    plan_depths,
    sort_ends,
)
from tightfit.trace.recording import Allocation, Recording

Sizes = Callable[[int], int]


class Toy:
    """A training job on paper: weights, two steps of forward, backward and update.

    Recomputed layers keep their input alone and make the rest anew in the backward pass.
    """

    def __init__(self, kinds: Sequence[int], *, seed: int = 0, extra: Sizes | None = None) -> None:
        self.recording = Recording()
        self._num_recomputed, self._depth = kinds[0] if len(kinds) > 1 else 0, sum(kinds)
        self._extra = extra or (lambda _layer: 0)
        chance = random.Random(seed)
        self._inner = [chance.choice((256, 512, 512, 4096)) for _ in range(chance.randint(1, 4))]
        self._params = [chance.choice((64, 128, 128)) for _ in range(chance.randint(1, 3))]
        self._stage, self._step = "load", 0
        self._layer: int | None = None

    def make(self, size: int, op: str, *, category: str = "temporary", module: str = "") -> int:
        name = f"model.layers.{self._layer}.{module}" if module else ""
        self.recording.allocations.append(
            Allocation(
                num_bytes=size,
                op=op,
                module=name,
                stage=self._stage,
                step=self._step,
                layer=self._layer,
                shape=(size // 4,),
                dtype="float32",
                category=category,
            )
        )
        self.recording.events.append(len(self.recording.allocations))
        return len(self.recording.allocations)

    def end(self, *made: int) -> None:
        self.recording.events.extend(-one for one in made)

    def run(self) -> Recording:
        for size in (1000, *self._params * self._depth, 1000):
            self.make(size, "", category="weights")
        states: list[int] = []
        for step in (1, 2):
            self._step = step
            gradients = self._backward(self._forward())
            states = self._update(gradients, states)
        return self.recording

    def _forward(self) -> list[list[int]]:
        self._stage = "forward"
        saved = [[self.make(2048, "embed", category="activations")]]
        for layer in range(self._depth):
            self._layer = layer
            saved.append(self._compute(is_kept=layer >= self._num_recomputed))
        self._layer = None
        return saved

    def _compute(self, *, is_kept: bool) -> list[int]:
        scratch = self.make(700 + self._extra(self._layer or 0), "norm", module="norm")
        inner = [self.make(size, "mm", module=f"proj.{size}") for size in self._inner]
        self.end(scratch)
        output = self.make(2048, "add", module="mlp")
        if not is_kept:
            self.end(*inner)
            return [output]
        return [*inner, output]

    def _backward(self, saved: list[list[int]]) -> list[list[int]]:
        self._stage = "backward"
        logits = self.make(5000, "logits")
        flowing = self.make(2048, "gradient")
        self.end(logits)
        gradients: list[list[int]] = []
        for layer in reversed(range(self._depth)):
            self._layer = layer
            held = saved[layer + 1]
            if layer < self._num_recomputed:
                held = [*self._compute(is_kept=True), *held]
            gradients.insert(0, [self.make(size, "mm_backward") for size in self._params])
            following = self.make(2048, "gradient")
            self.end(*held, flowing)
            flowing = following
        self._layer = None
        self.end(flowing, *saved[0])
        return gradients

    def _update(self, gradients: list[list[int]], states: list[int]) -> list[int]:
        self._stage = "update"
        flat = [one for layer in gradients for one in layer]
        norms = [self.make(4, "norm") for _ in flat]
        stacked = self.make(4 * len(norms), "stack")
        self.end(*norms, stacked)
        if not states:
            sizes = self._params * self._depth
            states = [self.make(2 * size, "state", category="optimizer") for size in sizes]
        self.end(*flat)
        return states


def _grow(kinds: Sequence[int], **toy: object) -> Recording:
    plan = plan_depths(kinds)
    grown = [Toy(deeper, **toy).run() for deeper in plan.grown]  # type: ignore[arg-type]
    growth = DepthExtrapolation(plan, Toy(plan.base, **toy).run(), grown)  # type: ignore[arg-type]
    return growth.extend(plan.num_more)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kinds", [(17,), (9, 12), (2, 9), (20, 4)])
def test_the_deep_recording_is_the_one_that_the_deep_job_makes(
    kinds: tuple[int, ...], seed: int
) -> None:
    assert _grow(kinds, seed=seed) == Toy(kinds, seed=seed).run()


def test_one_growth_serves_every_split_of_the_layers() -> None:
    plan = plan_depths((8, 8))
    growth = DepthExtrapolation(
        plan, Toy(plan.base).run(), [Toy(deeper).run() for deeper in plan.grown]
    )
    for num_recomputed in range(3, 13):
        kinds = (num_recomputed, 16 - num_recomputed)
        num_more = [count - base for count, base in zip(kinds, plan.base, strict=True)]
        assert growth.extend(num_more) == Toy(kinds).run()


@pytest.mark.parametrize(
    ("extra", "depth"),
    [
        (lambda layer: layer % 2, 12),
        (lambda layer: layer, 12),
        (lambda layer: layer // 2, 12),
        (lambda layer: layer**2, 12),
    ],
    ids=["taking turns", "growing", "in pairs", "growing faster"],
)
def test_layers_that_differ_are_refused(extra: Sizes, depth: int) -> None:
    with pytest.raises(CannotExtend, match=r"layers|follow|twice"):
        _grow((depth,), extra=extra)


@pytest.mark.parametrize("second", [0, 120])
def test_first_and_last_layers_of_their_own_are_kept(second: int) -> None:
    def make(kinds: Sequence[int]) -> Recording:
        own = {0: 40, sum(kinds) - 1: 80 if not second else 0, 1: second}
        return Toy(kinds, extra=lambda layer: own.get(layer, 0)).run()

    plan = plan_depths((14,))
    growth = DepthExtrapolation(plan, make(plan.base), [make(deeper) for deeper in plan.grown])

    assert growth.extend(plan.num_more) == make((14,))


def _shuffle_ends(recording: Recording, seed: int) -> Recording:
    """What a hash table holds is freed in any order."""
    chance, events, together = random.Random(seed), [], []
    for event in [*recording.events, 0]:
        if event < 0:
            together.append(event)
            continue
        chance.shuffle(together)
        events.extend(together)
        together = []
        events.append(event)
    return Recording(allocations=recording.allocations, events=events[:-1])


def test_the_order_of_ends_in_a_row_does_not_matter() -> None:
    plan = plan_depths((11,))
    base, grown, whole = (
        _shuffle_ends(Toy(kinds).run(), seed)
        for seed, kinds in enumerate((plan.base, plan.grown[0], (11,)))
    )

    assert sort_ends(DepthExtrapolation(plan, base, [grown]).extend(plan.num_more)) == sort_ends(
        whole
    )


def test_what_was_traced_in_vain_is_refused_and_not_guessed() -> None:
    plan = plan_depths((12,))
    base = Toy((3,)).run()
    with pytest.raises(CannotExtend):
        DepthExtrapolation(plan, base, [Toy((4,)).run()])
    with pytest.raises(CannotExtend, match="fewer"):
        DepthExtrapolation(plan, base, [Toy((2,)).run()])
    with pytest.raises(ValueError, match="depth"):
        DepthExtrapolation(plan, base, [Toy((5,)).run()]).extend([-1])


def test_few_layers_are_traced_as_they_are() -> None:
    assert plan_depths((5,)).grown == plan_depths((4, 5)).grown == ()
    assert plan_depths((3, 13)).grown == plan_depths((8, 8)).grown == ((5, 3), (3, 5))
    assert plan_depths((2, 30)).base == (2, 3)
    assert plan_depths((2, 30)).grown == ((2, 5),)
    assert plan_depths((16, 16)).num_more == (13, 13)


@pytest.mark.parametrize("room", range(0, 4200, 37))
def test_the_fewest_recomputed_layers_are_those_of_a_plain_search(room: int) -> None:
    asked: list[int] = []

    def needed(num_recomputed: int) -> int:
        asked.append(num_recomputed)
        return max(4000 - 110 * num_recomputed, 900 + 3 * num_recomputed)

    fitting = [k for k in range(33) if max(4000 - 110 * k, 900 + 3 * k) <= room]
    found = find_fewest_recomputed(needed, num_layers=32, room_bytes=room)

    if found is None:
        assert needed(32) > room
    else:
        assert found == fitting[0]
    assert len(asked) <= 10, "halving alone would take 7, a plain search 33"
