"""Throughput over long fat links, beside raw TCP over the same link; and heartbeats while data fills a slow link.

    .venv/bin/python benchmarks/links.py                       # about 5 minutes
    .venv/bin/python benchmarks/links.py --rtts 0.1 --parts throughput

A real coordinator and a real peer with mutual TLS, and `edit.lab.link` between them, each in a process of its own. Throughput:
100 MB of contribution up, of update and of snapshot down, in 12 fragments, at 1 Gbit/s and 0, 20, 100 and 200 ms of round-trip
time; the first repetition, on new connections, stands beside the median of the others. Heartbeats: at 10 Mbit/s, a
contribution goes up and snapshots come down while a heartbeat is said four times a second. HTTP/2 sees the delay, TCP does
not. This is `edit-lab bench links`; one line of JSON for each link is appended to
benchmarks/results/links.jsonl.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from edit.command_line import run_command
from edit.lab.bench.command import Outputs, run_links
from edit.lab.bench.links import PARTS, LinkOptions

RESULTS = Path(__file__).parent / "results" / "links.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--mbit", type=float, default=1000.0, help="of the fat links")
    parser.add_argument("--rtts", nargs="+", type=float, default=[0.0, 0.02, 0.1, 0.2], help="seconds")
    parser.add_argument("--megabytes", type=float, default=100.0)
    parser.add_argument("--fragments", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--slow-mbit", type=float, default=10.0)
    parser.add_argument("--slow-rtts", nargs="+", type=float, default=[0.02, 0.1], help="seconds")
    parser.add_argument("--queues", nargs="+", type=int, default=[64, 256, 1024], help="KiB, in front of the slow link")
    parser.add_argument("--label", default="", help="written beside the figures")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    options = LinkOptions(
        parts=given.parts,
        mbit=given.mbit,
        rtts_s=given.rtts,
        payload_bytes=int(1e6 * given.megabytes),
        fragments=given.fragments,
        repeats=given.repeats,
        slow_mbit=given.slow_mbit,
        slow_rtts_s=given.slow_rtts,
        queues_kib=given.queues,
        label=given.label,
    )
    run_command("links", lambda: run_links(options, Outputs(results=given.out), Console(stderr=True)))


if __name__ == "__main__":
    main()
