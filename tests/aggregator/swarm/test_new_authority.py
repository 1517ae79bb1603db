"""A new authority in the place of one whose key was stolen: who has only the old key lets nobody in and gives no orders."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from aggregator.security.authority import Authority
from aggregator.security.certificates import key_pem, make_ca, new_key
from aggregator.swarm import admission, operate
from aggregator.swarm.admission import Trust, keep_authority, root_of
from aggregator.swarm.host import REPLACED_S
from aggregator.swarm.host_folder import AUTHORITY_FORMAT, HostFolder, authority_folder
from edit.durable_files import write_atomic, write_json
from edit.errors import RefusedError, StaleError, StorageError, TransportError
from editpb import control_pb2, control_pb2_grpc, council_pb2_grpc
from editpb import council_pb2 as pb
from editpb.identity import Identity, is_signed_by
from editpb.transport.parts import in_part
from tests.aggregator.swarm.test_admission import at, channel, made, redeemed, refused
from tests.aggregator.swarm.test_host import step
from tests.aggregator.swarm.test_operating import in_thread
from tests.aggregator.swarm.test_renewal import store
from tests.support.council.hosts import Hosts, hosts
from tests.support.loops import run_held


def scenario(tmp_path: Path, body: Callable[[Hosts], Coroutine[Any, Any, None]]) -> None:
    """A swarm as commands make one: a has the authority's key, and b and c were invited."""

    async def run() -> None:
        async with hosts(tmp_path) as swarm:
            swarm.renews = swarm.closed = True
            folder = store(swarm, "a", age_s=0.0, authority=True)
            swarm.keys["a"] = (folder.path / "peer.key").read_bytes(), (folder.path / "peer.pem").read_bytes()
            swarm.found("a")
            await swarm.start("a")
            await swarm.until(lambda: swarm.leader == "a" and swarm.running["a"].reachable, passes=1.0)
            for peer_id in "bc":
                await enter(swarm, peer_id)
            await swarm.until(lambda: swarm.settled("abc"), passes=1.0)
            await body(swarm)
            assert all(host.failure is None for host in swarm.running.values())

    run_held(run())


async def enter(swarm: Hosts, peer_id: str) -> None:
    """Invite a member at a, and start it."""
    assert isinstance(await redeemed(at(swarm, made(swarm.path / "a", peer_id), "a"), swarm.path / peer_id), Identity)
    HostFolder(advertise="127.0.0.1").save(swarm.path / peer_id)
    await swarm.start(peer_id)


def roots(swarm: Hosts, peer_id: str) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates((swarm.path / peer_id / "ca.pem").read_bytes())


def is_of_the_new(swarm: Hosts, peer_id: str) -> bool:
    """Whether a member's certificate is of the authority that a trusts most."""
    certificate = x509.load_pem_x509_certificate((swarm.path / peer_id / "peer.pem").read_bytes())
    return is_signed_by(certificate, roots(swarm, "a")[0])


async def replaced(swarm: Hosts, *peer_ids: str) -> None:
    """Let so much time pass that these have certificates of the new authority."""
    await swarm.until(lambda: all(len(roots(swarm, each)) > 1 for each in peer_ids), passes=0.1)
    await swarm.pass_time(REPLACED_S)
    name = swarm.record.roots[-1].name
    await swarm.until(lambda: all(swarm.record.members[each].authority == name for each in peer_ids), passes=1.0)


async def why_refused(swarm: Hosts, to: str, peer_id: str, role: str = "peer") -> Exception:
    """Why a member refuses somebody whose certificate was made with the first authority's key.

    An operator gives an order; "operator of the engine" asks the engine of part 0 how its run stands, as an observer may.
    """
    asks_engine, role = role.endswith(" of the engine"), role.removesuffix(" of the engine")
    key, pem, identity = new_key(), serialization.Encoding.PEM, Identity(swarm.run_id, role, peer_id)
    certificate = swarm.authority.issuer.issue(identity, key.public_key(), lifetime_s=3600.0, now=time.time())
    trusted = b"".join(root.public_bytes(pem) for root in roots(swarm, to))
    credentials = grpc.ssl_channel_credentials(trusted, key_pem(key), certificate.public_bytes(pem))
    async with channel(swarm, to, credentials) as open_:
        if asks_engine:
            return await refused(in_part(control_pb2_grpc.ControlStub(open_), 0).Status(control_pb2.StatusRequest()))
        if role == "operator":
            return await refused(control_pb2_grpc.ControlStub(open_).Pause(control_pb2.PauseRequest()))
        return await refused(council_pb2_grpc.CouncilStub(open_).Describe(pb.DescribeRequest()))


def test_who_is_not_enrolled_is_not_let_in_whoever_signed_its_certificate(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        error = await why_refused(swarm, "b", "z")
        assert isinstance(error, StaleError) and "z is not enrolled, whoever signed its certificate" in str(error)
        error = await why_refused(swarm, "b", "a")
        assert isinstance(error, RefusedError) and "a was enrolled again, with another key" in str(error)
        store(swarm, "z", age_s=0.0)
        await swarm.start("z")
        stranger = swarm.running.pop("z")
        await step(swarm, 1)
        await swarm.pass_time(3.0)
        await step(swarm, 2)
        assert {*swarm.record.members} == {*"abc"} and stranger.council.record is None
        swarm.running["z"] = stranger

    scenario(tmp_path, body)


def test_a_member_that_is_invited_again_for_another_key_is_that_machine_alone(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        await step(swarm, 1)
        old = swarm.running.pop("c")
        assert isinstance(await redeemed(at(swarm, made(swarm.path / "a", "c"), "a"), tmp_path / "new"), Identity)
        others = [swarm.running[each] for each in "ab"]
        await swarm.until(lambda: not any("c" in each.links.connected for each in others), passes=1.0)
        await swarm.until(lambda: isinstance(old._ended, RefusedError), passes=1.0)
        assert "c was enrolled again, with another key" in str(old._ended)
        assert not swarm.record.members["c"].addresses and swarm.record.voters == tuple(
            f"{each.peer_id}#{each.incarnation}" for each in others
        )
        await old.close()
        await step(swarm, 2)

    scenario(tmp_path, body)


def test_who_starts_later_does_not_dial_the_machine_before_either(tmp_path: Path) -> None:
    """It would be taken for the new one: who dials does not see the key."""

    async def body(swarm: Hosts) -> None:
        seeds: dict[str, tuple[str, ...]] = {each: (swarm.running[each].listen,) for each in "ac"}
        await swarm.stop("c")
        assert isinstance(await redeemed(at(swarm, made(swarm.path / "a", "c"), "a"), tmp_path / "new"), Identity)
        await swarm.until(lambda: swarm.record.members["c"].incarnation == 0 and swarm.settled("ab"), passes=1.0)
        await swarm.stop("b")
        b = await swarm.start("b", seeds=seeds)
        await swarm.until(lambda: swarm.settled("ab"), passes=1.0)
        assert {*b.links.addresses} == {*"ab"}

    scenario(tmp_path, body)


def test_a_stolen_key_is_of_no_use_once_there_is_a_new_authority(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        await in_thread(operate.share_authority, swarm.path / "a", "b")
        forged = made(swarm.path / "b", "friend")  # by the machine that loses its copy
        told = await in_thread(operate.new_authority, swarm.path / "a")
        assert told.startswith("the authority is replaced; a alone has the new key")
        assert swarm.record.holders == ("a",) and not (swarm.path / "a" / "authority" / "next").exists()
        await step(swarm, 1)
        await replaced(swarm, *"abc")
        await swarm.until(lambda: all(len(roots(swarm, each)) == 1 for each in "abc"), passes=0.5)
        assert all(is_of_the_new(swarm, each) for each in "abc") and roots(swarm, "a") != [swarm.authority.issuer.certificate]
        await step(swarm, 2)

        with pytest.raises(RefusedError, match="this copy of its key lets nobody in any more"):
            made(swarm.path / "b", "another")
        said = await redeemed(at(swarm, forged, "a"), tmp_path / "friend")
        assert isinstance(said, str) and said.startswith(("RefusedError", "UntrustedServerError")), said
        with pytest.raises(RefusedError, match="this copy of its key gives no orders any more"):
            await in_thread(operate.pause, swarm.path / "b")
        for peer_id, role in (("c", "peer"), ("z", "peer"), ("operator", "operator")):
            assert isinstance(await why_refused(swarm, "a", peer_id, role), TransportError), "nobody answers it"
        assert await in_thread(operate.pause, swarm.path / "a") == "paused"
        assert await in_thread(operate.resume, swarm.path / "a") == "resumed"

        await enter(swarm, "d")
        await swarm.until(lambda: swarm.settled("abcd"), passes=1.0)
        await in_thread(operate.share_authority, swarm.path / "a", "b")
        assert swarm.record.holders == ("a", "b")
        made(swarm.path / "b", "another")
        await swarm.stop("b")
        await swarm.start("b")
        await swarm.until(lambda: swarm.settled("abcd"), passes=1.0)
        await step(swarm, 3)

    scenario(tmp_path, body)


def test_while_members_still_have_certificates_of_the_old_authority_its_key_opens_nothing(tmp_path: Path) -> None:
    """c is away, so that all still trust the old certificates; it is invited again, under its name and with its key."""

    async def body(swarm: Hosts) -> None:
        forged = made(swarm.path / "a", "friend")
        await in_thread(operate.share_authority, swarm.path / "a", "b")
        await swarm.stop("c")
        await in_thread(operate.new_authority, swarm.path / "a")
        await replaced(swarm, *"ab")
        assert len(roots(swarm, "a")) == 2
        told = await in_thread(operate.status, swarm.path / "a")
        assert "the authority is being replaced: c has no certificate of the new one yet" in told.notes

        error = await why_refused(swarm, "a", "operator", "operator")
        assert isinstance(error, RefusedError) and "this copy of its key gives no orders any more" in str(error)
        engine = swarm.owner()
        assert engine is not None
        for role in ("operator", "observer"):
            error = await why_refused(swarm, engine.peer_id, role, f"{role} of the engine")
            assert isinstance(error, RefusedError) and "the authority was replaced" in str(error)
        old = replace(forged, ca=swarm.authority.ca_der)
        new = replace(forged, ca=roots(swarm, "a")[0].public_bytes(serialization.Encoding.DER))
        for invitation in (old, new):  # with the certificate of the old authority
            said = await redeemed(at(swarm, invitation, "a"), tmp_path / "friend")
            assert isinstance(said, str) and said.startswith(("RefusedError", "UntrustedServerError")), said
        assert "is of an authority that was replaced; ask for a new one" in said
        assert isinstance(await why_refused(swarm, "b", "z"), StaleError)
        assert isinstance(await why_refused(swarm, "b", "a"), RefusedError)

        await enter(swarm, "c")
        await swarm.until(lambda: swarm.settled("abc"), passes=1.0)
        await swarm.until(lambda: all(len(roots(swarm, each)) == 1 for each in "abc"), passes=0.5)
        await step(swarm, 1)

    scenario(tmp_path, body)


def test_a_command_that_was_killed_is_said_again_and_replaces_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(swarm: Hosts) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(operate, "operator_credentials", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                await in_thread(operate.new_authority, swarm.path / "a")
        assert len(swarm.record.roots) == 1
        with monkeypatch.context() as patch:
            patch.setattr(operate, "read_private", lambda path: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                await in_thread(operate.new_authority, swarm.path / "a")
        assert len(swarm.record.roots) == 2 and swarm.running["a"].authority is None
        await in_thread(operate.new_authority, swarm.path / "a")
        assert len(swarm.record.roots) == 2 and swarm.running["a"].authority is not None
        await replaced(swarm, *"abc")

    scenario(tmp_path, body)


def member_with_authority(path: Path) -> tuple[Any, Authority]:
    """What a command takes of a folder, and its authority."""
    folder = authority_folder(path)
    folder.mkdir()
    write_json(folder / "run.json", {"run_id": "run"}, version=AUTHORITY_FORMAT)
    authority = Authority.create(folder, "run", now=time.time())
    write_atomic(path / "ca.pem", (folder / "ca.pem").read_bytes())
    return SimpleNamespace(path=path, identity=Identity("run", "peer", "a")), authority


@pytest.mark.parametrize("where", ["ca.pem", "ca.key"])
def test_a_host_that_is_killed_while_it_takes_the_new_key_takes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    member, _ = member_with_authority(tmp_path)
    kept, root = operate._next_authority(member)
    trust = Trust(tmp_path)
    trust.follow([root_of(trust.present), root])
    key = (kept / "ca.key").read_bytes()

    def killed(file: Path, *arguments: Any, **named: Any) -> None:
        if file.name == where:
            raise ZeroDivisionError
        write_atomic(file, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(admission, "write_atomic", killed)
        with pytest.raises(ZeroDivisionError):
            keep_authority(tmp_path, "run", key)
    assert admission.open_authority(tmp_path) is None
    assert operate._next_authority(member) == (kept, root)
    keep_authority(tmp_path, "run", key)
    assert operate._next_authority(member) == (kept, root)


@pytest.mark.parametrize("gone", [("root.json",), ("root.json", "ca.key"), ("ca.key",)])
def test_what_is_left_of_a_next_authority_is_not_gone_on_with(tmp_path: Path, gone: tuple[str, ...]) -> None:
    member, _ = member_with_authority(tmp_path)
    kept, root = operate._next_authority(member)
    for name in gone:
        (kept / name).unlink()
    _, anew = operate._next_authority(member)
    assert anew != root and operate.operator_credentials(tmp_path, "run", authority=kept)


def test_the_root_of_a_next_authority_is_removed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    member, _ = member_with_authority(tmp_path)
    kept, _ = operate._next_authority(member)
    monkeypatch.setattr(operate.shutil, "rmtree", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        operate._remove_next(kept)
    assert {each.name for each in kept.iterdir()} == {"ca.key", "ca.pem"}


def test_a_next_authority_that_one_before_the_present_has_endorsed_is_made_anew(tmp_path: Path) -> None:
    member, first = member_with_authority(tmp_path)
    _, stale = operate._next_authority(member)  # and no leader is there
    key, certificate = make_ca("run", time.time(), "CA b")
    trust = Trust(tmp_path)
    trust.follow([root_of(trust.present), root_of(certificate, first.issuer.key)])
    with pytest.raises(RefusedError, match="this copy of its key makes no other"):
        operate._next_authority(member)
    keep_authority(tmp_path, "run", key_pem(key))  # shared with this member
    _, anew = operate._next_authority(member)
    assert anew != stale and trust.check(anew) and operate._next_authority(member)[1] == anew


def test_a_leader_that_lies_makes_nobody_trust_an_authority(tmp_path: Path) -> None:
    founding, mallory = make_ca("run", time.time()), make_ca("run", time.time(), "CA 2")
    write_atomic(tmp_path / "ca.pem", founding[1].public_bytes(serialization.Encoding.PEM))
    trust, first = Trust(tmp_path), root_of(founding[1])
    assert not trust.follow([first])
    for lie in (root_of(mallory[1]), root_of(mallory[1], mallory[0]), replace(first, certificate="AAAA")):
        for said in ([first, lie], [lie]):
            with pytest.raises(RefusedError, match="has not endorsed"):
                trust.follow(said)
    assert trust.present == founding[1] == Trust(tmp_path).present
    assert trust.follow([first, root_of(mallory[1], founding[0])]) and Trust(tmp_path).present == mallory[1]
    third = make_ca("run", time.time(), "CA 3")
    with pytest.raises(RefusedError):
        trust.follow([first, root_of(mallory[1]), root_of(third[1], founding[0])])


def test_who_joined_between_two_replacements_trusts_the_second(tmp_path: Path) -> None:
    """It knows nothing of the founding authority, of which others that are away still have certificates."""
    first, second, third, fourth, mallory = (make_ca("run", time.time(), f"CA {number}") for number in range(5))
    write_atomic(tmp_path / "ca.pem", second[1].public_bytes(serialization.Encoding.PEM))
    trust = Trust(tmp_path)
    record = [root_of(first[1]), root_of(second[1], first[0])]
    assert not trust.follow(record) and trust.present == second[1]
    for lie in (
        [*record, root_of(mallory[1], first[0])],  # by the key of the one that was replaced
        [*record, root_of(mallory[1])],
        [*record, root_of(mallory[1], mallory[0]), root_of(third[1], second[0])],
        [root_of(first[1]), root_of(mallory[1], first[0])],  # without the present one
        [*record, record[0]],
    ):
        with pytest.raises(RefusedError, match="has not endorsed"):
            trust.follow(lie)
    record.append(root_of(third[1], second[0]))
    assert trust.follow([root_of(mallory[1]), *record]) and not trust.follow(record)
    record.append(root_of(fourth[1], third[0]))
    assert trust.follow(record)
    trusted = x509.load_pem_x509_certificates((tmp_path / "ca.pem").read_bytes())
    assert trusted == [fourth[1], third[1], second[1]]
    with pytest.raises(RefusedError, match="has not endorsed"):
        trust.follow([*record, record[1]])  # back to one before the present one
    assert trust.follow(record[-1:]) and Trust(tmp_path).pem == fourth[1].public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize("taken", ["file", "link"])
def test_where_the_next_key_cannot_be_kept_is_told_in_one_line(tmp_path: Path, taken: str) -> None:
    async def body(swarm: Hosts) -> None:
        kept = authority_folder(swarm.path / "a") / "next"
        if taken == "file":
            kept.write_bytes(b"")
        else:
            kept.symlink_to(tmp_path / "nowhere")
        with pytest.raises(StorageError, match=f"{kept}: cannot be (removed|created)"):
            await in_thread(operate.new_authority, swarm.path / "a")
        kept.unlink()
        await in_thread(operate.new_authority, swarm.path / "a")

    scenario(tmp_path, body)
