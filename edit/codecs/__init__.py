"""Codecs: how a flat fp32 vector becomes bytes.

`codec(name)` finds one; `encode` and `decode` carry the name along; `cut` leaves a rank's shard of an encoded fragment,
`decode_shard` reads that.

Owns: the registry. To add a codec: a file beside this one with a class that follows `Codec`, a line in `_CODECS`, and its value
in proto/editpb/tensors.proto. Must not know: peers, residuals, rounds.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from edit.codecs.base import PIECE, Buffer, Codec
from edit.codecs.blocks import covering_numel, gather
from edit.codecs.floats import RawFloat
from edit.codecs.int8 import BlockInt8
from edit.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from edit.fragments.shards import Shard
from edit.records import EncodedTensor

__all__ = ["PIECE", "Buffer", "Codec", "codec", "codec_names", "cut", "cut_numel", "decode", "decode_shard", "encode"]

_CODECS: tuple[Codec, ...] = (
    RawFloat("fp32", torch.float32),
    RawFloat("bf16", torch.bfloat16),
    RawFloat("fp16", torch.float16),
    BlockInt8(),
)


def codec_names() -> tuple[str, ...]:
    """Every name that `codec` knows."""
    return tuple(known.name for known in _CODECS)


def codec(name: str) -> Codec:
    """The codec of that name. Raises RemoteProtocolError for an unknown one (names in a configuration are checked there)."""
    if sys.byteorder != "little":
        raise ConfigError("encoded vectors are little-endian; this machine is not")
    for known in _CODECS:
        if known.name == name:
            return known
    raise RemoteProtocolError(f"unknown codec {name!r}; known: {', '.join(codec_names())}")


def encode(name: str, flat: Tensor) -> EncodedTensor:
    """Encode a flat fp32 CPU tensor with the codec of that name."""
    return EncodedTensor(name, flat.numel(), codec(name).encode(flat))


def decode(encoded: EncodedTensor) -> Tensor:
    """A new flat fp32 tensor. Raises RemoteProtocolError when the bytes are not what they claim to be."""
    return codec(encoded.codec).decode(encoded.data, encoded.numel)


def cut(encoded: EncodedTensor, shard: Shard) -> EncodedTensor:
    """The shortest run of blocks of an encoded fragment that covers the shard; the whole shard: `encoded` itself.

    Element-wise codecs: exactly the shard, in its order. Same shard, same bytes; they may share memory with `encoded`.
    """
    known = codec(encoded.codec)
    if (shard.fragment.numel, known.encoded_size(encoded.numel)) != (encoded.numel, memoryview(encoded.data).nbytes):
        raise LocalProtocolError(f"{encoded.numel} elements are not fragment {shard.fragment.name} ({shard.fragment.numel})")
    if shard.is_whole:
        return encoded
    return EncodedTensor(known.name, cut_numel(known.name, shard), known.cut(encoded.data, shard))


def cut_numel(codec_name: str, shard: Shard) -> int:
    """How many elements `cut` leaves of a fragment encoded by that codec."""
    return covering_numel(shard, codec(codec_name).granule)


def decode_shard(encoded: EncodedTensor, shard: Shard) -> Tensor:
    """The region's vector out of what `cut` gave for it: fp32, shape [shard.numel].

    Raises RemoteProtocolError when that is not what was cut, or its bytes are not what they claim to be.
    """
    known = codec(encoded.codec)
    if encoded.numel != (expected := cut_numel(encoded.codec, shard)):
        raise RemoteProtocolError(f"fragment {shard.fragment.name}: {encoded.numel} elements instead of {expected}")
    flat = known.decode(encoded.data, encoded.numel)
    return flat if known.granule == 1 or shard.is_whole else gather(shard, flat, known.granule)
