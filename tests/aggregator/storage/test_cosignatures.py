"""What a coordinator keeps of the heads that members cosign: bounded, verified, and held against its own log."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from aggregator.cli import app
from aggregator.storage.audit_log import AuditLog
from aggregator.storage.cosignatures import MOST_HEADS, note_files
from aggregator.storage.store import Store
from edit.config.audit import AuditConfig
from edit.config.run import RunConfig
from edit.errors import ConfigError, RemoteProtocolError, StorageError
from edit.merging.outer_state import OuterState
from edit.trust.checkpoints import MOST_SIGNATURES, Checkpoint, Cosigner, NoteKey, open_note, signature_of
from edit.trust.signatures import Signer
from editpb.audit_log import LogFault
from editpb.messages import Cosignature, SeenHead
from tests.aggregator.storage.test_audit_log import PEER, append, founded, log_of, opened
from tests.support.keys import member_key

PUBLIC = Signer(PEER).public_key


def head_of(log: AuditLog) -> SeenHead:
    """The head that peers see now."""
    note = log.receipt(log._last[1], 0).checkpoint
    return SeenHead(len(log), log._tree.root(), signature_of(note, log._signer.key))


def said(log: AuditLog, key: bytes = PEER, head: SeenHead | None = None) -> Cosignature:
    head = head or head_of(log)
    return Cosignature(head, Cosigner(key).sign(Checkpoint("edit/run", head.size, head.root).text()))


@pytest.fixture
def begun(tmp_path: Path) -> tuple[Store, OuterState, AuditLog]:
    """A run with one commit, to which peer a contributed."""
    store = opened(tmp_path)
    outer = founded(store)
    append(store, outer, 1)
    assert store.audit is not None
    return store, outer, store.audit


def test_a_cosignature_is_kept_once_and_over_a_restart(tmp_path: Path, begun: tuple[Store, OuterState, AuditLog]) -> None:
    store, _, log = begun
    first = said(log)
    assert log.cosigned("a", PUBLIC, first)
    assert not log.cosigned("a", PUBLIC, said(log))  # another signature of the same head
    store.close()
    [(size, path)] = note_files(tmp_path / "audit-log.cosigned").items()
    assert size == 2 == first.head.size
    note = path.read_text()
    _, signed = open_note(note, [log._signer.key, NoteKey.of_member("a", PUBLIC)])
    assert [each.name for each in signed] == ["edit/run", "a"]
    assert log_of(tmp_path)[0].check_cosigned(note.encode()) == (2, ("a",))

    store = opened(tmp_path)
    outer = store.recover()
    assert outer is not None and store.audit is not None
    assert not store.audit.cosigned("a", PUBLIC, first) and store.audit.cosignatures.unsaved() is None
    append(store, outer, 2)
    assert store.audit.cosigned("a", PUBLIC, said(store.audit))
    store.close()
    assert list(note_files(tmp_path / "audit-log.cosigned")) == [2, 3]


def test_the_newest_heads_are_kept_and_an_old_one_is_no_news(tmp_path: Path, begun: tuple[Store, OuterState, AuditLog]) -> None:
    store, outer, log = begun
    oldest = said(log)
    for number in range(2, MOST_HEADS + 4):
        append(store, outer, number)
        assert log.cosigned("a", PUBLIC, said(log))
    assert not log.cosigned("a", PUBLIC, oldest)
    store.close()
    assert list(note_files(tmp_path / "audit-log.cosigned")) == list(range(5, MOST_HEADS + 5))


def test_what_is_not_the_members_signature_is_refused_and_never_kept(
    tmp_path: Path, begun: tuple[Store, OuterState, AuditLog]
) -> None:
    store, _, log = begun
    head = head_of(log)
    good = said(log)
    with pytest.raises(
        RemoteProtocolError, match=r"audit\.cosign: the signature of a under the head of 2 entries is not of its"
    ):
        log.cosigned("a", PUBLIC, said(log, member_key()))
    with pytest.raises(RemoteProtocolError, match="a cosigns a head of the audit log that is not signed with its key"):
        log.cosigned("a", PUBLIC, Cosignature(SeenHead(2, bytes(32), head.signature), good.signature))
    for place in range(len(good.signature)):
        wrong = good.signature[:place] + bytes([good.signature[place] ^ 1]) + good.signature[place + 1 :]
        with pytest.raises(RemoteProtocolError, match="is not of its text"):
            log.cosigned("a", PUBLIC, Cosignature(head, wrong))
    assert not log.cosigned("b", PUBLIC, good)  # no entry names this key of b
    other = Signer(stranger := member_key()).public_key
    assert not log.cosigned("a", other, said(log, stranger))
    # A head that the log's key has signed, and that this log does not have: of a fork, or of a newer copy.
    foreign = log._signer.sign(2, bytes(32))
    fork = SeenHead(2, bytes(32), signature_of(foreign, log._signer.key))
    assert not log.cosigned("a", PUBLIC, said(log, head=fork))
    assert log.cosignatures.unsaved() is None
    store.close()
    assert not note_files(tmp_path / "audit-log.cosigned")


def test_no_more_members_than_a_note_may_have(begun: tuple[Store, OuterState, AuditLog]) -> None:
    _, _, log = begun
    head, signature = head_of(log), said(log).signature
    added = [log.cosignatures.add(head, NoteKey.of_member(f"m{i}", PUBLIC), signature) for i in range(MOST_SIGNATURES + 1)]
    assert added == [True] * (MOST_SIGNATURES - 1) + [False] * 2
    notes = log.cosignatures.unsaved()
    assert notes is not None and open_note(notes[2], [log._signer.key])


def test_a_log_that_lacks_what_members_have_cosigned_stops_the_start(
    tmp_path: Path, begun: tuple[Store, OuterState, AuditLog]
) -> None:
    store, outer, _ = begun
    store.close()
    shutil.copytree(tmp_path, tmp_path.with_name("old"))
    store = opened(tmp_path)
    outer = store.recover() or outer
    append(store, outer, 2)
    assert store.audit is not None and store.audit.cosigned("a", PUBLIC, said(store.audit))
    store.close()
    shutil.copytree(tmp_path / "audit-log.cosigned", tmp_path.with_name("old") / "audit-log.cosigned")
    with pytest.raises(StorageError, match=r"has 2 of the 3 entries that members have cosigned .*3\.note"):
        opened(tmp_path.with_name("old")).recover()
    path = tmp_path / "audit-log.cosigned" / "3.note"
    path.write_bytes(path.read_bytes().replace(b"edit/run", b"edit/rum"))
    with pytest.raises(StorageError, match=r"3\.note: is damaged .*; restore it from a copy, or move it away"):
        opened(tmp_path).recover()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, begun: tuple[Store, OuterState, AuditLog]) -> None:
    _, _, log = begun
    assert log.cosigned("a", PUBLIC, said(log))
    notes = log.cosignatures.unsaved()
    assert notes is not None and log.cosignatures.unsaved() is None
    (tmp_path / "audit-log.cosigned").write_text("in the way")
    with pytest.raises(StorageError, match=r"audit-log\.cosigned: cannot be written"):
        log.cosignatures.write(notes)


def test_verify_and_export_name_the_cosigned_head_that_was_changed(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    begun: tuple[Store, OuterState, AuditLog],
    capsys: pytest.CaptureFixture[str],
) -> None:
    store, _, log = begun
    assert log.cosigned("a", PUBLIC, said(log))
    store.close()

    def run(*words: str) -> str:
        app(["audit", *words], standalone_mode=False)
        return capsys.readouterr().out

    out = tmp_path_factory.mktemp("copy")
    (out / "audit-log.cosigned").mkdir()
    (out / "audit-log.cosigned" / "77.note").write_text("of an earlier export")
    run("export", str(out), "--state", str(tmp_path))
    assert "cosigned    2 entries, by 1 member: a\n" in run("verify", "--state", str(out))
    assert '"cosigned": {"2": ["a"]}' in run("verify", "--state", str(out), "--json", "--hashes")
    path = out / "audit-log.cosigned" / "2.note"
    note, verifier = path.read_bytes(), log_of(tmp_path)[0]
    for place in range(len(note)):
        with pytest.raises(LogFault, match="head"):
            verifier.check_cosigned(note[:place] + bytes([note[place] ^ 1]) + note[place + 1 :])
    path.write_bytes(note.replace(b" a ", b" b "))
    with pytest.raises(LogFault, match=r"2\.note: the cosigned head of 2 entries: b has cosigned with a key that no"):
        run("verify", "--state", str(out))


def test_cosign_needs_a_log_and_changes_no_configuration_that_does_not_name_it() -> None:
    with pytest.raises(ConfigError, match=r"audit\.cosign has no effect with audit\.enabled = false"):
        RunConfig.from_mapping({"name": "r", "model": {"name": "entry:mine"}, "audit": {"cosign": False}})
    assert "cosign" not in RunConfig(audit=AuditConfig(enabled=True)).to_json()
    assert '"cosign": false' in RunConfig(audit=AuditConfig(enabled=True, cosign=False)).to_json()
