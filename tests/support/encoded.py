"""The codecs that tests go through; encode a vector of a test that has no model: it counts as a fragment of one tensor."""

from __future__ import annotations

from torch import Tensor

from edit.codecs import codec, codec_names
from edit.fragments.shards import Shard
from edit.records import EncodedTensor
from tests.support.layouts import fragment

# Every codec, and some with options: small blocks, an odd k (bits are left over in every chunk).
SPECS = (*codec_names(), "int4:block=64", "e3m0:block=64", "stat2:block=64,range=6", "sign:block=64", "topk:k=7")
LOSSY = tuple(text for text in SPECS if not codec(text).lossless)


def encode(name: str, flat: Tensor) -> EncodedTensor:
    """The flat vector, encoded by the codec of that name."""
    return codec(name).encode(flat, fragment((flat.numel(),)))


def whole_shards(*numels: int) -> list[Shard]:
    """What a peer that is not sharded holds of fragments of so many elements."""
    return [Shard(fragment((numel,))) for numel in numels]


def cut(encoded: EncodedTensor, shard: Shard) -> EncodedTensor:
    """What a rank with this shard is sent of an encoded fragment."""
    return codec(encoded.codec).cut(encoded, shard)


def decode_shard(encoded: EncodedTensor, shard: Shard) -> Tensor:
    """What a rank with this shard decodes of what it was sent."""
    return codec(encoded.codec).decode_shard(encoded, shard)
