"""Flower's SuperLink and SuperNodes, over gRPC without TLS: one round of FedAvg, as its documentation runs it.

Run by the Python of the rivals' environment: 0 PEERS PARAMETERS FOLDER PORT, see turns.py for the protocol. This process starts
the SuperLink, a SuperNode for each peer, and the run. A copy of this file is the app: its ServerApp, in a process that the
SuperLink starts, is told to exchange.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

FRAGMENTS = 12
APP = """
[project]
name = "bench"
version = "1.0.0"
dependencies = []
[tool.flwr.app]
publisher = "bench"
[tool.flwr.app.components]
serverapp = "bench_app:server"
clientapp = "bench_app:client"
"""


def values(rank: float, parameters: int, turn: int) -> ArrayRecord:
    """Return what a client trains: other values in each round and fragment, because Flower sends equal bytes only once."""
    pattern = np.arange(parameters // FRAGMENTS, dtype=np.float32)
    return ArrayRecord([(pattern + fragment) * np.float32(1e-9 * rank * turn) for fragment in range(FRAGMENTS)])


class Turns(FedAvg):
    """FedAvg whose rounds begin when this process is told to, and say when they have ended."""

    def __init__(self, peers: int, parameters: int, port: int) -> None:
        super().__init__(fraction_evaluate=0.0, min_train_nodes=peers, min_available_nodes=peers)
        self.peers, self.parameters = peers, parameters
        self.lines = socket.create_connection(("127.0.0.1", port)).makefile("rw")
        self.began = 0.0

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Grid) -> Iterable[Message]:
        while len(list(grid.get_node_ids())) < self.peers:
            time.sleep(0.1)
        print("ready", file=self.lines, flush=True)
        if not self.lines.readline():
            sys.exit()
        self.began = time.monotonic()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        received = list(replies)
        merged = super().aggregate_train(server_round, received)
        print(json.dumps({"began": self.began, "ended": time.monotonic()}), file=self.lines, flush=True)
        if len(received) != self.peers or merged[0] is None:
            sys.exit(f"{len(received)} replies: {[reply.error for reply in received if reply.has_error()]}")
        mean = values((self.peers + 1) / 2, self.parameters, server_round).to_numpy_ndarrays()
        if not all(map(np.allclose, merged[0].to_numpy_ndarrays(), mean)):
            sys.exit("a wrong mean")
        return merged


server = ServerApp()
client = ClientApp()


@server.main()
def serve(grid: Grid, context: Context) -> None:
    peers, parameters, port = (int(os.environ[f"BENCH_{name}"]) for name in ("PEERS", "PARAMETERS", "PORT"))
    Turns(peers, parameters, port).start(grid, values(1, parameters, 1), num_rounds=1_000_000)


@client.train()
def train(message: Message, context: Context) -> Message:
    rank, parameters = int(context.node_config["rank"]), int(os.environ["BENCH_PARAMETERS"])
    turn = int(message.content["config"]["server-round"])
    content = RecordDict({"arrays": values(rank, parameters, turn), "metrics": MetricRecord({"num-examples": 1})})
    return Message(content=content, reply_to=message)


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def serves(address: str) -> bool:
    host, _, port = address.partition(":")
    with socket.socket() as tried:
        return tried.connect_ex((host, int(port))) == 0


def main(peers: int, parameters: int, folder: Path, port: str) -> None:
    app, home, programs = folder / "app", folder / "flwr", Path(sys.executable).parent
    app.mkdir()
    home.mkdir()
    (app / "pyproject.toml").write_text(APP)
    shutil.copy(__file__, app / "bench_app.py")
    fleet, control, server_io = (free_address() for _ in range(3))
    (home / "config.toml").write_text(f'[superlink.bench]\naddress = "{control}"\ninsecure = true\n')
    known = {"BENCH_PEERS": str(peers), "BENCH_PARAMETERS": str(parameters), "BENCH_PORT": port, "FLWR_HOME": str(home)}
    path = f"{programs}:{os.environ['PATH']}"  # they start flwr-serverapp and flwr-clientapp
    environment = {**os.environ, **known, "PATH": path, "FLWR_TELEMETRY_ENABLED": "0"}
    addresses = ("--fleet-api-address", fleet, "--control-api-address", control, "--serverappio-api-address", server_io)
    started = [subprocess.Popen([programs / "flower-superlink", "--insecure", *addresses], env=environment)]
    for rank in range(1, peers + 1):
        node = (
            "--insecure",
            "--superlink",
            fleet,
            "--clientappio-api-address",
            free_address(),
            "--node-config",
            f"rank={rank}",
        )
        started.append(subprocess.Popen([programs / "flower-supernode", *node], env=environment))
    while not serves(control):  # `flwr run` does not wait for it
        time.sleep(0.1)
    subprocess.run([programs / "flwr", "run", app, "bench", "--stream"], env=environment, check=True)
    for each in started:
        each.terminate()


if __name__ == "__main__":
    main(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
