"""Simulate the council of a swarm in virtual time: kills, lost disks, stops, partitions, loss, clocks that jump; any seeds.

    python benchmarks/swarm/council.py --seeds 5000
    python benchmarks/swarm/council.py --one-fault --seeds 200
    python benchmarks/swarm/council.py --parts --seeds 500

Checks at every moment that there is no split: one leader per term, one digest per outer step, what the record names is on the
disks of a quorum, grants and outer steps never go back; and after healing that all parts advance twice at all members within
5 s. In a quarter of the seeds each member is behind a relay by chance; then it checks, too, that members behind a relay own
nothing in the end that others could. A seed that fails is made as small as it can be, and shown with what happened; the exit
code is 1.

--one-fault: four members, three parts, no other fault: the virtual seconds from a SIGKILL or SIGSTOP to the next commit of all
parts at all survivors. A simulated engine needs 0.2 to 0.6 s for a round.

--parts: the members keep real parts in folders under that of temporary files: each kill loses what was not synced, or comes in
the middle of a write. Checks besides that all members come to the same bits, and find what they said that they had.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from edit.lab.council.plan import Plan, draw
from edit.lab.council.replicated import ReplicatedSwarm
from edit.lab.council.search import Result, failure, shrink
from edit.lab.council.swarm import Swarm
from edit.lab.council.truth import Broken
from edit.plain_text import json_text

LAST_LINES = 80  # of the trace of a seed that fails


def replicated(plan: Plan, lines: list[str] | None = None) -> Swarm:
    """Return a swarm with real parts, in a folder that goes with it."""
    folder = tempfile.TemporaryDirectory(prefix="edit-council-")
    swarm = ReplicatedSwarm(plan, Path(folder.name), lines=lines)
    weakref.finalize(swarm, folder.cleanup)
    return swarm


def show_failure(seed: int, members: int, reason: str, make: Callable[..., Swarm]) -> None:
    """Print the smallest plan that fails, and the end of its trace."""
    print(f"seed {seed}: {reason}")
    plan, lines = shrink(draw(seed, members), make), list[str]()
    print(plan)
    reason = failure(plan, make, lines=lines)
    print("\n".join(lines[-LAST_LINES:]))
    print(f"seed {seed}, the smallest plan of it that fails: {reason}")


def one_fault(kind: str, leads: bool, seeds: int) -> list[float]:
    """Return, sorted, how long the survivors of one fault wait for the next commit of all parts, for each seed."""
    found = []
    for seed in range(seeds):
        plan = Plan(
            seed=seed,
            members=4,
            parts=3,
            voters=4,
            latency_s=0.002,
            loss=0.0,
            duplicates=0.0,
            lease_s=1.0,
            verify=0,
            same_bytes=False,
            faulty_s=0.0,
            faults=(),
        )
        swarm = Swarm(plan)
        swarm.run(10.0 + seed / seeds)
        struck = next(host for host in swarm.hosts.values() if host.leads is leads)
        rest = [host for host in swarm.hosts.values() if host is not struck]
        wanted = [part.outer_step + 1 for part in swarm.truth.newest.parts]
        started = swarm.now
        if kind == "SIGKILL":
            swarm.kill(struck)
        else:
            struck.stopped = True
        if not swarm.run(
            started + 60.0,
            lambda rest=rest, wanted=wanted: all(  # type: ignore[misc]
                state.outer_step >= step for host in rest for state, step in zip(host.states, wanted, strict=True)
            ),
        ):
            raise Broken(f"seed {seed}: no commit of all parts within 60 s after a {kind}")
        found.append(swarm.now - started)
    return sorted(found)


def show_one_fault(seeds: int) -> None:
    """Print one line for each kind of fault."""
    for kind in ("SIGKILL", "SIGSTOP"):
        for leads, who in ((True, "the leader"), (False, "another member")):
            found = one_fault(kind, leads, seeds)
            usual, late = found[len(found) // 2], found[19 * len(found) // 20]
            print(f"{kind} of {who}: {usual:.2f} s median, {late:.2f} s in 19 of 20, {found[-1]:.2f} s at most ({seeds} seeds)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=300, help="how many (default 300)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default 0)")
    parser.add_argument("--members", type=int, default=4, help="at most so many members (default 4)")
    parser.add_argument("--out", type=Path, help="append the result to this file, as a line of JSON")
    parser.add_argument("--parts", action="store_true", help="with real journals, checkpoints and merges")
    parser.add_argument("--one-fault", action="store_true", help="measure how long one fault costs instead")
    arguments = parser.parse_args()
    if arguments.one_fault:
        show_one_fault(arguments.seeds)
        return
    logging.disable(logging.ERROR)  # each kill leaves something to be cut off
    result, started = Result(), time.process_time()
    make = replicated if arguments.parts else Swarm
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        reason = failure(draw(seed, arguments.members), make, result=result)
        if reason:
            show_failure(seed, arguments.members, reason, make)
            sys.exit(1)
        if (seed + 1) % 500 == 0:
            print(f"{result.seeds} seeds, {time.process_time() - started:.0f} s", flush=True)
    prompt = sorted(result.prompt_s) or [0.0]
    usual, longest = prompt[len(prompt) // 2], prompt[-1]
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
            "parts": arguments.parts,
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
