"""What a member keeps for its council, on disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from aggregator.swarm.member_folder import MemberFolder
from edit.council.record import Member, Part, Record, Saved
from edit.errors import FormatError, StorageError

RECORD = Record(
    run_id="run",
    lineage=1,
    term=2,
    version=3,
    members={"a": Member(incarnation=1)},
    voters=("a#1",),
    parts=(Part(owner="a", grant=1, outer_step=0, digest="0" * 64),),
)
SAVED = Saved(incarnation=1, term=2, vote="a#1", record=RECORD)


def test_a_restart_reads_what_was_saved_last(tmp_path: Path) -> None:
    folder = MemberFolder(tmp_path)
    assert folder.saved() is None
    folder.save(Saved(incarnation=1))
    folder.save(SAVED)
    assert MemberFolder(tmp_path).saved() == SAVED
    assert (tmp_path / "council.json").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["council.json"]


def test_a_vote_is_never_forgotten_silently(tmp_path: Path) -> None:
    """A member that lost it must not vote again in its old life."""
    folder = MemberFolder(tmp_path)
    folder.part(0).mkdir()
    with pytest.raises(StorageError, match="missing beside the parts"):
        folder.saved()
    for damage in (b"", b"{}", SAVED.encode().replace(b'"vote": "a#1"', b'"vote": "b#1"'), SAVED.encode()[:-1]):
        (tmp_path / "council.json").write_bytes(damage)
        with pytest.raises((StorageError, FormatError), match=r"council\.json"):
            folder.saved()


def test_a_folder_that_cannot_be_listed_is_not_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    MemberFolder(tmp_path).part(0).mkdir()

    def refused(folder: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    monkeypatch.setattr(os, "scandir", refused)  # what `Path.glob` asks
    monkeypatch.setattr(Path, "iterdir", refused)
    for look in (MemberFolder(tmp_path).saved, MemberFolder(tmp_path).of_lineage):
        with pytest.raises(StorageError, match=r"cannot be read \(Permission denied\)"):
            look()


def test_a_save_that_fails_is_an_error_and_the_one_before_stays(tmp_path: Path) -> None:
    folder = MemberFolder(tmp_path)
    folder.save(SAVED)
    (tmp_path / ".council.json.tmp").mkdir()
    with pytest.raises(StorageError, match="cannot be written"):
        folder.save(Saved(incarnation=1))
    assert folder.saved() == SAVED


def test_each_start_has_a_larger_number_whatever_the_clock_says(tmp_path: Path) -> None:
    folder = MemberFolder(tmp_path)
    assert folder.start(1700.5) == 1_700_500
    assert folder.start(1700.5) == 1_700_501
    assert MemberFolder(tmp_path).start(3.0) == 1_700_502
    assert folder.start(2000.0) == 2_000_000
    (tmp_path / "started").write_text(f"{10**30}")
    assert folder.start(1.0) == 1000
