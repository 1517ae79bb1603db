"""Which sums a peer helps to open, and the file that remembers them."""

from __future__ import annotations

from pathlib import Path

import pytest

from edit.errors import FormatError, StorageError
from edit.trust.revealed_sets import RevealedSets


def test_sums_that_differ_by_few_on_either_side_are_refused() -> None:
    sets = RevealedSets().with_set(5, "abcdef")
    assert sets.why_not(5, "abcdef", 3) == ""
    assert sets.why_not(5, "abc", 3) == ""  # def would be known: three
    assert "differ by f" in sets.why_not(5, "abcde", 3)
    assert "differ by g" in sets.why_not(5, "abcdefg", 3)
    assert "differ by e, f" in sets.why_not(5, "abcdxyz", 3)
    assert sets.why_not(5, "abcxyz", 3) == ""
    assert sets.why_not(6, "abcde", 3) == ""


def test_every_earlier_set_counts() -> None:
    sets = RevealedSets().with_set(5, "abcdef").with_set(5, "abc")
    assert "differ by x" in sets.why_not(5, "abcx", 3)


def test_the_file_keeps_what_was_revealed(tmp_path: Path) -> None:
    path = tmp_path / "revealed.json"
    assert RevealedSets.read(path).why_not(5, "abc", 3) == ""
    RevealedSets().with_set(5, ["p1", "p2", "p3"]).write(path)
    assert "differ by p4" in RevealedSets.read(path).why_not(5, ["p1", "p2", "p3", "p4"], 3)
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
        sets = sets.with_set(step, "abc")
    assert "too old" in sets.why_not(5, "abc", 3) and sets.why_not(6, "abc", 3) == ""
    sets.write(tmp_path / "revealed.json")
    assert "too old" in RevealedSets.read(tmp_path / "revealed.json").why_not(5, "abc", 3)


def test_a_coordinator_cannot_ask_for_ever_more_sums_of_one_outer_step() -> None:
    sets = RevealedSets()
    for number in range(16):
        sets = sets.with_set(1, [f"{number}{letter}" for letter in "abc"])
    assert "16 sums" in sets.why_not(1, "xyz", 3) and sets.why_not(1, ["0a", "0b", "0c"], 3) == ""
