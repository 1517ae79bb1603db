"""Hosts whose peers swap (gossip), over real connections: the oracle's bits, settlings, kills, partners that lie."""

from __future__ import annotations

import asyncio
import errno
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from torch import Tensor

from aggregator.storage.store import Store
from aggregator.storage.upload_buffer import UploadBuffer
from aggregator.swarm import transfers
from aggregator.swarm.gossip import member
from aggregator.swarm.gossip.member import GossipMember
from aggregator.swarm.gossip.phi import Calendar, Phi, PhiStore
from aggregator.swarm.host_folder import Settings
from aggregator.swarm.replication import PartSnapshot
from aggregator.swarm.standing import GossipStanding
from aggregator.swarm.watching import SwarmWatch
from edit.config.algorithm import GossipConfig, OuterConfig, PenaltyConfig, RoundsConfig, SyncConfig
from edit.config.run import CodecConfig, ModelConfig, RunConfig, StorageConfig, SwarmConfig
from edit.council.events import SetPhase
from edit.council.record import Phase
from edit.errors import BusyError, RefusedError, StorageError
from edit.merging.gossip import pairs
from edit.reference import Gossip
from edit.rounds import events
from edit.rounds.events import Phase as RoundPhase
from editpb import council_pb2 as pb
from editpb.council_messages import SwapBegin, swap_begin_to_pb
from editpb.messages import ContributionHeader, Expel
from editpb.transport.chunk_frames import council_stub, update_frames
from tests.aggregator.swarm.test_operating import equip
from tests.support.council.hosts import SIZES, Hosts, hosts, schema_of
from tests.support.encoded import encode
from tests.support.loops import pass_time, run_held
from tests.support.served import theta

SCHEMA = schema_of(0)


@pytest.fixture(autouse=True)
def _updates_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peers of these tests take no updates."""
    monkeypatch.setattr(member, "TAKEN_S", 0.0)


@asynccontextmanager
async def gossips(
    path: Path,
    names: str,
    *,
    outer_steps: int = 100,
    settle_every: int = 0,
    codec: str = "fp32",
    penalty: bool = False,
    start_peers: int = 1,
    train: str | None = None,
    buffer_bytes: int = 256 << 20,
) -> AsyncIterator[Hosts]:
    """train: the members whose peers attend from the start; None: all."""
    config = RunConfig(
        seed=3,
        model=ModelConfig(name="entry:mine"),
        sync=SyncConfig(every=2, outer_steps=outer_steps),
        penalty=PenaltyConfig(enabled=penalty),
        rounds=RoundsConfig(start_peers=start_peers),
        outer=OuterConfig(algorithm="gossip"),
        gossip=GossipConfig(codec=codec, settle_every=settle_every, deadline_s=20.0),
        codec=CodecConfig(up="fp32"),
        swarm=SwarmConfig(parts=1),
        storage=StorageConfig(buffer_bytes=buffer_bytes),
    )
    async with hosts(path, config=config) as swarm:
        await swarm.grow(*names)
        await swarm.until(lambda: all(host.gossip.engine is not None for host in swarm.running.values()), passes=1.0)
        async with AsyncExitStack() as stack:
            for name in names if train is None else train:
                peer = await stack.enter_async_context(swarm.peer(name, name))
                await peer.attend()
                await peer.report(0)
            yield swarm


def drawn(name: str, outer_step: int) -> list[Tensor]:
    """What a peer contributes."""
    generator = torch.Generator().manual_seed(1000 * ord(name) + outer_step)
    return [0.1 * torch.randn(size, generator=generator) for size in SIZES]


async def contribute(swarm: Hosts, name: str, deltas: Sequence[Tensor]) -> None:
    """A whole contribution to the own host's open round, as if it had come in by the network."""
    gossip = swarm.running[name].gossip
    await swarm.until(lambda: gossip.engine is not None and gossip.engine.run.founded, passes=1.0)
    rounds = gossip.engine.run.rounds
    rounds.feed(events.MemberReady(name, rounds.outer.outer_step, 0.0))
    await swarm.until(lambda: rounds.machine.round_id > 0 and rounds.machine.outer_step == rounds.outer.outer_step)
    for i, delta in enumerate(deltas):
        data = bytes(encode("fp32", delta).data)
        header = ContributionHeader(
            run_id=swarm.run_id,
            round_id=rounds.machine.round_id,
            outer_step=rounds.machine.outer_step,
            peer_id=name,
            fragment_id=i,
            schema_hash=SCHEMA.schema_hash,
            inner_steps=2,
            tokens=10,
            codec="fp32",
            numel=delta.numel(),
            total_bytes=len(data),
        )
        shard = rounds.offer(header)
        assert shard is not None
        await rounds.receive(shard, 0, data)
        await rounds.arrived(shard)


def phi(swarm: Hosts, name: str) -> Sequence[Tensor]:
    found = swarm.running[name].gossip._phi
    assert found is not None
    return found.theta


def at(swarm: Hosts, name: str) -> int:
    found = swarm.running[name].gossip._phi
    return found.outer_step if found is not None else -1


async def all_at(swarm: Hosts, outer_step: int) -> None:
    await swarm.until(lambda: {at(swarm, name) for name in swarm.running} == {outer_step}, passes=1.0)


class Oracles:
    """The oracle of each fragment."""

    def __init__(self, names: str, codec: str = "fp32") -> None:
        self.each = [Gossip(dict.fromkeys(names, part), 3) for part in theta(0, SCHEMA)]
        for oracle in self.each if codec == "bf16" else ():
            oracle.lossy = lambda tensor: tensor.bfloat16().float()

    def round(self, names: str, outer_step: int) -> dict[str, list[Tensor]]:
        """Take an outer step; return what each peer contributes: theta less its local parameters."""
        found: dict[str, list[Tensor]] = {name: [] for name in names}
        for i, oracle in enumerate(self.each):
            local = {name: oracle.phi[name] - drawn(name, outer_step)[i] for name in names}
            for name in names:
                found[name].append(oracle.phi[name] - local[name])
            oracle.round(local)
        return found

    def take(self, name: str, others: Oracles) -> None:
        """Replace what a peer has by what it has there."""
        for one, other in zip(self.each, others.each, strict=True):
            one.phi[name], one.delta[name] = other.phi[name], other.delta[name]

    def settle(self) -> None:
        for oracle in self.each:
            oracle.settle()

    def same(self, swarm: Hosts, names: str) -> bool:
        return all(
            torch.equal(part, oracle.phi[name])
            for name in names
            for part, oracle in zip(phi(swarm, name), self.each, strict=True)
        )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("names", "codec"), [("ab", "fp32"), ("abcd", "bf16"), ("abcde", "fp32")])
def test_hosts_take_the_oracles_steps_and_settle_on_one_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, names: str, codec: str
) -> None:
    """Nobody is lost where all settle: the engine that ends there ends the stream of its peer itself."""
    caplog.set_level("INFO")

    async def body() -> None:
        calendar, oracles = Calendar(3, 7), Oracles(names, codec)
        async with gossips(tmp_path, names, outer_steps=7, settle_every=3, codec=codec) as swarm:
            for outer_step in range(7):
                assert {at(swarm, name) for name in names} == {outer_step}
                if calendar.settles(outer_step):
                    oracles.settle()
                else:
                    for name, deltas in oracles.round(names, outer_step).items():
                        await contribute(swarm, name, deltas)
                await all_at(swarm, outer_step + 1)
                assert oracles.same(swarm, names), [host.gossip.standing() for host in swarm.running.values()]
            await swarm.until(lambda: swarm.record.phase.value == "finished", passes=1.0)
            assert swarm.same()
            assert ": lost (" not in caplog.text

    run_held(body())


def stopped(swarm: Hosts, name: str) -> list[Tensor]:
    """What lies in the folder of a member that does not run."""
    store = Store(swarm.folder(name).phi, swarm.config, swarm.run_id, restore=Phi.restore)
    found = store.recover()
    store.close()
    assert found is not None
    return found.theta


@pytest.mark.covering
@pytest.mark.parametrize("where", ["judging", "decided", "committed"])
@pytest.mark.parametrize("killed", ["a", "b"])
def test_a_partner_is_killed_in_a_swap_and_goes_on_from_what_it_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, killed: str
) -> None:
    """judging: it has the other's offer. decided: both have said Have, and it has written nothing. Then both swap again."""

    async def body() -> None:
        (other,) = {"a", "b"} - {killed}
        together, alone = Oracles("ab"), {name: Oracles(name) for name in "ab"}
        async with gossips(tmp_path, "ab") as swarm:
            deltas = together.round("ab", 0)
            for name, oracles in alone.items():
                oracles.round(name, 0)
            gossip, there = swarm.running[killed].gossip, asyncio.Event()
            assert gossip is not None

            async def hang(*_: object) -> None:
                there.set()
                await asyncio.Event().wait()

            def refuse(own: object, met: object) -> None:
                there.set()
                raise RefusedError("it is killed here")

            if where == "judging":
                monkeypatch.setattr(gossip.swaps, "_do", hang)
            elif where == "decided":
                monkeypatch.setattr(gossip._phi, "decide", refuse)
            for name in "ab":
                await contribute(swarm, name, deltas[name])
            reached = (lambda: at(swarm, killed) == 1) if where == "committed" else there.is_set
            await swarm.until(lambda: reached() and (where == "judging" or at(swarm, other) == 1), passes=1.0)
            await swarm.stop(killed)
            await swarm.until(lambda: at(swarm, other) == 1, passes=1.0)
            went_alone = {"judging": "ab", "decided": killed, "committed": ""}[where]
            began = theta(0, SCHEMA) if where != "committed" else [one.phi[killed] for one in together.each]
            assert all(map(torch.equal, stopped(swarm, killed), began))
            await swarm.start(killed)
            async with swarm.peer(killed, killed) as peer:
                await swarm.until(lambda: swarm.running[killed].gossip.engine is not None, passes=1.0)
                await peer.attend()
                if where != "committed":
                    await contribute(swarm, killed, deltas[killed])
                await all_at(swarm, 1)
                for name in went_alone:
                    together.take(name, alone[name])
                assert together.same(swarm, "ab")
                for name, delta in together.round("ab", 1).items():
                    await contribute(swarm, name, delta)
                await all_at(swarm, 2)
                assert together.same(swarm, "ab")

    run_held(body())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("lie", "why"),
    [
        ("too many bytes", "more than the announced 20 bytes"),
        ("not offered", "byte string 4, which is not offered"),
        ("begins twice", "chunks and one Have"),
        ("Have of what is not due", "found good what is not due"),
        ("NaN", ""),
        ("breaks off", "the stream broke"),
        ("says nothing", "was too slow"),
    ],
)
def test_a_partner_that_lies_is_left_alone(tmp_path: Path, lie: str, why: str) -> None:
    """Who waits for it takes the step alone, to the bit, and goes on; a swap that is played again is refused."""

    async def body() -> None:
        alone = Oracles("b")
        async with gossips(tmp_path, "ab") as swarm:
            (deltas,) = alone.round("b", 0).values()
            await swarm.stop("a")
            await contribute(swarm, "b", deltas)
            gossip = swarm.running["b"].gossip
            assert gossip is not None
            await swarm.until(lambda: gossip.swaps._step is not None and gossip.swaps._step.waits)
            begin = gossip.swaps._step.begin
            async with swarm.channel("b", "a") as channel:
                stub = council_stub(channel)
                for other, refusal in (
                    (replace(begin, outer_step=1), "is not there yet"),
                    (replace(begin, record=begin.record._replace(version=10**6)), "another version of the record"),
                ):
                    assert refusal in await refused(stub, other)
                call = stub.Swap()
                await call.write(swap_begin_to_pb(begin))
                assert (await call.read()).begin == swap_begin_to_pb(begin).begin
                match lie:
                    case "too many bytes":
                        await call.write(next(update_frames(0, bytes(21))))
                    case "not offered":
                        await call.write(next(update_frames(4, bytes(1))))
                    case "begins twice":
                        await call.write(swap_begin_to_pb(begin))
                    case "Have of what is not due":
                        await call.write(pb.SwapPart(have=pb.SwapHave(good=[7])))
                    case "NaN":
                        for number, size in enumerate((5, 5, 300, 300)):
                            vector = torch.full((size,), math.nan if number == 0 else 0.0)
                            await call.write(next(update_frames(number, vector.numpy().tobytes())))
                        await call.write(pb.SwapPart(have=pb.SwapHave(good=[0])))
                    case "breaks off":
                        call.cancel()
                    case _:
                        pass_time(30.0)
                await swarm.until(lambda: at(swarm, "b") == 1)
                said = gossip.standing()
                assert said is not None and (why in said.said if why else said.alone == 1)
                assert alone.same(swarm, "b")
                assert "has gone on" in await refused(stub, begin)
                call.cancel()

    run_held(body())


def test_a_partner_that_begins_and_reads_nothing_is_left_alone_at_the_deadline(tmp_path: Path) -> None:
    async def body() -> None:
        async with gossips(tmp_path, "ab") as swarm:
            await swarm.stop("a")
            await contribute(swarm, "b", drawn("b", 0))
            gossip = swarm.running["b"].gossip
            assert gossip is not None
            await swarm.until(lambda: gossip.swaps._step is not None and gossip.swaps._step.waits)

            async def messages() -> AsyncIterator[Any]:
                yield swap_begin_to_pb(gossip.swaps._step.begin)

            serving = asyncio.ensure_future(gossip.swaps.serve("a", messages(), never))
            await swarm.until(lambda: gossip.swaps._step is None or gossip.swaps._step.serving is not None)
            pass_time(30.0)
            await swarm.until(lambda: at(swarm, "b") == 1)
            await serving
            said = gossip.standing()
            assert said is not None and said.said == "alone: a: was too slow"

    run_held(body())


async def refused(stub: Any, begin: SwapBegin) -> str:
    """What is said to who begins a swap so."""
    call = stub.Swap()
    await call.write(swap_begin_to_pb(begin))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return str(caught.value.details())


def test_only_the_own_peer_trains_at_a_host(tmp_path: Path) -> None:
    async def body() -> None:
        async with gossips(tmp_path, "ab") as swarm, swarm.peer("a", "b") as peer:
            await peer.open_stream()
            refused = await peer.receive(Expel)
            assert isinstance(refused, Expel) and refused.reason == "only a itself trains here"

    run_held(body())


def test_each_member_sees_the_outer_steps_of_its_own_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else is told of them, not even where the peer's host owns the part: no member is shown a refusal."""
    monkeypatch.setattr(Settings, "schemas", lambda self, config: ((range(len(SIZES)), SCHEMA),))

    async def body() -> None:
        async with gossips(tmp_path, "ab") as swarm:
            for name in "ab":
                await contribute(swarm, name, drawn(name, 0))
            await all_at(swarm, 1)
            for name in "ab":
                folder = equip(swarm, name)
                monkeypatch.setattr(Settings, "config", lambda self: swarm.config)
                async with aclosing(SwarmWatch(folder, every_s=0.0).statuses()) as statuses:
                    told = await anext(statuses)
                assert (told.outer_step, told.reason) == (1, "") and [each.outer_step for each in told.rounds] == [1]

    run_held(body())


def test_the_first_swap_waits_for_as_many_peers_as_are_to_train_then(tmp_path: Path) -> None:
    async def body() -> None:
        async with gossips(tmp_path, "ab", start_peers=2, train="a") as swarm:
            one, other = (swarm.running[name].gossip for name in "ab")
            assert one.engine is not None and other.engine is not None
            await swarm.until(lambda: one.engine.run.held_up() == "1 of 2 peers train (rounds.start_peers)", passes=1.0)
            async with swarm.peer("b", "b") as peer:
                await peer.attend()
                await swarm.until(lambda: not one.engine.run.held_up() and not other.engine.run.held_up(), passes=1.0)
                oracles = Oracles("ab")
                for name, deltas in oracles.round("ab", 0).items():
                    await contribute(swarm, name, deltas)
                await all_at(swarm, 1)
                assert oracles.same(swarm, "ab")

    run_held(body())


def test_a_member_that_is_not_drawn_with_another_gets_no_swap_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with gossips(tmp_path, "abc") as swarm:
            drawn_with = pairs(3, 0, "abc")
            (odd,) = (name for name in "abc" if drawn_with[name] is None)
            waits = max({*"abc"} - {odd})  # of a pair the first dials
            oracles = Oracles("abc")
            deltas = oracles.round("abc", 0)
            await contribute(swarm, waits, deltas[waits])
            gossip = swarm.running[waits].gossip
            assert gossip is not None
            await swarm.until(lambda: gossip.swaps._step is not None and gossip.swaps._step.waits)
            async with swarm.channel(waits, odd) as channel:
                for _ in range(2):
                    assert await refused(council_stub(channel), gossip.swaps._step.begin) == f"{odd} is not drawn with {waits}"
            for name in {*"abc"} - {waits}:
                await contribute(swarm, name, deltas[name])
            await all_at(swarm, 1)
            assert oracles.same(swarm, "abc")
            assert caplog.text.count(f"{odd} began a swap for which it is not drawn; it is refused") == 1

    run_held(body())


async def drain(swarm: Hosts) -> None:
    await swarm.running[swarm.leader].order(SetPhase(Phase.DRAINING))
    engines = [host.gossip.engine for host in swarm.running.values() if host.gossip is not None]
    told = Phase.DRAINING, Phase.FINISHED  # where nobody trains it is over at once
    await swarm.until(lambda: all(engine is not None and engine._wanted in told for engine in engines), passes=1.0)


async def all_open(swarm: Hosts) -> None:
    """Wait until the round of each member's next outer step is open: a drain ends with those that are."""

    def is_open(name: str) -> bool:
        gossip = swarm.running[name].gossip
        assert gossip is not None and gossip.engine is not None
        machine = gossip.engine.run.rounds.machine
        return machine.outer_step == at(swarm, name) and machine.phase in (RoundPhase.COLLECTING, RoundPhase.COMMITTING)

    await swarm.until(lambda: all(map(is_open, swarm.running)), passes=1.0)


async def ended(swarm: Hosts) -> None:
    """Wait until the run has finished, as each peer is told."""
    engines = [lambda host=host: host.gossip.engine for host in swarm.running.values()]
    await swarm.until(lambda: all(of() is not None and of().run.finished for of in engines), passes=1.0)
    assert swarm.record.phase is Phase.FINISHED and swarm.same()
    common = swarm.running[swarm.leader].parts[0].replica.outer.theta
    assert all(torch.equal(part, there) for name in swarm.running for part, there in zip(phi(swarm, name), common, strict=True))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("every", [0, 10])
def test_a_drain_ends_with_the_open_rounds_and_a_settling_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """Each counts the outer steps that it took, also where the run has finished before its engine has begun anew."""
    monkeypatch.setattr(member, "TAKEN_S", 0.5)

    async def body() -> None:
        oracles = Oracles("abc")
        async with gossips(tmp_path, "abc", settle_every=every) as swarm:
            for outer_step in range(2):
                for name, deltas in oracles.round("abc", outer_step).items():
                    await contribute(swarm, name, deltas)
                await all_at(swarm, outer_step + 1)
            last = oracles.round("abc", 2)
            await contribute(swarm, "b", last["b"])
            await swarm.until(lambda: at(swarm, "b") == 3, passes=1.0)  # drawn without a partner, it swaps with nobody
            await all_open(swarm)
            await drain(swarm)
            await drain(swarm)  # once more is no error
            for order in (Phase.RUNNING, Phase.PAUSED):
                with pytest.raises(RefusedError, match=r"^a run with gossip that drains or has finished does not go on"):
                    await swarm.running[swarm.leader].order(SetPhase(order))
            assert not any(host.gossip.engine.rests for host in swarm.running.values() if host.gossip and host.gossip.engine)
            for name in "ac":
                await contribute(swarm, name, last[name])
            await ended(swarm)
            oracles.settle()
            assert oracles.same(swarm, "abc") and {at(swarm, name) for name in "abc"} == {4}
            with pytest.raises(RefusedError, match="does not go on"):
                await swarm.running[swarm.leader].order(SetPhase(Phase.RUNNING))

    run_held(body())


def test_a_drain_waits_for_no_partner_that_rests_already(tmp_path: Path) -> None:
    """b has no round open, so a, which is to swap with it, goes alone at once, and not at the deadline."""

    async def body() -> None:
        oracles = Oracles("ab")
        async with gossips(tmp_path, "ab", train="a") as swarm:
            own = oracles.round("ab", 0)["a"]
            alone = Oracles("a")
            alone.round("a", 0)
            async with swarm.peer("b", "b") as peer:
                await peer.attend()  # and is not ready
                gossip = swarm.running["a"].gossip
                assert gossip is not None and gossip.engine is not None
                await swarm.until(lambda: gossip.engine is not None and gossip.engine.run.rounds.machine.round_id)
                await drain(swarm)
                await contribute(swarm, "a", own)
                await swarm.until(lambda: gossip._last is not None, passes=0.1)
                assert gossip._last is not None and gossip._last.reason == "alone: b: b takes no swaps now"
                await ended(swarm)
                mean = [(x + y) / 2 for x, y in zip((one.phi["a"] for one in alone.each), theta(0, SCHEMA), strict=True)]
                assert all(torch.allclose(part, wanted) for part, wanted in zip(phi(swarm, "a"), mean, strict=True))

    run_held(body())


async def never(*_: object) -> None:
    """Compute nothing, for as long as anybody waits."""
    await asyncio.Event().wait()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("killed", ["owner", "another"])
def test_a_member_that_is_killed_in_a_drain_ends_with_the_model_of_all(tmp_path: Path, killed: str) -> None:
    """The owner once all rest, before it has proposed the settling; another before its round has ended."""

    async def body() -> None:
        oracles = Oracles("abc")
        async with gossips(tmp_path, "abc") as swarm:
            for name, deltas in oracles.round("abc", 0).items():
                await contribute(swarm, name, deltas)
            await all_at(swarm, 1)
            owner = swarm.record.parts[0].owner
            away = owner if killed == "owner" else next(name for name in "abc" if name != owner)
            last = oracles.round("abc", 1)
            await all_open(swarm)
            await drain(swarm)
            if killed == "owner":
                gossip = swarm.running[away].gossip
                assert gossip is not None
                gossip._do = never  # type: ignore[assignment]  # it computes no settling
            for name in "abc":
                if (name, killed) != (away, "another"):
                    await contribute(swarm, name, last[name])
            if killed == "owner":
                await swarm.until(lambda: all(h.gossip and h.gossip._rests for h in swarm.running.values()), passes=1.0)
            await swarm.stop(away)
            await swarm.until(lambda: swarm.record.phase is Phase.FINISHED, passes=1.0)
            await swarm.start(away)
            await ended(swarm)

    run_held(body())


def test_a_drain_before_anybody_trains_ends_with_the_first_parameters(tmp_path: Path) -> None:
    async def body() -> None:
        async with gossips(tmp_path, "ab", train="") as swarm:
            await drain(swarm)
            await ended(swarm)
            assert {at(swarm, name) for name in "ab"} == {0}
            assert all(map(torch.equal, phi(swarm, "a"), theta(0, SCHEMA)))

    run_held(body())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("lie", "why"),
    [
        ("NaN", "outer parameters that are not finite"),
        ("too far", "outer parameters that are too far from the last that were common to all"),
        ("another size", "outer parameters that do not fit the model"),
        ("another outer step", "outer parameters of outer step 7"),
    ],
)
def test_a_member_that_lies_where_all_settle_is_left_out_and_named_and_ends_with_the_others_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lie: str, why: str
) -> None:
    async def body() -> None:
        async with gossips(tmp_path, "ab", outer_steps=2, penalty=True) as swarm:
            gossip, own = swarm.running["b"].gossip, list[Tensor]()
            assert gossip is not None
            snapshot = gossip.snapshot

            def lying(settling: int) -> PartSnapshot:
                found = snapshot(settling)
                own[:] = phi(swarm, "a")  # who asks is there
                first = found.tensors["theta.0"]
                changed = {"NaN": first * math.nan, "too far": first + 1000.0, "another size": first[1:]}.get(lie, first)
                at_step = {"outer_step": 7} if lie == "another outer step" else {}
                return replace(found, tensors={**found.tensors, "theta.0": changed}, metadata={**found.metadata, **at_step})

            monkeypatch.setattr(gossip, "snapshot", lying)
            for name in "ab":
                await contribute(swarm, name, drawn(name, 0))
            await all_at(swarm, 2)
            await swarm.until(lambda: swarm.record.phase.value == "finished", passes=1.0)
            assert f"settling 1 without b: b: {why}" in caplog.text
            settled = [began - (began - here) for began, here in zip(theta(0, SCHEMA), own, strict=True)]
            assert all(map(torch.equal, phi(swarm, "a"), settled)) and all(map(torch.equal, phi(swarm, "b"), settled))
            assert swarm.same()

    run_held(body())


def settled_of(swarm: Hosts, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whose outer parameters the owner of part 0 settles on, once it has."""
    gossip, found = swarm.running[swarm.record.parts[0].owner].gossip, list[str]()
    assert gossip is not None
    merged = gossip._merged

    def noted(grant: int, number: int, theta: Mapping[str, list[Tensor]], drains: bool) -> Any:
        found[:] = sorted(theta)
        return merged(grant, number, theta, drains)

    monkeypatch.setattr(gossip, "_merged", noted)
    return found


def test_where_the_owner_does_not_train_one_that_lies_neither_ends_the_run_for_the_others_nor_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with gossips(tmp_path, "abcd", outer_steps=3, penalty=True, train="bcd") as swarm:
            assert swarm.record.parts[0].owner == "a"
            settled, gossip = settled_of(swarm, monkeypatch), swarm.running["c"].gossip
            assert gossip is not None

            def lying(settling: int) -> PartSnapshot:
                far = {f"theta.{i}": part + 1000.0 for i, part in enumerate(phi(swarm, "c"))}
                return PartSnapshot("0" * 64, 0, SCHEMA.to_json(), far, {"outer_step": 2, "settlings": 0})

            monkeypatch.setattr(gossip, "snapshot", lying)
            for outer_step in range(2):
                for name in "bcd":
                    await contribute(swarm, name, drawn(name, outer_step))
                await swarm.until(lambda at_least=outer_step + 1: all(at(swarm, name) >= at_least for name in "bd"), passes=1.0)
                if outer_step == 0:
                    await swarm.pass_time(25.0)  # the deadline is 20 s
                    assert {at(swarm, name) for name in "bd"} == {1} and not settled
            await swarm.until(lambda: swarm.record.phase is Phase.FINISHED, passes=1.0)
            assert settled == ["b", "d"]
            assert "settling 1 without c: outer parameters that are too far" in caplog.text

    run_held(body())


def test_a_member_that_sends_nothing_where_all_settle_is_waited_for_until_the_deadline_and_holds_up_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "STALL_S", 1000.0)

    async def body() -> None:
        async with gossips(tmp_path, "abc", outer_steps=2) as swarm:
            settled, silent, late = settled_of(swarm, monkeypatch), swarm.running["b"].gossip, swarm.running["c"].gossip
            assert silent is not None and late is not None
            snapshot, there, asked = late.snapshot, asyncio.Event(), asyncio.Event()
            owner = swarm.running["a"].gossip
            assert owner is not None and swarm.record.parts[0].owner == "a"
            own = owner.snapshot

            def after_b(settling: int) -> PartSnapshot:
                if at(swarm, "b") < 1:
                    raise BusyError("the deadline begins when the owner is there, and b's swap may take long here")
                return own(settling)

            monkeypatch.setattr(owner, "snapshot", after_b)

            async def phi_of_b(settling: int, chunk_bytes: int) -> AsyncIterator[Any]:
                asked.set()
                await never()
                yield

            def not_yet(settling: int) -> PartSnapshot:
                if there.is_set():
                    return snapshot(settling)
                raise BusyError("c is not there yet")

            monkeypatch.setattr(silent, "phi", phi_of_b)
            monkeypatch.setattr(late, "snapshot", not_yet)
            for name in "abc":
                await contribute(swarm, name, drawn(name, 0))
            await swarm.until(asked.is_set, passes=0.2)
            await swarm.pass_time(5.0)
            assert not settled
            there.set()
            await swarm.until(lambda: settled, passes=2.0)
            assert settled == ["a", "c"]
            await all_at(swarm, 2)

    run_held(body())


@pytest.mark.parametrize("in_files", [False, True])
def test_what_does_not_fit_into_the_memory_for_it_where_all_settle_lies_in_files_until_it_is_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_files: bool
) -> None:
    async def body() -> None:
        async with gossips(tmp_path, "abc", outer_steps=2, buffer_bytes=0 if in_files else 1 << 20) as swarm:
            gossip, files = swarm.running[swarm.record.parts[0].owner].gossip, list[int]()
            assert gossip is not None
            merged, folder = gossip._merged, gossip._folder.settling

            def noted(grant: int, number: int, theta: Mapping[str, list[Tensor]], drains: bool) -> Any:
                files[:] = sorted(file.stat().st_size for file in folder.iterdir())
                return merged(grant, number, theta, drains)

            monkeypatch.setattr(gossip, "_merged", noted)
            for name in "abc":
                await contribute(swarm, name, drawn(name, 0))
            await swarm.until(lambda: {at(swarm, name) for name in "abc"} == {1}, passes=1.0)
            own = [[part.clone() for part in phi(swarm, name)] for name in "abc"]
            await all_at(swarm, 2)
            of_both = sorted([4 * size for size in SIZES] * 2)
            assert [size for size in files if size in of_both] == (of_both if in_files else [])
            mean = [
                began - sum(began - each for each in parts) / 3 for began, *parts in zip(theta(0, SCHEMA), *own, strict=True)
            ]
            for name in "abc":
                assert all(map(partial(torch.allclose, atol=1e-6), phi(swarm, name), mean))
            await swarm.stop("a")
            assert not [*folder.iterdir()]

    run_held(body())


def test_a_full_disk_ends_the_host_of_the_owner_that_settles_and_leaves_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(member, "UploadBuffer", partial(UploadBuffer, write=full))

    async def body() -> None:
        async with gossips(tmp_path, "abc", outer_steps=2, buffer_bytes=0) as swarm:
            owner = swarm.running[swarm.record.parts[0].owner]
            settled = settled_of(swarm, monkeypatch)
            for name in "abc":
                await contribute(swarm, name, drawn(name, 0))
            with pytest.raises(AssertionError, match=r"settling.*No space left on device"):
                await swarm.until(lambda: settled, passes=1.0)
            assert isinstance(owner.failure, StorageError)

    run_held(body())


def test_what_a_member_that_was_killed_while_it_settled_has_left_is_removed_when_it_starts(tmp_path: Path) -> None:
    async def body() -> None:
        async with gossips(tmp_path, "abc", outer_steps=2) as swarm:
            other = next(name for name in "abc" if name != swarm.record.parts[0].owner)
            folder = swarm.running[other].gossip._folder.settling
            await swarm.stop(other)
            folder.mkdir(exist_ok=True)
            (folder / "upload-1-00000001.part").write_bytes(b"x" * 1000)
            await swarm.start(other)
            assert not list(folder.iterdir())

    run_held(body())


def test_members_that_read_all_that_others_may_read_at_a_time_keep_no_settling_from_coming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        async with gossips(tmp_path, "abc", outer_steps=2) as swarm, AsyncExitStack() as places:
            settled = settled_of(swarm, monkeypatch)
            for reader in ("x", "y"):
                await places.enter_async_context(swarm.running["b"]._states.place(reader))
            for name in "abc":
                await contribute(swarm, name, drawn(name, 0))
            await all_at(swarm, 2)
            assert settled == ["a", "b", "c"]

    run_held(body())


def test_a_member_that_comes_back_begins_where_the_others_are_once_it_has_links_to_them(tmp_path: Path) -> None:
    async def body() -> None:
        async with gossips(tmp_path, "abc") as swarm:
            await swarm.stop("b")
            for outer_step in range(4):
                for name in "ac":
                    await contribute(swarm, name, drawn(name, outer_step))
                await swarm.until(lambda wanted=outer_step + 1: {at(swarm, name) for name in "ac"} == {wanted}, passes=5.0)
            await swarm.start("b")
            await swarm.until(lambda: swarm.running["b"].gossip.engine is not None, passes=1.0)
            assert at(swarm, "b") == 4

    run_held(body())


def test_a_host_without_a_peer_that_begins_where_others_are_does_not_count_as_training(tmp_path: Path) -> None:
    """Else each swap drawn with it, and each settling, would wait for it until the deadline."""

    async def body() -> None:
        async with gossips(tmp_path, "abc", train="ac") as swarm:
            await swarm.stop("b")
            for outer_step in range(4):
                for name in "ac":
                    await contribute(swarm, name, drawn(name, outer_step))
                await swarm.until(lambda wanted=outer_step + 1: {at(swarm, name) for name in "ac"} == {wanted}, passes=5.0)
            for name in "bba":  # twice: the second time it is on b's disk
                if name in swarm.running:
                    await swarm.stop(name)
                await swarm.start(name)
                await swarm.until(lambda name=name: swarm.running[name].gossip.engine is not None, passes=1.0)
                assert at(swarm, name) == 4 and swarm.running[name].gossip._taken() == (4 if name == "a" else None)

    run_held(body())


def lies_ahead(
    swarm: Hosts, monkeypatch: pytest.MonkeyPatch, name: str, standing_at: int, settlings: int, sent_at: int = 0
) -> list[int]:
    """Let a member say that it is at an outer step; return for which settlings its outer parameters are asked."""
    gossip, asked = swarm.running[name].gossip, list[int]()
    assert gossip is not None
    standing, snapshot = gossip.standing, gossip.snapshot

    def lying(settling: int) -> PartSnapshot:
        asked.append(settling)
        if settling:
            return snapshot(settling)
        metadata = {"outer_step": sent_at or standing_at, "settlings": settlings}
        far = {f"theta.{i}": part + 1000.0 for i, part in enumerate(phi(swarm, name))}
        return PartSnapshot("0" * 64, 0, SCHEMA.to_json(), far, metadata)

    def ahead() -> GossipStanding | None:
        found = standing()
        return found and replace(found, outer_step=standing_at, settlings=settlings)

    monkeypatch.setattr(gossip, "standing", ahead)
    monkeypatch.setattr(gossip, "snapshot", lying)
    return asked


def test_one_that_lies_about_how_far_it_is_moves_no_member_that_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        async with gossips(tmp_path, "abc", penalty=True) as swarm:
            asked = lies_ahead(swarm, monkeypatch, "c", 48, 0)
            await swarm.stop("a")
            began = stopped(swarm, "a")
            recovered = GossipMember._recovered

            async def once_linked(self: GossipMember, store: PhiStore) -> Phi:
                await swarm.until(lambda: {"b", "c"} <= self._links().connected, passes=1.0)
                return await recovered(self, store)

            monkeypatch.setattr(GossipMember, "_recovered", once_linked)
            await swarm.start("a")
            await swarm.until(lambda: swarm.running["a"].gossip.engine is not None, passes=1.0)
            assert at(swarm, "a") == 0 and all(map(torch.equal, phi(swarm, "a"), began)) and 0 not in asked

    run_held(body())


def test_one_that_sends_what_is_ahead_of_most_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """b says that it is where most are, and sends the outer parameters of a later step; c has those of its step."""

    async def body() -> None:
        async with gossips(tmp_path, "abc") as swarm:
            lies_ahead(swarm, monkeypatch, "b", 5, 0, sent_at=48)
            lies_ahead(swarm, monkeypatch, "c", 6, 0)
            await swarm.stop("a")
            await swarm.start("a")
            await swarm.until(lambda: swarm.running["a"].gossip.engine is not None, passes=1.0)
            assert "b sends outer parameters of outer step 48; most are at 5" in caplog.text
            assert at(swarm, "a") == 6

    run_held(body())


def test_after_a_settling_nobody_follows_one_that_says_to_be_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with gossips(tmp_path, "ab", settle_every=1, penalty=True) as swarm:
            asked = lies_ahead(swarm, monkeypatch, "b", 14, 1)
            for name in "ab":
                await contribute(swarm, name, drawn(name, 0))
            a = swarm.running["a"].gossip
            assert a is not None
            await swarm.until(lambda: a._phi is not None and a._phi.settlings == 1 and a.engine is not None, passes=1.0)
            assert at(swarm, "a") == 2 and 0 not in asked
            assert all(map(torch.equal, phi(swarm, "a"), swarm.running["a"].parts[0].replica.outer.theta))

    run_held(body())


@pytest.mark.parametrize(("every", "outer_steps", "settled"), [(0, 5, [5]), (3, 7, [4, 7]), (3, 8, [4, 8]), (1, 3, [2, 3])])
def test_the_last_outer_step_is_a_settling(every: int, outer_steps: int, settled: list[int]) -> None:
    calendar = Calendar(every, outer_steps)
    assert [step + 1 for step in range(outer_steps + 5) if calendar.settles(step)] == settled
    assert [calendar.settled(number) for number in range(len(settled) + 1)] == [0, *settled]
    assert calendar.settlings == len(settled)
