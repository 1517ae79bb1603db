"""A program of the aggregator's that answers a question does not outlive the process that asked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from peers.helper_process import ends_with_this
from peers.swarm import aggregator_process
from tests.support.loops import WAIT_S

FOR_EVER = """
import threading
from aggregator.swarm import cli
def run(*_):
    print("runs", flush=True)
    threading.Event().wait()
cli.run_command = run
cli.main()
"""
ANSWERS = """
import sys, threading
from aggregator.swarm import cli
def run(*_):
    for thread in threading.enumerate():
        if thread.name == "asked by":
            thread.join(0.5)  # it waits for longer
    print(sys.stdin.read(), end="")
cli.run_command = run
cli.main()
"""
SAYS = "import os, stat; print(int(stat.S_ISFIFO(os.fstat(int(os.environ['EDIT_ENDS_WITH'])).st_mode)))"


def test_it_ends_when_the_other_end_of_its_pipe_is_closed() -> None:
    with ends_with_this() as beside:
        process = subprocess.Popen([sys.executable, "-c", FOR_EVER], stdout=subprocess.PIPE, text=True, **beside)
        assert process.stdout is not None and process.stdout.readline() == "runs\n"
        assert process.poll() is None
    assert process.wait(WAIT_S) == 1
    process.stdout.close()


def test_each_question_is_asked_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = [sys.executable, "-S", "-c", SAYS]
    monkeypatch.setattr(aggregator_process, "command", lambda *_: line)
    assert aggregator_process.ask("status") == ["1"]
    line[-1] = SAYS.replace("print(", "print('{\"parameters\": %d}' % ")
    assert aggregator_process.parameters_of(tmp_path, ()) == 1


def test_it_answers_where_stdin_and_stdout_are_closed() -> None:
    code = "import os; os.closerange(0, 2); from peers.swarm import aggregator_process as it; "
    code += f"it.command = lambda *_: {[sys.executable, '-c', ANSWERS]}; assert it.ask('seek', told='told') == ['told']"
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, check=False, timeout=WAIT_S)
    assert (done.returncode, done.stderr) == (0, "")
