"""A bug in a merge or a commit: the round fails with a reason and a traceback, nothing is half applied, the run goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from aggregator.control.membership import Membership
from aggregator.server import serve_run
from aggregator.storage.journal import Disk
from aggregator.storage.pending_injection import Sender
from aggregator.worker_thread import Background
from edit.command_line import run_command
from edit.errors import ConfigError, FormatError, LocalProtocolError, RemoteProtocolError, StorageError
from edit.fragments.digest import digest
from edit.fragments.schema import FragmentSpec
from edit.merging.injection import Injected, Injection
from edit.merging.merge import Measured
from edit.merging.mergers import Admitted, Rejected
from edit.records import Verdict
from edit.rounds.events import Phase
from tests.support.rounds import FailingFsync, HeldFsync, open_rounds
from tests.support.served import SCHEMA, new_folder, theta

ONES = [torch.ones(fragment.numel) for fragment in SCHEMA.fragments]


class Failing:
    """Raises the first time it is called, later does what it stands for."""

    def __init__(self, error: Exception, really: Callable[..., Any]) -> None:
        self._error, self._really, self.failed = error, really, False

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self.failed:
            return self._really(*arguments, **named)
        self.failed = True
        raise self._error


def scenario(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(body())


@pytest.mark.parametrize(
    ("method", "error", "reason"),
    [
        ("record", RuntimeError("boom"), "RuntimeError: boom"),
        ("reduce", MemoryError("no memory"), "MemoryError: no memory"),
        (
            "reduce",
            RemoteProtocolError("fragment 0 of peer a has 4 elements, not 5"),
            "RemoteProtocolError: fragment 0 of peer a",
        ),
    ],
)
def test_an_exception_in_a_merge_fails_the_round_and_the_next_one_commits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str, error: Exception, reason: str
) -> None:
    async def body() -> None:
        async with open_rounds(tmp_path) as rounds:
            setattr(rounds.outer, method, Failing(error, getattr(rounds.outer, method)))
            rounds.ready("a")
            await rounds.contribute("a", ONES)
            await rounds.closed(1)
            assert (rounds.runner.last_closed[:2], rounds.machine.phase) == ((1, False), Phase.COLLECTING)
            assert rounds.runner.last_closed[2].startswith(reason)
            assert (rounds.machine.round_id, rounds.outer.outer_step, rounds.published.outer_step) == (2, 0, 0)
            assert rounds.outer.digest == digest(theta())
            await rounds.contribute("a", ONES)
            await rounds.closed(2)
            assert rounds.runner.last_closed[:2] == (2, True)
            assert rounds.outer.digest == digest([t - 1 for t in theta()])
            assert rounds.background.failure is None
        assert rounds.recovered().digest == digest([t - 1 for t in theta()])

    with caplog.at_level(logging.ERROR):
        scenario(body)
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.exc_info is not None and record.exc_info[1] is error, "the log has the traceback"


def test_an_exception_while_the_commit_is_written_leaves_no_trace_of_the_round(tmp_path: Path) -> None:
    fsync = FailingFsync(RuntimeError("boom"))

    async def body() -> None:
        async with open_rounds(tmp_path, Disk(fsync=fsync)) as rounds:
            rounds.ready("a")
            before = rounds.journal.stat().st_size
            fsync.fail_once()
            await rounds.contribute("a", [100 * one for one in ONES])
            await rounds.closed(1)
            assert rounds.runner.last_closed == (1, False, "RuntimeError: boom")
            assert rounds.journal.stat().st_size == before, "the fragments that were written for it are cut off"
            await rounds.contribute("a", ONES)
            await rounds.closed(2)
            assert rounds.outer.digest == digest([t - 1 for t in theta()])
        assert rounds.recovered().digest == digest([t - 1 for t in theta()])

    scenario(body)


def test_an_injection_is_neither_lost_nor_brought_twice(tmp_path: Path) -> None:
    async def body() -> None:
        async with open_rounds(tmp_path) as rounds:
            injected = Injected("above", 3, 0)
            injection = Injection(brings=injected, base=None, replaces=False, fragments=dict(enumerate(ONES)))
            await rounds.runner.inject(injection, digest(ONES), Sender("west", ""))
            rounds.outer.record = Failing(RuntimeError("boom"), rounds.outer.record)
            rounds.ready("a")
            for round_id, accepted in ((1, injected), (2, None), (3, None)):
                await rounds.contribute("a", ONES)
                await rounds.closed(round_id)
                assert (rounds.runner.accepted, rounds.published.injected) == (accepted, None if accepted else injected)
            assert rounds.outer.digest == digest([t - (d - i) - d for t, d, i in zip(theta(), ONES, ONES, strict=True)])
        assert rounds.recovered().injected == injected

    scenario(body)


def test_a_commit_that_is_on_disk_is_never_said_to_have_failed(tmp_path: Path) -> None:
    """What follows the journal's fsync may fail by a bug only: the process ends, and the restart replays the commit."""

    async def body() -> None:
        async with open_rounds(tmp_path) as rounds:
            rounds.outer.commit = Failing(RuntimeError("boom"), rounds.outer.commit)
            rounds.ready("a")
            await rounds.contribute("a", ONES)
            with pytest.raises(LocalProtocolError, match=r"a background task failed \(RuntimeError: boom\)"):
                await rounds.background.watch(asyncio.Event())
            assert rounds.machine.phase is Phase.COMMITTING and rounds.runner.last_closed == (0, False, "")
        assert rounds.recovered().digest == digest([t - 1 for t in theta()])

    scenario(body)


def test_a_process_that_stops_during_a_commit_has_it_in_memory_as_on_disk(tmp_path: Path) -> None:
    """Else its last checkpoint would begin a segment behind the commit, and the journal would not fit together."""
    fsync = HeldFsync()

    async def body() -> None:
        async with open_rounds(tmp_path, Disk(fsync=fsync)) as rounds:
            rounds.ready("a")
            fsync.hold()
            await rounds.contribute("a", ONES)
            await fsync.begun()
            await rounds.background.stop()
            fsync.release()
            await rounds.runner.checkpoint()
            assert rounds.outer.outer_step == 1
        assert rounds.recovered().digest == digest([t - 1 for t in theta()])

    scenario(body)


def test_a_checkpoint_that_fails_by_a_bug_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with open_rounds(tmp_path) as rounds:
            rounds.outer.to_tensors = Failing(RuntimeError("boom"), rounds.outer.to_tensors)
            rounds.ready("a")
            for round_id in range(1, 5):  # a checkpoint is due after the third
                await rounds.contribute("a", ONES)
                await rounds.closed(round_id)
            assert rounds.outer.outer_step == 4
        assert rounds.recovered().outer_step == 4

    with caplog.at_level(logging.ERROR):
        scenario(body)
    assert [(r.getMessage(), r.exc_info is not None) for r in caplog.records] == [("no checkpoint: RuntimeError: boom", True)]


def test_a_bug_in_the_round_machine_ends_the_process_whoever_called_it(tmp_path: Path) -> None:
    async def body() -> None:
        async with open_rounds(tmp_path) as rounds:
            rounds.machine.handle = Failing(RuntimeError("boom"), rounds.machine.handle)
            with pytest.raises(RuntimeError, match="boom"):
                rounds.ready("a")
            assert isinstance(rounds.background.failure, RuntimeError)

    scenario(body)


def test_a_bug_in_the_clock_ends_the_process_with_70_and_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    def tick(self: Membership, now: float) -> list[object]:
        raise RuntimeError("boom")

    monkeypatch.setattr(Membership, "tick", tick)
    folder = new_folder(tmp_path / "run")
    with pytest.raises(SystemExit) as end, caplog.at_level(logging.ERROR):
        run_command("edit-coordinator", lambda: asyncio.run(serve_run(folder)))
    assert end.value.code == 70
    assert (
        capsys.readouterr().err
        == "edit-coordinator: a background task failed (RuntimeError: boom); the log has the traceback\n"
    )
    (record,) = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert record.exc_info is not None and str(record.exc_info[1]) == "boom"


@dataclass(frozen=True)
class Rejecting:
    peer_id: str
    fragment_id: int

    def admit(self, fragment: FragmentSpec, contribution: Measured) -> Admitted | Rejected:
        out = (contribution.peer_id, fragment.fragment_id) == (self.peer_id, self.fragment_id)
        return Rejected("its signature is wrong") if out else Admitted(contribution)


def test_a_rejected_contribution_is_out_with_a_verdict_and_the_round_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with open_rounds(tmp_path, policy=Rejecting("a", 1)) as rounds:
            rounds.ready("a", "b")
            twice = [2 * one for one in ONES]
            await rounds.contribute("a", twice)
            await rounds.contribute("b", ONES)
            await rounds.closed(1)
            first, second = rounds.published.update(1).fragments
            assert [(v.peer_id, v.verdict, v.weight > 0) for v in second.verdicts] == [
                ("a", Verdict.REJECTED, False),
                ("b", Verdict.OK, True),
            ]
            assert all(v.verdict is Verdict.OK for v in first.verdicts)
            before = theta()
            assert rounds.outer.digest == digest([before[0] - 1.5, before[1] - 1])
        assert rounds.recovered().digest == digest([before[0] - 1.5, before[1] - 1]), "the journal has the verdict, too"

    with caplog.at_level(logging.INFO):
        scenario(body)
    assert "round 1, fragment 1: rejected a: its signature is wrong" in caplog.messages


def test_with_too_few_admitted_the_round_fails_and_says_why(tmp_path: Path) -> None:
    async def body() -> None:
        async with open_rounds(tmp_path, quorum=2, policy=Rejecting("a", 0)) as rounds:
            rounds.ready("a", "b")
            await rounds.contribute("a", ONES)
            await rounds.contribute("b", ONES)
            await rounds.closed(1)
            reason = "too few are admitted: 1 of quorum 2 (rejected a: its signature is wrong)"
            assert rounds.runner.last_closed == (1, False, reason)
            assert rounds.outer.digest == digest(theta())

    scenario(body)


@pytest.mark.parametrize("error", [StorageError("disk: full"), ConfigError("run.toml: another"), FormatError("too new")])
def test_a_disk_or_settings_that_end_a_process_are_said_in_one_line(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        with ThreadPoolExecutor(1) as worker:
            background = Background(worker)

            async def fails() -> None:
                raise error

            background.spawn(fails())
            with pytest.raises(type(error), match=str(error)):
                await background.watch(asyncio.Event())
            assert background.failure is error and not caplog.records

    scenario(body)
