"""A coordinator with a model of a billion parameters, and one peer that only sends random pseudo-gradients: memory and seconds.

    python benchmarks/memory/one_billion.py                     # needs 16 GB of memory and 30 GB of disk: about 6 minutes
    python benchmarks/memory/one_billion.py --parameters 1e8    # a tenth of it

Both are processes of their own: mutual TLS, int8 both ways, penalty, journal with fsync, a checkpoint at the end. The run's
first parameters (zeros) are written into its folder before the coordinator starts, so its start is a recovery. The peer holds
no replica: it makes one fragment's pseudo-gradient after the other. Peaks are VmHWM; the coordinator's is reset between the
phases. Results are appended to benchmarks/results/one_billion.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import multiprocessing as mp
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # before site-packages: opacus installs a package `benchmarks`, too

import grpc
import torch
from torch import Tensor

from aggregator.storage.state_folder import StateFolder
from aggregator.storage.store import Store
from benchmarks.memory.coordinator import MB, from_now_on, memory, model, new_run
from edit.fragments.schema import Schema
from edit.lab.hostile.member import Member, attend
from edit.merging.outer_state import OuterState
from editpb.transport.channel_options import channel_options

RESULTS = Path(__file__).parents[1] / "results" / "one_billion.jsonl"
FRAGMENTS = 40


def found(folder: StateFolder, schema: Schema) -> None:
    """Write a run of zeros."""
    config = folder.config()
    folder.first_round_id(0.0)  # as a coordinator that founds it would have done
    store = Store(folder.outer, config, folder.run_id)
    store.found(OuterState(schema, config, [torch.zeros(fragment.numel) for fragment in schema.fragments]))
    store.close()


def peer(path: Path, parameters: int, rounds: int, pipe: Connection) -> None:
    """Contribute to so many rounds; report the seconds of each, and the peak at the end."""
    torch.set_num_threads(1)
    folder, generator = StateFolder(path), torch.Generator().manual_seed(0)
    address = json.loads(folder.addresses.read_text())["listen"]
    credentials = grpc.ssl_channel_credentials(*((path / name).read_bytes() for name in ("ca.pem", "p00.key", "p00.pem")))

    def deltas(schema: Schema) -> Iterator[Tensor]:
        for fragment in schema.fragments:
            yield torch.empty(fragment.numel).normal_(0, 1e-3, generator=generator)

    async def run() -> None:
        async with grpc.aio.secure_channel(address, credentials, options=channel_options(address)) as channel:
            member = Member("p00", folder.run_id, channel, Counter())
            schema = model(parameters, FRAGMENTS)  # without asking: what is described is kept for readers
            async with attend(member, schema) as attendance:
                reporting, last = asyncio.create_task(attendance.report_for_ever(step_s=0.01)), 0
                view = await attendance.next_round(last)
                for _ in range(rounds):
                    began, last = time.monotonic(), view.round_id
                    await member.contribute(view, attendance.schema, attendance.config, deltas(attendance.schema))
                    sent = time.monotonic()
                    view = await attendance.next_round(last)
                    pipe.send((view.outer_step, sent - began, time.monotonic() - sent))
                reporting.cancel()

    asyncio.run(run())
    pipe.send(memory(os.getpid(), "VmHWM"))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--parameters", type=float, default=1e9)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--folder", type=Path, help="where the run's files lie; a temporary folder by default")
    arguments.add_argument("--label", default="")
    options = arguments.parse_args()
    schema = model(int(options.parameters), FRAGMENTS)
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folder = new_run(Path(scratch) / "run", 1, 256 << 20)
        found(folder, schema)
        command = [sys.executable, "-m", "aggregator", "serve", "--keep-serving", "--state", str(folder.path)]
        began = time.monotonic()
        serving = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert serving.stderr is not None
            next(line for line in serving.stderr if " serving " in line)
            start_s, peaks = time.monotonic() - began, {"start": memory(serving.pid, "VmHWM")}
            from_now_on(serving.pid)
            context = mp.get_context("spawn")
            here, there = context.Pipe()
            process = context.Process(target=peer, args=(folder.path, schema.numel, options.rounds, there))
            process.start()
            print(f"{schema.numel:,} parameters; started in {start_s:.1f} s, peak {peaks['start'] / MB:,.0f} MB", flush=True)
            seconds = []
            for _ in range(options.rounds):
                outer_step, sending_s, commit_s = here.recv()
                seconds.append((round(sending_s, 1), round(commit_s, 1)))
                peaks["rounds"] = memory(serving.pid, "VmHWM")
                sent = f"made and sent in {sending_s:.1f} s, committed {commit_s:.1f} s later"
                print(f"outer step {outer_step}: {sent}, coordinator's peak {peaks['rounds'] / MB:,.0f} MB", flush=True)
            peaks["peer"] = int(here.recv())
            process.join()
            from_now_on(serving.pid)
        finally:
            serving.send_signal(signal.SIGTERM)
            while serving.poll() is None:  # it writes its last checkpoint
                peaks["checkpoint"] = _peak_or(serving.pid, peaks.get("checkpoint", 0))
                time.sleep(0.05)
    each = {name: round(peak / schema.numel, 2) for name, peak in peaks.items()}
    print(f"peaks in bytes per parameter: {each}")
    row = {
        "date": datetime.date.today().isoformat(),
        "label": options.label,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "parameters": schema.numel,
        "start_s": round(start_s, 1),
        "round_s": seconds,
        "peak_mb": {name: round(peak / MB) for name, peak in peaks.items()},
        "bytes_per_parameter": each,
    }
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")


def _peak_or(pid: int, last: int) -> int:
    """Return the peak of a process that may have ended meanwhile."""
    try:
        return memory(pid, "VmHWM")
    except (OSError, StopIteration):
        return last


if __name__ == "__main__":
    main()
