"""Fragments over aggregators: every one exactly once, in order, about evenly; a part is a schema of its own."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edit.errors import ConfigError
from edit.fragments.assignment import assign
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec


def schema_of(sizes: list[int]) -> Schema:
    return Schema(
        tuple(
            FragmentSpec(fragment_id=i, name=f"layer{i}", tensors=(TensorSpec(name=f"layer{i}.weight", shape=(size,)),))
            for i, size in enumerate(sizes)
        )
    )


@given(sizes=st.lists(st.integers(1, 10**12), min_size=1, max_size=60), data=st.data())
def test_every_fragment_has_one_aggregator_and_no_aggregator_much_more_than_its_share(
    sizes: list[int], data: st.DataObject
) -> None:
    schema, count = schema_of(sizes), data.draw(st.integers(1, len(sizes)))
    parts = assign(schema, count)
    assert len(parts) == count and all(parts)
    assert list(chain(*parts)) == list(range(len(sizes)))
    assert assign(schema, count) == parts
    assert max(sum(sizes[i] for i in part) for part in parts) <= sum(sizes) / count + max(sizes)


@pytest.mark.parametrize(
    ("sizes", "count", "expected"),
    [
        ([5, 5, 5, 5], 2, [[0, 1], [2, 3]]),
        ([5, 5, 5, 5], 3, [[0], [1, 2], [3]]),
        ([100, 1, 1, 1], 2, [[0], [1, 2, 3]]),  # a large embedding is a part of its own
        ([1, 1, 1, 100], 3, [[0, 1], [2], [3]]),
        ([7], 1, [[0]]),
    ],
)
def test_parts(sizes: list[int], count: int, expected: list[list[int]]) -> None:
    assert [list(part) for part in assign(schema_of(sizes), count)] == expected


@pytest.mark.parametrize("count", [0, 4])
def test_an_aggregator_without_a_fragment_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=rf"aggregators.addresses: {count} aggregators .* has 3 fragments"):
        assign(schema_of([1, 2, 3]), count)


def test_a_subset_is_a_schema_of_its_own() -> None:
    whole = schema_of([3, 4, 5])
    part = whole.subset([1, 2])
    assert [(f.fragment_id, f.name, f.numel) for f in part.fragments] == [(0, "layer1", 4), (1, "layer2", 5)]
    assert len({whole.schema_hash, part.schema_hash, whole.subset([0]).schema_hash}) == 3
    assert whole.subset(range(3)) == whole
