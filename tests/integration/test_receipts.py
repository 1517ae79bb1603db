"""Receipts of the audit log between real peers and a real coordinator: an honest run goes on, a lie ends a peer's part."""

from __future__ import annotations

import asyncio
import copy
import json
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
import pytest
import torch
from cryptography import x509
from torch import nn

from aggregator.control.status import run_status
from aggregator.services.data import DataService
from aggregator.storage.audit_log import AuditLog
from aggregator.storage.cosignatures import note_files
from aggregator.storage.state_folder import StateFolder
from edit import EditWorker, WorkerConfig
from edit.errors import RefusedError
from edit.records import Commit, Committed
from edit.replica.ranks import Ranks
from edit.trust.checkpoints import Cosigner, LogSigner, NoteKey, open_note, parse_checkpoint, signature_of
from edit.trust.signatures import Signer, key_hash
from editpb.audit_log import LogVerifier
from editpb.control_messages import peer_message_to_pb
from editpb.earlier_keys import keep_earlier
from editpb.identity import Identity
from editpb.invitation import Invitation
from editpb.messages import Cosignature, Heartbeat, LogReceipt, PeerState, SeenHead
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.collective import HubCollective
from peers.carriers.hub.control_stream import Attendance
from peers.carriers.hub.kept_receipts import FAULT, KEY, verify_kept
from peers.carriers.hub.masking import MaskFolder
from peers.carriers.hub.site import Site
from peers.carriers.io_thread import IoThread
from peers.connection import connect
from tests.integration.test_audit import AUDITED
from tests.integration.test_readme import run
from tests.integration.test_receipt_lies import contribute
from tests.support import two_ranks
from tests.support.fake_run import vectors
from tests.support.keys import member_key
from tests.support.learner import Learner
from tests.support.running import Running, address, enter_together, running
from tests.support.served import found_run, new_folder, served
from tests.support.thread_ranks import at_every_rank

EVERY = 2
TOML = """
name = "receipts"
[model]
name = "entry:mine"
[sync]
every = 2
outer_steps = {steps}
{sync}
[rounds]
start_peers = {peers}
quorum = {peers}
{rounds}
[audit]
enabled = true
[server]
listen = "127.0.0.1:0"
enrol_listen = "127.0.0.1:0"
{more}
"""


def toml(steps: int = 3, sync: str = "", peers: int = 2, more: str = "", rounds: str = "") -> str:
    return TOML.format(steps=steps, sync=sync, peers=peers, more=more, rounds=rounds)


@dataclass
class Member(Learner):
    """A peer with a folder, and a key in it."""

    home: Path = field(kw_only=True)

    @property
    def fault(self) -> str:
        """What its folder says did not fit; ''."""
        path = self.home / FAULT
        return str(json.loads(path.read_text())["fault"]) if path.exists() else ""


@contextmanager
def members(
    folder: StateFolder,
    here: Running,
    homes: Path,
    names: str = "ab",
    *,
    known: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType({}),
    resumed: Mapping[str, tuple[dict[str, Any], ...]] = MappingProxyType({}),
) -> Iterator[dict[str, Member]]:
    """Peers that attend, each with the home of its name; those that were there before have the same key.

    known: the keys of members that each of them knows. resumed: `saved` of those that go on from there.
    """
    settings = folder.config()
    with ExitStack() as stack:
        io = stack.enter_context(IoThread())
        found = {}
        for name in names:
            home = homes / name
            home.mkdir(exist_ok=True)
            if not (home / "peer.key").exists():
                for file, data in zip(("peer.key", "peer.pem"), here.served.certificate(name), strict=True):
                    (home / file).write_bytes(data)
            key, certificate = ((home / file).read_bytes() for file in ("peer.key", "peer.pem"))
            credentials = grpc.ssl_channel_credentials(here.served.ca, key, certificate)
            channels = Channels([address(folder)], credentials)
            masks, identity = MaskFolder(home / "revealed.json", known.get(name)), Identity(folder.run_id, "peer", name)
            hub = HubCollective(io, channels, identity, site=Site(key=key, masks=masks, receipts=home))
            stack.callback(hub.close)
            one = found[name] = Member(name, hub, settings, home=home)
            for each, state in zip(has_state(one), resumed.get(name, ()), strict=False):
                each.load_state_dict(state)
        enter_together(stack, [one.worker for one in found.values()])
        yield found


def has_state(member: Member) -> tuple[Any, ...]:
    """What a member resumes from."""
    return member.worker, member.model, member.optimizer


def saved(member: Member) -> tuple[dict[str, Any], ...]:
    return tuple(copy.deepcopy(each.state_dict()) for each in has_state(member))


def vouched(member: Member) -> Cosignature | None:
    """What a member cosigns once all that it took is on its disk; asked on the loop's thread, where its heartbeats ask."""
    hub = member.collective
    assert isinstance(hub, HubCollective) and hub._receipts is not None
    receipts = hub._receipts

    async def ask() -> Cosignature | None:
        await receipts.save()
        return receipts.cosigned()

    return hub._io.call(ask())


def exchange(members: Mapping[str, Member]) -> None:
    """One exchange of all, who wait for its outcome."""
    for _ in range(EVERY):
        for one in members.values():
            one.step()
    for one in members.values():
        one.worker.synchronize()


def log_of(folder: StateFolder) -> LogVerifier:
    log = LogVerifier()
    for line in (folder.path / "audit-log.jsonl").read_bytes().splitlines():
        log.take(line)
    log.check_head((folder.path / "audit-log.head").read_bytes())
    return log


@pytest.mark.parametrize(
    ("sync", "rounds"),
    [
        ("", ""),
        ('mode = "forward"', ""),
        ('mode = "delayed"\ndelay = 1', ""),
        ("groups = 2", ""),
        ("", "max_staleness = 1"),
    ],
)
def test_an_honest_run_goes_on(tmp_path: Path, sync: str, rounds: str) -> None:
    folder = new_folder(tmp_path / "run", toml=toml(3, sync, rounds=rounds))
    with running(folder) as here, members(folder, here, tmp_path) as two:
        for _ in range(3):
            exchange(two)
        assert {one.worker.outer_step for one in two.values()} == {3}
    log = log_of(folder)
    assert log.key is not None
    for one in two.values():
        found = verify_kept(one.home)
        assert (found.receipts, found.first_step, found.last_step) == (3, 1, 3)
        assert found.head.root == log.tree.root(found.head.size) and found.key == log.key
        assert (one.home / KEY).read_text().strip() == log.key.text()
    lines = [json.loads(line) for line in (folder.path / "audit-log.jsonl").read_bytes().splitlines()]
    seen = [
        [len(given.get("seen", ())) for given in line["contributions"].values()] for line in lines if line["kind"] == "commit"
    ]
    assert seen == [[0, 0], [1, 1], [1, 1]]


@pytest.mark.parametrize("said", ["in its folder", "by its operator", ""])
def test_updates_with_what_a_member_signed_before_it_got_a_new_key_are_taken(tmp_path: Path, said: str) -> None:
    """Its checkpoint and another member's are from before. Unless it is known that the key was its own, that is a fault."""
    folder = new_folder(tmp_path / "run", toml=toml(4, "strict = true", more="[storage]\nkeep_updates = 5\n"))
    home, identity = tmp_path / "b", Identity(folder.run_id, "peer", "b")

    def key() -> str:
        return key_hash(Signer((home / "peer.key").read_bytes()).public_key)

    with running(folder) as here, ExitStack() as left:
        with members(folder, here, tmp_path) as two:
            exchange(two)
            states = {name: saved(one) for name, one in two.items()}
            exchange(two)
        before = key()
        new = here.served.certificate("b", anew=True)
        if said == "in its folder":
            keep_earlier(home, identity, home / "peer.pem", x509.load_pem_x509_certificate(new[1]))
        for file, data in zip(("peer.key", "peer.pem"), new, strict=True):
            (home / file).write_bytes(data)
        here.tell(lambda run: run.end_replaced())
        known = {"a": {"b": (before, key()) if said else (key(),)}}
        if said == "by its operator":
            known["b"] = known["a"]
        if not said:
            left.enter_context(pytest.raises(RefusedError, match="the log names another key"))
        two = left.enter_context(members(folder, here, tmp_path, known=known, resumed=states))
        assert {one.worker.outer_step for one in two.values()} == {1}
        exchange(two)
        exchange(two)
        assert {one.worker.outer_step for one in two.values()} == {3}
        assert [one.fault for one in two.values()] == ["", ""]


def test_masked_contributions_have_receipts(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=toml(2, peers=3, more="[secagg]\nenabled = true\n"))
    with running(folder) as here, members(folder, here, tmp_path, "abc") as three:
        for _ in range(2):
            exchange(three)
        held = [one.collective._receipts.mine.masks for one in three.values()]  # type: ignore[union-attr]
    assert [verify_kept(tmp_path / name).receipts for name in "abc"] == [2, 2, 2]
    log, everybody = log_of(folder), frozenset("abc")
    assert (log.commits, log.confirmed, log.unconfirmed) == (2, 2, 0)
    entries = [json.loads(line) for line in (folder.path / "audit-log.jsonl").read_bytes().splitlines()]
    for entry in entries[1:]:
        for masks in held:  # what each of them has seen is what its receipts were held to
            seen = masks[entry["round_id"]]
            assert (seen.roster.hex(), seen.agreed) == (entry["secagg"]["hash"], (everybody, everybody))


def test_a_peer_and_a_coordinator_that_start_anew_go_on_from_what_they_know(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=toml(50))
    with running(folder) as here:
        with members(folder, here, tmp_path) as two:
            exchange(two)
        with members(folder, here, tmp_path) as two:
            exchange(two)
    with running(folder) as here, members(folder, here, tmp_path) as two:
        assert {one.collective._receipts.head.size for one in two.values()} == {3}  # type: ignore[union-attr]
        exchange(two)
        assert {one.worker.outer_step for one in two.values()} == {3}
    log = log_of(folder)
    assert [verify_kept(tmp_path / name).head.root for name in "ab"] == [log.tree.root()] * 2
    assert [verify_kept(tmp_path / name).receipts for name in "ab"] == [3, 3]


def test_who_joins_late_checks_the_log_from_there_on(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=toml(50, peers=1))
    with running(folder) as here:
        with members(folder, here, tmp_path, "a") as one:
            for _ in range(2):
                exchange(one)
        with members(folder, here, tmp_path, "b") as other:
            exchange(other)
    found = verify_kept(tmp_path / "b")
    assert (found.receipts, found.first_step, found.head.size) == (1, 3, 4)


def test_an_invitation_brings_the_logs_key_and_another_one_is_refused(tmp_path: Path) -> None:
    folder, home = new_folder(tmp_path / "run", toml=toml(50, peers=1)), tmp_path / "a"
    with running(folder):
        invitation = run(["edit-coordinator", "invite", "a", "--state", str(folder.path)]).splitlines()[0]
        run(["edit-peer", "join", invitation, "--home", str(home)])
        key = (home / KEY).read_text().strip()
        assert (
            key
            == Invitation.decode(invitation).log_key
            == LogSigner(f"edit/{folder.run_id}", (folder.path / "log.key").read_bytes()).key.text()
        )
        with connect(home) as (collective, config):
            model = nn.Linear(4, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with EditWorker(model, optimizer, collective, WorkerConfig.of(config)) as worker:
                while worker.outer_step < 1:
                    model(torch.ones(4)).sum().backward()
                    optimizer.step()
        assert "1 receipts, outer steps 1 to 1: verified" in run(["edit-peer", "audit", "verify", "--home", str(home)])
        other = LogSigner(f"edit/{folder.run_id}", LogSigner.new_key()).key.text()
        (home / KEY).write_text(other)
        with (
            pytest.raises(RefusedError, match=r"log\.vkey: this peer knows another key of the run's audit log"),
            connect(home) as (collective, config),
            EditWorker(model, optimizer, collective, WorkerConfig.of(config)),
        ):
            pass


def test_peers_that_train_refuse_a_log_with_another_key_once_they_are_connected_again(tmp_path: Path) -> None:
    """A lost log was begun anew meanwhile."""
    folder = new_folder(tmp_path / "run", toml=toml(50))
    with ExitStack() as stack:
        with running(folder) as here:
            two = stack.enter_context(members(folder, here, tmp_path))
            exchange(two)
        for path in (*folder.path.glob("audit-log.*"), folder.path / "log.key"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        stack.enter_context(running(folder))
        with pytest.raises(RefusedError, match=r"log\.vkey: this peer knows another key of the run's audit log"):
            exchange(two)
        with pytest.raises(RefusedError, match=r"log\.vkey: this peer knows another key of the run's audit log"):
            stack.close()


def test_a_peer_of_two_ranks_checks_receipts_at_its_first_and_stops_at_both(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=AUDITED)
    home, gate = tmp_path / "a", threading.Barrier(2, timeout=30)
    home.mkdir()
    with running(folder) as here:
        key, certificate = here.served.certificate("a")
        credentials = grpc.ssl_channel_credentials(here.served.ca, key, certificate)

        def one(ranks: Ranks) -> str:
            with IoThread() as io:
                channels, identity = Channels([address(folder)], credentials), Identity(folder.run_id, "peer", "a")
                hub = HubCollective(io, channels, identity, ranks=ranks, site=Site(key=key, receipts=home))
                rank = two_ranks.Rank(ranks, io, hub, two_ranks.shards(ranks.rank), gate)
                try:
                    rank.join()
                    for step in range(2):
                        rank.contribute(vectors(two_ranks.SIZES, step + 1), step)
                        assert isinstance(hub.outcome(step, block=True), Committed)
                    rank.only(0, lambda: setattr(hub._receipts, "position", (2, "0" * 64)))
                    rank.contribute(vectors(two_ranks.SIZES, 3), 2)
                    with pytest.raises(RefusedError) as error:
                        hub.outcome(2, block=True)
                    return str(error.value)
                finally:
                    hub.close()

        said = at_every_rank(2, one)
    assert said[0] == said[1] and "theta before outer step 3 has the digest" in said[0]
    assert (home / FAULT).exists() and log_of(folder).commits == 3
    entry = json.loads((folder.path / "audit-log.jsonl").read_bytes().splitlines()[-1])
    heads = {(values[1], type(values[-1]) is int) for values in entry["contributions"]["a"]["parts"]}
    assert heads == {(0, True), (1, False)}  # rank 0 has seen the log


def cosigned(folder: StateFolder) -> dict[int, tuple[str, ...]]:
    """By size, who has cosigned a head that is on the coordinator's disk; each note is verified with the log."""
    log = log_of(folder)
    paths = note_files(folder.path / "audit-log.cosigned").values()
    return dict(log.check_cosigned(path.read_bytes()) for path in paths)


def test_members_cosign_the_heads_that_they_have_seen_up_to_the_last_one(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=toml(50))
    with running(folder) as here:
        with members(folder, here, tmp_path) as two:
            for _ in range(2):
                exchange(two)
        here.await_(lambda _: cosigned(folder).get(3) == ("a", "b"))  # also where they have said it on leaving only
    note = (folder.path / "audit-log.cosigned" / "3.note").read_bytes()
    with running(folder) as here:
        with members(folder, here, tmp_path) as two:  # they say the last head again, which is no news
            assert {one.head.size for one in map(vouched, two.values()) if one} == {3}
            exchange(two)
        here.await_(lambda _: cosigned(folder).get(4) == ("a", "b"))
    assert (folder.path / "audit-log.cosigned" / "3.note").read_bytes() == note
    said = run(["edit-coordinator", "audit", "verify", "--state", str(folder.path)])
    assert "cosigned    4 entries, by 2 members: a, b" in said


def test_the_last_head_is_cosigned_on_leaving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seldom = "[membership]\nheartbeat_s = 600.0\nlease_s = 1200.0\n"
    folder = new_folder(tmp_path / "run", toml=toml(50, more=seldom))
    with running(folder) as here:
        with members(folder, here, tmp_path) as two:
            monkeypatch.setattr(Attendance, "nudge", lambda self: None)  # no heartbeat from here on
            exchange(two)
        here.await_(lambda _: cosigned(folder) == {2: ("a", "b")})


def test_nobody_cosigns_where_the_run_does_not_ask_for_it(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=toml(50).replace("[audit]\n", "[audit]\ncosign = false\n"))
    with running(folder) as here, members(folder, here, tmp_path) as two:
        exchange(two)
    assert cosigned(folder) == {}


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("signature", "the signature of a under the head of 2 entries is not of its text"),
        ("head", "a cosigns a head of the audit log that is not signed with its key"),
    ],
)
def test_a_bad_cosignature_ends_the_stream_with_one_line(tmp_path: Path, wrong: str, why: str) -> None:
    folder = new_folder(tmp_path / "run", toml=AUDITED)

    async def scenario() -> None:
        async with served(folder) as here, here.signing_peer("a") as (a, sign):
            await found_run(a)
            await contribute(a, sign, (await a.view(lambda v: v.round_id > 0)).round_id, 0)
            await a.view(lambda v: v.outer_step == 1)
            note = (folder.path / "audit-log.head").read_bytes()
            text, _ = open_note(note, [NoteKey.parse(here.coordinator.run.log_key)])
            head = parse_checkpoint(text)
            root = bytes(32) if wrong == "head" else head.root
            seen = SeenHead(head.size, root, signature_of(note, NoteKey.parse(here.coordinator.run.log_key)))
            bad = Cosignature(seen, Cosigner(member_key()).sign(text))
            beat = Heartbeat(state=PeerState.TRAINING, outer_step=1, cosigned=bad)
            await a._call.write(peer_message_to_pb(beat))
            assert await a._call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert why in await a._call.details()

    asyncio.run(scenario())
    assert cosigned(folder) == {}


# ---- a coordinator that lies -----------------------------------------------------------------------------------------------


def copied(folder: StateFolder, target: Path) -> None:
    """A copy of a coordinator's folder, as a backup has it; without files that are being written."""
    shutil.copytree(folder.path, target, ignore=shutil.ignore_patterns(".*.tmp"))


def test_a_coordinator_with_an_old_copy_of_its_folder_is_found(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=toml(50))
    with running(folder) as here, members(folder, here, tmp_path) as two:
        exchange(two)
    copied(folder, tmp_path / "copy")
    with running(folder) as here, members(folder, here, tmp_path) as two:
        exchange(two)
    shutil.rmtree(folder.path)
    shutil.move(tmp_path / "copy", folder.path)
    why = "the log has 2 entries now, this peer has seen 3: entries were removed"
    left = pytest.raises(RefusedError, match=why)  # leaving asks once more, and is told the same
    with running(folder) as here, left, members(folder, here, tmp_path) as two:
        for _ in range(EVERY):
            for one in two.values():
                one.step()
        for one in two.values():
            with pytest.raises(RefusedError, match=why):
                one.worker.synchronize()
    for one in two.values():
        evidence = json.loads((one.home / FAULT).read_text())
        key = NoteKey.parse(evidence["key"])
        heads = [evidence["seen"]["note"], evidence["came"]["checkpoint"]]
        assert [parse_checkpoint(open_note(note, [key])[0]).size for note in heads] == [3, 2] and one.fault == why
    assert [warning.partition(":")[0] for warning in sorted(run_status(here.run).warnings)] == [
        f"{name} has seen 3 entries of the audit log, which has 2" for name in sorted(two)
    ]


class Forked:
    """An audit log that shows one peer entries of its own: the same commits, and another text in each."""

    def __init__(self, log: AuditLog, other: AuditLog, peer_id: str) -> None:
        self._log, self._other, self._peer_id = log, other, peer_id

    def __getattr__(self, name: str) -> object:
        return getattr(self._log, name)

    def __len__(self) -> int:
        return len(self._log)

    def commit(self, *args: Any) -> str:
        *merged, facts = args
        self._entry = self._other.commit(*merged, replace(facts, reason="another"))
        return self._log.commit(*args)

    def append(self, entry: str, commit: Commit) -> None:
        self._log.append(entry, commit)
        self._other.append(self._entry, commit)

    def receipt(self, outer_step: int, seen_size: int) -> LogReceipt:
        return (self._other if asking.get() == self._peer_id else self._log).receipt(outer_step, seen_size)

    def misfit(self, seen: SeenHead) -> tuple[str, bool]:
        return "", True


asking: ContextVar[str] = ContextVar("asking", default="")


@pytest.fixture
def known_asker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coordinators that start from now on know in `asking` who fetches an update."""
    fetch = DataService.FetchUpdate

    async def fetch_update(self: DataService, request: object, context: Any) -> None:
        asking.set(self._authorizer.authorize(context, "peer").peer_id)
        await fetch(self, request, context)  # type: ignore[arg-type]

    monkeypatch.setattr(DataService, "FetchUpdate", fetch_update)


def fork(here: Running, folder: StateFolder, peer_id: str) -> None:
    """From now on show this peer another log, with the same beginning and the same key."""
    copied(folder, folder.path.with_name("other"))
    other = AuditLog.open(folder.path.with_name("other"), folder.run_id, folder.config(), time.time)
    other.attach((), here.run.rounds.outer)
    store = here.run.rounds._store
    here.tell(lambda _: setattr(store, "audit", Forked(store.audit, other, peer_id)))  # type: ignore[arg-type]


@pytest.mark.usefixtures("known_asker")
def test_a_forked_coordinator_is_found_by_both_sides_within_one_outer_step(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=toml(50))
    left = pytest.raises(RefusedError, match="has seen another log")  # leaving asks once more, and is told the same
    with running(folder) as here, left, members(folder, here, tmp_path) as two:
        exchange(two)
        fork(here, folder, "b")
        exchange(two)  # from here on the two have seen different logs
        sizes = {name: one.collective._receipts.head for name, one in two.items()}  # type: ignore[union-attr]
        assert sizes["a"].size == sizes["b"].size == 3 and sizes["a"].root != sizes["b"].root
        said = {name: vouched(one) for name, one in two.items()}
        for _ in range(EVERY):
            for one in two.values():
                one.step()
        for name, other in ("ab", "ba"):
            with pytest.raises(RefusedError, match=f"{other} has seen another log of 3 entries"):
                two[name].worker.synchronize()
            assert two[name].fault.startswith(f"{other} has seen another log of 3 entries")
            evidence = json.loads((two[name].home / FAULT).read_text())
            assert parse_checkpoint(open_note(evidence["seen"]["note"], [NoteKey.parse(evidence["key"])])[0]).size == 3
            assert other in json.loads(evidence["came"]["entry"])["contributions"]
            assert vouched(two[name]) == said[name]  # nothing of the other log is ever cosigned, nor anything after it
    with running(folder) as here, pytest.raises(RefusedError, match="did not fit, so this peer does not take part"):  # noqa: SIM117
        with members(folder, here, tmp_path, "a"):
            pass


@pytest.mark.usefixtures("known_asker")
def test_a_fork_is_found_by_peers_that_started_anew_after_it(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=toml(50))
    left = pytest.raises(RefusedError, match="has seen another log")
    with running(folder) as here:
        with members(folder, here, tmp_path) as two:
            exchange(two)
            fork(here, folder, "b")
            exchange(two)
        with left, members(folder, here, tmp_path) as two:  # leaving asks once more, and is told the same
            for _ in range(EVERY):
                for one in two.values():
                    one.step()
            for name, other in ("ab", "ba"):
                with pytest.raises(RefusedError, match=f"{other} has seen another log of 3 entries"):
                    two[name].worker.synchronize()
                assert two[name].fault.startswith(f"{other} has seen another log of 3 entries")
