"""The audit log on disk: whatever moment the process is killed at, log and journal say the same after the next start."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from aggregator.cli import app
from aggregator.provenance import PAYLOAD_TYPE
from aggregator.storage import audit_log, checkpoint
from aggregator.storage.audit_log import AuditLog
from aggregator.storage.journal import Disk, Journal, replay_segments
from aggregator.storage.journal_records import records
from aggregator.storage.store import Store
from edit.config.audit import AuditConfig
from edit.config.gaussian import gaussian_epsilon
from edit.config.run import CodecConfig, OuterConfig, PenaltyConfig, PrivacyConfig, RunConfig, StorageConfig
from edit.durable_files import write_atomic
from edit.errors import ConfigError, RefusedError, StorageError
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.merging.merge import Measured, measure
from edit.merging.outer_state import OuterState
from edit.trust.canonical import canonical
from edit.trust.checkpoints import Cosigner, NoteKey, signature_line
from edit.trust.envelopes import open_envelope
from edit.trust.merkle import MerkleTree, leaf_hash
from edit.trust.signatures import Signer, key_hash
from editpb.audit_log import LogFault, LogVerifier, RoundFacts, completed, continued_entry
from editpb.consents import signed_consent
from editpb.messages import Approval, Consent, ContributionHeader, DataStatement, ScoreReport
from editpb.signed_contributions import ContributionSigner, config_digest
from tests.support.encoded import encode
from tests.support.keys import member_key
from tests.support.served import FillableDisk

SCHEMA = Schema(
    tuple(
        FragmentSpec(fragment_id=i, name=f"layer{i}", tensors=(TensorSpec(name=f"layer{i}.weight", shape=(n,)),))
        for i, n in enumerate((5, 70))
    )
)
CONFIG = RunConfig(
    outer=OuterConfig(optimizer="nesterov"),
    codec=CodecConfig(up="fp32", down="int8"),
    storage=StorageConfig(checkpoint_every=100),
    audit=AuditConfig(enabled=True),
)
PEER = member_key()
SIGN = ContributionSigner(PEER, CONFIG)


class Killed(BaseException):
    """The process ends here: nothing after it is run."""


class MortalDisk:
    """Kills the process at a write or an fsync: before it, in the middle of it, or after it."""

    def __init__(self, calls: int, how: str) -> None:
        self.left, self.how = calls, how

    def _dies(self) -> bool:
        self.left -= 1
        return self.left < 0

    def write(self, descriptor: int, data: memoryview) -> int:
        if not self._dies():
            return os.write(descriptor, data)
        if self.how != "before":
            os.write(descriptor, data[: len(data) // 2] if self.how == "middle" else data)
        raise Killed

    def fsync(self, descriptor: int) -> None:
        dies = self._dies()
        if not dies or self.how == "after":
            os.fsync(descriptor)
        if dies:
            raise Killed


def opened(folder: Path, disk: Disk | None = None, config: RunConfig = CONFIG) -> Store:
    audit = AuditLog.open(folder, "run", config, lambda: 1.7e9, disk)
    return Store(folder / "outer", config, "run", disk, audit=audit)


def founded(store: Store) -> OuterState:
    generator = torch.Generator().manual_seed(0)
    outer = OuterState(SCHEMA, CONFIG, [torch.randn(f.numel, generator=generator) for f in SCHEMA.fragments])
    store.found(outer)
    return outer


def append(
    store: Store, outer: OuterState, round_id: int, privacy: Mapping[str, object] | None = None, scale: float = 0.1
) -> None:
    """What the round runner does with one round. scale: of the contribution."""
    assert store.audit is not None
    generator = torch.Generator().manual_seed(round_id)
    records, signed = [], {}
    for fragment in SCHEMA.fragments:
        payload = encode("fp32", scale * torch.randn(fragment.numel, generator=generator))
        records.append(outer.record(outer.reduce(fragment.fragment_id, [Measured("a", 2, 10, measure(payload), payload)])))
        store.begin_fragment(round_id, records[-1]).result()
        header = ContributionHeader(
            run_id="run",
            round_id=round_id,
            outer_step=outer.outer_step,
            peer_id="a",
            fragment_id=fragment.fragment_id,
            schema_hash=SCHEMA.schema_hash,
            inner_steps=2,
            tokens=10,
            codec="fp32",
            numel=fragment.numel,
            total_bytes=4 * fragment.numel,
        )
        signed[fragment.fragment_id] = (SIGN(header, memoryview(payload.data)),)
    step = outer.outer_step + 1
    entry = store.audit.commit(
        outer,
        records,
        None,
        signed,
        RoundFacts(round_id=round_id, outer_step=step, reason="all in", privacy=privacy),
    )
    store.append_commit(round_id, step, "all in", 10, base=outer.digest, audit=entry)
    store.applied(outer.commit(round_id, "all in", records))


def log_of(folder: Path) -> tuple[LogVerifier, list[tuple[int, str]]]:
    """The verified log, and its commits: outer step, and the line."""
    log, commits = LogVerifier(), []
    for line in (folder / "audit-log.jsonl").read_bytes().splitlines():
        if (entry := log.take(line))["kind"] == "commit":
            commits.append((entry["outer_step"], line.decode()))
    assert log.check_head((folder / "audit-log.head").read_bytes()) == len(log.tree)
    return log, commits


def said(peer_id: str, policy: str = "", key: bytes = PEER) -> Consent:
    return signed_consent("run", peer_id, config_digest(CONFIG), policy, Signer(key))


def test_consents_are_in_the_log_once_over_restarts_and_before_the_run_is_founded(tmp_path: Path) -> None:
    store = opened(tmp_path)
    assert store.audit is not None
    store.audit.consent("a", said("a"))
    outer = founded(store)
    append(store, outer, 1)
    for _ in range(2):
        store.audit.consent("a", said("a"))
        store.audit.consent("b", said("b", "c" * 64))
    append(store, outer, 2)
    store.close()
    store = opened(tmp_path)
    outer = store.recover()
    assert outer is not None and store.audit is not None
    store.audit.consent("b", said("b", "c" * 64))
    store.audit.consent("b", said("b", "d" * 64))
    append(store, outer, 3)
    store.close()
    log, commits = log_of(tmp_path)
    assert [step for step, _ in commits] == [1, 2, 3] and len(log.tree) == 1 + 3 + 3
    assert log.consents == {"a": said_in(log, "a", ""), "b": said_in(log, "b", "d" * 64)}
    assert {*log.confirmed_consents} == {"a"} and {*log.doubtful_consents} == {"b"}, "b has not contributed"


def said_in(log: LogVerifier, peer_id: str, policy: str) -> Consent:
    found = log.consents[peer_id]
    assert (found.config_digest, found.policy_digest) == (config_digest(CONFIG), policy)
    return found


def test_one_member_cannot_fill_the_log_with_consents(tmp_path: Path) -> None:
    store = opened(tmp_path)
    founded(store)
    assert store.audit is not None
    for number in range(100):
        store.audit.consent("a", said("a", f"{number:064x}"))
    store.audit.consent("b", said("b"))
    store.close()
    assert len(log_of(tmp_path)[0].tree) == 1 + 16 + 1


def test_a_consent_that_is_not_signed_as_it_says_is_found(tmp_path: Path) -> None:
    store = opened(tmp_path)
    founded(store)
    assert store.audit is not None
    store.audit.consent("a", said("b"))
    store.close()
    with pytest.raises(LogFault, match=r"entry 1: .*the consent of a is not signed with the key that it names"):
        log_of(tmp_path)


def test_what_a_site_says_of_its_data_is_signed(tmp_path: Path) -> None:
    store = opened(tmp_path)
    founded(store)
    assert store.audit is not None
    data = DataStatement("notes", "c" * 64, "DUA-17")
    signed = signed_consent("run", "a", config_digest(CONFIG), "", Signer(PEER), data)
    store.audit.consent("a", signed)
    store.audit.consent("b", replace(said("b"), data=data))
    store.close()
    log = LogVerifier()
    lines = (tmp_path / "audit-log.jsonl").read_bytes().splitlines()
    for line in lines[:2]:
        log.take(line)
    assert log.consents == {"a": signed}
    with pytest.raises(LogFault, match=r"entry 2: .*the consent of b is not signed with the key that it names"):
        log.take(lines[2])


def test_a_consent_by_a_key_that_has_signed_no_contribution_is_not_shown_as_the_sites(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A coordinator can make up a key, and what a site says of its data."""
    store = opened(tmp_path)
    assert store.audit is not None
    other = Signer(member_key())
    made_up = DataStatement("all have agreed", "c" * 64, "DUA-17")
    store.audit.consent("a", signed_consent("run", "a", config_digest(CONFIG), "", other, made_up))
    append(store, founded(store), 1)
    store.close()

    def command(*words: str) -> str:
        result = CliRunner().invoke(app, ["audit", *words, "--state", str(tmp_path)])
        assert result.exit_code == 0, result.output
        return " ".join(result.output.split())

    told = f"the consent of a, by a key that has signed no contribution of it: sha256:{key_hash(other.public_key)}"
    assert f"doubtful {told}" in command("verify") and f"doubtful: {told}" in command("usage")
    assert json.loads(command("verify", "--json"))["doubtful_consents"] == {"a": key_hash(other.public_key)}
    said = json.loads(command("usage", "--json"))["a"]
    assert (said["consented"], said["data"], said["doubtful_consent"]) == (False, None, key_hash(other.public_key))
    assert "all have agreed" not in command("usage")
    command("card", str(tmp_path / "card.md"))
    card = (tmp_path / "card.md").read_text()
    assert "| doubtful |  |" in card and "Doubtful: a consent by a key" in card and "agreed" not in card
    out = tmp_path_factory.mktemp("out")
    command("export", str(out), "--provenance")
    (log, _), envelope = log_of(tmp_path), (out / "provenance.json").read_bytes()
    assert log.key is not None
    statement = json.loads(open_envelope(envelope, PAYLOAD_TYPE, log.key))
    assert statement["predicate"]["buildDefinition"]["resolvedDependencies"] == []


def test_only_who_has_contributed_with_a_key_counts_as_cosigner(tmp_path: Path) -> None:
    store, other = opened(tmp_path), member_key()
    assert store.audit is not None
    store.audit.consent("b", said("b", key=other))
    append(store, founded(store), 1)
    store.close()
    head = (tmp_path / "audit-log.head").read_text()
    text, _, _ = head.partition("\n\u2014")
    for name, pem in (("a", PEER), ("b", other)):
        key = NoteKey.of_member(name, Signer(pem).public_key)
        head += signature_line(name, key.key_id, Cosigner(pem).sign(text))
    log, _ = log_of(tmp_path)
    assert log.check_cosigned(head.encode()) == (3, ("a",))


def test_a_consent_that_cannot_be_written_is_written_before_the_next_commit(tmp_path: Path) -> None:
    disk = FillableDisk()
    audit = AuditLog.open(tmp_path, "run", CONFIG, lambda: 1.7e9, Disk(write=disk.write))
    store = Store(tmp_path / "outer", CONFIG, "run", audit=audit)
    outer = founded(store)
    disk.full = True
    for peer_id in "ab":
        with pytest.raises(StorageError, match="cannot be written"):
            audit.consent(peer_id, said(peer_id))
    disk.full = False
    append(store, outer, 1)
    store.close()
    assert {*log_of(tmp_path)[0].consents} == {"a", "b"}


def test_an_approval_that_cannot_be_written_is_in_the_log_once_it_is_said_again(tmp_path: Path) -> None:
    disk = FillableDisk()
    audit = AuditLog.open(tmp_path, "run", CONFIG, lambda: 1.7e9, Disk(write=disk.write))
    store = Store(tmp_path / "outer", CONFIG, "run", audit=audit)
    outer = founded(store)
    approval = Approval("1" * 64, "2" * 64, 2, b"certificate", b"s" * 64)
    disk.full = True
    for approver in ("a", "b"):
        with pytest.raises(StorageError, match="cannot be written"):
            audit.approve(approver, approval)
    disk.full = False
    for approver in ("b", "a"):
        audit.approve(approver, approval)
    append(store, outer, 1)
    store.close()
    lines = [json.loads(line) for line in (tmp_path / "audit-log.jsonl").read_text().splitlines()]
    assert [line.get("approver") for line in lines] == [None, "b", "a", None]


@pytest.mark.parametrize("part", ["log", "head"])
def test_what_a_full_disk_refuses_is_in_the_log_once_when_it_is_said_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """The first entries of a run, consents, scores and approvals; the log is refused, or the head that is signed for it."""
    disk, full = FillableDisk(), set[str]()

    def write(path: Path, data: bytes) -> None:
        if "head" in full:
            raise StorageError(f"{path}: cannot be written (No space left on device)")
        write_atomic(path, data)

    def fill(*filled: str) -> None:
        full.clear()
        full.update(filled)
        disk.full = "log" in full

    monkeypatch.setattr(audit_log, "write_atomic", write)
    audit = AuditLog.open(tmp_path, "run", CONFIG, lambda: 1.7e9, Disk(write=disk.write))
    store = Store(tmp_path / "outer", CONFIG, "run", audit=audit)
    audit.consent("a", said("a"))
    fill(part)
    with pytest.raises(StorageError, match="cannot be written"):
        founded(store)
    fill()
    outer = founded(store)
    append(store, outer, 1)
    report = ScoreReport(run_id="run", outer_step=1, scores={"a": 0.5}, public_key=PEER, signature=b"s" * 64)
    fill(part)
    with pytest.raises(StorageError, match="cannot be written") if part == "log" else contextlib.nullcontext():
        audit.score("s", report)  # one that is in the log counts
        with pytest.raises(StorageError, match="cannot be written"):
            append(store, outer, 2)  # and nothing is committed with it until it is signed for
        assert outer.outer_step == 1
    with pytest.raises(StorageError, match="cannot be written"):
        audit.approve("a", approval := Approval("1" * 64, "2" * 64, 2, b"certificate", b"s" * 64))
    fill()
    if part == "log":
        audit.score("s", report)
    audit.approve("a", approval)
    append(store, outer, 2)
    store.close()
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "audit-log.jsonl").read_text().splitlines()]
    assert kinds == ["genesis", "consent", "commit", "score", "approval", "commit"]
    assert opened(tmp_path).recover() is not None


def journal_of(folder: Path) -> list[tuple[int, str]]:
    """The entries that replaying the journal from its beginning comes to."""
    with tempfile.TemporaryDirectory() as scratch:
        outer, found = founded(Store(Path(scratch), CONFIG, "run")), []
        for each in replay_segments(checkpoint.segments(folder / "outer"), 0):
            commit = outer.commit(each.round_id, each.reason, list(each.fragments))
            found.append((each.outer_step, completed(each.draft.encode(), commit).decode()))
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", ["before", "middle", "after"])
def test_killed_at_any_write_the_log_is_the_journal_after_the_next_start(tmp_path: Path, how: str) -> None:
    died = 0
    for calls in range(100):
        folder = tmp_path / str(calls)
        folder.mkdir()
        store = opened(folder)
        outer = founded(store)
        append(store, outer, 1)
        store.close()
        mortal = MortalDisk(calls, how)
        dying = opened(folder, Disk(write=mortal.write, fsync=mortal.fsync))
        killed = False
        try:
            recovered = dying.recover()
            assert recovered is not None
            append(dying, recovered, 2)
            append(dying, recovered, 3)
        except Killed:
            killed = True
        dying.close()

        again = opened(folder)
        found = again.recover()
        assert found is not None
        log, commits = log_of(folder)
        assert commits == journal_of(folder) and len(commits) == found.outer_step >= 1
        assert (log.outer_step, log.digest, log.continued) == (found.outer_step, found.digest, [])
        append(again, found, 4)
        assert log_of(folder)[0].outer_step == found.outer_step
        again.close()
        if not killed:
            break
        died += 1
    assert died > 8 and not killed


def test_the_entries_of_an_older_journal_which_are_whole_are_filled_in(tmp_path: Path) -> None:
    store = opened(tmp_path)
    outer = founded(store)
    append(store, outer, 1)
    path, head = tmp_path / "audit-log.jsonl", tmp_path / "audit-log.head"
    before = path.read_bytes(), head.read_bytes()
    append(store, outer, 2)
    store.close()
    whole = path.read_bytes()
    segment = checkpoint.segment_of(tmp_path / "outer", 0)
    rounds = list(replay_segments([(0, segment)], 0))
    segment.unlink()
    older = Journal.create(segment, 0)
    for each, (_, entry) in zip(rounds, journal_entries(whole), strict=True):
        for record in each.fragments:
            older.append_fragment(each.round_id, record)
        older.append_commit(each.round_id, each.outer_step, each.reason, each.tokens, base=each.base, audit=entry)
    older.close()
    path.write_bytes(before[0])
    head.write_bytes(before[1])
    again = opened(tmp_path)
    assert again.recover() is not None
    again.close()
    assert path.read_bytes() == whole


def journal_entries(log: bytes) -> list[tuple[int, str]]:
    entries = [(json.loads(line), line.decode()) for line in log.splitlines()]
    return [(entry["outer_step"], line) for entry, line in entries if entry["kind"] == "commit"]


def test_other_settings_after_a_kill_are_no_entry_that_the_log_has(tmp_path: Path) -> None:
    store = opened(tmp_path)
    append(store, founded(store), 1)
    store.close()
    changed = replace(CONFIG, outer=replace(CONFIG.outer, lr=0.5))
    segment = checkpoint.segment_of(tmp_path / "outer", 0)
    journal = Journal.open(segment, 0)
    begins, ends = journal.rounds[1]
    journal.close()
    os.truncate(segment, ends - _digest_record_bytes(segment, begins, ends))  # the digest after it was never on disk
    with pytest.raises(StorageError, match=r"entry 1 is not the journal's: .*\[outer\].* set them back"):
        opened(tmp_path, config=changed).recover()


def _digest_record_bytes(segment: Path, begins: int, ends: int) -> int:
    (record,) = [each for each in records(segment, begins) if each.header["kind"] == "digest"]
    assert record.end == ends
    return record.end - record.offset


def test_an_entry_is_too_long_with_what_its_commit_will_lead_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    outer = founded(store)
    append(store, outer, 1)
    length = len(log_of(tmp_path)[1][-1][1])
    monkeypatch.setattr("editpb.audit_log.MAX_ENTRY_BYTES", length - 100)
    with pytest.raises(RefusedError, match="would be too long: a contributes 2 shards"):
        append(store, outer, 2)
    assert outer.outer_step == 1
    store.close()


def test_a_fragment_that_is_rolled_back_has_no_update_in_the_log(tmp_path: Path) -> None:
    store = opened(tmp_path)
    outer = founded(store)
    append(store, outer, 1, scale=1e38)
    store.close()
    _, ((_, line),) = log_of(tmp_path)
    assert [one["update"] for one in json.loads(line)["fragments"]] == [None, None]
    assert [(1, line)] == journal_of(tmp_path)


def test_the_merged_pseudo_gradient_is_named_where_contributions_are_kept(tmp_path: Path) -> None:
    for keep in (0, 1):
        folder = tmp_path / str(keep)
        folder.mkdir()
        store = opened(folder, config=replace(CONFIG, audit=AuditConfig(enabled=True, keep_contributions=keep)))
        append(store, founded(store), 1)
        store.close()
        (entry,) = [json.loads(line) for _, line in journal_entries((folder / "audit-log.jsonl").read_bytes())]
        assert ["merged" in one for one in entry["fragments"]] == [bool(keep)] * 2


def test_while_the_log_cannot_be_written_nothing_further_commits_and_nothing_is_lost(tmp_path: Path) -> None:
    full = False

    def write(descriptor: int, data: memoryview) -> int:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(descriptor, data)

    store = Store(
        tmp_path / "outer", CONFIG, "run", audit=AuditLog.open(tmp_path, "run", CONFIG, lambda: 0.0, Disk(write=write))
    )
    outer = founded(store)
    full = True
    append(store, outer, 1)  # it is journalled, and the log lacks it
    before = outer.digest
    for _ in range(2):
        with pytest.raises(StorageError, match=r"audit-log\.jsonl: cannot be written"):
            append(store, outer, 2)
    with pytest.raises(StorageError, match=r"audit-log\.jsonl"):
        store.checkpoint(outer)  # the journal that has the entry stays
    assert (outer.outer_step, outer.digest) == (1, before)
    full = False
    append(store, outer, 3)
    assert log_of(tmp_path)[1] == journal_of(tmp_path) and log_of(tmp_path)[0].commits == 2
    store.close()


def a_run(folder: Path) -> OuterState:
    store = opened(folder)
    outer = founded(store)
    for round_id in range(1, 4):
        append(store, outer, round_id)
    store.checkpoint(outer)
    store.close()
    return outer


def test_an_export_is_written_over_no_other_log_no_longer_one_and_no_folder_that_is_lived_in(tmp_path: Path) -> None:
    run, old, out = tmp_path / "run", tmp_path / "old", tmp_path / "out"
    run.mkdir()
    a_run(run)

    def export(of: Path, place: Path) -> str:
        found = CliRunner().invoke(app, ["audit", "export", str(place), "--state", str(of)])
        assert found.exit_code == 0 or isinstance(found.exception, ConfigError), found.exception
        return str(found.exception or "") or found.output

    def content(folder: Path) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    for _ in range(2):
        assert export(run, out) == f"{out}: 4 entries, outer step 3\n"
    shutil.copytree(run, old)
    grown = opened(run)
    outer = grown.recover()
    assert outer is not None
    append(grown, outer, 4)
    grown.close()
    (out / "run.json").touch()  # an export with --step has one
    assert export(run, out) == f"{out}: 5 entries, outer step 4\n", "the same log, which has grown"
    kept = content(out)
    why = "is another log, or one that has more entries; export to another folder"
    assert export(old, out) == f"{out / 'audit-log.jsonl'}: {why}"
    assert content(out) == kept

    (part := tmp_path / "swarm" / "part-0").mkdir(parents=True)
    (part / "audit-log.jsonl").write_bytes((old / "audit-log.jsonl").read_bytes())
    assert export(run, tmp_path / "swarm") == f"{part / 'audit-log.jsonl'}: {why}"
    names = {"ca.key": "a coordinator", "run.json": "a coordinator", "peer.key": "a peer", "host.json": "a member of a swarm"}
    for name, kind in names.items():
        (place := tmp_path / f"with-{name}").mkdir()
        (place / name).touch()
        assert export(run, place) == f"{place}: is the folder of {kind}; export to another folder"
        assert [path.name for path in place.iterdir()] == [name]


def next_entry(log: bytes, root: str = "") -> bytes:
    """An entry that fits the log. root: what it says of the entries before it, instead."""
    tree = MerkleTree(map(leaf_hash, log.splitlines()))
    said = {"index": len(tree), "root": root or tree.root().hex(), "time": 1}
    return canonical({**said, **continued_entry(1, "d" * 64)}) + b"\n"


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda text: text[: text.rindex(b"\n", 0, -1) + 1], "has 3 of the 4 entries of audit-log.head"),
        (lambda text: text.replace(b'"reason":"all in"', b'"reason":"all On"', 1), "entry 2 is damaged .*does not follow"),
        (lambda text: b'"all On"'.join(text.rsplit(b'"all in"', 1)), "is not what audit-log.head is signed for"),
        (lambda text: text + text.splitlines(True)[-1], "entry 4 is damaged .*does not follow"),
        (lambda text: text + next_entry(text, "0" * 64), "entry 4 is damaged .*does not follow"),
        (lambda text: text + next_entry(text).replace(b"continued", b"no-such"), "entry 4 is damaged .*unknown kind 'no-such'"),
        (lambda text: text + b"junk\n", "entry 4 is damaged"),
        (lambda text: text.replace(b'"reason":"all in"', b'"reason": "all in"', 1), "entry 1 is damaged"),
        (lambda text: b"", "has 0 of the 4 entries"),
    ],
)
def test_a_log_that_was_changed_while_nobody_looked_stops_the_start(
    tmp_path: Path, damage: Callable[[bytes], bytes], why: str
) -> None:
    a_run(tmp_path)
    path = tmp_path / "audit-log.jsonl"
    path.write_bytes(changed := damage(path.read_bytes()))
    store = opened(tmp_path)
    for _ in range(2):  # also where the first try was not the end of it
        with pytest.raises(StorageError, match=why):
            store.recover()
    assert path.read_bytes() == changed, "what somebody may still look at"


def test_a_log_whose_head_is_gone_is_not_gone_on_with(tmp_path: Path) -> None:
    a_run(tmp_path)
    head, log = tmp_path / "audit-log.head", (tmp_path / "audit-log.jsonl").read_bytes()
    kept = head.read_bytes()
    head.unlink()
    with pytest.raises(StorageError, match=r"audit-log\.head: is missing, and audit-log\.jsonl has 4 entries; restore it"):
        opened(tmp_path).recover()
    assert (tmp_path / "audit-log.jsonl").read_bytes() == log and not head.exists()
    head.write_bytes(kept)
    assert opened(tmp_path).recover() is not None


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "killed"])
def test_a_lost_log_is_begun_anew_only_with_another_key_and_says_where_it_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stopped: bool
) -> None:
    store = opened(tmp_path)
    outer = founded(store)
    for round_id in range(1, 4):
        append(store, outer, round_id)
    if stopped:
        store.checkpoint(outer)
    store.close()
    away = tmp_path / "away"
    away.mkdir()
    for name in ("audit-log.jsonl", "audit-log.head"):
        (tmp_path / name).rename(away / name)
    many = 4 if stopped else 1
    why = f"has 0 of the {many} entries that the run's checkpoint was written with; restore it from a copy, or, to begin"
    with pytest.raises(StorageError, match=why):
        opened(tmp_path).recover()
    assert not caplog.records
    for name in ("audit-log.jsonl", "log.key"):
        (tmp_path / name).rename(away / f"{name}.2")
    for _ in range(2):
        store = opened(tmp_path)
        found = store.recover()
        assert found is not None and found.digest == outer.digest
        store.close()
    assert [record.message for record in caplog.records] == [
        f"{tmp_path / 'audit-log.jsonl'}: begins at outer step 3: no commit before is in it"
    ]
    store = opened(tmp_path)
    found = store.recover()
    assert found is not None
    kept = [(path, path.read_bytes()) for path in (tmp_path / "audit-log.jsonl", tmp_path / "audit-log.head")]
    append(store, found, 4)
    store.close()
    for path, data in kept:  # as after a kill behind the journal's commit
        path.write_bytes(data)
    assert opened(tmp_path).recover() is not None
    log, commits = log_of(tmp_path)
    assert (log.continued, log.outer_step, [step for step, _ in commits]) == ([3], 4, [4])
    told = "at outer steps 3: earlier commits are not in the log, or were lost"
    for command, words in (("verify", f"continued   {told}"), ("usage", f"continued: {told}")):
        assert words in CliRunner().invoke(app, ["audit", command, "--state", str(tmp_path)]).output
    CliRunner().invoke(app, ["audit", "card", str(tmp_path / "card.md"), "--state", str(tmp_path)])
    card = (tmp_path / "card.md").read_text()
    assert "before it begins, or goes on, at outer steps 3." in card and "tokens in all of the commits in the log." in card


def test_a_log_that_is_lost_before_the_next_checkpoint_is_begun_anew_where_the_audit_was_switched_on_later(
    tmp_path: Path,
) -> None:
    without = Store(tmp_path / "outer", replace(CONFIG, audit=AuditConfig(enabled=False)), "run")
    founded(without)
    without.close()
    store = opened(tmp_path)
    outer = store.recover()
    assert outer is not None
    for round_id in (1, 2):
        append(store, outer, round_id)
    store.close()
    for name in ("audit-log.jsonl", "audit-log.head"):
        (tmp_path / name).unlink()
    with pytest.raises(StorageError, match="has 0 of the 1 entries that the run's checkpoint was written with"):
        opened(tmp_path).recover()
    (tmp_path / "audit-log.jsonl").unlink(missing_ok=True)
    (tmp_path / "log.key").unlink()
    found = opened(tmp_path).recover()
    assert found is not None and found.digest == outer.digest
    assert log_of(tmp_path)[0].continued == [2]


@pytest.mark.parametrize("how", ["before", "middle", "after"])
def test_killed_at_any_write_of_its_first_entries_a_run_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """It is founded and killed, starts under another configuration and is killed, and starts once more."""
    changed = replace(CONFIG, storage=replace(CONFIG.storage, checkpoint_every=7))

    def start(folder: Path, calls: int, config: RunConfig) -> bool:
        """Whether it was killed."""
        mortal = MortalDisk(calls, how)

        def write(path: Path, data: bytes) -> None:
            if dies := mortal._dies():
                assert path.name == "audit-log.head"
            if not dies or how == "after":
                write_atomic(path, data)
            if dies:
                raise Killed

        monkeypatch.setattr(audit_log, "write_atomic", write)
        store = opened(folder, Disk(write=mortal.write, fsync=mortal.fsync), config)
        try:
            if store.recover() is None:
                founded(store)
        except Killed:
            return True
        finally:
            store.close()
        return False

    deaths = [0, 0]
    for first in range(100):
        for second in range(100):
            folder = tmp_path / f"{first}-{second}"
            folder.mkdir()
            killed = [start(folder, first, CONFIG), start(folder, second, changed)]
            deaths = [sum(pair) for pair in zip(deaths, killed, strict=True)]
            assert not start(folder, 1000, CONFIG)
            assert log_of(folder)[0].continued == []
            if not killed[1]:
                break
        if not killed[0]:
            break
    assert min(deaths) > 3


def test_a_log_whose_key_is_gone_is_not_gone_on_with(tmp_path: Path) -> None:
    a_run(tmp_path)
    (tmp_path / "log.key").unlink()
    with pytest.raises(ConfigError, match=r"log\.key: is missing"):
        opened(tmp_path)


def test_the_bound_that_peers_keep_for_their_examples_is_in_each_commit(tmp_path: Path) -> None:
    privacy = PrivacyConfig(level="example", delta=1e-5, epsilon_max=8.0, noise_multiplier=1.0)
    store = opened(tmp_path, config=replace(CONFIG, privacy=privacy))
    append(store, founded(store), 1)
    store.close()
    log = LogVerifier(signatures=False)
    for line in (tmp_path / "audit-log.jsonl").read_bytes().splitlines():
        log.take(line)
    assert log.privacy == "example-level, eps of each peer at most 8 at delta 1e-05"


PRIVATE = replace(
    CONFIG,
    penalty=PenaltyConfig(enabled=False),
    privacy=PrivacyConfig(level="organisation", delta=1e-5, epsilon_max=100.0, noise_multiplier=2.0, denominator=2),
)


def spent(attempts: int) -> dict[str, object]:
    epsilon = gaussian_epsilon(1e-5, attempts, 2.0)
    return {"level": "organisation", "delta": 1e-5, "epsilon": epsilon, "attempts": attempts, "by": "exact"}


def privately(folder: Path, parts: Sequence[Mapping[str, object] | None]) -> str:
    """A log whose commits have these parts, and what it says of privacy in the end."""
    store = opened(folder, config=PRIVATE)
    outer = founded(store)
    for round_id, part in enumerate(parts, 1):
        append(store, outer, round_id, part)
    store.close()
    log = LogVerifier(signatures=False)
    for line in (folder / "audit-log.jsonl").read_bytes().splitlines():
        log.take(line)
    return log.privacy


def test_a_ledger_of_privacy_that_lost_attempts_is_seen_in_the_log(tmp_path: Path) -> None:
    said = privately(tmp_path, [spent(attempts) for attempts in (3, 4, 3)])
    least = gaussian_epsilon(1e-5, 5, 2.0)
    assert "3 attempts: more was spent" in said and said.endswith(f"eps {least:.4g} at least")


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({**spent(2), "epsilon": 0.5}, "says epsilon 0.5, and 2 attempts cost"),
        ({**spent(2), "delta": 1e-9}, "says delta 1e-09"),
        (None, "lacks what was spent"),
    ],
)
def test_a_commit_that_says_less_than_was_spent_is_found(tmp_path: Path, part: Mapping[str, object] | None, why: str) -> None:
    with pytest.raises(LogFault, match=f"entry 2: .*{why}"):
        privately(tmp_path, [spent(1), part])


def test_another_configuration_and_commits_without_a_log_are_seen_in_it(tmp_path: Path) -> None:
    a_run(tmp_path)
    changed = replace(CONFIG, storage=replace(CONFIG.storage, checkpoint_every=7))
    unlogged = Store(tmp_path / "outer", CONFIG, "run")
    outer = unlogged.recover()
    assert outer is not None
    record = [outer.record(outer.reduce(i, [])) for i in range(2)]
    for one in record:
        unlogged.begin_fragment(9, one).result()
    unlogged.append_commit(9, 4, "without a log", base=outer.digest)
    unlogged.applied(outer.commit(9, "without a log", record))
    unlogged.close()
    again = opened(tmp_path, config=changed)
    assert again.recover() is not None
    again.close()
    log, commits = log_of(tmp_path)
    assert (log.outer_step, log.continued, len(commits)) == (4, [4], 3)
    assert b'"kind":"config"' in (tmp_path / "audit-log.jsonl").read_bytes()


def test_the_log_changes_nothing_of_the_parameters_or_of_the_journals_fragments(tmp_path: Path) -> None:
    (tmp_path / "with").mkdir()
    with_log = a_run(tmp_path / "with")
    plain = Store(tmp_path / "outer", CONFIG, "run")
    outer = founded(plain)
    for round_id in range(1, 4):
        generator = torch.Generator().manual_seed(round_id)
        records = []
        for fragment in SCHEMA.fragments:
            payload = encode("fp32", 0.1 * torch.randn(fragment.numel, generator=generator))
            records.append(outer.record(outer.reduce(fragment.fragment_id, [Measured("a", 2, 10, measure(payload), payload)])))
            plain.begin_fragment(round_id, records[-1]).result()
        plain.append_commit(round_id, outer.outer_step + 1, "all in", 10, base=outer.digest)
        plain.applied(outer.commit(round_id, "all in", records))
    plain.close()
    assert with_log.digest == outer.digest
    states = [{name: tensor.numpy().tobytes() for name, tensor in each.to_tensors().items()} for each in (outer, with_log)]
    assert states[0] == states[1]


def test_each_commit_says_what_it_was_taken_with(tmp_path: Path) -> None:
    store = opened(tmp_path)
    append(store, founded(store), 1)
    store.close()
    entries = [json.loads(line) for line in (tmp_path / "audit-log.jsonl").read_bytes().splitlines()]
    said = [entry["in_force"] for entry in entries if entry["kind"] == "commit"]
    outer = CONFIG.outer
    assert said == [{"every": CONFIG.sync.every, "batch": 4, "lr": outer.lr.hex(), "momentum": outer.momentum.hex()}]
