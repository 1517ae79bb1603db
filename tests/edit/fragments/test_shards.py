"""Shards against plain indexing of the full tensors; what is not a partition is named."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edit.errors import LocalProtocolError, RemoteProtocolError
from edit.fragments.schema import FragmentSpec
from edit.fragments.shards import Box, Cover, Shard, StridedRun, partition_fault
from tests.support.exhaustive import examples
from tests.support.layouts import fragment, naive, numbered, partitions, rows, whole

Layout = tuple[FragmentSpec, list[list[Box]]]


def positions(run: StridedRun) -> list[int]:
    """What the run names, element by element."""
    starts = [run.start]
    for count, stride in zip(run.counts, run.strides, strict=True):
        starts = [start + i * stride for start in starts for i in range(count)]
    return [start + i for start in starts for i in range(run.length)]


@given(layout=partitions())
@settings(deadline=None, max_examples=examples(150))
def test_take_put_and_add_are_plain_indexing(layout: Layout) -> None:
    spec, shares = layout
    flat, copy, twice = numbered(spec), torch.full((spec.numel,), -1.0), numbered(spec)
    for boxes in shares:
        shard = Shard(spec, boxes)
        part = shard.take(flat)
        assert part.shape == (shard.numel,) and torch.equal(part, naive(spec, flat, boxes))
        shard.put(part, copy)
        shard.add(part.clone(), twice)
    assert torch.equal(copy, flat) and torch.equal(twice, 2 * flat)


@given(layout=partitions(), data=st.data())
@settings(deadline=None, max_examples=examples(150))
def test_a_part_is_a_slice_of_the_whole_vector(layout: Layout, data: st.DataObject) -> None:
    spec, shares = layout
    flat = numbered(spec)
    for boxes in shares:
        shard = Shard(spec, boxes)
        start = data.draw(st.integers(0, shard.numel))
        end = data.draw(st.integers(start, shard.numel))
        assert torch.equal(shard.take_part(flat, start, end), shard.take(flat)[start:end])


@given(layout=partitions())
@settings(deadline=None, max_examples=examples(150))
def test_runs_and_span_say_where_the_shard_lies(layout: Layout) -> None:
    spec, shares = layout
    for boxes in shares:
        shard = Shard(spec, boxes)
        expected = naive(spec, numbered(spec), boxes).long().tolist()
        assert [position for run in shard.runs for position in positions(run)] == expected
        assert sum(run.number * run.length for run in shard.runs) == shard.numel
        contiguous = bool(expected) and expected == list(range(expected[0], expected[0] + len(expected)))
        assert shard.span == ((expected[0], expected[-1] + 1) if contiguous else None)


@given(layout=partitions(), data=st.data())
@settings(deadline=None, max_examples=examples(150))
def test_a_partition_is_one_and_without_a_box_or_with_one_twice_it_is_none(layout: Layout, data: st.DataObject) -> None:
    spec, shares = layout
    assert partition_fault(spec, shares) is None
    rank = data.draw(st.sampled_from([rank for rank, boxes in enumerate(shares) if boxes]))
    box = data.draw(st.sampled_from(shares[rank]))
    name = spec.tensors[box.tensor].name
    without = [[other for other in boxes if other != box] for boxes in shares]
    left = spec.tensors[box.tensor].numel - box.numel
    assert partition_fault(spec, without) == f"tensor {name}: the shards cover {left} of {left + box.numel} elements"
    assert partition_fault(spec, [*shares, [box]]) == f"tensor {name}: two shards overlap"


@given(data=st.data())
@settings(deadline=None, max_examples=examples(200))
def test_overlap_is_found_as_by_counting(data: st.DataObject) -> None:
    """Any boxes at all, the ones that interlock like a pinwheel included."""
    shape = (6, 5, 4)
    spec, boxes = fragment(shape), []
    for _ in range(data.draw(st.integers(1, 6))):
        offsets = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
        boxes.append(
            Box(0, offsets, tuple(data.draw(st.integers(1, size - at)) for at, size in zip(offsets, shape, strict=True)))
        )
    counts = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        counts[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))] += 1
    fault = partition_fault(spec, [[box] for box in boxes])
    if int(counts.max()) > 1:
        assert fault == "tensor t0: two shards overlap"
        with pytest.raises(RemoteProtocolError, match="tensor t0: two shards overlap"):
            Shard(spec, boxes)
    else:
        assert (fault is None) == (int(counts.min()) == 1)


@given(layout=partitions(), data=st.data())
@settings(deadline=None, max_examples=examples(150))
def test_a_cover_counted_box_by_box_is_exact(layout: Layout, data: st.DataObject) -> None:
    spec, shares = layout
    boxes = data.draw(st.permutations([box for held in shares for box in held]))
    cover = Cover(spec)
    for box in boxes[:-1]:
        cover.add([box])
    assert cover.numel < spec.numel and "cover" in str(cover.fault())
    cover.add(boxes[-1:])
    assert cover.fault() is None
    cover.add(boxes[:1])
    assert cover.fault() == f"tensor {spec.tensors[boxes[0].tensor].name}: two shards overlap"
    cover.remove(boxes[:1])
    assert cover.fault() is None


def test_the_cover_of_boxes_that_no_straight_cut_separates_compares_no_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a stair, each meeting the next in both dimensions: 2,049 of them took two million comparisons."""
    compared: list[Box] = []
    monkeypatch.setattr(Box, "overlaps", lambda self, other: bool(compared.append(other)))
    cover = Cover(fragment((2050, 2050)))
    cover.add([Box(0, (i, i), (2, 1)) for i in range(2049)])
    cover.add([Box(0, (i, 0), (2, 1)) for i in range(1, 2049, 2)])
    assert "cover" in str(cover.fault()) and not compared


def test_a_pinwheel_is_a_partition() -> None:
    """No straight cut separates these five, so each pair is looked at."""
    spec = fragment((3, 3))
    blades = [Box(0, (0, 0), (1, 2)), Box(0, (0, 2), (2, 1)), Box(0, (2, 1), (1, 2)), Box(0, (1, 0), (2, 1))]
    assert partition_fault(spec, [[*blades, Box(0, (1, 1), (1, 1))]]) is None
    assert partition_fault(spec, [blades]) == "tensor t0: the shards cover 8 of 9 elements"
    assert partition_fault(spec, [[*blades[:3], Box(0, (1, 0), (2, 2))]]) == "tensor t0: two shards overlap"


def test_a_long_box_meets_what_comes_after_a_short_one() -> None:
    """Sorted by row: the long one, a short one beside it, and one inside the long one that begins after the short one's end."""
    spec = fragment((6, 2))
    boxes = [Box(0, (0, 0), (6, 1)), Box(0, (1, 1), (1, 1)), Box(0, (3, 0), (1, 1))]
    assert partition_fault(spec, [boxes]) == "tensor t0: two shards overlap"


@pytest.mark.parametrize("dimension", [0, 1])
def test_the_layout_of_a_thousand_ranks_is_checked_without_looking_at_each_pair(
    dimension: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []
    monkeypatch.setattr(Box, "overlaps", lambda a, b: compared.append((a, b)))
    spec = fragment((2000, 3000), (3000,), (5, 1500))
    assert partition_fault(spec, rows(spec, 1000, dimension)) is None
    grid = [[Box(0, (16 * i, 375 * j), (16, 375))] for i in range(125) for j in range(8)]
    assert partition_fault(fragment((2000, 3000)), grid) is None
    assert compared == []


def test_the_whole_is_taken_without_a_copy_however_it_is_named() -> None:
    spec = fragment((2, 3), (), (4,))
    flat = numbered(spec)
    for shard in (Shard(spec), Shard(spec, whole(spec))):
        assert shard.is_whole and shard.take(flat) is flat and shard.numel == 11 and shard.span == (0, 11)


def test_scalars_and_rows_of_neighbouring_tensors_are_one_run() -> None:
    spec = fragment((2, 3), (), (4,))
    shard = Shard(spec, [Box(0, (1, 0), (1, 3)), Box(1, (), ()), Box(2, (0,), (2,))])
    assert shard.take(numbered(spec)).tolist() == [3, 4, 5, 6, 7, 8] and shard.span == (3, 9) and not shard.is_whole
    backwards = Shard(spec, [Box(1, (), ()), Box(0, (1, 0), (1, 3))])
    assert backwards.take(numbered(spec)).tolist() == [6, 3, 4, 5] and backwards.span is None


def test_an_empty_shard_takes_nothing_and_changes_nothing() -> None:
    spec = fragment((2, 3))
    shard, flat = Shard(spec, []), numbered(spec)
    assert shard.take(flat).shape == (0,) and shard.numel == 0 and not shard.is_whole and shard.span is None
    shard.add(torch.empty(0), flat)
    shard.put(torch.empty(0), flat)
    assert torch.equal(flat, numbered(spec))


@pytest.mark.parametrize(
    ("box", "message"),
    [
        (Box(2, (0,), (1,)), "fragment f has no tensor 2"),
        (Box(-1, (0,), (1,)), "fragment f has no tensor -1"),
        (Box(0, (0,), (1,)), r"tensor t0 \[4, 3\]: no box at \[0\] of \[1\] lies in it"),
        (Box(0, (0, 0), (4,)), "no box at"),
        (Box(0, (0, 0), (4, 4)), "no box at"),
        (Box(0, (3, 0), (2, 3)), "no box at"),
        (Box(0, (-1, 0), (1, 3)), "no box at"),
        (Box(0, (0, 0), (0, 3)), "no box at"),
        (Box(0, (0, 0), (-1, 3)), "no box at"),
        (Box(0, (1 << 70, 0), (1, 3)), "no box at"),
        (Box(1, (0,), (1,)), r"tensor t1 \[\]"),
    ],
)
def test_a_box_outside_its_tensor_is_the_senders_fault(box: Box, message: str) -> None:
    spec = fragment((4, 3), ())
    with pytest.raises(RemoteProtocolError, match=message):
        Shard(spec, [box])
    assert partition_fault(spec, [[box]]) is not None


def test_vectors_of_another_length_are_our_bug() -> None:
    spec = fragment((4, 3))
    shard = Shard(spec, [Box(0, (0, 0), (4, 1))])
    for part, flat in ((torch.zeros(5), torch.zeros(12)), (torch.zeros(4), torch.zeros(13))):
        with pytest.raises(LocalProtocolError, match=r"elements was given vectors of"):
            shard.put(part, flat)
    with pytest.raises(LocalProtocolError):
        shard.take(torch.zeros(11))
