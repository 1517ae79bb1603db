"""One exchange of a whole model over gRPC with mutual TLS, beside a raw gRPC stream of the same bytes in the same run.

    python benchmarks/exchange.py  # 124M parameters, fp32 and int8, 2 and 4 peers: about 10 minutes on 2 cores
    python benchmarks/exchange.py --parameters 5e6 --codecs int8 --peers 2

Coordinator and peers are separate processes on loopback; the penalty is on; a round is from the moment the last peer begins
to encode to the moment the last peer has applied the update and checked its digest. The raw stream moves the same bytes by
the same number of client processes through one grpc.aio server process with the same TLS and chunk size, up and then down,
and does nothing else: no codec, no checksum, no merge, no journal. Results are appended to
benchmarks/results/exchange.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import multiprocessing as mp
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import torch

from edit.codecs import codec
from edit.codecs.error_feedback import ErrorFeedback
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.records import Committed, Contribution
from edit.replica.replica import Replica
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.collective import HubCollective
from peers.carriers.io_thread import IoThread
from peers.identity.peer_folder import PeerFolder

CHUNK = 1 << 20
ROUNDS = 4  # the first one warms up and is not counted
RESULTS = Path(__file__).parent / "results" / "exchange.jsonl"


def blocks(parameters: int) -> Schema:
    """Twelve blocks of equal size, as a GPT-2 small has."""
    numel = parameters // 12
    return Schema(
        tuple(
            FragmentSpec(fragment_id=i, name=f"blocks.{i}", tensors=(TensorSpec(name=f"blocks.{i}.weight", shape=(numel,)),))
            for i in range(12)
        )
    )


# ---- ours ------------------------------------------------------------------------------------------------------------------


class _Model(torch.nn.Module):
    def __init__(self, schema: Schema) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Module() for _ in schema.fragments)
        for block, fragment in zip(self.blocks, schema.fragments, strict=True):
            block.weight = torch.nn.Parameter(torch.zeros(fragment.numel))


def peer(home: Path, parameters: int, codec_name: str, pipe: Connection) -> None:
    """One peer process: exchange on command, report when it began to encode and when everything is applied."""
    torch.set_num_threads(1)
    enrolled = PeerFolder(home).load(time.time())
    replica = Replica(_Model(blocks(parameters)))
    feedback = ErrorFeedback(codec_name, replica.layout.owned)
    with IoThread() as io:
        collective = HubCollective(io, Channels(enrolled.endpoints, enrolled.credentials), enrolled.identity)
        replica.start(collective.join(replica.schema, replica.local))
        generator = torch.Generator().manual_seed(os.getpid())
        while pipe.recv() != "end":
            step = replica.outer.outer_step
            with torch.no_grad():
                for i, theta in enumerate(replica.outer.fragments):
                    replica.parameters(i)[0].copy_(theta).add_(torch.empty_like(theta).normal_(0, 1e-3, generator=generator))
            pipe.send("ready")
            pipe.recv()
            began = time.monotonic()
            for i in range(len(replica.schema.fragments)):
                payload = feedback.stage(i, replica.pseudo_gradient(i))
                collective.contribute(Contribution(outer_step=step, fragment_id=i, inner_steps=1, tokens=1, payload=payload))
            outcome = collective.outcome(step, block=True)
            assert isinstance(outcome, Committed), outcome
            after = replica.after(step + 1, {part.fragment_id: part.payload for part in outcome.commit.fragments})
            assert after.digest == outcome.commit.digest
            replica.move(after, lambda _: None)
            for i in range(len(replica.schema.fragments)):
                feedback.commit(i)
            pipe.send((began, time.monotonic(), after.digest))
        collective.close("measured")


def ours(peers: int, parameters: int, codec_name: str) -> list[float]:
    """Seconds of each counted round."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        (root / "run.toml").write_text(
            f'name = "bench"\n[sync]\nevery = 1\nouter_steps = 1000\n[codec]\nup = "{codec_name}"\ndown = "{codec_name}"\n'
            f"[rounds]\nstart_peers = {peers}\nquorum = {peers}\n[storage]\ncheckpoint_every = 1000\nkeep_updates = 1\n"
            f"buffer_bytes = {8 << 30}\n[membership]\nheartbeat_s = 2.0\nlease_s = 60.0\n"
            '[server]\nlisten = "127.0.0.1:0"\nenrol_listen = "127.0.0.1:0"\n'
        )
        command = [sys.executable, "-m", "aggregator"]
        subprocess.run(
            [*command, "init", "--state", root / "run", "--config", root / "run.toml"], check=True, capture_output=True
        )
        serving = subprocess.Popen([*command, "serve", "--state", root / "run"], stderr=subprocess.PIPE, text=True)
        try:
            assert serving.stderr is not None
            next(line for line in serving.stderr if " serving " in line)
            homes = [root / f"peer-{i}" for i in range(peers)]
            for home in homes:
                line = subprocess.run(
                    [*command, "invite", "--state", root / "run", home.name], check=True, capture_output=True, text=True
                ).stdout.strip()
                subprocess.run([sys.executable, "-m", "peers", "join", line, "--home", home], check=True, capture_output=True)
            return _measure([(peer, (home, parameters, codec_name)) for home in homes])
        finally:
            serving.send_signal(signal.SIGTERM)
            serving.communicate(timeout=60)


def _measure(work: list[tuple[Any, tuple[Any, ...]]]) -> list[float]:
    context = mp.get_context("spawn")
    pipes, processes, seconds = [], [], []
    for target, arguments in work:
        here, there = context.Pipe()
        process = context.Process(target=target, args=(*arguments, there))
        process.start()
        pipes.append(here)
        processes.append(process)
    for _ in range(ROUNDS):
        for pipe in pipes:
            pipe.send("prepare")
        for pipe in pipes:
            assert pipe.recv() == "ready"
        for pipe in pipes:
            pipe.send("go")
        reports = [pipe.recv() for pipe in pipes]
        assert len({report[2] for report in reports}) == 1, "digests differ"
        seconds.append(max(report[1] for report in reports) - max(report[0] for report in reports))
    for pipe in pipes:
        pipe.send("end")
    for process in processes:
        process.join()
    return seconds[1:]


# ---- the raw stream --------------------------------------------------------------------------------------------------------


def raw_client(address: str, tls: Path, up: int, down: int, pipe: Connection) -> None:
    """The same bytes up and then down, and nothing else."""

    async def run() -> None:
        async with grpc.aio.secure_channel(address, _client_tls(tls), options=_LIMITS) as channel:
            send, receive = channel.stream_unary("/raw/up"), channel.unary_stream("/raw/down")
            while pipe.recv() != "end":
                pipe.send("ready")
                pipe.recv()
                began = time.monotonic()
                await send(_pieces(up))
                async for _ in receive(down.to_bytes(8, "little")):
                    pass
                pipe.send((began, time.monotonic(), "raw"))

    asyncio.run(run())


async def _pieces(total: int) -> Any:
    piece = bytes(CHUNK)
    for offset in range(0, total, CHUNK):
        yield piece[: total - offset] if total - offset < CHUNK else piece


_LIMITS = [("grpc.max_receive_message_length", 8 * CHUNK), ("grpc.max_send_message_length", 8 * CHUNK)]


def _client_tls(tls: Path) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(*((tls / name).read_bytes() for name in ("ca.pem", "operator.key", "operator.pem")))


def raw_server(tls: Path, pipe: Connection) -> None:
    async def up(pieces: Any, _: Any) -> bytes:
        async for _piece in pieces:
            pass
        return b""

    async def down(request: bytes, _: Any) -> Any:
        async for piece in _pieces(int.from_bytes(request, "little")):
            yield piece

    async def run() -> None:
        server = grpc.aio.server(options=_LIMITS)
        handlers = {"up": grpc.stream_unary_rpc_method_handler(up), "down": grpc.unary_stream_rpc_method_handler(down)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("raw", handlers),))
        ca, key, certificate = ((tls / name).read_bytes() for name in ("ca.pem", "server.key", "server.pem"))
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)], ca, True))
        await server.start()
        pipe.send(port)
        await server.wait_for_termination()

    asyncio.run(run())


def raw(peers: int, up: int, down: int) -> list[float]:
    """Seconds of each counted transfer of the same bytes."""
    with tempfile.TemporaryDirectory() as scratch:
        tls = Path(scratch) / "run"
        subprocess.run([sys.executable, "-m", "aggregator", "init", "--state", tls], check=True, capture_output=True)
        context = mp.get_context("spawn")
        here, there = context.Pipe()
        server = context.Process(target=raw_server, args=(tls, there), daemon=True)
        server.start()
        try:
            address = f"127.0.0.1:{here.recv()}"
            return _measure([(raw_client, (address, tls, up, down)) for _ in range(peers)])
        finally:
            server.kill()
            server.join()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--parameters", type=float, default=124e6)
    arguments.add_argument("--codecs", nargs="+", default=["fp32", "int8"])
    arguments.add_argument("--peers", nargs="+", type=int, default=[2, 4])
    options = arguments.parse_args()
    schema = blocks(int(options.parameters))
    print(f"{schema.numel:,} parameters, {os.cpu_count()} cores, {shutil.disk_usage('/tmp').free >> 30} GiB free")
    print(f"{'codec':6} {'peers':>5} {'MB up':>8} {'round s':>8} {'raw s':>8} {'ratio':>6}")
    for codec_name in options.codecs:
        size = sum(codec(codec_name).encoded_size(fragment.numel) for fragment in schema.fragments)
        for peers in options.peers:
            limit = statistics.median(raw(peers, size, size))
            round_s = statistics.median(ours(peers, int(options.parameters), codec_name))
            print(f"{codec_name:6} {peers:5} {size / 1e6:8.1f} {round_s:8.2f} {limit:8.2f} {round_s / limit:6.2f}", flush=True)
            row = {
                "date": datetime.date.today().isoformat(),
                "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
                "parameters": schema.numel,
                "codec": codec_name,
                "peers": peers,
                "bytes_up_per_peer": size,
                "round_s": round(round_s, 3),
                "raw_grpc_s": round(limit, 3),
                "ratio": round(round_s / limit, 3),
            }
            RESULTS.parent.mkdir(exist_ok=True)
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
