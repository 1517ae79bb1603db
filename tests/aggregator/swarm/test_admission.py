"""Who lets others into a swarm: copies of the authority's key, and invitations that any member with one redeems."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from aggregator.security.authority import Authority
from aggregator.security.certificates import key_pem, make_ca, public_hash
from aggregator.swarm import operate
from aggregator.swarm.admission import authority_context, invite, keep_authority, open_authority
from edit import durable_files
from edit.council.events import Claim
from edit.council.record import Enrolled
from edit.errors import ConfigError, EditError, RefusedError, StaleError
from edit.trust.sealed import seal_for
from editpb import council_pb2 as pb
from editpb import council_pb2_grpc, enrolment_pb2, enrolment_pb2_grpc
from editpb.identity import Identity
from editpb.invitation import Invitation, SwarmAccess, guest_key
from editpb.transport.channel_options import channel_options
from editpb.transport.status import from_rpc
from peers.identity.enrolment import join
from peers.identity.peer_folder import PeerFolder
from peers.swarm import membership
from peers.swarm.membership import enter
from tests.aggregator.swarm.test_operating import equip, in_thread, scenario
from tests.support.council.hosts import Hosts


def let_in(swarm: Hosts, peer_id: str) -> Path:
    """Make the folder of a member that has the authority's key, which its host takes."""
    folder = equip(swarm, peer_id)
    swarm.running[peer_id].authority = keep_authority(folder, swarm.run_id, (swarm.path / "run" / "ca.key").read_bytes())
    return folder


def at(swarm: Hosts, invitation: Invitation, *peer_ids: str) -> str:
    """The text of an invitation that is redeemed at these members only."""
    assert invitation.swarm is not None
    there = {peer_id: (swarm.running[peer_id].listen,) for peer_id in peer_ids}
    return replace(invitation, swarm=SwarmAccess(there, invitation.swarm.certificate)).encode()


async def redeemed(text: str, home: Path) -> Identity | str:
    """Who somebody became, or why not."""
    try:
        found: Identity = await in_thread(join, text, home, time.time(), swarm=True)
        return found
    except EditError as error:
        return f"{type(error).__name__}: {error}"


def made(folder: Path, peer_id: str = "new") -> Invitation:
    return invite(folder, peer_id, hours=1, now=time.time())


async def share(swarm: Hosts, *peer_ids: str) -> None:
    """Give members copies, from a's folder."""
    for peer_id in peer_ids:
        equip(swarm, peer_id)
        told = await in_thread(operate.share_authority, swarm.path / "a", peer_id)
        assert told.startswith(f"{peer_id} has a copy of the authority's key; in all: a")


def test_a_member_that_was_given_the_key_redeems_what_another_made_and_invites_and_gives_orders(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        home = let_in(swarm, "a")
        assert swarm.record.holders == ("a",)
        invitation = made(home)
        assert "no copy of the authority's key; ask one of a" in await redeemed(at(swarm, invitation, "b"), tmp_path / "new")
        await share(swarm, "b")
        assert swarm.record.holders == ("a", "b")
        told = await in_thread(operate.status, home)
        assert told.holders == ("a", "b") and not any("authority's key" in note for note in told.notes)
        assert (swarm.path / "b" / "authority" / "ca.key").stat().st_mode & 0o777 == 0o600
        assert (swarm.path / "b" / "authority").stat().st_mode & 0o777 == 0o700
        await swarm.stop("a")
        await swarm.until(lambda: swarm.leader in ("b", "c") and swarm.owner() is not None, passes=1.0)
        assert await redeemed(at(swarm, invitation, "b"), tmp_path / "new") == Identity(swarm.run_id, "peer", "new")
        enrolled = PeerFolder(tmp_path / "new").load(time.time(), swarm=True)
        key = public_hash(x509.load_pem_x509_certificate(enrolled.certificate))
        assert swarm.record.enrolled["new"].key == key
        copy = made(swarm.path / "b", "another")
        assert copy.swarm is not None and next(iter(copy.swarm.hosts)) == "b"
        assert isinstance(await redeemed(at(swarm, copy, "b"), tmp_path / "another"), Identity)
        assert await in_thread(operate.pause, swarm.path / "b") == "paused"

    scenario(tmp_path, body)


def test_an_invitation_redeemed_at_two_holders_at_the_same_time_enrols_one_key(tmp_path: Path) -> None:
    """The loser hears why, wherever it asks again; the winner may ask again at both."""

    async def body(swarm: Hosts) -> None:
        home = let_in(swarm, "a")
        await share(swarm, "b")
        invitation = made(home)
        homes = [tmp_path / "one", tmp_path / "two"]
        both = await asyncio.gather(*(redeemed(at(swarm, invitation, p), h) for p, h in zip("ab", homes, strict=True)))
        won = [isinstance(each, Identity) for each in both]
        assert sorted(won) == [False, True], both
        for holder in "ab":
            again = [await redeemed(at(swarm, invitation, holder), each) for each in homes]
            assert [isinstance(each, Identity) for each in again] == won
            refused = next(each for each in again if isinstance(each, str))
            assert refused == "RefusedError: this invitation was used already, by another key; ask for a new one"

    scenario(tmp_path, body)


def test_a_holder_without_a_quorum_lets_nobody_in(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        home = let_in(swarm, "a")
        invitation = made(home)
        await swarm.stop("b")
        await swarm.stop("c")
        asked = asyncio.ensure_future(redeemed(at(swarm, invitation, "a"), tmp_path / "new"))
        await swarm.until(asked.done, passes=3.0)
        assert "no quorum agreed on it within 10 s" in str(asked.result())
        assert not (tmp_path / "new" / "peer.pem").exists()
        await swarm.start("b")
        await swarm.until(lambda: swarm.leader and swarm.owner() is not None, passes=1.0)
        assert isinstance(await redeemed(at(swarm, invitation, "a"), tmp_path / "new"), Identity)

    scenario(tmp_path, body)


def test_an_invitation_that_is_redeemed_before_its_member_is_in_the_swarm_waits_for_that(tmp_path: Path) -> None:
    """A founder prints it as soon as its host listens, which may be before its first record is committed."""

    async def body(swarm: Hosts) -> None:
        invitation, host = made(let_in(swarm, "a")), swarm.running["a"]
        kept, host.council._committed = host.council._committed, None
        asked = asyncio.ensure_future(redeemed(at(swarm, invitation, "a"), tmp_path / "new"))
        await swarm.until(lambda: host._claims or asked.done())
        assert not asked.done(), asked.result()
        host.council._committed = kept
        await swarm.until(asked.done, passes=1.0)
        assert asked.result() == Identity(swarm.run_id, "peer", "new")

    scenario(tmp_path, body)


def test_of_a_name_that_was_enrolled_again_the_earlier_machine_is_shut_out_everywhere(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        home = let_in(swarm, "a")
        first, second = made(home), made(home)
        for invitation, folder in ((first, "one"), (second, "two")):
            assert isinstance(await redeemed(at(swarm, invitation, "a"), tmp_path / folder), Identity)
        third = made(home)
        assert third.swarm is not None and second.swarm is not None
        numbers = [x509.load_der_x509_certificate(each.swarm.certificate).serial_number for each in (second, third)]
        assert numbers[0] < numbers[1]
        assert "a later invitation for new was used" in str(await redeemed(at(swarm, first, "a"), tmp_path / "one"))
        await swarm.until(lambda: all(host.council.committed == swarm.record for host in swarm.running.values()), passes=0.1)
        for peer_id in "abc":
            for folder, code in (("one", grpc.StatusCode.PERMISSION_DENIED), ("two", grpc.StatusCode.OK)):
                credentials = PeerFolder(tmp_path / folder).load(swarm=True).credentials
                async with channel(swarm, peer_id, credentials) as to:
                    describe = council_pb2_grpc.CouncilStub(to).Describe(pb.DescribeRequest())
                    assert await describe.code() is code, f"{folder} at {peer_id}: {await describe.details()}"

    scenario(tmp_path, body)


def test_a_folder_takes_its_name_back_with_an_invitation_that_it_has_not_redeemed(tmp_path: Path) -> None:
    """The one that it has redeemed, which a service's command may name for ever, is not used again, nor ends the command."""

    async def body(swarm: Hosts) -> None:
        home, one, two = let_in(swarm, "a"), tmp_path / "one", tmp_path / "two"

        def key(folder: Path) -> str:
            return public_hash(x509.load_pem_x509_certificate(PeerFolder(folder).load(swarm=True).certificate))

        async def given(invitation: Invitation) -> str:
            seeds = await in_thread(enter, one, at(swarm, invitation, "a"))
            assert seeds == [("a", swarm.running["a"].listen)]
            return swarm.record.enrolled["new"].key

        first, second, third, fourth = (made(home) for _ in range(4))
        before = await given(first)
        assert before == key(one)
        assert isinstance(await redeemed(at(swarm, second, "a"), two), Identity)
        assert await given(first) == key(two) == swarm.record.enrolled["new"].key
        assert await given(third) == before == key(one)
        assert await given(second) == before, "it was used elsewhere"
        assert isinstance(await redeemed(at(swarm, fourth, "a"), two), Identity)
        assert await given(third) == key(two)

    scenario(tmp_path, body)


def test_a_folder_that_lost_its_key_is_a_members_again_with_another_invitation(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        home, folder = let_in(swarm, "a"), tmp_path / "new"
        first, second, third = (at(swarm, made(home), "a") for _ in range(3))
        await in_thread(enter, folder, first)
        before = swarm.record.enrolled["new"].key
        (folder / "peer.key").unlink()
        with pytest.raises(ConfigError, match=r"peer\.key: cannot be read"):
            await in_thread(enter, folder, None)
        with pytest.raises(ConfigError, match=r"peer\.key: cannot be read"):
            await in_thread(enter, folder, first)
        assert not (folder / "peer.key").exists(), "it may only be away"
        await in_thread(enter, folder, second)
        after = swarm.record.enrolled["new"].key
        assert after != before
        assert after == public_hash(x509.load_pem_x509_certificate(PeerFolder(folder).load(swarm=True).certificate))
        (folder / "peer.pem").write_bytes(b"damaged")
        await in_thread(enter, folder, third)
        assert swarm.record.enrolled["new"].key == after and PeerFolder(folder).load(time.time(), swarm=True)

    scenario(tmp_path, body)


def test_a_folder_that_does_not_say_what_it_redeemed_redeems_only_what_was_made_after_its_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an earlier version has left it; its service names the first invitation for ever."""

    async def body(swarm: Hosts) -> None:
        home, folder = let_in(swarm, "a"), tmp_path / "new"
        first = at(swarm, made(home), "a")
        await in_thread(enter, folder, first)
        before = swarm.record.enrolled["new"]
        (folder / membership.REDEEMED).unlink()
        asked = list[object]()
        with monkeypatch.context() as patch:
            patch.setattr(membership, "redeem", lambda *words: asked.append(words))
            for _ in range(2):
                await in_thread(enter, folder, first)
        assert asked == [] and (folder / membership.REDEEMED).exists()
        (folder / membership.REDEEMED).unlink()
        later = at(swarm, invite(home, "new", hours=1, now=time.time() + 5), "a")
        await in_thread(enter, folder, later)
        assert swarm.record.enrolled["new"].invitation > before.invitation

    scenario(tmp_path, body)


def test_a_name_that_was_enrolled_while_a_clock_was_ahead_is_enrolled_again_once_it_is_right(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        home = let_in(swarm, "a")
        ahead = invite(home, "new", hours=1, now=time.time() + 50 * 3600)
        assert ahead.swarm is not None
        number = f"{x509.load_der_x509_certificate(ahead.swarm.certificate).serial_number:032x}"
        await swarm.running["a"].claim(Claim("new", Enrolled(number, "0" * 64)))
        assert isinstance(await redeemed(at(swarm, made(home), "a"), tmp_path / "new"), Identity)
        assert swarm.record.enrolled["new"].invitation > number

    scenario(tmp_path, body)


@asynccontextmanager
async def channel(swarm: Hosts, to: str, credentials: grpc.ChannelCredentials) -> Any:
    address = swarm.running[to].listen
    options = channel_options(address, server_name=Identity(swarm.run_id, "peer", to).server_name)
    async with grpc.aio.secure_channel(address, credentials, options=options) as found:
        yield found


async def refused(call: Any) -> EditError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc(caught.value)


async def sealed(swarm: Hosts, peer_id: str, key: bytes) -> bytes:
    async with swarm.channel(peer_id, "operator", "operator") as to:
        reply = await council_pb2_grpc.CouncilStub(to).PublicKey(pb.PublicKeyRequest())
    return seal_for(reply.key, key, authority_context(swarm.run_id, peer_id))


def test_a_machine_with_another_key_than_was_enrolled_is_not_given_the_authoritys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who answers as b has b's earlier key: it may have been stolen."""

    async def body(swarm: Hosts) -> None:
        let_in(swarm, "a")
        equip(swarm, "b")
        record = replace(swarm.record, enrolled={"b": Enrolled("1" * 32, "0" * 64)})
        monkeypatch.setattr(operate._Folder, "latest_record", lambda folder: record)
        with pytest.raises(RefusedError, match="who answers as b has another key than b was enrolled for: nothing was given"):
            await in_thread(operate.share_authority, swarm.path / "a", "b")
        assert not (swarm.path / "b" / "authority").exists()

    scenario(tmp_path, body)


def test_the_authoritys_key_is_not_given_by_the_record_of_a_folder_whose_host_was_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder names the machine before, whose key may have been stolen; the leader names another."""

    async def body(swarm: Hosts) -> None:
        let_in(swarm, "a")
        equip(swarm, "b")
        key = public_hash(x509.load_pem_x509_certificate(swarm.own("b")[1]))
        stale = replace(swarm.record, enrolled={"b": Enrolled("1" * 32, key)})
        monkeypatch.setattr(operate._Folder, "latest_record", lambda folder: stale)
        ask = operate._ask

        async def newer(*arguments: Any) -> Any:
            said = await ask(*arguments)
            assert said.record is not None
            return replace(said, record=replace(said.record, enrolled={"b": Enrolled("2" * 32, "0" * 64)}))

        monkeypatch.setattr(operate, "_ask", newer)
        with pytest.raises(RefusedError, match="b was enrolled again since this folder's host heard of it: start that host"):
            await in_thread(operate.share_authority, swarm.path / "a", "b")
        assert not (swarm.path / "b" / "authority").exists()

    scenario(tmp_path, body)


def test_who_may_not_be_given_the_key_or_give_it(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        let_in(swarm, "a")
        equip(swarm, "b")
        key, other = (swarm.path / "run" / "ca.key").read_bytes(), key_pem(make_ca(swarm.run_id, time.time())[0])
        take = pb.TakeAuthorityRequest(sealed=await sealed(swarm, "b", key))
        async with swarm.channel("a", "c") as to:
            for call in (
                council_pb2_grpc.CouncilStub(to).Entrust(pb.EntrustRequest(peer_id="c")),
                council_pb2_grpc.CouncilStub(to).TakeAuthority(take),
            ):
                assert "it needs operator" in str(await refused(call))
        async with swarm.channel("b", "operator", "operator") as to:
            error = await refused(council_pb2_grpc.CouncilStub(to).TakeAuthority(take))
            assert isinstance(error, StaleError) and "b has not heard yet that it is to have" in str(error)
            error = await refused(council_pb2_grpc.CouncilStub(to).Entrust(pb.EntrustRequest(peer_id="b")))
            assert isinstance(error, StaleError) and "ask the leader, a" in str(error)
        async with swarm.channel("a", "operator", "operator") as to:
            await council_pb2_grpc.CouncilStub(to).Entrust(pb.EntrustRequest(peer_id="b"))
        await swarm.until(lambda: swarm.running["b"].holders == ("a", "b"), passes=0.1)
        async with swarm.channel("b", "operator", "operator") as to:
            for wrong, why in (
                (await sealed(swarm, "b", other), "another authority"),
                (await sealed(swarm, "b", b"x" * 100), "not a private key"),
                (await sealed(swarm, "a", key), "was not sealed for b"),
                (key, "was not sealed for b"),
            ):
                error = await refused(council_pb2_grpc.CouncilStub(to).TakeAuthority(pb.TakeAuthorityRequest(sealed=wrong)))
                assert isinstance(error, RefusedError) and why in str(error)
        assert not (swarm.path / "b" / "authority").exists() and swarm.running["b"].authority is None
        told = await in_thread(operate.status, swarm.path / "b")
        assert "b has no copy of the authority's key yet: say share-authority b again" in told.notes
        with pytest.raises(RefusedError, match="z is not a member"):
            await in_thread(operate.share_authority, swarm.path / "a", "z")
        await in_thread(operate.evict, swarm.path / "a", "b", "it lies")
        told = await in_thread(operate.status, swarm.path / "a")
        assert told.holders == ("a", "b"), "who was evicted has it nonetheless"
        assert "b was evicted, and was given the authority's key, which counts until new-authority is said" in told.notes

    scenario(tmp_path, body)


def guest(swarm: Hosts, invitation: Invitation) -> grpc.ChannelCredentials:
    assert invitation.swarm is not None
    certificate = x509.load_der_x509_certificate(invitation.swarm.certificate)
    return grpc.ssl_channel_credentials(swarm.ca, key_pem(guest_key(invitation.token)), certificate.public_bytes(Encoding.PEM))


def test_an_invitation_opens_nothing_but_its_own_enrolment(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        home = let_in(swarm, "a")
        one, other = made(home, "one"), made(home, "other")
        async with channel(swarm, "a", guest(swarm, one)) as to:
            council, enrol = council_pb2_grpc.CouncilStub(to), enrolment_pb2_grpc.EnrolmentStub(to)
            for call in (council.Describe(pb.DescribeRequest()), council.TakeAuthority(pb.TakeAuthorityRequest())):
                assert "names 0 members of a run" in str(await refused(call))
            error = await refused(enrol.Enrol(enrolment_pb2.EnrolRequest(token=other.token, csr_der=b"x")))
            assert "the token is not that of the invitation" in str(error)
            error = await refused(enrol.Enrol(enrolment_pb2.EnrolRequest(token=one.token, csr_der=b"x")))
            assert "certificate request" in str(error)
        async with swarm.channel("a", "c") as to:
            error = await refused(enrolment_pb2_grpc.EnrolmentStub(to).Enrol(enrolment_pb2.EnrolRequest(token=one.token)))
            assert "names 0 members" in str(error), "a member's certificate is no invitation"
        assert not swarm.record.enrolled

    scenario(tmp_path, body, members="abc")


def test_an_evicted_name_is_neither_invited_nor_let_in(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        home = let_in(swarm, "a")
        invitation = made(home, "c")
        await in_thread(operate.evict, home, "c", "it lies")
        assert "c was evicted (it lies)" in str(await redeemed(at(swarm, invitation, "a"), tmp_path / "new"))
        with pytest.raises(RefusedError, match=r"c was evicted \(it lies\)"):
            made(home, "c")

    scenario(tmp_path, body)


def test_an_invitation_that_was_not_used_is_void_once_its_name_is_evicted(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        home = let_in(swarm, "a")
        leaked = made(home)
        await in_thread(operate.evict, home, "new", "its invitation leaked")
        told = await redeemed(at(swarm, leaked, "a"), tmp_path / "thief")
        assert told == "RefusedError: new was evicted (its invitation leaked); choose another name"
        assert not swarm.record.enrolled
        await swarm.until(lambda: all(host._members.evicted("new") for host in swarm.running.values()))

    scenario(tmp_path, body)


class Killed(BaseException):
    """As a SIGKILL ends a process."""


def test_a_copy_of_the_key_is_whole_or_not_there_when_it_is_killed_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority.create(tmp_path, "run-1", now=time.time())
    rename, key = durable_files.rename, key_pem(authority.issuer.key)
    for writes in range(10):
        home, left = tmp_path / f"home-{writes}", writes
        home.mkdir()
        (home / "ca.pem").write_bytes((tmp_path / "ca.pem").read_bytes())

        def count(source: Path, target: Path) -> None:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            rename(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(durable_files, "rename", count)
            try:
                keep_authority(home, "run-1", key)
                break
            except Killed:
                assert open_authority(home) is None
        assert keep_authority(home, "run-1", key).fingerprint == authority.fingerprint
    else:
        pytest.fail("it never got through")
    assert writes >= 4 and open_authority(home) is not None
