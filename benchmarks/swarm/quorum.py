"""What it costs that a quorum of members holds each outer step on disk before it counts, against the hub's way down.

    python benchmarks/swarm/quorum.py  # 50M parameters, int8, 2 and 4 members beside the owner: about 6 minutes on 2 busy cores

One outer step of one whole model, from the merged pseudo-gradient to the new parameters at all members, whose digests must be
equal. The owner and the members are processes of their own; all bytes go over gRPC with mutual TLS on loopback. Three ways:

    hub        the owner records each fragment in its journal and syncs it, takes the outer step, and then streams the encoded
               step; each member decodes it and moves its parameters, as a peer does
    quorum     the owner offers the records of all fragments; each member checks them, writes them to its journal, syncs it and
               answers; at a majority (the owner is one of them) a council's record of 4 KB is written and synced at all, and
               answered by a majority; once all hold the update, all take the outer step, and move their parameters besides
    no fsync   the same, but nothing waits for a disk

What lies before (contributions up, merge) is the same in all of them, and measured by `edit-lab bench exchange`, whose figures
for as many peers are printed beside, so that the added seconds can be seen as a share. CPU seconds are user + system of all
processes. fsync: what a member's journal waited for its disk, the slowest of all members, median of the repeats.

Appends to benchmarks/results/swarm.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import torch

from aggregator.storage.journal import Disk, Journal
from aggregator.storage.store import Store
from aggregator.swarm.offers import Offer
from aggregator.swarm.replication import PartReplica
from edit import kernels
from edit.codecs import codec
from edit.config.codec import CodecConfig
from edit.config.run import RunConfig, StorageConfig
from edit.council.record import Update
from edit.durable_files import write_atomic
from edit.fragments.digest import FragmentHash, combine
from edit.lab.bench.exchange import ours
from edit.lab.bench.exchange_peer import blocks
from edit.lab.bench.results import Row, append_lines, circumstances
from edit.lab.bench.turns import Exchanger, Timing, Turns, best, median
from edit.lab.processes import COORDINATOR, Programs, Supervisor
from edit.merging.merge import Merged
from edit.merging.outer_state import MergeRecord, OuterState
from edit.records import Commit, EncodedTensor

RESULTS = Path(__file__).parents[1] / "results" / "swarm.jsonl"
WAYS = ("hub", "quorum", "no fsync")
CHUNK = 1 << 20
PREFIX = struct.Struct("<IQ")  # bytes of the header and of the body
LIMITS = [("grpc.max_receive_message_length", 8 * CHUNK), ("grpc.max_send_message_length", 8 * CHUNK)]
COUNCIL = bytes(4096)  # a record of a council
ROUND = 1


class Syncs:
    """A journal's disk that adds up how long it was waited for."""

    def __init__(self, *, syncs: bool) -> None:
        self.seconds, self._syncs = 0.0, syncs

    def disk(self) -> Disk:
        return Disk(fsync=self._sync)

    def _sync(self, descriptor: int) -> None:
        began = time.monotonic()
        if self._syncs:
            os.fsync(descriptor)
        self.seconds += time.monotonic() - began


def outer_state(options: argparse.Namespace) -> OuterState:
    schema, coding = blocks(options.parameters), CodecConfig(up=options.codec, down=options.codec, record=options.record)
    theta = [torch.zeros(fragment.numel) for fragment in schema.fragments]
    config = replace(RunConfig(), codec=coding, storage=StorageConfig(checkpoint_every=1_000_000))
    return OuterState(schema, config, theta)


class Follower:
    """A peer's parameters: they move by the encoded outer steps."""

    def __init__(self, outer: OuterState) -> None:
        self.theta = [part.clone() for part in outer.theta]
        self.hashes = list(outer.fragment_hashes)

    def apply(self, i: int, payload: EncodedTensor) -> None:
        hashed, at = FragmentHash(), 0
        for piece in codec(payload.codec).decode_pieces(payload):
            hashed.update(self.theta[i][at : at + piece.numel()].sub_(piece))
            at += piece.numel()
        self.hashes[i] = hashed.digest()

    @property
    def digest(self) -> str:
        return combine(self.hashes)


# ---- messages ----------------------------------------------------------------------------------------------------------------


async def pieces(header: dict[str, Any], body: Sequence[Any]) -> AsyncIterator[bytes]:
    text = json.dumps(header).encode()
    yield PREFIX.pack(len(text), sum(memoryview(part).nbytes for part in body)) + text
    for part in body:
        view = memoryview(part).cast("B")
        for at in range(0, len(view), CHUNK):
            yield bytes(view[at : at + CHUNK])


async def messages(stream: AsyncIterator[bytes]) -> AsyncIterator[tuple[dict[str, Any], bytearray]]:
    async for first in stream:
        length, size = PREFIX.unpack_from(first)
        header, body, at = json.loads(first[PREFIX.size : PREFIX.size + length]), bytearray(size), 0
        while at < size:
            chunk = await anext(stream)
            body[at : at + len(chunk)] = chunk
            at += len(chunk)
        yield header, body


# ---- a member ----------------------------------------------------------------------------------------------------------------


class Member:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._way, self._folder, self._syncs = options.way, folder, Syncs(syncs=options.way == "quorum")
        outer = outer_state(options)
        self._follower = Follower(outer)
        self._replica = (
            replica_of(outer, folder, self._syncs, lambda commit: move(self._follower, commit))
            if options.way != "hub"
            else None
        )
        self.applied = asyncio.Queue[str]()
        self.fsync_s: list[float] = []

    @property
    def replica(self) -> PartReplica:
        assert self._replica is not None
        return self._replica

    async def update(self, stream: AsyncIterator[bytes], _: Any) -> bytes:
        """The hub's way: the encoded steps."""
        async for header, body in messages(stream):
            payload = EncodedTensor(header["codec"], header["numel"], body)
            await asyncio.to_thread(self._follower.apply, header["fragment_id"], payload)
        await self.applied.put(self._follower.digest)
        return b""

    async def offer(self, stream: AsyncIterator[bytes], _: Any) -> bytes:
        """Hold an update; answer when it is on disk."""
        arrived = [message async for message in messages(stream)]
        header, manifest = arrived[0]
        offer = Offer(Update(**header), bytes(manifest), tuple(body for _, body in arrived[1:]))
        self._syncs.seconds = 0.0
        await asyncio.to_thread(self.replica.hold, offer)
        self.fsync_s.append(self._syncs.seconds)
        return b""

    async def mark(self, request: bytes, _: Any) -> bytes:
        """Write a version of the council's record."""
        await asyncio.to_thread(note, self._folder, request, self._way)
        return b""

    async def adopt(self, request: bytes, _: Any) -> bytes:
        """Take the outer step."""
        await asyncio.to_thread(self.replica.adopt, request.decode())
        await self.applied.put(self._follower.digest)
        return b""


def replica_of(outer: OuterState, folder: Path, syncs: Syncs, on_commit: Callable[[Commit], None]) -> PartReplica:
    """The part, founded."""
    replica = PartReplica("run", 0, outer.config, Store(folder / "part-0", outer.config, "run", syncs.disk()), on_commit)
    replica.found(outer)
    return replica


def note(folder: Path, record: bytes, way: str) -> None:
    if way == "quorum":
        write_atomic(folder / "council.json", record)
    else:
        (folder / "council.json").write_bytes(record)


def move(follower: Follower, commit: Commit) -> None:
    for fragment in commit.fragments:
        assert fragment.payload is not None
        follower.apply(fragment.fragment_id, fragment.payload)


async def serve(options: argparse.Namespace) -> None:
    """One member: a server that the owner calls."""
    folder = Path(options.folder)
    member, exchanger = Member(options, folder), Exchanger(options.port)
    server = grpc.aio.server(options=LIMITS)
    calls: dict[str, Any] = {
        "update": grpc.stream_unary_rpc_method_handler(member.update),
        "offer": grpc.stream_unary_rpc_method_handler(member.offer),
        "mark": grpc.unary_unary_rpc_method_handler(member.mark),
        "adopt": grpc.unary_unary_rpc_method_handler(member.adopt),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("swarm", calls),))
    ca, key, certificate = ((Path(options.tls) / name).read_bytes() for name in ("ca.pem", "server.key", "server.pem"))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)], ca, True))
    await server.start()
    write_atomic(folder / "port", str(port).encode())
    while await asyncio.to_thread(exchanger.go):
        exchanger.report(await member.applied.get())
        write_atomic(folder / "fsync.json", json.dumps(member.fsync_s).encode())
    await server.stop(None)


# ---- the owner ---------------------------------------------------------------------------------------------------------------


class Owner:
    def __init__(self, options: argparse.Namespace, folder: Path, channels: Sequence[grpc.aio.Channel]) -> None:
        self._way, self._folder, self._channels = options.way, folder, channels
        self._syncs = Syncs(syncs=options.way != "no fsync")
        self._outer = outer_state(options)
        generator = torch.Generator().manual_seed(0)
        self._means = [
            torch.empty(fragment.numel).normal_(0, 1e-3, generator=generator) for fragment in self._outer.schema.fragments
        ]
        if self._way == "hub":
            self._journal = Journal.create(folder / "hub.journal", 0, self._syncs.disk())
        else:
            self._replica = replica_of(self._outer, folder, self._syncs, lambda _: None)

    async def step(self) -> str:
        """Take one outer step with the members; return the digest."""
        await (self._step_of_a_hub() if self._way == "hub" else self._step_of_a_swarm())
        return self._outer.digest

    async def _step_of_a_hub(self) -> None:
        records = [await asyncio.to_thread(self._journalled, i) for i in range(len(self._means))]
        await asyncio.to_thread(self._commit_to_disk)
        commit = await asyncio.to_thread(self._outer.commit, ROUND, "", records)
        await asyncio.gather(*(self._call(each, "update", self._steps(commit)) for each in self._channels))

    async def _step_of_a_swarm(self) -> None:
        records = [await asyncio.to_thread(self._recorded, i) for i in range(len(self._means))]
        offer = await asyncio.to_thread(self._replica.offer, 1, ROUND, "", 0, records)
        sending = [asyncio.create_task(self._call(channel, "offer", self._bytes(offer))) for channel in self._channels]
        holding = asyncio.create_task(asyncio.to_thread(self._replica.hold, offer, records))
        await self._majority([holding, *sending])
        marks = [asyncio.create_task(self._tell(channel, "mark", COUNCIL)) for channel in self._channels]
        own = asyncio.create_task(asyncio.to_thread(note, self._folder, COUNCIL, self._way))
        await self._majority([own, *marks])
        await asyncio.gather(holding, own, *sending, *marks)  # all of them: the slowest member's time counts
        taking = asyncio.create_task(asyncio.to_thread(self._replica.adopt, offer.update.id))
        await asyncio.gather(taking, *(self._tell(channel, "adopt", offer.update.id.encode()) for channel in self._channels))

    def _recorded(self, i: int) -> MergeRecord:
        merged = Merged(fragment_id=i, merged=self._means[i], verdicts=(), statistics={}, merged_norm=1.0, clip=1.0)
        return self._outer.record(merged)

    def _journalled(self, i: int) -> MergeRecord:
        record = self._recorded(i)
        self._journal.append_fragment(ROUND, record)
        return record

    def _commit_to_disk(self) -> None:
        self._journal.append_commit(ROUND, self._outer.outer_step + 1, "", 0, None, self._outer.digest)

    async def _majority(self, answers: Sequence[asyncio.Task[Any]]) -> None:
        for count, answer in enumerate(asyncio.as_completed(answers), 1):
            await answer
            if 2 * count > len(answers):
                return

    @staticmethod
    async def _call(channel: grpc.aio.Channel, name: str, stream: AsyncIterator[bytes]) -> None:
        call: Any = channel.stream_unary(f"/swarm/{name}")
        await call(stream)

    @staticmethod
    async def _tell(channel: grpc.aio.Channel, name: str, request: bytes) -> None:
        call: Any = channel.unary_unary(f"/swarm/{name}")
        await call(request)

    @staticmethod
    async def _steps(commit: Commit) -> AsyncIterator[bytes]:
        for fragment in commit.fragments:
            payload = fragment.payload
            assert payload is not None
            header = {"fragment_id": fragment.fragment_id, "codec": payload.codec, "numel": payload.numel}
            async for piece in pieces(header, [payload.data]):
                yield piece

    @staticmethod
    async def _bytes(offer: Offer) -> AsyncIterator[bytes]:
        async for piece in pieces(asdict(offer.update), [offer.manifest]):
            yield piece
        for body in offer.bodies:
            async for piece in pieces({}, [body]):
                yield piece


async def own(options: argparse.Namespace) -> None:
    folder, exchanger = Path(options.folder), Exchanger(options.port)
    files = ((Path(options.tls) / name).read_bytes() for name in ("ca.pem", "operator.key", "operator.pem"))
    credentials = grpc.ssl_channel_credentials(*files)
    addresses = [f"127.0.0.1:{(Path(each) / 'port').read_text()}" for each in options.members]
    channels = [grpc.aio.secure_channel(address, credentials, options=LIMITS) for address in addresses]
    owner = Owner(options, folder, channels)
    for channel in channels:
        await channel.channel_ready()
    while exchanger.go():
        exchanger.report(await owner.step())
    for channel in channels:
        await channel.close()


# ---- all of it ---------------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace, record: str, members: int, way: str) -> tuple[list[Timing], float]:
    """Return the timings of one way, and the seconds of a member's fsync (the slowest of them, median)."""
    with (
        tempfile.TemporaryDirectory(prefix="edit-bench-", dir=options.folder) as scratch,
        Supervisor(Path(scratch) / "logs", patience_s=0.0) as supervisor,
        Turns(supervisor, limit_s=600.0) as turns,
    ):
        tls = Path(scratch) / "run"
        supervisor.call({"init": (*Programs().coordinator, "init", "--state", str(tls))})
        names = [f"member-{i}" for i in range(members)]
        folders = {name: Path(scratch) / name for name in (*names, "owner")}
        argv = [
            sys.executable,
            str(Path(__file__).resolve()),
            "--parameters",
            str(options.parameters),
            "--codec",
            options.codec,
        ]
        argv += ["--record", record, "--tls", str(tls), "--way", way]
        for name, folder in folders.items():
            folder.mkdir()
            if name == "owner":
                wait_for([each / "port" for each in folders.values() if each is not folder], supervisor)
            others = ["--members", *(str(folders[each]) for each in names)] if name == "owner" else []
            turns.start(name, [*argv, *others, "--folder", str(folder), "--port"])
        timings = turns.measure(options.repeat)
        waits = [json.loads((folders[name] / "fsync.json").read_text()) for name in names]
    slowest = [max(each) for each in zip(*waits, strict=False)]
    return timings, statistics.median(slowest) if slowest else 0.0


def wait_for(files: Sequence[Path], supervisor: Supervisor) -> None:
    give_up = time.monotonic() + 120.0
    while not all(file.exists() for file in files):
        dead = [str(end) for end in supervisor.ended() if not end.expected and end.returncode != 0]
        if dead or time.monotonic() > give_up:
            sys.exit("; ".join(dead) or "the members do not serve within 120 s")
        time.sleep(0.05)


def row(options: argparse.Namespace, record: str, members: int, way: str) -> Row:
    begins = circumstances(options.label)
    timings, fsync_s = measure(options, record, members, way)
    middle, least = median(timings), best(timings)
    found = {"parameters": options.parameters, "codec": options.codec, "record": record, "members": members, "way": way}
    figures = {
        "step_s": middle.wall_s,
        "best_step_s": least[0],
        "cpu_s": middle.total_cpu_s,
        "best_cpu_s": least[1],
        "owner_cpu_s": min(timing.cpu_s["owner"] for timing in timings),
        "member_cpu_s": min(timing.cpu_s["member-0"] for timing in timings),
        "fsync_s": fsync_s,
    }
    return {**begins, **found, "repeat": len(timings), **{name: round(value, 3) for name, value in figures.items()}}


def exchange_row(options: argparse.Namespace, peers: int) -> Row:
    """The whole exchange with a hub: contributions, merge and the way down."""
    begins = circumstances(options.label)
    timings = ours(peers, options.parameters, options.codec, options.repeat, 600.0)
    middle, least = median(timings), best(timings)
    coordinator = min(timing.cpu_s[COORDINATOR] for timing in timings)
    found = {"parameters": options.parameters, "codec": options.codec, "members": peers, "way": "whole exchange, hub"}
    figures = {"step_s": middle.wall_s, "best_step_s": least[0], "cpu_s": middle.total_cpu_s, "best_cpu_s": least[1]}
    figures["owner_cpu_s"] = coordinator
    return {**begins, **found, "repeat": len(timings), **{name: round(value, 3) for name, value in figures.items()}}


def show(found: Row) -> None:
    columns = [f"{found.get('record', ''):6}", f"{found['members']:7}", f"{found['way']:20}", f"{found['load_before']:6.1f}"]
    for name in ("step_s", "best_step_s", "cpu_s", "best_cpu_s", "owner_cpu_s", "member_cpu_s", "fsync_s"):
        columns.append(f"{found[name]:13.3f}" if name in found else " " * 13)
    print(" ".join(columns), flush=True)


def measure_all(options: argparse.Namespace) -> None:
    names = ("step_s", "best_step_s", "cpu_s", "best_cpu_s", "owner_cpu_s", "member_cpu_s", "fsync_s")
    print(f"{'record':6} {'members':>7} {'way':20} {'load':>6} " + " ".join(f"{name:>13}" for name in names))
    for members in options.counts:
        measured: list[Callable[[], Row]] = [partial(exchange_row, options, members)]
        measured += [partial(row, options, record, members, way) for record in options.records for way in WAYS]
        for one in measured:
            found = one()
            show(found)
            append_lines(options.results, [found])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=50_331_648)
    parser.add_argument("--codec", default="int8", help="of contributions and updates (default int8)")
    parser.add_argument("--records", nargs="+", default=["int8", "bf16"], help="codec.record (default int8 bf16)")
    parser.add_argument("--counts", nargs="+", type=int, default=[2, 4], help="members beside the owner (default 2 4)")
    parser.add_argument("--repeat", type=int, default=5, help="steps that count, after one that does not (default 5)")
    parser.add_argument("--folder", help="on the disk to be measured (default: that of temporary files)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--label", default="")
    parser.add_argument("--record", help=argparse.SUPPRESS)  # what follows is for its own processes
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--tls", help=argparse.SUPPRESS)
    parser.add_argument("--members", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.port is None:
        measure_all(options)
        return
    torch.set_num_threads(1)
    kernels.load()
    asyncio.run(own(options) if options.members else serve(options))


if __name__ == "__main__":
    main()
