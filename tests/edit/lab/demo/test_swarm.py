"""Rounds of the parts of a swarm put together, and what is told of its members."""

from __future__ import annotations

from typing import Any

from edit.lab.demo.swarm import SwarmRounds, changes
from edit.view.observations import SwarmStatus


def line(part: int, step: int, **fields: Any) -> dict[str, Any]:
    """A round of a part, as its owner writes it."""
    values = {"kind": "round", "t": 10.0 * step + part, "round_id": 2_000_000 + step, "outer_step": step, "committed": True}
    values |= {"reason": "all in", "seconds": 1.0 + part, "bytes_in": 100, "bytes_out": 40, "digest": f"d{part}.{step}"}
    return {**values, "verdicts": [{"fragment_id": 0, "peers": {"a": ["ok", 1.0, 0.5]}}], **fields}


def test_an_outer_step_is_one_line_once_all_parts_have_taken_it():
    rounds = SwarmRounds(2)
    assert rounds.take(1, line(1, 1, reason="all in (lost: b)")) == []
    (whole,) = rounds.take(0, line(0, 1))
    assert (whole["outer_step"], whole["t"], whole["seconds"], whole["bytes_in"]) == (1, 11.0, 2.0, 200)
    assert (whole["digests"], len(whole["verdicts"])) == ({"0": "d0.1", "1": "d1.1"}, 2)
    assert whole["reason"] == "all in; all in (lost: b)"
    assert rounds.last == {1: 11.0, 0: 10.0}


def test_a_line_that_a_killed_owner_did_not_write_holds_up_nothing():
    rounds = SwarmRounds(2)
    assert rounds.take(0, line(0, 1)) == rounds.take(0, line(0, 2)) == []
    first, second = rounds.take(1, line(1, 2))
    assert (first["outer_step"], first["digests"]) == (1, {"0": "d0.1"})
    assert (second["outer_step"], second["digests"]) == (2, {"0": "d0.2", "1": "d1.2"})
    assert rounds.take(1, line(1, 1)) == []  # of a member that writes it when it goes on
    assert rounds.take(1, line(1, 3)) == []
    (last,) = rounds.rest()
    assert (last["outer_step"], last["digests"]) == (3, {"1": "d1.3"})
    assert rounds.rest() == []


def test_a_round_that_is_aborted_names_its_part_and_what_an_owner_thinks_of_members_is_left_out():
    rounds = SwarmRounds(2)
    (aborted,) = rounds.take(1, line(1, 1, committed=False, reason="grant 3 is over"))
    assert (aborted["committed"], aborted["reason"]) == (False, "part 1: grant 3 is over")
    assert rounds.take(0, {"kind": "member", "peer_id": "a", "state": "lost"}) == []
    assert rounds.take(1, {"kind": "peer", "peer_id": "a"}) == [{"kind": "peer", "peer_id": "a", "part": 1}]


def status(**fields: Any) -> SwarmStatus:
    values = {"leader": "a", "owners": ("a", "b"), "steps": (1, 1), "quorum": "3 of 3 here, 2 needed", "has_quorum": True}
    return SwarmStatus(**{**values, "away": {}, **fields})


def told(before: SwarmStatus | None, now: SwarmStatus) -> list[str]:
    return [event.text for event in changes(before, now, 0.0)]


def test_who_leads_and_owns_is_told_when_it_changes():
    assert told(None, status()) == told(status(), status()) == []
    assert told(status(), status(leader="")) == []  # for a moment
    assert told(status(leader=""), status(leader="b")) == ["b leads: 3 of 3 here, 2 needed"]
    assert told(status(), status(leader="b", owners=("b", "b"))) == [
        "b leads instead of a: 3 of 3 here, 2 needed",
        "b owns part 0 now, before it was a",
    ]
    assert told(status(owners=("a", "a")), status(owners=("c", "c"))) == ["c owns parts 0, 1 now, before it was a"]
    (lost,) = told(status(), status(quorum="1 of 3 here, 2 needed", has_quorum=False))
    assert lost == "no quorum (1 of 3 here, 2 needed): all train on, and nothing is committed"
    assert told(status(steps=(0, 0)), status(owners=("b", "a"))) == []  # parts spread over those that come
