"""The host's process beside a peer: started again when it is killed, given up when that happens too often."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edit.errors import EditError, EvictedError, TransportError
from peers.swarm import aggregator_process, cli
from peers.swarm.aggregator_process import MOST_RESTARTS, HostProcess, ask
from tests.support.loops import WAIT_S

KILLED = "import os, signal; open({starts!r}, 'a').write('x'); os.kill(os.getpid(), signal.SIGKILL)"
GIVES_UP = "open({starts!r}, 'a').write('x'); raise SystemExit(69)"


@pytest.mark.parametrize(
    ("program", "starts", "kind", "why"),
    [
        (KILLED, MOST_RESTARTS + 1, EditError, f"was killed by signal 9, {MOST_RESTARTS + 1} times"),
        (GIVES_UP, 1, TransportError, "ended with exit code 69"),
    ],
    ids=["killed each time", "gives up by itself"],
)
def test_a_host_that_fails_too_often_or_gives_up_ends_its_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, starts: int, kind: type[EditError], why: str
) -> None:
    log = tmp_path / "starts"
    line = [sys.executable, "-S", "-c", program.format(starts=str(log))]
    monkeypatch.setattr(aggregator_process, "command", lambda *words: line)
    host, ended, told = HostProcess(tmp_path), threading.Event(), list[int]()
    try:
        host.at_its_end(ended.set)
        assert ended.wait(WAIT_S)
        with pytest.raises(kind, match=f"this member's host {why}; its last lines say why") as caught:
            assert host.ready is None
        assert type(caught.value) is kind and log.read_text() == "x" * starts
        host.at_its_end(lambda: told.append(1))
        assert told == [1], "also when it had failed before"
    finally:
        host.close()
    assert log.read_text() == "x" * starts, "it is not started again"


SERVES_ONCE = """
import os, signal
if os.path.exists({starts!r}):
    print('{{"listen": "127.0.0.1:9"}}', flush=True)
    input()
open({starts!r}, 'a').write('x')
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("refusals", [2, MOST_RESTARTS])
def test_a_killed_host_that_the_system_cannot_start_is_started_later_or_ends_its_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusals: int
) -> None:
    log, start, refused, serves = tmp_path / "starts", subprocess.Popen, list[int](), threading.Event()
    line = [sys.executable, "-S", "-c", SERVES_ONCE.format(starts=str(log))]

    def popen(*words: Any, **options: Any) -> subprocess.Popen[bytes]:
        if log.exists() and len(refused) < refusals:
            refused.append(1)
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return start(*words, **options)

    monkeypatch.setattr(aggregator_process, "command", lambda *words: line)
    monkeypatch.setattr(aggregator_process, "AGAIN_S", 0.001)
    monkeypatch.setattr(aggregator_process, "local_address", lambda address: serves.set() or address)
    monkeypatch.setattr(subprocess, "Popen", popen)
    host, ended = HostProcess(tmp_path), threading.Event()
    try:
        host.at_its_end(ended.set)
        if refusals < MOST_RESTARTS:
            assert serves.wait(WAIT_S) and not ended.is_set()
        else:
            assert ended.wait(WAIT_S)
            with pytest.raises(TransportError, match=r"host cannot be started \(Resource temporarily unavailable\)"):
                assert host.ready is None
        assert len(refused) == refusals
    finally:
        host.close()


def test_a_host_that_is_started_again_while_the_peer_closes_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, start, started = tmp_path / "starts", subprocess.Popen, list[subprocess.Popen[bytes]]()
    line = [sys.executable, "-S", "-c", SERVES_ONCE.format(starts=str(log))]
    closing, known = threading.Thread(target=lambda: host.close()), threading.Event()

    def popen(*words: Any, **options: Any) -> subprocess.Popen[bytes]:
        if started:
            assert known.wait(WAIT_S)
            closing.start()
            assert host._ending.wait(WAIT_S)
        started.append(start(*words, **options))
        return started[-1]

    monkeypatch.setattr(aggregator_process, "command", lambda *words: line)
    monkeypatch.setattr(subprocess, "Popen", popen)
    host = HostProcess(tmp_path)
    known.set()
    host._watcher.join(WAIT_S)
    closing.join(WAIT_S)
    assert [each.poll() is None for each in started] == [False, False] and not closing.is_alive()


def test_an_eviction_that_a_command_was_told_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "from edit import command_line, errors\ndef told(): raise errors.EvictedError('key lost')\n"
    line = [sys.executable, "-c", program + "command_line.run_command('aggregator.swarm', told)"]
    monkeypatch.setattr(aggregator_process, "command", lambda *words: line)
    with pytest.raises(EvictedError, match=r"^key lost$"):
        ask("status")


def test_a_command_that_becomes_the_aggregators_says_its_own_name(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "peers", "swarm", "status", "--home", str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.partition(": ")[0]) == (2, "edit-peer swarm")


def test_a_command_whose_output_is_closed_is_handed_on_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = list[list[str]]()
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(cli, "os", SimpleNamespace(environ={}, execve=lambda program, line, environment: ran.append(line)))
    cli.operate("status", "home")
    assert ran[0][-2:] == ["status", "home"]
