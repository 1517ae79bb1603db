"""How commands log and end. In processes of their own: both change the process that they run in."""

import importlib
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import edit

WORDS = "left (\x1b[2J\x1b]0;title\x07 gone\r I all is well \u202e)"
SHOWN = "left ( [2J ]0;title  gone  I all is well  )"
LOGGED = f"""
import logging
from edit.command_line import log_to_stderr
log_to_stderr(logging.INFO, "rank 1: ")
logging.getLogger("a").info("%s: %s", "peer\\nanother line", {WORDS!r})
try:
    raise ValueError({WORDS!r})
except ValueError:
    logging.getLogger("a").exception("a bug")
"""


def ended_by(error: str) -> str:
    return f"""
from edit import errors
from edit.command_line import run_command
def command():
    raise {error}({WORDS!r})
run_command("program", command)
"""


def stderr_of(program: str, code: int = 0) -> list[str]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    return done.stderr.decode().split("\n")


def test_a_message_is_one_line_whatever_is_in_it():
    first, second, *trace = stderr_of(LOGGED)
    assert first.endswith(f" I rank 1: peer another line: {SHOWN}")
    assert second.endswith(" E rank 1: a bug")
    assert trace[0] == "Traceback (most recent call last):" and trace[-2] == f"ValueError: {SHOWN}"
    assert all(line.isprintable() for line in trace)


@pytest.mark.parametrize(("error", "code"), [("RefusedError", 3), ("EvictedError", 4), ("TransportError", 69)])
def test_what_an_error_quotes_cannot_move_the_cursor(error: str, code: int):
    assert stderr_of(ended_by(f"errors.{error}"), code) == [f"program: {SHOWN}", ""]


def test_a_bug_prints_its_traceback_and_nothing_else_that_a_terminal_obeys():
    first, *lines = stderr_of(ended_by("OSError"), 70)
    assert first == "Traceback (most recent call last):" and lines[-2] == f"OSError: {SHOWN}"
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize(
    ("module", "program"), [("aggregator.cli", "edit-coordinator"), ("peers.cli", "edit-peer"), ("edit.lab.cli", "edit-lab")]
)
def test_every_program_says_its_version_and_helps_in_short(module: str, program: str) -> None:
    app = importlib.import_module(module).app
    said = CliRunner().invoke(app, ["--version"])
    assert (said.exit_code, said.output) == (0, f"{program} {edit.__version__}\n")
    short, long = (CliRunner().invoke(app, [option]) for option in ("-h", "--help"))
    assert short.exit_code == 0
    assert short.output == long.output
