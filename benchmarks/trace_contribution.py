"""Count the files and functions of this project that one contribution passes, from optimizer.step() to the other peer.

    python benchmarks/trace_contribution.py            # the table
    python benchmarks/trace_contribution.py --files    # and every file with its functions

Starts a coordinator and two peers as real processes with a profiler in every thread, lets them run, and records what they
call during exactly one outer step: from one commit being applied at a peer to the next. Functions are counted once per kind of
process, by file and qualified name; comprehensions, lambdas and generated stubs are not counted, nor is the training itself
(peers/training, peers/models). Heartbeats are set to come once a minute.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRAINING = ("peers/training/", "peers/models/")

TRACER = """
import json, os, runpy, signal, sys, threading
root, out, module, *arguments = sys.argv[1:]
packages = tuple(os.path.join(root, one) for one in ("edit/", "peers/", "aggregator/", "proto/editpb/"))
called, between, skip, paths = set(), {}, ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<lambda>", "<module>"), {}
recording = False
def where(name):
    if name not in paths:
        path = name if name.startswith(packages) else ""
        paths[name] = "" if path.endswith(("_pb2.py", "_pb2_grpc.py")) else path[len(root):].lstrip("/")
    return paths[name]
def profile(frame, event, argument):
    if event != "call" or not recording:
        return
    code = frame.f_code
    path = where(code.co_filename)
    if not path or code.co_name in skip:
        return
    called.add((path, code.co_qualname))
    caller = frame.f_back
    while caller is not None:
        source = where(caller.f_code.co_filename)
        if source:
            if source != path:
                between[source, path] = between.get((source, path), 0) + 1
            return
        caller = caller.f_back
def begin(*_):
    global recording
    recording = True
def end(*_):
    global recording
    recording = False
    with open(out, "w") as file:
        json.dump({"called": sorted(called), "between": [[*pair, n] for pair, n in sorted(between.items())]}, file)
    os.rename(out, out + ".done")
signal.signal(signal.SIGUSR1, begin)
signal.signal(signal.SIGUSR2, end)
threading.setprofile(profile)
sys.setprofile(profile)
sys.argv = [module, *arguments]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""

RUN_TOML = """
name = "trace"
[model]
layers = 2
width = 32
heads = 2
context = 16
[sync]
every = 4
outer_steps = 30
[rounds]
start_peers = 2
quorum = 2
floor_s = 60.0
ceiling_s = 100.0
[membership]
heartbeat_s = 60.0
lease_s = 600.0
[storage]
checkpoint_every = 1000
[server]
listen = "127.0.0.1:0"
enrol_listen = "127.0.0.1:0"
"""


class Process:
    def __init__(self, folder: Path, name: str, module: str, *arguments: object) -> None:
        self.out = folder / f"{name}.json"
        command = [sys.executable, str(folder / "tracer.py"), str(ROOT), str(self.out), module, *map(str, arguments)]
        self.process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def until(self, words: str) -> None:
        assert self.process.stderr is not None
        lines = []
        for line in self.process.stderr:
            lines.append(line)
            if words in line:
                return
        raise RuntimeError(f"{words!r} was never said:\n{''.join(lines[-40:])}")

    def result(self) -> dict[str, list[list[str]]]:
        self.process.send_signal(signal.SIGUSR2)
        done = Path(f"{self.out}.done")
        while not done.exists() and self.process.poll() is None:
            self.until("")
        found: dict[str, list[list[str]]] = json.loads(done.read_text())
        return found


def trace(sync: str) -> dict[str, dict[str, list[list[str]]]]:
    """What the coordinator and both peers called in one outer step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tracer.py").write_text(TRACER)
        (folder / "run.toml").write_text(RUN_TOML.replace("[sync]\n", f"[sync]\n{sync}\n"))
        (folder / "text.py").write_bytes(Path(json.__file__).read_bytes())

        def call(*arguments: object) -> str:
            command = [sys.executable, "-m", *map(str, arguments)]
            return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout

        state, processes = folder / "state", []
        call("aggregator", "init", "--state", state, "--config", folder / "run.toml")
        try:
            processes.append(Process(folder, "coordinator", "aggregator", "serve", "--keep-serving", "--state", state))
            processes[0].until(" serving ")
            for peer in ("a", "b"):
                call(
                    "peers",
                    "join",
                    call("aggregator", "invite", "--state", state, peer).splitlines()[0],
                    "--home",
                    folder / peer,
                )
            for peer in ("a", "b"):
                options = [
                    "--home",
                    folder / peer,
                    "--data",
                    folder / "text.py",
                    "--threads",
                    1,
                    "--throttle",
                    8,
                    "--checkpoint-every",
                    1000,
                ]
                processes.append(Process(folder, peer, "peers", "run", *options))
            processes[1].until("outer step 5,")
            for one in processes:
                one.process.send_signal(signal.SIGUSR1)
            processes[1].until("outer step 6,")
            return {one.out.stem: one.result() for one in processes}
        finally:
            for one in processes:
                one.process.kill()
                one.process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="print every file with its functions")
    parser.add_argument("--sync", default="", help="a further line of the run's [sync] section")
    arguments = parser.parse_args()
    found = trace(arguments.sync)
    sides = {"coordinator": ["coordinator"], "peers": ["a", "b"], "all": list(found)}
    functions: dict[str, set[tuple[str, str]]] = {}
    print(f"{'':12} {'files':>6} {'functions':>10} {'pairs of files':>15} {'calls between files':>20}")
    for side, names in sides.items():
        functions[side] = {
            (path, function) for name in names for path, function in found[name]["called"] if not path.startswith(TRAINING)
        }
        pairs = collections.Counter[tuple[str, str]]()
        for name in names:
            for source, path, times in found[name]["between"]:
                if not path.startswith(TRAINING) and not source.startswith(TRAINING):
                    pairs[source, path] += int(times)
        files = {path for path, _ in functions[side]}
        print(f"{side:12} {len(files):6} {len(functions[side]):10} {len(pairs):15} {sum(pairs.values()):20}")
    if arguments.files:
        for path in sorted({path for path, _ in functions["all"]}):
            print(f"{path}: {', '.join(sorted(name for file, name in functions['all'] if file == path))}")


if __name__ == "__main__":
    main()
