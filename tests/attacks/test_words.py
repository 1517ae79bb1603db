"""What members write is shown as text: it formats nothing, moves no cursor, breaks no command and no reader of JSON."""

from __future__ import annotations

import asyncio
import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from aggregator.cli import app
from edit.view.status import print_status
from editpb.control_messages import peer_message_to_pb
from editpb.messages import Goodbye, Heartbeat, PeerState
from editpb.run_status import MemberStatus, RoundReport, RunStatus
from tests.support.loops import on_a_loop, until
from tests.support.served import found_run, new_folder, served

MARKUP = "[bold red]done[/] [link=https://evil.example]click[/link] [/nothing] [@click=app.quit]x[/]"
CONTROL = "gone\x1b[2J\x1b]0;title\x07\r\nall is well\u202e"


def run_command(*arguments: str) -> str:
    """What a command prints, as an operator runs it."""
    result = CliRunner(env={"COLUMNS": "400"}).invoke(app, list(arguments))
    assert result.exit_code == 0, result.exception or result.output
    return result.stdout


@on_a_loop
async def test_a_members_words_are_text_in_the_tables_and_null_is_the_only_number_that_is_none(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run")
    async with served(folder) as at, at.peer("a") as honest, at.peer("liar") as liar:
        await found_run(honest)
        await liar.attend()
        beat = Heartbeat(state=PeerState.TRAINING, loss=math.inf)
        await liar._call.write(peer_message_to_pb(beat))
        await liar._call.write(peer_message_to_pb(Goodbye(MARKUP)))
        members = at.coordinator.run.attendances.membership.members
        await until(lambda: not members["liar"].live and members["liar"].heartbeat is not None)
        for command in ("status", "members"):
            assert MARKUP in await asyncio.to_thread(run_command, command, "--state", str(folder.path))
            text = await asyncio.to_thread(run_command, command, "--state", str(folder.path), "--json")
            values = json.loads(text, parse_constant=pytest.fail)
            row = next(row for row in (values if command == "members" else values["members"]) if row["peer_id"] == "liar")
            assert row["loss"] is None and row["reason"] == MARKUP
    for line in folder.metrics.read_text(encoding="utf-8").splitlines():
        json.loads(line, parse_constant=pytest.fail)


@on_a_loop
async def test_control_characters_end_the_stream_of_the_peer_that_writes_them(tmp_path: Path) -> None:
    async with served(new_folder(tmp_path / "run")) as at, at.peer("a") as honest, at.peer("liar") as liar:
        await found_run(honest)
        await liar.attend()
        message = peer_message_to_pb(Goodbye(""))
        message.goodbye.reason = CONTROL
        await liar._call.write(message)
        members = at.coordinator.run.attendances.membership.members
        await until(lambda: not members["liar"].live)
        assert members["liar"].reason == "reason holds control characters"


def test_nothing_that_an_aggregator_answers_reaches_the_terminal_as_more_than_text() -> None:
    member = MemberStatus(peer_id=CONTROL, role=CONTROL, state=CONTROL, reason=CONTROL, phase=CONTROL)
    report = RoundReport(
        round_id=1,
        outer_step=1,
        committed=False,
        reason=CONTROL,
        seconds=1.0,
        bytes_in=0,
        bytes_out=0,
        missing=(),
        digest="",
        fragments=(),
    )
    status = RunStatus(
        run_id=CONTROL,
        phase=CONTROL,
        outer_step=0,
        outer_steps=1,
        round_id=0,
        reason=CONTROL,
        waiting_for=CONTROL,
        draining=False,
        tokens=0,
        stop_tokens=0,
        digest=CONTROL,
        parameters=0,
        peak_memory_bytes=0,
        expected=(),
        arrived=(),
        deadline_in_s=None,
        members=(member,),
        rounds=(report,),
    )
    screen = io.StringIO()
    print_status(Console(file=screen, width=400), status, 8)
    lines = screen.getvalue().split("\n")
    assert len(lines) == 8, "two headlines, who is waited for, and two tables of a heading and a row"
    assert all(line.isprintable() for line in lines)
