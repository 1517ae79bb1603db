"""`edit-lab --help` answers at once: nothing heavy is imported before a command runs."""

from __future__ import annotations

import subprocess
import sys


def test_help_of_every_command_needs_no_torch() -> None:
    code = "import sys, edit.lab.cli, aggregator.cli, peers.cli; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
