"""The hot passes of one exchange on one thread: by torch, and by the kernels of edit/kernels, beside a plain copy.

    python benchmarks/kernels.py  # the extra `fast` installed; half a minute

Figures are milliseconds of CPU time for 50,331,648 parameters, measured on one of twelve fragments; the best of its
repetitions, and the jobs take turns. `load` is the CPU time and the memory (of this process alone; with the files that it maps)
that the kernels cost a process: with a cold cache it compiles, with a warm one it reads. Results are appended to
benchmarks/results/kernels.jsonl.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from edit import kernels
from edit.codecs import codec
from edit.codecs.error_feedback import ErrorFeedback
from edit.config.run import CodecConfig, OuterConfig, RunConfig
from edit.fragments.digest import fragment_hash
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.fragments.shards import Shard
from edit.merging.merge import Merged, measure
from edit.merging.norms import norm
from edit.merging.outer_state import OuterState
from edit.records import EncodedTensor

PARAMETERS, FRAGMENTS = 50_331_648, 12
NUMEL = PARAMETERS // FRAGMENTS
RESULTS = Path(__file__).parent / "results" / "kernels.jsonl"
FRAGMENT = FragmentSpec(fragment_id=0, name="block", tensors=(TensorSpec(name="weight", shape=(NUMEL,)),))

Jobs = Mapping[str, Callable[[], object]]


def memory() -> tuple[int, int]:
    """Return MiB: anonymous memory, and all that is resident."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) >> 10, int(fields["VmRSS"].split()[0]) >> 10


def jobs() -> Jobs:
    """Return what is timed, by name."""
    generator = torch.Generator().manual_seed(0)
    delta, theta = (torch.randn(NUMEL, generator=generator) for _ in range(2))
    mean, copy = torch.zeros(NUMEL), torch.empty(NUMEL)
    int8, int4, topk = codec("int8"), codec("int4"), codec("topk")
    encoded, encoded4 = int8.encode(delta, FRAGMENT), int4.encode(delta, FRAGMENT)
    config = RunConfig(outer=OuterConfig(lr=0.7, momentum=0.9), codec=CodecConfig(up="int8", down="int8"))
    state, small = OuterState(Schema((FRAGMENT,)), config, [torch.zeros(NUMEL)]), delta * 1e-3
    feedback = ErrorFeedback("int8", [Shard(FRAGMENT)])
    return {
        "plain copy": lambda: copy.copy_(delta),
        "BLAKE3 of theta": lambda: fragment_hash(theta),
        "norms of 4 int8 contributions": lambda: four(lambda: measure(encoded)),
        "decode and add 4 int8 contributions": lambda: four(lambda: int8.decode_add(encoded, mean, 0.25)),
        "norm of the mean": lambda: norm(delta),
        "record, outer step, update, hash": lambda: outer(state, small),
        "peer: feedback, int8 encode": lambda: contribute(feedback, delta),
        "peer: int8 decode, theta, hash": lambda: apply(theta, encoded),
        "int8 encode": lambda: int8.encode(delta, FRAGMENT),
        "int4 encode": lambda: int4.encode(delta, FRAGMENT),
        "int4 decode and add": lambda: int4.decode_add(encoded4, mean, 0.25),
        "topk encode": lambda: topk.encode(delta, FRAGMENT),
    }


def four(job: Callable[[], object]) -> None:
    """Do a job four times."""
    for _ in range(4):
        job()


def contribute(feedback: ErrorFeedback, delta: Tensor) -> None:
    """Encode a contribution, and take in the residual once it is merged, as a peer does."""
    feedback.stage(0, delta)
    feedback.commit(0, delta)


def outer(state: OuterState, mean: Tensor) -> None:
    """Encode a merge for the journal and take the outer step, as the coordinator does."""
    merged = Merged(0, mean, (), {}, 1.0, 1.0)
    state.commit(1, "measured", [state.record(merged)])


def apply(theta: Tensor, encoded: EncodedTensor) -> None:
    """Move theta by an update, as a peer does."""
    moved = theta.clone()
    codec(encoded.codec).decode_add(encoded, moved, -1.0)
    fragment_hash(moved)


def best_ms(work: Jobs, repeat: int) -> dict[str, float]:
    """Return the best time of each job, for all fragments; the first turn only warms up."""
    best = dict.fromkeys(work, float("inf"))
    for turn in range(repeat + 1):
        for name, job in work.items():
            start = time.thread_time()
            job()
            if turn:
                best[name] = min(best[name], (time.thread_time() - start) * 1e3 * FRAGMENTS)
    return best


def main() -> None:
    """Measure, print the table, append the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--label", default="", help="written beside the figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    work = jobs()
    by_torch = best_ms(work, options.repeat)
    before, start = memory(), time.process_time()
    said = kernels.load()
    load_s, after = time.process_time() - start, memory()
    print(f"{said}; load {load_s:.2f} CPU s, {after[0] - before[0]} MiB of its own, {after[1] - before[1]} MiB resident")
    by_kernels = best_ms(work, options.repeat)
    print(f"{'CPU ms':44}{'torch':>8}{'kernels':>9}{'times':>7}")
    for name, torch_ms in by_torch.items():
        print(f"{name:44}{torch_ms:8.1f}{by_kernels[name]:9.1f}{torch_ms / by_kernels[name]:7.2f}")
    row = {
        "date": datetime.date.today().isoformat(),
        "label": options.label,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "load": round(os.getloadavg()[0], 2),
        "kernels": said.partition(", cached")[0],
        "load_cpu_s": round(load_s, 2),
        "load_anonymous_mib": after[0] - before[0],
        "load_resident_mib": after[1] - before[1],
        "repeat": options.repeat,
        "torch_ms": {name: round(one, 1) for name, one in by_torch.items()},
        "kernels_ms": {name: round(one, 1) for name, one in by_kernels.items()},
    }
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
