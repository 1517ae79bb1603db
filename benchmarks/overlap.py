"""Compute utilisation on a slow link: the time of the same steps with no exchange, divided by the time with it.

    .venv/bin/python benchmarks/overlap.py                # about 6 minutes on 2 idle cores
    .venv/bin/python benchmarks/overlap.py --modes blocking delayed --rounds 4

Two real peers and a real coordinator; each peer connects through a link of its own (edit.lab.link) whose rate is chosen so that
one exchange (contribution up, update down) takes `--share` of an inner phase, half by default: a peer that waits then reaches
1 / (1 + share), 0.67. The reference is measured in the same run, before and after the modes: both peers train alone at the same
time, on the same cores, with the same threads. Where the two differ by more than 5 % the machine was not quiet and nothing is
recorded. No peer writes checkpoints, which are not part of the cost of an exchange. One line of JSON per mode is
appended to benchmarks/results/overlap.jsonl.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Any

from edit.config.run import RunConfig
from edit.lab.bench.measured_run import MeasuredRun, alone
from edit.lab.link import LinkShape
from edit.lab.processes import terminated_as_interrupt
from peers.models.registry import build

RESULTS = Path(__file__).parent / "results" / "overlap.jsonl"
PEERS = ("ada", "grace")
GROUPS = 3
WARM_UP = 2  # outer steps (of a whole model) that are not counted


def settings(mode: str, every: int, rounds: int) -> dict[str, Any]:
    """The run.toml of one mode; streaming is delayed with groups."""
    modes: dict[str, dict[str, Any]] = {
        "blocking": {},
        "forward": {"mode": "forward"},
        "delayed": {"mode": "delayed", "delay": every * 4 // 5},
        "eager": {"mode": "eager", "delay": every * 4 // 5},
        "streaming": {"mode": "delayed", "groups": GROUPS, "delay": every // GROUPS},
    }
    sync = modes[mode]
    outer_steps = (rounds + WARM_UP + 1) * sync.get("groups", 1)
    return {
        "name": "overlap",
        "model": {"layers": 4, "heads": 4, "width": 192},
        "inner": {"batch_size": 4},
        "sync": {"every": every, "outer_steps": outer_steps, **sync},
        "codec": {"up": "int8", "down": "bf16"},
        "rounds": {"start_peers": 2, "quorum": 2},
        "membership": {"heartbeat_s": 2.0, "lease_s": 30.0},
    }


def text(folder: Path) -> Path:
    """Something to read: the standard library's own source."""
    data = folder / "data.txt"
    data.write_bytes(b"\n".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py"))))
    return data


def exchange_bytes(config: RunConfig) -> tuple[int, int]:
    """Bytes up (int8) and down (bf16) of one exchange of the whole model, without framing."""
    numel = sum(parameter.numel() for parameter in build(config.model, 0, frozenset()).parameters())
    return numel + 4 * numel // 256, 2 * numel


def exchanging(folder: Path, data: Path, run: dict[str, Any], rate: float) -> tuple[float, int]:
    """(seconds per inner step over the counted outer steps, bytes that passed each link) of a real run."""
    with MeasuredRun(folder, run, data) as real:
        for name in PEERS:
            real.enrol(name, LinkShape(up_bits_per_s=rate, down_bits_per_s=rate), "--checkpoint-every", "0")
        real.start(*PEERS)
        real.finish(3600.0)
        steps = [{line["step"]: line["t"] for line in real.lines(name) if line["kind"] == "step"} for name in PEERS]
        return _seconds_per_step(steps, run["sync"]["every"]), max(sum(link.carried_bytes) for link in real.links.values())


def _seconds_per_step(peers: list[dict[int, float]], every: int) -> float:
    """From the first step of the first counted phase to the last of the last, both at phase boundaries."""
    seconds = []
    for steps in peers:
        first, last = WARM_UP * every, max(steps) // every * every
        seconds.append((steps[last] - steps[first]) / (last - first))
    return statistics.fmean(seconds)


def main() -> None:
    """Measure the reference, choose the rate, run each mode, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=["blocking", "forward", "delayed", "eager", "streaming"])
    parser.add_argument("--every", type=int, default=60, help="H; a multiple of 60")
    parser.add_argument("--rounds", type=int, default=8, help="counted exchanges of the whole model")
    parser.add_argument("--share", type=float, default=0.5, help="of an inner phase that one exchange takes on the link")
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch, terminated_as_interrupt():
        root = Path(scratch)
        data = text(root)
        blocking = settings("blocking", arguments.every, arguments.rounds)
        step_s = alone(root / "before", blocking, data, PEERS, 4 * arguments.every)
        up, down = exchange_bytes(RunConfig.from_mapping(blocking))
        rate = 8 * (up + down) / (arguments.share * arguments.every * step_s)
        print(
            f"alone {1000 * step_s:.1f} ms per step; {(up + down) / 1e6:.2f} MB per exchange; link {rate / 1e6:.2f} Mbit/s: an "
            f"exchange takes {arguments.share:.2f} of {arguments.every} steps; waiting gives {1 / (1 + arguments.share):.3f}"
        )
        for mode in arguments.modes:
            run = settings(mode, arguments.every, arguments.rounds)
            with_s, carried = exchanging(root / mode, data, run, rate)
            print(f"{mode:<10} {1000 * with_s:>8.1f} ms per step", flush=True)
            results.append({"mode": mode, "with_s": with_s, "carried_mb": round(carried / 1e6, 2)})
        after_s = alone(root / "after", blocking, data, PEERS, 4 * arguments.every)
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
