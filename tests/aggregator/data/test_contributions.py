"""Shards of one contribution: in any order they become the whole, once; whatever contradicts is the peer's fault."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aggregator import data
from aggregator.data import round_runner
from aggregator.data.contributions import Contributions, ShardedFragment, ShardUpload
from aggregator.storage.upload_buffer import UploadBuffer
from edit.config.codec import CodecChoice, CodecSpec
from edit.config.run import PenaltyConfig
from edit.errors import LocalProtocolError, RemoteProtocolError, StaleError, StorageError
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.fragments.shards import Box, Shard
from edit.merging.merge import MergeRule, measure
from edit.merging.mergers import EditMerger
from edit.rounds import events
from editpb.messages import ContributionHeader, SeenHead
from tests.support.encoded import encode
from tests.support.exhaustive import examples
from tests.support.rounds import open_rounds
from tests.support.served import SCHEMA as SERVED
from tests.support.served import theta

FRAGMENT = FragmentSpec(
    fragment_id=3,
    name="layer",
    tensors=(TensorSpec(name="weight", shape=(6, 4)), TensorSpec(name="bias", shape=(4,)), TensorSpec(name="scale", shape=())),
)

WHOLE = Shard(FRAGMENT)
TOP = Shard(FRAGMENT, [Box(0, (0, 0), (2, 4)), Box(1, (0,), (4,))])
BOTTOM = Shard(FRAGMENT, [Box(0, (2, 0), (4, 4)), Box(2, (), ())])
DELTA = torch.randn(FRAGMENT.numel, generator=torch.Generator().manual_seed(0))


def header(shard: Shard, rank: int = 0, attempt: int = 1, **changes: object) -> ContributionHeader:
    values: dict[str, object] = {
        "run_id": "run",
        "round_id": 5,
        "outer_step": 2,
        "peer_id": "a",
        "fragment_id": 3,
        "schema_hash": "0" * 64,
        "inner_steps": 30,
        "tokens": 900,
        "codec": "fp32",
        "numel": shard.numel,
        "total_bytes": 4 * shard.numel,
        "rank": rank,
        "attempt": attempt,
        "boxes": None if shard.is_whole else shard.boxes,
    }
    return ContributionHeader(**{**values, **changes})  # type: ignore[arg-type]


def declared(fragment: ShardedFragment, head: ContributionHeader) -> ShardUpload:
    shard = fragment.declare(head)
    assert shard is not None
    return shard


def write(shard: ShardUpload, data: bytes) -> None:
    asyncio.run(shard.upload.write(0, data))


def fill(upload: ShardUpload, shard: Shard, delta: Tensor = DELTA) -> None:
    write(upload, bytes(encode("fp32", shard.take(delta)).data))


def arrive(fragment: ShardedFragment, shard: ShardUpload) -> bool:
    return fragment.measured(shard, measure(shard.read()))


def send(fragment: ShardedFragment, shard: Shard, rank: int = 0, attempt: int = 1, delta: Tensor = DELTA) -> bool:
    upload = declared(fragment, header(shard, rank, attempt))
    fill(upload, shard, delta)
    return arrive(fragment, upload)


@pytest.fixture(scope="module")
def files() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as thread:
        yield thread


@pytest.fixture
def buffer(tmp_path: Path, files: Executor) -> UploadBuffer:
    return UploadBuffer(1 << 20, tmp_path, files)


@pytest.fixture
def fragment(buffer: UploadBuffer) -> ShardedFragment:
    return ShardedFragment(FRAGMENT, buffer)


def merged(fragment: ShardedFragment) -> Tensor:
    outcome = EditMerger(PenaltyConfig(enabled=False)).merge(FRAGMENT, [fragment.whole()], {}, MergeRule())
    assert outcome.merged is not None
    return outcome.merged


def test_a_whole_fragment_is_one_part(fragment: ShardedFragment) -> None:
    assert send(fragment, WHOLE)
    contribution = fragment.whole()
    assert (contribution.peer_id, contribution.inner_steps, contribution.tokens) == ("a", 30, 900)
    assert contribution.norm == measure(encode("fp32", DELTA))
    assert not isinstance(contribution.payload, tuple)
    assert torch.equal(merged(fragment), DELTA)


@pytest.mark.parametrize("first", [0, 1])
def test_the_parts_of_two_ranks_in_either_order(fragment: ShardedFragment, first: int) -> None:
    order = [(TOP, 0), (BOTTOM, 1)]
    assert not send(fragment, *order[first])
    with pytest.raises(LocalProtocolError, match="not whole"):
        fragment.whole()
    assert send(fragment, *order[1 - first])
    assert fragment.whole().norm == pytest.approx(float(DELTA.norm()), rel=1e-6)
    assert torch.equal(merged(fragment), DELTA)


def test_a_part_that_is_in_twice_counts_once(fragment: ShardedFragment) -> None:
    assert not send(fragment, TOP)
    again = declared(fragment, header(TOP))
    assert again.upload.complete and again.norm is not None
    assert not fragment.measured(again, 1e9)
    assert send(fragment, BOTTOM, 1)
    assert not fragment.measured(again, 1e9)
    assert fragment.whole().norm == pytest.approx(float(DELTA.norm()), rel=1e-6)


def test_a_fragment_is_whole_only_when_every_part_is_measured(fragment: ShardedFragment) -> None:
    uploads = [declared(fragment, header(shard, rank)) for rank, shard in enumerate((TOP, BOTTOM))]
    for upload, shard in zip(uploads, (TOP, BOTTOM), strict=True):
        fill(upload, shard)
    assert not arrive(fragment, uploads[1])
    assert arrive(fragment, uploads[0])


def test_norms_that_are_not_finite_stay_so(fragment: ShardedFragment) -> None:
    bad = DELTA.clone()
    bad[-1] = torch.nan
    send(fragment, TOP, 0, 1, bad)
    send(fragment, BOTTOM, 1, 1, bad)
    assert math.isnan(fragment.whole().norm)


def test_a_newer_attempt_drops_the_older_parts_and_their_memory(fragment: ShardedFragment, buffer: UploadBuffer) -> None:
    half = declared(fragment, header(TOP, 0))
    fill(half, TOP)
    send(fragment, BOTTOM, 1)
    newer = declared(fragment, header(WHOLE, 0, attempt=2))
    assert buffer.held_bytes == WHOLE.numel * 4
    with pytest.raises(StaleError, match="a newer attempt of this replica has come"):
        write(half, b"x" * 4)
    with pytest.raises(StaleError, match="newer attempt"):
        fragment.check_current(half)
    with pytest.raises(StaleError, match="newer attempt"):
        fragment.measured(half, 1.0)
    with pytest.raises(StaleError, match="newer attempt"):
        fragment.declare(header(TOP, 0, attempt=1))
    fill(newer, WHOLE)
    assert arrive(fragment, newer)


def test_what_is_whole_stays_whatever_comes(fragment: ShardedFragment, buffer: UploadBuffer) -> None:
    send(fragment, TOP)
    send(fragment, BOTTOM, 1)
    held = buffer.held_bytes
    assert fragment.declare(header(WHOLE, 0, attempt=2)) is None
    with pytest.raises(StaleError):
        fragment.declare(header(TOP, 0, attempt=0))
    with pytest.raises(RemoteProtocolError, match="overlap"):
        fragment.declare(header(TOP, 2))
    assert buffer.held_bytes == held
    assert torch.equal(merged(fragment), DELTA)


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (header(WHOLE, 1), "the ranks' shards overlap: 41 elements, the fragment has 29; this rank sends all of it"),
        (header(Shard(FRAGMENT, [Box(0, (1, 0), (4, 4)), Box(2, (), ())]), 1), "weight: two shards overlap"),
        (header(BOTTOM, 1, tokens=901), "rank 1 says tokens = 901, rank 0 says 900"),
        (header(BOTTOM, 1, inner_steps=29), "rank 1 says inner_steps = 29, rank 0 says 30"),
        (header(BOTTOM, 0), "was declared with another numel before"),
        (header(TOP, 0, codec="bf16", total_bytes=24), "was declared with another codec before"),
        (header(TOP, 0, tokens=1), "was declared with another tokens before"),
    ],
)
def test_contradictions_are_found_before_memory_is_taken(
    fragment: ShardedFragment, buffer: UploadBuffer, head: ContributionHeader, reason: str
) -> None:
    send(fragment, TOP)
    held = buffer.held_bytes
    with pytest.raises(RemoteProtocolError, match=reason) as fault:
        fragment.declare(head)
    assert str(fault.value).startswith("contribution of a to round 5, fragment 3, rank ")
    assert buffer.held_bytes == held


def test_a_part_that_the_disk_refused_begins_anew(tmp_path: Path, files: Executor) -> None:
    full = [True]

    def write(descriptor: int, data: memoryview, offset: int) -> int:
        if full[0]:
            raise OSError(28, "No space left on device")
        import os

        return os.pwrite(descriptor, data, offset)

    fragment = ShardedFragment(FRAGMENT, UploadBuffer(0, tmp_path, files, write=write))
    upload = declared(fragment, header(WHOLE))
    with pytest.raises(StorageError, match="No space left"):
        fill(upload, WHOLE)
    full[0] = False
    again = declared(fragment, header(WHOLE))
    assert again is not upload
    with pytest.raises(StaleError):
        fragment.measured(upload, 1.0)
    fill(again, WHOLE)
    assert arrive(fragment, again)


def test_shards_of_spilled_uploads_are_read_when_they_are_merged(tmp_path: Path, files: Executor) -> None:
    fragment = ShardedFragment(FRAGMENT, UploadBuffer(0, tmp_path, files))
    send(fragment, TOP)
    send(fragment, BOTTOM, 1)
    assert len(list(tmp_path.iterdir())) == 2
    assert torch.equal(merged(fragment), DELTA)


@settings(deadline=None, max_examples=examples(60))
@given(st.lists(st.integers(0, 3), min_size=29, max_size=29), st.randoms(use_true_random=False), st.booleans())
def test_any_partition_in_any_order_is_whole_with_its_last_part_and_never_before(
    tmp_path_factory: pytest.TempPathFactory, files: Executor, owners: list[int], order: object, lossy: bool
) -> None:
    """Single elements, dealt to up to 4 ranks: the worst layout there is."""
    places = (
        [Box(0, (i, j), (1, 1)) for i in range(6) for j in range(4)] + [Box(1, (i,), (1,)) for i in range(4)] + [Box(2, (), ())]
    )
    layout = {r: Shard(FRAGMENT, [b for b, owner in zip(places, owners, strict=True) if owner == r]) for r in set(owners)}
    ranks = sorted(layout)
    order.shuffle(ranks)  # type: ignore[attr-defined]
    fragment = ShardedFragment(FRAGMENT, UploadBuffer(1 << 20, tmp_path_factory.mktemp("spill"), files))
    for position, rank in enumerate(ranks):
        assert send(fragment, layout[rank], rank) == (position == len(ranks) - 1)
    assert torch.equal(merged(fragment), DELTA)
    if lossy:  # one element short, and nothing is whole
        short = ShardedFragment(FRAGMENT, UploadBuffer(1 << 20, tmp_path_factory.mktemp("short"), files))
        first = layout[ranks[0]]
        layout[ranks[0]] = Shard(FRAGMENT, first.boxes[1:])
        assert not any(send(short, layout[rank], rank) for rank in ranks if layout[rank].numel)


def test_headers_are_compared_whole(fragment: ShardedFragment) -> None:
    """A field that is added to the header must not slip through a retry."""
    head = header(TOP)
    fragment.declare(head)
    for field in dataclasses.fields(ContributionHeader):
        if field.name in ("rank", "attempt"):
            continue
        changed = dataclasses.replace(head, **{field.name: "other" if field.type == "str" else 77})
        if field.name == "boxes":
            changed = dataclasses.replace(head, boxes=BOTTOM.boxes)
        with pytest.raises(RemoteProtocolError, match=f"another {field.name} before"):
            fragment.declare(changed)


# ---- what is held of each peer ---------------------------------------------------------------------------------------------

SCHEMA = Schema(
    tuple(
        FragmentSpec(
            fragment_id=i,
            name=f"layer{i}",
            tensors=tuple(dataclasses.replace(t, name=f"{i}.{t.name}") for t in FRAGMENT.tensors),
        )
        for i in range(4)
    )
)


@pytest.fixture
def contributions(buffer: UploadBuffer) -> Contributions:
    return Contributions(SCHEMA, CodecChoice(CodecSpec("fp32")), buffer)


def taken(contributions: Contributions, **changes: object) -> ShardUpload:
    shard = contributions.declare(header(WHOLE, **changes), [2, 3])
    assert shard is not None
    return shard


def test_another_codec_than_the_runs_is_the_peers_fault_and_takes_no_memory(
    contributions: Contributions, buffer: UploadBuffer
) -> None:
    with pytest.raises(RemoteProtocolError, match=r"fragment 3, rank 0 is encoded as bf16, the run takes fp32"):
        taken(contributions, codec="bf16", total_bytes=2 * WHOLE.numel)
    assert contributions.of_peer("a") is None and buffer.held_bytes == 0


def test_a_retry_goes_on_with_the_same_upload(contributions: Contributions) -> None:
    shard = taken(contributions)
    assert taken(contributions) is shard and contributions.fragment_of(shard) is not None
    other = taken(contributions, fragment_id=2)
    assert other is not shard
    held = contributions.of_peer("a")
    assert held is not None and held is contributions.find(header(WHOLE))
    assert (held.received_bytes, held.total_bytes) == (0, 2 * 4 * FRAGMENT.numel)
    fill(other, WHOLE)
    assert held.received_bytes == 4 * FRAGMENT.numel


def names(size: int) -> SeenHead:
    return SeenHead(size, size.to_bytes(32, "big"), bytes(64))


def test_a_contribution_names_so_many_heads_of_the_audit_log_over_all_its_shards(
    contributions: Contributions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data.contributions, "MAX_SEEN_OF_PEER", 3)

    def names(size: int, shard: Shard, rank: int, attempt: int = 1, fragment_id: int = 3) -> ShardUpload | None:
        seen = SeenHead(size, bytes(32), bytes(64))
        return contributions.declare(header(shard, rank, attempt, fragment_id=fragment_id, seen=seen), [2, 3])

    assert names(1, TOP, 0) and names(2, BOTTOM, 1) and names(3, TOP, 0, fragment_id=2)
    for _ in range(2):
        with pytest.raises(
            RemoteProtocolError, match="rank 1: names too many heads of the audit log, with those of other shards"
        ):
            names(4, BOTTOM, 1, fragment_id=2)
        assert names(3, TOP, 0, fragment_id=2), "a shard that is known may be sent again"
    assert names(1, BOTTOM, 1, fragment_id=2), "ranks may have seen the same"
    assert names(3, TOP, 0, 2), "the shards of the attempt before, and what these named, are gone"
    assert names(4, BOTTOM, 1, 2)


@pytest.mark.parametrize("change", [{"round_id": 6}, {"outer_step": 3}])
def test_another_round_or_outer_step_is_another_contribution(
    contributions: Contributions, buffer: UploadBuffer, change: dict[str, int]
) -> None:
    shard = taken(contributions)
    assert contributions.find(header(WHOLE, **change)) is None
    newer = taken(contributions, **change)
    assert contributions.find(shard.header) is None and contributions.find(newer.header) is contributions.of_peer("a")
    assert buffer.held_bytes == 4 * FRAGMENT.numel, "the older one is gone"
    with pytest.raises(StaleError, match="a newer contribution of this peer has come"):
        write(shard, b"x")
    with pytest.raises(StaleError, match="round 5 is over, and so is this contribution to it"):
        contributions.fragment_of(shard)


def test_what_is_not_kept_is_dropped_with_the_reason(contributions: Contributions, buffer: UploadBuffer) -> None:
    shards = {peer_id: taken(contributions, peer_id=peer_id) for peer_id in "abc"}
    contributions.drop("a", "bad bytes")
    contributions.keep(["b", "z"], "its round is over")
    assert [contributions.of_peer(peer_id) is not None for peer_id in "abc"] == [False, True, False]
    assert buffer.held_bytes == 4 * FRAGMENT.numel
    for peer_id, reason in (("a", "bad bytes"), ("c", "its round is over")):
        with pytest.raises(StaleError, match=reason):
            write(shards[peer_id], b"x")


def test_who_still_sends_a_fragment_again_as_it_is_merged_is_told_that_it_is_in(tmp_path: Path) -> None:
    """A second stream of the same began before the merge, and goes on after it."""

    async def body() -> None:
        delta = torch.ones(SERVED.fragments[0].numel)
        data = bytes(encode("fp32", delta).data)
        async with open_rounds(tmp_path) as rounds:
            rounds.ready("a")
            header = rounds.header("a", 0, delta)
            shard = rounds.runner.offer(header)
            assert shard is not None and shard is rounds.runner.offer(header)
            merged, drop = asyncio.Event(), shard.upload.drop
            shard.upload.drop = lambda reason: (drop(reason), merged.set())[0]  # type: ignore[method-assign]
            await rounds.runner.receive(shard, 0, data)
            await rounds.runner.receive(shard, 0, data[:12])  # the second stream
            await rounds.runner.arrived(shard)
            await asyncio.wait_for(merged.wait(), 30.0)
            await rounds.runner.receive(shard, 12, data[12:])
            assert shard.upload.complete
            await rounds.runner.arrived(shard)
            assert rounds.runner.offer(header) is None and rounds.machine.round_id == header.round_id
            shard.upload.dropped, shard.merged = "a newer attempt of this replica has come", False
            with pytest.raises(StaleError, match="a newer attempt"):
                await rounds.runner.receive(shard, 12, data[12:])

    asyncio.run(body())


@pytest.mark.parametrize("ends", ["fails", "closes"])
def test_who_is_measured_as_the_round_ends_hears_that_it_is_not_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    began, go_on, measured = threading.Event(), threading.Event(), round_runner._measured

    def slowly(shard: ShardUpload) -> float:
        norm = measured(shard)
        if shard.header.peer_id == "b" and shard.header.fragment_id == 1:
            began.set()
            assert go_on.wait(30.0)
        return norm

    async def body() -> None:
        monkeypatch.setattr(round_runner, "_measured", slowly)
        async with open_rounds(tmp_path) as rounds:
            rounds.ready("a", "b")
            rounds.runner.feed(events.Tick())
            round_id = rounds.machine.round_id
            if ends == "closes":
                await rounds.contribute("a", theta())
            late = asyncio.ensure_future(rounds.contribute("b", theta()))
            assert await asyncio.to_thread(began.wait, 30.0)
            event = events.Close("said the test") if ends == "closes" else events.RoundFailed(round_id, "said the test")
            rounds.runner.feed(event)
            go_on.set()
            with pytest.raises(StaleError, match="ended while this" if ends == "fails" else "is closed: said the test"):
                await late
            if ends == "closes":
                await rounds.closed(round_id)
                assert rounds.outer.outer_step == 1

    asyncio.run(body())
