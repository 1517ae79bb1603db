"""Snapshots that are asked for and not read."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from edit.fragments.schema import FragmentSpec
from edit.fragments.shards import Box
from edit.lab.hostile.member import Attacker, Member
from editpb.data_messages import snapshot_request_to_pb
from editpb.limits import MAX_READ_S
from editpb.messages import SnapshotRequest
from peers.identity.peer_folder import PeerFolder

__all__ = ["unread_snapshots", "unread_snapshots_as_observer"]

_CONNECTIONS, _CALLS = 4, 30  # together 120, and no more on a connection than it may have
_HELD_S = 3.0


async def unread_snapshots(attacker: Attacker) -> None:
    """As a peer, ask for 120 snapshots at a time, of each tensor half of the columns, and read nothing."""
    await _unread(attacker, attacker.home.member)


async def unread_snapshots_as_observer(attacker: Attacker) -> None:
    """As an observer, ask for 120 snapshots at a time, of each tensor half of the columns, and read nothing."""
    await _unread(attacker, attacker.home.observer)


async def _unread(attacker: Attacker, folder: PeerFolder) -> None:
    async with contextlib.AsyncExitStack() as stack:
        members = [await stack.enter_async_context(attacker.connected(folder)) for _ in range(_CONNECTIONS)]
        await attacker.again_and_again(lambda: _ask(attacker, members))


async def _ask(attacker: Attacker, members: list[Member]) -> None:
    calls: list[Any] = []
    outer_step, schema = await members[0].snapshot()
    fragments = sorted(schema.fragments, key=lambda fragment: -fragment.numel)
    try:
        for number in range(_CONNECTIONS * _CALLS):
            member, fragment = members[number % _CONNECTIONS], fragments[number % len(fragments)]
            wanted = SnapshotRequest(
                run_id=member.run_id, outer_step=outer_step, fragment_id=fragment.fragment_id, boxes=_columns(fragment)
            )
            calls.append(member.data.FetchSnapshot(snapshot_request_to_pb(wanted), timeout=MAX_READ_S))
        await asyncio.sleep(_HELD_S)
        for call in calls:
            attacker.tally[f"read {(await call.code()).name}" if call.done() else "read open"] += 1
    finally:
        for call in calls:
            call.cancel()


def _columns(fragment: FragmentSpec) -> tuple[Box, ...] | None:
    """Return the first half of the last dimension of every tensor, of which no run is contiguous; None: there is none."""
    boxes = [
        Box(i, (0,) * len(tensor.shape), (*tensor.shape[:-1], tensor.shape[-1] // 2))
        for i, tensor in enumerate(fragment.tensors)
        if tensor.shape and tensor.shape[-1] > 1
    ]
    return tuple(boxes) or None
