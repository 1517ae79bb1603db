"""`edit-coordinator watch` at a real coordinator."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from aggregator.cli import app
from aggregator.control.status import run_status
from edit.errors import ConfigError, RemoteProtocolError
from editpb.run_status import RunStatus
from tests.support.loops import on_a_loop
from tests.support.served import found_run, new_folder, served, theta


@on_a_loop
async def test_watch_shows_a_run_to_its_end(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run")
    async with served(folder) as at, at.peer("a") as a:
        view = await found_run(a)
        at.coordinator.run.drain()
        await a.contribute(view.round_id, 0, theta(1))
        result = await asyncio.to_thread(CliRunner().invoke, app, ["watch", "--state", str(folder.path)])
    assert result.exit_code == 0, result.exception
    assert "a founded the run: 305 parameters in 2 fragments" in result.stdout
    assert "outer step 1/100" in result.stdout


@on_a_loop
async def test_a_coordinator_whose_status_cannot_be_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = new_folder(tmp_path / "run")

    def lie(*arguments: Any, **named: Any) -> RunStatus:
        return replace(run_status(*arguments, **named), eta_s=math.inf)

    monkeypatch.setattr("aggregator.services.status_replies.run_status", lie)
    async with served(folder):
        for command in ("watch", "status"):
            result = await asyncio.to_thread(CliRunner().invoke, app, [command, "--state", str(folder.path)])
            assert isinstance(result.exception, RemoteProtocolError)
            assert str(result.exception) == f"{folder.path}: the coordinator: eta_s is inf, not 0 to 1e+30"


def test_watch_of_a_folder_that_was_never_served_says_what_to_run(tmp_path: Path) -> None:
    new_folder(tmp_path / "run")
    result = CliRunner().invoke(app, ["watch", "--state", str(tmp_path / "run")])
    assert isinstance(result.exception, ConfigError) and "edit-coordinator serve" in str(result.exception)
