"""A run that lost committed outer steps is not gone on with unless its operator says so; a run that was killed is."""

from __future__ import annotations

import asyncio
import logging
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from aggregator.control.status import run_status
from aggregator.server import serve_run
from aggregator.storage import high_water
from aggregator.storage.state_folder import StateFolder
from aggregator.storage.store import load_outer
from edit.command_line import run_command
from edit.durable_files import read_json, write_json
from edit.errors import ConfigError, StorageError
from tests.support.loops import on_a_loop, until
from tests.support.served import SCHEMA, BarePeer, found_run, new_folder, served

STEPS = 5  # with a checkpoint at 3


async def commit(peer: BarePeer, outer_step: int) -> None:
    """One round more; it leads TO `outer_step`."""
    view = await peer.view(lambda view: view.round_id > 0 and view.outer_step == outer_step - 1)
    await peer.contribute(view.round_id, outer_step - 1, [torch.ones(f.numel) for f in SCHEMA.fragments])
    done = await peer.view(lambda view: view.outer_step == outer_step)
    await peer.report(outer_step, done.digest)


def killed_run(path: Path) -> StateFolder:
    """A run at outer step STEPS whose coordinator was killed."""
    folder = new_folder(path)

    async def run() -> None:
        async with served(folder, kill=True) as run, run.peer("a") as peer:
            await found_run(peer)
            for outer_step in range(1, STEPS + 1):
                await commit(peer, outer_step)

    asyncio.run(run())
    return folder


def serve(folder: StateFolder) -> int:
    """Start the run and kill it; the outer step that it went on from."""

    async def run() -> int:
        async with served(folder, kill=True) as run:
            return run.coordinator.run.rounds.published.outer_step

    return asyncio.run(run())


def cut_the_journal(folder: StateFolder) -> None:
    """As a disk leaves it that lost the last writes."""
    path = folder.outer / "step-00000003.journal"
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.rindex(b'"kind":"commit"')])


def remove_the_journal(folder: StateFolder) -> None:
    (folder.outer / "step-00000003.journal").unlink()


@pytest.mark.parametrize(("lose", "left"), [(cut_the_journal, 4), (remove_the_journal, 3)])
def test_a_run_that_lost_commits_is_refused_until_its_operator_accepts_it(
    tmp_path: Path, lose: Any, left: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = killed_run(tmp_path / "run")
    lose(folder)
    with pytest.raises(SystemExit) as ended:
        run_command("edit-coordinator", lambda: asyncio.run(serve_run(folder)))
    said = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and len(said) == 1
    for words in (f"holds outer step {left}", f"outer step {STEPS} was committed", "--accept-rollback"):
        assert words in said[0]

    async def accepted() -> None:
        async with served(folder, kill=True, accept_rollback=True) as run:
            assert run.coordinator.run.rounds.published.outer_step == left

    asyncio.run(accepted())
    assert serve(folder) == left  # once is enough


def test_a_run_whose_parameters_are_gone_is_not_founded_anew(tmp_path: Path) -> None:
    folder = killed_run(tmp_path / "run")
    shutil.rmtree(folder.outer)
    with pytest.raises(ConfigError, match=f"holds no outer step, but outer step {STEPS} was committed"):
        serve(folder)


def test_another_outer_step_of_the_same_number_is_refused(tmp_path: Path) -> None:
    folder = killed_run(tmp_path / "run")
    write_json(folder.high_water, {"outer_step": STEPS, "digest": "0" * 64}, version=1)
    with pytest.raises(ConfigError, match="was committed with 000000000000"):
        serve(folder)


def test_a_damaged_mark_is_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = killed_run(tmp_path / "run")
    folder.high_water.write_bytes(b"")
    with pytest.raises(StorageError, match=r"is damaged.*--accept-rollback"):
        serve(folder)


def test_a_mark_is_never_ahead_of_what_a_kill_would_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each write of the mark the folder is read as a restart would."""
    folder_path, compared = tmp_path / "run", list[tuple[int, int]]()

    def write(path: Path, values: dict[str, Any], *, version: int) -> None:
        compared.append((values["outer_step"], load_outer(StateFolder(folder_path)).outer_step))
        write_json(path, values, version=version)

    monkeypatch.setattr(high_water, "write_json", write)
    folder = killed_run(folder_path)
    assert compared and all(mark <= durable for mark, durable in compared)
    assert read_json(folder.high_water, version=1)["outer_step"] == STEPS
    assert serve(folder) == STEPS


@pytest.mark.parametrize("mark", range(STEPS + 1))
def test_a_kill_before_the_mark_was_written_changes_nothing(tmp_path: Path, mark: int) -> None:
    folder = killed_run(tmp_path / "run")
    if mark:
        write_json(folder.high_water, {"outer_step": mark, "digest": load_outer(folder).digest}, version=1)
    else:
        folder.high_water.unlink()
    assert serve(folder) == STEPS


@on_a_loop
async def test_a_member_beyond_the_last_commit_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with served(new_folder(tmp_path / "run")) as run, run.peer("a") as peer:
        await found_run(peer)
        for outer_step in (40, 41):
            await peer.report(outer_step)
            said = f"a: it reports outer step {outer_step}, the run is at 0"
            await until(partial(lambda words: words in run_status(run.coordinator.run).reason, said))
    assert [record.getMessage() for record in caplog.records if "reports outer step" in record.getMessage()] == [
        "a: it reports outer step 40, the run is at 0; were commits lost, or an old copy of the folder restored?"
    ]
