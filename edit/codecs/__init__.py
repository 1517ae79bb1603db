"""Codecs: how a flat fp32 vector becomes bytes, and back.

Owns the formats, the choice between them (`codec`), the cut of an encoded fragment for one rank, and error feedback. Must not
know peers, rounds, verdicts, carriers.

    base            the Codec protocol, and all that follows from a format's own methods
    blocks          which blocks of an encoded vector cover a shard
    blockwise       what all formats of blocks share: planes of bytes, pieces, cuts, packed bits, sums
    floats          fp32, bf16, fp16
    int8            256 elements with one scale
    int4            the same with 4 bits
    e3m0            powers of two with a sign: 4 bits
    two_levels      a sign and one of two magnitudes: 2 bits
    stat2           two levels by the standard deviation of a row
    sign            1 bit and the mean magnitude
    topk            the k largest of 4096
    top1            the largest of each small group
    sdd             matrices as sums of few products of vectors of -1, 0, 1
    plugin          a format that is a plug-in of `edit.codecs`
    grid            integers that are masked and summed up; not of the configuration's formats
    residuals       how a residual is stored
    error_feedback  what a lossy codec left out, the residual, is added to the next vector

To add a codec: a plug-in (docs/plugins.md), or a file beside these with a class that derives from `Codec`, a line in
`_CODECS`, its name and its options in `edit.config.codec.CODECS`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType

import torch
from torch import Tensor

from edit import plugins
from edit.codecs.base import PIECE, Buffer, Codec
from edit.codecs.e3m0 import BlockE3M0
from edit.codecs.floats import RawFloat
from edit.codecs.grid import MaskedCodec
from edit.codecs.int4 import BlockInt4
from edit.codecs.int8 import BlockInt8
from edit.codecs.plugin import PluginCodec
from edit.codecs.sdd import SemidiscreteSum
from edit.codecs.sign import BlockSign
from edit.codecs.stat2 import RowStat2
from edit.codecs.top1 import GroupTop1
from edit.codecs.topk import ChunkedTopK
from edit.config.codec import CodecSpec
from edit.config.plugins import PREFIX, is_entry
from edit.errors import ConfigError, RemoteProtocolError
from edit.records import EncodedTensor
from edit.trust.masks import BITS

__all__ = ["PIECE", "Buffer", "Codec", "CodecSpec", "codec", "codec_names", "decode"]

_CODECS: dict[str, Callable[[CodecSpec], Codec]] = {
    "fp32": lambda spec: RawFloat(spec, torch.float32),
    "bf16": lambda spec: RawFloat(spec, torch.bfloat16),
    "fp16": lambda spec: RawFloat(spec, torch.float16),
    "int8": BlockInt8,
    "int4": BlockInt4,
    "e3m0": BlockE3M0,
    "stat2": RowStat2,
    "sign": BlockSign,
    "topk": ChunkedTopK,
    "top1": GroupTop1,
    "sdd": SemidiscreteSum,
}
for _name, _codec in _CODECS.items():
    plugins.built_in("codecs", _name)(_codec)

_MASKED: Mapping[str, Codec] = MappingProxyType({f"masked{bits}": MaskedCodec(bits) for bits in BITS})


def codec_names() -> tuple[str, ...]:
    """Return every name that a CodecSpec may have in a configuration."""
    return plugins.built_in_names("codecs")


def codec(spec: CodecSpec | str) -> Codec:
    """Return the codec that `spec`, or its text (`"int8"`), chooses. A codec has no state, so equal specs may share one.

    Raises RemoteProtocolError for an unknown name (names in a configuration are checked there), ConfigError for an option that
    the codec does not have, or on a big-endian machine.
    """
    text = spec if isinstance(spec, str) else spec.name
    if (masked := _MASKED.get(text)) is not None:
        return masked
    if text.startswith(PREFIX):
        chosen = CodecSpec.parse(spec) if isinstance(spec, str) else spec
        plugin = plugins.get("codecs", chosen.name.removeprefix(PREFIX)) if is_entry(chosen.name) else None
        if plugin is None:
            raise RemoteProtocolError(f"this process has loaded no codec {chosen.name!r}")
        return _make(chosen, plugin)
    return _make(spec, None)


@lru_cache(maxsize=64)
def _make(spec: CodecSpec | str, plugin: plugins.Plugin | None) -> Codec:
    if sys.byteorder != "little":
        raise ConfigError("encoded vectors are little-endian; this machine is not")
    chosen = CodecSpec.parse(spec) if isinstance(spec, str) else spec
    if plugin is not None:
        return PluginCodec(plugin, chosen)
    if chosen.name not in (known := codec_names()):
        raise RemoteProtocolError(f"unknown codec {chosen.name!r}; known: {', '.join(known)}")
    made: Codec = plugins.make("codecs", chosen.name, chosen)[1]
    return made


def decode(encoded: EncodedTensor) -> Tensor:
    """Decode with the codec that `encoded` names: a new fp32 tensor, shape [numel].

    Raises RemoteProtocolError when the codec is unknown or the bytes have another length than it makes of so many elements.
    """
    return codec(encoded.codec).decode(encoded)
