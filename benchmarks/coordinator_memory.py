"""Peak memory of the coordinator process with 2, 8 and 32 peers: it must not grow with their number beyond the buffer.

    python benchmarks/coordinator_memory.py  # 20M parameters, int8 contributions, a buffer of 64 MB: about 3 minutes

A real coordinator process; the peers' sides run in this process (their memory is not measured). All contributions of a
round are sent before the last one completes it, so 32 peers have 640 MB on their way into a 64 MB buffer. The peak is what
the operating system says of the coordinator process (VmHWM), read from `edit-coordinator status`. The limit
beside it: the first row's peak plus the buffer; what the model itself needs (outer state, its successors while a round
commits, kept updates) is in every row alike. Appends to benchmarks/results/coordinator_memory.jsonl.
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
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.collective import HubCollective
from peers.carriers.io_thread import IoThread

RESULTS = Path(__file__).parent / "results" / "coordinator_memory.jsonl"
FRAGMENTS = 8
ROUNDS = 3
MB = 1e6


def model(parameters: int) -> Schema:
    numel = parameters // FRAGMENTS
    return Schema(
        tuple(
            FragmentSpec(fragment_id=i, name=f"blocks.{i}", tensors=(TensorSpec(name=f"blocks.{i}.weight", shape=(numel,)),))
            for i in range(FRAGMENTS)
        )
    )


def new_run(path: Path, peers: int, buffer_bytes: int) -> StateFolder:
    toml = (
        f'name = "memory"\n[model]\nname = "entry:mine"\n[sync]\nevery = 1\nouter_steps = 1000\n[rounds]\nquorum = {peers}\n'
        f"[storage]\nbuffer_bytes = {buffer_bytes}\n"
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


def status(folder: StateFolder) -> dict[str, object]:
    command = [sys.executable, "-m", "aggregator", "status", "--json", "--state", str(folder.path)]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def exchange(folder: StateFolder, schema: Schema, peers: int) -> None:
    address = json.loads(folder.addresses.read_text())["listen"]
    generator = torch.Generator().manual_seed(0)
    with IoThread() as io:
        collectives = []
        for i in range(peers):
            name = f"p{i:02d}"
            files = (folder.path / each for each in ("ca.pem", f"{name}.key", f"{name}.pem"))
            channels = Channels([address], grpc.ssl_channel_credentials(*(file.read_bytes() for file in files)))
            collectives.append(HubCollective(io, channels, Identity(folder.run_id, "peer", name)))
        for collective in collectives:
            snapshot = collective.join(schema, lambda: [torch.zeros(f.numel) for f in schema.fragments])
        for step in range(snapshot.outer_step, snapshot.outer_step + ROUNDS):
            deltas = [torch.empty(f.numel).normal_(0, 1e-3, generator=generator) for f in schema.fragments]
            payloads = [codec("int8").encode(delta, f) for delta, f in zip(deltas, schema.fragments, strict=True)]
            for collective in collectives:
                for i, payload in enumerate(payloads):
                    collective.contribute(
                        Contribution(outer_step=step, fragment_id=i, inner_steps=1, tokens=1, payload=payload)
                    )
            for collective in collectives:
                assert isinstance(collective.outcome(step, block=True), Committed)
        for collective in collectives:
            collective.close("measured")


def peak(peers: int, parameters: int, buffer_bytes: int) -> tuple[float, float]:
    """(peak of a coordinator that has served nothing, peak after the rounds), bytes."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = new_run(Path(scratch) / "run", peers, buffer_bytes)
        serving = subprocess.Popen(
            [sys.executable, "-m", "aggregator", "serve", "--state", str(folder.path)], stderr=subprocess.PIPE, text=True
        )
        try:
            assert serving.stderr is not None
            next(line for line in serving.stderr if " serving " in line)
            idle = float(str(status(folder)["peak_memory_bytes"]))
            exchange(folder, model(parameters), peers)
            return idle, float(str(status(folder)["peak_memory_bytes"]))
        finally:
            serving.send_signal(signal.SIGTERM)
            serving.communicate(timeout=120)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--parameters", type=float, default=20e6)
    arguments.add_argument("--peers", nargs="+", type=int, default=[2, 8, 32])
    arguments.add_argument("--buffer-mb", type=int, default=64)
    options = arguments.parse_args()
    numel = model(int(options.parameters)).numel
    print(f"{numel:,} parameters; contributions of {numel / MB:.0f} MB; buffer {options.buffer_mb} MB")
    print(f"{'peers':>5} {'offered MB':>11} {'idle MB':>8} {'peak MB':>8} {'limit MB':>9}")
    first: float | None = None
    for peers in options.peers:
        idle, highest = peak(peers, numel, options.buffer_mb << 20)
        first = highest if first is None else first
        limit = first + (options.buffer_mb << 20)
        print(f"{peers:5} {peers * numel / MB:11.0f} {idle / MB:8.0f} {highest / MB:8.0f} {limit / MB:9.0f}", flush=True)
        row = {
            "date": datetime.date.today().isoformat(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
            "parameters": numel,
            "peers": peers,
            "buffer_mb": options.buffer_mb,
            "idle_mb": round(idle / MB),
            "peak_mb": round(highest / MB),
            "limit_mb": round(limit / MB),
        }
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
