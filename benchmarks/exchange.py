"""One exchange of a whole model over gRPC with mutual TLS, beside a raw gRPC stream of the same bytes in the same run.

    python benchmarks/exchange.py  # 124M parameters, fp32 and int8, 2 and 4 peers: about 10 minutes on 2 cores
    python benchmarks/exchange.py --parameters 50331648 --codecs int8 --peers 2 4 --label "what was changed"

Coordinator and peers are separate processes on loopback; the penalty is on; a round is from the moment the last peer begins
to encode to the moment the last peer has applied the update and checked its digest. Beside the wall time stands the CPU time of
that round (user + system): of all processes, of the coordinator, of one peer; it says more on a machine that does other work,
too. The raw stream moves the same bytes by
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
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import torch

from edit.codecs import codec
from edit.codecs.error_feedback import ErrorFeedback
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.records import Committed, Contribution, Here
from edit.replica.replica import Replica
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.collective import HubCollective
from peers.carriers.io_thread import IoThread
from peers.identity.peer_folder import PeerFolder

CHUNK = 1 << 20
ROUNDS = 6  # the first one warms up and is not counted
RESULTS = Path(__file__).parent / "results" / "exchange.jsonl"


class Round(NamedTuple):
    """One round: wall seconds, and CPU seconds of the server and of all clients together."""

    wall_s: float
    server_cpu_s: float
    clients_cpu_s: float

    @property
    def cpu_s(self) -> float:
        return self.server_cpu_s + self.clients_cpu_s


def median(rounds: list[Round]) -> Round:
    """Return the median of each column."""
    return Round(*(statistics.median(column) for column in zip(*rounds, strict=True)))


def own_cpu_s() -> float:
    """Return the CPU seconds of this process so far, in all its threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def cpu_s_of(pid: int) -> float:
    """Return the CPU seconds of another process so far, in all its threads; a tick is 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
            began, cpu_s = time.monotonic(), own_cpu_s()
            for i in range(len(replica.schema.fragments)):
                payload = feedback.stage(i, replica.pseudo_gradient(i))
                collective.contribute(Contribution(outer_step=step, fragment_id=i, inner_steps=1, tokens=1, payload=payload))
            outcome = collective.outcome(step, block=True)
            assert isinstance(outcome, Committed), outcome
            steps = {part.fragment_id: Here(part.payload) for part in outcome.commit.fragments if part.payload is not None}
            after = replica.after(step + 1, steps)
            assert after.digest == outcome.commit.digest
            replica.move(after, lambda _: None)
            for i in range(len(replica.schema.fragments)):
                feedback.commit(i)
            pipe.send((began, time.monotonic(), own_cpu_s() - cpu_s, after.digest))
        collective.close("measured")


def ours(peers: int, parameters: int, codec_name: str) -> list[Round]:
    """Return the counted rounds."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        (root / "run.toml").write_text(
            f'name = "bench"\n[model]\nname = "entry:mine"\n[sync]\nevery = 1\nouter_steps = 1000\n'
            f'[codec]\nup = "{codec_name}"\ndown = "{codec_name}"\n'
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
            return _measure([(peer, (home, parameters, codec_name)) for home in homes], serving.pid)
        finally:
            serving.send_signal(signal.SIGTERM)
            serving.communicate(timeout=60)


def _measure(work: list[tuple[Any, tuple[Any, ...]]], server: int) -> list[Round]:
    context = mp.get_context("spawn")
    pipes, processes, rounds = [], [], []
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
        server_cpu_s = cpu_s_of(server)
        for pipe in pipes:
            pipe.send("go")
        reports = [pipe.recv() for pipe in pipes]
        assert len({report[3] for report in reports}) == 1, "digests differ"
        wall_s = max(report[1] for report in reports) - max(report[0] for report in reports)
        rounds.append(Round(wall_s, cpu_s_of(server) - server_cpu_s, sum(report[2] for report in reports)))
    for pipe in pipes:
        pipe.send("end")
    for process in processes:
        process.join()
    return rounds[1:]


# ---- the raw stream --------------------------------------------------------------------------------------------------------


def raw_client(address: str, tls: Path, up: int, down: int, pipe: Connection) -> None:
    """The same bytes up and then down, and nothing else."""

    async def run() -> None:
        async with grpc.aio.secure_channel(address, _client_tls(tls), options=_LIMITS) as channel:
            send: Any = channel.stream_unary("/raw/up")
            receive: Any = channel.unary_stream("/raw/down")
            while pipe.recv() != "end":
                pipe.send("ready")
                pipe.recv()
                began, cpu_s = time.monotonic(), own_cpu_s()
                await send(_pieces(up))
                async for _ in receive(down.to_bytes(8, "little")):
                    pass
                pipe.send((began, time.monotonic(), own_cpu_s() - cpu_s, "raw"))

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
        handlers: dict[str, Any] = {
            "up": grpc.stream_unary_rpc_method_handler(up),
            "down": grpc.unary_stream_rpc_method_handler(down),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("raw", handlers),))
        ca, key, certificate = ((tls / name).read_bytes() for name in ("ca.pem", "server.key", "server.pem"))
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)], ca, True))
        await server.start()
        pipe.send(port)
        await server.wait_for_termination()

    asyncio.run(run())


def raw(peers: int, up: int, down: int) -> list[Round]:
    """Return the counted transfers of the same bytes."""
    with tempfile.TemporaryDirectory() as scratch:
        tls = Path(scratch) / "run"
        subprocess.run([sys.executable, "-m", "aggregator", "init", "--state", tls], check=True, capture_output=True)
        context = mp.get_context("spawn")
        here, there = context.Pipe()
        server = context.Process(target=raw_server, args=(tls, there), daemon=True)
        server.start()
        try:
            address = f"127.0.0.1:{here.recv()}"
            assert server.pid is not None
            return _measure([(raw_client, (address, tls, up, down)) for _ in range(peers)], server.pid)
        finally:
            server.kill()
            server.join()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--parameters", type=float, default=124e6)
    arguments.add_argument("--codecs", nargs="+", default=["fp32", "int8"])
    arguments.add_argument("--peers", nargs="+", type=int, default=[2, 4])
    arguments.add_argument("--label", default="", help="written beside the figures")
    options = arguments.parse_args()
    schema = blocks(int(options.parameters))
    print(f"{schema.numel:,} parameters, {os.cpu_count()} cores, {shutil.disk_usage('/tmp').free >> 30} GiB free")
    print(f"{'':28}{'ours':>32}{'raw gRPC':>16}")
    columns = "".join(f"{name:>8}" for name in ("wall s", "CPU s", "coord.", "a peer", "wall s", "CPU s"))
    print(f"{'codec':6} {'peers':>5} {'MB up':>8} {'load':>6}{columns}")
    for codec_name in options.codecs:
        size = sum(codec(codec_name).encoded_size(fragment.numel) for fragment in schema.fragments)
        for peers in options.peers:
            limit = median(raw(peers, size, size))
            load = os.getloadavg()[0]
            round_ = median(ours(peers, int(options.parameters), codec_name))
            figures = (
                round_.wall_s,
                round_.cpu_s,
                round_.server_cpu_s,
                round_.clients_cpu_s / peers,
                limit.wall_s,
                limit.cpu_s,
            )
            columns = "".join(f"{figure:8.2f}" for figure in figures)
            print(f"{codec_name:6} {peers:5} {size / 1e6:8.1f} {load:6.1f}{columns}", flush=True)
            row = {
                "date": datetime.date.today().isoformat(),
                "label": options.label,
                "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
                "load_before": round(load, 2),
                "parameters": schema.numel,
                "codec": codec_name,
                "peers": peers,
                "bytes_up_per_peer": size,
                "round_s": round(round_.wall_s, 3),
                "cpu_s": round(round_.cpu_s, 3),
                "coordinator_cpu_s": round(round_.server_cpu_s, 3),
                "peer_cpu_s": round(round_.clients_cpu_s / peers, 3),
                "raw_grpc_s": round(limit.wall_s, 3),
                "raw_grpc_cpu_s": round(limit.cpu_s, 3),
            }
            RESULTS.parent.mkdir(exist_ok=True)
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
