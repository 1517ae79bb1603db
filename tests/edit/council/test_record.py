"""The record as values and bytes: quorums, bounds, owners; and what a member keeps on disk."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from blake3 import blake3

from edit.council.record import (
    FORMAT,
    MOST_COUNT,
    MOST_ENROLLED,
    MOST_HOLDERS,
    MOST_ROOTS,
    Enrolled,
    Member,
    Part,
    PartState,
    Phase,
    Record,
    Root,
    Saved,
    Stamp,
    Update,
    is_quorum,
    update_id,
)
from edit.errors import FormatError, StorageError

D = [letter * 64 for letter in "0123456789abcdef"]


def record(peers: str = "abc", owners: str = "aab", **changes: Any) -> Record:
    values: dict[str, Any] = {
        "run_id": "run",
        "lineage": 1,
        "term": 3,
        "version": 4,
        "members": {peer_id: Member(incarnation=1, addresses=("host:1",)) for peer_id in peers},
        "voters": tuple(f"{peer_id}#1" for peer_id in peers),
        "parts": tuple(Part(owner=owner, grant=1, outer_step=5, digest=D[i]) for i, owner in enumerate(owners)),
    }
    return Record(**values | changes)


@pytest.mark.parametrize("size", range(1, 8))
def test_any_two_quorums_share_a_voter(size: int) -> None:
    voters = [f"m{i}#1" for i in range(size)]
    groups = [{*group} for n in range(size + 1) for group in itertools.combinations(voters, n)]
    quorums = [group for group in groups if is_quorum(voters, group)]
    assert all(one & other for one in quorums for other in quorums)
    assert all(is_quorum(voters, group) or is_quorum(voters, {*voters} - group) for group in groups), "one side always goes on"


def test_of_two_voters_the_older_goes_on_alone() -> None:
    assert is_quorum(["a#1", "b#1"], {"a#1"}) and not is_quorum(["a#1", "b#1"], {"b#1"})


def test_while_the_voters_change_both_lists_must_agree() -> None:
    changing = record(before=("d#1", "e#1", "f#1"))
    assert not changing.agreed({"a#1", "b#1", "c#1"}) and not changing.agreed({"d#1", "e#1", "f#1"})
    assert changing.agreed({"a#1", "b#1", "d#1", "e#1"})


def test_a_name_is_a_peer_in_one_of_its_lives() -> None:
    known = record()
    assert known.knows("a#1") and not known.knows("a#2") and not known.knows("z#1")
    assert replace(known, members={}).knows("a#1"), "it still votes"


def test_json_and_back() -> None:
    enrolled, roots = (
        {"b": Enrolled("0" * 32, "ab" * 32), "eye": Enrolled("1" * 32, "cd" * 32, True)},
        (Root("b2xk"), Root("bmV3", "c2lnbmVk")),
    )
    full = record(
        evicted={"z": "lied"},
        phase=Phase.DRAINING,
        before=("a#1",),
        verify=1,
        holders=("a", "b"),
        enrolled=enrolled,
        disputes={"a": ("b",), "b": ("a",)},
        roots=roots,
        last_step=7,
    )
    assert Record.from_json(json.loads(json.dumps(full.as_json()))) == full


def test_members_of_before_read_the_record_of_a_run_that_is_not_drained() -> None:
    assert "last_step" not in record().as_json() and Record.from_json(record().as_json()).last_step == 0


@pytest.mark.parametrize(
    "change",
    [
        {"term": -1},
        {"term": MOST_COUNT + 1},
        {"term": True},
        {"version": 1.0},
        {"run_id": "../x"},
        {"voters": ()},
        {"voters": ("a#1", "a#1")},
        {"voters": tuple(f"m{i}#1" for i in range(8))},
        {"voters": ("a",)},
        {"parts": ()},
        {"lease_s": 0.0},
        {"lease_s": float("nan")},
        {"lease_s": 61.0},
        {"lease_s": 10**400},
        {"verify": 7},
        {"last_step": -1},
        {"last_step": 1.0},
        {"last_step": MOST_COUNT + 1},
        {"evicted": {"a": "x" * 257}},
        {"evicted": {"a": "\x1b[2J"}},
        {"config_hash": "zz"},
        {"holders": ("a", "a")},
        {"holders": ("../x",)},
        {"holders": ("..",)},
        {"voters": (".#1",)},
        {"holders": tuple(f"m{i}" for i in range(MOST_HOLDERS + 1))},
        {"disputes": {"../x": ("a",)}},
        {"disputes": {"a": ("../x",)}},
        {"disputes": {"a": ("b", "b")}},
        {"disputes": {"a": tuple(f"m{i}" for i in range(8))}},
        {"disputes": {f"m{i}": ("a",) for i in range(MOST_ENROLLED + 1)}},
        {"roots": (Root("b2xk"),) * (MOST_ROOTS + 1)},
        {"enrolled": {"../x": Enrolled("0" * 32, "ab" * 32)}},
        {"enrolled": {f"m{i}": Enrolled("0" * 32, "ab" * 32) for i in range(MOST_ENROLLED + 1)}},
    ],
)
def test_a_record_with_values_out_of_bounds_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot be read") as caught:
        record(**change)
    assert "\n" not in str(caught.value) and "\x1b" not in str(caught.value)


def test_disputes_are_between_two_and_end_with_either() -> None:
    one = record().disputed("a", "b")
    assert one.disputes == {"a": ("b",), "b": ("a",)} and not one.distrusted
    assert one.disputed("b", "a") is one
    two = one.disputed("c", "a")
    assert two.distrusted == {"a"} and two.disputes["a"] == ("b", "c")
    assert two.settled("b").disputes == {"a": ("c",), "c": ("a",)} and not two.settled("b").distrusted
    assert two.settled("a").disputes == {} and two.settled("z") is two
    many = record()
    for i in range(20):
        many = many.disputed("a", f"m{i}")
    assert len(many.disputes["a"]) == 7, "it is bounded"


@pytest.mark.parametrize("path", [("extra",), ("parts", 0, "extra"), ("members", "a", "extra")])
def test_a_record_with_unknown_fields_is_refused(path: tuple[Any, ...]) -> None:
    values = json.loads(json.dumps(record().as_json()))
    place = values
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = 1
    with pytest.raises(ValueError, match="extra"):
        Record.from_json(values)


@pytest.mark.parametrize("key", ["members", "parts", "voters", "phase", "evicted", "holders", "enrolled", "roots", "disputes"])
@pytest.mark.parametrize("value", [None, 7, "text", [1], {"a": 1}])
def test_a_record_with_other_kinds_of_values_is_refused(key: str, value: object) -> None:
    values = json.loads(json.dumps(record().as_json()))
    values[key] = value
    with pytest.raises((ValueError, TypeError)):
        Record.from_json(values)


@pytest.mark.parametrize("value", [None, 7, "ab", {"b": 1}])
def test_disputes_are_lists(value: object) -> None:
    values = json.loads(json.dumps(record().as_json()))
    values["disputes"] = {"a": value}
    with pytest.raises(ValueError, match="no list"):
        Record.from_json(values)


def test_saved_bytes_and_back() -> None:
    saved = Saved(incarnation=7, term=4, vote="b#1", record=record())
    assert Saved.decode(saved.encode(), "council.json") == saved
    assert Saved.decode(Saved(incarnation=7).encode(), "council.json") == Saved(incarnation=7)


@pytest.mark.parametrize("format_", [4, 5, 6])
def test_bytes_of_a_member_of_an_older_version_are_read(format_: int) -> None:
    saved = Saved(incarnation=7, term=4, record=record(enrolled={"a": Enrolled("0" * 32, "ab" * 32)}))
    values = json.loads(saved.encode())
    del values["format"], values["check"]
    for member in values["record"]["members"].values() if format_ < 6 else ():
        del member["relayed"]
    if format_ == 4:
        del values["record"]["enrolled"]["a"]["observer"]
    written = json.dumps(values, sort_keys=True, separators=(",", ":")).encode()
    older = json.dumps({"format": format_, "check": blake3(written).hexdigest(), **values}).encode()
    assert Saved.decode(older, "council.json") == saved


def test_damaged_bytes_are_named() -> None:
    data = Saved(incarnation=7, term=4, vote="b#1", record=record()).encode()
    for damaged in (
        data[:-1],
        data.replace(b'"b#1"', b'"c#1"', 1),
        b"",
        b"[]",
        b"\xff",
        b'{"format": %d}' % FORMAT,
        b"[" * 100_000,
    ):
        with pytest.raises(StorageError, match="is damaged"):
            Saved.decode(damaged, "council.json")
    with pytest.raises(FormatError, match=f"format {FORMAT + 1}"):
        Saved.decode(data.replace(b'"format": %d' % FORMAT, b'"format": %d' % (FORMAT + 1)), "council.json")


def test_an_update_is_known_by_all_that_it_depends_on() -> None:
    given: list[Any] = ["run", 0, 1, D[0], b"manifest", [b"p" * 32]]
    others: list[Any] = ["other", 1, 2, D[1], b"manifesto", [b"q" * 32]]
    assert len({update_id(*given), *(update_id(*given[:i], others[i], *given[i + 1 :]) for i in range(6))}) == 7
    assert update_id("run", 0, 1, D[0], b"ab", [b"c"]) != update_id("run", 0, 1, D[0], b"a", [b"bc"])


def test_an_update_continues_one_state_under_one_grant() -> None:
    part = record().parts[0]
    right = Update(0, 6, 1, D[8], D[0], D[9])
    assert right.continues(part)
    for wrong in ({"outer_step": 5}, {"outer_step": 7}, {"grant": 0}, {"grant": 2}, {"base": D[3]}):
        assert not replace(right, **wrong).continues(part)  # type: ignore[arg-type]


def test_a_member_has_a_part_when_its_state_or_the_update_to_it_is_there() -> None:
    part = Part(owner="a", grant=1, outer_step=6, digest=D[9], update=D[8])
    held = Update(0, 6, 1, D[8], D[0], D[9])
    assert PartState(6, D[9]).has(part) and PartState(5, D[0], held).has(part)
    assert not PartState(6, D[1]).has(part) and not PartState(5, D[0]).has(part)
    assert not PartState(5, D[0], replace(held, id=D[7])).has(part)


# -- owners ----------------------------------------------------------------------------------------------------------------


def owners_of(found: Record) -> str:
    return "".join(part.owner for part in found.parts)


def test_the_parts_of_a_lost_owner_go_to_those_with_the_fewest() -> None:
    found = record(owners="aabc").assigned({"b", "c"}, [{"b", "c"}] * 4, {})
    assert owners_of(found) == "bcbc" and [part.grant for part in found.parts] == [2, 2, 1, 1]


def test_a_part_goes_only_to_one_that_is_up_to_date_on_it() -> None:
    assert owners_of(record(owners="aab").assigned({"b", "c"}, [{"c"}, set(), {"b"}], {})) == "cab", "nobody has the second"


def test_nothing_changes_while_all_owners_are_live() -> None:
    found = record(owners="abc")
    assert found.assigned({"a", "b", "c"}, [set(), set(), set()], {}) is found, "an owner's report may be late"


def test_a_released_part_changes_hands_and_is_kept_from_whom_it_should_not_go_to() -> None:
    fit = [{"a", "b", "c"}] * 3
    found = record(owners="abc").assigned({"a", "b", "c"}, fit, {0: {"a", "b"}})
    assert owners_of(found) == "cbc" and found.parts[0].grant == 2
    alone = record(owners="abc").assigned({"a"}, [{"a"}] * 3, {0: {"a"}})
    assert owners_of(alone)[0] == "a", "if nobody else can take it, it does"


def test_verifiers_are_others_than_the_owner_and_are_replaced() -> None:
    fit = [{"a", "b", "c"}] * 2
    found = record(owners="ab", verify=1).assigned({"a", "b", "c"}, fit, {})
    assert owners_of(found) == "ab" and all(len(p.verifiers) == 1 and p.owner not in p.verifiers for p in found.parts)
    assert [p.grant for p in found.parts] == [2, 2], "another set of hosts needs the contributions: a new round"
    assert found.assigned({"a", "b", "c"}, fit, {}) is found
    lost = found.parts[0].verifiers[0]
    left = {"a", "b", "c"} - {lost}
    after = found.assigned(left, [left] * 2, {})
    assert lost not in {name for part in after.parts for name in (part.owner, *part.verifiers)}


def test_loads_are_balanced_one_part_at_a_time() -> None:
    found = record(owners="aaa")
    once = found.balanced([{"b"}] * 3)
    assert sorted(owners_of(once)) == ["a", "a", "b"] and once.balanced([{"a", "b"}] * 3) is once


def test_who_is_reached_directly_gets_a_part_before_who_is_reached_through_a_relay() -> None:
    members = {peer_id: Member(incarnation=1, addresses=("host:1",), relayed=peer_id != "c") for peer_id in "abc"}
    found, fit = record(owners="aab", members=members), [{"a", "b", "c"}] * 3
    assert found.assigned({"a", "b", "c"}, fit, {}) is found, "what has a live owner stays"
    assert owners_of(found.assigned({"b", "c"}, [{"b", "c"}] * 3, {})) == "ccb"
    moved = [owners_of(found := found.balanced(fit)) for _ in range(4)]
    assert [owners.count("c") for owners in moved] == [1, 2, 3, 3], "one at a time, and none goes back, whatever the loads are"
    verified = record(owners="cc", verify=1, members=members | {"d": members["c"]}).assigned({*"abcd"}, [{*"abcd"}] * 2, {})
    assert {part.verifiers for part in verified.parts} == {("d",)}, "it gets the contributions, too"


# -- recover ---------------------------------------------------------------------------------------------------------------


def test_a_survivor_goes_on_alone_in_a_new_lineage_with_what_it_has() -> None:
    held = Update(1, 5, 1, D[8], D[7], D[1])
    parts = (*record().parts[:1], replace(record().parts[1], update=D[8]), record().parts[2])
    saved = Saved(incarnation=1, term=9, vote="c#1", record=record(parts=parts, evicted={"z": "lied"}))
    states = [PartState(5, D[0]), PartState(4, D[7], held), PartState(3, D[6])]
    found = saved.recovered("b", states)
    new = found.record
    assert new is not None and new.stamp > Stamp(1, MOST_COUNT, MOST_COUNT)
    assert (new.voters, new.before, {*new.members}) == (("b#1",), (), {"b"}) and new.evicted == {"z": "lied"}
    assert [(p.outer_step, p.digest) for p in new.parts] == [(5, D[0]), (5, D[1]), (3, D[6])], "what it has, or can adopt"
    assert all(p.owner == "b" and p.grant > 2**20 for p in new.parts) and found.vote == "" and found.term == 10


@pytest.mark.parametrize("phase", Phase)
def test_a_run_that_had_finished_runs_again_where_the_survivor_lacks_its_last_steps(phase: Phase) -> None:
    saved = Saved(incarnation=1, record=record(phase=phase))
    states = [PartState(5, D[i]) for i in range(3)]
    whole = saved.recovered("b", states).record
    back = saved.recovered("b", [*states[:2], PartState(4, D[6])]).record
    assert whole is not None and back is not None and whole.phase is phase
    assert back.phase is (Phase.RUNNING if phase is Phase.FINISHED else phase), "pauses and drains are still what is ordered"
    assert back.parts[2].outer_step == 4


def test_a_member_without_a_part_cannot_recover() -> None:
    with pytest.raises(StorageError, match="no state of a part"):
        Saved(incarnation=1, record=record()).recovered("b", [PartState()] * 3)
    with pytest.raises(StorageError, match="too large"):
        Saved(incarnation=1, term=MOST_COUNT, record=record()).recovered("b", [PartState(4, D[0])] * 3)
    for changes in ({"lineage": MOST_COUNT}, {"parts": (replace(record().parts[0], grant=MOST_COUNT),) * 3}):
        with pytest.raises(StorageError, match="too large"):
            Saved(incarnation=1, record=record(**changes)).recovered("b", [PartState(4, D[0])] * 3)
    with pytest.raises(StorageError, match="no record"):
        Saved(incarnation=1).recovered("b", [])
