"""Converts the messages of tensors.proto to and from records. Bounds and validates everything that arrives.

`x_to_pb(record)` never fails; `x_from_pb(message)` raises RemoteProtocolError with one line, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from google.protobuf.message import DecodeError

from edit.errors import ConfigError
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.fragments.shards import Box, Shard
from editpb import limits as lim
from editpb import tensors_pb2 as tpb
from editpb.limits import fail, within

__all__ = [
    "boxes_to_pb",
    "check_encoded_size",
    "codec_from_pb",
    "schema_from_bytes",
    "schema_from_pb",
    "schema_to_pb",
    "shard_from_pb",
]


def codec_from_pb(text: str) -> str:
    """Decode a codec: the text of a CodecSpec that `edit.codecs` knows, written as `str` writes it."""
    from edit.codecs import codec  # imports torch, which who only asks for a status does without

    lim.check_codec_text(text)
    try:
        known = codec(text)
    except ConfigError as error:
        fail(str(error))
    if known.name != text:
        fail(f"codec {text!r} is not written {known.name!r}")
    return text


def schema_to_pb(schema: Schema) -> tpb.Schema:
    """Encode all fragments of a model."""
    return tpb.Schema(
        fragments=[
            tpb.FragmentSpec(
                name=f.name, tensors=[tpb.TensorSpec(name=t.name, shape=t.shape) for t in f.tensors], buffers=f.buffers
            )
            for f in schema.fragments
        ]
    )


def schema_from_bytes(data: bytes, first: int | None = None) -> Schema:
    """Decode a serialized Schema. It takes long: call it away from the event loop.

    Args:
        first: decode only so many tensors at the beginning: enough to name the first difference from a model that has fewer.
    """
    try:
        message = tpb.Schema.FromString(data)
    except DecodeError:
        fail("the schema is no Schema message")
    return schema_from_pb(message, first)


def schema_from_pb(message: tpb.Schema, first: int | None = None) -> Schema:
    """Decode all fragments of a model: names are unique, sizes within `editpb.limits`. first: see `schema_from_bytes`."""
    lim.at_most("fragments in a schema", message.fragments, lim.MAX_FRAGMENTS)
    if (tensors := sum(len(fragment.tensors) for fragment in message.fragments)) > lim.MAX_TENSORS:
        fail(f"{tensors} tensors in a schema, more than {lim.MAX_TENSORS}")
    fragments, left = list[FragmentSpec](), lim.MAX_TENSORS if first is None else first
    for i, fragment in enumerate(message.fragments):
        if first is not None and left == 0:
            break
        specs = tuple(_tensor_from_pb(tensor) for tensor in fragment.tensors[:left])
        left -= len(specs)
        name = lim.check_name("a fragment's name", fragment.name)
        fragments.append(FragmentSpec(fragment_id=i, name=name, tensors=specs, buffers=fragment.buffers))
    schema = Schema(tuple(fragments))
    within("elements in a schema", schema.numel, 1, lim.MAX_NUMEL)
    return schema


def _tensor_from_pb(message: tpb.TensorSpec) -> TensorSpec:
    name = lim.check_name("a tensor's name", message.name)
    lim.at_most(f"dimensions of tensor {name}", message.shape, lim.MAX_DIMS)
    shape = tuple(within(f"a dimension of tensor {name}", size, 1, lim.MAX_NUMEL) for size in message.shape)
    within(f"elements in tensor {name}", math.prod(shape), 1, lim.MAX_NUMEL)
    return TensorSpec(name=name, shape=shape)


def boxes_to_pb(boxes: Iterable[Box]) -> list[tpb.Box]:
    """Encode what a rank holds of a fragment."""
    return [tpb.Box(tensor=box.tensor, offsets=box.offsets, sizes=box.sizes) for box in boxes]


def shard_from_pb(boxes: Sequence[tpb.Box], fragment: FragmentSpec) -> Shard:
    """Decode what a rank holds of `fragment`: boxes that lie inside their tensors, do not overlap, and are few."""
    counts = [0] * len(fragment.tensors)
    for box in boxes:
        lim.at_most(f"offsets of a box of fragment {fragment.name}", box.offsets, lim.MAX_DIMS)
        lim.at_most(f"sizes of a box of fragment {fragment.name}", box.sizes, lim.MAX_DIMS)
        counts[within(f"a box of fragment {fragment.name}: tensor", box.tensor, 0, len(counts) - 1)] += 1
    for count, tensor in zip(counts, fragment.tensors, strict=True):
        if count > lim.MAX_BOXES_PER_TENSOR:
            fail(f"{count} boxes of tensor {tensor.name}, more than {lim.MAX_BOXES_PER_TENSOR}")
    shard = Shard(fragment, [Box(box.tensor, tuple(box.offsets), tuple(box.sizes)) for box in boxes])
    if shard.run_count > lim.MAX_RUNS:
        fail(f"boxes of fragment {fragment.name} in {shard.run_count} pieces, more than {lim.MAX_RUNS}")
    return shard


def check_encoded_size(codec_name: str, numel: int, total_bytes: int, what: str) -> int:
    """Return total_bytes when it is exactly what the codec makes of numel elements."""
    from edit.codecs import codec

    expected = codec(codec_name).encoded_size(numel)
    if total_bytes != expected:
        fail(f"{what}: {total_bytes} bytes announced, {codec_name} makes {expected} of {numel} elements")
    return total_bytes
