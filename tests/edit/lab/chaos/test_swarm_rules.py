"""What must hold of a swarm under faults: each rule on a history that keeps it, and on one that breaks it."""

from __future__ import annotations

from typing import Any

import pytest

from edit.errors import ConfigError
from edit.lab.chaos.faults import SWARM_KINDS, Kind, kinds_for
from edit.lab.chaos.options import ChaosOptions
from edit.lab.chaos.swarm_rules import SwarmBounds, SwarmHistory
from edit.lab.run_toml import to_toml

BOUNDS = SwarmBounds(advance_s=30.0, return_s=60.0, spare=2)


@pytest.fixture
def history() -> SwarmHistory:
    made = SwarmHistory(("a", "b", "c", "d", "e"), parts=2)
    for who in made.members:
        made.started(who)
    return made


def outer(part: int, step: int, t: float = 0.0, digest: str = "") -> dict[str, Any]:
    return {"kind": "outer", "t": t, "outer_step": step, "digest": digest or f"d{part}.{step}", "aggregator": part}


def commit(step: int, round_id: int, t: float = 0.0, **fields: Any) -> dict[str, Any]:
    line = {"kind": "round", "t": t, "outer_step": step, "round_id": round_id, "digest": f"d0.{step}", "committed": True}
    return {**line, **fields}


def rules(violations: Any) -> list[str]:
    return [violation.rule for violation in violations]


def test_each_outer_step_of_a_part_has_one_digest_whoever_reports_it(history: SwarmHistory) -> None:
    assert rules(history.peer_line("a", outer(0, 1))) == rules(history.peer_line("b", outer(1, 1))) == []
    assert rules(history.owner_line("a", 0, commit(1, 2_000_001))) == []
    assert rules(history.peer_line("c", outer(0, 1, digest="other"))) == ["digests are equal"]
    assert rules(history.owner_line("b", 0, commit(2, 2_000_002))) == []
    assert rules(history.peer_line("b", outer(0, 2, digest="other"))) == ["digests are equal"]


def test_an_outer_step_is_committed_by_one_round(history: SwarmHistory) -> None:
    assert rules(history.owner_line("a", 0, commit(1, 2_000_001))) == []
    assert rules(history.owner_line("a", 0, commit(1, 2_000_001))) == []
    assert rules(history.owner_line("b", 0, commit(1, 3_000_001))) == ["every outer step is committed once"]
    assert rules(history.owner_line("b", 0, commit(2, 3_000_002, committed=False))) == []
    assert history.aborted == 1


def test_a_process_never_goes_back_and_the_next_one_may_begin_at_its_checkpoint(history: SwarmHistory) -> None:
    history_of = [rules(history.peer_line("a", outer(0, step))) for step in (3, 3, 4)]
    assert history_of == [[], [], []]
    history.started("a")
    assert rules(history.peer_line("a", outer(0, 3))) == []
    assert rules(history.peer_line("a", outer(0, 2))) == ["the outer step never decreases"]


def test_what_was_reported_stands_in_some_folder(history: SwarmHistory) -> None:
    list(history.peer_line("a", outer(0, 7)))
    assert rules(history.records({0: 7, 1: 0}, 1.0)) == rules(history.records({0: 8, 1: 0}, 1.0)) == []
    assert rules(history.records({0: 6, 1: 0}, 1.0)) == ["no commit is lost"]


def test_it_advances_while_enough_are_there_and_need_not_while_too_many_are_out(history: SwarmHistory) -> None:
    for part in (0, 1):
        list(history.peer_line("a", outer(part, 1, t=100.0)))
    assert rules(history.late(BOUNDS, 130.0)) == []
    list(history.peer_line("a", outer(0, 2, t=125.0)))
    assert rules(history.late(BOUNDS, 131.0)) == ["the swarm advances"]  # part 1
    for who in "abc":
        history.disturbed(who, 120.0)
    assert rules(history.late(BOUNDS, 131.0)) == rules(history.late(BOUNDS, 500.0)) == []
    for who in "abc":
        history.repair(who, 500.0)
    assert rules(history.late(BOUNDS, 529.0)) == []  # they are still out
    list(history.peer_line("a", outer(0, 3, t=529.0)))
    list(history.peer_line("b", outer(0, 3, t=529.0)))
    assert history.out.keys() == {"c"} and history.recovery_s == [29.0, 29.0]
    assert rules(history.late(BOUNDS, 560.0)) == ["the swarm advances", "the swarm advances"]


def test_whoever_was_disturbed_takes_an_outer_step_again(history: SwarmHistory) -> None:
    for part in (0, 1):
        list(history.peer_line("b", outer(part, 1, t=100.0)))
    history.disturbed("a", 100.0)
    history.repair("a", 110.0)
    history.started("a")
    list(history.peer_line("a", outer(0, 1, t=111.0)))  # from its checkpoint
    assert history.out.keys() == {"a"}
    for part in (0, 1):
        list(history.peer_line("b", outer(part, 2, t=165.0)))
    assert rules(history.late(BOUNDS, 170.0)) == []
    assert rules(history.late(BOUNDS, 171.0)) == ["a disturbed member comes back"]
    list(history.peer_line("a", outer(0, 2, t=172.0)))
    assert rules(history.late(BOUNDS, 180.0)) == [] and not history.out


def test_logs_grow_slowly_and_memory_is_flat(history: SwarmHistory) -> None:
    assert rules(history.sizes(0.0, 1000, 100_000_000)) == []
    assert rules(history.sizes(59.0, 601_000, 100_000_000)) == []
    assert rules(history.sizes(59.5, 601_001, 100_000_000)) == ["logs grow slowly"]
    assert rules(history.sizes(61.0, 650_000, 100_000_000)) == []  # over a minute
    history.memory = [100] * 120 + [131] * 60
    assert rules(history.at_end(0.0)) == ["memory is flat"]
    history.memory = [100] * 120 + [130] * 60
    assert rules(history.at_end(0.0)) == []


def test_a_swarm_has_faults_of_its_own_and_those_of_a_coordinator_stay_as_they_were() -> None:
    options = ChaosOptions(swarm=True, peers=5, seconds=600.0, seed=4)
    planned = options.schedule()
    assert {fault.kind for fault in planned} == {*SWARM_KINDS}
    assert not {fault.target for fault in planned if fault.kind in (Kind.WIPE, Kind.EVICT)} & {"peer-0"}  # it invites
    assert not {*kinds_for(sharded=True)} & {Kind.WIPE, Kind.EVICT, Kind.CABLE, Kind.POWER_CUT}
    assert "[swarm]" in to_toml(options.run()) and "[server]" not in to_toml(options.run())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"gap_s": 0.0}, "--gap 0"),
        ({"gap_s": -1.0}, "--gap -1"),
        ({"swarm": True, "peers": 2}, "--peers 2"),
        ({"swarm": True, "peers": 8}, "--peers 8"),
        ({"swarm": True, "peers": 5, "sharded": True}, "--swarm"),
    ],
)
def test_options_that_make_no_sense_name_themselves(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ChaosOptions(**options)
