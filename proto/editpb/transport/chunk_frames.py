"""The chunks of contributions and updates on the wire, joined and split by hand: the bytes that protobuf would make of them.

protobuf copies a chunk three times on each side and walks through all of it to count its bytes; here a chunk is copied once
into its frame, and what arrives is a view of the message. Everything else of data.proto and council.proto, and a chunk that
another implementation has encoded in another order, goes through protobuf as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeVar

import grpc

from editpb import council_pb2 as cpb
from editpb import council_pb2_grpc, data_pb2_grpc
from editpb import data_pb2 as pb
from editpb.limits import CHUNK_BYTES

__all__ = [
    "ReceivedChunk",
    "add_council_servicer",
    "add_data_servicer",
    "add_handlers",
    "contribute_frames",
    "contribute_part",
    "council_stub",
    "data_handlers",
    "data_stub",
    "handlers_of",
    "serialize",
    "update_frames",
    "update_part",
]

_SERVICE = "editpb.Data"
_COUNCIL = "editpb.Council"
# Tags of protobuf: the field's number, and whether a varint (0) or a length and so many bytes (2) follow.
_OFFSET = 1 << 3 | 0  # Chunk.offset
_DATA = 2 << 3 | 2  # Chunk.data
_CHUNK = 2 << 3 | 2  # `chunk` of every message of these services that has one
_FRAGMENT_ID = 1 << 3 | 0  # FragmentChunk.fragment_id
_LONGEST_VARINT = 9  # bytes; 63 bits
_Part = TypeVar("_Part", pb.UpdatePart, cpb.OfferPart, cpb.ContributionsPart, cpb.StatePart, cpb.SwapPart)


class ReceivedChunk(NamedTuple):
    """A chunk as it arrived: `data` is a view of the message."""

    fragment_id: int
    offset: int
    data: bytes | memoryview


def contribute_frames(
    data: bytes | bytearray | memoryview, *, start: int = 0, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[bytes]:
    """Yield a serialized ContributePart for each chunk of `data[start:]`; offsets count from the beginning of `data`."""
    return _frames(data, start, lambda size: _begin(_CHUNK, size), chunk_bytes=lambda: chunk_bytes)


def update_frames(
    fragment_id: int,
    data: bytes | bytearray | memoryview,
    *,
    start: int = 0,
    seal: Callable[[memoryview], bytes] | None = None,
    chunk_bytes: Callable[[], int] = lambda: CHUNK_BYTES,
) -> Iterator[bytes]:
    """Yield a serialized UpdatePart for each chunk of a fragment's payload, from `start` on.

    The same bytes are an OfferPart, a ContributionsPart, a StatePart, and a SwapPart.

    seal: is given each in turn. chunk_bytes: returns the size of the next.
    """
    inner = bytes([_FRAGMENT_ID]) + _varint(fragment_id) if fragment_id else b""

    def head(size: int) -> bytes:
        wrapped = inner + _begin(_CHUNK, size)
        return _begin(_CHUNK, len(wrapped) + size) + wrapped

    return _frames(data, start, head, seal, chunk_bytes)


def _frames(
    data: bytes | bytearray | memoryview,
    start: int,
    head: Callable[[int], bytes],
    seal: Callable[[memoryview], bytes] | None = None,
    chunk_bytes: Callable[[], int] = lambda: CHUNK_BYTES,
) -> Iterator[bytes]:
    view, offset = memoryview(data).cast("B"), start
    while offset < len(view):
        piece = view[offset : offset + chunk_bytes()]
        where = bytes([_OFFSET]) + _varint(offset) if offset else b""
        fields = where + _begin(_DATA, len(piece))
        yield b"".join((head(len(fields) + len(piece)), fields, piece if seal is None else seal(piece)))
        offset += len(piece)


def _begin(tag: int, length: int) -> bytes:
    return bytes([tag]) + _varint(length)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def contribute_part(message: bytes) -> pb.ContributePart | ReceivedChunk:
    """Decode a ContributePart; a chunk is a ReceivedChunk of fragment 0. Raises as protobuf's FromString."""
    if (chunk := _split(message, in_fragment=False)) is not None:
        return chunk
    part = pb.ContributePart.FromString(message)
    if part.WhichOneof("kind") != "chunk":
        return part
    return ReceivedChunk(0, part.chunk.offset, part.chunk.data)


def update_part(message: bytes) -> pb.UpdatePart | ReceivedChunk:
    """Decode an UpdatePart; a chunk is a ReceivedChunk. Raises as protobuf's FromString."""
    return _part(message, pb.UpdatePart)


def _part(message: bytes, kind: type[_Part]) -> _Part | ReceivedChunk:
    if (chunk := _split(message, in_fragment=True)) is not None:
        return chunk
    part = kind.FromString(message)
    if part.WhichOneof("kind") != "chunk":
        return part
    return ReceivedChunk(part.chunk.fragment_id, part.chunk.chunk.offset, part.chunk.chunk.data)


def _split(message: bytes, *, in_fragment: bool) -> ReceivedChunk | None:
    """Return the chunk of a message that is laid out as `_frames` does; None for any other message."""
    try:
        at = _enter(message, 0, _CHUNK)
        fragment_id = offset = 0
        if in_fragment:
            if message[at] == _FRAGMENT_ID:
                fragment_id, at = _read_varint(message, at + 1)
            at = _enter(message, at, _CHUNK)
        if message[at] == _OFFSET:
            offset, at = _read_varint(message, at + 1)
        at = _enter(message, at, _DATA)
    except (IndexError, ValueError):
        return None
    return ReceivedChunk(fragment_id, offset, memoryview(message)[at:])


def _enter(message: bytes, at: int, tag: int) -> int:
    """Return where the content of a field begins that goes on to the message's end. Raises ValueError for any other field."""
    if message[at] != tag:
        raise ValueError
    length, at = _read_varint(message, at + 1)
    if at + length != len(message):
        raise ValueError
    return at


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(_LONGEST_VARINT):
        byte = message[at + place]
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise ValueError


def serialize(message: Any) -> bytes:
    """Return a frame as it is, and any other message as protobuf serializes it."""
    return message if isinstance(message, bytes) else message.SerializeToString()


def data_stub(channel: grpc.aio.Channel) -> data_pb2_grpc.DataStub:
    """Return a stub whose Contribute takes frames beside messages, and whose FetchUpdate gives ReceivedChunk for chunks."""
    stub: Any = data_pb2_grpc.DataStub(channel)
    stub.Contribute = channel.stream_unary(
        f"/{_SERVICE}/Contribute",
        request_serializer=serialize,
        response_deserializer=pb.ContributionReceipt.FromString,
    )
    stub.FetchUpdate = channel.unary_stream(
        f"/{_SERVICE}/FetchUpdate",
        request_serializer=pb.UpdateRequest.SerializeToString,
        response_deserializer=update_part,
    )
    return stub


def council_stub(channel: grpc.aio.Channel) -> council_pb2_grpc.CouncilStub:
    """Return a stub whose fetches and swaps give ReceivedChunk for chunks, and whose swaps take frames beside messages."""
    stub: Any = council_pb2_grpc.CouncilStub(channel)
    fetches: tuple[Any, ...] = (
        ("FetchOffer", cpb.OfferRequest, cpb.OfferPart),
        ("FetchContributions", cpb.OfferRequest, cpb.ContributionsPart),
        ("FetchState", cpb.StateRequest, cpb.StatePart),
        ("FetchPhi", cpb.PhiRequest, cpb.StatePart),
    )
    for method, request, part in fetches:
        call = channel.unary_stream(
            f"/{_COUNCIL}/{method}",
            request_serializer=request.SerializeToString,
            response_deserializer=partial(_part, kind=part),
        )
        setattr(stub, method, call)
    stub.Swap = channel.stream_stream(
        f"/{_COUNCIL}/Swap",
        request_serializer=serialize,
        response_deserializer=partial(_part, kind=cpb.SwapPart),
    )
    return stub


def add_council_servicer(servicer: Any, server: grpc.aio.Server) -> None:
    """Add the Council service: what its fetches and swaps send may be frames, and swaps receive ReceivedChunk for chunks."""
    handlers = handlers_of(council_pb2_grpc.add_CouncilServicer_to_server, servicer)
    fetches = (
        ("FetchOffer", cpb.OfferRequest),
        ("FetchContributions", cpb.OfferRequest),
        ("FetchState", cpb.StateRequest),
        ("FetchPhi", cpb.PhiRequest),
    )
    for method, request in fetches:
        handlers[method] = grpc.unary_stream_rpc_method_handler(
            getattr(servicer, method), request_deserializer=request.FromString, response_serializer=serialize
        )
    handlers["Swap"] = grpc.stream_stream_rpc_method_handler(
        servicer.Swap, request_deserializer=partial(_part, kind=cpb.SwapPart), response_serializer=serialize
    )
    add_handlers(server, _COUNCIL, handlers)


def add_data_servicer(servicer: Any, server: grpc.aio.Server) -> None:
    """Add the Data service: Contribute receives ReceivedChunk for chunks, FetchUpdate may yield frames."""
    add_handlers(server, _SERVICE, data_handlers(servicer))


def add_handlers(server: grpc.aio.Server, service: str, handlers: dict[str, Any]) -> None:
    """Add a service, as the generated code does: an asyncio server of grpcio below 1.84 ignores the second call."""
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_registered_method_handlers(service, handlers)


def data_handlers(servicer: Any) -> dict[str, Any]:
    """Return the handler of each method of the Data service, as `add_data_servicer` adds them."""
    generated = handlers_of(data_pb2_grpc.add_DataServicer_to_server, servicer)
    contribute = grpc.stream_unary_rpc_method_handler(
        servicer.Contribute,
        request_deserializer=contribute_part,
        response_serializer=pb.ContributionReceipt.SerializeToString,
    )
    return generated | {"Contribute": contribute, "FetchUpdate": fetch_update_handler(servicer.FetchUpdate)}


def fetch_update_handler(fetch_update: Callable[..., Any]) -> Any:
    """Return the handler of FetchUpdate alone, as `data_handlers` does."""
    return grpc.unary_stream_rpc_method_handler(
        fetch_update, request_deserializer=pb.UpdateRequest.FromString, response_serializer=serialize
    )


def handlers_of(add: Callable[[Any, Any], None], servicer: Any) -> dict[str, Any]:
    """Return the handler of each method of a service. add: the generated `add_..._to_server`."""
    collector = _Handlers()
    add(servicer, collector)
    return collector.methods


class _Handlers:
    """Takes what the generated code would add to a server."""

    def __init__(self) -> None:
        self.methods: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        pass

    def add_registered_method_handlers(self, service: str, methods: dict[str, Any]) -> None:
        self.methods = methods
