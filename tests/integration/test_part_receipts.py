"""A peer of a swarm compares the audit log with what it sent and took; an owner that leaves it out is found and named."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import threading
import tomllib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509

from edit.config.run import RunConfig
from edit.errors import ConfigError, RefusedError
from edit.fragments.shards import Shard
from edit.merging.merge import Measured
from edit.records import Committed, Contribution
from edit.rounds import events
from edit.trust.canonical import parse_canonical
from edit.trust.merkle import MerkleTree, leaf_hash
from edit.trust.signatures import Signer
from editpb import council_pb2 as pb
from editpb import council_pb2_grpc
from editpb.audit_log import LogVerifier, RoundFacts
from editpb.consents import signed_consent
from editpb.council_messages import LogDoubt, doubt_to_pb, goes_on_from_pb, logged_from_pb
from editpb.earlier_keys import keep_earlier
from editpb.identity import Identity
from editpb.messages import Consent, DataStatement, LoggedEntry
from editpb.owner_signatures import signed_by_owner
from editpb.part_entries import consents_named
from editpb.seen_entries import SeenEntry
from editpb.signed_contributions import config_digest
from peers.carriers.hub.control_stream import Check
from peers.carriers.hub.site import Site
from peers.carriers.io_thread import IoThread
from peers.carriers.swarm import receipts, seen_log
from peers.carriers.swarm.channels import PartChannels
from peers.carriers.swarm.connect import connect_swarm
from peers.carriers.swarm.receipts import PartReceipts, ReceiptChecks, fault_file
from peers.carriers.swarm.seen_log import SeenLog
from tests.aggregator.swarm.test_part_logs import config as audited
from tests.aggregator.swarm.test_part_logs import grown, take_step
from tests.support.council.hosts import Hosts, hosts
from tests.support.council.trained import Trained, trained
from tests.support.encoded import encode
from tests.support.fake_run import vectors
from tests.support.keys import member_key
from tests.support.loops import WAIT_S, run_held
from tests.support.served import TOML
from tests.support.two_ranks import SCHEMA, SIZES

STEPS = 3


def no_say(text: str, config: RunConfig) -> None:
    return None


class Watched:
    """What the checks of the peers of a test came to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.checked = list[int]()
        check = PartReceipts.check

        def watch(part: PartReceipts, logged: LoggedEntry) -> Any:
            self.checked.append(part.unchecked[0].outer_step)
            return check(part, logged)

        monkeypatch.setattr(PartReceipts, "check", watch)


def train(
    at: Trained, name: str, home: Path | None, gate: threading.Barrier, steps: int = STEPS, check: Check = no_say
) -> None:
    """Take outer steps, together with the other peers."""
    addresses = at.addresses()
    places = {name: addresses.pop(name), **addresses} if name in addresses else addresses
    identity, site = Identity(at.swarm.run_id, "peer", name), Site(key=at.swarm.own(name)[0], check=check)
    with (
        IoThread() as io,
        connect_swarm(io, places, 1, at.credentials(name), identity, site=site, home=home) as (connection, _, _),
    ):
        (collective,) = connection.shares
        collective.join(SCHEMA, list, [Shard(fragment) for fragment in SCHEMA.fragments])
        for step in range(steps):
            gate.wait()
            for i, delta in enumerate(vectors(SIZES, 10 * step + len(name))):
                payload = encode("fp32", delta)
                collective.contribute(Contribution(outer_step=step, fragment_id=i, inner_steps=5, tokens=50, payload=payload))
            while (outcome := collective.outcome(step, block=True)) is None:
                pass
            assert isinstance(outcome, Committed), outcome


def both(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lie: Callable[[Trained], None],
    home: Path,
    asks: bool = False,
    site: Callable[[Trained, str], Check] = lambda at, name: no_say,
    names: Sequence[str] = ("b", "other"),
) -> None:
    """A member and a peer without a host train together, or one of them. site: returns what theirs say of the configuration."""
    toml = TOML.format(start=2, quorum=1) + "[membership]\nheartbeat_s = 10.0\nlease_s = 1000.0\n"
    toml += f"consent = {str(asks).lower()}\n"
    values = {key: section for key, section in tomllib.loads(toml).items() if key != "server"}
    config = RunConfig.from_mapping({**values, "audit": {"enabled": True}, "swarm": {"parts": 1}})
    home.mkdir()
    with trained(path, monkeypatch, SCHEMA, vectors(SIZES, 0), toml, config=config) as at, ThreadPoolExecutor() as pool:
        at.call(at.swarm.enrol("a", "b", "c", "other"))
        at.until(lambda: at.swarm.owner() is not None)
        lie(at)
        gate = threading.Barrier(len(names), timeout=WAIT_S)
        homes = {"b": home, "other": None}
        for done in [pool.submit(train, at, name, homes[name], gate, check=site(at, name)) for name in names]:
            done.result()
        at.until(lambda: set(at.swarm.steps().values()) == {STEPS})
        notices.extend(text for _, text in at.swarm.running["b"]._notices)


notices = list[str]()


@pytest.fixture(autouse=True)
def _fresh() -> None:
    notices.clear()


def test_all_entries_of_an_honest_owner_fit_also_that_of_the_last_outer_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(monkeypatch)
    with caplog.at_level(logging.INFO, receipts.__name__):
        both(tmp_path / "swarm", monkeypatch, lambda at: None, tmp_path / "home")
    assert watched.checked == [1, 2, 3], "of the member; the other peer has no host that it could ask"
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["receipts-part-0.jsonl"]
    assert not [text for text in notices if "outer step" in text]
    assert not [record for record in caplog.records if record.name == receipts.__name__]


def leaves_out(at: Trained, peer: str, named: str) -> None:
    """The owner merges nothing of a peer at outer step 2, and says of it what is named, or nothing."""
    owner = at.swarm.owner()
    assert owner is not None and owner.parts[0].engine is not None
    rounds, store = owner.parts[0].engine.run.rounds, owner.parts[0].replica._engine
    assert store is not None and store._entries is not None
    merge, commit = rounds._merge, store._entries.commit

    def merges(effect: events.Reduce, measured: list[Measured], injection: None) -> Any:
        lies = rounds.outer.outer_step == 1
        return merge(effect, [one for one in measured if one.peer_id != peer] if lies else measured, injection)

    def says(outer: Any, records: Any, staged: Any, contributions: Any, facts: RoundFacts) -> str:
        if outer.outer_step == 1:
            contributions = {i: [each for each in headers if each.peer_id != peer] for i, headers in contributions.items()}
            if named:
                facts = replace(facts, missing=[peer]) if named == "missing" else replace(facts, unmerged=[peer])
        return commit(outer, records, staged, contributions, facts)

    rounds._merge = merges  # type: ignore[method-assign, assignment]
    store._entries.commit = says  # type: ignore[method-assign]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("named", "why"),
    [
        ("missing", "signed that it did not come"),
        ("unmerged", "signed that it came too late to be merged"),
        ("", "neither names the contribution of this peer to round"),
    ],
)
def test_an_owner_that_leaves_a_peer_out_is_named_there_and_in_the_status_and_the_peer_trains_on(
    named: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watched, home, owner = Watched(monkeypatch), tmp_path / "home", list[str]()

    def lie(at: Trained) -> None:
        owner.append(at.swarm.record.parts[0].owner)
        leaves_out(at, "b", named)

    both(tmp_path / "swarm", monkeypatch, lie, home)
    assert watched.checked == [1, 2, 3]
    said = [record.message for record in caplog.records if record.name == receipts.__name__]
    assert len(said) == 1 and "part 0, outer step 2: " in said[0] and why in said[0] and owner[0] in said[0]
    assert [text for text in notices if why in text and owner[0] in text and text.startswith("part 0, outer step 2: ")]
    kept = fault_file(home, 0, 2)
    assert kept.exists() == (not named), "what the entry alone shows, with this peer's word, is kept"
    if not named:
        values = json.loads(kept.read_bytes())
        entry = parse_canonical(values["entry"].encode())
        assert entry["owner"] == owner[0] and entry["outer_step"] == 2 and entry["round_id"] in values["delivered"]
        (signature, *_) = values["signatures"][str(entry["round_id"])]["0"]
        assert len(base64.b64decode(signature)) == 64


# -- consents ------------------------------------------------------------------------------------------------------------------


def consenting(at: Trained, name: str) -> Check:
    """A site that has a policy, and consents."""
    data = DataStatement("notes", "", "DUA") if name == "b" else DataStatement()

    def check(text: str, config: RunConfig) -> Consent:
        key = Signer(at.swarm.own(name)[0])
        return signed_consent(at.swarm.run_id, name, config_digest(config), "5" * 64, key, data)

    return check


@pytest.mark.parametrize("asks", [False, True])
def test_the_consents_of_sites_are_in_the_log_of_every_member_once_also_where_the_run_asks_for_them(
    asks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both(tmp_path / "swarm", monkeypatch, lambda at: None, tmp_path / "home", asks, consenting)
    logs = {(tmp_path / "swarm" / name / "part-0" / "audit-log.jsonl").read_bytes() for name in "abc"}
    (log,) = logs
    verifier = LogVerifier()
    for line in log.splitlines():
        verifier.take(line)
    assert {name: each.data.statement for name, each in verifier.consents.items()} == {"b": "notes", "other": ""}
    assert sum(len(consents_named(line)) for line in log.splitlines()) == 2


def test_where_the_run_asks_for_it_nobody_counts_without_a_consent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RefusedError, match=r"its site has not consented.*membership\.consent"):
        both(tmp_path / "swarm", monkeypatch, lambda at: None, tmp_path / "home", True, names=("b",))


# -- the host ------------------------------------------------------------------------------------------------------------------


async def logged(swarm: Hosts, to: str, step: int, asks: str = "b", part: int = 0) -> LoggedEntry | grpc.StatusCode:
    async with swarm.channel(to, asks, own=True) as channel:
        stub = council_pb2_grpc.CouncilStub(channel)
        try:
            return logged_from_pb(await stub.Logged(pb.LoggedRequest(part=part, outer_step=step), timeout=WAIT_S))
        except grpc.aio.AioRpcError as error:
            return error.code()


async def doubt(swarm: Hosts, to: str, said: pb.LogDoubt, asks: str = "b") -> grpc.StatusCode:
    async with swarm.channel(to, asks, own=True) as channel:
        try:
            await council_pb2_grpc.CouncilStub(channel).Doubt(said, timeout=WAIT_S)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK


def test_a_host_says_to_its_own_peer_what_is_in_its_log_and_shows_what_that_doubts(tmp_path: Path) -> None:
    async def body() -> None:
        async with hosts(tmp_path, config=audited()) as swarm:
            await grown(swarm)
            await take_step(swarm, 1)
            await take_step(swarm, 2)
            found = await logged(swarm, "b", 2)
            assert isinstance(found, LoggedEntry) and parse_canonical(found.entry)["outer_step"] == 2
            assert found == await logged(swarm, "a", 2, "a"), "all members have the same"
            assert await logged(swarm, "b", 3) is grpc.StatusCode.FAILED_PRECONDITION, "it may come"
            assert await logged(swarm, "b", 0) is grpc.StatusCode.INVALID_ARGUMENT
            assert await logged(swarm, "b", 1, part=1) is grpc.StatusCode.INVALID_ARGUMENT
            assert await logged(swarm, "b", 2, "a") is grpc.StatusCode.PERMISSION_DENIED
            said = doubt_to_pb(LogDoubt(0, 2, "it\nlies" + "!" * 10_000))
            assert await doubt(swarm, "b", said) is grpc.StatusCode.OK
            assert [text for _, text in swarm.running["b"]._notices][-1].startswith("part 0, outer step 2: it lies!!")
            swarm.running["b"].standing().decode(swarm.running["b"].standing().encode())
            assert await doubt(swarm, "b", said, "a") is grpc.StatusCode.PERMISSION_DENIED
            assert await doubt(swarm, "b", pb.LogDoubt(part=1, outer_step=1)) is grpc.StatusCode.INVALID_ARGUMENT
            assert await doubt(swarm, "b", pb.LogDoubt(outer_step=1, reason="\n")) is grpc.StatusCode.INVALID_ARGUMENT
            await swarm.stop("b")
            await swarm.start("b")
            assert found == await logged(swarm, "b", 2), "and after a start"

    run_held(body())


def test_what_the_host_has_no_entry_of_is_not_compared_and_what_it_says_wrongly_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The updates are what another host has taken; this peer's own host has another log, none of it any more, or damage."""

    async def body() -> None:
        async with hosts(tmp_path, config=audited()) as swarm:
            await grown(swarm)
            for step in (1, 2, 3):
                await take_step(swarm, step)
            key, certificate = swarm.own("b")
            own = grpc.ssl_channel_credentials(swarm.ca, key, certificate)
            channels = PartChannels(swarm.run_id, {each: swarm.running[each].listen for each in "ba"}, 0, own)
            digest = swarm.running["b"]._config_digest
            identity = Identity(swarm.run_id, "peer", "b")
            checks = ReceiptChecks(identity, channels, digest, Signer(key), tmp_path / "b", 1)
            commits = [*swarm.running["b"]._stores[0]._updates.values()]
            assert [each.outer_step for each in commits] == [1, 2, 3]
            entry = swarm.running["b"].logged
            first, second, third = (entry(0, step) for step in (1, 2, 3))
            says = {1: first, 2: replace(third, peaks=second.peaks), 3: third}
            monkeypatch.setattr(swarm.running["b"], "logged", lambda number, step, seen: says[step])
            for commit in commits:
                checks.parts[0].took(commit)
                checks.parts[0].took(commit)
            await checks.last()
            assert checks.parts[0].checked == 2 and fault_file(tmp_path / "b", 0, 2).exists()
            (fault,) = [record.message for record in caplog.records if record.name == receipts.__name__]
            assert "outer step 2: entry 2 of the log is not the one that follows the 2 entries before it" in fault
            monkeypatch.setattr(swarm.running["b"]._stores[0].part_log, "_last", {7: (first, MerkleTree())})
            monkeypatch.setattr(swarm.running["b"], "logged", entry)
            with caplog.at_level(logging.INFO, receipts.__name__):
                checks.parts[0].took(replace(commit, outer_step=4))
                await checks.last()
            assert "outer step 4 is not compared with the audit log: part 0: the entry" in caplog.text
            assert not checks.parts[0].unchecked
            await checks._forget()

    run_held(body())


# -- what a restart knows ------------------------------------------------------------------------------------------------------


class Restarted:
    """The checks of b's peer, as often as it is started, and a host whose log may say something else."""

    def __init__(self, swarm: Hosts, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        self.swarm, self.home, self.patch, self.caplog = swarm, home, monkeypatch, caplog
        self.key, certificate = swarm.own("b")
        own = grpc.ssl_channel_credentials(swarm.ca, self.key, certificate)
        self.channels = PartChannels(swarm.run_id, {each: swarm.running[each].listen for each in "ba"}, 0, own)
        self.host = swarm.running["b"]
        self.commits = {each.outer_step: each for each in self.host._stores[0]._updates.values()}

    def opened(self, home: Path | None = None, peer_id: str = "b") -> ReceiptChecks:
        identity, signer = Identity(self.swarm.run_id, "peer", peer_id), Signer(self.swarm.own(peer_id)[0])
        return ReceiptChecks(identity, self.channels, self.host._config_digest, signer, home or self.home, 1)

    async def takes(self, *steps: int) -> list[str]:
        """Start, take these updates, and stop; return what is said to be wrong."""
        checks = self.opened()
        self.caplog.clear()
        for step in steps:
            checks.parts[0].took(self.commits[step])
            await checks.last()
        await checks._forget()
        return [each.message for each in self.caplog.records if each.name == receipts.__name__ and each.levelno >= 30]

    def rewrite(self, step: int) -> None:
        """From now on the host has a log in which the entry of this outer step was changed, and all after it signed anew."""
        tree, logged = MerkleTree(), dict[int, tuple[LoggedEntry, MerkleTree]]()
        path = self.host._stores[0].part_log._folder / "audit-log.jsonl"  # type: ignore[union-attr]
        signer = Signer(self.key)
        for index, line in enumerate(path.read_bytes().splitlines()):
            if index >= step:
                entry = {**parse_canonical(line), "root": tree.root().hex()}
                entry["time"] += index == step
                rest = {name: each for name, each in entry.items() if name not in ("key", "signature")}
                line = signed_by_owner(self.swarm.run_id, rest, signer)
            logged[index] = LoggedEntry(line, tree.peaks), tree
            tree.append(leaf_hash(line))
        self.patch.setattr(self.host._stores[0].part_log, "_last", logged)


def test_after_a_restart_a_log_that_lost_or_changed_what_the_peer_has_seen_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with hosts(tmp_path, config=audited()) as swarm:
            await grown(swarm)
            for step in (1, 2, 3, 4):
                await take_step(swarm, step)
            at = Restarted(swarm, tmp_path / "b", monkeypatch, caplog)
            path = at.home / "receipts-part-0.jsonl"
            assert await at.takes(1) == await at.takes(2) == await at.takes(2) == [], "an update may come again"
            assert len(path.read_bytes().splitlines()) == 2
            assert await at.takes(4) == [], "after a gap the host shows that its log goes on"
            kept = path.read_bytes()

            at.rewrite(2)
            (said,) = await at.takes(2)
            assert "entry 2 of the log is another one than this peer has seen before, by the entry that" in said
            assert fault_file(at.home, 0, 2).exists() and path.read_bytes() == kept
            (said,) = await at.takes(3, 4)
            assert "outer step 3: the log does not go on from the 3 entries that this peer has seen" in said
            seen = json.loads(fault_file(at.home, 0, 3).read_bytes())["seen"]
            assert seen["entries"] == 3 and seen["root"] == json.loads(kept.splitlines()[1])["root"]
            assert await at.takes(4) == [], "it was said, and the log is held to what it is now"

            path.write_bytes(b"".join(kept.splitlines(keepends=True)[:2]))  # as if it had not seen the fourth entry yet
            (said,) = await at.takes(4)
            assert "outer step 4: the log does not go on from the 3 entries that this peer has seen" in said

    run_held(body())


def test_after_a_new_key_it_goes_on_from_what_was_seen_with_the_earlier_one_which_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with hosts(tmp_path, config=audited()) as swarm:
            await grown(swarm)
            for step in (1, 2):
                await take_step(swarm, step)
            at = Restarted(swarm, tmp_path / "b", monkeypatch, caplog)
            assert await at.takes(1) == []
            first, key = (at.home / "receipts-part-0.jsonl").read_bytes(), Signer(at.key).public_key

            identity, before = Identity(swarm.run_id, "peer", "b"), swarm.keys.pop("b")
            (at.home / "peer.pem").write_bytes(before[1])
            keep_earlier(at.home, identity, at.home / "peer.pem", x509.load_pem_x509_certificate(swarm.own("b")[1]))
            mine = at.opened().parts[0].mine
            assert mine.has(key) and mine.public_key != key
            assert await at.takes(2) == []
            assert (at.home / "receipts-part-0.jsonl").read_bytes().startswith(first)
            kept = at.opened().parts[0].kept
            assert kept.at(1) is not None and kept.at(2) is not None

    run_held(body())


def test_after_a_snapshot_of_its_host_any_other_member_shows_that_the_log_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with hosts(tmp_path, config=audited()) as swarm:
            await grown(swarm)
            for step in (1, 2, 3, 4):
                await take_step(swarm, step)
            at = Restarted(swarm, tmp_path / "b", monkeypatch, caplog)
            path = at.home / "receipts-part-0.jsonl"
            assert await at.takes(1) == []
            kept, entry = path.read_bytes(), at.host.logged
            monkeypatch.setattr(at.host, "logged", lambda number, step, seen: entry(number, step))  # its log begins later
            assert await at.takes(4) == [], "the other member has shown it"

            why = "nobody could show that it goes on from the 2 entries that this peer has seen"
            lies = [lambda number, old, new: (bytes(32),) * 2, lambda number, old, new: ()]
            for lie in lies:
                path.write_bytes(kept)
                monkeypatch.setattr(swarm.running["a"], "goes_on", lie)
                (said,) = await at.takes(4)
                assert said == f"the audit log of part 0, outer step 4: {why}" and why in at.host._notices[-1][1]
                assert len(path.read_bytes().splitlines()) == 2 and not fault_file(at.home, 0, 4).exists()

            async with swarm.channel("c", "b", own=True) as channel:
                stub = council_pb2_grpc.CouncilStub(channel)
                for request, code in (
                    (pb.GoesOnRequest(old=2, new=4), None),
                    (pb.GoesOnRequest(old=2, new=9), grpc.StatusCode.NOT_FOUND),
                    (pb.GoesOnRequest(old=5, new=4), grpc.StatusCode.INVALID_ARGUMENT),
                    (pb.GoesOnRequest(old=2, new=4, part=1), grpc.StatusCode.INVALID_ARGUMENT),
                ):
                    try:
                        assert len(goes_on_from_pb(await stub.GoesOn(request, timeout=WAIT_S))) and code is None
                    except grpc.aio.AioRpcError as error:
                        assert error.code() is code, error

    run_held(body())


def test_a_torn_line_is_passed_over_and_a_file_that_is_damaged_or_anothers_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with hosts(tmp_path, config=audited()) as swarm:
            await grown(swarm)
            for step in (1, 2, 3):
                await take_step(swarm, step)
            at = Restarted(swarm, tmp_path / "b", monkeypatch, caplog)
            assert await at.takes(1, 2) == []
            path = at.home / "receipts-part-0.jsonl"
            first, second = path.read_bytes().splitlines(keepends=True)

            path.write_bytes(first + second[:-7])  # killed while it wrote
            assert await at.takes(3) == []
            steps = [json.loads(line)["outer_step"] for line in path.read_bytes().splitlines()]
            assert steps == [1, 3], "the torn line is gone, and the log was shown to go on from the first"

            path.write_bytes(first.replace(b'"leaf":"', b'"leaf":"0', 1))
            with pytest.raises(ConfigError, match=r"receipts-part-0\.jsonl: line 1 cannot be used: .*restore it from a copy"):
                at.opened()
            path.write_bytes(first)
            other = tmp_path / "a"
            (other / path.name).write_bytes(first)
            with pytest.raises(ConfigError, match=r"line 1 cannot be used: b has seen it, of part 0 .*; this is a, part 0"):
                at.opened(other, "a")
            assert (other / path.name).read_bytes() == first, "nothing is lost"

    run_held(body())


def test_of_many_entries_the_last_ones_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen_log, "MOST_SEEN", 4)
    identity, signer = Identity("run", "peer", "b"), Signer(member_key())
    log = SeenLog.open(tmp_path, 0, identity, signer)
    seen = [SeenEntry(step, bytes([step] * 32), bytes([step + 1] * 32)) for step in range(1, 8)]
    for each in seen:
        log.add(each)
        asyncio.run(log.save())
    assert log.newest == seen[-1] and log.at(4) == seen[3] and log.at(3) is None
    again = SeenLog.open(tmp_path, 0, identity, signer)
    assert again.newest == seen[-1] and again.before(7) == seen[5] and again.at(1) is None
    assert len((tmp_path / "receipts-part-0.jsonl").read_bytes().splitlines()) <= 4
