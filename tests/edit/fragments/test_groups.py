"""Streaming groups: every fragment exactly once in P outer steps, in groups of about equal size."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edit.errors import ConfigError
from edit.fragments.groups import fragments_due
from tests.support.exhaustive import examples


@given(
    fragments=st.integers(1, 60),
    share=st.floats(0, 1),
    pattern=st.sampled_from(["sequential", "strided"]),
    first=st.integers(0, 10**6),
)
@settings(deadline=None, max_examples=examples(200))
def test_p_consecutive_outer_steps_exchange_each_fragment_once(fragments: int, share: float, pattern: str, first: int) -> None:
    groups = 1 + round(share * (fragments - 1))
    turns = [fragments_due(outer_step, fragments, groups, pattern) for outer_step in range(first, first + groups)]
    assert sorted(i for turn in turns for i in turn) == list(range(fragments))
    assert all(turn and list(turn) == sorted(turn) for turn in turns)
    assert max(map(len, turns)) - min(map(len, turns)) <= 1, "no turn carries two fragments more than another"
    assert turns[0] == fragments_due(first + groups, fragments, groups, pattern), "each comes back after P outer steps"


def test_sequential_groups_are_neighbours_and_strided_ones_every_pth() -> None:
    assert [fragments_due(i, 7, 3, "sequential") for i in range(4)] == [(0, 1, 2), (3, 4), (5, 6), (0, 1, 2)]
    assert [fragments_due(i, 7, 3, "strided") for i in range(4)] == [(0, 3, 6), (1, 4), (2, 5), (0, 3, 6)]
    assert fragments_due(9, 3, 1, "strided") == fragments_due(4, 3, 1, "sequential") == (0, 1, 2)


@pytest.mark.parametrize("groups", [0, 4])
def test_groups_without_a_fragment_are_a_configuration_error(groups: int) -> None:
    with pytest.raises(ConfigError, match=f"sync.groups = {groups}: the model has 3 fragments, so at most 3 groups"):
        fragments_due(0, 3, groups, "strided")
