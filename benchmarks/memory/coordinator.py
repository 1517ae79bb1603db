"""Peak memory of the coordinator process with 2, 8 and 32 peers, in bytes per parameter.

    python benchmarks/memory/coordinator.py  # 40M parameters, int8 both ways, a buffer of 64 MB: about 8 minutes

A real coordinator process; the peers' sides run in this process (their memory is not measured). All contributions of a
round are sent before the last one completes it, so 32 peers have 1.3 GB on their way into a 64 MB buffer. The peak is what
the operating system says of the coordinator process (VmHWM), which is reset before each of three phases:

    joined      the first round: all peers have just read the first parameters, which stay in memory for a minute (4 bytes)
    rounds      rounds a minute later
    checkpoint  a round, and the checkpoint after it

From each are subtracted the peak of the same phase with a model of almost no parameters and as many peers (the process itself,
its libraries, a connection for each peer), and the contributions that are in memory at most: the buffer, or all there are when
they are fewer bytes. What is on its way between a connection and the buffer is not: a few MB for each peer.
Appends to benchmarks/results/coordinator_memory.jsonl.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import torch
from cryptography.hazmat.primitives import serialization

from aggregator.security.authority import Authority
from aggregator.security.certificates import key_pem, new_key
from aggregator.storage.state_folder import StateFolder
from edit.codecs import codec
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.records import Committed, Contribution
from editpb.identity import Identity
from editpb.snapshot_cache import KEPT_S
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.collective import HubCollective
from peers.carriers.io_thread import IoThread

RESULTS = Path(__file__).parents[1] / "results" / "coordinator_memory.jsonl"
FRAGMENTS = 8
ROUNDS = 3  # in a row, each
CHECKPOINT = 1 + ROUNDS + 1  # the first outer step with a checkpoint
MB = 1e6


def model(parameters: int, blocks: int) -> Schema:
    """Blocks of equal size, a fragment each."""
    numel = parameters // blocks
    return Schema(
        tuple(
            FragmentSpec(fragment_id=i, name=f"blocks.{i}", tensors=(TensorSpec(name=f"blocks.{i}.weight", shape=(numel,)),))
            for i in range(blocks)
        )
    )


def new_run(path: Path, peers: int, buffer_bytes: int) -> StateFolder:
    toml = (
        'name = "memory"\n[model]\nname = "entry:mine"\n[sync]\nevery = 1\nouter_steps = 1000\n'
        f"[rounds]\nstart_peers = {peers}\nquorum = {peers}\n"
        f'[codec]\nup = "int8"\ndown = "int8"\n[storage]\nbuffer_bytes = {buffer_bytes}\n'
        f"keep_updates = 1\ncheckpoint_every = {CHECKPOINT}\n"
        '[membership]\nheartbeat_s = 5.0\nlease_s = 120.0\n[server]\nlisten = "127.0.0.1:0"\nenrol_listen = "127.0.0.1:0"\n'
    )
    folder = StateFolder.create(path, toml)
    authority = Authority.create(folder.path, folder.run_id, folder.config().server.advertise, now=time.time())
    for i in range(peers):
        identity, key = Identity(folder.run_id, "peer", f"p{i:02d}"), new_key()
        certificate = authority.issuer.issue(identity, key.public_key(), lifetime_s=86400, now=time.time())
        authority.members.add(identity, certificate, time.time())
        (path / f"p{i:02d}.key").write_bytes(key_pem(key))
        (path / f"p{i:02d}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return folder


def memory(pid: int, name: str) -> int:
    """Return VmHWM, VmRSS, ... of a process, bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def from_now_on(pid: int) -> None:
    """Let the peak begin again with what is in memory now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def join(collective: HubCollective, schema: Schema) -> None:
    """Enter the run; of the parameters that are read nothing is kept."""
    collective.join(schema, lambda: [torch.zeros(f.numel) for f in schema.fragments])


def exchange(folder: StateFolder, schema: Schema, peers: int, pid: int, wait_s: float) -> dict[str, int]:
    """Run the rounds; return the peak of each phase, bytes."""
    address = json.loads(folder.addresses.read_text())["listen"]
    generator, peaks = torch.Generator().manual_seed(0), {}
    with IoThread() as io:
        collectives = []
        for i in range(peers):
            name = f"p{i:02d}"
            files = (folder.path / each for each in ("ca.pem", f"{name}.key", f"{name}.pem"))
            channels = Channels([address], grpc.ssl_channel_credentials(*(file.read_bytes() for file in files)))
            collectives.append(HubCollective(io, channels, Identity(folder.run_id, "peer", name)))
        with ThreadPoolExecutor(peers) as pool:  # joining waits for the first round, which waits for all of them
            joining = [pool.submit(join, collective, schema) for collective in collectives]
        for each in joining:
            each.result()

        def round_(step: int) -> None:
            deltas = [torch.empty(f.numel).normal_(0, 1e-3, generator=generator) for f in schema.fragments]
            payloads = [codec("int8").encode(delta, f) for delta, f in zip(deltas, schema.fragments, strict=True)]
            for collective in collectives:
                for i, payload in enumerate(payloads):
                    collective.contribute(
                        Contribution(outer_step=step, fragment_id=i, inner_steps=1, tokens=1, payload=payload)
                    )
            for collective in collectives:
                assert isinstance(collective.outcome(step, block=True), Committed)

        for phase, steps in (("joined", [0]), ("rounds", range(1, 1 + ROUNDS)), ("checkpoint", [1 + ROUNDS])):
            if phase == "rounds":
                time.sleep(wait_s)
            from_now_on(pid)
            for step in steps:
                round_(step)
            while phase == "checkpoint" and not any((folder.path / "outer").glob(f"step-*{CHECKPOINT}.safetensors")):
                time.sleep(0.05)
            peaks[phase] = memory(pid, "VmHWM")
        for collective in collectives:
            collective.close("measured")
    return peaks


def peak(peers: int, parameters: int, buffer_bytes: int, wait_s: float = KEPT_S + 1) -> dict[str, int]:
    """Return the peak of each phase, bytes. wait_s: after the first, until nothing that was read is kept."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = new_run(Path(scratch) / "run", peers, buffer_bytes)
        serving = subprocess.Popen(
            [sys.executable, "-m", "aggregator", "serve", "--keep-serving", "--state", str(folder.path)],
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert serving.stderr is not None
            next(line for line in serving.stderr if " serving " in line)
            return exchange(folder, model(parameters, FRAGMENTS), peers, serving.pid, wait_s)
        finally:
            serving.send_signal(signal.SIGTERM)
            serving.communicate(timeout=120)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--parameters", type=float, default=40e6)
    arguments.add_argument("--peers", nargs="+", type=int, default=[2, 8, 32])
    arguments.add_argument("--buffer-mb", type=int, default=64)
    arguments.add_argument("--label", default="")
    options = arguments.parse_args()
    schema, phases = model(int(options.parameters), FRAGMENTS), ("joined", "rounds", "checkpoint")
    numel, size = schema.numel, sum(codec("int8").encoded_size(fragment.numel) for fragment in schema.fragments)
    print(f"{numel:,} parameters; contributions of {size / MB:.0f} MB; buffer {options.buffer_mb} MB")
    print("peaks in bytes per parameter, less those of a tiny model and the contributions in memory")
    print(f"{'peers':>5} {'tiny MB':>8} {'contrib. MB':>12}" + "".join(f"{phase:>12}" for phase in phases))
    for peers in options.peers:
        held = min(peers * size, options.buffer_mb << 20)
        tiny = peak(peers, 1000 * FRAGMENTS, options.buffer_mb << 20, wait_s=0.0)
        peaks = peak(peers, numel, options.buffer_mb << 20)
        bytes_each = {phase: (peaks[phase] - tiny[phase] - held) / numel for phase in phases}
        columns = "".join(f"{bytes_each[phase]:12.1f}" for phase in phases)
        print(f"{peers:5} {tiny['rounds'] / MB:8.0f} {held / MB:12.0f}{columns}", flush=True)
        row = {
            "date": datetime.date.today().isoformat(),
            "label": options.label,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
            "parameters": numel,
            "peers": peers,
            "buffer_mb": options.buffer_mb,
            "tiny_mb": {phase: round(tiny[phase] / MB) for phase in phases},
            "contributions_mb": round(held / MB),
            "peak_mb": {phase: round(peaks[phase] / MB) for phase in phases},
            "bytes_per_parameter": {phase: round(each, 2) for phase, each in bytes_each.items()},
        }
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
