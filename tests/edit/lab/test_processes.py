"""Real child processes; every wait is on a pipe that they hold open or write to, never on time."""

import os
import signal
import sys
from pathlib import Path

import pytest

from edit.errors import LocalProtocolError
from edit.lab import processes
from edit.lab.processes import ChildDied, Supervisor

STUBBORN = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
fifo = open(sys.argv[1], "wb", buffering=0)
fifo.write(b"r")
while True: signal.pause()
"""
OBEDIENT = STUBBORN.replace("signal.SIG_IGN", "lambda *_: sys.exit(7)")
WITH_GRANDCHILD = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]])
"""


WITH_A_GROUP_OF_ITS_OWN = """
import signal, subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]], process_group=0)
while True: signal.pause()
"""


class Fifo:
    """A named pipe: `wait_ready` returns when the child has started, `wait_gone` when every process that holds it is gone."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)

    def open(self) -> None:
        self._file = open(self.path, "rb", buffering=0)  # noqa: PTH123, SIM115

    def wait_ready(self) -> None:
        self.open()
        assert self._file.read(1) == b"r"

    def wait_gone(self) -> None:
        assert self._file.read(1) == b""
        self._file.close()


@pytest.fixture
def fifo(tmp_path: Path) -> Fifo:
    return Fifo(tmp_path / "fifo")


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def test_a_child_that_ignores_sigterm_is_killed_on_leaving(tmp_path, fifo):
    with Supervisor(tmp_path / "logs", patience_s=0.05) as supervisor:
        supervisor.start("stubborn", python(STUBBORN, fifo.path))
        fifo.wait_ready()
    fifo.wait_gone()
    (end,) = supervisor.ended()
    assert end.returncode == -signal.SIGKILL
    assert end.expected


def test_an_obedient_child_ends_by_sigterm_with_its_own_exit_code(tmp_path, fifo):
    with Supervisor(tmp_path / "logs", patience_s=30) as supervisor:
        supervisor.start("obedient", python(OBEDIENT, fifo.path))
        fifo.wait_ready()
        assert supervisor.stop("obedient").returncode == 7
    fifo.wait_gone()


def test_an_exception_ends_the_children_too(tmp_path, fifo):
    supervisor = Supervisor(tmp_path / "logs", patience_s=0.05)
    with pytest.raises(KeyboardInterrupt), supervisor:
        supervisor.start("stubborn", python(STUBBORN, fifo.path))
        fifo.wait_ready()
        raise KeyboardInterrupt
    fifo.wait_gone()


def test_a_grandchild_whose_parent_is_gone_is_ended_with_its_group(tmp_path, fifo):
    with Supervisor(tmp_path / "logs", patience_s=0.05) as supervisor:
        supervisor.start("parent", python(WITH_GRANDCHILD, fifo.path, STUBBORN))
        fifo.wait_ready()
    fifo.wait_gone()


def test_kill_is_sigkill_and_the_child_can_be_started_again(tmp_path, fifo):
    with Supervisor(tmp_path / "logs", patience_s=0.05) as supervisor:
        supervisor.start("peer", python(STUBBORN, fifo.path))
        fifo.wait_ready()
        before = supervisor.pid("peer")
        with pytest.raises(LocalProtocolError, match="already running"):
            supervisor.start("peer", python(STUBBORN, fifo.path))
        supervisor.kill("peer")
        fifo.wait_gone()
        assert not supervisor.running("peer")
        (end,) = supervisor.ended()
        assert (end.returncode, end.expected) == (-signal.SIGKILL, True)
        supervisor.start("peer", python(STUBBORN, fifo.path))
        fifo.wait_ready()
        assert supervisor.running("peer")
        assert supervisor.pid("peer") != before
    fifo.wait_gone()


def test_an_unexpected_end_names_the_child_its_code_and_its_last_lines(tmp_path, fifo):
    code = "import sys; f = open(sys.argv[1], 'wb'); print('disk is full', flush=True); sys.exit(3)"
    with Supervisor(tmp_path / "logs") as supervisor:
        supervisor.start("coordinator", python(code, fifo.path))
        fifo.open()
        fifo.wait_gone()
        supervisor._children["coordinator"].process.wait()
        (end,) = supervisor.ended()
        assert not end.expected
        assert str(end) == "coordinator ended (exit code 3); its last lines:\n    disk is full"
        assert supervisor.ended() == ()


def test_call_returns_the_output_of_this_call_only(tmp_path):
    with Supervisor(tmp_path) as supervisor:
        assert supervisor.call({"say": python("print('one')")}) == {"say": "one\n"}
        both = supervisor.call({"say": python("print('two')"), "other": python("print('three')")})
        assert both == {"say": "two\n", "other": "three\n"}
        with pytest.raises(ChildDied, match=r"say ended \(exit code 1\)(.|\n)*ValueError: no"):
            supervisor.call({"other": python("pass"), "say": python("raise ValueError('no')")})
        assert supervisor.ended() == ()


def test_call_gives_up_on_a_command_that_hangs(tmp_path, fifo):
    with Supervisor(tmp_path, patience_s=0.05) as supervisor, pytest.raises(ChildDied, match=r"killed by SIG(TERM|KILL)"):
        supervisor.call({"hang": python("import signal; signal.pause()")}, timeout_s=0.05)


def test_nothing_starts_after_close(tmp_path):
    supervisor = Supervisor(tmp_path)
    supervisor.close()
    with pytest.raises(LocalProtocolError):
        supervisor.start("late", python("pass"))


@pytest.fixture
def interruptible():
    """A shell starts what it puts into the background with SIGINT ignored; Python then raises no KeyboardInterrupt."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_in_the_middle_of_a_start_is_raised_after_the_child_is_known(tmp_path, monkeypatch, interruptible):
    spawn = processes._spawn

    def interrupted(argv, output):
        child = spawn(argv, output)
        signal.raise_signal(signal.SIGINT)
        return child

    monkeypatch.setattr(processes, "_spawn", interrupted)
    with pytest.raises(KeyboardInterrupt), Supervisor(tmp_path, patience_s=0.05) as supervisor:
        supervisor.start("stubborn", python("import signal; signal.pause()"))
    assert [end.name for end in supervisor.ended()] == ["stubborn"]


@pytest.mark.parametrize("how", ["kill", "stop", "close"])
def test_what_a_child_has_started_in_a_group_of_its_own_ends_with_it_even_if_stopped(tmp_path, fifo, how):
    """As the host beside a peer, which survives signals to the peer's group."""
    with Supervisor(tmp_path / "logs", patience_s=0.05) as supervisor:
        supervisor.start("peer", python(WITH_A_GROUP_OF_ITS_OWN, fifo.path, STUBBORN))
        fifo.wait_ready()
        assert len(supervisor.processes("peer")) == 2
        supervisor.send_signal("peer", signal.SIGSTOP)
        {"kill": lambda: supervisor.kill("peer"), "stop": lambda: supervisor.stop("peer"), "close": supervisor.close}[how]()
        fifo.wait_gone()
