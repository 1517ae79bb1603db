"""How long a swarm of four real members stands still when one of them is killed or stopped in the middle of an exchange.

    python benchmarks/swarm/faults.py --faults 20                  # 2M parameters: about 40 minutes on 2 busy cores
    python benchmarks/swarm/faults.py --faults 20 --parameters 50331648
    python benchmarks/swarm/faults.py --faults 0 --power-cuts 10    # all four killed at once, and started again
    python benchmarks/swarm/faults.py --starts 50                  # how many swarms of four form

A member is a host (`python -m aggregator.swarm`) and a peer that trains, as two processes under one name; all bytes go over
gRPC with mutual TLS on loopback. A peer does nothing but exchange: each inner step is noise, and is followed by a contribution
to all parts. Each fault takes a member with both processes, by SIGKILL or SIGSTOP: one that owns a part, the one that leads
(which may own one, too), or one that does neither. `next`: seconds from the fault until all parts were at a later outer step at
all survivors; `second`: until each was at the one after that, which nothing from before the fault can have brought. After that
the victim is started again, or goes on, and the next fault comes once all four vote and train. A round waits for a peer that is
silent for 1.5 s ([membership]), the council for a member for --lease.

A power cut kills all members with all processes at once, and starts all of them again: there `next` and `second` count from the
start, and have no bound.

`within`: how often `next` was at most 3 s after a kill, 4 s after a stop; of a larger model than 2M parameters that and two
exchanges of the same run.

Checked, at each fault and at the end: every outer step of a part has one digest, whoever reports it (no split); no peer goes
back (nothing lost); what lies in all folders at the end is one state for each part, at least as far as any peer reported.

CPU seconds are user + system of all processes of the survivors, from the fault to `second`. An exchange: seconds that an outer
step of all parts took before the fault, median. Late: contributions of survivors that were not part of the outer step that they
were made for, because its round closed without them; they are part of the next one.

Prints a table. Appends each row to benchmarks/results/swarm_faults.jsonl with --record, as soon as it is there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import statistics
import sys
import tempfile
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import torch
from cryptography.hazmat.primitives import serialization

from aggregator.security.authority import Authority
from aggregator.security.certificates import key_pem, new_key
from aggregator.storage.store import Store
from aggregator.swarm.host import found_swarm
from aggregator.swarm.host_folder import HostFolder
from aggregator.swarm.member_folder import MemberFolder
from aggregator.swarm.replication import PartReplica
from edit.command_line import log_to_stderr
from edit.config.run import RunConfig
from edit.council.record import Record, Saved, Stamp, peer_of
from edit.durable_files import write_atomic
from edit.fragments.assignment import assign
from edit.lab.bench.exchange_peer import blocks
from edit.lab.bench.results import Row, append_lines, circumstances, figure_note, print_table, results_table
from edit.lab.processes import Supervisor
from edit.lab.procfs import cpu_s
from edit.merging.outer_state import OuterState
from edit.worker.config import WorkerConfig
from edit.worker.worker import EditWorker
from editpb.identity import Identity
from peers.carriers.io_thread import IoThread
from peers.carriers.swarm.connect import connect_swarm

RESULTS = Path(__file__).parents[1] / "results" / "swarm_faults.jsonl"
MEMBERS = ("a", "b", "c", "d")
KINDS = ("owner", "leader", "plain")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
SETTLES_S, GOES_ON_S, FORMS_S = 300.0, 120.0, 120.0
LOOK_S = 0.02
BOUNDS_S = {"kill": 3.0, "stop": 4.0}  # of `next`; a model of more than SMALL parameters has EXCHANGES more
SMALL, EXCHANGES = 2_097_152, 2
YEAR_S = 365 * 86_400.0
TOML = """
name = "faults"
[model]
name = "entry:blocks"
[sync]
every = 1
outer_steps = 1000000
[penalty]
enabled = false
[outer]
optimizer = "nesterov"
lr = 0.7
momentum = 0.6
[codec]
up = "{codec}"
down = "{codec}"
[rounds]
start_peers = {members}
[membership]
heartbeat_s = 0.5
lease_s = 1.5
[swarm]
parts = {parts}
lease_s = {lease}
heartbeat_s = {heartbeat}
"""


# ---- a peer that trains ------------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Module() for _ in blocks(parameters).fragments)
        for block, fragment in zip(self.blocks, blocks(parameters).fragments, strict=True):
            block.weight = torch.nn.Parameter(torch.zeros(fragment.numel))


def train(options: argparse.Namespace) -> None:
    """Exchange until killed. Each outer step that theta takes is a line: part, outer step, digest, whether it has this peer."""
    torch.set_num_threads(1)
    log_to_stderr()
    folder = Path(options.folder) / options.member
    pems = [(folder / name).read_bytes() for name in ("ca.pem", "peer.key", "peer.pem")]
    hosts = {peer_id: address_of(Path(options.folder), peer_id) for peer_id in (options.member, *MEMBERS)}
    model, generator = Model(options.parameters), torch.Generator().manual_seed(os.getpid())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter).normal_(0, 1e-3, generator=generator)
    identity = Identity(options.run, "peer", options.member)
    with (
        (folder / "steps.jsonl").open("a", buffering=1) as file,
        IoThread() as io,
        connect_swarm(io, hosts, options.parts, grpc.ssl_channel_credentials(*pems), identity) as (connection, config, _),
        EditWorker(model, optimizer, connection, WorkerConfig.of(config)) as worker,
    ):
        seen = [-1] * options.parts
        while True:
            for part, share in enumerate(worker.shares):
                if share.outer_step != seen[part]:
                    seen[part] = share.outer_step
                    commit = worker._exchanges[part].last_commit
                    merged = commit is not None and commit.outer_step == share.outer_step and commit.has(options.member)
                    line = {"part": part, "outer_step": share.outer_step, "digest": share.digest, "merged": merged}
                    file.write(json.dumps({**line, "at": time.monotonic()}) + "\n")
            optimizer.step()


# ---- four members ------------------------------------------------------------------------------------------------------------


def address_of(folder: Path, peer_id: str) -> str:
    return f"127.0.0.1:{(folder / peer_id / 'port').read_text()}"


@dataclass
class Progress:
    """What one peer has reported."""

    steps: dict[int, int]  # by part
    lines: int = 0


class Swarm:
    """Four members in folders of their own."""

    def __init__(self, path: Path, options: argparse.Namespace, supervisor: Supervisor) -> None:
        self.path, self._options, self._supervisor, self.parameters = path, options, supervisor, options.parameters
        lease = {"lease": options.lease, "heartbeat": min(0.25, options.lease / 4)}
        self._toml = TOML.format(codec=options.codec, members=len(MEMBERS), parts=options.parts, **lease)
        self.config, self.run_id = RunConfig.from_mapping(tomllib.loads(self._toml)), f"faults-{secrets.token_hex(4)}"
        (path / "run").mkdir(parents=True)
        self.digests: dict[tuple[int, int], str] = {}  # by part and outer step
        self.seen = {peer_id: Progress({}) for peer_id in MEMBERS}
        self.arrivals: dict[tuple[int, int], list[float]] = defaultdict(list)
        self.without: list[str] = []  # who was not part of an outer step that it took, in the order of the reports
        self._read: dict[str, int] = defaultdict(int)
        authority = Authority.create(path / "run", self.run_id, now=time.time())
        schema = blocks(options.parameters)
        for peer_id in MEMBERS:
            self._equip(authority, peer_id, schema.to_json())
        parts = [schema.subset(ids) for ids in assign(schema, options.parts)]
        outers = [OuterState(part, self.config, [torch.zeros(each.numel) for each in part.fragments]) for part in parts]
        found_swarm(self.run_id, MEMBERS[0], self.config, MemberFolder(path / MEMBERS[0]), outers, incarnation=1)

    def _equip(self, authority: Authority, peer_id: str, schema: str) -> None:
        folder, key, identity = self.path / peer_id, new_key(), Identity(self.run_id, "peer", peer_id)
        folder.mkdir()
        certificate = authority.issuer.issue(identity, key.public_key(), lifetime_s=YEAR_S, now=time.time())
        write_atomic(folder / "peer.key", key_pem(key), mode=0o600)
        write_atomic(folder / "peer.pem", certificate.public_bytes(serialization.Encoding.PEM))
        write_atomic(folder / "ca.pem", (self.path / "run" / "ca.pem").read_bytes())
        write_atomic(folder / "run.toml", self._toml.encode())
        write_atomic(folder / "schema.json", schema.encode())

    # -- processes ----------------------------------------------------------------------------------------------------------

    def start_host(self, peer_id: str) -> None:
        known = {other: (address_of(self.path, other),) for other in MEMBERS if (self.path / other / "port").exists()}
        HostFolder(advertise="127.0.0.1", seeds=known, discovery="addresses").save(self.path / peer_id)
        self._supervisor.start(f"host-{peer_id}", [sys.executable, "-m", "aggregator.swarm", str(self.path / peer_id)])

    def start_peer(self, peer_id: str) -> None:
        options = self._options
        argv = [sys.executable, str(Path(__file__).resolve()), "--member", peer_id, "--folder", str(self.path)]
        argv += ["--run", self.run_id, "--parameters", str(options.parameters), "--parts", str(options.parts)]
        self._supervisor.start(f"peer-{peer_id}", argv)

    def form(self) -> float:
        """Start all hosts; return the seconds until all vote, by all that lies on disk."""
        began = time.monotonic()
        self.start_host(MEMBERS[0])
        self.wait(lambda: (self.path / MEMBERS[0] / "port").exists(), FORMS_S, "the first host serves")
        for peer_id in MEMBERS[1:]:
            self.start_host(peer_id)
        self.wait(self.formed, FORMS_S, "all vote")
        return time.monotonic() - began

    def formed(self) -> bool:
        found = [self.record(peer_id) for peer_id in MEMBERS]
        return all(
            record is not None and {*map(peer_of, record.voters)} == {*MEMBERS} and not record.before for record in found
        )

    def processes(self, peer_id: str) -> list[str]:
        return [name for name in (f"host-{peer_id}", f"peer-{peer_id}") if self._supervisor.running(name)]

    def signal(self, peer_id: str, number: signal.Signals) -> None:
        for name in self.processes(peer_id):
            os.killpg(self._supervisor.pid(name), number)

    def kill(self, peer_id: str) -> None:
        self.signal(peer_id, signal.SIGKILL)  # both at once
        for name in (f"host-{peer_id}", f"peer-{peer_id}"):
            self._supervisor.kill(name)

    def cpu_s(self, peer_ids: Sequence[str]) -> float:
        return sum(cpu_s(self._supervisor.pid(name)) for peer_id in peer_ids for name in self.processes(peer_id))

    # -- what there is to see ------------------------------------------------------------------------------------------------

    def saved(self, peer_id: str) -> Saved | None:
        return MemberFolder(self.path / peer_id).saved()

    def record(self, peer_id: str) -> Record | None:
        saved = self.saved(peer_id)
        return saved.record if saved is not None else None

    def stamps(self) -> list[Stamp]:
        """Return which version of the record each member has on disk."""
        return [record.stamp if record is not None else Stamp(0, 0, 0) for record in map(self.record, MEMBERS)]

    def roles(self) -> tuple[str, set[str]]:
        """Return who leads (whom most have voted for in the latest term), and who owns parts."""
        found = [saved for peer_id in MEMBERS if (saved := self.saved(peer_id)) is not None and saved.record is not None]
        newest = max(found, key=lambda saved: saved.record.stamp if saved.record is not None else (0, 0, 0))
        votes = [peer_of(saved.vote) for saved in found if saved.term == newest.term and saved.vote]
        assert newest.record is not None
        return max(MEMBERS, key=votes.count), {part.owner for part in newest.record.parts}

    def look(self) -> None:
        """Read what peers have reported since. Exits when a part has two digests at an outer step, or a peer went back."""
        for peer_id in MEMBERS:
            file = self.path / peer_id / "steps.jsonl"
            if not file.exists():
                continue
            with file.open("rb") as lines:
                lines.seek(self._read[peer_id])
                data = lines.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[peer_id] += len(whole)
            for line in whole.splitlines():
                self._note(peer_id, json.loads(line))

    def _note(self, peer_id: str, line: dict[str, Any]) -> None:
        part, outer_step = line["part"], line["outer_step"]
        known = self.digests.setdefault((part, outer_step), line["digest"])
        if known != line["digest"]:
            sys.exit(f"SPLIT: part {part} at outer step {outer_step} is {known[:12]} and, at {peer_id}, {line['digest'][:12]}")
        if outer_step < self.seen[peer_id].steps.get(part, 0):
            sys.exit(f"LOST: {peer_id} went back to outer step {outer_step} of part {part}")
        self.seen[peer_id].steps[part] = outer_step
        self.seen[peer_id].lines += 1
        self.arrivals[part, outer_step].append(line["at"])
        if not line["merged"]:
            self.without.append(peer_id)

    def reached(self, peer_ids: Sequence[str]) -> dict[int, int]:
        """Return the latest outer step of each part that any of these has reported."""
        steps = [self.seen[peer_id].steps for peer_id in peer_ids]
        return {part: max(each.get(part, 0) for each in steps) for part in range(self._options.parts)}

    def all_at(self, peer_ids: Sequence[str], wanted: dict[int, int]) -> bool:
        self.look()
        return all(self.seen[peer_id].steps.get(part, -1) >= step for peer_id in peer_ids for part, step in wanted.items())

    def exchange_s(self) -> float:
        """Return what an outer step of all parts took lately, median of ten."""
        times = sorted(min(each) for (part, _), each in self.arrivals.items() if part == 0)[-11:]
        gaps = [later - earlier for earlier, later in pairwise(times)]
        return statistics.median(gaps) if gaps else 0.0

    def wait(self, condition: Callable[[], bool], within_s: float, what: str) -> float:
        """Look until it is true; return when that was. Exits after too long, or when a process ended by itself."""
        give_up = time.monotonic() + within_s
        while not condition():
            dead = [str(end) for end in self._supervisor.ended() if not end.expected]
            if dead or time.monotonic() > give_up:
                sys.exit("; ".join(dead) or f"not within {within_s:g} s: {what}\n{self.describe()}")
            time.sleep(LOOK_S)
        return time.monotonic()

    def describe(self) -> str:
        names = [name for peer_id in MEMBERS for name in (f"host-{peer_id}", f"peer-{peer_id}")]
        lines = [f"{name}: {' | '.join(self._supervisor.last_lines(name, 3))}" for name in names if self._has(name)]
        return "\n".join([f"{peer_id}: {progress.steps}" for peer_id, progress in self.seen.items()] + lines)

    def _has(self, name: str) -> bool:
        return (self.path.parent / "logs" / f"{name}.log").exists()

    def at_the_end(self) -> None:
        """End all hosts; exits unless all folders have the same state of each part, as far as any peer has reported."""
        for peer_id in MEMBERS:
            self._supervisor.kill(f"peer-{peer_id}")
        self.look()
        reached = self.reached(MEMBERS)
        time.sleep(3 * self._options.lease)  # the last records go round
        for peer_id in MEMBERS:
            self._supervisor.stop(f"host-{peer_id}")
        for part, step in reached.items():
            states = {peer_id: self._state_of(peer_id, part) for peer_id in MEMBERS}
            if len({state.digest for state in states.values()}) != 1 or min(s.outer_step for s in states.values()) < step:
                sys.exit(f"LOST OR SPLIT: part {part}: {states}, and peers reported outer step {step}")

    def _state_of(self, peer_id: str, part: int) -> Any:
        store = Store(MemberFolder(self.path / peer_id).part(part), self.config, self.run_id)
        try:
            return PartReplica(self.run_id, part, self.config, store).state
        finally:
            store.close()


@contextmanager
def swarm(options: argparse.Namespace) -> Iterator[Swarm]:
    with tempfile.TemporaryDirectory(prefix="edit-bench-", dir=options.scratch) as scratch:
        logs, path = Path(scratch) / "logs", Path(scratch) / "swarm"
        logs.mkdir()
        path.mkdir()
        with Supervisor(logs, patience_s=5.0) as supervisor:
            yield Swarm(path, options, supervisor)


# ---- faults ------------------------------------------------------------------------------------------------------------------


def victim_of(kind: str, leader: str, owners: set[str], draw: random.Random) -> str:
    """Return a member of this kind, or ''."""
    fit = {
        "owner": [peer_id for peer_id in MEMBERS if peer_id in owners and peer_id != leader],
        "leader": [leader],
        "plain": [peer_id for peer_id in MEMBERS if peer_id not in owners and peer_id != leader],
    }[kind]
    return draw.choice(fit) if fit else ""


def settled(at: Swarm) -> None:
    """Wait until all vote and follow the record, and each has taken three outer steps of each part."""
    at.wait(at.formed, SETTLES_S, "all vote again")
    newest = max(at.stamps())
    at.wait(lambda: min(at.stamps()) > newest, SETTLES_S, "all hosts follow the record")
    at.look()
    wanted = {part: step + 3 for part, step in at.reached(MEMBERS).items()}
    at.wait(lambda: at.all_at(MEMBERS, wanted), SETTLES_S, "all train")


def fault(at: Swarm, how: str, kind: str, draw: random.Random, label: str) -> Row | None:
    """Take one member, measure, and bring it back. None: there is no member of this kind now."""
    settled(at)
    leader, owners = at.roles()
    victim = victim_of(kind, leader, owners, draw)
    if not victim:
        return None
    begins, exchange_s = circumstances(label), at.exchange_s()
    time.sleep(draw.random() * max(exchange_s, 0.1))  # anywhere in an exchange
    survivors = [peer_id for peer_id in MEMBERS if peer_id != victim]
    cpu, began = at.cpu_s(survivors), time.monotonic()
    if how == "kill":
        at.kill(victim)
    else:
        at.signal(victim, SIGNALS[how])
    at.look()
    reached, told, ends = at.reached(survivors), len(at.without), []
    for further in (1, 2):
        wanted = {part: step + further for part, step in reached.items()}
        ends.append(at.wait(partial(at.all_at, survivors, wanted), GOES_ON_S, f"after {how} of {victim} ({kind})"))
    cpu = at.cpu_s(survivors) - cpu
    missed = sum(peer_id != victim for peer_id in at.without[told:])
    if how == "kill":
        at.start_host(victim)
        at.start_peer(victim)
    else:
        at.signal(victim, signal.SIGCONT)
    figures = {"exchange_s": exchange_s, "next_s": ends[0] - began, "second_s": ends[1] - began, "cpu_s": cpu}
    return {
        **begins,
        "how": how,
        "kind": kind,
        "owns": victim in owners,
        "leads": victim == leader,
        "missed": missed,
        "bound_s": round(BOUNDS_S[how] + (EXCHANGES * exchange_s if at.parameters > SMALL else 0.0), 3),
        **{name: round(value, 3) for name, value in figures.items()},
    }


def power_cut(at: Swarm, label: str) -> Row:
    """Kill all members at once, start all again, and measure until all go on from where they were."""
    settled(at)
    begins, exchange_s = circumstances(label), at.exchange_s()
    for peer_id in MEMBERS:
        at.signal(peer_id, signal.SIGKILL)
    for peer_id in MEMBERS:
        at.kill(peer_id)
    at.look()
    reached, ends, began = at.reached(MEMBERS), [], time.monotonic()
    for peer_id in MEMBERS:
        at.start_host(peer_id)
        at.start_peer(peer_id)
    for further in (1, 2):
        wanted = {part: step + further for part, step in reached.items()}
        ends.append(at.wait(partial(at.all_at, MEMBERS, wanted), SETTLES_S, "after a power cut"))
    figures = {"exchange_s": exchange_s, "next_s": ends[0] - began, "second_s": ends[1] - began, "cpu_s": at.cpu_s(MEMBERS)}
    return {**begins, "how": "kill", "kind": "all", "missed": 0, **{name: round(each, 3) for name, each in figures.items()}}


def faults(options: argparse.Namespace) -> list[Row]:
    """Take members one after the other: each kind, killed and stopped, so many times."""
    rows: list[Row] = []
    draw = random.Random(options.seed)
    planned = [(how, kind) for how in SIGNALS for kind in KINDS for _ in range(options.faults)]
    planned += [("kill", "all")] * options.power_cuts
    draw.shuffle(planned)
    with swarm(options) as at:
        print(f"formed in {at.form():.1f} s", flush=True)
        for peer_id in MEMBERS:
            at.start_peer(peer_id)
        while planned:
            how, kind = planned.pop()
            row = power_cut(at, options.label) if kind == "all" else fault(at, how, kind, draw, options.label)
            if row is None:  # all others own a part
                print(f"{how} of the {kind}: there is none now", flush=True)
                continue
            rows.append({**row, **sizes(options)})
            if options.record:  # at once: it may be stopped
                append_lines(RESULTS, rows[-1:])
            print(
                f"{row['how']:5}{row['kind']:7} next {row['next_s']:6.2f} s, second {row['second_s']:6.2f} s, "
                f"exchange {row['exchange_s']:.2f} s, {row['cpu_s']:.1f} s of CPU, {row['missed']} contributions came late",
                flush=True,
            )
        settled(at)
        at.at_the_end()
    print(f"no split, nothing lost: {len(at.digests)} digests, of {sum(one.lines for one in at.seen.values())} reports")
    return rows


def sizes(options: argparse.Namespace) -> dict[str, Any]:
    found = {"parameters": options.parameters, "codec": options.codec, "parts": options.parts, "lease_s": options.lease}
    return {**found, "members": len(MEMBERS)}


def starts(options: argparse.Namespace) -> list[Row]:
    """Form so many swarms, one after the other."""
    rows: list[Row] = []
    for _ in range(options.starts):
        begins = circumstances(options.label)
        with swarm(options) as at:
            seconds = at.form()
            cpu = at.cpu_s(MEMBERS)
        rows.append(
            {**begins, "how": "start", "kind": "", "next_s": round(seconds, 3), "cpu_s": round(cpu, 3), **sizes(options)}
        )
        if options.record:
            append_lines(RESULTS, rows[-1:])
        print(f"formed in {seconds:.2f} s, {cpu:.1f} s of CPU", flush=True)
    return rows


def table(rows: Sequence[Row]) -> None:
    """Print medians and the largest, by fault and victim."""
    head = ("fault", "times", "next, median", "largest", "within", "second, median", "largest", "an exchange", "CPU s", "late")
    lines = []
    for how, kind in dict.fromkeys((row["how"], row["kind"]) for row in rows):
        of = [row for row in rows if (row["how"], row["kind"]) == (how, kind)]

        def figure(name: str, choose: Callable[[list[float]], float], of: Sequence[Row] = of) -> str:
            values = [row[name] for row in of if name in row]
            return f"{choose(values):.2f} s" if values else ""

        late = str(sum(row.get("missed", 0) for row in of))
        ends = [figure(name, choose) for name in ("next_s", "second_s") for choose in (statistics.median, max)]
        bounded = [row["next_s"] <= row["bound_s"] for row in of if "bound_s" in row]
        ends.insert(2, f"{sum(bounded)} of {len(bounded)}" if bounded else "")
        lines.append(
            (
                f"{how} {kind}".strip(),
                str(len(of)),
                *ends,
                figure("exchange_s", statistics.median),
                figure("cpu_s", statistics.median),
                late,
            )
        )
    of_all = "{members} members, {parameters:,} parameters, {codec}, {parts} parts, lease {lease_s:g} s".format(**rows[0])
    print_table(results_table(of_all, head, lines, figure_note(rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=1, metavar="N", help="of each kind: 3 victims, killed and stopped")
    parser.add_argument("--power-cuts", type=int, default=0, metavar="N", help="of all four members at once")
    parser.add_argument("--starts", type=int, default=0, metavar="N", help="form so many swarms instead")
    parser.add_argument("--parameters", type=int, default=2_097_152)
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--parts", type=int, default=2, help="of the model; with as many as members nobody is plain")
    parser.add_argument("--lease", type=float, default=1.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scratch", default=None, metavar="FOLDER", help="for the members' files")
    parser.add_argument("--label", default="", help="of the rows")
    parser.add_argument("--record", action="store_true", help=f"append the rows to {RESULTS.name}")
    for name in ("--member", "--folder", "--run"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.member:
        train(options)
        return
    table(starts(options) if options.starts else faults(options))


if __name__ == "__main__":
    main()
