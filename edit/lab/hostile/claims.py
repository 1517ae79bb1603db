"""What a member says of itself on the control plane, and what an evicted one goes on saying."""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import Any

from edit.fragments.schema import plan_fragments
from edit.lab.hostile.member import Attacker, attend
from editpb import control_pb2, data_pb2
from editpb.limits import MAX_RANKS, MAX_STEP_S, MIN_STEP_S
from editpb.messages import PROTOCOL
from editpb.transport.channel_options import MESSAGE_BYTES
from editpb.transport.chunks import make_chunks
from peers.models.registry import build

__all__ = ["evicted_calls", "heartbeats_only", "huge_messages", "lying_step_times", "many_ranks", "silent_founder"]

_STEP_TIMES = (1e300, 1e-300, math.nan, math.inf, -1.0, MAX_STEP_S, MIN_STEP_S)
_DRIP_S = 5.0  # often enough that the lease never ends
_HUGE = MESSAGE_BYTES - 4096  # what gRPC lets through


async def lying_step_times(attacker: Attacker) -> None:
    """Attend and claim step times that no machine has; those within the bounds of the wire for some seconds each."""
    async with attacker.connected(attacker.home.member) as member:
        while True:
            for step_s in _STEP_TIMES:
                with attacker.answered():
                    async with asyncio.timeout(2.0), attend(member) as attendance:
                        await attendance.report_for_ever(step_s=step_s)
            await asyncio.sleep(attacker.pause_s)


async def heartbeats_only(attacker: Attacker) -> None:
    """Attend, report as an honest peer does, and never contribute."""

    async def attempt() -> None:
        async with attend(member) as attendance:
            await attendance.report_for_ever(step_s=0.01, tokens_per_s=1e3, loss=1.0)

    async with attacker.connected(attacker.home.member) as member:
        await attacker.again_and_again(attempt)


async def huge_messages(attacker: Attacker) -> None:
    """Send a Hello, heartbeats, a schema and a goodbye as large as gRPC lets through."""
    padding = "x" * _HUGE

    async def hello() -> None:
        await _answers(member.control.Attend(), member.hello(software=padding))

    async def heartbeat() -> None:
        async with attend(member) as attendance:
            await attendance.report(digest=padding)
            await asyncio.sleep(1.0)

    async def goodbye() -> None:
        async with attend(member) as attendance:
            await attendance.say(control_pb2.PeerMessage(goodbye=control_pb2.Goodbye(reason=padding)))
            await asyncio.sleep(1.0)

    async def schema() -> None:
        other = f"{attacker.chance.getrandbits(256):064x}"
        answer = control_pb2.PeerMessage(schema=attacker.chance.randbytes(_HUGE))
        await _answers(member.control.Attend(), member.hello(schema_hash=other), answer)

    async with attacker.connected(attacker.home.member) as member:
        while True:
            for attempt in (hello, heartbeat, schema, goodbye):
                with attacker.answered():
                    await attempt()
            await asyncio.sleep(attacker.pause_s)


async def _answers(call: Any, *messages: control_pb2.PeerMessage) -> None:
    """Send the messages, then read until the coordinator ends the stream."""
    try:
        for message in messages:
            await call.write(message)
        async with asyncio.timeout(5.0):
            async for _ in call:
                pass
    finally:
        call.cancel()


async def evicted_calls(attacker: Attacker) -> None:
    """Go on calling everything after the eviction, with large first messages."""
    hello = control_pb2.Hello(protocol=PROTOCOL, software="x" * _HUGE)

    async def attend_again() -> None:
        await _answers(member.control.Attend(), control_pb2.PeerMessage(hello=hello))

    async def read() -> None:
        await member.data.DescribeSnapshot(data_pb2.SnapshotManifestRequest(run_id=member.run_id))

    async def contribute() -> None:
        header = data_pb2.ContributionHeader(run_id=member.run_id, peer_id=member.peer_id, round_id=1)

        def parts() -> object:
            yield data_pb2.ContributePart(header=header)

        await member.data.Contribute(parts())

    async with attacker.connected(attacker.home.evicted) as member:
        while True:
            for attempt in (attend_again, read, contribute):
                with attacker.answered():
                    await attempt()


async def many_ranks(attacker: Attacker) -> None:
    """Announce a replica of as many ranks as the wire allows, and attend with many of them at once."""

    async def attempt() -> None:
        calls = [member.control.Attend() for _ in range(64)]
        try:
            for rank, call in enumerate(calls):
                await call.write(member.hello(schema, rank=rank * (MAX_RANKS // len(calls)), ranks=MAX_RANKS))
            await asyncio.sleep(2.0)
        finally:
            for call in calls:
                call.cancel()

    async with attacker.connected(attacker.home.member) as member:
        _, schema = await member.snapshot()
        await attacker.again_and_again(attempt)


async def silent_founder(attacker: Attacker) -> None:
    """Attend a run without parameters before anybody else, begin to found it, and send a byte every few seconds."""

    async def attempt() -> None:
        model = build((await member.config()).model, 0, frozenset())
        schema = plan_fragments(model.named_parameters())
        async with attend(member, schema) as attendance, asyncio.TaskGroup() as group:
            group.create_task(attendance.report_for_ever())
            await asyncio.sleep(1.0)  # until it is told that it is the founder
            call = member.data.Found()
            header = data_pb2.FoundHeader(run_id=member.run_id, schema_hash=schema.schema_hash, digest="ab" * 32)
            await call.write(data_pb2.FoundPart(header=header))
            for offset in itertools.count():
                (chunk,) = make_chunks(bytes(offset + 1), start=offset)
                await call.write(data_pb2.FoundPart(chunk=data_pb2.FragmentChunk(fragment_id=0, chunk=chunk)))
                await asyncio.sleep(_DRIP_S)

    async with attacker.connected(attacker.home.member) as member:
        await attacker.again_and_again(attempt)
