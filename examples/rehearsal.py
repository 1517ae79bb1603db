"""Rehearse a run on this machine: a real coordinator and real peers, over mutual TLS on loopback, in a temporary folder.

For the examples that train over the network: they call `rehearse` when they are started without `--home`. It types what a user
would: init, serve, invite, join, and then the example itself once per peer, with `--home FOLDER`.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

COORDINATOR = (sys.executable, "-m", "aggregator")
PEER = (sys.executable, "-m", "peers")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}  # the peers share this machine's cores
SCREEN = threading.Lock()
SERVER = '\n[server]\nlisten = "127.0.0.1:0"\nenrol_listen = "127.0.0.1:0"\n'


def rehearse(run_toml: str, commands: Mapping[str, Sequence[str]]) -> None:
    """Run `commands` (by peer_id; `--home FOLDER` is added) in the run that `run_toml` describes; ends when all have."""
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "run"
        (Path(folder) / "run.toml").write_text(run_toml + SERVER)
        _call(*COORDINATOR, "init", "--state", str(state), "--config", str(Path(folder) / "run.toml"))
        started = [
            subprocess.Popen([*COORDINATOR, "serve", "--keep-serving", "--state", str(state)], stderr=subprocess.DEVNULL)
        ]
        try:
            while not (state / "addresses.json").exists():
                if started[0].poll() is not None:
                    sys.exit("the coordinator ended; see: edit-coordinator serve")
                time.sleep(0.1)
            _enrol(state, Path(folder), list(commands))
            for name, command in commands.items():
                started.append(_peer([*command, "--home", str(Path(folder) / name)]))
            relays = [threading.Thread(target=relay, args=(peer.stdout, sys.stdout)) for peer in started[1:]]
            for thread in relays:
                thread.start()
            codes = [peer.wait() for peer in started[1:]]
            for thread in relays:
                thread.join()
        finally:
            for process in started:
                process.terminate()
            for process in started:
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()
        if any(codes):
            sys.exit(f"the peers ended with exit codes {codes}")


def relay(lines: Iterable[str], screen: TextIO) -> None:
    """Print whole lines, so that the output of several processes does not mix."""
    for line in lines:
        with SCREEN:
            print(line, end="", file=screen, flush=True)


def _peer(command: Sequence[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)


def _enrol(state: Path, folder: Path, names: Sequence[str]) -> None:
    for name in names:
        invitation = _call(*COORDINATOR, "invite", "--state", str(state), name).splitlines()[0]
        _call(*PEER, "join", invitation, "--home", str(folder / name))


def _call(*command: str) -> str:
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
