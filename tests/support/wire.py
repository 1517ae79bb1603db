"""Records to send in tests, and hypothesis strategies that build any message, mostly a wrong one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

from edit.codecs import codec
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.records import Commit, EncodedTensor, FragmentCommit, PeerVerdict, Verdict
from editpb import messages as msg

__all__ = ["DIGEST", "RUN", "SCHEMA", "commit", "header", "messages"]

RUN = "run-0123abcd"
DIGEST = hashlib.sha256(b"theta").hexdigest()
SCHEMA = Schema(
    (
        FragmentSpec(fragment_id=0, name="embed", tensors=(TensorSpec(name="embed.weight", shape=(5, 3)),)),
        FragmentSpec(
            fragment_id=1,
            name="blocks.0",
            tensors=(TensorSpec(name="blocks.0.weight", shape=(2, 2)), TensorSpec(name="blocks.0.scale", shape=())),
        ),
    )
)
_EDGES: dict[int, list[Any]] = {
    FieldDescriptor.CPPTYPE_UINT64: [0, 1, 2, 5, 15, 1 << 40, (1 << 48) + 1, (1 << 64) - 1],
    FieldDescriptor.CPPTYPE_UINT32: [0, 1, 2, 65535, 65536, (1 << 32) - 1],
    FieldDescriptor.CPPTYPE_ENUM: [0, 1, 2, 4, 5, 99, -1],
    FieldDescriptor.CPPTYPE_BOOL: [False, True],
    FieldDescriptor.CPPTYPE_DOUBLE: [0.0, 0.5, 1.0, -1.0, 1e308, float("inf"), float("nan")],
    FieldDescriptor.CPPTYPE_STRING: ["", "a", RUN, "ok", DIGEST, SCHEMA.schema_hash, "x" * 65, "new\nline", "é/..", "y" * 4097],
}
_BYTES: list[bytes] = [b"", b"\0", bytes(32), b"z" * 33]


def _value(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return messages(field.message_type)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.sampled_from(_BYTES)
    return st.sampled_from(_EDGES[field.cpp_type])


def messages(descriptor: Descriptor) -> st.SearchStrategy[dict[str, Any]]:
    """Field values of a message of this type, as keyword arguments; repeated fields have at most 3 entries."""
    fields = {field.name: _values(field) for field in descriptor.fields}
    some = st.fixed_dictionaries({}, optional=fields)
    oneof = next(iter(descriptor.oneofs), None)
    if oneof is None:
        return some
    return st.one_of(*(_value(field).map(lambda value, name=field.name: {name: value}) for field in oneof.fields))


def _values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        return st.dictionaries(_value(key), _value(value), max_size=3)
    return st.lists(_value(field), max_size=3) if field.is_repeated else _value(field)


def header(**changes: Any) -> msg.ContributionHeader:
    """A contribution of fragment 1, right in every field that `changes` does not name."""
    values: dict[str, Any] = {
        "run_id": RUN,
        "round_id": 1_000_001,
        "outer_step": 3,
        "peer_id": "alice",
        "fragment_id": 1,
        "schema_hash": SCHEMA.schema_hash,
        "inner_steps": 30,
        "tokens": 15_360,
        "codec": "int8",
        "numel": 5,
        "total_bytes": codec("int8").encoded_size(5),
    }
    return msg.ContributionHeader(**{**values, **changes})


def commit() -> Commit:
    """An update of both fragments of SCHEMA; the second one was rolled back."""
    bad = PeerVerdict(peer_id="bob", verdict=Verdict.NONFINITE, norm=float("inf"), weight=0.0)
    good = PeerVerdict(peer_id="alice", verdict=Verdict.OK, norm=1.5, weight=1.0)
    payload = EncodedTensor("bf16", 15, bytes(range(30)))
    return Commit(
        outer_step=4,
        round_id=1_000_001,
        digest=DIGEST,
        reason="all 2 contributors are in",
        fragments=(
            FragmentCommit(fragment_id=0, payload=payload, verdicts=(good, bad), merged_norm=1.5, clip=0.75),
            FragmentCommit(fragment_id=1, payload=None, verdicts=(bad,), merged_norm=0.0, clip=1.0),
        ),
    )


def parse(factory: Callable[[], Message], data: bytes) -> Message:
    """`data` as a message. Raises DecodeError."""
    message = factory()
    message.ParseFromString(data)
    return message
