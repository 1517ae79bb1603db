"""ShardedFragment of one contribution: in any order they become the whole, once; whatever contradicts is the peer's fault."""

from __future__ import annotations

import dataclasses
import math
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aggregator.data.sharded_fragment import ShardedFragment
from aggregator.storage.upload_buffer import Upload, UploadBuffer
from edit.config.run import PenaltyConfig
from edit.errors import LocalProtocolError, RemoteProtocolError, StaleError, StorageError
from edit.fragments.schema import FragmentSpec, TensorSpec
from edit.fragments.shards import Box, Shard
from edit.merging.merge import MergeRule, measure
from edit.merging.mergers import EditMerger
from editpb.messages import ContributionHeader
from tests.support.encoded import encode

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


def declared(parts: ShardedFragment, head: ContributionHeader) -> Upload:
    upload = parts.declare(head)
    assert upload is not None
    return upload


def fill(upload: Upload, shard: Shard, delta: Tensor = DELTA) -> None:
    data = bytes(encode("fp32", shard.take(delta)).data)
    upload.write(0, data, zlib.crc32(data))


def arrive(parts: ShardedFragment, upload: Upload) -> bool:
    read = parts.reader(upload)
    assert read is not None
    return parts.measured(upload, measure(read()))


def send(parts: ShardedFragment, shard: Shard, rank: int = 0, attempt: int = 1, delta: Tensor = DELTA) -> bool:
    upload = declared(parts, header(shard, rank, attempt))
    fill(upload, shard, delta)
    return arrive(parts, upload)


@pytest.fixture
def intake(tmp_path: Path) -> UploadBuffer:
    return UploadBuffer(1 << 20, tmp_path)


@pytest.fixture
def parts(intake: UploadBuffer) -> ShardedFragment:
    return ShardedFragment(FRAGMENT, intake)


def merged(parts: ShardedFragment) -> Tensor:
    outcome = EditMerger(PenaltyConfig(enabled=False)).merge(FRAGMENT, [parts.contribution()], {}, MergeRule())
    assert outcome.merged is not None
    return outcome.merged


def test_a_whole_fragment_is_one_part(parts: ShardedFragment) -> None:
    assert send(parts, WHOLE)
    contribution = parts.contribution()
    assert (contribution.peer_id, contribution.inner_steps, contribution.tokens) == ("a", 30, 900)
    assert contribution.norm == measure(encode("fp32", DELTA))
    assert not isinstance(contribution.payload, tuple)
    assert torch.equal(merged(parts), DELTA)


@pytest.mark.parametrize("first", [0, 1])
def test_the_parts_of_two_ranks_in_either_order(parts: ShardedFragment, first: int) -> None:
    order = [(TOP, 0), (BOTTOM, 1)]
    assert not send(parts, *order[first])
    with pytest.raises(LocalProtocolError, match="not whole"):
        parts.contribution()
    assert send(parts, *order[1 - first])
    assert parts.contribution().norm == pytest.approx(float(DELTA.norm()), rel=1e-6)
    assert torch.equal(merged(parts), DELTA)


def test_a_part_that_is_in_twice_counts_once(parts: ShardedFragment) -> None:
    assert not send(parts, TOP)
    again = declared(parts, header(TOP))
    assert again.complete and parts.reader(again) is None
    assert not parts.measured(again, 1e9)
    assert send(parts, BOTTOM, 1)
    assert not parts.measured(again, 1e9)
    assert parts.contribution().norm == pytest.approx(float(DELTA.norm()), rel=1e-6)


def test_a_fragment_is_whole_only_when_every_part_is_measured(parts: ShardedFragment) -> None:
    uploads = [declared(parts, header(shard, rank)) for rank, shard in enumerate((TOP, BOTTOM))]
    for upload, shard in zip(uploads, (TOP, BOTTOM), strict=True):
        fill(upload, shard)
    assert not arrive(parts, uploads[1])
    assert arrive(parts, uploads[0])


def test_norms_that_are_not_finite_stay_so(parts: ShardedFragment) -> None:
    bad = DELTA.clone()
    bad[-1] = torch.nan
    send(parts, TOP, 0, 1, bad)
    send(parts, BOTTOM, 1, 1, bad)
    assert math.isnan(parts.contribution().norm)


def test_a_newer_attempt_drops_the_older_parts_and_their_memory(parts: ShardedFragment, intake: UploadBuffer) -> None:
    half = declared(parts, header(TOP, 0))
    fill(half, TOP)
    send(parts, BOTTOM, 1)
    newer = declared(parts, header(WHOLE, 0, attempt=2))
    assert intake.held_bytes == WHOLE.numel * 4
    with pytest.raises(StaleError, match="a newer attempt of this replica has come"):
        half.write(0, b"x" * 4, zlib.crc32(b"x" * 4))
    with pytest.raises(StaleError, match="newer attempt"):
        parts.reader(half)
    with pytest.raises(StaleError, match="newer attempt"):
        parts.measured(half, 1.0)
    with pytest.raises(StaleError, match="newer attempt"):
        parts.declare(header(TOP, 0, attempt=1))
    fill(newer, WHOLE)
    assert arrive(parts, newer)


def test_what_is_whole_stays_whatever_comes(parts: ShardedFragment, intake: UploadBuffer) -> None:
    send(parts, TOP)
    send(parts, BOTTOM, 1)
    held = intake.held_bytes
    assert parts.declare(header(WHOLE, 0, attempt=2)) is None
    with pytest.raises(StaleError):
        parts.declare(header(TOP, 0, attempt=0))
    with pytest.raises(RemoteProtocolError, match="overlap"):
        parts.declare(header(TOP, 2))
    assert intake.held_bytes == held
    assert torch.equal(merged(parts), DELTA)


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (header(WHOLE, 1), "the ranks' parts overlap: 41 elements, the fragment has 29"),
        (header(Shard(FRAGMENT, [Box(0, (1, 0), (4, 4)), Box(2, (), ())]), 1), "weight: two shards overlap"),
        (header(BOTTOM, 1, tokens=901), "rank 1 says tokens = 901, rank 0 says 900"),
        (header(BOTTOM, 1, inner_steps=29), "rank 1 says inner_steps = 29, rank 0 says 30"),
        (header(BOTTOM, 0), "was declared with another numel before"),
        (header(TOP, 0, codec="bf16", total_bytes=24), "was declared with another codec before"),
        (header(TOP, 0, tokens=1), "was declared with another tokens before"),
    ],
)
def test_contradictions_are_found_before_memory_is_taken(
    parts: ShardedFragment, intake: UploadBuffer, head: ContributionHeader, reason: str
) -> None:
    send(parts, TOP)
    held = intake.held_bytes
    with pytest.raises(RemoteProtocolError, match=reason) as fault:
        parts.declare(head)
    assert str(fault.value).startswith("contribution of a to round 5, fragment 3, rank ")
    assert intake.held_bytes == held


def test_other_ranks_may_use_other_codecs(parts: ShardedFragment) -> None:
    """Each part is decoded by itself; a replica of mixed machines is a replica."""
    send(parts, TOP)
    data = bytes(encode("bf16", BOTTOM.take(DELTA)).data)
    upload = declared(parts, header(BOTTOM, 1, codec="bf16", total_bytes=len(data)))
    upload.write(0, data, zlib.crc32(data))
    assert arrive(parts, upload)
    assert torch.equal(TOP.take(merged(parts)), TOP.take(DELTA))
    assert torch.allclose(merged(parts), DELTA, rtol=2**-7)


def test_a_part_that_the_disk_refused_begins_anew(tmp_path: Path) -> None:
    full = [True]

    def write(descriptor: int, data: memoryview, offset: int) -> int:
        if full[0]:
            raise OSError(28, "No space left on device")
        import os

        return os.pwrite(descriptor, data, offset)

    parts = ShardedFragment(FRAGMENT, UploadBuffer(0, tmp_path, write=write))
    upload = declared(parts, header(WHOLE))
    with pytest.raises(StorageError, match="No space left"):
        fill(upload, WHOLE)
    full[0] = False
    again = declared(parts, header(WHOLE))
    assert again is not upload
    with pytest.raises(StaleError):
        parts.measured(upload, 1.0)
    fill(again, WHOLE)
    assert arrive(parts, again)


def test_parts_of_spilled_slots_are_read_when_they_are_merged(tmp_path: Path) -> None:
    parts = ShardedFragment(FRAGMENT, UploadBuffer(0, tmp_path))
    send(parts, TOP)
    send(parts, BOTTOM, 1)
    assert len(list(tmp_path.iterdir())) == 2
    assert torch.equal(merged(parts), DELTA)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 3), min_size=29, max_size=29), st.randoms(use_true_random=False), st.booleans())
def test_any_partition_in_any_order_is_whole_with_its_last_part_and_never_before(
    tmp_path_factory: pytest.TempPathFactory, owners: list[int], order: object, lossy: bool
) -> None:
    """Single elements, dealt to up to 4 ranks: the worst layout there is."""
    places = (
        [Box(0, (i, j), (1, 1)) for i in range(6) for j in range(4)] + [Box(1, (i,), (1,)) for i in range(4)] + [Box(2, (), ())]
    )
    layout = {r: Shard(FRAGMENT, [b for b, owner in zip(places, owners, strict=True) if owner == r]) for r in set(owners)}
    ranks = sorted(layout)
    order.shuffle(ranks)  # type: ignore[attr-defined]
    parts = ShardedFragment(FRAGMENT, UploadBuffer(1 << 20, tmp_path_factory.mktemp("spill")))
    for position, rank in enumerate(ranks):
        assert send(parts, layout[rank], rank) == (position == len(ranks) - 1)
    assert torch.equal(merged(parts), DELTA)
    if lossy:  # one element short, and nothing is whole
        short = ShardedFragment(FRAGMENT, UploadBuffer(1 << 20, tmp_path_factory.mktemp("short")))
        first = layout[ranks[0]]
        layout[ranks[0]] = Shard(FRAGMENT, first.boxes[1:])
        assert not any(send(short, layout[rank], rank) for rank in ranks if layout[rank].numel)


def test_headers_are_compared_whole(parts: ShardedFragment) -> None:
    """A field that is added to the header must not slip through a retry."""
    head = header(TOP)
    parts.declare(head)
    for field in dataclasses.fields(ContributionHeader):
        if field.name in ("rank", "attempt"):
            continue
        changed = dataclasses.replace(head, **{field.name: "other" if field.type == "str" else 77})
        if field.name == "boxes":
            changed = dataclasses.replace(head, boxes=BOTTOM.boxes)
        with pytest.raises(RemoteProtocolError, match=f"another {field.name} before"):
            parts.declare(changed)
