"""Snapshots and commits: theta is written in place, and who reads a snapshot reads one outer step, to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from aggregator.run_feed import RunEvent, RunFeed
from aggregator.storage.journal import Disk
from aggregator.storage.journal_records import records
from edit.fragments.digest import digest
from editpb import tensors_pb2 as pb
from editpb.messages import SnapshotRequest
from editpb.run_status import RoundReport
from editpb.snapshot_cache import KEPT_S
from tests.support.rounds import FailingFsync, HeldFsync, Rounds, open_rounds
from tests.support.served import SCHEMA, TOML, theta

ONES = [torch.ones(fragment.numel) for fragment in SCHEMA.fragments]


async def commit(rounds: Rounds, number: int) -> None:
    rounds.ready("a")
    await rounds.contribute("a", ONES)
    await rounds.closed(number)
    assert rounds.outer.outer_step == number


def chunks(rounds: Rounds, outer_step: int, fragment_id: int) -> Iterator[pb.Chunk]:
    wanted = SnapshotRequest(run_id=rounds.folder.run_id, outer_step=outer_step, fragment_id=fragment_id)
    return rounds.published.snapshot_chunks(wanted)


def read(rounds: Rounds, outer_step: int) -> str:
    parts = [b"".join(chunk.data for chunk in chunks(rounds, outer_step, i)) for i in range(len(SCHEMA.fragments))]
    return digest([torch.frombuffer(bytearray(part), dtype=torch.float32) for part in parts])


def test_a_described_snapshot_stays_what_it_is_while_commits_come(tmp_path: Path) -> None:
    async def body() -> None:
        async with open_rounds(tmp_path) as rounds:
            first = await rounds.published.describe_snapshot()
            begun = chunks(rounds, 0, 0)
            await commit(rounds, 1)
            second = await rounds.published.describe_snapshot()
            await commit(rounds, 2)
            assert [first.outer_step, second.outer_step] == [0, 1]
            assert read(rounds, 0) == first.digest == digest(theta())
            assert read(rounds, 1) == second.digest == digest([t - 1 for t in theta()])
            assert rounds.published.digest == rounds.outer.digest == digest([t - 1 - 1 for t in theta()])
            rounds.readers.ahead_s += KEPT_S + 1
            rounds.published.tick()
            await commit(rounds, 3)
            assert b"".join(chunk.data for chunk in begun) == theta()[0].numpy().tobytes(), "who has begun reads to the end"

    asyncio.run(body())


def test_theta_is_written_in_place_once_nobody_reads_it_any_more(tmp_path: Path) -> None:
    async def body() -> None:
        async with open_rounds(tmp_path) as rounds:
            first = rounds.outer.to_tensors()["theta.0"]
            await commit(rounds, 1)
            assert rounds.outer.to_tensors()["theta.0"] is first
            await rounds.published.describe_snapshot()
            await commit(rounds, 2)
            assert (copied := rounds.outer.to_tensors()["theta.0"]) is not first, "a reader has the one before"
            await rounds.published.describe_snapshot()
            rounds.readers.ahead_s += KEPT_S + 1
            rounds.published.tick()
            await commit(rounds, 3)
            assert rounds.outer.to_tensors()["theta.0"] is copied

    asyncio.run(body())


def test_who_asks_while_a_commit_changes_theta_gets_the_snapshot_after_it(tmp_path: Path) -> None:
    fsync = HeldFsync()

    async def body() -> None:
        async with open_rounds(tmp_path, Disk(fsync=fsync)) as rounds:
            rounds.ready("a")
            fsync.hold()
            await rounds.contribute("a", ONES)
            await fsync.begun()
            asked = asyncio.ensure_future(rounds.published.describe_snapshot())
            await asyncio.sleep(0)
            assert not asked.done() and rounds.published.outer_step == 0
            fsync.release()
            assert (await asked).outer_step == 1
            assert read(rounds, 1) == digest([t - 1 for t in theta()])

    asyncio.run(body())


def test_a_commit_that_the_disk_refuses_gives_theta_back_to_readers(tmp_path: Path) -> None:
    fsync = FailingFsync(OSError(5, "no disk"))

    async def body() -> None:
        async with open_rounds(tmp_path, Disk(fsync=fsync)) as rounds:
            rounds.ready("a")
            fsync.fail_once()
            await rounds.contribute("a", ONES)
            await rounds.closed(1)
            assert rounds.outer.outer_step == 0
            assert (await rounds.published.describe_snapshot()).digest == digest(theta())

    asyncio.run(body())


GROWING = "context = 1\n[inner]\nbatch_size = 1\naccumulation = 2\nbatch_growth = 4\n[sync]"


def test_a_commit_says_the_batch_that_was_merged_where_it_may_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A contribution of `Rounds` is of 2 inner steps and 10 tokens."""
    said, publish = list[int](), RunFeed.publish

    def note(feed: RunFeed, event: RunEvent) -> None:
        if isinstance(event, RoundReport):
            said.append(event.batch)
        publish(feed, event)

    monkeypatch.setattr(RunFeed, "publish", note)

    async def body() -> None:
        async with open_rounds(tmp_path, toml=TOML.replace("[sync]", GROWING)) as rounds:
            await commit(rounds, 1)
            (header,) = [each.header for each in records(rounds.journal) if each.header["kind"] == "commit"]
            assert header["in_force"]["batch"] == 5

    asyncio.run(body())
    assert said == [5]
