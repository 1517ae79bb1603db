"""metrics.jsonl: written in order beside the event loop; a disk that refuses or hangs never stops the run."""

from __future__ import annotations

import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aggregator.metrics import KEPT, MetricsLog, file_names
from tests.support.full_disk import FullDisk


def numbers(path: Path) -> list[int]:
    return [json.loads(line)["number"] for line in path.read_text().splitlines()]


def test_lines_are_written_in_order_by_the_time_the_thread_ends(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with ThreadPoolExecutor(1) as files:
        log = MetricsLog(path, files)
        for number in range(50):
            log.line("round", 2.0004, {"number": number})
    assert numbers(path) == list(range(50))
    assert json.loads(path.read_text().splitlines()[0]) == {"kind": "round", "t": 2.0, "number": 0}


def test_a_disk_that_refuses_is_said_once_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    path.mkdir()
    with ThreadPoolExecutor(1) as files:
        log = MetricsLog(path, files)
        log.line("round", 0, {"number": 0})
        log.line("round", 0, {"number": 1})
        files.submit(path.rmdir)
        log.line("round", 0, {"number": 2})
    assert numbers(path) == [2]
    (record,) = caplog.records
    assert "cannot be written (Is a directory); the run goes on without" in record.getMessage()


def test_a_disk_that_fills_up_leaves_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, disk = tmp_path / "metrics.jsonl", FullDisk(monkeypatch)
    with ThreadPoolExecutor(1) as files:
        log = MetricsLog(path, files)
        for number, room in enumerate((None, 10, 0, None)):
            files.submit(setattr, disk, "room", room)
            log.line("round", 0, {"number": number})
    assert numbers(path) == [0, 3]
    (record,) = caplog.records
    assert "cannot be written (No space left on device); the run goes on without" in record.getMessage()


def test_a_disk_that_hangs_costs_lines_and_bounded_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, hang = tmp_path / "metrics.jsonl", threading.Event()
    with ThreadPoolExecutor(1) as files, caplog.at_level(logging.WARNING):
        log = MetricsLog(path, files, most_waiting=3)
        files.submit(hang.wait, 30)
        for number in range(5):
            log.line("round", 0, {"number": number})
        hang.set()
        files.submit(lambda: None).result()
        log.line("round", 0, {"number": 5})
    assert numbers(path) == [0, 1, 2, 5]
    (record,) = caplog.records
    assert "is written too slowly; lines are lost" in record.getMessage()


def test_a_full_file_is_moved_aside_and_the_disk_that_all_take_is_bounded(tmp_path: Path) -> None:
    path, most = tmp_path / "metrics.jsonl", 400
    with ThreadPoolExecutor(1) as files:
        log = MetricsLog(path, files, file_bytes=most)
        for number in range(200):
            log.line("round", 0, {"number": number})
    kept = [numbers(name) for name in file_names(path)]
    assert sorted(tmp_path.iterdir()) == sorted(file_names(path)) and len(kept) == KEPT
    assert all(300 < name.stat().st_size <= most for name in file_names(path)[1:])
    written = [number for one in reversed(kept) for number in one]
    assert written == list(range(written[0], 200)), "in order, none missing, the newest last"


def test_a_restart_goes_on_in_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for number in range(4):
        with ThreadPoolExecutor(1) as files:
            MetricsLog(path, files, file_bytes=100).line("round", 0, {"number": number})
    assert [numbers(name) for name in file_names(path)[:2]] == [[2, 3], [0, 1]]


def test_a_line_larger_than_a_file_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with ThreadPoolExecutor(1) as files:
        log = MetricsLog(path, files, file_bytes=50)
        for number in range(2):
            log.line("round", 0, {"number": number, "long": "x" * 100})
    assert [numbers(name) for name in file_names(path)[:2]] == [[1], [0]]
