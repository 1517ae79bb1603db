"""Compute utilisation on a slow link: the time of the same steps with no exchange, divided by the time with it.

    .venv/bin/python benchmarks/overlap.py                # about 6 minutes on 2 idle cores
    .venv/bin/python benchmarks/overlap.py --modes blocking delayed --rounds 4

Two real peers and a real coordinator; each peer dials through a link of its own (edit.lab.link) whose rate is chosen so that
one exchange (contribution up, update down) takes `--share` of an inner phase, half by default: a peer that waits then reaches
1 / (1 + share), 0.67. The reference is measured in the same run, before and after the modes: both peers train alone at the same
time, on the same cores, with the same threads. Where the two differ by more than 5 % the machine was not quiet and nothing is
recorded. Nobody writes checkpoints: they are not the exchange's cost. One line of JSON per mode is
appended to benchmarks/results/overlap.jsonl.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from edit.config import RunConfig
from edit.lab.link import Link, LinkShape
from peers.models import build

RESULTS = Path(__file__).parent / "results" / "overlap.jsonl"
COORDINATOR, PEER = [sys.executable, "-m", "aggregator"], [sys.executable, "-m", "peers"]
ONE = ("--threads", "1")
ALIKE = (*ONE, "--checkpoint-every", "0")
PEERS = ("ada", "grace")
GROUPS = 3
WARM_UP = 2  # outer steps (of a whole model) that are not counted


def run_toml(mode: str, every: int, rounds: int) -> str:
    """The run of one mode; streaming is delayed with groups."""
    sync = {
        "alone": "",
        "blocking": "",
        "forward": 'mode = "forward"\n',
        "delayed": f'mode = "delayed"\ndelay = {every * 4 // 5}\n',
        "eager": f'mode = "eager"\ndelay = {every * 4 // 5}\n',
        "streaming": f'mode = "delayed"\ngroups = {GROUPS}\ndelay = {every // GROUPS}\n',
    }[mode]
    outer_steps = (rounds + WARM_UP + 1) * (GROUPS if mode == "streaming" else 1)
    return (
        f'name = "overlap"\n[model]\nlayers = 4\nheads = 4\nwidth = 192\n[inner]\nbatch_size = 4\n[sync]\nevery = {every}\n'
        f'outer_steps = {outer_steps}\n{sync}[codec]\nup = "int8"\ndown = "bf16"\n[rounds]\nstart_peers = 2\nquorum = 2\n'
        '[membership]\nheartbeat_s = 2.0\nlease_s = 30.0\n[server]\nlisten = "127.0.0.1:0"\nenrol_listen = "127.0.0.1:0"\n'
    )


def text(folder: Path) -> Path:
    """Something to read: the standard library's own source."""
    data = folder / "data.txt"
    data.write_bytes(b"\n".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py"))))
    return data


def alone(folder: Path, data: Path, toml: Path, steps: int) -> float:
    """Seconds per step while both peers train at the same time without any exchange (the mean of their medians)."""
    runs = [
        subprocess.Popen(
            [*PEER, "alone", "--run", toml, "--data", data, "--steps", str(steps), "--out", folder / f"alone-{name}", *ONE],
            stdout=subprocess.DEVNULL,
        )
        for name in PEERS
    ]
    if any(process.wait() for process in runs):
        raise SystemExit("training alone failed")
    seconds = []
    for name in PEERS:
        lines = [json.loads(line) for path in (folder / f"alone-{name}").glob("*.jsonl") for line in path.open()]
        times = [(line["step"], line["t"]) for line in lines if "t" in line]
        (first, began), (last, ended) = times[0], times[-1]
        seconds.append((ended - began) / (last - first))
    return statistics.mean(seconds)


def exchange_bytes(config: RunConfig) -> tuple[int, int]:
    """Bytes up (int8) and down (bf16) of one exchange of the whole model, without framing."""
    numel = sum(parameter.numel() for parameter in build(config.model, 0, frozenset()).parameters())
    return numel + 4 * numel // 256, 2 * numel


def exchanging(folder: Path, data: Path, toml: Path, rate: float) -> tuple[float, int]:
    """(seconds per inner step over the counted outer steps, bytes that passed each link) of a real run."""
    state = folder / "run"
    subprocess.run([*COORDINATOR, "init", "--state", state, "--config", toml], check=True, capture_output=True)
    with ExitStack() as stack:
        serving = subprocess.Popen([*COORDINATOR, "serve", "--state", state], stderr=subprocess.PIPE, text=True)
        stack.callback(_end, serving)
        assert serving.stderr is not None
        next(line for line in serving.stderr if " serving " in line)
        links = []
        peers = []
        for name in PEERS:
            home = folder / name
            line = subprocess.run(
                [*COORDINATOR, "invite", "--state", state, name], check=True, capture_output=True, text=True
            ).stdout.split()[-1]
            subprocess.run([*PEER, "join", line, "--home", home], check=True, capture_output=True)
            identity = json.loads((home / "identity.json").read_text())
            host, _, port = identity["endpoints"][0].rpartition(":")
            link = stack.enter_context(Link((host, int(port)), LinkShape(up_bits_per_s=rate, down_bits_per_s=rate)))
            identity["endpoints"] = [f"127.0.0.1:{link.port}"]
            (home / "identity.json").write_text(json.dumps(identity))
            links.append(link)
            command = [*PEER, "run", "--home", home, "--data", data, "--metrics", home / "metrics.jsonl", *ALIKE]
            peers.append(subprocess.Popen(command, stderr=(folder / f"{name}.log").open("w")))
            stack.callback(_end, peers[-1])
        if any(process.wait() for process in peers):
            raise SystemExit("\n".join((folder / f"{name}.log").read_text()[-2000:] for name in PEERS))
        return _seconds_per_step(folder, toml), max(sum(link.carried_bytes) for link in links)


def _end(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _seconds_per_step(folder: Path, toml: Path) -> float:
    """From the first step of the first counted phase to the last of the last, both at phase boundaries."""
    every = RunConfig.from_toml(toml).sync.every
    seconds = []
    for name in PEERS:
        steps = {}
        for line in (folder / name / "metrics.jsonl").open():
            values = json.loads(line)
            if values["kind"] == "step":
                steps[values["step"]] = values["t"]
        last = max(steps) // every * every
        first = WARM_UP * every
        seconds.append((steps[last] - steps[first]) / (last - first))
    return statistics.mean(seconds)


def main() -> None:
    """Measure the reference, choose the rate, run each mode, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=["blocking", "forward", "delayed", "eager", "streaming"])
    parser.add_argument("--every", type=int, default=60, help="H; a multiple of 60")
    parser.add_argument("--rounds", type=int, default=8, help="counted exchanges of the whole model")
    parser.add_argument("--share", type=float, default=0.5, help="of an inner phase that one exchange takes on the link")
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        data = text(root)
        toml = root / "alone.toml"
        toml.write_text(run_toml("alone", arguments.every, arguments.rounds))
        step_s = alone(root, data, toml, 4 * arguments.every)
        up, down = exchange_bytes(RunConfig.from_toml(toml))
        rate = 8 * (up + down) / (arguments.share * arguments.every * step_s)
        print(
            f"alone {1000 * step_s:.1f} ms per step; {(up + down) / 1e6:.2f} MB per exchange; link {rate / 1e6:.2f} Mbit/s: an "
            f"exchange takes {arguments.share:.2f} of {arguments.every} steps; waiting gives {1 / (1 + arguments.share):.3f}"
        )
        for mode in arguments.modes:
            folder = root / mode
            folder.mkdir()
            (folder / "run.toml").write_text(run_toml(mode, arguments.every, arguments.rounds))
            with_s, carried = exchanging(folder, data, folder / "run.toml", rate)
            print(f"{mode:<10} {1000 * with_s:>8.1f} ms per step", flush=True)
            results.append({"mode": mode, "with_s": with_s, "carried_mb": round(carried / 1e6, 2)})
        after_s = alone(root / "after", data, toml, 4 * arguments.every)
    print(f"alone, again: {1000 * after_s:.1f} ms per step")
    if abs(after_s - step_s) > 0.05 * min(after_s, step_s):
        raise SystemExit("the machine was not quiet: the two references differ by more than 5 %; nothing is recorded")
    reference_s = (step_s + after_s) / 2
    for result in results:
        with_s = float(result.pop("with_s"))
        result |= {"utilisation": round(reference_s / with_s, 3), "ms_per_step": round(1000 * with_s, 1)}
        print(f"{result['mode']:<10} utilisation {result['utilisation']:.3f}")
    facts = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "every": arguments.every,
        "share": arguments.share,
        "alone_ms_per_step": [round(1000 * step_s, 1), round(1000 * after_s, 1)],
        "link_mbit_per_s": round(rate / 1e6, 2),
    }
    with RESULTS.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({**facts, **result}) + "\n" for result in results)


if __name__ == "__main__":
    main()
