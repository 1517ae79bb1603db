"""Who waits for what is staged of the coming update: for how long, how many, and what becomes of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from aggregator.data.published import AHEAD_S, MAX_WAITING, ComingUpdate, PublishedState
from edit.errors import BusyError
from edit.fragments.shards import Shard
from edit.records import EncodedTensor
from editpb.messages import UpdateRequest
from tests.support.encoded import encode
from tests.support.loops import pass_time, run_held
from tests.support.rounds import open_rounds
from tests.support.served import SCHEMA

ROUND = 7
WHOLE = tuple(map(Shard, SCHEMA.fragments))
STEPS: Sequence[EncodedTensor] = [encode("fp32", torch.ones(fragment.numel)) for fragment in SCHEMA.fragments]
SIZES = tuple(memoryview(step.data).nbytes for step in STEPS)


def wanted(offset: int = 0, round_id: int = ROUND, outer_step: int = 1) -> UpdateRequest:
    return UpdateRequest("run-0a1b2c3d", outer_step, WHOLE, offset, round_id=round_id)


@asynccontextmanager
async def open_round(path: Path) -> AsyncIterator[PublishedState]:
    """Of a run at outer step 0, in a round that no machine knows."""
    async with open_rounds(path) as rounds:
        rounds.published.open_round(ROUND, (0, 1))
        yield rounds.published


async def asking(published: PublishedState, *requests: UpdateRequest) -> list[asyncio.Task[ComingUpdate | None]]:
    """Ask, and return when all wait or have their answer."""
    tasks = [asyncio.create_task(published.coming(each)) for each in requests]
    await settled()
    return tasks


async def settled() -> None:
    """Let everything go on that need not wait."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_call_waits_for_what_is_staged_only_so_long(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_round(tmp_path) as published:
            published.stage(ROUND, 0, STEPS[0])
            (waiting,) = await asking(published, wanted(SIZES[0]))
            pass_time(AHEAD_S - 0.1)
            await settled()
            assert not waiting.done()
            pass_time(0.2)
            coming = await waiting
            assert coming is not None and [i for i, _ in coming.fragments] == [0], "its round goes on"
            (again,) = await asking(published, wanted(SIZES[0]))
            pass_time(AHEAD_S - 0.1)
            published.stage(ROUND, 1, STEPS[1])
            await settled()
            assert again.done() and again.result() is coming

    run_held(scenario())


def test_a_call_whose_round_ends_as_its_time_does_is_told_that_it_is_over(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_round(tmp_path) as published:
            (waiting,) = await asking(published, wanted())
            pass_time(AHEAD_S + 0.1)
            published.end_round()
            assert await waiting is None

    run_held(scenario())


def test_only_so_many_wait_and_each_that_ends_leaves_its_place(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_round(tmp_path) as published:
            waiting = await asking(published, *[wanted()] * MAX_WAITING)
            with pytest.raises(BusyError, match=f"{MAX_WAITING} others wait"):
                await published.coming(wanted())
            waiting.pop().cancel()
            await settled()
            waiting += await asking(published, wanted())
            assert not waiting[-1].done()
            published.end_round()
            assert await asyncio.gather(*waiting) == [None] * MAX_WAITING
            published.open_round(ROUND + 1, (0, 1))
            (next_one,) = await asking(published, wanted(round_id=ROUND + 1))
            assert not next_one.done(), "the places are free again"
            next_one.cancel()

    run_held(scenario())


def test_who_need_not_wait_is_not_refused_because_others_do(tmp_path: Path) -> None:
    """What is staged already, and an update that is committed while the next round fills the places."""

    async def scenario() -> None:
        async with open_round(tmp_path) as published:
            published.stage(ROUND, 0, STEPS[0])
            waiting = await asking(published, *[wanted(SIZES[0])] * MAX_WAITING)
            coming = await published.coming(wanted())
            assert coming is not None and coming.round_id == ROUND
            assert await published.coming(wanted(round_id=ROUND - 1)) is None
            for each in waiting:
                each.cancel()

    run_held(scenario())
