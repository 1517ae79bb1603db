"""What a host refuses: strangers, members of other runs, those that were evicted, and members that say what is not so."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509

from aggregator.security.certificates import public_hash
from aggregator.swarm.callers import certificate_of
from aggregator.swarm.host import MOST_ORDERS, ORDER_S, STREAMS_LOOK_S, Host
from aggregator.swarm.links import STALL_S
from aggregator.swarm.standing import Standing
from edit.config.algorithm import OuterConfig
from edit.config.run import RunConfig, SwarmConfig
from edit.council import events as ev
from edit.council.record import Enrolled, Member, Phase, Stamp, Update
from edit.errors import (
    BusyError,
    EditError,
    EvictedError,
    GoneError,
    RefusedError,
    RemoteProtocolError,
    StaleError,
    TransportError,
)
from edit.trust.signatures import Signer
from editpb import control_pb2 as cpb
from editpb import control_pb2_grpc, council_pb2_grpc
from editpb import council_pb2 as pb
from editpb.council_messages import Introduction, Offering, Word, message_from_pb, message_to_pb
from editpb.identity import from_auth_context
from editpb.introductions import proven
from editpb.transport.chunk_frames import council_stub
from editpb.transport.status import from_rpc
from tests.support.council.hosts import Hosts, hosts
from tests.support.loops import pass_time, run_held
from tests.support.served import LIFETIME_S, TOML


async def refused(call: Any) -> EditError:
    """How a call ends that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if hasattr(call, "read"):
            while await call.read() is not grpc.aio.EOF:
                pass
        else:
            await call
    error = from_rpc(caught.value)
    assert "\n" not in str(error)
    return error


class Stranger:
    """One stream to a host, that says what it is told to."""

    def __init__(self, call: Any, swarm: Hosts, name: str) -> None:
        self.call, self._swarm, self.name = call, swarm, name

    async def say(self, word: Word) -> None:
        await self.call.write(message_to_pb(word))

    async def hear(self, kind: type) -> Any:
        while (message := await self.call.read()) is not grpc.aio.EOF:
            word = message_from_pb(message)
            if isinstance(word, kind):
                return word
        raise AssertionError(f"no {kind.__name__} came")

    async def heard_out(self) -> None:
        """Return when the host has taken all that was said: it answers a vote that it refuses."""
        await self.say(ev.Ask(1, Stamp(1, 0, 0), trial=True, sent=123.0))
        assert not (await self.hear(ev.Vote)).granted


@asynccontextmanager
async def stranger(swarm: Hosts, to: str, peer_id: str, incarnation: int = 7, **named: str) -> AsyncIterator[Stranger]:
    async with swarm.channel(to, peer_id, **named) as channel:
        yield Stranger(council_stub(channel).Meet(), swarm, f"{peer_id}#{incarnation}")


@asynccontextmanager
async def learner(swarm: Hosts, to: str = "a", peer_id: str = "m") -> AsyncIterator[Stranger]:
    """A member without a vote, which nobody can fetch from. a lets it in."""
    async with stranger(swarm, "a", peer_id) as joining, stranger(swarm, to, peer_id) as one:
        await joining.say(Introduction(swarm.run_id, 7))
        await joining.say(ev.Hello(Stamp(0, 0, 0), Member(incarnation=7, reachable=False)))
        await swarm.until(lambda: all(peer_id in host.council.record.members for host in swarm.running.values()))
        if to == "a":
            yield joining
            return
        await one.say(Introduction(swarm.run_id, 7))
        await one.hear(Introduction)
        yield one


def scenario(tmp_path: Path, body: Callable[[Hosts], Any], members: str = "ab") -> None:
    async def run() -> None:
        async with hosts(tmp_path) as swarm:
            await swarm.grow(*members)
            await body(swarm)
            assert all(host.failure is None for host in swarm.running.values())

    run_held(run())


@pytest.mark.parametrize(
    ("named", "reason"),
    [({"role": "observer"}, "role observer may not do this"), ({"run_id": "other"}, "the certificate is of run other")],
)
def test_who_is_not_a_peer_of_the_run_is_refused_in_one_line(tmp_path: Path, named: dict[str, str], reason: str) -> None:
    async def body(swarm: Hosts) -> None:
        async with stranger(swarm, "a", "m", **named) as one:
            error = await refused(one.call)
            assert isinstance(error, RefusedError) and reason in str(error)

    scenario(tmp_path, body, "a")


def test_who_is_no_member_gets_no_bytes(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        async with swarm.channel("a", "m") as channel:
            for call in (
                council_stub(channel).FetchState(pb.StateRequest(), metadata=(("edit-part", "0"),)),
                council_stub(channel).FetchOffer(pb.OfferRequest(id=bytes(32)), metadata=(("edit-part", "0"),)),
            ):
                error = await refused(call)
                assert isinstance(error, RefusedError) and str(error) == "m is no member of the swarm"

    scenario(tmp_path, body, "a")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("metadata", "kind"),
    [
        ((), RemoteProtocolError),
        ((("edit-part", "1"),), GoneError),
        ((("edit-part", "-1"),), RemoteProtocolError),
        ((("edit-part", "99999999999999999999"),), RemoteProtocolError),
        ((("edit-part", "0"), ("edit-part", "0")), RemoteProtocolError),
    ],
)
def test_a_call_names_one_part_that_there_is(tmp_path: Path, metadata: Any, kind: type[EditError]) -> None:
    async def body(swarm: Hosts) -> None:
        async with learner(swarm), swarm.channel("a", "m") as channel:
            assert type(await refused(council_stub(channel).FetchState(pb.StateRequest(), metadata=metadata))) is kind
            attend = channel.stream_stream("/editpb.Control/Attend")(metadata=metadata)
            assert type(await refused(attend)) is kind

    scenario(tmp_path, body, "a")


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (ev.Leave(), "begins with an introduction"),
        (Introduction("other", 7), "not another"),
        (Introduction("", 7, protocol=1), "speaks protocol 1"),
    ],
)
def test_a_stream_begins_with_an_introduction(tmp_path: Path, first: Word, reason: str) -> None:
    async def body(swarm: Hosts) -> None:
        async with stranger(swarm, "a", "m") as one:
            await one.say(first)
            assert reason in str(await refused(one.call))

    scenario(tmp_path, body, "a")


def test_what_cannot_be_read_ends_the_stream(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        async with learner(swarm) as one:
            await one.call.write(pb.CouncilMessage(news=pb.CouncilMessage.News(record=b'{"members": {}}')))
            error = await refused(one.call)
            assert isinstance(error, RemoteProtocolError) and "cannot be read" in str(error)
            await swarm.until(lambda: "m" not in swarm.running["a"].links.connected)

    scenario(tmp_path, body, "a")


def test_a_certificate_says_who_speaks(tmp_path: Path) -> None:
    """What is said in the name of the owner, by another member, is what that member says: it leads and owns nothing."""

    async def body(swarm: Hosts) -> None:
        async with learner(swarm, to="b") as one:
            b, record = swarm.running["b"], swarm.record
            later = Stamp(record.lineage, record.term + 5, record.version)
            await one.say(ev.Hello(later, record.members["a"]))
            await one.say(ev.Ended(0, record.parts[0].grant))
            await one.heard_out()
            assert b.council.leader == "a" and swarm.record.members["a"] == record.members["a"]

    scenario(tmp_path, body)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("what", "changed"),
    [
        ("it is not its owner's", {}),
        ("an old grant", {"grant": 0}),
        ("a later grant", {"grant": 99}),
        ("no such part", {"part": 1}),
        ("another base", {"base": "5" * 64}),
        ("a later step", {"outer_step": 5}),
    ],
)
def test_only_the_owners_next_update_is_fetched(tmp_path: Path, what: str, changed: dict[str, Any]) -> None:
    async def body(swarm: Hosts) -> None:
        part = swarm.record.parts[0]
        update = Update(0, 1, part.grant, "1" * 64, part.digest, "1" * 64, 10)
        async with learner(swarm, to="b") as one:
            asked: list[str] = []
            b = swarm.running["b"]
            b.links.stub = asked.append  # type: ignore[assignment]
            await one.say(Offering(replace(update, **changed)))
            await one.heard_out()
            assert not asked and b.parts[0].pulling is None
            if changed:  # the owner itself may not, either
                await b.heard("a#1", Offering(replace(update, **changed)))
                assert not asked and b.parts[0].pulling is None

    scenario(tmp_path, body)


def test_an_owner_whose_bytes_are_others_than_it_announced_is_not_held(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        a, b = swarm.running["a"], swarm.running["b"]
        part = swarm.record.parts[0]
        await b.heard("a#1", Offering(Update(0, 1, part.grant, "1" * 64, part.digest, "1" * 64, 10)))
        assert b.parts[0].pulling is not None
        await swarm.until(lambda: b.parts[0].pulling is None)
        assert b.parts[0].pulled is None and b.council.states == a.council.states

    scenario(tmp_path, body)


def test_who_is_evicted_is_cut_off_and_stays_out(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        async with learner(swarm) as one:
            swarm.running["a"].tell(ev.Evict("m", "it lies"))
            error = await refused(one.call)
            assert isinstance(error, EvictedError) and str(error) == "it lies"
        for to in "ab":
            await swarm.until(lambda to=to: "m" in (swarm.running[to].council.record.evicted))
            async with stranger(swarm, to, "m", incarnation=8) as again:
                assert isinstance(await refused(again.call), EvictedError)

    scenario(tmp_path, body)


def test_a_member_that_opens_many_streams_has_two(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        async with learner(swarm) as first, learner(swarm), learner(swarm):
            assert "opened another stream" in str(await refused(first.call))
            assert swarm.running["a"].links.connected >= {"m"}

    scenario(tmp_path, body, "a")


ORDERS = [
    ("Pause", cpb.PauseRequest()),
    ("Resume", cpb.ResumeRequest()),
    ("Drain", cpb.DrainRequest()),
    ("Evict", cpb.EvictRequest(peer_id="b", reason="I want its parts")),
]


@pytest.mark.parametrize(("method", "request_"), ORDERS, ids=[method for method, _ in ORDERS])
def test_only_an_operator_of_the_run_gives_orders_and_only_the_leader_takes_them(
    tmp_path: Path, method: str, request_: Any
) -> None:
    async def body(swarm: Hosts) -> None:
        for named in ({"role": "peer"}, {"role": "observer"}, {"role": "operator", "run_id": "other"}):
            async with swarm.channel("a", "b", **named) as channel:
                error = await refused(getattr(control_pb2_grpc.ControlStub(channel), method)(request_))
                assert isinstance(error, RefusedError), error
        async with swarm.channel("b", "operator", role="operator") as channel:
            error = await refused(getattr(control_pb2_grpc.ControlStub(channel), method)(request_))
            assert isinstance(error, StaleError) and str(error) == "ask the leader, a"
        assert not swarm.record.evicted and swarm.record.phase is Phase.RUNNING

    scenario(tmp_path, body)


def test_an_operators_certificate_that_has_expired_gives_no_orders_over_an_old_connection(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        a = swarm.running["a"]
        async with swarm.channel("a", "operator", role="operator") as channel:
            stub = control_pb2_grpc.ControlStub(channel)
            await stub.Pause(cpb.PauseRequest())
            unix = a._clock.unix
            a._clock = replace(a._clock, unix=lambda: unix() + 2 * LIFETIME_S)
            error = await refused(stub.Resume(cpb.ResumeRequest()))
            assert isinstance(error, RefusedError) and "expired" in str(error)
        assert swarm.record.phase is Phase.PAUSED

    scenario(tmp_path, body, "a")


def test_a_members_certificate_that_is_over_ends_its_streams_and_opens_no_more(
    tmp_path: Path,
) -> None:
    async def body(swarm: Hosts) -> None:
        a = swarm.running["a"]
        async with swarm.channel("a", "b") as channel:
            stub = council_stub(channel)
            await stub.Describe(pb.DescribeRequest())
            owners, meeting = stub.WatchOwners(pb.OwnersRequest()), stub.Meet()
            await owners.read()
            await meeting.write(message_to_pb(Introduction(swarm.run_id, 7)))
            await meeting.read()
            clock, unix = a._clock, a._clock.unix
            a._clock = replace(a._clock, unix=lambda: unix() + 2 * LIFETIME_S)
            for call in (stub.Describe(pb.DescribeRequest()), stub.Standing(pb.StandingRequest())):
                error = await refused(call)
                assert isinstance(error, TransportError) and "days ago by the clock of a; invite the member" in str(error)
            pass_time(STREAMS_LOOK_S)
            for call in (owners, meeting):
                with pytest.raises(grpc.aio.AioRpcError, match="the certificate of b expired on"):
                    while await call.read() is not grpc.aio.EOF:
                        pass
            assert "b" not in a.links.connected
            a._clock = clock

    scenario(tmp_path, body, "a")


def test_orders_that_nobody_agrees_on_are_bounded(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        a = swarm.running["a"]
        a.tell = lambda event: None  # type: ignore[method-assign]  # nothing comes of them
        waiting = [asyncio.ensure_future(a.order(ev.SetPhase(Phase.PAUSED))) for _ in range(MOST_ORDERS)]
        await asyncio.sleep(0)
        with pytest.raises(BusyError):
            await a.order(ev.SetPhase(Phase.PAUSED))
        pass_time(ORDER_S)
        for each in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(each, TransportError) and "no quorum agreed" in str(each)
        assert not a._orders

    scenario(tmp_path, body, "a")


def test_how_things_stand_is_told_to_nobody_outside(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        for named, kind in (
            ({"role": "observer"}, None),
            ({"role": "operator"}, None),
            ({"role": "peer"}, None),
            ({"role": "peer", "run_id": "other"}, RefusedError),
            ({"role": "region"}, RefusedError),
        ):
            async with swarm.channel("a", "m", **named) as channel:
                call = council_stub(channel).Standing(pb.StandingRequest())
                if kind is None:
                    assert Standing.decode((await call).standing).leader == "a"
                else:
                    assert type(await refused(call)) is kind
        swarm.running["a"].tell(ev.Evict("b", "it lies"))
        await swarm.until(lambda: swarm.record.evicted and not swarm.record.before and len(swarm.record.voters) == 1)
        async with swarm.channel("a", "b") as channel:
            assert type(await refused(council_stub(channel).Standing(pb.StandingRequest()))) is EvictedError

    scenario(tmp_path, body)


def test_nobody_makes_another_leave(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        for named in ({"role": "peer"}, {"role": "operator"}):
            async with swarm.channel("b", "a", **named) as channel:
                assert isinstance(await refused(council_stub(channel).LeaveSwarm(pb.LeaveRequest())), RefusedError)
        assert not swarm.running["b"].is_leaving

    scenario(tmp_path, body)


@pytest.mark.parametrize(
    ("method", "asked", "source", "message"),
    [
        ("FetchState", pb.StateRequest(), "state", pb.StatePart()),
        ("FetchOffer", pb.OfferRequest(id=bytes(32)), "offer", pb.OfferPart()),
        ("FetchContributions", pb.OfferRequest(id=bytes(32)), "contributions", pb.ContributionsPart()),
        ("FetchPhi", pb.PhiRequest(), "phi", pb.StatePart()),
    ],
)
@pytest.mark.parametrize(
    ("event", "kind", "why"),
    [
        (ev.Evict("m", "it lies"), EvictedError, "it lies"),
        (ev.Claim("m", Enrolled("9" * 32, "0" * 64)), RefusedError, "m was enrolled again, with another key"),
    ],
    ids=["evicted", "replaced"],
)
def test_who_is_evicted_or_has_another_key_gets_no_further_byte(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    asked: Any,
    source: str,
    message: Any,
    event: ev.Event,
    kind: type[EditError],
    why: str,
) -> None:
    go_on = asyncio.Event()

    async def messages(host: Host, *words: object) -> AsyncGenerator[Any, None]:
        yield message
        await go_on.wait()
        yield message

    monkeypatch.setattr(Host, source, messages)

    async def body(swarm: Hosts) -> None:
        a = swarm.running["a"]
        async with learner(swarm), swarm.channel("a", "m") as channel:
            call = getattr(council_stub(channel), method)(asked, metadata=(("edit-part", "0"),))
            assert await call.read() == message
            a.tell(event)
            await swarm.until(lambda: a._members.evicted("m") or a._members.keys["m"] == "0" * 64)
            go_on.set()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            error = from_rpc(caught.value)
            assert type(error) is kind and str(error).startswith(why)

    async def run() -> None:
        config = RunConfig.from_text(TOML.format(start=1, quorum=1).encode(), "run.toml")
        if source == "phi":
            config = replace(config, outer=OuterConfig(algorithm="gossip"), swarm=SwarmConfig(parts=1))
        async with hosts(tmp_path, config=config) as swarm:
            await swarm.grow("a")
            await body(swarm)

    run_held(run())


def test_a_voter_that_is_evicted_is_heard_until_it_is_voted_out(tmp_path: Path) -> None:
    """Its word may be needed for that: without b, the other three were the quorum."""

    async def body(swarm: Hosts) -> None:
        swarm.running["a"].tell(ev.Evict("d", "it lies"))
        seen: list[tuple[bool, bool]] = []
        a = swarm.running["a"]
        drop = a.links.drop

        def dropped(peer_id: str, reason: EditError) -> None:
            record = a.council.committed
            assert record is not None
            seen.append((peer_id in record.evicted, peer_id in {name.partition("#")[0] for name in record.electors}))
            drop(peer_id, reason)

        a.links.drop = dropped  # type: ignore[method-assign]
        await swarm.until(lambda: "d" in swarm.record.evicted and seen)
        assert {*seen} == {(True, False)}

    scenario(tmp_path, body, "abcd")


class Impostor(council_pb2_grpc.CouncilServicer):
    """A port that says to be b, in the life that the record has, and has the key of another machine of that name."""

    def __init__(self, run_id: str, incarnation: int, key: bytes) -> None:
        self._own, self._signer, self.heard = Introduction(run_id, incarnation), Signer(key), list[Word]()

    async def Meet(self, messages: AsyncIterator[pb.CouncilMessage], context: Any) -> AsyncIterator[pb.CouncilMessage]:
        asked = message_from_pb(await anext(messages))
        assert isinstance(asked, Introduction)
        caller = from_auth_context(context.auth_context()).peer_id
        yield message_to_pb(proven(self._own, "b", asked, caller, public_hash(certificate_of(context)), self._signer))
        async for message in messages:
            self.heard.append(message_from_pb(message))


def test_who_answers_for_a_member_with_another_key_than_was_enrolled_is_not_heard(tmp_path: Path) -> None:
    """The machine before, where the name was enrolled again: it may answer where the member was, or at a relay."""

    async def body() -> None:
        async with hosts(tmp_path) as swarm:
            swarm.closed = True
            swarm.found("a")
            a = await swarm.start("a")
            await swarm.until(lambda: swarm.leader == "a", passes=1.0)
            await swarm.enrol("b")
            b = await swarm.start("b")
            await swarm.until(lambda: swarm.settled("ab"), passes=1.0)
            await swarm.stop("b")
            key, certificate = swarm.certificate("b")
            impostor, server = Impostor(swarm.run_id, b.incarnation, key), grpc.aio.server()
            council_pb2_grpc.add_CouncilServicer_to_server(impostor, server)
            server.add_secure_port(b.listen, grpc.ssl_server_credentials([(key, certificate)], swarm.ca, True))
            await server.start()
            try:
                await swarm.until(
                    lambda: "enrolled again, with another key" in str(a.links.refusals.get("b")) or impostor.heard, passes=1.0
                )
                assert not impostor.heard and not a.links.connected
                with pytest.raises(TransportError, match="b is not connected"):
                    a.links.stub("b")
            finally:
                await server.stop(0)
            await swarm.start("b")
            await swarm.until(lambda: a.links.connected == {"b"}, passes=1.0)

    run_held(body())


def test_a_member_that_was_away_hears_from_a_machine_that_was_enrolled_meanwhile_what_the_record_is(tmp_path: Path) -> None:
    """c has no address, and b dials nobody: c reaches b with a record that has the key of the machine before."""

    async def body() -> None:
        async with hosts(tmp_path) as swarm:
            swarm.closed = True
            swarm.found("a")
            a = await swarm.start("a")
            await swarm.until(lambda: swarm.leader == "a", passes=1.0)
            await swarm.enrol("b", "c")
            await swarm.start("b")
            await swarm.start("c", advertise="")
            await swarm.until(
                lambda: swarm.settled("abc") and len(swarm.record.voters) == 3 and not swarm.record.before, passes=1.0
            )
            await swarm.stop("c")
            del swarm.keys["b"]
            key = public_hash(x509.load_pem_x509_certificate(swarm.own("b")[1]))
            a.tell(ev.Claim("b", Enrolled("2" * 32, key)))
            await swarm.until(
                lambda: a.council.committed is not None and a.council.committed.enrolled["b"].key == key, passes=1.0
            )
            await swarm.stop("b")
            shutil.rmtree(swarm.path / "b")
            b = await swarm.start("b")
            new = f"b#{b.incarnation}"
            await swarm.until(
                lambda: new in swarm.record.voters and not swarm.record.before and b.council.committed == swarm.record,
                passes=1.0,
            )
            await swarm.stop("a")
            c = await swarm.start("c", advertise="")
            await swarm.until(lambda: swarm.leader in ("b", "c") and c.links.connected == {"b"}, passes=0.5)
            assert c.council.record is not None and c.council.record.enrolled["b"].key == key

    run_held(body())


def test_a_reader_that_reads_nothing_loses_its_stream(tmp_path: Path) -> None:
    """What is sent to it would be held for ever, and it would count as connected."""

    async def body(swarm: Hosts) -> None:
        links = swarm.running["a"].links
        written: list[Any] = []

        async def write(message: Any) -> None:
            written.append(message)
            if len(written) > 1:  # the introduction was read
                await asyncio.Event().wait()

        async def says() -> AsyncIterator[pb.CouncilMessage]:
            yield message_to_pb(Introduction(swarm.run_id, 7))
            await asyncio.Event().wait()

        certificate = x509.load_pem_x509_certificate(swarm.certificate("m")[1])
        serving = asyncio.ensure_future(links.serve("m", says(), write, certificate))
        await swarm.until(lambda: "m" in links.connected)
        links.send("m", ev.Leave())
        await swarm.until(lambda: len(written) == 2)
        pass_time(STALL_S)
        await swarm.until(serving.done)
        assert isinstance(serving.exception(), TransportError) and "m has read nothing for 15 s" in str(serving.exception())
        assert "m" not in links.connected

    scenario(tmp_path, body, "a")
