"""Flower's SuperLink and SuperNodes, over gRPC without TLS: one round of FedAvg, as its documentation runs it.

Run by the Python of the rivals' environment: RANK PEERS PARAMETERS FOLDER ADDRESS [PORT], see turns.py for the protocol. Rank 0
starts the SuperLink and the run; each other one is a SuperNode. A copy of this file is the app: its ServerApp, in a process
that the SuperLink starts, is told to exchange.
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
PROGRAMS = Path(sys.executable).parent
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


def free_address(host: str) -> str:
    with socket.create_server((host, 0)) as free:
        return f"{host}:{free.getsockname()[1]}"


def serves(address: str) -> bool:
    host, _, port = address.partition(":")
    with socket.socket() as tried:
        return tried.connect_ex((host, int(port))) == 0


def run_superlink(folder: Path, host: str, environment: dict[str, str]) -> None:
    app, home = folder / "app", folder / "flwr"
    app.mkdir()
    home.mkdir()
    (app / "pyproject.toml").write_text(APP)
    shutil.copy(__file__, app / "bench_app.py")
    fleet, control, server_io = (free_address(each) for each in (host, "127.0.0.1", "127.0.0.1"))
    (home / "config.toml").write_text(f'[superlink.bench]\naddress = "{control}"\ninsecure = true\n')
    addresses = ("--fleet-api-address", fleet, "--control-api-address", control, "--serverappio-api-address", server_io)
    superlink = subprocess.Popen([PROGRAMS / "flower-superlink", "--insecure", *addresses], env=environment)
    while not serves(control):  # `flwr run` does not wait for it
        time.sleep(0.1)
    (folder / "fleet.new").write_text(fleet)
    (folder / "fleet.new").rename(folder / "fleet")
    subprocess.run([PROGRAMS / "flwr", "run", app, "bench", "--stream"], env=environment, check=True)
    superlink.terminate()


def be_supernode(rank: int, fleet: Path, environment: dict[str, str]) -> None:
    while not fleet.exists():
        time.sleep(0.05)
    at = ("--superlink", fleet.read_text(), "--clientappio-api-address", free_address("127.0.0.1"))
    program = str(PROGRAMS / "flower-supernode")
    os.execve(program, (program, "--insecure", *at, "--node-config", f"rank={rank}"), environment)


def main(rank: int, peers: int, parameters: int, folder: Path, host: str, port: str = "") -> None:
    known = {"BENCH_PEERS": str(peers), "BENCH_PARAMETERS": str(parameters), "BENCH_PORT": port}
    known |= {"FLWR_HOME": str(folder / "flwr"), "FLWR_TELEMETRY_ENABLED": "0"}
    path = f"{PROGRAMS}:{os.environ['PATH']}"  # they start flwr-serverapp and flwr-clientapp
    environment = {**os.environ, **known, "PATH": path}
    if rank == 0:
        run_superlink(folder, host, environment)
    else:
        be_supernode(rank, folder / "fleet", environment)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), *sys.argv[5:])
