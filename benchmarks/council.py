"""Simulate the council of a swarm in virtual time: kills, lost disks, stops, partitions, loss, clocks that jump; any seeds.

    python benchmarks/council.py --seeds 5000

Checks at every moment that there is no split: one leader per term, one digest per outer step, what the record names is on the
disks of a quorum, grants and outer steps never go back; and after healing that all parts advance twice at all members within
5 s. A seed that fails is made as small as it can be, and shown with what happened; the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from edit.lab.council.plan import draw
from edit.lab.council.search import Result, failure, shrink
from edit.plain_text import json_text

LAST_LINES = 80  # of the trace of a seed that fails


def show_failure(seed: int, members: int, reason: str) -> None:
    """Print the smallest plan that fails, and the end of its trace."""
    print(f"seed {seed}: {reason}")
    plan, lines = shrink(draw(seed, members)), list[str]()
    print(plan)
    reason = failure(plan, lines=lines)
    print("\n".join(lines[-LAST_LINES:]))
    print(f"seed {seed}, the smallest plan of it that fails: {reason}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=300, help="how many (default 300)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default 0)")
    parser.add_argument("--members", type=int, default=4, help="at most so many members (default 4)")
    parser.add_argument("--out", type=Path, help="append the result to this file, as a line of JSON")
    arguments = parser.parse_args()
    result, started = Result(), time.process_time()
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        reason = failure(draw(seed, arguments.members), result=result)
        if reason:
            show_failure(seed, arguments.members, reason)
            sys.exit(1)
        if (seed + 1) % 500 == 0:
            print(f"{result.seeds} seeds, {time.process_time() - started:.0f} s", flush=True)
    usual, longest = sorted(result.prompt_s)[len(result.prompt_s) // 2], max(result.prompt_s)
    print(f"{result.seeds} seeds, {sum(result.faults.values())} faults ({json_text(result.faults)}), {result.commits} commits")
    print(
        f"no split; two further commits after healing: {usual:.2f} s median, {longest:.2f} s at most, where messages are fast"
    )
    print(f"{result.slow} seeds where a message takes long: the slowest used {100 * result.slowest:.0f} % of its bound")
    if arguments.out is not None:
        line = {
            "date": datetime.now(UTC).date().isoformat(),
            "first": arguments.first,
            "seeds": result.seeds,
            "members": arguments.members,
            "faults": result.faults,
            "commits": result.commits,
            "events": result.events,
            "virtual_s": round(result.virtual_s),
            "median_s": round(usual, 2),
            "longest_s": round(longest, 2),
            "cpu_s": round(time.process_time() - started),
            "cores": os.cpu_count(),
        }
        with arguments.out.open("a", encoding="utf-8") as file:
            file.write(json_text(line) + "\n")


if __name__ == "__main__":
    main()
