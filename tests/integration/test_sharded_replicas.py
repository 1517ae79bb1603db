"""A real coordinator and replicas of several ranks: parts from different layouts in one run, cut updates, streaming groups."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest
import torch
from torch import Tensor

from aggregator.resources import Clock
from aggregator.storage.store import load_outer
from edit.fragments.digest import digest
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.fragments.shards import Box, Shard
from edit.records import Commit, Verdict
from edit.rounds import events
from editpb import control_pb2, data_pb2
from editpb.data_messages import contribution_header_to_pb
from editpb.messages import Expel, View
from editpb.transport.chunks import make_chunks
from tests.support.encoded import decode_shard
from tests.support.exhaustive import rarely
from tests.support.served import (
    TOML,
    BarePeer,
    Layout,
    Served,
    contribute_sharded,
    found_run,
    new_folder,
    served,
    sharded,
    theta,
)


def _fragment(i: int, **shapes: tuple[int, ...]) -> FragmentSpec:
    tensors = tuple(TensorSpec(name=f"layer{i}.{name}", shape=shape) for name, shape in shapes.items())
    return FragmentSpec(fragment_id=i, name=f"layer{i}", tensors=tensors)


SCHEMA = Schema(
    (
        _fragment(0, weight=(7, 4), bias=(4,), scale=()),
        _fragment(1, weight=(2, 3, 5)),
        _fragment(2, weight=(30, 20), bias=(1,)),
        _fragment(3, gain=()),
    )
)
ALL = range(len(SCHEMA.fragments))
ONE, ROWS_2, ROWS_3, COLUMNS_2 = (sharded(SCHEMA, n, d) for n, d in ((1, 0), (2, 0), (3, 0), (2, -1)))
GROUPS = "[sync]\ngroups = 2"
INT8, TOPK, STAT2 = (TOML.replace('down = "fp32"', f'down = "{text}"') for text in ("int8", "topk:k=9", "stat2:block=64"))


def delta(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [0.1 * torch.randn(fragment.numel, generator=generator) for fragment in SCHEMA.fragments]


def some(seed: int, due: Sequence[int] = ALL) -> dict[int, Tensor]:
    return {i: delta(seed)[i] for i in due}


async def enter(replicas: Sequence[Sequence[BarePeer]], outer_step: int = 0) -> View:
    """Everybody attends, the first one founds a new run; returns the view with the round that expects all."""
    first = replicas[0][0]
    for ranks in replicas:
        for peer in ranks:
            await peer.attend()
    if (await first.view()).found:
        await first.found(theta(0, SCHEMA))
    for ranks in replicas:
        await ranks[0].report(outer_step)
    return await first.view(lambda v: v.round_id > 0)


async def advance(replicas: Sequence[Sequence[BarePeer]], step: int, due: Sequence[int], layouts: Sequence[Layout]) -> None:
    """One commit: replica i contributes delta(10 * step + i), and every rank hears of it."""
    view = await replicas[0][0].view(lambda v: v.outer_step == step and v.round_id > 0)
    for i, (ranks, layout) in enumerate(zip(replicas, layouts, strict=True)):
        await contribute_sharded(ranks, layout, view.round_id, step, some(10 * step + i, due), attempt=step + 1)
    for ranks in replicas:
        for peer in ranks:
            await peer.view(lambda v: v.outer_step == step + 1)
        await ranks[0].report(step + 1)


def put_together(commits: Sequence[Commit], layout: Layout, fragment_id: int) -> Tensor:
    """The step of one fragment out of what each rank got of it."""
    whole = torch.full((SCHEMA.fragments[fragment_id].numel,), torch.nan)
    for commit, shards in zip(commits, layout, strict=True):
        payload = next(f.payload for f in commit.fragments if f.fragment_id == fragment_id)
        assert payload is not None
        shards[fragment_id].put(decode_shard(payload, shards[fragment_id]), whole)
    return whole


@pytest.mark.parametrize("toml", [TOML, INT8, TOPK, STAT2], ids=["fp32", "int8", "topk", "stat2"])
def test_replicas_of_one_two_and_three_ranks_give_the_bits_that_whole_ones_give(tmp_path: Path, toml: str) -> None:
    layouts = [ONE, COLUMNS_2, ROWS_3]

    async def whole(run: Served) -> str:
        async with run.peer("a", SCHEMA) as a, run.peer("b", SCHEMA) as b, run.peer("c", SCHEMA) as c:
            replicas = [[a], [b], [c]]
            await enter(replicas)
            await advance(replicas, 0, ALL, [ONE] * 3)
            await advance(replicas, 1, ALL, [ONE] * 3)
            return (await a.view(lambda v: v.outer_step == 2)).digest

    async def in_parts(run: Served) -> str:
        async with (
            run.replica("a", 1, SCHEMA) as a,
            run.replica("b", 2, SCHEMA) as b,
            run.replica("c", 3, SCHEMA) as c,
        ):
            replicas = [a, b, c]
            await enter(replicas)
            await advance(replicas, 0, ALL, layouts)
            before = theta(0, SCHEMA)
            everything = await a[0].fetch(1)
            for ranks, layout in zip(replicas, layouts, strict=True):
                commits = [await peer.fetch(1, shards=shards) for peer, shards in zip(ranks, layout, strict=True)]
                assert {commit.digest for commit in commits} == {everything.digest}
                steps = [put_together(commits, layout, i) for i in ALL]
                assert digest([t - s for t, s in zip(before, steps, strict=True)]) == everything.digest
            await advance(replicas, 1, ALL, layouts)
            return (await c[2].view(lambda v: v.outer_step == 2)).digest

    async def scenario() -> None:
        async with served(new_folder(tmp_path / "whole", start=3, toml=toml)) as run:
            expected = await whole(run)
        async with served(new_folder(tmp_path / "parts", start=3, toml=toml)) as run:
            assert await in_parts(run) == expected

    asyncio.run(scenario())


def test_the_same_boxes_get_the_same_bytes_and_no_more_than_they_need(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run", toml=INT8)) as run, run.replica("a", 2, SCHEMA) as ranks:
            await enter([ranks])
            await advance([ranks], 0, ALL, [ROWS_2])
            shards = ROWS_2[1]
            commits = [await peer.fetch(1, shards=shards) for peer in ranks]
            one, other = ([(p.numel, bytes(p.data)) for f in c.fragments if (p := f.payload)] for c in commits)
            assert one == other
            assert [numel for numel, _ in one] == [33, 30, 601 - 256, 0], "whole blocks of 256; nothing of the last"
            assert len(one[-1][1]) == 0

    asyncio.run(scenario())


def test_a_rank_reads_its_region_of_a_snapshot_and_goes_on_where_it_broke(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.replica("a", 2, SCHEMA) as ranks:
            await enter([ranks])
            manifest = await ranks[1].data.DescribeSnapshot(data_pb2.SnapshotManifestRequest(run_id=ranks[1].run_id))
            assert manifest.outer_step == 0
            for peer, shards in zip(ranks, COLUMNS_2, strict=True):
                for region in (each for each in shards if each.numel):
                    expected = region.take(theta(0, SCHEMA)[region.fragment.fragment_id]).numpy().tobytes()
                    assert await peer.snapshot_part(0, region) == expected
                    assert await peer.snapshot_part(0, region, offset=len(expected) - 4) == expected[-4:]
                    assert await peer.snapshot_part(0, region, offset=len(expected)) == b""

    asyncio.run(scenario())


OVERLAP = (Box(0, (0, 0), (4, 4)), Box(1, (0,), (4,)), Box(2, (), ()))
DOUBLE = (Box(0, (0, 0), (3, 4)), Box(1, (0,), (2,)))


@pytest.mark.parametrize(
    ("boxes", "changes", "words"),
    [
        (OVERLAP, {}, "the ranks' shards overlap: 40 elements, the fragment has 33"),
        (DOUBLE, {}, "two shards overlap"),
        (None, {}, "the ranks' shards overlap: 52 elements"),
        (ROWS_2[1][0].boxes, {"tokens": 11}, "rank 1 says tokens = 11, rank 0 says 10"),
        (ROWS_2[1][0].boxes, {"inner_steps": 3}, "rank 1 says inner_steps = 3, rank 0 says 2"),
        (ROWS_2[1][0].boxes, {"rank": 0}, "was declared with another numel before"),
    ],
    ids=["too much", "overlap", "whole", "tokens", "inner_steps", "rank twice"],
)
def test_parts_that_contradict_one_another_are_the_peers_fault(
    tmp_path: Path, boxes: tuple[Box, ...] | None, changes: dict[str, object], words: str
) -> None:
    async def scenario() -> None:
        async with (
            served(new_folder(tmp_path / "run", start=2)) as run,
            run.replica("a", 2, SCHEMA) as a,
            run.peer("b", SCHEMA) as b,
        ):
            view = await enter([[b], a])
            await a[0].contribute_part(view.round_id, 0, ROWS_2[0][0], delta(1)[0])
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await a[1].contribute_part(view.round_id, 0, Shard(SCHEMA.fragments[0], boxes), delta(1)[0], **changes)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert words in refused.value.details()
            await b.contribute(view.round_id, 0, delta(2))
            after = await b.view(lambda v: v.outer_step == 1)
            assert "refused: a" in after.last_reason
            assert after.digest == digest([t - d for t, d in zip(theta(0, SCHEMA), delta(2), strict=True)])

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ((Box(0, (6, 0), (2, 4)),), "no box at [6, 0] of [2, 4] lies in it"),
        ((Box(7, (0,), (1,)),), "tensor is 7"),
    ],
)
def test_boxes_outside_the_model_are_refused(tmp_path: Path, boxes: tuple[Box, ...], words: str) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.peer("a", SCHEMA) as a:
            view = await found_run(a)
            header = a.header(view.round_id, 0, 0, 32, {"boxes": boxes, "numel": 8})
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await a.send(header, [])
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert words in refused.value.details()

    asyncio.run(scenario())


class Hands:
    """A clock that a test sets."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_parts_that_never_cover_the_fragment_cost_the_deadline_and_not_the_round(tmp_path: Path) -> None:
    async def scenario() -> None:
        toml = TOML.replace("1000.0", "5.0")
        hands = Hands()
        async with (
            served(new_folder(tmp_path / "run", start=2, toml=toml), Clock(hands.monotonic)) as run,
            run.replica("a", 2, SCHEMA) as a,
            run.peer("b", SCHEMA) as b,
        ):
            view = await enter([[b], a])
            await contribute_sharded(a[:1], ROWS_2[:1], view.round_id, 0, some(1))  # rank 1 never sends
            await b.contribute(view.round_id, 0, delta(2))
            machine = run.coordinator.run.rounds.machine
            hands.now = 4.9
            run.coordinator.run._tell_rounds(events.Tick())
            assert (machine.round_id, machine.phase) == (view.round_id, events.Phase.COLLECTING)
            hands.now = 5.1
            after = await b.view(lambda v: v.outer_step == 1)
            assert after.last_reason == "deadline: 1 of 2 in, quorum 1 (missing: a in part)"
            # The last fragment is a scalar, rank 0's alone: it was whole and counts.
            mean = delta(2)
            mean[3] = delta(1)[3] * 0.5 + delta(2)[3] * 0.5
            assert after.digest == digest([t - d for t, d in zip(theta(0, SCHEMA), mean, strict=True)])

    asyncio.run(scenario())


def test_a_newer_attempt_replaces_what_is_not_whole_and_an_older_one_is_stale(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.replica("a", 2, SCHEMA) as a:
            view = await enter([a])
            part = (view.round_id, 0)
            await a[0].contribute_part(*part, ROWS_2[0][0], delta(1)[0], attempt=7)  # then the replica was killed
            await a[0].contribute_part(*part, ROWS_2[0][3], delta(1)[3], attempt=7)  # whole: it stays
            for peer, shards in zip(a, COLUMNS_2, strict=True):  # and came back with another layout
                await peer.contribute_part(*part, shards[0], delta(2)[0], attempt=8, tokens=99)
            with pytest.raises(grpc.aio.AioRpcError) as stale:
                await a[1].contribute_part(*part, ROWS_2[1][2], delta(1)[2], attempt=7)
                await a[0].contribute_part(*part, ROWS_2[0][2], delta(2)[2], attempt=8)
                await a[1].contribute_part(*part, ROWS_2[1][2], delta(1)[2], attempt=7)
            assert stale.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "newer attempt" in stale.value.details()
            receipt = await a[0].contribute_part(*part, ROWS_2[0][3], delta(2)[3], attempt=8)
            assert (receipt.complete, receipt.received_bytes) == (True, 4)
            probed = a[0].header(*part, 3, 4, {"attempt": 9})
            probe = await a[0].data.Probe(contribution_header_to_pb(probed))
            assert (probe.complete, probe.received_bytes) == (True, 4)
            await a[1].contribute_part(*part, ROWS_2[1][2], delta(2)[2], attempt=8)
            await contribute_sharded(a, ROWS_2, view.round_id, 0, some(2, [1]), attempt=8)
            after = await a[1].view(lambda v: v.outer_step == 1)
            took = [delta(2)[0], delta(2)[1], delta(2)[2], delta(1)[3]]
            assert after.digest == digest([t - d for t, d in zip(theta(0, SCHEMA), took, strict=True)])

    asyncio.run(scenario())


def test_a_part_that_broke_resumes_and_a_repeated_one_counts_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.replica("a", 2, SCHEMA) as a:
            view = await enter([a])
            region = ROWS_2[1][2]
            data = region.take(delta(1)[2]).numpy().tobytes()
            header = a[1].header(view.round_id, 0, 2, len(data), {"boxes": region.boxes, "numel": region.numel})
            receipt = await a[1].send(header, list(make_chunks(data, 256))[:2])
            assert (receipt.complete, receipt.received_bytes) == (False, 512)
            probe = await a[1].data.Probe(contribution_header_to_pb(header))
            assert probe.received_bytes == 512
            assert (await a[1].send(header, make_chunks(data, 256, start=512))).complete
            assert (await a[1].send(header, make_chunks(data, 256))).complete
            await contribute_sharded(a[:1], ROWS_2[:1], view.round_id, 0, some(1))
            await contribute_sharded(a[1:], ROWS_2[1:], view.round_id, 0, some(1, [0, 1, 3]))
            after = await a[0].view(lambda v: v.outer_step == 1)
            assert after.digest == digest([t - d for t, d in zip(theta(0, SCHEMA), delta(1), strict=True)])

    asyncio.run(scenario())


def test_norms_and_verdicts_are_of_the_whole_replica(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            served(new_folder(tmp_path / "run", start=2)) as run,
            run.replica("a", 2, SCHEMA) as a,
            run.peer("b", SCHEMA) as b,
        ):
            view = await enter([[b], a])
            bad = delta(1)
            bad[2][-1] = torch.inf  # in rank 0's part alone
            await contribute_sharded(a, ROWS_2, view.round_id, 0, dict(enumerate(bad)))
            await b.contribute(view.round_id, 0, delta(2))
            await b.view(lambda v: v.outer_step == 1)
            commit = await a[1].fetch(1, shards=ROWS_2[1])
            verdicts = [fragment.verdict_of("a") for fragment in commit.fragments]
            assert [v.verdict for v in verdicts if v] == [Verdict.OK, Verdict.OK, Verdict.NONFINITE, Verdict.OK]
            assert verdicts[0] is not None and verdicts[0].norm == pytest.approx(float(delta(1)[0].norm()), rel=1e-6)

    asyncio.run(scenario())


# ---- attendance of ranks ---------------------------------------------------------------------------------------------------


def test_other_ranks_see_the_run_and_are_no_members_of_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            served(new_folder(tmp_path / "run")) as run,
            run.replica("a", 2, SCHEMA) as a,
            run.channel("eye", "observer") as channel,
        ):
            eye = BarePeer("eye", a[0].run_id, channel, SCHEMA)
            welcome = await a[1].attend()  # before rank 0
            assert welcome.peer_id == "a"
            assert not (await a[1].view()).found
            await a[1].report(0)
            assert (await eye.control.Status(control_pb2.StatusRequest())).members[0].state == "invited"
            view = await found_run(a[0])
            assert (await a[1].view(lambda v: v.round_id > 0)).round_id == view.round_id
            members = (await eye.control.Status(control_pb2.StatusRequest())).members
            assert [(m.peer_id, m.state) for m in members] == [("a", "training")]

    asyncio.run(scenario())


def test_a_replica_that_lost_a_rank_is_not_waited_for_until_rank_0_reports_again(tmp_path: Path) -> None:
    """Neither the deadline nor the lease can help here: no time passes."""

    async def scenario() -> None:
        async with (
            served(new_folder(tmp_path / "run", start=2)) as run,
            run.replica("a", 2, SCHEMA) as a,
            run.peer("b", SCHEMA) as b,
        ):
            view = await enter([[b], a])
            await b.contribute(view.round_id, 0, delta(2))
            await a[1].disconnect()
            after = await b.view(lambda v: v.outer_step == 1)
            assert after.last_reason == "the only contributor in (lost: a)"
            await b.report(1)
            again = BarePeer("a", a[1].run_id, a[1].channel, SCHEMA, 1, 2)
            await again.attend()
            await a[0].report(1)
            opened = await b.view(lambda v: v.outer_step == 1 and v.round_id > view.round_id)
            await contribute_sharded([a[0], again], ROWS_2, opened.round_id, 1, some(4))
            await b.contribute(opened.round_id, 1, delta(5))
            after = await again.view(lambda v: v.outer_step == 2)
            commit = await again.fetch(2, shards=ROWS_2[1])
            assert all(fragment.verdict_of("a") for fragment in commit.fragments)
            await again.disconnect()

    asyncio.run(scenario())


def test_a_rank_that_says_goodbye_is_no_loss(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.replica("a", 2, SCHEMA) as a:
            view = await enter([a])
            await a[1].goodbye()
            assert run.coordinator.run.rounds.machine.expected == {"a"}
            await contribute_sharded(a, ROWS_2, view.round_id, 0, some(1))
            after = await a[0].view(lambda v: v.outer_step == 1)
            assert after.last_reason == "the only contributor in"

    asyncio.run(scenario())


def test_streams_of_ranks_that_were_replaced_are_closed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as run, run.replica("a", 3, SCHEMA) as old:
            await enter([old])
            again = BarePeer("a", old[1].run_id, old[1].channel, SCHEMA, 1, 3)
            await again.attend()
            assert "replaced by a newer connection" in (await old[1].receive(Expel)).reason
            smaller = BarePeer("a", old[0].run_id, old[0].channel, SCHEMA, 0, 2)
            await smaller.attend()
            assert "replaced" in (await old[0].receive(Expel)).reason
            assert (await old[2].receive(Expel)).reason == "the replica has 2 ranks now; rank 2 is none of them"
            await smaller.report(0)
            view = await again.view(lambda v: v.round_id > 0)
            await contribute_sharded([smaller, again], ROWS_2, view.round_id, 0, some(1))
            await again.view(lambda v: v.outer_step == 1)
            for peer in (again, smaller):
                await peer.disconnect()

    asyncio.run(scenario())


def test_an_eviction_ends_every_rank(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            served(new_folder(tmp_path / "run")) as run,
            run.replica("a", 3, SCHEMA) as a,
            run.channel("op", "operator") as channel,
        ):
            await enter([a])
            operator = BarePeer("op", a[0].run_id, channel, SCHEMA)
            await operator.control.Evict(control_pb2.EvictRequest(peer_id="a", reason="key lost"))
            for peer in a:
                expel = await peer.receive(Expel)
                assert (expel.evicted, expel.reason) == (True, "key lost")

    asyncio.run(scenario())


# ---- streaming groups ------------------------------------------------------------------------------------------------------

STREAMING = TOML.replace("[sync]", GROUPS)
DUE = [(0, 2), (1, 3)]


@pytest.mark.parametrize("kill_after", rarely([None, 1, 2, 3, 4, 5], kept=[None, 3]))
def test_groups_advance_one_after_the_other_and_survive_a_kill_bit_for_bit(tmp_path: Path, kill_after: int | None) -> None:
    """Checkpoints at steps 3 and 6: kills before, at and after one, within either group."""

    async def run_steps(path: Path, kills: set[int]) -> str:
        folder, step = new_folder(path, start=2, toml=STREAMING), 0
        while step < 7:
            async with (
                served(folder, kill=True) as run,
                run.replica("a", 2, SCHEMA) as a,
                run.replica("b", 3, SCHEMA) as b,
            ):
                await enter([a, b], step)
                if step:
                    last = await a[1].fetch(step, due=DUE[(step - 1) % 2], shards=ROWS_2[1])
                    assert last.digest == (await a[1].view()).digest, "the last update outlives the kill"
                while step < 7:
                    await advance([a, b], step, DUE[step % 2], [ROWS_2, ROWS_3])
                    step += 1
                    if step in kills:
                        kills.discard(step)
                        break
        return load_outer(folder).digest

    async def scenario() -> None:
        expected = theta(0, SCHEMA)
        for step in range(7):
            for i in DUE[step % 2]:
                expected[i] = expected[i] - (delta(10 * step)[i] * 0.5 + delta(10 * step + 1)[i] * 0.5)
        assert await run_steps(tmp_path / "run", {kill_after} - {None}) == digest(expected)

    asyncio.run(scenario())


def test_a_fragment_that_is_not_due_is_refused_and_an_update_holds_its_group_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            served(new_folder(tmp_path / "run", toml=STREAMING)) as run,
            run.peer("a", SCHEMA) as a,
            run.peer("b", SCHEMA) as b,
        ):
            view = await found_run(a)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await a.contribute_part(view.round_id, 0, Shard(SCHEMA.fragments[1]), delta(1)[1])
            assert "fragment 1 is not exchanged from outer step 0; 0, 2 are" in refused.value.details()
            await a.disconnect()
            await b.attend()
            await b.report(0)
            view = await b.view(lambda v: v.round_id > view.round_id)
            await contribute_sharded([b], ONE, view.round_id, 0, some(3, DUE[0]))
            await b.view(lambda v: v.outer_step == 1)
            commit = await b.fetch(1, due=DUE[0])
            assert [fragment.fragment_id for fragment in commit.fragments] == [0, 2]

    asyncio.run(scenario())


def test_more_groups_than_fragments_are_told_to_the_first_peer(tmp_path: Path) -> None:
    async def scenario() -> None:
        toml = TOML.replace("every = 2", "every = 10").replace("[sync]", "[sync]\ngroups = 5")
        async with served(new_folder(tmp_path / "run", toml=toml)) as run, run.peer("a", SCHEMA) as a:
            await a.open_stream()
            expel = await a.receive(Expel)
            assert not expel.evicted
            assert expel.reason == "sync.groups = 5: the model has 4 fragments, so at most 4 groups"

    asyncio.run(scenario())
