"""What a member contributes: damaged, unfinished, or numbers that hurt."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from edit.codecs import codec
from edit.fragments.schema import FragmentSpec
from edit.fragments.shards import Box, Shard
from edit.lab.hostile.member import Attacker, Attendance, attend
from editpb import data_pb2
from editpb.data_messages import contribution_header_to_pb
from editpb.limits import MAX_RANKS
from editpb.messages import View
from editpb.transport.chunks import make_chunks

__all__ = [
    "bad_bytes",
    "half_contributions",
    "huge_norm",
    "lying_tokens",
    "many_boxes",
    "noise",
    "not_finite",
    "random_bytes",
    "reversed_direction",
]

Round = Callable[[Attendance, View], Awaitable[None]]
_BOXES = 16  # of one tensor in one shard, as many as the wire allows


async def _every_round(attacker: Attacker, contribute: Round, *, repeat: bool = False, **hello: Any) -> None:
    """Attend, report, and do this once in every round; repeat: as often as it can be done."""

    async def attempt() -> None:
        async with attend(member, **hello) as attendance, asyncio.TaskGroup() as group:
            reporting = group.create_task(attendance.report_for_ever(step_s=0.01))
            done = 0
            try:
                while True:
                    view = await attendance.next_round(done)
                    done = view.round_id - 1 if repeat else view.round_id
                    with attacker.answered():
                        await contribute(attendance, view)
                    await asyncio.sleep(0.0 if not repeat else 0.002)
            finally:
                reporting.cancel()

    async with attacker.connected(attacker.home.member) as member:
        await attacker.again_and_again(attempt)


# ---- broken uploads ----------------------------------------------------------------------------------------------------------


async def bad_bytes(attacker: Attacker) -> None:
    """Contribute bytes that leave a gap, again and again."""

    async def contribute(attendance: Attendance, view: View) -> None:
        fragment, name = attendance.schema.fragments[0], attendance.config.codec.up
        header = attendance.member.header(view, fragment, attendance.schema, name)
        chunks = list(make_chunks(attacker.chance.randbytes(header.total_bytes)))
        chunks[0].offset += 1
        await attendance.member.send(header, chunks)

    await _every_round(attacker, contribute, repeat=True)


async def half_contributions(attacker: Attacker) -> None:
    """Begin many contributions of the same round and finish none; keep their streams open."""

    async def contribute(attendance: Attendance, view: View) -> None:
        calls: list[Any] = []
        member, name = attendance.member, attendance.config.codec.up
        try:
            for attempt in range(32):
                fragment = attendance.schema.fragments[attempt % len(attendance.schema.fragments)]
                header = replace(member.header(view, fragment, attendance.schema, name), attempt=attempt)
                calls.append(call := member.data.Contribute())
                await call.write(data_pb2.ContributePart(header=contribution_header_to_pb(header)))
                half = attacker.chance.randbytes(max(1, header.total_bytes // 2))
                for chunk in make_chunks(half):
                    await call.write(data_pb2.ContributePart(chunk=chunk))
            await asyncio.sleep(2.0)
        finally:
            for call in calls:
                call.cancel()

    await _every_round(attacker, contribute)


async def many_boxes(attacker: Attacker) -> None:
    """Announce the largest tensor as dominoes that no straight cut parts, 16 from each rank of as many as may be."""

    async def contribute(attendance: Attendance, view: View) -> None:
        fragment = max(attendance.schema.fragments, key=lambda each: max(tensor.numel for tensor in each.tensors))
        boxes = list(_dominoes(fragment))
        for rank, start in enumerate(range(0, min(len(boxes), _BOXES * MAX_RANKS), _BOXES)):
            shard = Shard(fragment, boxes[start : start + _BOXES])
            values = {"boxes": shard.boxes, "numel": shard.numel, "rank": rank}
            header = attendance.member.header(view, fragment, attendance.schema, "fp32", **values)
            await attendance.member.data.Probe(contribution_header_to_pb(header))

    await _every_round(attacker, contribute, ranks=MAX_RANKS)


def _dominoes(fragment: FragmentSpec) -> Iterator[Box]:
    """Yield boxes of two neighbours each, shifted by one in every other row."""
    index = max(range(len(fragment.tensors)), key=lambda i: (len(fragment.tensors[i].shape) == 2, fragment.tensors[i].numel))
    shape = fragment.tensors[index].shape
    rows, columns = (shape[0], shape[1]) if len(shape) == 2 else (1, shape[0])
    for row in range(min(rows, 1 + 2 * _BOXES * MAX_RANKS // columns)):
        for column in range(row % 2, columns - 1, 2):
            yield Box(index, (row, column), (1, 2)) if len(shape) == 2 else Box(index, (column,), (2,))


# ---- numbers -----------------------------------------------------------------------------------------------------------------


async def _values(attacker: Attacker, damage: Callable[[Tensor], Tensor], **header: int) -> None:
    """Contribute in every round what the last outer step added to theta, damaged."""

    async def contribute(attendance: Attendance, view: View) -> None:
        member, schema = attendance.member, attendance.schema
        if view.outer_step == 0:
            moved = [torch.randn(each.numel) * 1e-3 for each in schema.fragments]
        else:
            moved = await member.last_update(schema, view.outer_step)
        await member.contribute(view, schema, attendance.config, [damage(each) for each in moved], **header)

    await _every_round(attacker, contribute)


async def noise(attacker: Attacker) -> None:
    """Contribute noise of the same norm as the last update."""

    def damage(moved: Tensor) -> Tensor:
        drawn = torch.randn(moved.numel())
        return drawn.mul_(moved.norm() / drawn.norm())

    await _values(attacker, damage)


async def huge_norm(attacker: Attacker) -> None:
    """Contribute 100 times the last update."""
    await _values(attacker, lambda moved: 100 * moved)


async def reversed_direction(attacker: Attacker) -> None:
    """Contribute -3 times the last update."""
    await _values(attacker, lambda moved: -3 * moved)


async def not_finite(attacker: Attacker) -> None:
    """Contribute NaN and infinite values."""
    value = attacker.chance.choice((float("nan"), float("inf"), float("-inf")))
    await _values(attacker, lambda moved: torch.full_like(moved, value))


async def lying_tokens(attacker: Attacker) -> None:
    """Contribute a plausible update that claims to be the work of a century."""
    await _values(attacker, lambda moved: moved, tokens=1 << 62, inner_steps=1 << 47)


async def random_bytes(attacker: Attacker) -> None:
    """Contribute random bytes of the right length; some of them decode to enormous numbers, some to none."""

    async def contribute(attendance: Attendance, view: View) -> None:
        name = attendance.config.codec.up
        for fragment in attendance.schema.fragments:
            data = attacker.chance.randbytes(codec(name).encoded_size(fragment.numel))
            header = attendance.member.header(view, fragment, attendance.schema, name)
            await attendance.member.send(header, make_chunks(data))

    await _every_round(attacker, contribute)
