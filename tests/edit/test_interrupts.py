"""Ctrl-C while a program is loaded. What is imported takes it for a failed import, as torch and numpy may, and goes on."""

import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from edit.interrupts import end_at_interrupt, raise_at_interrupt

SCRIPTS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]
SWALLOWS = """
import signal
try:
    signal.raise_signal(signal.SIGINT)
except BaseException:
    print("swallowed")
raise ImportError("the program went on")
"""
# Who runs the tests may ignore SIGINT, as a shell does for what runs in the background: programs would, too.
STARTS = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"


def ended(words: Sequence[str], path: Path) -> tuple[int, str, str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), *filter(None, sys.path)])}
    program = (sys.executable, "-c", STARTS, sys.executable, *words)
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        *(("-c", f"from {script.replace(':', ' import ')}; main()") for script in SCRIPTS.values()),
        *(("-m", module) for module in ("aggregator", "peers", "edit.lab", "aggregator.swarm")),
    ],
    ids=" ".join,
)
def test_ctrl_c_ends_a_program_that_is_not_loaded_yet(words: Sequence[str], tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(SWALLOWS)
    assert ended(words, tmp_path) == (130, "", "")


def test_ctrl_c_ends_a_command_that_loads_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(SWALLOWS)
    words = ("-m", "peers", "alone", "--run", "run.toml", "--data", "x", "--steps", "1", "--out", str(tmp_path / "out"))
    assert ended(words, tmp_path) == (130, "", "")


def test_a_command_itself_may_clean_up(tmp_path: Path) -> None:
    program = """
import signal, sys
from edit.interrupts import end_at_interrupt
end_at_interrupt()
from edit.command_line import loading, run_command
def command():
    with loading():
        pass
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        print("cleaned up")
run_command("program", command)
"""
    assert ended(("-c", program), tmp_path) == (130, "cleaned up\n", "")


def test_only_pythons_own_handler_gives_way() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        for handler in (signal.SIG_IGN, signal.SIG_DFL, lambda *_: None):
            signal.signal(signal.SIGINT, handler)
            for call in (end_at_interrupt, raise_at_interrupt):
                call()
                assert signal.getsignal(signal.SIGINT) is handler
        signal.signal(signal.SIGINT, signal.default_int_handler)
        end_at_interrupt()
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        raise_at_interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
