"""How much faster a coordinator merges with more threads: `edit-coordinator serve --threads`.

    .venv/bin/python benchmarks/merge_threads.py                        # 50M parameters, 1 and 2 threads
    .venv/bin/python benchmarks/merge_threads.py --parameters 1000000000 --peers 1 --threads 1 4 8 16

In one process, by the coordinator's own code, the calls that it makes for one outer step, in as many threads: the hash and the
norm of each contribution to each of 12 fragments, the merge of each fragment and its record, and the commit. No network, no
disk. The first row is one thread, as `serve` has by default. Seconds are the best of --repeat outer steps. `digest` must be the
same in all rows; the command fails where it is not.

Prints a table; appends rows to benchmarks/results/merge_threads.jsonl with --record.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from edit import kernels
from edit.codecs import codec
from edit.config.codec import CodecConfig
from edit.config.run import RunConfig
from edit.fragments.schema import Schema
from edit.lab.bench.exchange_peer import blocks
from edit.lab.bench.results import Row, append_lines, circumstances, print_table, results_table
from edit.merging.merge import Measured, measure
from edit.merging.outer_state import MergeRecord, OuterState
from edit.records import EncodedTensor

RESULTS = Path(__file__).parent / "results" / "merge_threads.jsonl"
Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]


def contributions(schema: Schema, peers: int, name: str) -> dict[str, list[EncodedTensor]]:
    """Return what each peer sends of each fragment."""
    generator = torch.Generator().manual_seed(0)
    return {
        f"peer-{number}": [
            codec(name).encode(1e-3 * torch.randn(fragment.numel, generator=generator), fragment)
            for fragment in schema.fragments
        ]
        for number in range(peers)
    }


def outer_step(state: OuterState, sent: dict[str, list[EncodedTensor]], each: Map) -> None:
    """Take one outer step, as a coordinator does that has all contributions."""

    def measured(one: tuple[str, EncodedTensor]) -> Measured:
        blake3(one[1].data).digest()
        return Measured(one[0], 1, 1, measure(one[1]), one[1])

    def merged(one: tuple[int, list[Measured]]) -> MergeRecord:
        return state.record(state.reduce(*one))

    fragments, peers = len(state.schema.fragments), len(sent)
    arrived = list(
        each(measured, [(peer, payload) for i in range(fragments) for peer, of in sent.items() for payload in (of[i],)])
    )
    records = list(each(merged, [(i, arrived[i * peers : (i + 1) * peers]) for i in range(fragments)]))
    state.commit(state.outer_step + 1, "all in", records, each=each)


def timed(schema: Schema, sent: dict[str, list[EncodedTensor]], name: str, threads: int, repeat: int) -> Row:
    """Return the row of so many threads."""
    config = RunConfig(codec=CodecConfig(up=name, down=name))
    state = OuterState(schema, config, [torch.zeros(fragment.numel) for fragment in schema.fragments])
    best, cpu = math.inf, 0.0
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for _ in range(repeat + 1):  # the first one makes the memory
            began, used = time.perf_counter(), time.process_time()
            outer_step(state, sent, map if threads == 1 else pool.map)
            seconds = time.perf_counter() - began
            if state.outer_step > 1 and seconds < best:
                best, cpu = seconds, time.process_time() - used
    return {"threads": threads, "s": best, "cpu_s": cpu, "digest": state.digest}


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--parameters", type=int, default=50_331_648)
    asked.add_argument("--peers", type=int, default=4)
    asked.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    asked.add_argument("--codec", default="int8", help="of contributions and updates")
    asked.add_argument("--repeat", type=int, default=5)
    asked.add_argument("--label", default="", help="written beside the figures")
    asked.add_argument("--record", action="store_true", help=f"append the rows to {RESULTS.name}")
    given = asked.parse_args()
    print(kernels.load(), file=sys.stderr)
    torch.set_num_threads(1)
    schema, begins = blocks(given.parameters), circumstances(given.label)
    sent = contributions(schema, given.peers, given.codec)
    rows = [timed(schema, sent, given.codec, threads, given.repeat) for threads in sorted({1, *given.threads})]
    rows = [{**row, "of_one": row["s"] / rows[0]["s"]} for row in rows]
    head = ("threads", "s", "cpu_s", "of_one", "digest")
    shown = [[f"{row[name]:.3g}" if isinstance(row[name], float) else str(row[name])[:12] for name in head] for row in rows]
    print_table(results_table(f"One outer step of {given.parameters:,} parameters, {given.peers} peers", head, shown, ""))
    if given.record:
        what = {"parameters": given.parameters, "peers": given.peers, "codec": given.codec}
        append_lines(RESULTS, [{**begins, **what, **row} for row in rows])
    return 0 if len({row["digest"] for row in rows}) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
