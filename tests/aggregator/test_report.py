"""`edit-coordinator report`: a run as one file, while it is served and afterwards, with all of its starts."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aggregator.cli import app
from aggregator.control.status import run_status
from aggregator.past import Past, whole_status
from aggregator.security.members import Members
from aggregator.storage.state_folder import StateFolder
from edit.errors import ConfigError, TransportError
from edit.plain_text import json_text
from tests.aggregator.test_run_feed import REPORT
from tests.support.loops import on_a_loop, until
from tests.support.served import SCHEMA, TOML, Served, found_run, held_clock, new_folder, served, theta

SHORT = TOML.replace("outer_steps = 100", "outer_steps = 3")


def report(folder: StateFolder, out: Path) -> str:
    result = CliRunner().invoke(app, ["report", "--state", str(folder.path), "--out", str(out)])
    assert result.exit_code == 0, result.exception
    assert str(out) in result.stdout
    return out.read_text(encoding="utf-8")


async def take_steps(at: Served, first: int, last: int, *, found: bool = False) -> None:
    async with at.peer("ada") as peer:
        if found:
            await found_run(peer)
        else:
            await peer.attend()
            view = await peer.view()
            await peer.report(view.outer_step, view.digest)
        for step in range(first, last):
            view = await peer.view(lambda v, step=step: v.outer_step == step and v.round_id)
            await peer.contribute(view.round_id, step, theta(step + 1))
            await until(lambda step=step: (rounds := at.coordinator.run.recent_rounds) and rounds[-1].outer_step == step + 1)


def test_a_report_has_all_starts_of_a_run_whether_it_is_served_or_not(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=SHORT)

    @on_a_loop
    async def first() -> None:
        async with served(folder, held_clock()) as at:
            await take_steps(at, 0, 2, found=True)

    @on_a_loop
    async def second() -> None:
        async with served(folder, held_clock()) as at:
            live = await asyncio.to_thread(whole_status, folder)
            assert (live.phase, live.outer_step) == ("gathering", 2)
            assert [each.outer_step for each in live.rounds] == [1, 2]
            assert [each.number for each in live.events] == [*range(1, len(live.events) + 1)]
            assert "ada" in await asyncio.to_thread(report, folder, tmp_path / "live.html")
            alone = run_status(at.coordinator.run)  # as `watch`, `status` and the page show it, without the files
            assert (alone.rounds, alone.events, alone.curves) == (live.rounds, live.events, live.curves)
            assert next(each for each in alone.members if each.peer_id == "ada").verdict == "ok"
            assert (at.coordinator.run.history.committed, at.coordinator.run.history.traffic) == (0, (0, 0))
            await take_steps(at, 2, 3)
            alone = run_status(at.coordinator.run)
            assert [each.outer_step for each in alone.rounds] == [1, 2, 3]
            assert [each.number for each in alone.events] == [*range(1, len(alone.events) + 1)]
            curves = {each.kind: each for each in alone.curves if not each.peer_id}
            assert curves["norm"].x == (1.0, 2.0, 3.0) and curves["bytes_in"].y == tuple(sorted({*curves["bytes_in"].y}))

    first()
    stopped = whole_status(folder)
    assert (stopped.phase, stopped.outer_step, stopped.waiting_for) == ("stopped", 2, "the coordinator, which does not run")
    silent = CliRunner().invoke(app, ["status", "--state", str(folder.path)])
    with pytest.raises(TransportError, match=r"does not answer.* The last commit was outer step 2 of 3$"):
        raise silent.exception or AssertionError(silent.stdout)
    second()
    ended = whole_status(folder)
    assert (ended.phase, ended.outer_step, ended.eta_s) == ("finished", 3, None)
    assert [(each.outer_step, each.number) for each in ended.rounds] == [(1, 1), (2, 2), (3, 1)]
    (ada,) = ended.members
    assert ada.expires == Members(folder.path / "members.json").all()[0].expires > 0
    assert (ada.peer_id, ada.verdict, ada.verdict_reason) == ("ada", "ok", "merged")
    assert (ended.parameters, ended.tokens) == (SCHEMA.numel, 30), "from the last checkpoint"
    assert (ada.contributions, ada.rejections, ada.absences) == (3, 0, 0), "over all starts"
    assert stopped.parameters == SCHEMA.numel
    norms = next(each for each in ended.curves if (each.kind, each.peer_id) == ("norm", "ada"))
    assert norms.x == (1.0, 2.0, 3.0)
    told = CliRunner().invoke(app, ["status", "--state", str(folder.path)])
    assert told.exit_code == 0 and "the run has ended at outer step 3" in told.stdout, told.exception
    assert "ada" in told.stdout and "digest" in told.stdout
    beside = CliRunner().invoke(
        app, ["report", "--state", str(folder.path), "--out", str(tmp_path / "two.html"), *["--beside", str(folder.path)] * 2]
    )
    assert beside.exit_code == 0, beside.exception
    two = (tmp_path / "two.html").read_text(encoding="utf-8")
    assert f'"run {folder.run_id}"' in two and f'"run {folder.run_id} (2)"' in two
    nine = ["report", "--state", str(folder.path), *["--beside", str(folder.path)] * 9]
    with pytest.raises(ConfigError, match="at most 8 runs"):
        raise CliRunner().invoke(app, nine).exception or AssertionError
    page = report(folder, tmp_path / "ended.html")
    assert "ada" in page and "Finished" in page and "<script src" not in page


def test_lines_that_are_damaged_or_of_another_kind_are_left_out() -> None:
    past = Past()
    closed = json.loads(json_text({**REPORT.as_json(), "kind": "round", "t": 1.0}))
    report = {"kind": "peer", "t": 1.0, "peer_id": "b", "state": "training"}
    for line in (
        {},
        {"kind": "round", "t": 1.0},
        {"kind": "peer", "t": "x"},
        {"kind": "news", "t": 2.0},
        {**closed, "round_id": math.inf},  # as 1e400 is read
        {**closed, "t": math.inf},
        {**closed, "t": 10**400},
        {**closed, "verdicts": [{**closed["verdicts"][0], "peers": []}]},
        {**report, "inner_steps": math.inf},
        {**report, "metrics": []},
    ):
        past.take(line)
    past.take({"kind": "member", "t": 3.0, "peer_id": "a", "state": "lost", "reason": "silent"})
    assert past.t == 3.0 and past.rounds == [] and [*past.members] == ["a"]


def test_of_the_past_at_most_so_many_bytes_are_read_the_last_ones(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    for path, peers in ((metrics.with_name("metrics.jsonl.1"), "ab"), (metrics, "cd")):
        lines = [{"kind": "member", "t": 1.0, "peer_id": peer, "state": "lost", "reason": "silent"} for peer in peers]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    line = metrics.stat().st_size // 2
    found = {n: "".join(Past.read(metrics, n).members) for n in (0, line - 1, line, 2 * line, 3 * line - 1, 3 * line, 1 << 20)}
    assert found == {0: "", line - 1: "", line: "d", 2 * line: "cd", 3 * line - 1: "cd", 3 * line: "bcd", 1 << 20: "abcd"}
    assert "".join(Past.read(metrics).members) == "abcd"


def test_a_run_that_was_drained_has_ended_until_a_further_round_is_closed(tmp_path: Path) -> None:
    folder, past = new_folder(tmp_path / "run"), Past()
    about = (folder.run_id, folder.config(), "the coordinator")
    past.take({"kind": "end", "t": 1.0, "outer_step": 2, "tokens": 5})
    assert past.alone(*about).phase == "finished" and past.alone(*about).waiting_for == ""
    past.take({"kind": "round", "t": 2.0, **REPORT.as_json()})
    assert past.alone(*about).phase == "stopped"


def test_a_report_for_which_the_disk_has_no_room_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = new_folder(tmp_path / "run"), tmp_path / "report.html"
    report(folder, out)
    before, write = out.read_bytes(), os.write

    def full(descriptor: int, data: memoryview) -> int:
        if len(data) < 1000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[:1000])

    monkeypatch.setattr("edit.durable_files.os.write", full)
    result = CliRunner().invoke(app, ["report", "--state", str(folder.path), "--out", str(out)])
    with pytest.raises(ConfigError, match=r"report\.html: cannot be written \(No space left on device\)"):
        raise result.exception or AssertionError
    assert out.read_bytes() == before and [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_report_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run")
    result = CliRunner().invoke(app, ["report", "--state", str(folder.path), "--out", str(tmp_path)])
    with pytest.raises(ConfigError, match="cannot be written"):
        raise result.exception or AssertionError


def test_a_report_keeps_the_permissions_of_the_older_one_and_goes_into_a_pipe(tmp_path: Path) -> None:
    folder, out = new_folder(tmp_path / "run", toml=SHORT), tmp_path / "report.html"
    for mode in (0o600, 0o664):
        out.touch()
        out.chmod(mode)
        assert "<html" in report(folder, out) and out.stat().st_mode & 0o777 == mode
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as end, ThreadPoolExecutor() as pool:
        page = pool.submit(end.read)
        done = CliRunner().invoke(app, ["report", "--state", str(folder.path), "--out", f"/dev/fd/{writing}"])
        os.close(writing)
        assert done.exit_code == 0 and b"</html>" in page.result()
