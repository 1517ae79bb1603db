"""Members that compute the updates of an owner themselves (swarm.verify), and owners that lie."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from torch import Tensor

from aggregator.data.contributions import ShardUpload
from aggregator.data.round_runner import Source
from aggregator.security.certificates import key_pem, new_key
from aggregator.swarm import host as host_module
from aggregator.swarm import transfers
from aggregator.swarm.enrolments import Enrolments
from aggregator.swarm.host import Host
from aggregator.swarm.offers import Offer
from aggregator.swarm.transfers import STALL_S, fetch_contributions
from edit.codecs.residuals import Residual
from edit.config.run import RunConfig
from edit.council import events as ev
from edit.council.record import Record, Update
from edit.errors import GoneError, RefusedError, RemoteProtocolError, StorageError, TransportError
from edit.merging.merge import Measured, measure
from edit.merging.outer_state import OuterState
from edit.rounds import events
from edit.rounds.work_claims import Work
from editpb import council_pb2 as pb
from editpb.messages import ContributionHeader
from editpb.signed_contributions import ContributionSigner
from editpb.transport.chunk_frames import council_stub
from editpb.transport.status import from_rpc
from tests.support.council.hosts import SIZES, Hosts, hosts, schema_of
from tests.support.encoded import encode
from tests.support.exhaustive import rarely
from tests.support.loops import pass_time, run_held
from tests.support.served import TOML, small_chunks, theta

PEERS = ("p", "q")


def config(
    verify: int,
    start: int = 2,
    milestones: Sequence[Sequence[int]] = (),
    robust: dict[str, Any] | None = None,
    **codec: str,
) -> RunConfig:
    values: dict[str, Any] = tomllib.loads(TOML.format(start=start, quorum=start))
    del values["server"]
    values["outer"] = {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.9}
    values["codec"] |= codec
    values["sync"]["milestones"] = list(milestones)
    values["robust"] = robust or {}
    return RunConfig.from_mapping({**values, "swarm": {"parts": 1, "verify": verify}})


def deltas(step: int, peer_id: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + ord(peer_id))
    return [torch.randn(size, generator=generator) for size in SIZES]


async def contribute(swarm: Hosts, step: int) -> None:
    """Both peers, to the round of the present owner."""
    await swarm.until(lambda: swarm.owner() is not None)
    rounds = swarm.owner().parts[0].engine.run.rounds
    for peer_id in PEERS:
        rounds.feed(events.MemberReady(peer_id, rounds.outer.outer_step, 0.0))
    await swarm.until(lambda: rounds.machine.round_id)
    for peer_id in PEERS:
        await swarm.contribute(0, deltas(step, peer_id), peer_id)


async def grown(swarm: Hosts, verify: int, members: str = "abc") -> None:
    await swarm.grow(*members)
    await swarm.enrol(*PEERS)
    await swarm.until(lambda: len(swarm.record.parts[0].verifiers) == min(verify, len(members) - 1), passes=1.0)


async def take_step(swarm: Hosts, step: int) -> None:
    await contribute(swarm, step)
    await swarm.until(lambda: swarm.steps() == dict.fromkeys(swarm.running, step))
    assert len(swarm.taken[0, step]) == 1 and swarm.same()


def digests(path: Path, verify: int, **codec: Any) -> list[set[str]]:
    found: list[set[str]] = []

    async def body() -> None:
        async with hosts(path, config=config(verify, **codec)) as swarm:
            await grown(swarm, verify)
            for step in (1, 2, 3, 4):
                await take_step(swarm, step)
                found.append(swarm.taken[0, step])
            assert not [text for host in swarm.running.values() for _, text in host._notices if "believed" in text]

    run_held(body())
    return found


@pytest.mark.parametrize(
    "codec",
    rarely([{}, {"down": "int8"}, {"robust": {"trust": "anchors", "anchors": ["p"]}}], kept=[{"down": "int8"}]),
    ids=["fp32", "int8", "anchors"],
)
def test_what_is_verified_has_the_same_bits_as_what_is_not(tmp_path: Path, codec: dict[str, Any]) -> None:
    expected, *others = (digests(tmp_path / str(verify), verify, **codec) for verify in (0, 1, 2))
    assert all(other == expected for other in others)


@pytest.mark.parametrize("milestones", [[[1, 6], [3, 1]]])
def test_so_has_what_is_verified_where_h_changes(tmp_path: Path, milestones: list[list[int]]) -> None:
    """Both peers claim 2 inner steps at each outer step, which count as 6 while nobody can contribute earlier."""
    expected, verified = (digests(tmp_path / str(verify), verify, milestones=milestones) for verify in (0, 2))
    assert verified == expected


# -- owners that lie -------------------------------------------------------------------------------------------------------


class Liar:
    """The owner of part 0 as it merges what comes next.

    merges: returns what it merges, of what it has. reports: returns what it shows to those who verify.
    """

    def __init__(
        self,
        host: Host,
        *,
        merges: Callable[[OuterState, list[Measured]], list[Measured]] = lambda outer, measured: measured,
        scales: float = 1.0,
        shows: Callable[[tuple[Source, ...]], tuple[Source, ...]] = lambda sources: sources,
    ) -> None:
        part = host.parts[0]
        assert part.engine is not None
        rounds = part.engine.run.rounds

        def merge(effect: events.Reduce, measured: list[Measured], injection: None) -> Any:
            outer = rounds.outer
            merged = outer.reduce(effect.fragment_id, merges(outer, measured))
            if scales != 1.0:
                merged = replace(merged, merged=merged.merged * scales)
            record = outer.record(merged)
            return record, rounds._store.begin_fragment(effect.round_id, record, injection)

        async def propose(*arguments: Any) -> None:
            await type(host)._propose(host, *arguments)
            part.sources = shows(part.sources)

        rounds._merge = merge  # type: ignore[method-assign]
        host._propose = propose  # type: ignore[method-assign]


def scaled(host: Host, earlier: tuple[Source, ...]) -> Liar:
    return Liar(host, scales=1.5)


def other_bytes(host: Host, earlier: tuple[Source, ...]) -> Liar:
    """Of one contribution, before it is merged: and it shows what it merged."""

    def merges(outer: OuterState, measured: list[Measured]) -> list[Measured]:
        (q,) = [one for one in measured if one.peer_id == "q"]
        encoded = q.payload()  # type: ignore[operator]
        encoded.data[0] ^= 1
        return measured

    return Liar(host, merges=merges)


def leaves_one_out_and_shows_both(host: Host, earlier: tuple[Source, ...]) -> Liar:
    return Liar(host, merges=lambda outer, measured: [one for one in measured if one.peer_id == "p"])


def leaves_one_out(host: Host, earlier: tuple[Source, ...]) -> Liar:
    return Liar(
        host,
        merges=lambda outer, measured: [one for one in measured if one.peer_id == "p"],
        shows=lambda sources: tuple(each for each in sources if each.shard.header.peer_id == "p"),
    )


def has_left_out_something_else(host: Host, earlier: tuple[Source, ...]) -> Liar:
    """What its codec left out before is in the update, or what it says it was."""

    def merges(outer: OuterState, measured: list[Measured]) -> list[Measured]:
        for spec, fragment in zip(outer.schema.fragments, outer._fragments, strict=True):
            fragment.unrecorded = Residual(spec.numel, outer.residual_form)
            fragment.unrecorded.write(slice(0, spec.numel), torch.full((spec.numel,), 0.5))
        return measured

    return Liar(host, merges=merges)


def counts_less(host: Host, earlier: tuple[Source, ...]) -> Liar:
    return Liar(host, shows=lambda sources: tuple(replace(each, work=Work(2, 1)) for each in sources))


def shows_an_earlier_one(host: Host, earlier: tuple[Source, ...]) -> Liar:
    def shows(sources: tuple[Source, ...]) -> tuple[Source, ...]:
        (first, *others), (before, *_) = sources, earlier
        return (replace(first, shard=ShardUpload(before.shard.header, first.shard.shard, first.shard.upload)), *others)

    return Liar(host, shows=shows)


def shows_nothing(host: Host, earlier: tuple[Source, ...]) -> Liar:
    return Liar(host, shows=lambda sources: ())


def forged(host: Host, earlier: tuple[Source, ...], **changed: Any) -> Liar:
    def shows(sources: tuple[Source, ...]) -> tuple[Source, ...]:
        first, *others = sources
        shard = ShardUpload(replace(first.shard.header, **changed), first.shard.shard, first.shard.upload)
        return (replace(first, shard=shard), *others)

    return Liar(host, shows=shows)


def signed_by_another(host: Host, earlier: tuple[Source, ...]) -> Liar:
    def shows(sources: tuple[Source, ...]) -> tuple[Source, ...]:
        signer = ContributionSigner(key_pem(new_key()), host._config)
        first, *others = sources
        header = signer(first.shard.header, first.shard.upload.payload())
        return (replace(first, shard=ShardUpload(header, first.shard.shard, first.shard.upload)), *others)

    return Liar(host, shows=shows)


LIES: list[tuple[Callable[..., Liar], str]] = [
    (scaled, "is not what its contributions merge to: fragment 0: other bytes"),
    (other_bytes, "fragment 0, rank 0: the bytes are not those that it signed"),
    (leaves_one_out_and_shows_both, "is not what its contributions merge to: "),
    (leaves_one_out, "fragment 0: 1 contributions, the quorum is 2"),
    (counts_less, "contribution of p to fragment 0: 10 tokens count as 1"),
    (shows_an_earlier_one, "contribution of p to fragment 0 is not to outer step 2 of this part"),
    (shows_nothing, "fragment 0: 0 contributions, the quorum is 2"),
    (partial(forged, tokens=11), "fragment 0, rank 0: the signature is not of what the header says"),
    (partial(forged, payload_blake3=b"", public_key=b"", signature=b""), "fragment 0, rank 0 is not signed"),
    (signed_by_another, "contribution of p to fragment 0 is signed with a key that p is not enrolled for"),
]
NAMES = [getattr(lie, "__name__", f"forged {getattr(lie, 'keywords', '')}") for lie, _ in LIES]


def honest(settings: RunConfig, steps: int, anew: int) -> str:
    """The digest after so many steps. anew: the step before which another owner begins."""
    outer = OuterState(schema_of(0), settings, theta(0, schema_of(0)))
    for step in range(1, steps + 1):
        if step == anew:
            outer.forget_unrecorded()
        records = []
        for i in range(len(SIZES)):
            encoded = [(peer_id, encode("fp32", deltas(step, peer_id)[i])) for peer_id in PEERS]
            measured = [
                Measured(peer_id=peer_id, inner_steps=2, tokens=10, norm=measure(each), payload=each)
                for peer_id, each in encoded
            ]
            records.append(outer.record(outer.reduce(i, measured)))
        outer.commit(step, "", records)
    return outer.digest


def is_found_out(tmp_path: Path, lie: Callable[..., Liar], why: str, passes: float = 0.0, **codec: str) -> None:
    settings = config(1, **codec)

    async def body() -> None:
        async with hosts(tmp_path, config=settings) as swarm:
            await grown(swarm, 1)
            await swarm.until(lambda: swarm.owner() is not None)
            owner = swarm.record.parts[0].owner
            liar, earlier = swarm.running[owner], list[Source]()
            Liar(liar, shows=lambda sources: tuple(earlier.extend(sources) or sources))
            await contribute(swarm, 1)
            await swarm.until(lambda: swarm.steps() == dict.fromkeys("abc", 1))
            (verifier,) = swarm.record.parts[0].verifiers
            lie(liar, tuple(earlier))
            await contribute(swarm, 2)
            await swarm.until(lambda: swarm.record.parts[0].owner != owner, passes=passes)
            assert swarm.record.parts[0].outer_step == 1 and swarm.steps() == dict.fromkeys("abc", 1)
            said = [text for _, text in swarm.running[swarm.leader]._notices]
            found = [text for text in said if f"part 0, owned by {owner}: {verifier} says: {owner} is not believed: " in text]
            assert found and why in found[0], said
            await take_step(swarm, 2)
            assert swarm.taken[0, 2] == {honest(settings, 2, anew=2)}

    run_held(body())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("lie", "why"), LIES, ids=NAMES)
def test_an_owner_that_lies_is_named_and_left_and_the_honest_update_counts(
    tmp_path: Path, lie: Callable[..., Liar], why: str
) -> None:
    is_found_out(tmp_path, lie, why, passes=1.0 if "not enrolled for" in why else 0.0)  # that is looked at again and again


def test_an_owner_that_lies_about_what_it_left_out_is_found_out(tmp_path: Path) -> None:
    why = "is not what its contributions merge to: fragment 0: other bytes"
    is_found_out(tmp_path, has_left_out_something_else, why, record="int8")


def test_an_owner_whose_update_nobody_can_hold_is_left_though_nobody_verifies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds its update, and sends everybody other bytes, again and again."""

    async def body() -> None:
        async with hosts(tmp_path, config=config(0)) as swarm:
            await grown(swarm, 0)
            await swarm.until(lambda: swarm.owner() is not None)
            owner, grant = swarm.record.parts[0].owner, swarm.record.parts[0].grant
            sent = host_module.offer_parts

            def lie(offer: Offer, chunk_bytes: int) -> Any:
                first, *others = offer.bodies
                changed = bytes([first[0] ^ 1, *first[1:]])
                lies = offer.update.grant == grant
                return sent(replace(offer, bodies=(changed, *others)) if lies else offer, chunk_bytes)

            monkeypatch.setattr(host_module, "offer_parts", lie)
            await contribute(swarm, 1)
            await swarm.until(lambda: swarm.record.parts[0].owner != owner)
            assert set(swarm.record.disputes[owner]) == set("abc") - {owner}
            said = [text for _, text in swarm.running[swarm.leader]._notices]
            assert any(f"part 0, owned by {owner}: " in text and "are not those of its id" in text for text in said), said
            await take_step(swarm, 1)
            assert swarm.taken[0, 1] == {honest(config(0), 1, anew=1)}

    run_held(body())


def test_what_an_observer_signs_is_no_contribution(tmp_path: Path) -> None:
    """Its key is enrolled, too; an owner that merges what it sends is found out, after the outer step that was on its way."""

    async def body() -> None:
        async with hosts(tmp_path, config=config(1)) as swarm:
            await grown(swarm, 1)
            await swarm.until(lambda: swarm.owner() is not None)
            leader, owner = swarm.running[swarm.leader], swarm.record.parts[0].owner
            leader.tell(ev.Claim("q", replace(swarm.record.enrolled["q"], invitation="2" * 32, observer=True)))
            await swarm.until(lambda: all(host.council.committed.enrolled["q"].observer for host in swarm.running.values()))
            await take_step(swarm, 1)
            await contribute(swarm, 2)
            await swarm.until(lambda: swarm.record.parts[0].owner != owner, passes=1.0)
            said = [text for _, text in leader._notices]
            assert any("is signed with a key that q is not enrolled for" in text for text in said), said

    run_held(body())


async def take_first_step_without_blame(swarm: Hosts) -> None:
    """Take outer step 1 with one verifier; the owner is not disputed, and keeps the part."""
    await grown(swarm, 1)
    await swarm.until(lambda: swarm.owner() is not None)
    part = swarm.record.parts[0]
    await contribute(swarm, 1)
    await swarm.until(lambda: swarm.steps() == dict.fromkeys("abc", 1), passes=1.0)
    assert swarm.taken[0, 1] == {honest(config(1), 1, anew=1)}
    assert (swarm.record.parts[0].owner, swarm.record.parts[0].grant) == (part.owner, part.grant)
    assert not swarm.record.disputes


def test_an_owner_that_knows_of_an_enrolment_before_the_verifier_does_is_not_disputed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update waits for the verifier, which asks again."""
    known, asked = Enrolments.counts, list[Update]()

    def late(self: Enrolments, peer_id: str, key: bytes, update: Update) -> bool:
        if len(asked) < host_module.VERIFY_TRIES - 1:
            asked.append(update)
            return False
        return known(self, peer_id, key, update)

    monkeypatch.setattr(Enrolments, "counts", late)

    async def body() -> None:
        async with hosts(tmp_path, config=config(1)) as swarm:
            await take_first_step_without_blame(swarm)
            assert len(asked) == host_module.VERIFY_TRIES - 1
            assert not any("is not believed" in text for host in swarm.running.values() for _, text in host._notices)

    run_held(body())


def test_a_verifier_whose_own_disk_fails_does_not_dispute_the_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    merge_again, failed = host_module.Host._merged_again, list[str]()

    async def refused(self: Host, part: Any, *rest: Any) -> Any:
        if len(failed) <= host_module.VERIFY_TRIES:
            failed.append(self.peer_id)
            raise StorageError("no space left")
        return await merge_again(self, part, *rest)

    monkeypatch.setattr(Host, "_merged_again", refused)

    async def body() -> None:
        async with hosts(tmp_path, config=config(1)) as swarm:
            await take_first_step_without_blame(swarm)
            assert len(failed) == host_module.VERIFY_TRIES + 1

    run_held(body())


@pytest.mark.parametrize("change", ["claim", "evict"])
def test_who_is_enrolled_again_or_evicted_while_its_contribution_is_verified_puts_no_blame_on_the_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """The round was merging when its owner heard of it."""
    fetch, gate = host_module.fetch_offer, asyncio.Event()

    async def slow(*arguments: Any) -> Offer:
        await gate.wait()
        return await fetch(*arguments)

    monkeypatch.setattr(host_module, "fetch_offer", slow)

    async def body() -> None:
        async with hosts(tmp_path, config=config(1)) as swarm:
            await grown(swarm, 1)
            await swarm.until(lambda: swarm.owner() is not None)
            part, leader = swarm.record.parts[0], swarm.running[swarm.leader]
            await contribute(swarm, 1)
            await swarm.until(lambda: swarm.running[part.owner].council.states[0].held is not None)
            again = replace(swarm.record.enrolled["q"], invitation="2" * 32, key="0" * 64)
            leader.tell(ev.Claim("q", again) if change == "claim" else ev.Evict("q", "an order"))
            records = [host.council for host in swarm.running.values()]
            await swarm.until(lambda: all(_has_changed(each.committed) for each in records))
            gate.set()
            await swarm.until(lambda: swarm.record.parts[0].outer_step == 1)
            assert (swarm.record.parts[0].owner, swarm.record.parts[0].grant) == (part.owner, part.grant)
            assert not swarm.record.disputes

    run_held(body())


def test_what_was_found_wrong_by_keys_of_before_is_judged_again_and_puts_no_blame_on_the_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, fetch, gate, judged = Enrolments.counts, host_module.fetch_contributions, asyncio.Event(), list[bool]()
    begun = asyncio.Event()

    async def slow(*arguments: Any) -> None:
        begun.set()
        await gate.wait()
        await fetch(*arguments)

    def counts(self: Enrolments, peer_id: str, key: bytes, update: Update) -> bool:
        judged.append(_has_changed(self.record))
        return known(self, peer_id, key, update) and judged[-1]

    monkeypatch.setattr(host_module, "fetch_contributions", slow)
    monkeypatch.setattr(host_module, "VERIFY_TRIES", 1)
    monkeypatch.setattr(Enrolments, "counts", counts)

    async def body() -> None:
        async with hosts(tmp_path, config=config(1)) as swarm:
            await grown(swarm, 1)
            await swarm.until(lambda: swarm.owner() is not None)
            part, leader = swarm.record.parts[0], swarm.running[swarm.leader]
            await contribute(swarm, 1)
            await swarm.until(begun.is_set)  # so it judges by the keys of before
            leader.tell(ev.Claim("q", replace(swarm.record.enrolled["q"], invitation="2" * 32, key="0" * 64)))
            await swarm.until(lambda: all(_has_changed(host.council.committed) for host in swarm.running.values()))
            gate.set()
            await swarm.until(lambda: swarm.record.parts[0].outer_step == 1, passes=1.0)
            assert judged[0] is False and judged[-1] is True
            assert (swarm.record.parts[0].owner, swarm.record.parts[0].grant) == (part.owner, part.grant)
            assert not swarm.record.disputes

    run_held(body())


def _has_changed(record: Record | None) -> bool:
    return record is not None and ("q" in record.evicted or record.enrolled["q"].key == "0" * 64)


def test_what_was_merged_is_shown_to_nobody_but_those_who_verify_it(tmp_path: Path) -> None:
    async def body() -> None:
        async with hosts(tmp_path, config=config(1)) as swarm:
            await grown(swarm, 1)
            part = swarm.record.parts[0]
            (other,) = {*"abc"} - {part.owner, *part.verifiers}
            for reader, kind in ((other, RefusedError), (*part.verifiers, GoneError)):
                async with swarm.channel(part.owner, reader, own=True) as channel:
                    call = council_stub(channel).FetchContributions(
                        pb.OfferRequest(outer_step=1, id=bytes(32)), metadata=(("edit-part", "0"),)
                    )
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await call.read()
                    assert type(from_rpc(caught.value)) is kind

    run_held(body())


def test_a_source_that_trickles_is_not_waited_for_longer_than_its_bytes_take() -> None:
    sent = iter([pb.ContributionsPart(header=pb.MergedContribution()) for _ in range(3)])

    class Call:
        cancelled = False

        async def read(self) -> Any:
            pass_time(0.9 * STALL_S)
            await asyncio.sleep(0)
            return next(sent)

        def cancel(self) -> None:
            self.cancelled = True

    class Stub:
        call = Call()

        def FetchContributions(self, request: Any, metadata: Any) -> Call:
            return self.call

    class Taken:
        total_bytes, complete = 1, True

    async def body() -> None:
        update = Update(0, 1, 1, "1" * 64, "2" * 64, "1" * 64)
        with pytest.raises(TransportError, match="too slow"), pytest.MonkeyPatch.context() as patched:
            patched.setattr(transfers, "merged_contribution_from_pb", lambda message, schema: message)
            await fetch_contributions(Stub(), 0, update, schema_of(0), lambda _: Taken())  # type: ignore[arg-type]
        assert Stub.call.cancelled

    run_held(body())


# -- peers that lie to an owner --------------------------------------------------------------------------------------------


Forge = Callable[[ContributionHeader, ContributionSigner, memoryview], ContributionHeader]


def of_another_round(header: ContributionHeader, sign: ContributionSigner, data: memoryview) -> ContributionHeader:
    """A signature that was good in an earlier round."""
    return replace(sign(replace(header, round_id=header.round_id - 1), data), round_id=header.round_id)


def with_another_key(header: ContributionHeader, sign: ContributionSigner, data: memoryview) -> ContributionHeader:
    return ContributionSigner(key_pem(new_key()), config(1, start=1))(header, data)


FORGED: list[tuple[Forge, str]] = [
    (lambda header, sign, data: header, "is not signed, which the run asks for"),
    (lambda header, sign, data: replace(sign(header, data), tokens=11), "the signature is not of what the header says"),
    (of_another_round, "the signature is not of what the header says"),
    (with_another_key, "is signed with another key than its certificate's"),
    (lambda header, sign, data: sign(header, memoryview(bytes(len(data)))), "the bytes are not those that it signed"),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("forge", "why"), FORGED, ids=["unsigned", "changed", "replayed", "other key", "other bytes"])
def test_an_owner_takes_no_contribution_that_its_peer_has_not_signed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, forge: Forge, why: str
) -> None:
    settings = config(1, start=1)

    async def body() -> None:
        async with hosts(tmp_path, config=settings) as swarm:
            await swarm.grow("a")
            await swarm.enrol("p")
            await swarm.until(lambda: swarm.owner() is not None, passes=1.0)
            rounds = swarm.owner().parts[0].engine.run.rounds
            async with swarm.peer("a", "p", own=True) as peer:
                await peer.attend()
                await peer.report(0)
                round_id = (await peer.view(lambda view: view.round_id > 0)).round_id
                data = memoryview(bytes(encode("fp32", deltas(1, "p")[0]).data))
                sign = ContributionSigner(swarm.own("p")[0], settings)
                header = forge(peer.header(round_id, 0, 0, len(data)), sign, data)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await peer.send(header, small_chunks(bytes(data)))
                error = from_rpc(caught.value)
                assert isinstance(error, RemoteProtocolError) and "contribution of p" in str(error) and why in str(error)
                assert f"p: {error}" in caplog.messages and rounds.published.outer_step == 0 and not rounds.sources
                if "bytes" not in why:
                    assert rounds._contributions.of_peer("p") is None, "no memory was taken"

    run_held(body())
