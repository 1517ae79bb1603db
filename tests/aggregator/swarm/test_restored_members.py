"""Members whose folders are of an earlier day than another's: what was agreed on, and only that one still has, is kept."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest

from edit.council import events as ev
from edit.council.machine import Role
from edit.council.record import PartState
from edit.lab.council.parts_on_disk import merged_round
from tests.support.council.replicated_table import ReplicatedTable
from tests.support.council.table import LEASE_S

ENOUGH_S = 6 * LEASE_S


class Restored(ReplicatedTable):
    """Three members at outer step 4; of a and b there is a copy of outer step 1, put back when `restore` is called."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "abc")
        self.folder = folder
        self.elect("c")
        self.go_on()
        self.end("abc")
        self._copies = {}
        for peer_id in "ab":
            shutil.copytree(folder / peer_id, folder / f"copy-{peer_id}")
            self._copies[peer_id] = self.disks[peer_id]
        self.begin("abc", "c")
        self.go_on(3)
        self.end("abc")
        self.before = self.states["c"][0]

    def end(self, peer_ids: str) -> None:
        for peer_id in peer_ids:
            self.kill(peer_id)
        self.mail.clear()
        self.log.clear()

    def begin(self, peer_ids: str, leader: str) -> None:
        for peer_id in peer_ids:
            self.start(peer_id)
        self.elect(leader)
        self.run(LEASE_S)

    def run(self, seconds: float, only: Collection[str] | None = None, step_s: float = LEASE_S / 8) -> None:
        super().run(seconds, only, step_s)

    def go_on(self, steps: int = 1) -> None:
        for _ in range(steps):
            council = next(each for each in self.councils.values() if each.role is Role.LEADER)
            assert council.committed is not None
            self.make(council.committed.parts[0].owner)
            self.run(LEASE_S / 2)

    def restore(self, steps: int, *, later_term: bool = False) -> None:
        """Put the copies back, and let a and b take outer steps without c. later_term: than c knows, else the same."""
        for peer_id in "ab":
            shutil.rmtree(self.folder / peer_id)
            shutil.copytree(self.folder / f"copy-{peer_id}", self.folder / peer_id)
            for path in (self.folder / peer_id).glob("*/*.journal"):
                self.members[peer_id]._synced[path.stat().st_ino] = path.stat().st_size
            self.disks[peer_id] = self._copies[peer_id]
        if later_term:
            self.begin("ab", "b")
            self.end("ab")
        self.begin("ab", "b")
        assert (self.record.term > self.disks["c"].term) is later_term
        self.go_on(steps)

    def comes(self) -> None:
        """Let c come back."""
        self.log.clear()
        self.start("c")
        self.run(ENOUGH_S)

    @property
    def notices(self) -> list[str]:
        return [each.text for each in self.done(ev.Noticed, "c") if "stays at outer step" in each.text]

    @property
    def kept(self) -> bool:
        here = self.replicas["c"].state
        return (here.outer_step, here.digest) == (self.before.outer_step, self.before.digest)


@pytest.fixture
def restored(tmp_path: Path) -> Restored:
    return Restored(tmp_path)


@pytest.mark.parametrize("later_term", [False, True])
def test_a_member_that_is_ahead_of_a_restored_majority_says_so_and_keeps_what_it_has(
    restored: Restored, later_term: bool
) -> None:
    restored.restore(1, later_term=later_term)
    restored.comes()
    (text,) = restored.notices
    assert "part 0 stays at outer step 4" in text and "the others, at 2," in text and "recover here, rejoin there" in text
    assert len(text) <= 256, "all of it is shown"
    said = [each.text for each in restored.done(ev.Noticed, "c") if "has lost versions" in each.text]
    assert len(said) == (not later_term)
    assert restored.kept and restored.councils["c"].kept == (text,)
    for outer_step in range(3, 10):  # theirs pass it, and go farther than updates are kept
        restored.go_on()
        assert restored.states["a"][0].outer_step == outer_step and restored.kept
    assert len(restored.notices) == 1 and restored.fetched["snapshot"] == 0
    assert not restored.done(ev.Adopt, "c") and len(restored.done(ev.Fetch, "c")) <= 3, "it does not ask again and again"
    restored.kill("c")
    restored.comes()
    assert restored.kept and restored.notices, "also after a restart, when no chain reaches back"
    saved = restored.disks["c"].recovered("c", restored.states["c"])
    assert saved.record is not None
    part = saved.record.parts[0]
    assert (part.outer_step, part.digest) == (4, restored.before.digest), "an operator can go on from it"


def test_a_member_that_a_restored_majority_has_passed_keeps_what_it_has(restored: Restored) -> None:
    restored.restore(6)
    restored.comes()
    (text,) = restored.notices
    assert "outer step 4" in text and "the others, at 7," in text and restored.kept and restored.fetched["snapshot"] == 0


def test_a_member_whose_state_led_to_what_the_others_have_is_not_kept_back(restored: Restored) -> None:
    restored.begin("ab", "b")
    restored.go_on(2)
    restored.comes()
    assert restored.steps() == dict.fromkeys("abc", 6) and not restored.notices
    assert restored.fetched == {"updates": 2, "snapshot": 0}


def test_a_member_that_was_away_for_longer_than_updates_are_kept_takes_a_snapshot(restored: Restored) -> None:
    restored.begin("ab", "b")
    restored.go_on(6)
    restored.comes()
    assert restored.steps() == dict.fromkeys("abc", 10) and not restored.notices and restored.fetched["snapshot"] == 1


def test_what_a_leader_that_lied_said_is_over_when_the_others_name_what_is_here(restored: Restored) -> None:
    restored.begin("abc", "b")
    true = restored.record
    part = replace(true.parts[0], outer_step=2, digest="1" * 64, update="1" * 64)
    false = replace(true, term=true.term + 1, version=true.version + 1, parts=(part,))
    for _ in range(24):
        restored.now += LEASE_S / 4
        restored.say("a#1", "c", ev.Append(false.stamp, false.stamp, false))
    assert restored.kept and len(restored.notices) == 1 and restored.councils["c"].kept[0]
    lied = restored.councils["c"].record
    assert lied == false
    true = replace(true, term=false.term + 1, version=false.version + 1)
    restored.say("b#1", "c", ev.Append(true.stamp, true.stamp, true))
    assert restored.kept and restored.councils["c"].kept == ("",)


def test_what_is_newer_than_the_leader_says_for_a_moment_is_not_noticed(restored: Restored) -> None:
    restored.begin("abc", "b")
    true = restored.record
    false = replace(true, version=true.version + 1, parts=(replace(true.parts[0], outer_step=3),))
    restored.say("b#1", "c", ev.Append(false.stamp, false.stamp, false))
    true = replace(true, version=false.version + 1)
    restored.now += 5 * LEASE_S
    restored.say("b#1", "c", ev.Append(true.stamp, true.stamp, true))
    assert not restored.notices and not restored.done(ev.Fetch, "c")


def test_a_damaged_state_is_still_mended_by_a_snapshot(restored: Restored) -> None:
    restored.begin("abc", "b")
    owner = restored.record.parts[0].owner
    other = "c" if owner != "c" else "a"
    outer = restored.first_state()
    for seed in range(4):
        outer.commit(1 + seed, "all are in", merged_round(outer, 3, 99))
    restored.replicas[other]._outer = outer  # not what the state's name means
    restored.make(owner)
    restored.run(2 * LEASE_S)
    assert restored.steps() == dict.fromkeys("abc", 5) and restored.fetched["snapshot"]
    assert not any("stays" in each.text for each in restored.done(ev.Noticed))
    assert restored.states[other][0] == PartState(5, restored.states[owner][0].digest)
