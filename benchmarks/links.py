"""Throughput over long fat links, beside raw TCP over the same link; and heartbeats while data fills a slow link.

    .venv/bin/python benchmarks/links.py                       # about 5 minutes
    .venv/bin/python benchmarks/links.py --rtts 0.1 --parts throughput

A real coordinator and a real peer with mutual TLS, and `edit.lab.link` between them, each in a process of its own. Throughput:
100 MB of contribution up, of update and of snapshot down, in 12 fragments, at 1 Gbit/s and 0, 20, 100 and 200 ms of round-trip
time; the first repetition, on new connections, stands beside the median of the others. Heartbeats: at 10 Mbit/s, a
contribution goes up and snapshots come down while a heartbeat is said four times a second. HTTP/2 sees the delay, TCP does
not. One line of JSON for each link is appended to benchmarks/results/links.jsonl.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import statistics
from pathlib import Path

import grpc

from edit.lab.bench.links import Delays, LinkRates, heartbeat_delays, link_rates
from edit.lab.link import LinkShape

RESULTS = Path(__file__).parent / "results" / "links.jsonl"
QUEUE_BYTES = 256 << 10


def shape(mbit: float, rtt_s: float, queue_bytes: int) -> LinkShape:
    """Equally fast in both directions."""
    return LinkShape(up_bits_per_s=1e6 * mbit, down_bits_per_s=1e6 * mbit, latency_s=rtt_s / 2, queue_bytes=queue_bytes)


def line(rates: LinkRates) -> str:
    """One row of the table."""
    cells = [f"{statistics.median(raw[1:] or raw):6.0f}" for raw in (rates.raw_up, rates.raw_down)]
    for what in ("contribution", "update", "snapshot"):
        values = getattr(rates, what)
        cells.append(f"{values[0]:6.0f} {statistics.median(values[1:] or values):6.0f} {100 * rates.share(what):4.0f} %")
    return f"{1e3 * rates.rtt_s:6.0f}  " + "  ".join(cells)


def beats(delays: Delays) -> str:
    """One line."""
    rtt = f"{delays.mbit:g} Mbit/s, {1e3 * delays.rtt_s:g} ms, queue of {delays.queue_bytes >> 10} KiB"
    busy, idle = sorted(delays.busy_s), sorted(delays.idle_s)
    return (
        f"{rtt}: idle median {statistics.median(idle):.3f} s; busy median {statistics.median(busy):.3f} s, largest "
        f"{busy[-1]:.3f} s of {len(busy)}; {delays.up_mbit:.1f} Mbit/s up, {delays.down_mbit:.1f} down"
    )


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("throughput", "heartbeats"), default=["throughput", "heartbeats"])
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
    options = parser.parse_args()
    facts = {
        "date": datetime.date.today().isoformat(),
        "label": options.label,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, grpc {grpc.__version__}",
    }

    def record(figures: LinkRates | Delays) -> None:
        with options.out.open("a", encoding="utf-8") as file:
            load = round(os.getloadavg()[0], 2)
            file.write(json.dumps({**facts, "load": load, **dataclasses.asdict(figures)}) + "\n")

    if "throughput" in options.parts:
        print(f"{options.mbit:g} Mbit/s, {options.megabytes:g} MB; Mbit/s on new connections, then, and its share of raw TCP")
        print(f"{'RTT ms':>6}  {'raw up':>6}  {'down':>6}  {'contribution':>20}  {'update':>20}  {'snapshot':>20}")
        for rtt_s in options.rtts:
            rates = link_rates(
                shape(options.mbit, rtt_s, QUEUE_BYTES),
                payload_bytes=int(1e6 * options.megabytes),
                fragments=options.fragments,
                repeats=options.repeats,
            )
            print(line(rates), flush=True)
            record(rates)
    if "heartbeats" in options.parts:
        for rtt_s in options.slow_rtts:
            for queue in options.queues:
                delays = heartbeat_delays(shape(options.slow_mbit, rtt_s, queue << 10))
                print(beats(delays), flush=True)
                record(delays)


if __name__ == "__main__":
    main()
