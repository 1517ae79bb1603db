"""One peer of an all-reduce with torch.distributed and gloo: the floor, without a control plane, plaintext.

Run by the Python of the rivals' environment: RANK PEERS PARAMETERS FOLDER ADDRESS PORT, see turns.py for the protocol.
gloo finds its host's address, ADDRESS, by the host's name.
"""

import json
import socket
import sys
import time

import torch
import torch.distributed as dist

FRAGMENTS = 12


def main(rank: int, peers: int, parameters: int, folder: str, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=peers)
    own = (torch.arange(parameters // FRAGMENTS) % 251 - 125) * 1e-5 * (rank + 1)
    fragments = [torch.empty_like(own) for _ in range(FRAGMENTS)]
    lines = socket.create_connection(("127.0.0.1", port)).makefile("rw")
    while True:
        for fragment in fragments:
            fragment.copy_(own)
        print("ready", file=lines, flush=True)
        if not lines.readline():
            break
        began = time.monotonic()
        for work in [dist.all_reduce(fragment, async_op=True) for fragment in fragments]:
            work.wait()
        for fragment in fragments:
            fragment.div_(peers)
        print(json.dumps({"began": began, "ended": time.monotonic()}), file=lines, flush=True)
        assert all(torch.allclose(fragment, own / (rank + 1) * (peers + 1) / 2) for fragment in fragments), "a wrong mean"
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[6]))
