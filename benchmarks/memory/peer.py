"""Memory of a peer above the same training without exchange, in bytes per parameter of its own.

    python benchmarks/memory/peer.py  # 48M parameters, 12 cases, 2 GB; --only picks some

Every peer is a process (or two: ranks of FSDP2 on gloo) with AdamW, an `EditWorker`, the hub's connection over mTLS and the
daemon's checkpoints; the coordinator is another process. Gradients are noise, so activations take nothing.

What is counted is all resident memory of a rank's process, as the operating system has it: VmRSS between two steps, or the peak
of a phase, VmHWM, which is reset before each. Shown is that with exchange less that of the same training without, less the same
difference of a model of almost no parameters, which is libraries and connections; by the parameters of a rank.

    at rest     between two steps far from an exchange, the least that was seen
    rounds      the peak over whole rounds
    checkpoint  the peak over rounds with a checkpoint after each; the training alone saves parameters and moments, too

Beside each stands what docs/operating.md lists for it, without fragments in flight: see `Case.expected`. Blocks of 2 MiB and
more are mappings here, with and without exchange: otherwise the training alone leaves about 2 bytes per parameter free in its
heaps, which the exchange then uses. Appends to benchmarks/results/peer_memory.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import json
import multiprocessing
import multiprocessing.connection
import os
import platform
import socket
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
from edit.heaps import limit_heaps, map_large_blocks, return_free_memory
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
TINY = 8 * BLOCKS * WIDTH  # parameters
EVERY, ROUNDS = 3, 2
BYTES = {"fp32": 4.0, "int8": 1.0 + 1 / 64, "none": 0.0}  # for each element
PHASES = ("at_rest", "rounds", "checkpoint")
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

    @property
    def expected(self) -> dict[str, float]:
        """Bytes per own parameter, from what has to be held."""
        residual = BYTES["none" if self.up == "fp32" else self.residual]
        at_rest = 4 + residual
        rounds = at_rest + BYTES[self.up] + BYTES["int8"]  # the contribution until its outcome, the update until it is whole
        sent_from = 4 if self.mode == "delayed" else 0  # the local parameters as they were sent, for one step here
        rounds += sent_from
        # While a checkpoint is written, an update is applied: the outer parameters before it, and copies of the residual and of
        # the local parameters as they were sent.
        return {"at_rest": at_rest, "rounds": rounds, "checkpoint": rounds + 4 + residual + sent_from}


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


def rank_main(case: Case, parameters: int, rank: int, port: int, home: Path | None, scratch: Path, found: Any) -> None:
    """Train one rank, and put (rank, bytes by phase) into `found`. home: of the peer's identity; None: without exchange."""
    torch.set_num_threads(1)
    limit_heaps()
    map_large_blocks()
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
        return_free_memory()  # as peers.training.loop does
        found.put((rank, _train(model, optimizer, worker, checkpoints, ranks)))
    if case.ranks > 1:
        dist.destroy_process_group()


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, worker: EditWorker | None, checkpoints: Checkpoints, ranks: Ranks
) -> dict[str, int]:
    generator = torch.Generator().manual_seed(ranks.rank)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        local = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
        local.normal_(0, 1e-3, generator=generator)
    peaks, least = dict[str, int](), 1 << 60
    for phase in ("start", "rounds", "checkpoint"):
        ranks.all([True])  # no rank begins before the others have read their peaks
        Path("/proc/self/clear_refs").write_text("5")
        for number in range(ROUNDS * EVERY):
            optimizer.step()
            # A contribution is made after the last step of a round; its outcome is taken at the next one in every mode.
            if phase == "rounds" and number % EVERY == EVERY - 2:
                least = min(least, _memory("VmRSS"))
            if phase == "checkpoint" and number % EVERY == EVERY - 1:
                _save(checkpoints, model, optimizer, worker, ranks)
        checkpoints.wait()
        peaks[phase] = _memory("VmHWM")
    if worker is not None:
        assert worker.outer_step >= 3 * ROUNDS - 1
    return {"at_rest": least, "rounds": peaks["rounds"], "checkpoint": peaks["checkpoint"]}


def _memory(name: str) -> int:
    """Return VmRSS or VmHWM of this process, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


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


def measure(case: Case, parameters: int, *, exchange: bool) -> list[dict[str, int]]:
    """Return the bytes of each phase, of each rank."""
    with tempfile.TemporaryDirectory(prefix="edit-memory-") as folder, Supervisor(Path(folder) / "logs") as supervisor:
        root, found = Path(folder), SPAWN.Queue()
        home = _coordinator(case, root, supervisor) if exchange else None
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = int(probe.getsockname()[1])
        ranks = [
            SPAWN.Process(target=rank_main, args=(case, parameters, rank, port, home, root, found))
            for rank in range(case.ranks)
        ]
        for each in ranks:
            each.start()
        running = {each.sentinel: each for each in ranks}
        while running:
            for sentinel in multiprocessing.connection.wait(running):
                assert isinstance(sentinel, int)
                ended = running.pop(sentinel)
                ended.join()
                if ended.exitcode:
                    for each in running.values():
                        each.kill()
                    raise SystemExit(f"{case}: a rank failed; see above")
        return [bytes_ for _, bytes_ in sorted((found.get() for _ in ranks), key=lambda each: each[0])]


def _coordinator(case: Case, root: Path, supervisor: Supervisor) -> Path:
    """Start it; return the home of a peer that has joined."""
    coordinator, state, toml = Programs().coordinator, root / "run", root / "run.toml"
    toml.write_text(to_toml(case.settings), encoding="utf-8")
    supervisor.call({"init": (*coordinator, "init", "--state", str(state), "--config", str(toml))})
    supervisor.start(COORDINATOR, (*coordinator, "serve", "--keep-serving", "--state", str(state)))
    give_up = time.monotonic() + 60
    while not (state / "addresses.json").exists():
        if time.monotonic() > give_up:
            raise SystemExit("the coordinator does not serve")
        time.sleep(0.05)
    enrol(state, "peer", root / "peer")
    return root / "peer"


@functools.cache
def alone(ranks: int, parameters: int) -> list[dict[str, int]]:
    """Return what `measure` does of the training without exchange."""
    return measure(Case(up="fp32", residual="fp32", mode="blocking", ranks=ranks), parameters, exchange=False)


@functools.cache
def tiny(ranks: int) -> list[dict[str, int]]:
    """Return what `measure` does of an exchange of almost no parameters."""
    return measure(Case(up="int8", residual="fp32", mode="blocking", ranks=ranks), TINY, exchange=True)


def per_parameter(case: Case, parameters: int) -> dict[str, float]:
    """Return bytes per own parameter; of the ranks the mean."""
    bytes_ = dict.fromkeys(PHASES, 0)
    for parts in zip(
        measure(case, parameters, exchange=True),
        alone(case.ranks, parameters),
        tiny(case.ranks),
        alone(case.ranks, TINY),
        strict=True,
    ):
        for phase in PHASES:
            exchanging, training, little, nothing = (part[phase] for part in parts)
            bytes_[phase] += exchanging - training - (little - nothing)
    return {phase: round(each / parameters, 2) for phase, each in bytes_.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=48e6, help="of the model")
    parser.add_argument("--only", default="", help="only rows with this in their name, as: int8/int8 blocking 1")
    parser.add_argument("--label", default="", help="kept in the results, to tell recordings apart")
    options = parser.parse_args()
    parameters = int(options.parameters) // (4 * BLOCKS * WIDTH) * (4 * BLOCKS * WIDTH)
    print(f"{parameters:,} parameters in {BLOCKS} equal fragments: one as fp32 is {4 / BLOCKS:.2f} bytes per parameter")
    print("bytes per own parameter, as measured (and as listed in docs/operating.md, without fragments in flight)")
    print(f"{'up/residual mode ranks':28}" + "".join(f"{phase.replace('_', ' '):>16}" for phase in PHASES))
    for case in CASES:
        name = f"{case.up}/{case.residual} {case.mode} {case.ranks}"
        if options.only not in name:
            continue
        found, expected = per_parameter(case, parameters), case.expected
        print(f"{name:28}" + "".join(f"{found[phase]:8.2f} ({expected[phase]:5.2f})" for phase in PHASES), flush=True)
        row = {
            "date": datetime.date.today().isoformat(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
            "label": options.label,
            "parameters": parameters,
            **dataclasses.asdict(case),
            **found,
            "expected": {phase: round(bytes_, 2) for phase, bytes_ in expected.items()},
        }
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
