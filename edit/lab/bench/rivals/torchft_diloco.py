"""One replica of torchft's DiLoCo: its outer synchronisation over a Manager, a lighthouse and ProcessGroupGloo, plaintext fp32.

Run by the Python of the rivals' environment: RANK PEERS PARAMETERS FOLDER ADDRESS PORT, see turns.py for the protocol. Rank 0
also has the lighthouse. Its and the manager's addresses have the host's name, the store's is ADDRESS.
"""

import json
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

FRAGMENTS = 12
LIMIT = timedelta(days=1)  # who started this process ends it earlier


def lighthouse_address(peers: int, file: Path, start: bool) -> str:
    """Return the address of the lighthouse, which `start` starts in this process."""
    if start:
        LIGHTHOUSES.append(LighthouseServer(bind="[::]:0", min_replicas=peers))
        file.with_suffix(".new").write_text(LIGHTHOUSES[0].address())
        file.with_suffix(".new").rename(file)
    while not file.exists():
        time.sleep(0.05)
    return file.read_text()


LIGHTHOUSES: list[LighthouseServer] = []  # one ends when nothing refers to it


def main(rank: int, peers: int, parameters: int, folder: Path, address: str, port: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    model = torch.nn.ParameterList(torch.zeros(parameters // FRAGMENTS) for _ in range(FRAGMENTS))
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=LIMIT),
        min_replica_size=peers,
        use_async_quorum=False,
        load_state_dict=lambda state: None,
        state_dict=dict,
        replica_id=f"replica-{rank}",
        store_addr=address,
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse_address(peers, folder / "lighthouse", start=rank == 0),
        timeout=LIMIT,
        quorum_timeout=LIMIT,
        init_sync=False,
    )
    own = (torch.arange(parameters // FRAGMENTS) % 251 - 125) * 1e-5 * (rank + 1)
    lines = socket.create_connection(("127.0.0.1", port)).makefile("rw")
    momentum = expected = 0.0  # of one element
    with DiLoCo(manager, [model], inner, outer, sync_every=1):
        while True:
            for parameter in model:
                parameter.grad = own.clone()
            print("ready", file=lines, flush=True)
            if not lines.readline():
                break
            began, step = time.monotonic(), manager.current_step()
            inner.step()  # its hook synchronises
            print(json.dumps({"began": began, "ended": time.monotonic()}), file=lines, flush=True)
            assert (manager.current_step(), manager.num_participants()) == (step + 1, peers), "not committed by all"
            mean = own[1].item() / (rank + 1) * (peers + 1) / 2
            momentum = 0.9 * momentum + mean
            expected -= 0.7 * (mean + 0.9 * momentum)
            assert abs(model[0][1].item() - expected) <= 1e-4 * abs(expected), "a wrong outer step"
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5], int(sys.argv[6]))
