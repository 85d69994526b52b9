"""What a recording is summed up to, against a count by hand of the very same events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightfit.trace.caching_allocator import (
    AllocatorSettings,
    CachingAllocator,
    replay,
    round_block,
)
from tightfit.trace.recording import (
    CATEGORIES,
    Allocation,
    Recording,
    build_timeline,
    describe_peak,
    list_stage_peaks,
)

KIB = 1024
MIB = 1024 * KIB
STAGES = (
    ("load", 0),
    ("forward", 1),
    ("backward", 1),
    ("update", 1),
    ("forward", 2),
    ("backward", 2),
    ("update", 2),
    ("eval", 0),
    ("save", 0),
)


def allocation(num_bytes: int, **fields: Any) -> Allocation:
    plain: dict[str, Any] = {
        "op": "aten.mm",
        "module": "",
        "stage": "forward",
        "step": 1,
        "layer": None,
        "shape": (num_bytes,),
        "dtype": "uint8",
        "category": "activations",
    }
    return Allocation(num_bytes=num_bytes, **(plain | fields))


class Doubling(CachingAllocator):
    """An allocator that keeps all it ever held, and twice that: no model of torch's."""

    def __init__(self) -> None:
        super().__init__(AllocatorSettings())
        self.live: dict[int, int] = {}

    def allocate(self, key: int, num_bytes: int, *, stream: int = 0) -> None:
        assert key not in self.live
        assert stream == 0, "one pool of blocks is all this has"
        self.live[key] = num_bytes
        self.reserved_bytes = max(self.reserved_bytes, 2 * sum(self.live.values()))

    def free(self, key: int) -> None:
        del self.live[key]

    def release_cached(self) -> None:
        self.reserved_bytes = 2 * sum(self.live.values())


def make_step(num_layers: int = 3) -> Recording:
    """Weights; each layer keeps 4 KiB; logits; gradients take the activations' place; an update."""
    recording = Recording()

    def begin(num_bytes: int, **fields: Any) -> int:
        recording.allocations.append(allocation(num_bytes, **fields))
        recording.events.append(len(recording.allocations))
        return len(recording.allocations)

    for layer in range(num_layers):
        module = f"model.layers.{layer}.mlp.down_proj"
        begin(8 * KIB, stage="load", step=0, op="", module=module, category="weights")
    gradients: list[int] = []
    for step in (1, 2):
        if step == 2:
            recording.events += [-event for event in gradients]
        kept = [
            begin(4 * KIB, step=step, module=f"model.layers.{layer}.mlp", layer=layer)
            for layer in range(num_layers)
        ]
        logits = begin(40 * KIB, step=step, op="aten.log_softmax", category="logits")
        recording.events.append(-logits)
        gradients = []
        for event in reversed(kept):
            gradients.append(begin(8 * KIB, stage="backward", step=step, category="gradients"))
            recording.events.append(-event)
        if step == 1:
            for _ in range(2 * num_layers):
                begin(8 * KIB, stage="update", step=1, op="aten.zeros_like", category="optimizer")
    return recording


@st.composite
def recordings(draw: st.DrawFn) -> Recording:
    """Any order of beginnings and ends through the stages of a job."""
    recording = Recording()
    live: list[int] = []
    for stage, step in STAGES:
        for _ in range(draw(st.integers(0, 12))):
            is_end: bool = draw(st.booleans())
            if live and is_end:
                event = live.pop(draw(st.integers(0, len(live) - 1)))
                recording.events.append(-event)
                continue
            recording.allocations.append(
                allocation(
                    draw(st.integers(0, 5000)),
                    stage=stage,
                    step=step,
                    module=f"layers.{draw(st.integers(0, 2))}.mlp",
                    shape=(draw(st.integers(1, 3)),),
                    category=draw(st.sampled_from(CATEGORIES)),
                )
            )
            recording.events.append(len(recording.allocations))
            live.append(len(recording.allocations))
    return recording


def count_live(recording: Recording, num_events: int) -> Counter[str]:
    """Category to bytes after so many events, by the list of what stands."""
    standing: set[int] = set()
    for event in recording.events[:num_events]:
        (standing.add if event > 0 else standing.remove)(abs(event))
    found: Counter[str] = Counter()
    for event in standing:
        made = recording.allocations[event - 1]
        found[made.category] += (made.num_bytes + 511) // 512 * 512
    return found


def totals_of(columns: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip(*columns, strict=True)]


@pytest.mark.parametrize(("asked", "given_"), [(0, 0), (1, 512), (512, 512), (513, 1024)])
def test_blocks_are_multiples_of_512_bytes(asked: int, given_: int) -> None:
    assert round_block(asked) == given_


@given(recordings())
def test_the_peak_is_the_largest_count_of_all_instants(recording: Recording) -> None:
    counts = [count_live(recording, place + 1) for place in range(len(recording.events))]
    best = max((count.total() for count in counts), default=0)
    peak = describe_peak(recording)

    assert sum(peak.components.values()) == best
    if best:
        first = next(count for count in counts if count.total() == best)
        assert peak.components == {name: size for name, size in first.items() if size}
    assert sum(tensor.num_bytes for tensor in peak.tensors) <= best
    sizes = [tensor.num_bytes for tensor in peak.tensors]
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) <= 12


@given(recordings(), st.integers(30, 80))
def test_a_thinned_timeline_keeps_the_peak_of_every_stage(
    recording: Recording, max_points: int
) -> None:
    timeline = build_timeline(recording, max_points=max_points)
    columns = len(timeline.bytes[0]) if timeline.bytes else 0
    assert columns <= max_points
    if not columns:
        assert not any(made.num_bytes for made in recording.allocations)
        return
    totals = totals_of(timeline.bytes)
    assert max(totals) == sum(describe_peak(recording).components.values())
    counted: dict[str, int] = {}
    moment = ""
    for place, (made, begins) in enumerate(recording.walk()):
        if begins:
            step = {1: "first step, ", 2: "steady step, "}.get(made.step, "")
            moment = f"{step}{made.stage}"
        counted[moment] = max(counted.get(moment, 0), count_live(recording, place + 1).total())
    starts = [start for start, _ in timeline.stages]
    assert starts == sorted(set(starts))
    ends = [*starts[1:], columns]
    shown = {
        name: max(totals[start:end])
        for (start, name), end in zip(timeline.stages, ends, strict=True)
    }
    assert shown == counted


def test_without_thinning_each_event_is_a_column() -> None:
    recording = make_step()
    recording.events = [event for event in recording.events if event not in (1, 2, 3)]
    timeline = build_timeline(recording, max_points=5000)
    assert len(timeline.bytes[0]) == len(recording.events)
    for column, place in zip(zip(*timeline.bytes, strict=True), range(1, 9999), strict=False):
        counted = count_live(recording, place)
        assert dict(zip(timeline.categories, column, strict=True)) == {
            name: counted[name] for name in timeline.categories
        }


def test_the_peak_names_the_op_and_puts_layers_together() -> None:
    peak = describe_peak(make_step())

    # Weights 24, optimizer 48, activations 12 and logits 40 KiB, in the second step.
    assert peak.stage == "steady step, forward"
    assert peak.op == "aten.log_softmax"
    assert peak.components == {
        "weights": 24 * KIB,
        "optimizer": 48 * KIB,
        "activations": 12 * KIB,
        "logits": 40 * KIB,
    }
    weights = next(tensor for tensor in peak.tensors if tensor.category == "weights")
    assert (weights.module, weights.count) == ("model.layers.*.mlp.down_proj", 3)
    assert weights.num_bytes == 24 * KIB
    assert [tensor.category for tensor in peak.tensors][:2] == ["optimizer", "logits"]


def test_only_whole_numbers_of_a_path_are_stars() -> None:
    recording = Recording(
        allocations=[
            allocation(600, module="h.11.mlp.c_fc2"),
            allocation(600, module="h.2.mlp.c_fc2"),
            allocation(600, module="12"),
        ],
        events=[1, 2, 3],
    )
    tensors = describe_peak(recording).tensors
    assert {(tensor.module, tensor.count) for tensor in tensors} == {
        ("h.*.mlp.c_fc2", 2),
        ("*", 1),
    }


def test_stages_carry_what_stands_and_what_was_reserved_before() -> None:
    stages = list_stage_peaks(make_step(), Doubling())
    assert [stage.name for stage in stages] == ["load", "first step", "steady step"]
    allocated = [stage.peak_allocated_bytes // KIB for stage in stages]
    assert allocated == [24, 96, 124]
    assert [stage.peak_reserved_bytes // KIB for stage in stages] == [48, 192, 248]


def test_stages_come_in_the_order_of_a_job() -> None:
    made = [
        allocation(512, stage="save", step=0),
        allocation(512, stage="load", step=0),
        allocation(512, stage="dance", step=0),
        allocation(512, stage="update", step=3),
    ]
    stages = list_stage_peaks(Recording(allocations=made, events=[1, 2, 3, 4]), Doubling())
    assert [stage.name for stage in stages] == ["load", "steady step", "save", "dance"]


def test_another_process_has_nothing_cached() -> None:
    made = [
        allocation(8 * KIB, stage="load", step=0),
        allocation(64 * KIB),
        allocation(2 * KIB, stage="save", step=0),
        allocation(4 * KIB, stage="generate", step=0),
        allocation(KIB, stage="generate", step=0),
        allocation(16 * KIB, stage="resume", step=0),
    ]
    recording = Recording(allocations=made, events=[1, 2, -2, 3, -3, 4, -4, 5, -5, 6])
    stages = {stage.name: stage for stage in list_stage_peaks(recording, Doubling())}
    reserved = {name: stage.peak_reserved_bytes // KIB for name, stage in stages.items()}
    assert reserved == {"load": 16, "first step": 144, "save": 144, "generate": 24, "resume": 48}
    assert stages["generate"].peak_allocated_bytes == 12 * KIB


def test_a_stage_that_makes_nothing_shows_what_stands() -> None:
    made = [
        allocation(8 * KIB, stage="load", step=0),
        allocation(64 * KIB, stage="eval", step=0),
        allocation(0, stage="save", step=0),
        allocation(0, stage="generate", step=0),
    ]
    recording = Recording(allocations=made, events=[1, 2, -2, 3, -3, -1, 4, -4])
    stages = {stage.name: stage for stage in list_stage_peaks(recording, Doubling())}
    assert stages["save"].peak_allocated_bytes == 8 * KIB
    assert stages["save"].peak_reserved_bytes == stages["eval"].peak_reserved_bytes
    assert stages["generate"].peak_allocated_bytes == 0
    assert describe_peak(recording).stage == "eval"


def test_a_stage_s_reserve_is_that_of_all_streams() -> None:
    made = [allocation(64 * MIB), allocation(64 * MIB, stream=1)]
    recording = Recording(allocations=made, events=[1, -1, 2])
    settings = AllocatorSettings()
    (stage,) = list_stage_peaks(recording, CachingAllocator(settings))
    whole = replay(recording.sizes, recording.events, settings, streams=recording.streams)
    assert whole is not None
    assert stage.peak_allocated_bytes == 64 * MIB
    assert stage.peak_reserved_bytes == whole.peak_reserved_bytes >= 128 * MIB


def test_later_steps_are_left_out_of_the_picture_but_not_of_the_sums() -> None:
    made = [allocation(512, step=1), allocation(1024, step=3), allocation(2048, stage="eval")]
    timeline = build_timeline(Recording(allocations=made, events=[1, 2, 3]))
    assert timeline.stages == ((0, "first step, forward"), (1, "eval"))
    assert totals_of(timeline.bytes) == [512, 3584]


def test_many_micro_batches_are_one_mark() -> None:
    made = [allocation(512, stage=("forward", "backward")[i % 2]) for i in range(100)]
    timeline = build_timeline(Recording(allocations=made, events=list(range(1, 101))))
    assert timeline.stages == ((0, "first step"),)
    assert totals_of(timeline.bytes)[-1] == 51_200


def test_a_long_job_is_a_few_columns_and_loading_few_of_them() -> None:
    made = [allocation(512, stage="load", step=0) for _ in range(30_000)]
    made += [allocation(512) for _ in range(30_000)]
    timeline = build_timeline(Recording(allocations=made, events=list(range(1, 60_001))))
    columns = len(timeline.bytes[0])
    assert 1000 < columns <= 1200
    assert timeline.stages[1][0] <= columns // 7
    assert totals_of(timeline.bytes)[-1] == 60_000 * 512


def test_nothing_recorded_is_nothing_shown() -> None:
    empty = Recording()
    assert describe_peak(empty).components == {}
    assert build_timeline(empty).bytes == ()
    assert list_stage_peaks(empty, Doubling()) == ()
