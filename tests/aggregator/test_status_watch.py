"""`edit-coordinator status --watch`, and the same for a swarm."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import aggregator.cli
from aggregator.cli import app
from aggregator.operator_client import Answers
from aggregator.past import whole_status
from aggregator.swarm.commands import app as swarm
from aggregator.swarm.standing import Report
from edit.errors import TransportError
from editpb.run_status import RunStatus
from tests.support.served import new_folder

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


def test_the_status_of_a_swarm_is_shown_anew_likewise(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Report(
        source="a at 127.0.0.1:1",
        run_id="run-1",
        phase="running",
        leader="a",
        quorum="a alone votes",
        has_quorum=True,
        lineage=1,
        term=1,
        version=1,
        parts=(),
        members=(),
        evicted={},
        holders=(),
        notes=(),
    )
    phases, asked = ["running", "running", "finished"], list[str]()

    def ask(_: Path, *, at: str) -> Report:
        asked.append(at)
        return replace(told, phase=phases.pop(0))

    monkeypatch.setattr("aggregator.swarm.operate.status", ask)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    watched = CliRunner().invoke(swarm, ["status", "folder", "--watch", "--json", "--at", "a"])
    assert [json.loads(line)["phase"] for line in watched.stdout.splitlines()] == ["running", "running", "finished"]
    assert asked == ["a"] * 3 and not phases


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


def test_a_run_of_several_aggregators_is_watched_until_all_of_them_have_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    phases = [("collecting", "collecting"), ("finished", "collecting"), ("finished", "finished")]

    def ask(_: Path) -> tuple[Answers[RunStatus], RunStatus]:
        first, second = (replace(RUN, phase=phase, aggregator=number) for number, phase in enumerate(phases.pop(0)))
        return Answers({0: first, 1: second}, []), replace(first, aggregators=(second,))

    monkeypatch.setattr(aggregator.cli, "_ask_status", ask)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    watched = CliRunner().invoke(app, ["status", "--watch", "--json"])
    assert watched.exit_code == 0 and len(watched.stdout.splitlines()) == 3 and not phases


@pytest.mark.parametrize(
    ("state", "other", "ended"),
    [
        ("left", None, True),
        ("lost", "finished", True),
        ("training", None, False),
        ("left", "collecting", False),
        ("training, as a killed coordinator heard", None, True),
    ],
)
def test_a_coordinator_that_is_away_has_ended_only_with_all_shares_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, other: str | None, ended: bool
) -> None:
    folder = new_folder(
        tmp_path / "run",
        toml="[model]\nname = 'entry:mine'\n[aggregators]\naddresses = ['127.0.0.1:9']\n[sync]\nouter_steps = 3\n",
    )
    lines = [
        {"kind": "member", "t": 2.0, "peer_id": "a", "state": state.partition(",")[0], "reason": ""},
        {"kind": "end", "t": 50.0 if "," in state else 2.5, "outer_step": 3, "tokens": 30},
    ]
    folder.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    def answer(*_: object) -> Answers[RunStatus]:
        return Answers({} if other is None else {1: replace(RUN, phase=other, aggregator=1)}, ["the coordinator is silent"])

    monkeypatch.setattr("aggregator.operator_client.call_every", answer)
    asked = CliRunner().invoke(app, ["status", "--state", str(folder.path), "--json"])
    if ended:
        assert json.loads(asked.stdout)["phase"] == "finished"
    else:
        assert isinstance(asked.exception, TransportError) and "the coordinator is silent" in str(asked.exception)
    assert whole_status(folder).phase == ("stopped" if state == "training" else "finished"), "where nobody is asked"
