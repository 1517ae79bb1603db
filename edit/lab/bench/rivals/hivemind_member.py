"""One member that averages with hivemind's DecentralizedAverager again and again, until it is killed.

Run by the Python of the rivals' environment: RANK MEMBERS PARAMETERS FOLDER WAIT_S. Each attempt is a line of
FOLDER/RANK.jsonl: when it began and ended, in seconds of the machine's monotonic clock; who was in its group (nobody: it
failed, and why); and 64 elements of what it left, of which all are drawn anew before each attempt.

All that hivemind may wait for has the bound WAIT_S, and a whole transfer four times that. Its defaults are 5 s for a group that
is not full, and no bound at all during the transfer.
"""

import json
import sys
import time
from pathlib import Path

import hivemind
import torch
from hivemind.compression import NoCompression

FRAGMENTS, SHOWN, LIMIT_S = 12, 64, 30.0


def addresses(folder: Path) -> list[str]:
    """Where the members of now can be reached."""
    return [line for file in folder.glob("*.peer") for line in file.read_text().splitlines()]


def main(rank: int, members: int, parameters: int, folder: Path, wait_s: float) -> None:
    torch.set_num_threads(1)
    known = addresses(folder)
    while rank and not known:
        time.sleep(0.05)
        known = addresses(folder)
    dht = hivemind.DHT(initial_peers=known or None, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    file = folder / f"{rank}.peer"
    file.with_suffix(".new").write_text("\n".join(str(address) for address in dht.get_visible_maddrs()))
    file.with_suffix(".new").rename(file)
    averager = hivemind.DecentralizedAverager(
        [torch.zeros(parameters // FRAGMENTS) for _ in range(FRAGMENTS)],
        dht,
        prefix="bench",
        target_group_size=members,
        min_group_size=2,
        min_matchmaking_time=wait_s,
        request_timeout=0.9 * wait_s,
        allreduce_timeout=4 * wait_s,
        next_chunk_timeout=wait_s,
        sender_timeout=wait_s,
        reducer_timeout=2 * wait_s,
        compression=NoCompression(),
        start=True,
    )
    generator = torch.Generator().manual_seed(time.monotonic_ns() + rank)
    with (folder / f"{rank}.jsonl").open("a", buffering=1) as lines:
        while True:
            with averager.get_tensors() as tensors:
                for tensor in tensors:
                    tensor.normal_(0, 1, generator=generator)
            began, failed, group = time.monotonic(), "", None
            try:
                group = averager.step(gather=rank, timeout=LIMIT_S)
            except Exception as error:  # whatever it raises, the next attempt may succeed
                failed = f"{type(error).__name__}: {error}"[:200]
            with averager.get_tensors() as tensors:
                shown = [float(value) for tensor in tensors for value in tensor[:: len(tensor) // 5][:6]][:SHOWN]
            line = {
                "began": began,
                "ended": time.monotonic(),
                "group": sorted((group or {}).values()),
                "failed": failed,
                "shown": shown,
            }
            print(json.dumps(line), file=lines, flush=True)


if __name__ == "__main__":
    rank, members, parameters, folder, wait_s = sys.argv[1:]
    main(int(rank), int(members), int(parameters), Path(folder), float(wait_s))
