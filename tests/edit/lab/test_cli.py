"""`edit-lab --help` answers at once, and so does whatever only asks: nothing heavy is imported before a command needs it."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "modules", ["edit.lab.cli, aggregator.cli, peers.cli", "aggregator.swarm.commands, aggregator.swarm.relay"]
)
def test_a_command_that_only_asks_needs_no_torch(modules: str) -> None:
    code = f"import sys, {modules}; print(sorted({{'torch', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
