"""One connection under a certificate, and an attendance on it that says exactly what it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import torch
from torch import Tensor

from edit.codecs import codec, decode
from edit.config.run import RunConfig
from edit.fragments.schema import FragmentSpec, Schema
from edit.lab.hostile.home import HostileHome
from editpb import control_pb2, control_pb2_grpc, data_pb2, data_pb2_grpc
from editpb.control_messages import coordinator_message_from_pb, schema_answer_to_pb
from editpb.data_messages import (
    commit_from_parts,
    contribution_header_to_pb,
    snapshot_manifest_from_pb,
    update_manifest_from_pb,
)
from editpb.messages import PROTOCOL, ContributionHeader, Expel, RunPhase, SchemaRequest, View, Welcome
from editpb.transport.channel_options import channel_options
from editpb.transport.chunks import make_chunks
from peers.identity.peer_folder import PeerFolder

__all__ = ["Attacker", "Attendance", "Member", "attend"]

_LONGEST_PAUSE_S = 1.0  # between two attempts of a call that fails at once


@dataclass(slots=True)
class Attacker:
    """What a behaviour works with. tally: how often each status came back, for the log."""

    home: HostileHome
    chance: random.Random
    tally: Counter[str] = field(default_factory=Counter)
    pause_s: float = 0.05  # after a failed attempt; a coordinator that is being restarted is not hammered

    @contextlib.asynccontextmanager
    async def connected(self, folder: PeerFolder) -> AsyncIterator[Member]:
        """Connect under the certificate in this folder, over a connection of its own."""
        enrolment = folder.load()
        async with grpc.aio.secure_channel(
            enrolment.endpoints[0], enrolment.credentials, options=channel_options(enrolment.endpoints[0])
        ) as channel:
            yield Member(enrolment.identity.peer_id, enrolment.run_id, channel, self.tally)

    async def again_and_again(self, attempt: Callable[[], Any]) -> None:
        """Repeat the attempt for ever, whatever the coordinator answers."""
        while True:
            with self.answered():
                await attempt()
            await asyncio.sleep(self.pause_s)

    @contextlib.contextmanager
    def answered(self) -> Iterator[None]:
        """Count how the block ends; what the coordinator or the network refuses is the end of the block, no error."""
        try:
            yield
            self.tally["done"] += 1
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, OSError) as error:
            self.tally[_name(error)] += 1
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # a TaskGroup that had errors, too, has lost this
                raise asyncio.CancelledError from None


def _name(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code().name
    return (
        "ENDED" if isinstance(error, asyncio.InvalidStateError) else type(error).__name__
    )  # grpc.aio: a write to an ended call


@dataclass(slots=True)
class Member:
    """A channel of its own and the stubs on it."""

    peer_id: str
    run_id: str
    channel: grpc.aio.Channel
    tally: Counter[str]
    control: Any = field(init=False)
    data: Any = field(init=False)

    def __post_init__(self) -> None:
        self.control, self.data = control_pb2_grpc.ControlStub(self.channel), data_pb2_grpc.DataStub(self.channel)

    async def snapshot(self) -> tuple[int, Schema]:
        """Return the outer step of the newest snapshot and the run's model, as any member is told."""
        reply = await self.data.DescribeSnapshot(data_pb2.SnapshotManifestRequest(run_id=self.run_id))
        return reply.outer_step, snapshot_manifest_from_pb(reply).schema

    async def config(self) -> RunConfig:
        """Return the run's configuration, as any member is told."""
        call = self.control.Attend()
        await call.write(self.hello())
        async for message in call:
            if isinstance(heard := coordinator_message_from_pb(message), Welcome):
                call.cancel()
                return RunConfig.from_json(heard.config_json)
        raise ConnectionError("no Welcome")

    def hello(self, schema: Schema | None = None, **changes: Any) -> control_pb2.PeerMessage:
        """Return a first message, with any fields changed."""
        values = {"protocol": PROTOCOL, "run_id": self.run_id, "schema_hash": schema.schema_hash if schema else "", "ranks": 1}
        return control_pb2.PeerMessage(hello=control_pb2.Hello(**{**values, **changes}))

    def header(self, view: View, fragment: FragmentSpec, schema: Schema, codec_name: str, **changes: Any) -> ContributionHeader:
        """Return a header that is right in every field that `changes` does not name."""
        values: dict[str, Any] = {
            "run_id": self.run_id,
            "round_id": view.round_id,
            "outer_step": view.outer_step,
            "peer_id": self.peer_id,
            "fragment_id": fragment.fragment_id,
            "schema_hash": schema.schema_hash,
            "inner_steps": 1,
            "tokens": 1,
            "codec": codec_name,
            "numel": fragment.numel,
        }
        values |= changes
        values.setdefault("total_bytes", codec(values["codec"]).encoded_size(values["numel"]))
        return ContributionHeader(**values)

    async def send(self, header: ContributionHeader, chunks: Iterable[Any]) -> data_pb2.ContributionReceipt:
        """Contribute with this header and these chunks, whatever they are."""

        def parts() -> Iterable[data_pb2.ContributePart]:
            yield data_pb2.ContributePart(header=contribution_header_to_pb(header))
            for chunk in chunks:
                yield data_pb2.ContributePart(chunk=chunk)

        receipt: data_pb2.ContributionReceipt = await self.data.Contribute(parts())
        return receipt

    async def contribute(self, view: View, schema: Schema, config: RunConfig, deltas: Iterable[Tensor], **changes: Any) -> None:
        """Contribute one flat fp32 vector per fragment, in the run's codec. changes: of the headers."""
        name = config.codec.up
        for fragment, delta in zip(schema.fragments, deltas, strict=True):
            data = bytes(codec(name).encode(delta, fragment).data)
            await self.send(self.header(view, fragment, schema, name, **changes), make_chunks(data))

    async def last_update(self, schema: Schema, outer_step: int) -> list[Tensor]:
        """Return the update to this outer step: how far theta moved, flat fp32 per fragment; zeros where it did not."""
        manifest, parts = None, dict[int, bytearray]()
        async for part in self.data.FetchUpdate(data_pb2.UpdateRequest(run_id=self.run_id, outer_step=outer_step)):
            if part.WhichOneof("kind") == "manifest":
                manifest = update_manifest_from_pb(part.manifest, schema, outer_step)
            else:
                parts.setdefault(part.chunk.fragment_id, bytearray()).extend(part.chunk.chunk.data)
        if manifest is None:
            raise ConnectionError("no manifest")
        commit = commit_from_parts(manifest, [parts.get(each.commit.fragment_id) for each in manifest.fragments])
        moved = {each.fragment_id: decode(each.payload) for each in commit.fragments if each.payload is not None}
        return [moved.get(each.fragment_id, torch.zeros(each.numel)) for each in schema.fragments]


class Attendance:
    """An open Attend stream that keeps the newest view. Opened by `attend`."""

    def __init__(self, member: Member, call: Any, schema: Schema, config: RunConfig) -> None:
        self.member, self.schema, self.config = member, schema, config
        self._call = call
        self._view: View | None = None
        self._news = asyncio.Event()

    async def say(self, message: control_pb2.PeerMessage) -> None:
        """Send any message."""
        await self._call.write(message)

    async def report(self, **fields: Any) -> None:
        """Send a heartbeat with these fields, as they are; without any it reports the run's own outer step."""
        view = self._view
        values: dict[str, Any] = {"state": control_pb2.PEER_STATE_TRAINING}
        values |= {"outer_step": view.outer_step, "digest": view.digest} if view is not None else {}
        await self.say(control_pb2.PeerMessage(heartbeat=control_pb2.Heartbeat(**(values | fields))))

    async def report_for_ever(self, **fields: Any) -> None:
        """Report as often as an honest peer does, until the stream ends."""
        while True:
            await self.report(**fields)
            await asyncio.sleep(self.config.membership.heartbeat_s)

    async def next_round(self, after: int) -> View:
        """Return the first view of an open round whose id is larger than `after`."""
        while self._view is None or self._view.round_id <= after or self._view.phase is not RunPhase.COLLECTING:
            self._news.clear()
            await self._news.wait()
        return self._view

    async def listen(self) -> None:
        """Keep the newest view, until the stream ends. Raises ConnectionError when the coordinator ends it."""
        async for message in self._call:
            match coordinator_message_from_pb(message):
                case View() as view:
                    self._view = view
                    self._news.set()
                case Expel(_, reason):
                    raise ConnectionError(reason)
                case SchemaRequest():
                    await self.say(schema_answer_to_pb(self.schema))
        raise ConnectionError("the stream ended")


@contextlib.asynccontextmanager
async def attend(member: Member, schema: Schema | None = None, **hello: Any) -> AsyncIterator[Attendance]:
    """Attend, reports aside. schema: of its model; None: the run's. hello: fields of the first message that are different.

    Raises ConnectionError, also inside the block, when the coordinator ends the stream.
    """
    config = await member.config()
    if schema is None:
        _, schema = await member.snapshot()
    call = member.control.Attend()
    await call.write(member.hello(schema, **hello))
    attendance = Attendance(member, call, schema, config)
    try:
        async with asyncio.TaskGroup() as group:
            listening = group.create_task(attendance.listen())
            yield attendance
            listening.cancel()
    except BaseExceptionGroup as group:
        raise (_answer(group) or group) from None
    finally:
        call.cancel()


def _answer(group: BaseExceptionGroup[Any]) -> BaseException | None:
    """Return the first of what `Attacker.answered` counts; None when there is anything else among them."""
    ended, bugs = group.split((OSError, grpc.aio.AioRpcError, asyncio.InvalidStateError))
    if ended is None or bugs is not None:
        return None
    first: BaseException = ended
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first
