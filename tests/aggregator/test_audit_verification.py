"""A log in a file is verified with its signatures in other processes, or those of a sample."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aggregator import audit_verification
from aggregator.audit_verification import entries_of, verified_log
from benchmarks.audit import CONFIG, write
from edit.trust.canonical import canonical, parse_canonical
from edit.trust.merkle import MerkleTree, leaf_hash
from edit.trust.signatures import Signer
from editpb.audit_log import PART, LogFault, consent_entry
from editpb.consents import signed_consent
from editpb.signed_contributions import config_digest
from tests.support.keys import member_key

COMMITS, PEERS, FRAGMENTS = 4, 2, 2


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "audit.jsonl"
    write(path, COMMITS, PEERS, FRAGMENTS)
    return path


def rewritten(log: Path, path: Path, index: int, change: Callable[[dict[str, Any]], object]) -> Path:
    """The same log, by a coordinator that has changed one entry, and all roots with it."""
    tree = MerkleTree()
    with path.open("wb") as file:
        for place, line in enumerate(entries_of(log)):
            entry = parse_canonical(line)
            if place == index:
                change(entry)
            written = canonical({**entry, "root": tree.root().hex()})
            file.write(written + b"\n")
            tree.append(leaf_hash(written))
    return path


def forged(log: Path, path: Path, index: int) -> Path:
    """A log with something that a peer has not said."""

    def change(entry: dict[str, Any]) -> None:
        entry["contributions"]["organisation-01"]["parts"][0][PART.index("tokens")] += 1

    return rewritten(log, path, index, change)


def consents(entry: dict[str, Any], peer_id: str) -> None:
    """Make an entry the consent of a site, which is signed as it says."""
    consent = signed_consent("benchmark", peer_id, config_digest(CONFIG), "", Signer(member_key()))
    common = {name: entry[name] for name in ("index", "root", "time")}
    entry.clear()
    entry.update({**common, **consent_entry(peer_id, consent)})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda entry: entry.update(missing=[1, "a"]), "'1' is no name of a peer"),
        (lambda entry: entry.update(missing=["a b"]), "'a b' is no name of a peer"),
        (lambda entry: entry.update(unmerged=[["a"]]), "is no name of a peer"),
        (lambda entry: entry["contributions"].update({"a+b": {"key": "", "parts": []}}), r"'a\+b' is no name of a peer"),
        (
            lambda entry: entry["fragments"][0]["verdicts"]["organisation-00"].__setitem__(0, 1),
            "the verdict of organisation-00",
        ),
        (lambda entry: entry.update(time=10**20), "its time is none"),
        (lambda entry: entry.update(time="now"), "its time is none"),
        (lambda entry: consents(entry, "a b"), "'a b' is no name of a peer"),
    ],
)
def test_what_nobody_wrote_is_a_fault_that_names_its_entry(
    log: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], why: str
) -> None:
    with pytest.raises(LogFault, match=f"entry 4: .*{why}"):
        verified_log(entries_of(rewritten(log, tmp_path / "other.jsonl", COMMITS, change)))


def test_all_signatures_are_verified_in_other_processes(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_verification, "_BATCH_BYTES", 1)
    assert verified_log(entries_of(log), processes=1).verified == COMMITS * PEERS * FRAGMENTS
    wrong = forged(log, tmp_path / "forged.jsonl", 2)
    said = r"entry 2: the contribution of organisation-01 to fragment 0, rank 0: its signature is not of what the log says"
    with pytest.raises(LogFault, match=said):
        verified_log(entries_of(wrong), processes=1)


def test_the_other_processes_end_with_the_first_one(log: Path) -> None:
    """They have its stdout, which is at its end once they ended."""
    program = f"""
import os, signal
from pathlib import Path
from aggregator import audit_verification
audit_verification._BATCH_BYTES = 1
def last(lines):
    yield from lines
    os.kill(os.getpid(), signal.SIGKILL)
audit_verification.verified_log(last(audit_verification.entries_of(Path({str(log)!r}))), processes=1)"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def test_a_short_log_is_verified_without_further_processes(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_verification, "ProcessPoolExecutor", None)
    assert verified_log(entries_of(log)).verified == COMMITS * PEERS * FRAGMENTS
    with pytest.raises(LogFault, match=r"entry 4: .* signature"):
        verified_log(entries_of(forged(log, tmp_path / "forged.jsonl", 4)))


@pytest.mark.parametrize("sample", [0, 1, 3, COMMITS, 100])
def test_a_sample_has_as_many_commits_as_it_says(log: Path, sample: int) -> None:
    found = verified_log(entries_of(log), sample=sample)
    assert found.verified == min(sample, COMMITS) * PEERS * FRAGMENTS
    assert (found.commits, len(found.tree)) == (COMMITS, COMMITS + 1)


def test_each_commit_is_drawn_now_and_then(log: Path, tmp_path: Path) -> None:
    """Of 4 commits 2 are drawn: a forged one is missed in all of 64 draws with a chance of 2 ** -64."""
    for index in range(1, COMMITS + 1):
        wrong = forged(log, tmp_path / f"{index}.jsonl", index)
        with pytest.raises(LogFault, match=f"entry {index}: "):
            for _ in range(64):
                verified_log(entries_of(wrong), sample=2)


def test_what_is_no_entry_is_named(log: Path, tmp_path: Path) -> None:
    lines = list(entries_of(log))
    entry = json.loads(lines[1])
    del entry["contributions"]
    with pytest.raises(LogFault, match=r"entry 1: lacks 'contributions'"):
        verified_log([lines[0], json.dumps(entry, sort_keys=True, separators=(",", ":")).encode(), *lines[2:]])
