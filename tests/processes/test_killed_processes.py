"""Real daemons over loopback and mutual TLS: a peer, then the coordinator, are killed with SIGKILL; the run ends well."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

STEPS = 40
TOML = f"""
name = "killed"
[model]
layers = 1
width = 32
heads = 2
context = 32
[inner]
lr = 3e-3
warmup_steps = 5
[sync]
every = 8
outer_steps = {STEPS}
[outer]
optimizer = "nesterov"
lr = 0.7
momentum = 0.6
[rounds]
start_peers = 2
floor_s = 30.0
ceiling_s = 30.0
[membership]
heartbeat_s = 0.5
lease_s = 5.0
[storage]
checkpoint_every = 5
[server]
listen = "127.0.0.1:0"
enrol_listen = "127.0.0.1:0"
"""


class Daemon:
    """One process whose log is read line by line."""

    def __init__(self, *arguments: object) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", *map(str, arguments)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def until(self, words: str) -> str:
        """Read on until a line has these words."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if words in line:
                return line
        raise AssertionError(f"{words!r} was never said; rc {self.process.wait()}:\n{''.join(self.lines[-20:])}")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=30)

    def finish(self) -> int:
        _, rest = self.process.communicate(timeout=100)
        self.lines += rest.splitlines(keepends=True)
        return self.process.returncode


@contextmanager
def ending(daemons: list[Daemon]) -> Iterator[None]:
    try:
        yield
    finally:
        for daemon in daemons:
            if daemon.process.poll() is None:
                daemon.kill()


def run(*arguments: object) -> str:
    done = subprocess.run([sys.executable, "-m", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(240)
def test_a_killed_peer_returns_and_a_killed_coordinator_continues(tmp_path: Path) -> None:
    state, daemons = tmp_path / "state", list[Daemon]()
    (tmp_path / "run.toml").write_text(TOML)
    (tmp_path / "text.py").write_bytes(Path(json.__file__).read_bytes())

    def start(*arguments: object) -> Daemon:
        daemons.append(Daemon(*arguments))
        return daemons[-1]

    def peer(name: str) -> Daemon:
        # throttled, so that the run is still going on when the killed one is back
        return start(
            "peers", "run", "--home", tmp_path / name, "--data", tmp_path / "text.py", "--threads", 1, "--throttle", 10
        )

    run("aggregator", "init", "--state", state, "--config", tmp_path / "run.toml")
    with ending(daemons):
        coordinator = start("aggregator", "serve", "--state", state)
        coordinator.until(" serving ")
        for name in ("a", "b"):
            run("peers", "join", run("aggregator", "invite", "--state", state, name).strip(), "--home", tmp_path / name)
        a, b = peer("a"), peer("b")
        b.until("outer step 3,")
        b.kill()
        assert "lost" in coordinator.until("b: lost")
        coordinator.until("committed: the only contributor in")  # nobody waits for the dead

        returned = peer("b")
        returned.until("joined at outer step")
        coordinator.until("committed: all 2 contributors in")

        coordinator.kill()
        before = outer(state)
        coordinator = start("aggregator", "serve", "--state", state)
        recovered = coordinator.until("recovered outer step")
        assert f"outer step {before['outer_step']}, digest {before['digest'][:12]}" in recovered
        coordinator.until("finished at outer step")
        assert (a.finish(), returned.finish()) == (0, 0)
        status = json.loads(run("aggregator", "status", "--state", state, "--json"))
        assert (status["phase"], status["outer_step"]) == ("finished", STEPS)
        last = f"the run has finished at outer step {STEPS}, digest {status['digest'][:12]}"
        assert last in a.lines[-1], a.lines[-3:]
        assert last in returned.lines[-1], returned.lines[-3:]
        coordinator.process.send_signal(signal.SIGTERM)
        assert coordinator.finish() == 0
    steps = [line["outer_step"] for line in rounds(state) if line["committed"]]
    assert steps == list(range(1, STEPS + 1))  # no commit lost, none made twice


def rounds(state: Path) -> list[dict[str, object]]:
    lines = (json.loads(line) for line in (state / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "round"]


def outer(state: Path) -> dict[str, object]:
    """What the folder of a killed coordinator holds."""
    from aggregator.state_folder import StateFolder
    from aggregator.store import load_outer

    state_now = load_outer(StateFolder(state))
    return {"outer_step": state_now.outer_step, "digest": state_now.digest}
