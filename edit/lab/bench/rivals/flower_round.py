"""Flower's server and clients, over its gRPC without TLS: one round of FedAvg. This process is the server (rank 0) or a client.

Run by the Python of the rivals' environment: RANK PEERS PARAMETERS FOLDER ADDRESS [PORT], see turns.py for the protocol,
which only the server speaks. These are start_server and start_client: deprecated, but faster than SuperLink and SuperNodes
(flower_superlink.py), which start a process for each round of each client.
"""

import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

import flwr
import numpy as np
from flwr.common import FitRes, NDArrays, ndarrays_to_parameters, parameters_to_ndarrays

FRAGMENTS = 12


def values(rank: int, parameters: int) -> NDArrays:
    """Return what a client trains: a pattern, multiplied by its rank."""
    pattern = ((np.arange(parameters // FRAGMENTS) % 251 - 125) * 1e-5 * rank).astype(np.float32)
    return [pattern] * FRAGMENTS


class Turns(flwr.server.strategy.FedAvg):
    """FedAvg whose rounds begin when this process is told to, and say when they have ended."""

    def __init__(self, peers: int, parameters: int, port: int) -> None:
        zeros = [np.zeros(parameters // FRAGMENTS, np.float32)] * FRAGMENTS
        super().__init__(
            fraction_evaluate=0.0,
            min_fit_clients=peers,
            min_available_clients=peers,
            initial_parameters=ndarrays_to_parameters(zeros),
        )
        self.peers, self.mean = peers, values(1, parameters)[0] * (peers + 1) / 2
        self.lines = socket.create_connection(("127.0.0.1", port)).makefile("rw")
        self.began = 0.0

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        client_manager.wait_for(self.peers)
        print("ready", file=self.lines, flush=True)
        if not self.lines.readline():
            sys.exit()
        self.began = time.monotonic()
        return super().configure_fit(server_round, parameters, client_manager)

    def aggregate_fit(self, server_round: int, results: list[tuple[Any, FitRes]], failures: list[Any]) -> Any:
        merged = super().aggregate_fit(server_round, results, failures)
        print(json.dumps({"began": self.began, "ended": time.monotonic()}), file=self.lines, flush=True)
        if failures or len(results) != self.peers:
            sys.exit(f"{len(results)} results, failures: {failures}")
        if not all(np.allclose(array, self.mean) for array in parameters_to_ndarrays(merged[0])):
            sys.exit("a wrong mean")
        return merged


class Client(flwr.client.NumPyClient):
    def __init__(self, rank: int, parameters: int) -> None:
        self.values = values(rank, parameters)

    def fit(self, parameters: NDArrays, config: dict[str, Any]) -> tuple[NDArrays, int, dict[str, Any]]:
        return self.values, 1, {}


def main(rank: int, peers: int, parameters: int, folder: Path, host: str, *port: str) -> None:
    file = folder / "address"
    if rank == 0:
        with socket.create_server((host, 0)) as free:
            address = f"{host}:{free.getsockname()[1]}"
        strategy = Turns(peers, parameters, int(port[0]))
        file.with_suffix(".new").write_text(address)
        file.with_suffix(".new").rename(file)
        config = flwr.server.ServerConfig(num_rounds=1_000_000)
        flwr.server.start_server(server_address=address, config=config, strategy=strategy)
        return
    while not file.exists():
        time.sleep(0.05)
    flwr.client.start_client(server_address=file.read_text(), client=Client(rank, parameters).to_client(), max_wait_time=60)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), *sys.argv[5:])
