"""The whole state of a part, fetched from a member that may lie: what the others came to decides."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aggregator.swarm import host
from aggregator.swarm.host import Host
from aggregator.swarm.offers import Offer, Round
from aggregator.swarm.replication import Claimed, PartReplica, PartSnapshot
from aggregator.swarm.witnesses import Witnesses
from edit.config.run import RunConfig
from edit.council import events as ev
from edit.errors import GoneError, RemoteProtocolError
from edit.fragments.digest import digest
from edit.merging.outer_state import MergeRecord, OuterState
from edit.merging.penalty import NormStatistics
from editpb.council_messages import MOST_TOLD, StateAsked, StateDigest
from tests.support.council.hosts import SIZES, Hosts, hosts
from tests.support.loops import run_held
from tests.support.served import TOML

Change = Callable[[PartSnapshot], PartSnapshot]


def config() -> RunConfig:
    """With all that a state can have."""
    values: dict[str, Any] = tomllib.loads(TOML.format(start=1, quorum=1))
    del values["server"]
    values["outer"] = {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.9}
    values["codec"]["down"] = "int8"
    values["average"] = {"kind": "ema"}
    return RunConfig.from_mapping({**values, "swarm": {"parts": 1}})


def deltas(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(size, generator=generator) for size in SIZES]


async def take_step(swarm: Hosts, step: int) -> None:
    await swarm.contribute(0, deltas(step))
    await swarm.until(lambda: all(at(each) == step for peer_id, each in swarm.running.items() if peer_id != "d"))


def at(host: Host) -> int | None:
    """The outer step that its council knows of; None: it has no state yet."""
    return next((state.outer_step for state in host.council.states if state.digest), None)


def lying(of: Host, change: Change) -> None:
    """Have a host send another state than it has."""
    replica = of.parts[0].replica
    snapshot = replica.snapshot
    replica.snapshot = lambda: change(snapshot())  # type: ignore[method-assign]


def said_by(of: Host) -> list[str]:
    return [text for _, text in of._notices if "believed" in text]


def scenario(tmp_path: Path, body: Callable[[Hosts], Any], members: str = "abc", steps: int = 2) -> None:
    async def run() -> None:
        async with hosts(tmp_path, config=config()) as swarm:
            await swarm.grow(*members)
            for step in range(1, steps + 1):
                await take_step(swarm, step)
            await body(swarm)

    run_held(run())


# -- lies ------------------------------------------------------------------------------------------------------------------


def other(name: str) -> Change:
    def change(found: PartSnapshot) -> PartSnapshot:
        tensor = found.tensors[name].clone()
        tensor[0] += 1
        return replace(found, tensors={**found.tensors, name: tensor})

    return change


def other_theta(found: PartSnapshot) -> PartSnapshot:
    """With the digest that it has."""
    changed = other("theta.1")(found)
    theta = [changed.tensors[f"theta.{i}"] for i in range(len(SIZES))]
    return replace(changed, metadata={**changed.metadata, "digest": digest(theta)})


def other_statistics(found: PartSnapshot) -> PartSnapshot:
    statistics = [{"ghost": NormStatistics().to_json()}, *found.metadata["statistics"][1:]]
    return replace(found, metadata={**found.metadata, "statistics": statistics})


LIES: dict[str, Change] = {
    "momentum": other("outer.1.momentum"),
    "theta": other_theta,
    "residual": other("residual.1"),
    "average": other("average.1"),
    "statistics": other_statistics,
    "tokens": lambda found: replace(found, tokens=found.tokens + 1),
    "no residual": lambda found: replace(found, tensors={k: v for k, v in found.tensors.items() if k != "residual.1"}),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("what", LIES)
def test_a_source_that_sends_another_state_is_named_and_left(tmp_path: Path, what: str) -> None:
    """Nothing else of what it says is wrong: the outer step, its name, and that what it sends fits together."""

    async def body(swarm: Hosts) -> None:
        assert swarm.record.parts[0].owner == "a", "who is asked first"
        lying(swarm.running["a"], LIES[what])
        d = await swarm.start("d")
        await swarm.until(lambda: at(d) == 2, passes=1.0)
        lying(swarm.running["a"], lambda found: found)
        honest = PartReplica.snapshot(swarm.running["b"].parts[0].replica)
        taken = d.parts[0].replica.snapshot()
        assert taken.digest == honest.digest
        assert said_by(d) == ["a is not believed: the state of part 0 at outer step 2 is another at b and c"]
        assert d.parts[0].not_believed == {"a"}

    scenario(tmp_path, body)


@pytest.mark.parametrize("step", [3, 2**40])
def test_a_source_that_claims_a_later_outer_step_than_the_record_is_named_and_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.setattr(host, "CONFIRM_S", 0.3)

    def later(found: PartSnapshot) -> PartSnapshot:
        return replace(found, name="7" * 64, metadata={**found.metadata, "outer_step": step})

    async def body(swarm: Hosts) -> None:
        lying(swarm.running["a"], later)
        d = await swarm.start("d")
        await swarm.until(lambda: at(d) is not None, passes=1.0)
        assert at(d) == 2
        assert said_by(d) == [f"a is not believed: outer step {step} of part 0 is in no record"]
        await take_step(swarm, 3)
        await swarm.until(lambda: at(d) == 3)

    scenario(tmp_path, body)


def test_of_two_that_differ_neither_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(swarm: Hosts) -> None:
        for peer_id in "ab":
            lying(swarm.running[peer_id], LIES["momentum"])
        d = await swarm.start("d")
        failed: list[str] = []
        say = d._say

        def said(part: Any, answer: Any, source: str = "") -> None:
            failed.append(answer.reason if isinstance(answer, ev.Failed) else "")
            say(part, answer, source)

        d._say = said  # type: ignore[method-assign]
        await swarm.until(lambda: len(failed) >= 3, passes=1.0)
        words = "the state of part 0 at outer step 2 is one at {}, and another at {}"
        assert {*failed} == {words.format("a", "b"), words.format("b", "a")}
        assert not said_by(d) and not d.parts[0].replica.state.digest

    scenario(tmp_path, body, "ab")


# -- owners, and members that are wrong themselves --------------------------------------------------------------------------


def test_an_owner_whose_update_is_for_other_parameters_damages_nobody(tmp_path: Path) -> None:
    """Else all would take themselves for damaged, and have no state but what the owner sends."""

    async def body(swarm: Hosts) -> None:
        a = swarm.running["a"].parts[0].replica

        def offer(
            grant: int, round_id: int, reason: str, tokens: int, records: Sequence[MergeRecord], audit: str = ""
        ) -> Offer:
            merged = Round(round_id, reason, "0" * 64, tuple(sorted(records, key=lambda record: record.fragment_id)))
            return Offer.of(swarm.run_id, 0, grant, a._state.digest, a._store.tokens + tokens, merged)

        def hold(offer: Offer, own: object = (), *, agreed: bool = False) -> None:
            a._state = replace(a._state, held=offer.update)

        a.offer, a.hold = offer, hold  # type: ignore[method-assign]
        await swarm.contribute(0, deltas(3))
        others = [swarm.running["b"], swarm.running["c"]]
        wanted = "part 0: the update to outer step 3 is for other parameters"
        await swarm.until(lambda: all(any(wanted in text for _, text in each._notices) for each in others), passes=0.3)
        await swarm.until(lambda: all(each.parts[0].looked[0] and not each.parts[0].witnesses for each in others), passes=0.3)
        assert swarm.record.parts[0].outer_step == 2 and [at(each) for each in others] == [2, 2]
        assert len({each.parts[0].replica.claimed() for each in others}) == 1, "they still have it"
        swarm.running[swarm.leader].tell(ev.Evict("a", "it lies"))
        await swarm.stop("a")
        await swarm.until(lambda: swarm.owner() is not None, passes=1.0)
        await take_step(swarm, 3)

    scenario(tmp_path, body)


def test_a_member_that_is_wrong_itself_hears_so_from_the_others_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no quorum is without it: the update that it does not hold is not committed before."""
    monkeypatch.setattr(host, "AWAY_S", 0.5)

    async def body(swarm: Hosts) -> None:
        await swarm.stop("c")
        await swarm.until(lambda: swarm.leader == "a" and swarm.owner() is swarm.running["a"], passes=1.0)
        b = swarm.running["b"].parts[0].replica
        tensors = {name: each.clone() for name, each in b.outer.to_tensors().items()}
        tensors["theta.1"][7] += 1
        theta = [tensors[f"theta.{i}"] for i in range(len(SIZES))]
        b._outer = OuterState.restore(b.outer.schema, config(), tensors, {**b.outer.metadata(), "digest": digest(theta)})
        await swarm.contribute(0, deltas(3))
        await swarm.until(lambda: [at(each) for each in swarm.running.values()] == [3, 3], passes=1.0)
        assert swarm.same()

    scenario(tmp_path, body)


# -- honest sources --------------------------------------------------------------------------------------------------------


def test_a_state_that_took_long_is_confirmed_by_what_was_said_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are three outer steps ahead when it is here."""

    async def body(swarm: Hosts) -> None:
        fetch_state = host.fetch_state

        async def slowly(*arguments: Any) -> PartSnapshot:
            found = await fetch_state(*arguments)
            for step in (3, 4, 5):
                await take_step(swarm, step)
            return found

        monkeypatch.setattr(host, "fetch_state", slowly)
        d = await swarm.start("d")
        await swarm.until(lambda: at(d) == 5, passes=0.3)
        assert swarm.same() and not said_by(d)
        for peer_id in "abc":
            await swarm.until(lambda peer_id=peer_id: not swarm.running[peer_id].parts[0].asking)

    scenario(tmp_path, body)


def test_nothing_is_computed_of_states_that_nobody_fetches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    claimed = PartReplica.claimed

    def counted(self: PartReplica) -> Claimed:
        computed.append(self.state.outer_step)
        return claimed(self)

    monkeypatch.setattr(PartReplica, "claimed", counted)

    async def body(swarm: Hosts) -> None:
        before = len(computed)  # b and c have come in by states
        await take_step(swarm, 3)
        await take_step(swarm, 4)
        assert len(computed) == before

    scenario(tmp_path, body)


def test_one_that_has_nobody_else_to_ask_takes_what_the_other_says(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        d = await swarm.start("d")
        await swarm.until(lambda: at(d) == 2, passes=1.0)
        assert swarm.same()

    scenario(tmp_path, body, "a")


def test_a_state_is_the_same_at_all_that_took_the_same_steps_and_after_a_restart(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        found = {each.parts[0].replica.claimed() for each in swarm.running.values()}
        assert len(found) == 1
        await swarm.stop("c")
        again = await swarm.start("c")
        assert {again.parts[0].replica.claimed()} == found
        assert again.parts[0].replica.snapshot().digest == next(iter(found)).digest

    scenario(tmp_path, body, steps=4)


def test_one_that_asks_again_and_again_gets_one_turn_of_the_part(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        a = swarm.running["a"]
        for _ in range(1000):
            await a.heard("b#1", StateAsked(0, MOST_TOLD))
            await a.heard("b#1", StateAsked(0, 0))
            await a.heard("b#1", StateAsked(1, 1))
            await a.heard("b#1", StateDigest(1, 0, "", ""))
            await a.heard("b#1", StateDigest(0, 0, "", ""))
        assert a.parts[0].jobs.qsize() <= 1 and not a.parts[0].asking
        await a.heard("b#1", StateAsked(0, MOST_TOLD))
        a.disconnected("b")
        assert not a.parts[0].asking
        await asyncio.sleep(0)

    scenario(tmp_path, body, "ab", 0)


# -- who is believed -------------------------------------------------------------------------------------------------------

TRUE, FALSE = (StateDigest(0, 5, "1" * 64, letter * 64) for letter in "ab")
CLAIMED = Claimed(5, "1" * 64, "a" * 64)


def why_not(voters: str, **said: StateDigest) -> str:
    witnesses = Witnesses(0, "s")
    for peer_id, word in said.items():
        witnesses.take(peer_id, word)
    return witnesses.why_not(CLAIMED, {*voters})


def test_more_than_half_of_the_voters_are_believed_with_the_source_among_them() -> None:
    assert why_not("sbc", b=TRUE) == "" and why_not("sbcde", b=TRUE, c=TRUE, d=FALSE, e=FALSE) == ""
    assert why_not("bc", b=TRUE, c=TRUE) == "" and why_not("sb", b=TRUE) == ""
    assert "is not confirmed by b and c" in why_not("sbc")
    assert "is not confirmed by c" in why_not("bc", b=TRUE), "the word of a source without a vote does not count"
    assert "is not confirmed by b" in why_not("sb")
    later = replace(TRUE, outer_step=6)
    assert "is not confirmed by b" in why_not("sbc", b=later, c=FALSE), "what they say of another outer step says nothing"


def test_when_more_than_half_say_otherwise_the_source_lies() -> None:
    for voters, said in (("sbc", {"b": FALSE, "c": FALSE}), ("bcd", {"b": FALSE, "c": FALSE, "d": TRUE}), ("b", {"b": FALSE})):
        with pytest.raises(RemoteProtocolError, match="s is not believed: the state of part 0 at outer step 5 is another at b"):
            why_not(voters, **said)
    with pytest.raises(GoneError, match="is one at s, and another at b"):
        why_not("sb", b=FALSE)
    with pytest.raises(GoneError, match="is one at b and s, and another at c and d"):
        why_not("sbcd", b=TRUE, c=FALSE, d=FALSE)


def test_who_has_no_state_does_not_count_and_who_says_nothing_does() -> None:
    nothing = StateDigest(0, 0, "", "")
    assert why_not("sb", b=nothing) == "" and why_not("", c=FALSE) == "" and why_not("s") == ""
    assert "is not confirmed by c" in why_not("sbc", b=nothing)
    witnesses = Witnesses(0, "s")
    assert witnesses.missing({"s", "b", "c"}) == {"b", "c"}
    witnesses.take("b", nothing)
    witnesses.take("c", TRUE)
    assert not witnesses.missing({"s", "b", "c"})


def test_what_a_witness_says_is_bounded() -> None:
    witnesses = Witnesses(0, "s")
    for step in range(1000):
        witnesses.take("b", replace(TRUE, outer_step=step))
    assert len(witnesses._said["b"]) == MOST_TOLD + 1
