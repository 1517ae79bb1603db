"""How a peer comes up to date: the two tables, line by line."""

import pytest

from edit.worker.catch_up import (
    ApplyUpdates,
    NotOfThisRun,
    ResumeExactly,
    ResumeForward,
    TakeSnapshot,
    UpToDate,
    catch_up,
    resume,
    updates_suffice,
)


@pytest.mark.parametrize(
    ("own", "run", "oldest", "resync", "expected"),
    [
        (3, 3, 1, "", UpToDate()),
        (0, 0, 1, "", UpToDate()),
        (3, 4, 4, "", ApplyUpdates(4, 4)),
        (3, 9, 1, "", ApplyUpdates(4, 9)),
        (3, 9, 4, "", ApplyUpdates(4, 9)),
        (3, 9, 5, "", TakeSnapshot("update 4 is no longer kept; the oldest is 5")),
        (5, 4, 1, "", TakeSnapshot("the run is at outer step 4, this peer at 5")),
        (3, 3, 1, "another digest", TakeSnapshot("another digest")),
        (3, 9, 1, "another digest", TakeSnapshot("another digest")),
        (5, 4, 1, "another digest", TakeSnapshot("another digest")),
    ],
)
def test_while_training(own: int, run: int, oldest: int, resync: str, expected: object) -> None:
    assert catch_up(own, run, oldest_update=oldest, resync=resync) == expected


@pytest.mark.parametrize(
    ("saved", "run", "strict", "max_staleness", "same_digest", "updates_do", "expected"),
    [
        (3, 3, False, 0, True, False, ResumeExactly()),
        (3, 3, True, 0, True, False, ResumeExactly()),
        (3, 4, True, 0, True, True, ResumeExactly()),
        (3, 4, False, 1, True, True, ResumeExactly()),
        (3, 40, True, 8, False, False, ResumeExactly()),
        (3, 4, False, 0, True, False, ResumeForward()),
        (3, 4, False, 0, False, False, ResumeForward()),
        (3, 4, False, 0, True, True, ResumeForward(by_updates=True)),
    ],
)
def test_with_a_checkpoint(
    saved: int, run: int, strict: bool, max_staleness: int, same_digest: bool, updates_do: bool, expected: object
) -> None:
    way = resume(saved, run, strict=strict, max_staleness=max_staleness, same_digest=same_digest, updates_do=updates_do)
    assert way == expected


@pytest.mark.parametrize(("strict", "max_staleness"), [(False, 0), (True, 0), (False, 3)])
def test_a_checkpoint_of_another_run_is_refused_in_one_line(strict: bool, max_staleness: int) -> None:
    newer = resume(5, 4, strict=strict, max_staleness=max_staleness)
    other = resume(4, 4, strict=strict, max_staleness=max_staleness, same_digest=False)
    for refused, said in (
        (newer, "at outer step 5, the run only at 4: it is newer"),
        (other, "at outer step 4 are not the run's"),
    ):
        assert isinstance(refused, NotOfThisRun)
        assert said in refused.reason and refused.reason.endswith("remove it to start from the run's parameters")


@pytest.mark.parametrize(
    ("saved", "run", "kept", "suffice"),
    [
        (3, 3, 4, False),  # there are none
        (3, 4, 4, True),
        (4, 5, 4, False),  # as many bytes as the parameters
        (3, 5, 4, False),
        (5, 7, 4, True),
        (5, 7, 1, False),  # one is no longer kept
        (4, 3, 4, False),
    ],
)
def test_updates_suffice_where_all_are_kept_and_they_are_fewer_bytes(saved: int, run: int, kept: int, suffice: bool) -> None:
    sizes = {3: 9, 4: 10, 5: 4, 6: 5}
    assert updates_suffice(saved, run, kept_updates=kept, update_bytes=sizes.__getitem__, all_bytes=10) is suffice
