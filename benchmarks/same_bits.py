"""Print the final digest of seeded runs, so that two versions of the source can be compared bit for bit.

    python benchmarks/same_bits.py --out before.json                    # on the old source
    python benchmarks/same_bits.py --out after.json --compare before.json

`benchmarks/results/same_bits_471b2aa.json` has the digests of that commit (x86-64, torch 2.13.0, one thread):
those of `--only in-process --detector edit`.

Every run is deterministic: the peers are stepped in a fixed order in this process, or the run is one of real daemons that
waits for all its peers. Only public names and command lines are used, so that the same file runs on both versions.
Exits with 1 when a digest differs from the one in --compare.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import hashlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from edit import (
    CodecConfig,
    EditWorker,
    LocalRun,
    OuterConfig,
    PenaltyConfig,
    RoundsConfig,
    RunConfig,
    StorageConfig,
    SyncConfig,
    WorkerConfig,
    digest,
)

DETECTOR = "level"  # --detector
VOCABULARY = 11
STEPS = 48


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        change: Tensor = self.down(functional.gelu(self.up(self.norm(hidden))))
        return hidden + change


class Transformer(nn.Module):
    def __init__(self, seed: int = 3, layers: int = 3, width: int = 16) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(VOCABULARY, width)
            self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(VOCABULARY, (4, 1), generator=generator)
        tokens = (start + (1 + seed % 2) * torch.arange(7)) % VOCABULARY
        yield tokens[:, :-1], tokens[:, 1:]


def join(run: LocalRun | list[LocalRun], name: str) -> Any:
    """The peer's side of a run, or of several aggregators of one run."""
    if isinstance(run, LocalRun):
        return run.collective(name)
    sides = [one.collective(name) for one in run]
    try:
        composite = importlib.import_module("edit.collective").CompositeCollective
    except AttributeError:
        return sides
    return composite(sides)


class Peer:
    def __init__(
        self, run: LocalRun | list[LocalRun], name: str, config: RunConfig, saved: dict[str, Any] | None = None
    ) -> None:
        self.name, self.taken = name, 0
        self.model = Transformer()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.data = batches(ord(name[-1]))
        self.worker = EditWorker(self.model, self.optimizer, join(run, name), WorkerConfig.of(config))
        if saved is not None:
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.worker.load_state_dict(saved["worker"])
            for _ in range(saved["taken"]):
                next(self.data)
            self.taken = saved["taken"]
        self.worker.__enter__()

    def step(self, damage: float = 1.0) -> None:
        tokens, targets = next(self.data)
        self.taken += 1
        self.worker.count_tokens(tokens.numel())
        self.optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        if damage != 1.0:
            with torch.no_grad():
                next(self.model.parameters()).mul_(damage)

    def save(self) -> dict[str, Any]:
        everything = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "taken": self.taken}
        return copy.deepcopy(everything | {"worker": self.worker.state_dict()})

    def die(self) -> None:
        self.worker.__exit__(KeyboardInterrupt, None, None)


def config(sync: dict[str, Any], **sections: Any) -> RunConfig:
    defaults: dict[str, Any] = {
        "outer": OuterConfig(lr=0.7, momentum=0.5),
        "penalty": PenaltyConfig(detector=DETECTOR),
        "codec": CodecConfig(up="int8", down="bf16"),
        "storage": StorageConfig(keep_updates=64),
    }
    return RunConfig(sync=SyncConfig(**({"every": 4} | sync)), **(defaults | sections))


def fingerprint(runs: list[LocalRun], peers: list[Peer]) -> str:
    """Of the outer parameters and of every peer's local ones."""
    local = hashlib.blake2b(digest_size=8)
    for peer in peers:
        for parameter in peer.model.parameters():
            local.update(parameter.detach().numpy().tobytes())
    theta = digest([theta for run in runs for theta in run.state.theta])
    return f"{runs[0].state.outer_step}:{theta[:24]}:{local.hexdigest()}"


def together(run_config: RunConfig, parts: int = 1, save_after: int = -1, damage: dict[int, float] | None = None) -> str:
    """Three peers, step by step."""
    names = ("a", "b", "c")
    runs = [LocalRun(run_config, names) for _ in range(parts)]
    given: Any = runs[0] if parts == 1 else runs
    peers = [Peer(given, name, run_config) for name in names]
    for step in range(STEPS):
        if step == save_after:
            saved = [peer.save() for peer in peers]
            for peer in peers:
                peer.die()
            peers = [Peer(given, name, run_config, one) for name, one in zip(names, saved, strict=True)]
        for peer in peers:
            peer.step((damage or {}).get(step, 1.0) if peer.name == "c" else 1.0)
    for peer in peers:
        peer.worker.synchronize(block=parts == 1)
    found = fingerprint(runs, peers)
    for peer in peers:
        peer.die()
    return found


def raced(run_config: RunConfig, *, close: bool) -> str:
    """A fast peer and one that is three times slower. close: what is in is committed after every fourth step."""
    run = LocalRun(run_config, ["fast", "slow"])
    fast, slow = Peer(run, "fast", run_config), Peer(run, "slow", run_config)
    for step in range(2 * STEPS):
        fast.step()
        if step % 3 == 2:
            slow.step()
        if close and step % 4 == 3 and run.complete:
            run.close("deadline")
    found = fingerprint([run], [fast, slow])
    fast.die()
    slow.die()
    return found


def region() -> str:
    """Two runs as the peers of a run above them."""
    try:
        levels = importlib.import_module("edit.regional_peer")
    except ModuleNotFoundError:
        levels = importlib.import_module("edit.region")
    plain = {"outer": OuterConfig(optimizer="sgd", lr=1.0), "penalty": PenaltyConfig(enabled=False)}
    above = config({"every": 4, "outer_steps": 1000}, **plain)
    upper = LocalRun(above, ["east", "west"])

    class Memory:
        def __init__(self) -> None:
            self.last: Any = None

        def sent(self) -> Any:
            return self.last

        def keep(self, sent: Any) -> None:
            self.last = sent

        def owed(self) -> Any:
            return None

        def keep_owed(self, owed: Any) -> None: ...

    sites = []
    for name, seeds in (("east", "pq"), ("west", "rs")):
        below = config({"every": 4, "outer_steps": 1000}, **plain)
        run = LocalRun(below, [f"{name}{seed}" for seed in seeds])
        peers = [Peer(run, f"{name}{seed}", below) for seed in seeds]

        def state(run: LocalRun = run) -> Any:
            now = run.state
            return levels.Below(now.outer_step, 100 * now.outer_step, now.injected, tuple(now.theta))

        site = levels.RegionalPeer(run.state.schema, state(), upper.collective(name), above, below, "above", Memory())
        sites.append((run, peers, state, site.__enter__()))
    for _ in range(10):
        for _, peers, state, site in sites:
            for _ in range(4):
                for peer in peers:
                    peer.step()
            site.moved(state())
        for run, _, _, site in sites:
            site.catch_up()
            if (injection := site.injection()) is not None:
                run.inject(injection)
    return "/".join([fingerprint([upper], []), *(fingerprint([run], peers) for run, peers, _, _ in sites)])


ARRIVALS = RoundsConfig(merging="arrivals", max_staleness=16)
NO_PENALTY = PenaltyConfig(enabled=False)
IN_PROCESS: dict[str, Callable[[], str]] = {
    "blocking": lambda: together(config({})),
    "blocking, fp32, no penalty": lambda: together(config({}, codec=CodecConfig(up="fp32", down="fp32"), penalty=NO_PENALTY)),
    "blocking, damaged peer": lambda: together(config({"every": 2}), damage={9: float("nan"), 31: 1e4}),
    "forward": lambda: together(config({"mode": "forward"})),
    "delayed, replay": lambda: together(config({"mode": "delayed", "delay": 2, "mix": "replay"})),
    "delayed, replace": lambda: together(config({"mode": "delayed", "delay": 2, "mix": "replace"})),
    "delayed, lerp": lambda: together(config({"mode": "delayed", "delay": 2, "mix": "lerp"})),
    "eager": lambda: together(config({"mode": "eager", "delay": 2})),
    "streaming": lambda: together(config({"groups": 2})),
    "streaming, delayed, lerp": lambda: together(config({"groups": 2, "mode": "delayed", "delay": 1, "mix": "lerp"})),
    "arrivals": lambda: raced(config({}, rounds=ARRIVALS, penalty=NO_PENALTY), close=False),
    "arrivals, delayed nesterov, heloco": lambda: raced(
        config(
            {"mode": "delayed", "delay": 2},
            rounds=ARRIVALS,
            penalty=NO_PENALTY,
            outer=OuterConfig(optimizer="delayed_nesterov", lr=1.0, momentum=0.5, period=2, correct="heloco"),
        ),
        close=False,
    ),
    "staleness": lambda: raced(config({}, rounds=RoundsConfig(max_staleness=3)), close=True),
    "staleness, delayed": lambda: raced(
        config({"mode": "delayed", "delay": 2}, rounds=RoundsConfig(max_staleness=3)), close=True
    ),
    "two aggregators": lambda: together(config({}), parts=2),
    "two aggregators, forward": lambda: together(config({"mode": "forward"}), parts=2),
    "resumed, blocking": lambda: together(config({"strict": True}), save_after=30),
    "resumed, delayed": lambda: together(config({"strict": True, "mode": "delayed", "delay": 2}), save_after=29),
    "resumed, two aggregators, eager": lambda: together(
        config({"strict": True, "mode": "eager", "delay": 2}), parts=2, save_after=30
    ),
    "region": region,
}


# Real daemons: coordinators and peers as processes, told what to do by their command lines alone.

RUN_TOML = """
name = "bits"
[model]
layers = 2
width = 16
heads = 2
context = 16
[inner]
lr = 3e-3
warmup_steps = 5
batch_size = 4
[outer]
optimizer = "nesterov"
lr = 0.7
momentum = 0.6
[codec]
up = "int8"
down = "bf16"
[rounds]
start_peers = 2
quorum = 2
floor_s = 60.0
ceiling_s = 100.0
[membership]
heartbeat_s = 0.5
lease_s = 30.0
[server]
listen = "127.0.0.1:0"
enrol_listen = "127.0.0.1:0"
"""


@dataclasses.dataclass
class Daemon:
    process: subprocess.Popen[str]
    lines: list[str] = dataclasses.field(default_factory=list)

    def until(self, words: str) -> str:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if words in line:
                return line
        raise RuntimeError(f"{words!r} was never said:\n{''.join(self.lines[-40:])}")

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


class Site:
    def __init__(self, folder: Path, more: str, options: tuple[str, ...] = ()) -> None:
        self.folder, self.state, self.options = folder, folder / "state", options
        self.daemons: list[Daemon] = []
        (folder / "run.toml").write_text(RUN_TOML + more)
        (folder / "text.py").write_bytes(Path(json.__file__).read_bytes())
        self.call("aggregator", "init", "--state", self.state, "--config", folder / "run.toml")

    def call(self, *arguments: object) -> str:
        command = [sys.executable, "-m", *map(str, arguments)]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=self.environment()).stdout

    def environment(self) -> dict[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def start(self, *arguments: object) -> Daemon:
        command = [sys.executable, "-m", *map(str, arguments)]
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=self.environment()
        )
        self.daemons.append(Daemon(process))
        return self.daemons[-1]

    def serve(self, state: Path | None = None) -> Daemon:
        daemon = self.start("aggregator", "serve", "--keep-serving", "--state", state or self.state)
        daemon.until(" serving ")
        return daemon

    def enrol(self, *names: str) -> None:
        for name in names:
            invitation = self.call("aggregator", "invite", "--state", self.state, name).splitlines()[0]
            self.call("peers", "join", invitation, "--home", self.folder / name)

    def peer(self, name: str, ranks: int = 1) -> Daemon:
        command = ["peers", "run", "--home", self.folder / name, "--data", self.folder / "text.py", "--threads", "1"]
        command += self.options
        if ranks == 1:
            return self.start(*command)
        torchrun = ["torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", ranks, "-m"]
        return self.start(*torchrun, *command)

    def digests(self, *peers: Daemon) -> str:
        for peer in peers:
            _, rest = peer.process.communicate(timeout=300)
            if peer.process.returncode:
                raise RuntimeError("".join(peer.lines[-20:]) + rest)
        status = json.loads(self.call("aggregator", "status", "--state", self.state, "--json"))
        parts = [status, *status.get("aggregators", [])]
        return "/".join(f"{part['outer_step']}:{part['digest'][:24]}" for part in parts)

    def stop(self) -> None:
        for daemon in self.daemons:
            if daemon.process.poll() is None:
                daemon.process.send_signal(signal.SIGTERM)
                try:
                    daemon.process.communicate(timeout=20)
                except subprocess.TimeoutExpired:
                    daemon.kill()


def daemons(sync: str, ranks: int = 1, kill: bool = False, second: bool = False) -> str:
    more = f"[sync]\nevery = 4\nouter_steps = 10\n{sync}\n[storage]\ncheckpoint_every = 3\n"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if second:
            import socket

            with socket.socket() as chosen:
                chosen.bind(("127.0.0.1", 0))
                more += f'[aggregators]\naddresses = ["127.0.0.1:{chosen.getsockname()[1]}"]\n'
        site = Site(folder, more, ("--checkpoint-every", "1") if kill else ())
        try:
            if second:
                site.call("aggregator", "new-aggregator", 1, folder / "second", "--state", site.state)
            life = [site.serve()]
            if second:
                site.serve(folder / "second")
            site.enrol("a", "b")
            life += [site.peer("a", ranks), site.peer("b")]
            if kill:
                life[1].until("outer step 5,")
                for daemon in life:
                    daemon.kill()
                life = [site.serve(), site.peer("a", ranks), site.peer("b")]
            return site.digests(*life[1:])
        finally:
            site.stop()


DAEMONS: dict[str, Callable[[], str]] = {
    "daemons, blocking": lambda: daemons(""),
    "daemons, forward": lambda: daemons('mode = "forward"'),
    "daemons, streaming": lambda: daemons("groups = 2"),
    "daemons, two ranks beside one": lambda: daemons("", ranks=2),
    "daemons, two ranks beside one, forward": lambda: daemons('mode = "forward"', ranks=2),
    "daemons, resumed after SIGKILL of all": lambda: daemons("strict = true", kill=True),
    "daemons, two aggregators": lambda: daemons("", second=True),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the digests here, as JSON")
    parser.add_argument("--compare", type=Path, help="digests of another version, as written by --out")
    parser.add_argument("--only", choices=("in-process", "daemons"), help="leave the others out")
    parser.add_argument("--detector", default=DETECTOR, help="penalty.detector of the runs in this process")
    arguments = parser.parse_args()
    globals()["DETECTOR"] = arguments.detector
    torch.set_num_threads(1)
    before = json.loads(arguments.compare.read_text()) if arguments.compare else {}
    cases = (IN_PROCESS if arguments.only != "daemons" else {}) | (DAEMONS if arguments.only != "in-process" else {})
    found, different = {}, 0
    for name, run in cases.items():
        began = time.monotonic()
        found[name] = run()
        same = "" if not before else "same" if before.get(name) == found[name] else "DIFFERENT"
        different += same == "DIFFERENT"
        print(f"{name:42} {found[name][:60]:62} {time.monotonic() - began:5.1f} s  {same}", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    if before:
        print(f"{len(found) - different} of {len(found)} runs end with the same bits")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
