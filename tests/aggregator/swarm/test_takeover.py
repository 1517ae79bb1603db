"""An owner that is killed at every point of an outer step: the next one goes on, to the same bits at all members.

Five members; a owns the part, c leads, except where a does both. A quorum is three. Real journals and checkpoints: a kill
loses what was not synced.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from edit.council import events as ev
from edit.council.record import Update
from tests.support.council.replicated_table import ReplicatedTable
from tests.support.council.table import LEASE_S


def led(folder: Path, leader: str = "c") -> ReplicatedTable:
    """A table that has taken one outer step, owned by a."""
    table = ReplicatedTable(folder)
    table.elect(leader)
    table.run(LEASE_S / 2)
    assert table.record.parts[0].owner == "a"
    table.go_on()
    return table


def before_it_is_written(table: ReplicatedTable) -> Update:
    made = table.merge("a")
    table.kill("a")
    return made


def in_the_middle_of_its_own_write(table: ReplicatedTable) -> Update:
    table.members["a"].killed_after = 700
    return table.make("a")


def held_by_itself_only(table: ReplicatedTable) -> Update:
    table.cut = {*"bcde"}
    made = table.make("a")
    table.kill("a")
    return made


def held_by_two(table: ReplicatedTable) -> Update:
    table.cut = {*"cde"}
    made = table.make("a")
    table.mail.clear()
    table.kill("a")
    return made


def held_by_three(table: ReplicatedTable) -> Update:
    table.cut = {*"de"}
    made = table.make("a")  # a, b, and c, who leads and has not heard of b's
    table.mail.clear()
    table.kill("a")
    return made


def held_by_all(table: ReplicatedTable) -> Update:
    made = table.make("a")
    table.mail.clear()
    table.kill("a")
    return made


LOST = [before_it_is_written, in_the_middle_of_its_own_write, held_by_itself_only, held_by_two]
EITHER = [held_by_three, held_by_all]  # the leader may hear of the holders first, or of the owner's end


@pytest.mark.sampled(2)
@pytest.mark.parametrize("point", LOST + EITHER)
def test_an_owner_that_is_killed_is_followed_by_another(tmp_path: Path, point: Callable[[ReplicatedTable], Update]) -> None:
    table = led(tmp_path)
    grant = table.record.parts[0].grant
    made = point(table)
    assert "a" not in table.councils and table.steps() == dict.fromkeys("bcde", 1), "killed, and no outer step yet"
    table.cut = set()
    table.run(3 * LEASE_S)
    part = table.record.parts[0]
    assert part.owner != "a" and part.grant > grant
    assert part.update == made.id if table.steps()["b"] == 2 else point in LOST + EITHER
    assert point not in LOST or part.outer_step == 1
    table.go_on()
    table.start("a")
    table.run(2 * LEASE_S)
    table.go_on(2)
    table.check_equal()


def test_an_update_that_lost_is_let_go_by_who_holds_it_also_when_the_other_comes_too_late(tmp_path: Path) -> None:
    table = led(tmp_path)
    lost = held_by_two(table)
    assert table.states["b"][0].held == lost
    table.cut = {"b"}
    table.run(2 * LEASE_S)
    won = table.make(table.record.parts[0].owner)
    table.run(LEASE_S)
    assert table.steps() == {"b": 1} | dict.fromkeys("cde", 2) and table.record.parts[0].update == won.id
    table.cut = set()
    table.run(LEASE_S)
    assert table.fetched == {"updates": 1, "snapshot": 0} and table.steps()["b"] == 2
    table.start("a")
    assert table.states["a"][0].held == lost
    table.run(LEASE_S)
    table.go_on(2)
    table.check_equal()


def test_what_a_quorum_holds_becomes_the_outer_step_without_its_owner(tmp_path: Path) -> None:
    table = led(tmp_path)
    made = table.make("a")
    table.deliver(lambda mail: mail[0].startswith(("b", "d")) and isinstance(mail[2], ev.Accepted))
    assert table.record.parts[0].update == made.id, "c knows that b, c and d hold it"
    table.kill("a")
    table.run(LEASE_S)
    assert table.steps() == dict.fromkeys("bcde", 2)
    table.start("a")
    assert table.states["a"][0].held == made, "its journal has it, not applied"
    table.run(2 * LEASE_S)
    assert table.fetched == {"updates": 0, "snapshot": 0}, "it adopts what it holds itself"
    table.go_on()
    table.check_equal()


def test_a_leader_that_dies_with_the_mark_on_too_few_disks(tmp_path: Path) -> None:
    """It is owner and leader; the version that names the update is on its own disk only."""
    table = led(tmp_path, leader="a")
    made = table.make("a")
    while table.record.parts[0].update != made.id:  # until a hears of a quorum of holders
        table.deliver_one()
    table.mail.clear()
    table.kill("a")
    table.run(3 * LEASE_S)
    assert table.record.parts[0].owner != "a"
    table.go_on()
    table.start("a")
    table.run(2 * LEASE_S)
    table.go_on(2)
    table.check_equal()


def test_a_leader_that_took_the_step_before_anybody_learnt_of_it(tmp_path: Path) -> None:
    """The mark is on the disks of a quorum, and the owner's peers have the step: it stays."""
    table = led(tmp_path, leader="a")
    made = table.make("a")
    while table.steps()["a"] == 1:
        table.deliver_one()
    assert table.steps() == {"a": 2} | dict.fromkeys("bcde", 1)
    table.mail.clear()
    table.kill("a")
    table.run(3 * LEASE_S)
    assert table.steps() == dict.fromkeys("bcde", 2) and table.record.parts[0].update == made.id
    table.go_on()
    table.start("a")
    table.run(2 * LEASE_S)
    table.go_on()
    table.check_equal()


@pytest.mark.parametrize("bytes_written", [1, 500, 900])
def test_a_member_that_is_killed_in_the_middle_of_a_write(tmp_path: Path, bytes_written: int) -> None:
    table = led(tmp_path)
    table.members["b"].killed_after = bytes_written
    made = table.make("a")
    table.deliver()
    assert "b" not in table.councils and table.steps() == dict.fromkeys("acde", 2)
    table.start("b")
    assert table.states["b"][0].held != made, "the torn record is cut off"
    table.run(LEASE_S)
    assert table.fetched["updates"] and not table.fetched["snapshot"] and table.steps()["b"] == 2
    table.go_on(2)
    table.check_equal()


def test_a_member_that_is_killed_between_a_step_and_its_digest(tmp_path: Path) -> None:
    table = led(tmp_path)
    made = table.make("a")
    table.works = False
    table.deliver()
    table.works = True
    (adopt,) = [effect for who, effect in table.log if who == "b" and isinstance(effect, ev.Adopt) and effect.outer_step == 2]
    table.members["b"].killed_after = 1
    table._work("b", adopt)
    assert "b" not in table.councils
    table.start("b")
    assert table.states["b"][0].held == made, "what was applied in memory only is held"
    for peer_id in "acde":
        table._work(peer_id, adopt)
    table.run(LEASE_S)
    table.go_on(2)
    table.check_equal()


def test_an_owner_whose_disk_is_lost_comes_back_by_a_snapshot(tmp_path: Path) -> None:
    table = led(tmp_path)
    table.make("a")
    table.deliver()
    table.kill("a")
    table.wipe("a", 2)
    table.run(LEASE_S)
    table.start("a")
    table.run(2 * LEASE_S)
    assert table.fetched["snapshot"] == 1
    table.go_on(2)
    table.check_equal()


def test_a_member_that_missed_many_steps_takes_a_snapshot_and_one_that_missed_few_takes_updates(tmp_path: Path) -> None:
    table = led(tmp_path)
    table.kill("b")
    table.go_on(3)
    table.start("b")
    table.run(LEASE_S)
    assert table.fetched == {"updates": 3, "snapshot": 0}
    table.kill("b")
    table.go_on(5)
    table.start("b")
    table.run(LEASE_S)
    assert table.fetched["snapshot"] == 1
    table.go_on()
    table.check_equal()


def test_all_are_killed_at_once_and_go_on_where_they_were(tmp_path: Path) -> None:
    table = led(tmp_path)
    made = table.make("a")
    for peer_id in "abcde":
        table.kill(peer_id)
    table.mail.clear()
    for peer_id in "abcde":
        table.start(peer_id)
    assert {states[0].held for states in table.states.values()} == {made}
    table.run(3 * LEASE_S)
    table.go_on(2)
    table.check_equal()
