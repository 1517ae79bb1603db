"""What a replica announces of its shards costs the coordinator no more than its size, and stays what Hello announced."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.fragments.shards import Box, Shard
from editpb.data_messages import contribution_header_to_pb
from tests.support.served import BarePeer, found_run, new_folder, served, sharded, theta

RANKS = 64
WIDTH = 16 * RANKS + 1
SCHEMA = Schema((FragmentSpec(fragment_id=0, name="w", tensors=(TensorSpec(name="w", shape=(3, WIDTH)),)),))


def interlocked() -> list[list[Box]]:
    """By rank: dominoes in the first and last row, shifted by one and tied to the middle: no straight cut parts them."""
    first = [Box(0, (0, 0), (2, 1))] + [Box(0, (0, i), (1, 2)) for i in range(1, WIDTH, 2)]
    last = [Box(0, (2, i), (1, 2)) for i in range(0, WIDTH - 1, 2)] + [Box(0, (1, WIDTH - 1), (2, 1))]
    boxes = [*first, Box(0, (1, 1), (1, WIDTH - 2)), *last]
    return [boxes[i : i + 16] for i in range(0, len(boxes), 16)]


async def declare(peer: BarePeer, round_id: int, boxes: list[Box], rank: int) -> None:
    shard = Shard(SCHEMA.fragments[0], boxes)
    values = {"boxes": shard.boxes, "numel": shard.numel, "rank": rank}
    await peer.data.Probe(contribution_header_to_pb(peer.header(round_id, 0, 0, 4 * shard.numel, values)))


def test_the_boxes_of_many_ranks_are_checked_without_comparing_each_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[Box] = []
    overlaps = Box.overlaps

    def counted(self: Box, other: Box) -> bool:
        compared.append(other)
        return overlaps(self, other)

    async def scenario() -> None:
        parts = interlocked()
        async with served(new_folder(tmp_path / "run")) as at, at.replica("a", len(parts), SCHEMA) as ranks:
            view = await found_run(ranks[0])
            monkeypatch.setattr(Box, "overlaps", counted)
            for rank, boxes in enumerate(parts):
                await declare(ranks[0], view.round_id, boxes, rank)
            monkeypatch.undo()
        assert len(compared) <= 2 * 120 * len(parts), "within a rank only, at most 16 * 15 / 2 pairs, by each side"

    asyncio.run(scenario())


def test_a_rank_that_hello_did_not_announce_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as at, at.peer("a") as honest, at.replica("b", 2) as ranks:
            view = await found_run(honest)
            await ranks[0].attend()
            await ranks[0].report(0)
            shard = sharded(honest.schema, 3, 0)[2][0]
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await ranks[0].contribute_part(view.round_id, 0, shard, theta()[0], rank=2)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "rank is 2, but Hello announced ranks = 2" in str(refused.value.details())

    asyncio.run(scenario())


def test_what_is_kept_of_the_shards_beside_their_bytes_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that declare one element each, of every fragment: no more of them than there is room for, whatever is announced."""
    monkeypatch.setattr("aggregator.data.contributions.MAX_PIECES", 9 * 20)

    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as at, at.peer("honest") as honest, at.replica("b", 40) as ranks:
            view = await found_run(honest)
            await ranks[0].attend()
            await ranks[0].report(0)
            declared, fragment = 0, honest.schema.fragments[1]
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                for rank in range(40):
                    shard = Shard(fragment, [Box(0, (rank,), (1,))])
                    header = ranks[0].header(view.round_id, 0, 1, 4, {"boxes": shard.boxes, "numel": 1, "rank": rank})
                    await ranks[0].data.Probe(contribution_header_to_pb(header))
                    declared += 1
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "the ranks' shards are too many and too small" in str(refused.value.details())
            assert declared == 20
            await honest.contribute(view.round_id, 0, theta(1))
            await honest.view(lambda view: view.outer_step == 1)

    asyncio.run(scenario())
