"""One blocking exchange over slow links: contributions go up and the update comes down ahead of its commit, at the same time.

    .venv/bin/python benchmarks/slow_link.py                                        # as root, Linux; about a minute
    .venv/bin/python benchmarks/slow_link.py --queue-ms 300 --label "a deep queue"

Real peers and a real coordinator, each on a host of its own (`edit.lab.network`: namespaces, tc); the peers' links have the
same rate in each direction, the coordinator's is faster than all of them together. `edit-lab bench exchange` says what an
exchange is; it has twelve fragments of equal size.

Two bounds by the bytes that the links counted: both ways at the same time, where the last fragment comes down after the last
contribution to it went up; and one way after the other, which is the least without sending ahead. One line of JSON is
appended to benchmarks/results/slow_link.jsonl.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from edit.lab.bench.exchange import ours
from edit.lab.bench.results import append_lines, circumstances
from edit.lab.bench.turns import Timing, best, median
from edit.lab.network import QUEUE_MS
from edit.lab.processes import COORDINATOR, terminated_as_interrupt

RESULTS = Path(__file__).parent / "results" / "slow_link.jsonl"
FRAGMENTS = 12
LIMIT_S = 300.0


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=10.0, help="of each peer's link, in each direction")
    parser.add_argument("--queue-ms", type=int, default=QUEUE_MS, help="in front of each direction of a link")
    parser.add_argument("--parameters", type=int, default=6_400_000)
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--repeat", type=int, default=5, help="counted exchanges")
    parser.add_argument("--label", default="", help="is written beside the figures")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    begins = circumstances(asked.label)
    with terminated_as_interrupt():
        timings = ours(
            asked.peers,
            asked.parameters,
            asked.codec,
            asked.repeat,
            LIMIT_S,
            asked.mbit,
            coordinator_mbit=10 * asked.peers * asked.mbit,
            queue_ms=asked.queue_ms,
        )
    middle = median(timings)
    up, down = (8e-6 * busiest(middle, way) / asked.mbit for way in ("up", "down"))
    row = {
        **begins,
        "mbit": asked.mbit,
        "queue_ms": asked.queue_ms,
        "parameters": asked.parameters,
        "peers": asked.peers,
        "codec": asked.codec,
        "repeat": asked.repeat,
        "round_s": round(middle.wall_s, 3),
        "best_round_s": round(best(timings)[0], 3),
        "cpu_s": round(middle.total_cpu_s, 3),
        "bound_s": round(max(up, down) + min(up, down) / FRAGMENTS, 3),
        "one_after_the_other_s": round(up + down, 3),
    }
    append_lines(asked.out, [row])
    print(
        f"{asked.codec}, {asked.peers} peers, {asked.mbit:g} Mbit/s, queue {asked.queue_ms} ms: {row['round_s']} s (best "
        f"{row['best_round_s']}); bound {row['bound_s']} s, one way after the other {row['one_after_the_other_s']} s"
    )


def busiest(timing: Timing, way: str) -> int:
    """Return the most bytes that went through this direction of a peer's link."""
    return max(count for name, count in timing.link_bytes.items() if name.endswith(way) and not name.startswith(COORDINATOR))


if __name__ == "__main__":
    main()
