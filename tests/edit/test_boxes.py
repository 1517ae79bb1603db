"""Regions against plain indexing of the full tensors; what is not a partition is named."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edit.boxes import Band, Box, Region, partition_fault
from edit.errors import LocalProtocolError, RemoteProtocolError
from edit.schema import FragmentSpec
from tests.support.layouts import fragment, naive, numbered, partitions, rows, whole

Layout = tuple[FragmentSpec, list[list[Box]]]


def positions(band: Band) -> list[int]:
    """What the band names, element by element."""
    starts = [band.start]
    for count, stride in zip(band.counts, band.strides, strict=True):
        starts = [start + i * stride for start in starts for i in range(count)]
    return [start + i for start in starts for i in range(band.length)]


@given(layout=partitions())
@settings(deadline=None, max_examples=150)
def test_take_put_and_add_are_plain_indexing(layout: Layout) -> None:
    spec, shares = layout
    flat, copy, twice = numbered(spec), torch.full((spec.numel,), -1.0), numbered(spec)
    for boxes in shares:
        region = Region(spec, boxes)
        part = region.take(flat)
        assert part.shape == (region.numel,) and torch.equal(part, naive(spec, flat, boxes))
        region.put(part, copy)
        region.add(part.clone(), twice)
    assert torch.equal(copy, flat) and torch.equal(twice, 2 * flat)


@given(layout=partitions())
@settings(deadline=None, max_examples=150)
def test_bands_and_span_say_where_the_region_lies(layout: Layout) -> None:
    spec, shares = layout
    for boxes in shares:
        region = Region(spec, boxes)
        expected = naive(spec, numbered(spec), boxes).long().tolist()
        assert [position for band in region.bands for position in positions(band)] == expected
        assert sum(band.number * band.length for band in region.bands) == region.numel
        contiguous = bool(expected) and expected == list(range(expected[0], expected[0] + len(expected)))
        assert region.span == ((expected[0], expected[-1] + 1) if contiguous else None)


@given(layout=partitions(), data=st.data())
@settings(deadline=None, max_examples=150)
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
@settings(deadline=None, max_examples=200)
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
            Region(spec, boxes)
    else:
        assert (fault is None) == (int(counts.min()) == 1)


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
    for region in (Region(spec), Region(spec, whole(spec))):
        assert region.is_whole and region.take(flat) is flat and region.numel == 11 and region.span == (0, 11)


def test_scalars_and_rows_of_neighbouring_tensors_are_one_run() -> None:
    spec = fragment((2, 3), (), (4,))
    region = Region(spec, [Box(0, (1, 0), (1, 3)), Box(1, (), ()), Box(2, (0,), (2,))])
    assert region.take(numbered(spec)).tolist() == [3, 4, 5, 6, 7, 8] and region.span == (3, 9) and not region.is_whole
    backwards = Region(spec, [Box(1, (), ()), Box(0, (1, 0), (1, 3))])
    assert backwards.take(numbered(spec)).tolist() == [6, 3, 4, 5] and backwards.span is None


def test_an_empty_region_takes_nothing_and_changes_nothing() -> None:
    spec = fragment((2, 3))
    region, flat = Region(spec, []), numbered(spec)
    assert region.take(flat).shape == (0,) and region.numel == 0 and not region.is_whole and region.span is None
    region.add(torch.empty(0), flat)
    region.put(torch.empty(0), flat)
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
        Region(spec, [box])
    assert partition_fault(spec, [[box]]) is not None


def test_vectors_of_another_length_are_our_bug() -> None:
    spec = fragment((4, 3))
    region = Region(spec, [Box(0, (0, 0), (4, 1))])
    for part, flat in ((torch.zeros(5), torch.zeros(12)), (torch.zeros(4), torch.zeros(13))):
        with pytest.raises(LocalProtocolError, match=r"elements was given vectors of"):
            region.put(part, flat)
    with pytest.raises(LocalProtocolError):
        region.take(torch.zeros(11))
