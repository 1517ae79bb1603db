"""A ledger says too much after a kill, never too little; it says so of each byte at which a write can be cut short."""

import errno
import json
import os
import random
from pathlib import Path

import pytest

from edit.errors import ConfigError, StorageError
from edit.trust.privacy import Spent
from edit.trust.privacy_ledger import PrivacyLedger


def steps(count: int, rate: float = 0.01, sampling: str = "poisson") -> Spent:
    return Spent(sampling=sampling, rate=rate, noise_multiplier=1.1, count=count)


def written(path: Path, *counts: int) -> bytes:
    ledger = PrivacyLedger(path)
    for count in counts:
        ledger.reserve(steps(count))
    ledger.close()
    return path.read_bytes()


def test_what_was_reserved_is_there_after_a_restart_by_kind(tmp_path: Path) -> None:
    path = tmp_path / "privacy.jsonl"
    ledger = PrivacyLedger(path)
    assert ledger.spent == () and ledger.count == 0
    for each in (steps(5), steps(7), steps(2, 0.02), steps(1, 1.0, "shuffle")):
        ledger.reserve(each)
    assert ledger.spent == (steps(12), steps(2, 0.02), steps(1, 1.0, "shuffle"))
    ledger.close()
    again = PrivacyLedger(path)
    assert again.spent == (steps(12), steps(2, 0.02), steps(1, 1.0, "shuffle")) and again.count == 15
    again.close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_kill_at_any_byte_loses_only_what_no_step_was_taken_on_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "privacy.jsonl"
    data = written(path, 5, 7)
    lines = data.splitlines(keepends=True)
    for size in range(len(data)):
        path.write_bytes(data[:size])
        caplog.clear()
        ledger = PrivacyLedger(path)
        starts = [sum(map(len, lines[:end])) for end in range(4)]
        whole = sum(size >= start - 1 for start in starts[1:])  # a line that lacks nothing but its end counts
        assert ledger.count == {0: 0, 1: 0, 2: 5, 3: 12}[whole]
        assert bool(caplog.messages) is not any(size in (start - 1, start) for start in starts[1:])
        assert path.read_bytes().endswith(b"\n")
        ledger.reserve(steps(1))
        ledger.close()
        again = PrivacyLedger(path)
        assert again.count == ledger.count
        again.close()


def test_a_line_that_lacks_only_its_end_counts_and_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "privacy.jsonl"
    data = written(path, 100, 5000)
    path.write_bytes(data[:-1])
    ledger = PrivacyLedger(path)
    assert ledger.count == 5100 and path.read_bytes() == data
    ledger.close()


def test_a_file_that_is_no_beginning_of_a_ledger_is_not_made_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "privacy.jsonl"
    for text in (b"notes", b'{"format": 2', b'{"sampling": "poisson", "rate": "0x1p-4"', bytes(40)):
        path.write_bytes(text)
        with pytest.raises(StorageError, match=r"privacy\.jsonl: line 1 is damaged .*: restore the file"):
            PrivacyLedger(path)
        assert path.read_bytes() == text
    path.write_bytes(b"")
    PrivacyLedger(path).close()
    assert caplog.messages == [f"{path}: is empty, and begins as a new ledger; if it is a copy, stop, and copy it again"]


def test_any_other_damage_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "privacy.jsonl"
    data = written(path, 5, 7)
    chance = random.Random(1)
    for place in (0, *(chance.randrange(data.rfind(b"\n")) for _ in range(50))):
        changed = bytearray(data)
        changed[place] = 0
        path.write_bytes(changed)
        with pytest.raises(StorageError, match=r"privacy\.jsonl: line [123] is damaged"):
            PrivacyLedger(path)
    for line in (b"{}", b"[]", b'{"sampling": "poisson", "rate": "nan", "noise_multiplier": "0x1p0", "count": 1}'):
        path.write_bytes(data + line + b"\n")
        with pytest.raises(StorageError, match="line 4 is damaged"):
            PrivacyLedger(path)
    for count in (0, -5, True, 1.5, 1 << 41, "1"):
        value = {"sampling": "poisson", "rate": "0x1p-4", "noise_multiplier": "0x1p0", "count": count}
        path.write_bytes(data + json.dumps(value).encode() + b"\n")
        with pytest.raises(StorageError, match="line 4 is damaged"):
            PrivacyLedger(path)


def test_it_is_on_disk_before_a_step_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "privacy.jsonl"
    ledger = PrivacyLedger(path)
    synced: list[bytes] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(path.read_bytes()))
    ledger.reserve(steps(3))
    assert synced == [path.read_bytes()]

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"privacy\.jsonl: cannot be written \(No space left on device\); no step"):
        ledger.reserve(steps(4))
    monkeypatch.undo()
    with pytest.raises(StorageError, match="a write failed before"):
        ledger.reserve(steps(4))
    assert ledger.count == 3
    ledger.close()


def test_two_processes_do_not_count_in_one(tmp_path: Path) -> None:
    path = tmp_path / "privacy.jsonl"
    ledger = PrivacyLedger(path)
    with pytest.raises(ConfigError, match="another process counts its steps in it"):
        PrivacyLedger(path)
    ledger.close()
    PrivacyLedger(path).close()


def test_steps_on_other_examples_do_not_add_up_and_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "privacy.jsonl"
    PrivacyLedger(path, "document", 7).close()  # nothing is counted for these
    ledger = PrivacyLedger(path, "sequence", 63)
    ledger.reserve(steps(5))
    ledger.close()
    for unit, tokens, said in (
        ("sequence", 1023, "sequence of 1023 tokens"),
        ("sequence", 31, "sequence of 31 tokens"),
        ("sequence", 0, "sequence"),
        ("document", 63, "document of 63 tokens"),
    ):
        with pytest.raises(ConfigError, match=rf"count for each sequence of 63 tokens, and now they would for each {said}: "):
            PrivacyLedger(path, unit, tokens)
    again = PrivacyLedger(path, "sequence", 63)  # it was let go of
    assert again.count == 5
    again.close()


def test_a_ledger_of_older_software_has_the_unit_of_its_first_line_and_the_length_of_now(tmp_path: Path) -> None:
    path = tmp_path / "privacy.jsonl"
    path.write_text(
        '{"format": 1, "unit": "sequence"}\n'
        '{"sampling": "poisson", "rate": "0x1.47ae147ae147bp-7", "noise_multiplier": "0x1.199999999999ap+0", "count": 5}\n'
    )
    with pytest.raises(ConfigError, match="count for each sequence of 16 tokens, and now they would for each document of 16"):
        PrivacyLedger(path, "document", 16)
    ledger = PrivacyLedger(path, "sequence", 16)
    ledger.reserve(steps(1))
    assert ledger.spent == (steps(6),)
    ledger.close()
    with pytest.raises(ConfigError, match="for each sequence of 16 tokens, and now they would for each sequence of 128"):
        PrivacyLedger(path, "sequence", 128)
    for wrong in ('"unit": 3', '"unit": "a b"', '"tokens": -1', '"tokens": true', '"tokens": "16"'):
        path.write_text(
            '{"format": 1, "unit": "sequence"}\n'
            f'{{{wrong}, "sampling": "all", "rate": "0x1p+0", "noise_multiplier": "0x1p+0", "count": 5}}\n'
        )
        with pytest.raises(StorageError, match="line 2 is damaged"):
            PrivacyLedger(path)
