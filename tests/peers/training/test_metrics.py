"""The peer's metrics file: whatever its disk does, the training goes on, and its lines are whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peers.training.metrics import Metrics
from tests.support.full_disk import FullDisk


def test_a_disk_that_fills_up_is_said_once_and_tried_again_and_leaves_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, disk = tmp_path / "made" / "metrics.jsonl", FullDisk(monkeypatch)
    with Metrics(path, clock=lambda: 2.0004) as metrics:
        for outer_step, room in enumerate((None, 10, 0, None)):
            disk.room = room
            metrics.outer(outer_step, "abc", "complete")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["outer_step"] for line in lines] == [0, 3]
    assert lines[0] == {"kind": "outer", "t": 2.0, "outer_step": 0, "digest": "abc", "reason": "complete", "aggregator": 0}
    (record,) = caplog.records
    assert record.getMessage() == f"--metrics {path}: cannot be written (No space left on device); the run goes on without"


def test_a_device_that_refuses_every_line_does_not_end_the_training(caplog: pytest.LogCaptureFixture) -> None:
    with Metrics(Path("/dev/full")) as metrics:
        metrics.step(0, 1.0, 1.0, 0)
        metrics.snapshot(1, "abc", ["a"])
    assert len(caplog.records) == 1
