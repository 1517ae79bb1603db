"""Codecs: how a flat fp32 vector becomes bytes. `codec(name)` finds one; `encode` and `decode` carry the name along.

Owns: the registry. To add a codec: a file beside this one with a class that follows `Codec`, a line in `_CODECS`, and its value
in proto/editpb/tensors.proto. Must not know: peers, residuals, rounds.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from edit.codecs.base import PIECE, Buffer, Codec
from edit.codecs.floats import RawFloat
from edit.codecs.int8 import BlockInt8
from edit.errors import ConfigError, RemoteProtocolError
from edit.records import EncodedTensor

__all__ = ["PIECE", "Buffer", "Codec", "codec", "codec_names", "decode", "encode"]

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
