"""Memory of a peer above the same training without exchange, in bytes per parameter of its own.

    python benchmarks/memory/peer.py  # 48M and 12M parameters; about 6 minutes, 2 GB

Every peer is a process (or two: ranks of FSDP2 on gloo) with AdamW, an `EditWorker`, the hub's connection over mTLS and the
daemon's checkpoints; the coordinator is another process. Gradients are noise, so activations take nothing. `RssAnon` of each
rank is read from /proc every 2 ms. What is shown is the difference of two sizes of the model, less the same difference of a
training without exchange, divided by the difference in parameters per rank: so what does not grow with the model is not in it.

at rest: between an update and the next contribution, the least that was seen. rounds: the peak over whole rounds. checkpoint:
the peak over rounds with a checkpoint after each (the training alone saves parameters and moments, too).
Appends to benchmarks/results/peer_memory.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import datetime
import json
import multiprocessing
import os
import platform
import socket
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from edit.config.run import RunConfig
from edit.fragments.schema import plan_fragments
from edit.heaps import limit_heaps, return_free_memory
from edit.lab.joining import enrol
from edit.lab.processes import COORDINATOR, Programs, Supervisor
from edit.lab.run_toml import to_toml
from edit.replica.ranks import ALONE, Ranks
from edit.worker.worker import EditWorker, WorkerConfig
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.collective import HubCollective
from peers.carriers.io_thread import IoThread
from peers.identity.peer_folder import PeerFolder
from peers.training.checkpoint_files import Checkpoints, Owner

RESULTS = Path(__file__).parents[1] / "results" / "peer_memory.jsonl"
BLOCKS, WIDTH = 12, 512
EVERY, ROUNDS = 4, 2
PHASES = ("start", "training", "exchange", "saving")
SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table."""

    up: str
    residual: str
    mode: str
    ranks: int

    @property
    def settings(self) -> dict[str, dict[str, str | int | float] | str]:
        """The run's."""
        codec: dict[str, str | int | float] = {"up": self.up, "down": "int8"}
        sync: dict[str, str | int | float] = {"every": EVERY, "outer_steps": 1_000_000, "mode": self.mode}
        if self.mode == "delayed":
            sync["delay"] = 1
        return {
            "name": "memory",
            "model": {"name": "entry:mine"},
            "sync": sync,
            "codec": codec if self.up == "fp32" else codec | {"up_residual": self.residual},
            "storage": {"checkpoint_every": 1000, "keep_updates": 1},
            "membership": {"heartbeat_s": 2.0, "lease_s": 60.0},
            "server": {"listen": "127.0.0.1:0", "enrol_listen": "127.0.0.1:0"},
        }


CASES = [
    Case(up=up, residual=residual, mode=mode, ranks=ranks)
    for ranks in (1, 2)
    for mode in ("blocking", "delayed")
    for up, residual in (("fp32", "fp32"), ("int8", "fp32"), ("int8", "int8"))
]


# ---- a rank -----------------------------------------------------------------------------------------------------------------


class _Model(nn.Module):
    def __init__(self, parameters: int) -> None:
        super().__init__()
        rows = parameters // (BLOCKS * WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, rows, bias=False) for _ in range(BLOCKS))


def rank_main(case: Case, parameters: int, rank: int, port: int, home: Path | None, scratch: Path, phase: Any) -> None:
    """Train one rank. home: of the peer's identity; None: without exchange."""
    torch.set_num_threads(1)
    limit_heaps()
    ranks = ALONE
    model = _Model(parameters)
    if case.ranks > 1:
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=case.ranks)
        mesh = init_device_mesh("cpu", (case.ranks,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        ranks = Ranks.world()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    schema = plan_fragments(model.named_parameters())
    owner = Owner(run_id="r", peer_id="p", schema_hash=schema.schema_hash)
    checkpoints = Checkpoints(scratch / "checkpoints", owner, 1, ranks)
    with contextlib.ExitStack() as stack:
        worker = None
        if home is not None:
            enrolled = PeerFolder(home).load(time.time())
            io = stack.enter_context(IoThread())
            collective = HubCollective(io, Channels(enrolled.endpoints, enrolled.credentials), enrolled.identity, ranks=ranks)
            stack.callback(collective.close, "measured")
            config = dataclasses.replace(WorkerConfig.of(RunConfig.from_mapping(case.settings)), only_steps_write=True)
            worker = stack.enter_context(EditWorker(model, optimizer, collective, config, ranks))
            return_free_memory()
        _train(model, optimizer, worker, checkpoints, phase, ranks)
    if case.ranks > 1:
        dist.destroy_process_group()


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    worker: EditWorker | None,
    checkpoints: Checkpoints,
    phase: Any,
    ranks: Ranks,
) -> None:
    generator = torch.Generator().manual_seed(ranks.rank)

    def step(number: int, exchanges: str) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                local = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
                local.normal_(0, 1e-3, generator=generator)
        # The outcome is taken at the next step in every mode, and the contribution is made after the EVERY-th one.
        rests = exchanges == "exchange" and number % EVERY == EVERY - 2
        phase.value = PHASES.index("training" if rests else exchanges)
        optimizer.step()

    steps = 0
    for exchanges in ("start", "exchange", "saving"):
        for _ in range(ROUNDS * EVERY):
            step(steps, exchanges)
            steps += 1
            if exchanges == "saving" and steps % EVERY == 0:
                _save(checkpoints, model, optimizer, worker, ranks)
    checkpoints.wait()
    if worker is not None:
        assert worker.outer_step >= 3 * ROUNDS - 1


def _save(
    checkpoints: Checkpoints, model: nn.Module, optimizer: torch.optim.Optimizer, worker: EditWorker | None, ranks: Ranks
) -> None:
    """Save as `peers.training.checkpoint.Resumable` does."""
    checkpoints.wait()
    state = worker.state_dict() if worker is not None else {"scalars": {}}
    tensors: dict[str, Tensor] = {
        f"worker/{kind}/{name}": tensor for kind, named in state.items() if kind != "scalars" for name, tensor in named.items()
    }
    for name, parameter in model.named_parameters():
        tensors[f"model/{name}"] = parameter.detach()
        tensors |= {f"optimizer/{name}/{key}": value for key, value in optimizer.state[parameter].items()}
    theta = {key for key in tensors if key.startswith("worker/outer/")}
    checkpoints.save(tensors, {"worker": state["scalars"]}, constant=theta)


# ---- the measurement --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Seen:
    """Bytes of one rank."""

    least: float = float("inf")  # while it trains
    rounds: float = 0.0
    saving: float = 0.0


def measure(case: Case, parameters: int, *, exchange: bool) -> list[Seen]:
    """Return what was seen of each rank."""
    with tempfile.TemporaryDirectory(prefix="edit-memory-") as folder, Supervisor(Path(folder) / "logs") as supervisor:
        root = Path(folder)
        home = _coordinator(case, root, supervisor) if exchange else None
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = int(probe.getsockname()[1])
        phases = [SPAWN.Value(ctypes.c_int, 0) for _ in range(case.ranks)]
        ranks = [
            SPAWN.Process(target=rank_main, args=(case, parameters, rank, port, home, root, phase))
            for rank, phase in enumerate(phases)
        ]
        for each in ranks:
            each.start()
        seen = [Seen() for _ in ranks]
        while any(each.is_alive() for each in ranks):
            for each, phase, into in zip(ranks, phases, seen, strict=True):
                _look(int(each.pid or 0), PHASES[phase.value], into)
            time.sleep(0.002)
            if any(each.exitcode for each in ranks):
                for each in ranks:
                    each.kill()
        if any(each.exitcode for each in ranks):
            raise SystemExit(f"{case}: a rank failed; see above")
        return seen


def _coordinator(case: Case, root: Path, supervisor: Supervisor) -> Path:
    """Start it; return the home of a peer that has joined."""
    coordinator, state, toml = Programs().coordinator, root / "run", root / "run.toml"
    toml.write_text(to_toml(case.settings), encoding="utf-8")
    supervisor.call({"init": (*coordinator, "init", "--state", str(state), "--config", str(toml))})
    supervisor.start(COORDINATOR, (*coordinator, "serve", "--state", str(state)))
    give_up = time.monotonic() + 60
    while not (state / "addresses.json").exists():
        if time.monotonic() > give_up:
            raise SystemExit("the coordinator does not serve")
        time.sleep(0.05)
    enrol(state, "peer", root / "peer")
    return root / "peer"


def _look(pid: int, phase: str, into: Seen) -> None:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return
    anonymous = next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon")), 0)
    if phase == "start" or not anonymous:
        return
    if phase == "training":
        into.least = min(into.least, anonymous)
    elif phase == "saving":
        into.saving = max(into.saving, anonymous)
    else:
        into.rounds = max(into.rounds, anonymous)


def per_parameter(case: Case, sizes: tuple[int, int]) -> dict[str, float]:
    """Return bytes per own parameter above the training alone; of the ranks the mean."""
    small, large = sizes
    own = (large - small) / case.ranks
    found: dict[str, list[float]] = {"at_rest": [], "rounds": [], "checkpoint": []}
    seen = {(size, exchange): measure(case, size, exchange=exchange) for size in sizes for exchange in (False, True)}
    for rank in range(case.ranks):
        for name, attribute in (("at_rest", "least"), ("rounds", "rounds"), ("checkpoint", "saving")):
            values = {key: getattr(ranks[rank], attribute) for key, ranks in seen.items()}
            above = [values[size, True] - values[size, False] for size in sizes]
            found[name].append((above[1] - above[0]) / own)
    return {name: round(statistics.fmean(values), 2) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=48e6, help="of the larger model; the smaller has a quarter")
    parser.add_argument("--only", default="", help="only rows with this in their name, as: int8/int8 blocking 1")
    parser.add_argument("--label", default="", help="kept in the results, to tell recordings apart")
    options = parser.parse_args()
    large = int(options.parameters) // (4 * BLOCKS * WIDTH) * (4 * BLOCKS * WIDTH)
    print(
        f"{large:,} and {large // 4:,} parameters in {BLOCKS} equal fragments: one as fp32 is {4 / BLOCKS:.2f} B per parameter"
    )
    print(f"{'up/residual mode ranks':28} {'at rest':>8} {'rounds':>8} {'checkpoint':>10}   bytes per own parameter")
    for case in CASES:
        name = f"{case.up}/{case.residual} {case.mode} {case.ranks}"
        if options.only not in name:
            continue
        found = per_parameter(case, (large // 4, large))
        print(f"{name:28} {found['at_rest']:8.2f} {found['rounds']:8.2f} {found['checkpoint']:10.2f}", flush=True)
        row = {
            "date": datetime.date.today().isoformat(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
            "label": options.label,
            "parameters": large,
            **dataclasses.asdict(case),
            **found,
        }
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
