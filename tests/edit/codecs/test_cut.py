"""The cut of an encoded fragment for one rank: it decodes to the whole one's shard, to the bit; nothing more travels."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edit.codecs import codec, decode
from edit.errors import LocalProtocolError, RemoteProtocolError
from edit.fragments.schema import FragmentSpec
from edit.fragments.shards import Box, Shard
from edit.records import EncodedTensor
from tests.support.encoded import SPECS, encode
from tests.support.exhaustive import examples
from tests.support.layouts import fragment, partitions, rows, whole

NAMES = st.sampled_from(SPECS)
BLOCKWISE = [name for name in SPECS if codec(name).granule > 1]


def encoded(spec: FragmentSpec, name: str, seed: int = 0) -> EncodedTensor:
    return codec(name).encode(torch.randn(spec.numel, generator=torch.Generator().manual_seed(seed)), spec)


def bits(vector: torch.Tensor) -> torch.Tensor:
    return vector.view(torch.int32)


@given(layout=partitions(), name=NAMES, readonly=st.booleans())
@settings(deadline=None, max_examples=examples(200))
def test_what_a_rank_decodes_is_its_shard_of_the_whole(
    layout: tuple[FragmentSpec, list[list[Box]]], name: str, readonly: bool
) -> None:
    spec, shares = layout
    update = encoded(spec, name)
    if readonly:
        update = EncodedTensor(name, update.numel, bytes(update.data))
    for boxes in shares:
        shard = Shard(spec, boxes)
        mine = codec(name).cut(update, shard)
        assert (mine.codec, mine.numel) == (name, codec(name).cut_numel(shard))
        assert memoryview(mine.data).nbytes == codec(name).encoded_size(mine.numel)
        part = codec(name).decode_shard(EncodedTensor(name, mine.numel, bytes(mine.data)), shard)
        assert part.dtype == torch.float32 and torch.equal(bits(part), bits(shard.take(decode(update))))
        assert bytes(codec(name).cut(update, Shard(spec, boxes)).data) == bytes(mine.data)


@given(layout=partitions(), name=NAMES)
@settings(deadline=None, max_examples=examples(100))
def test_only_blocks_that_the_shard_touches_travel(layout: tuple[FragmentSpec, list[list[Box]]], name: str) -> None:
    spec, shares = layout
    granule = codec(name).granule
    positions = torch.arange(spec.numel)
    for boxes in shares:
        shard = Shard(spec, boxes)
        touched = {position // granule for position in shard.take(positions).tolist()}
        assert codec(name).cut_numel(shard) == sum(min(granule, spec.numel - block * granule) for block in touched)


@pytest.mark.covering
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dimension", [0, 1])
def test_shards_of_thousands_of_runs(name: str, dimension: int) -> None:
    spec = fragment((10_000, 48), (48,), (3000, 7), ())
    update = encoded(spec, name)
    for boxes in rows(spec, 3, dimension):
        shard = Shard(spec, boxes)
        mine = codec(name).decode_shard(codec(name).cut(update, shard), shard)
        assert torch.equal(mine, shard.take(decode(update)))


def test_the_whole_shard_is_the_update_itself() -> None:
    spec = fragment((300, 2), (5,))
    for name in SPECS:
        update = encoded(spec, name)
        assert codec(name).cut(update, Shard(spec)) is update is codec(name).cut(update, Shard(spec, whole(spec)))
        assert codec(name).cut_numel(Shard(spec)) == spec.numel


@pytest.mark.parametrize("name", SPECS)
def test_an_empty_shard_costs_no_byte(name: str) -> None:
    spec = fragment((300,))
    mine = codec(name).cut(encoded(spec, name), Shard(spec, []))
    assert mine.numel == 0 and memoryview(mine.data).nbytes == 0
    assert codec(name).decode_shard(mine, Shard(spec, [])).shape == (0,)


def test_one_contiguous_run_of_an_element_wise_codec_is_not_copied() -> None:
    spec = fragment((300, 4))
    update = encoded(spec, "bf16")
    mine = codec("bf16").cut(update, Shard(spec, [Box(0, (100, 0), (50, 4))]))
    memoryview(update.data).cast("B")[800:1200] = bytes(400)
    assert bytes(mine.data) == bytes(400)


@pytest.mark.parametrize("name", BLOCKWISE)
def test_a_broken_block_stays_visible_in_every_cut_that_touches_it(name: str) -> None:
    block = codec(name).granule
    spec = fragment((4 * block,))
    flat = torch.ones(spec.numel)
    flat[block + 1] = float("nan")
    update = codec(name).encode(flat, spec)
    left, right = (Shard(spec, [Box(0, (start,), (block - 20,))]) for start in (block + 20, 2 * block))
    known = codec(name)
    assert not bool(known.decode_shard(known.cut(update, left), left).isfinite().any())
    assert bool(known.decode_shard(known.cut(update, right), right).isfinite().all())


@given(name=NAMES, data=st.binary(max_size=700), numel=st.integers(0, 700))
@settings(deadline=None, max_examples=examples(150))
def test_any_other_bytes_or_length_are_the_senders_fault(name: str, data: bytes, numel: int) -> None:
    spec = fragment((30, 20))
    shard = Shard(spec, [Box(0, (3, 0), (10, 20))])
    expected = codec(name).cut_numel(shard)
    if numel == expected and len(data) == codec(name).encoded_size(expected):
        return
    with pytest.raises(RemoteProtocolError):
        codec(name).decode_shard(EncodedTensor(name, numel, data), shard)


def test_an_update_of_another_fragment_or_length_is_our_bug() -> None:
    spec = fragment((300,))
    shard = Shard(spec, [Box(0, (0,), (20,))])
    with pytest.raises(LocalProtocolError, match=r"are not fragment f \(300\)"):
        codec("bf16").cut(encode("bf16", torch.zeros(299)), shard)
    with pytest.raises(LocalProtocolError, match="300 elements are not"):
        codec("bf16").cut(EncodedTensor("bf16", 300, bytes(599)), shard)
