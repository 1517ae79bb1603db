"""Speed of the codecs on one core: encode, decode + accumulate, measure, in GB/s of fp32, beside a plain copy in the same run.

python benchmarks/codecs.py [--numel 7087872] [--repeat 7] [--out benchmarks/results/codecs.json]
Seconds are this thread's CPU time, and the measurements take turns, so that a busy machine disturbs little and all alike; each
number is the best of its repetitions.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from edit.codecs import codec, codec_names
from edit.fragments.schema import FragmentSpec, TensorSpec
from edit.merging.merge import measure
from edit.records import EncodedTensor

BYTES_PER_ELEMENT = 4
CODECS = (*codec_names(), "topk:k=128")


def cpu_model() -> str:
    """The CPU's name, as far as the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def jobs(flat: Tensor) -> dict[tuple[str, str], Callable[[], object]]:
    """What is timed, by (codec, operation)."""
    copy, total = torch.zeros_like(flat), torch.zeros_like(flat)
    found: dict[tuple[str, str], Callable[[], object]] = {("copy", "copy"): lambda: copy.copy_(flat)}
    fragment = FragmentSpec(fragment_id=0, name="block", tensors=(TensorSpec(name="weight", shape=(flat.numel(),)),))
    for name in CODECS:
        one = codec(name)
        encoded = EncodedTensor(name, flat.numel(), bytearray(one.encode(flat, fragment).data))
        found[name, "encode"] = partial(one.encode, flat, fragment)
        found[name, "decode_add"] = partial(one.decode_add, encoded, total, 0.25)
        found[name, "measure"] = partial(measure, encoded)
    return found


def best_seconds(work: dict[tuple[str, str], Callable[[], object]], repeat: int) -> dict[tuple[str, str], float]:
    """The best time of each job, all jobs once per turn; the first turn only warms up."""
    best = dict.fromkeys(work, float("inf"))
    for turn in range(repeat + 1):
        for key, job in work.items():
            start = time.thread_time()
            job()
            if turn:
                best[key] = min(best[key], time.thread_time() - start)
    return best


def main() -> None:
    """Measure, print the table, write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=7_087_872, help="default: one block of a 124M GPT")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/codecs.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    flat = torch.randn(arguments.numel, generator=torch.Generator().manual_seed(0))
    seconds = best_seconds(jobs(flat), arguments.repeat)
    rates = {key: BYTES_PER_ELEMENT * arguments.numel / one / 1e9 for key, one in seconds.items()}
    copy = rates.pop(("copy", "copy"))
    rows = [
        {
            "codec": name,
            "bits_per_element": round(8 * codec(name).encoded_size(arguments.numel) / arguments.numel, 4),
            **{f"{operation}_gb_s": round(rates[name, operation], 2) for operation in ("encode", "decode_add", "measure")},
            **{
                f"{operation}_of_copy": round(rates[name, operation] / copy, 2)
                for operation in ("encode", "decode_add", "measure")
            },
        }
        for name in CODECS
    ]
    print(f"{arguments.numel} elements, 1 thread, GB/s of fp32; plain copy {copy:.2f}; in brackets: share of the copy's rate")
    print(f"{'codec':12}{'bits':>8}{'encode':>16}{'decode_add':>16}{'measure':>16}")
    for row in rows:
        cells = "".join(f"{row[f'{o}_gb_s']:>9} ({row[f'{o}_of_copy']:.2f})" for o in ("encode", "decode_add", "measure"))
        print(f"{row['codec']:12}{row['bits_per_element']:>8}{cells}")
    result = {
        "command": f"python benchmarks/codecs.py --numel {arguments.numel} --repeat {arguments.repeat}",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count(), "torch": torch.__version__, "threads": 1},
        "copy_gb_s": round(copy, 2),
        "codecs": rows,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
