"""`edit-coordinator status --watch`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import aggregator.cli
from aggregator.cli import app
from aggregator.operator_client import Answers
from editpb.run_status import RunStatus

RUN = RunStatus(
    run_id="run-1",
    phase="collecting",
    outer_step=1,
    outer_steps=3,
    round_id=7,
    reason="",
    waiting_for="a (0 in, quorum 1)",
    draining=False,
    tokens=0,
    stop_tokens=0,
    digest="d",
    parameters=10,
    peak_memory_bytes=1,
    expected=("a",),
    arrived=(),
    deadline_in_s=None,
    members=(),
    rounds=(),
)


def test_status_is_shown_anew_until_the_run_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    phases = ["collecting", "collecting", "finished", "paused"]
    waited: list[float] = []

    def ask(_: Path) -> tuple[Answers[RunStatus], RunStatus]:
        run = replace(RUN, phase=phases.pop(0))
        return Answers({0: run}, []), run

    monkeypatch.setattr(aggregator.cli, "_ask_status", ask)
    monkeypatch.setattr("time.sleep", waited.append)
    lines = CliRunner().invoke(app, ["status", "--watch", "--json"]).stdout.splitlines()
    assert [json.loads(line)["phase"] for line in lines] == ["collecting", "collecting", "finished"]
    assert waited == [2.0, 2.0]
    assert "paused" in CliRunner().invoke(app, ["status"]).stdout and not phases, "without --watch once"
