"""An owner that makes no updates loses its part, and who complains of an honest one takes nothing from it (rule 18)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from edit.council import events as ev
from edit.council.machine import DEAF_LEASES, PARDONED, Council
from edit.council.record import Phase
from tests.support.council.table import LEASE_S, STALL_S, Table, update

SOON_S = 2 * LEASE_S


def served(voters: str = "abc", leader: str = "c", **values: object) -> Table:
    """A table whose owner a serves part 0, and makes nothing."""
    table = Table(voters, **values)  # type: ignore[arg-type]
    table.elect(leader)
    table.run(LEASE_S / 2)
    assert table.record.parts[0].owner == "a"
    return table


def said(table: Table, peer_id: str) -> list[str]:
    return [noticed.text for noticed in table.done(ev.Noticed, peer_id)]


def test_an_owner_that_makes_nothing_loses_its_part_and_is_named_everywhere() -> None:
    table = served()
    grant = table.record.parts[0].grant
    table.waiting = "bc"
    table.run(STALL_S - LEASE_S)
    assert table.record.parts[0].owner == "a" and not said(table, "b"), "nobody is hasty"
    table.run(LEASE_S + SOON_S)
    part = table.record.parts[0]
    assert part.owner != "a" and part.grant == grant + 1
    for peer_id in "bc":
        assert "part 0, owned by a: c says: no update to outer step 1 comes from a" in said(table, peer_id)
        named = "it made no update to outer step 1, which peers wait for; a stalls"
        assert said(table, peer_id).count(f"part 0 is taken from a: {named}") == 1
    table.make(part.owner)
    table.run(LEASE_S)
    assert table.record.parts[0].outer_step == 1


def test_an_owner_that_stalls_gets_no_part_for_a_while_whoever_leads() -> None:
    table = served(owners="aa")
    table.waiting = "bc"
    table.run(STALL_S + SOON_S)
    table.waiting = ""
    assert table.record.parts[0].owner != "a"
    table.run(8 * LEASE_S)
    assert [part.owner for part in table.record.parts].count("a") <= 1, "it gets none by balance"
    table.kill("c")
    table.run(4 * SOON_S)
    assert table.record.parts[0].owner == "b"
    assert max(council._stallers["a"] for council in table.councils.values()) <= table.now + PARDONED * STALL_S


@pytest.mark.parametrize("complains", ["b", "c"])
def test_one_that_complains_takes_no_part_from_anybody(complains: str) -> None:
    """Nor does it if it says so a thousand times, and lies about how long it has waited."""
    table = served()
    part = table.record.parts[0]
    table.waiting = complains
    table.run(2 * STALL_S)
    for _ in range(1000):
        for to in {*"abc"} - {complains}:
            table.say(f"{complains}#1", to, ev.Stall(0, part.grant, 0, True))
    table.run(SOON_S)
    assert table.record.parts[0] == part and table.leaders == ["c"]
    assert not table.councils["c"]._stallers


def test_two_of_five_that_lie_take_nothing_from_an_owner_that_works() -> None:
    table = served("abcde", "e")
    for step in range(8):
        table.make("a")
        table.run(STALL_S / 4)
        for liar in "bd":
            for to in {*"abcde"} - {liar}:
                table.say(f"{liar}#1", to, ev.Stall(0, table.record.parts[0].grant, step + 1, True))
    assert table.record.parts[0].owner == "a" and table.record.parts[0].outer_step == 8
    assert table.leaders == ["e"]


def test_voters_without_a_peer_believe_two_others_once_the_part_stood_still_for_them_too() -> None:
    table = served("abcde", "e")
    table.waiting = "bc"
    table.run(STALL_S + SOON_S)
    assert table.record.parts[0].owner != "a"
    assert "part 0, owned by a: d says: no update to outer step 1 comes from a" in said(table, "e")


def test_voters_without_a_peer_do_not_believe_one() -> None:
    table = served("abcde", "e")
    table.waiting = "b"
    table.run(2 * STALL_S)
    assert table.record.parts[0].owner == "a"


def test_peers_that_are_too_few_for_a_round_wait_without_blaming_anybody() -> None:
    table = served(stall_peers=3)
    table.waiting = "bc"
    table.run(2 * STALL_S)
    assert table.record.parts[0].owner == "a"


def test_a_leader_that_stalls_as_an_owner_and_hears_nothing_is_left() -> None:
    class Deaf(Council):
        """Leads, owns, makes nothing, and changes nothing."""

        def _leave_stallers(self) -> None:
            if self._peer_id != "a":
                super()._leave_stallers()

    table = served("abc", "a", council=Deaf)
    table.waiting = "bc"
    table.run(STALL_S + DEAF_LEASES * LEASE_S - LEASE_S)
    assert table.leaders == ["a"] and table.record.parts[0].owner == "a"
    table.run(LEASE_S + 3 * SOON_S)
    assert table.record.parts[0].owner != "a"
    assert table.councils["b"].leader == table.councils["c"].leader != "a"
    assert any("a leads, and does nothing about an owner that stalls" in text for text in said(table, "b"))


def test_an_owner_that_offers_each_another_update_stalls_too() -> None:
    table = served("abcde", "e")
    table.waiting = "bcde"
    grant, base = table.record.parts[0].grant, table.record.parts[0].digest
    for peer_id in "bcde":
        table.handle(peer_id, ev.Offered("a#1", update(0, 1, grant, base, peer_id)))
    table.run(STALL_S + SOON_S)
    part = table.record.parts[0]
    assert part.owner != "a" and part.outer_step == 0
    table.make(part.owner)
    table.run(LEASE_S)
    assert table.record.parts[0].outer_step == 1, "what was held of the grant before is replaced"


def pauses(table: Table) -> None:
    table.handle("c", ev.SetPhase(Phase.PAUSED))


def nobody_leads(table: Table) -> None:
    table.cut = {"a", "b", "c"}


@pytest.mark.parametrize("why", [pauses, nobody_leads], ids=lambda why: why.__name__)
def test_who_is_not_to_blame_is_not_blamed(why: Callable[[Table], None]) -> None:
    table = served()
    table.waiting = "b"
    why(table)
    table.run(2 * STALL_S)
    assert not [text for text in said(table, "b") if "says: no update" in text]


def test_what_was_said_of_an_earlier_outer_step_does_not_count() -> None:
    table = served()
    grant = table.record.parts[0].grant
    table.waiting = "b"
    table.run(STALL_S + SOON_S)
    table.make("a")
    table.run(LEASE_S)
    assert table.record.parts[0].outer_step == 1
    table.waiting = ""
    table.say("b#1", "c", ev.Stall(0, grant, 0, True))
    table.handle("c", ev.Wanted(0, 0))
    table.run(SOON_S)
    assert table.record.parts[0].owner == "a" and not table.councils["c"]._stalled


def test_a_machine_that_stood_still_blames_nobody_for_it() -> None:
    table = served()
    table.waiting = "b"
    table.run(LEASE_S)
    table.cut = {"b"}
    table.run(2 * STALL_S, only="ac")
    table.cut = set()
    table.run(LEASE_S)
    assert not [text for text in said(table, "b") if "says: no update" in text]
