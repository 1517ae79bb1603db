"""One peer of hivemind's DecentralizedAverager, over its libp2p daemon.

Run by the Python of the rivals' environment: COMPRESSION RANK PEERS PARAMETERS FOLDER ADDRESS PORT, see turns.py for the
protocol. The group is found before the exchange begins, as hivemind.Optimizer does it; that is not counted.
"""

import json
import socket
import sys
import time
from pathlib import Path

import hivemind
import torch
from hivemind.averaging.control import AveragingStage
from hivemind.compression import Float16Compression, NoCompression, Uniform8BitQuantization

FRAGMENTS = 12
LIMIT_S = 86400.0  # who started this process ends it earlier
COMPRESSIONS = {
    "fp32": NoCompression(),
    "float16": Float16Compression(),
    "uniform8": Uniform8BitQuantization(),
}
TOLERANCES = {"fp32": 1e-7, "float16": 1e-5, "uniform8": 1e-4}


def first_peer(dht: hivemind.DHT, file: Path) -> None:
    """Write where the other peers find this one."""
    file.with_suffix(".new").write_text("\n".join(str(address) for address in dht.get_visible_maddrs()))
    file.with_suffix(".new").rename(file)


def main(compression: str, rank: int, peers: int, parameters: int, folder: Path, address: str, port: int) -> None:
    torch.set_num_threads(1)
    file = folder / "first-peer"
    while rank and not file.exists():
        time.sleep(0.05)
    known = file.read_text().splitlines() if rank else None
    dht = hivemind.DHT(initial_peers=known, host_maddrs=[f"/ip4/{address}/tcp/0"], start=True)
    if rank == 0:
        first_peer(dht, file)
    own = (torch.arange(parameters // FRAGMENTS) % 251 - 125) * 1e-5 * (rank + 1)
    averager = hivemind.DecentralizedAverager(
        [own.clone() for _ in range(FRAGMENTS)],
        dht,
        prefix="bench",
        target_group_size=peers,
        min_group_size=peers,
        compression=COMPRESSIONS[compression],
        allreduce_timeout=LIMIT_S,
        start=True,
    )
    lines = socket.create_connection(("127.0.0.1", port)).makefile("rw")
    while True:
        with averager.get_tensors() as tensors:
            for tensor in tensors:
                tensor.copy_(own)
        step = averager.step(wait=False, require_trigger=True, timeout=LIMIT_S)
        while step.stage != AveragingStage.AWAITING_TRIGGER:
            assert not step.done(), "no group was found"
            time.sleep(0.02)
        print("ready", file=lines, flush=True)
        if not lines.readline():
            break
        began = time.monotonic()
        step.allow_allreduce()
        found = step.result(LIMIT_S)
        print(json.dumps({"began": began, "ended": time.monotonic()}), file=lines, flush=True)
        assert len(found) == peers, f"a group of {len(found)}"
        with averager.get_tensors() as tensors:
            mean = own / (rank + 1) * (peers + 1) / 2
            assert all(torch.allclose(tensor, mean, atol=TOLERANCES[compression]) for tensor in tensors), "a wrong mean"
    step.cancel()
    averager.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    compression, rank, peers, parameters, folder, address, port = sys.argv[1:]
    main(compression, int(rank), int(peers), int(parameters), Path(folder), address, int(port))
