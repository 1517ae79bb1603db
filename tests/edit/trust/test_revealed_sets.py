"""Which sums a peer helps to open, and the file that remembers them."""

from __future__ import annotations

from pathlib import Path

import pytest

from edit.errors import FormatError, StorageError
from edit.trust.revealed_sets import RevealedSets

PLAN = b"the plan of a round"


def test_sums_that_differ_by_few_on_either_side_are_refused() -> None:
    sets = RevealedSets().with_set(5, "abcdef", PLAN)
    assert sets.why_not(5, "abcdef", 3, PLAN) == ""
    assert sets.why_not(5, "abc", 3, PLAN) == ""  # def would be known: three
    assert "tell f apart from the others" in sets.why_not(5, "abcde", 3, PLAN)
    assert "tell g apart from the others" in sets.why_not(5, "abcdefg", 3, PLAN)
    assert "tell e, f apart from the others" in sets.why_not(5, "abcdxyz", 3, PLAN)
    assert sets.why_not(5, "abcxyz", 3, PLAN) == ""
    assert sets.why_not(6, "abcde", 3, PLAN) == ""


def test_every_earlier_set_counts() -> None:
    sets = RevealedSets().with_set(5, "abcdef", PLAN).with_set(5, "abc", PLAN)
    assert "tell x apart from the others" in sets.why_not(5, "abcx", 3, PLAN)


def test_no_combination_of_several_sums_is_of_few_peers() -> None:
    """Two sums differ by three on either side, but with enough such sums equations are solved for one peer."""
    assert "tell a apart from the others" in RevealedSets().with_set(5, "abcd", PLAN).why_not(5, "aefg", 3, PLAN)
    sets = RevealedSets().with_set(5, "abcdef", PLAN).with_set(5, "abcghi", PLAN)
    assert "tell a, d, g apart" not in (why := sets.why_not(5, "adgjkl", 3, PLAN)) and "tell a apart" in why


def test_the_sums_of_one_outer_step_are_of_one_plan(tmp_path: Path) -> None:
    """Another plan gives each vector another weight: the sums of one set under several plans could be solved for each."""
    path = tmp_path / "revealed.json"
    RevealedSets().with_set(5, "abc", PLAN).write(path)
    sets = RevealedSets.read(path)
    assert "was opened under another plan" in sets.why_not(5, "abc", 3, b"another")
    assert sets.why_not(5, "abc", 3, PLAN) == "" and sets.why_not(6, "abc", 3, b"another") == ""
    path.write_bytes(b'{"format":1,"revealed":{"5":[["a","b","c"]]}}')  # as it was written before
    assert RevealedSets.read(path).why_not(5, "abc", 3, PLAN) == ""


def test_it_knows_for_which_outer_steps_a_sum_was_opened() -> None:
    sets = RevealedSets().with_set(5, "abc", PLAN).with_set(7, "abc", PLAN)
    assert [sets.opened(step) for step in (4, 5, 6, 7)] == [False, True, False, True]
    for step in (8, 9):
        sets = sets.with_set(step, "abc", PLAN)
    assert sets.opened(4), "what is forgotten may have been"


def test_the_file_keeps_what_was_revealed(tmp_path: Path) -> None:
    path = tmp_path / "revealed.json"
    assert RevealedSets.read(path).why_not(5, "abc", 3, PLAN) == ""
    RevealedSets().with_set(5, ["p1", "p2", "p3"], PLAN).write(path)
    assert "tell p4 apart from the others" in RevealedSets.read(path).why_not(5, ["p1", "p2", "p3", "p4"], 3, PLAN)
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "text", [b"{", b'{"format":1}', b'{"format":1,"revealed":[1]}', b'{"format":1,"revealed":{"x":[["a"]]}}']
)
def test_a_damaged_file_is_named(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "revealed.json"
    path.write_bytes(text)
    with pytest.raises(StorageError, match="damaged"):
        RevealedSets.read(path)


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "revealed.json"
    path.write_bytes(b'{"format":9,"revealed":{}}')
    with pytest.raises(FormatError):
        RevealedSets.read(path)


def test_old_outer_steps_are_forgotten_and_refused(tmp_path: Path) -> None:
    sets = RevealedSets()
    for step in range(10):
        sets = sets.with_set(step, "abc", PLAN)
    assert "too old" in sets.why_not(5, "abc", 3, PLAN) and sets.why_not(6, "abc", 3, PLAN) == ""
    sets.write(tmp_path / "revealed.json")
    assert "too old" in RevealedSets.read(tmp_path / "revealed.json").why_not(5, "abc", 3, PLAN)


def test_a_coordinator_cannot_ask_for_ever_more_sums_of_one_outer_step() -> None:
    sets = RevealedSets()
    for number in range(16):
        sets = sets.with_set(1, [f"{number}{letter}" for letter in "abc"], PLAN)
    assert "16 sums" in sets.why_not(1, "xyz", 3, PLAN) and sets.why_not(1, ["0a", "0b", "0c"], 3, PLAN) == ""
