"""Records survive the wire; whatever else arrives is a RemoteProtocolError of one line, before memory is taken for it."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from google.protobuf.message import DecodeError, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from edit.codecs import codec_names
from edit.errors import RemoteProtocolError
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.fragments.shards import Box, Shard
from edit.merging.norms import whole_norm
from edit.plain_text import json_text
from edit.records import EncodedTensor
from editpb import control_pb2 as cpb
from editpb import data_pb2 as dpb
from editpb import governance_pb2 as gpb
from editpb import limits
from editpb import messages as msg
from editpb import tensors_pb2 as tpb
from editpb.control_messages import (
    coordinator_message_from_pb,
    coordinator_message_to_pb,
    evict_request_from_pb,
    heartbeat_from_pb,
    heartbeat_to_pb,
    hello_from_pb,
    peer_message_from_pb,
    peer_message_to_pb,
    view_from_pb,
    welcome_from_pb,
)
from editpb.data_messages import (
    commit_from_parts,
    contribution_header_from_pb,
    contribution_header_to_pb,
    found_header_from_pb,
    found_header_to_pb,
    received_from_pb,
    snapshot_manifest_from_pb,
    snapshot_manifest_to_pb,
    snapshot_request_from_pb,
    snapshot_request_to_pb,
    update_manifest_from_pb,
    update_manifest_to_pb,
    update_request_from_pb,
    update_request_to_pb,
)
from editpb.governance_messages import approval_from_pb, approval_to_pb, proposal_from_pb, proposal_to_pb
from editpb.injection_messages import inject_header_from_pb, injection_state_from_pb
from editpb.status_messages import fragment_verdicts_from_pb
from editpb.tensor_messages import codec_from_pb, schema_from_pb, schema_to_pb
from editpb.transport.chunks import Reassembly
from tests.support.exhaustive import examples
from tests.support.wire import DIGEST, RUN, SCHEMA, commit, header, messages, parse

Reader = Callable[[Any], object]

READERS: list[tuple[type[Message], Reader]] = [
    (tpb.Schema, schema_from_pb),
    (tpb.Chunk, lambda m: Reassembly("x", 40, 40).take(m)),
    (cpb.PeerMessage, peer_message_from_pb),
    (cpb.CoordinatorMessage, coordinator_message_from_pb),
    (cpb.FragmentVerdicts, fragment_verdicts_from_pb),
    (cpb.EvictRequest, evict_request_from_pb),
    (dpb.ContributionHeader, lambda m: contribution_header_from_pb(m, SCHEMA)),
    (dpb.ProbeReply, lambda m: received_from_pb(m, 99)),
    (dpb.ContributionReceipt, lambda m: received_from_pb(m, 99)),
    (dpb.UpdateRequest, lambda m: update_request_from_pb(m, SCHEMA)),
    (dpb.UpdateManifest, lambda m: update_manifest_from_pb(m, SCHEMA, 1)),
    (dpb.SnapshotManifest, snapshot_manifest_from_pb),
    (dpb.SnapshotManifest, lambda m: snapshot_manifest_from_pb(m, SCHEMA)),
    (dpb.SnapshotRequest, lambda m: snapshot_request_from_pb(m, SCHEMA)),
    (dpb.FoundHeader, found_header_from_pb),
    (dpb.InjectHeader, lambda m: inject_header_from_pb(m, SCHEMA)),
    (dpb.InjectionState, injection_state_from_pb),
    (gpb.Approval, approval_from_pb),
    (gpb.ProposalReply, proposal_from_pb),
]
APPROVAL = msg.Approval("1" * 64, "2" * 64, 2, b"certificate", b"s" * 64)
PB_APPROVAL = approval_to_pb(APPROVAL)
CHANGE = msg.ConfigChange(msg.Configuration(2, "{}"), (APPROVAL,))
HEARTBEAT = msg.Heartbeat(
    state=msg.PeerState.TRAINING,
    outer_step=4,
    digest=DIGEST,
    inner_steps=120,
    round_inner_steps=7,
    loss=2.5,
    tokens_per_s=900.0,
    device="NVIDIA H200",
    metrics={"accuracy": 0.5},
)
VIEW = msg.View(
    sequence=9, phase=msg.RunPhase.COLLECTING, outer_step=4, round_id=1_000_002, digest=DIGEST, last_reason="deadline"
)


def test_what_waits_for_approvals_survives() -> None:
    for proposal in (
        msg.Proposal(msg.Configuration(1, "{}")),
        msg.Proposal(msg.Configuration(2, "{}"), (CHANGE,), '{"a": 1}', (APPROVAL,)),
    ):
        assert proposal_from_pb(parse(gpb.ProposalReply, proposal_to_pb(proposal).SerializeToString())) == proposal


def expect_refusal(reader: Reader, message: Message) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        reader(message)
    text = str(caught.value)
    assert text.isprintable() and 0 < len(text) < 2000
    return text


def changed(message: Message, **fields: Any) -> Any:
    copy = type(message)()
    copy.CopyFrom(message)
    for name, value in fields.items():
        setattr(copy, name, value)
    return copy


# ---- nothing but RemoteProtocolError -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "reader"), READERS)
@given(data=st.data())
@settings(deadline=None, max_examples=examples(60))
def test_any_message_is_taken_or_refused(kind: type[Message], reader: Reader, data: st.DataObject) -> None:
    message = kind(**data.draw(messages(kind.DESCRIPTOR)))
    try:
        reader(message)
    except RemoteProtocolError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(("kind", "reader"), READERS)
@given(raw=st.binary(max_size=80))
@settings(deadline=None, max_examples=examples(60))
def test_any_bytes_are_refused_by_the_parser_or_by_the_converter(kind: type[Message], reader: Reader, raw: bytes) -> None:
    try:
        reader(parse(kind, raw))
    except (DecodeError, RemoteProtocolError) as error:
        assert str(error)


# ---- tensors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", codec_names())
def test_every_codec_travels_as_the_text_of_its_spec(text: str) -> None:
    assert codec_from_pb(text) == text


NO_CODEC = ["", "INT8", "int8 ", "int8:", "int8\n", "x" * 65, "int8:block=", "int8:block=-1", "../int8", "ïnt8"]


@pytest.mark.parametrize("text", NO_CODEC)
def test_a_text_that_has_not_the_form_of_a_codec_is_refused(text: str) -> None:
    with pytest.raises(RemoteProtocolError, match=r"is not NAME or NAME:OPTION=NUMBER,... of at most 64 characters"):
        codec_from_pb(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("int3", "unknown codec 'int3'"),
        ("int8:block=64", "there is no option 'block'"),
        ("int8:a=1,a=2", "given twice"),
        ("int8:a=1.2.3", "an option must be NAME=NUMBER"),
    ],
)
def test_a_codec_that_is_not_known_here_is_refused(text: str, reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        codec_from_pb(text)


_SHAPES = st.lists(st.integers(1, 9), max_size=8).map(tuple)


@given(shapes=st.lists(st.lists(_SHAPES, min_size=1, max_size=3), min_size=1, max_size=4))
@settings(deadline=None, max_examples=examples(60))
def test_a_schema_survives(shapes: list[list[tuple[int, ...]]]) -> None:
    schema = Schema(
        tuple(
            FragmentSpec(
                fragment_id=i,
                name=f"part {i}",
                tensors=tuple(TensorSpec(name=f"{i}.{j}", shape=shape) for j, shape in enumerate(part)),
            )
            for i, part in enumerate(shapes)
        )
    )
    received = schema_from_pb(parse(tpb.Schema, schema_to_pb(schema).SerializeToString()))  # type: ignore[arg-type]
    assert received == schema and received.schema_hash == schema.schema_hash


def one_tensor(**fields: Any) -> tpb.Schema:
    return tpb.Schema(fragments=[tpb.FragmentSpec(name="f", tensors=[tpb.TensorSpec(**{"name": "t", "shape": [2], **fields})])])


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (tpb.Schema(), "no tensors"),
        (tpb.Schema(fragments=[tpb.FragmentSpec(name="f")]), "without any"),
        (tpb.Schema(fragments=[tpb.FragmentSpec()] * (limits.MAX_FRAGMENTS + 1)), "more than 65536"),
        (tpb.Schema(fragments=[tpb.FragmentSpec(tensors=[tpb.TensorSpec()] * (limits.MAX_TENSORS + 1))]), "more than 131072"),
        (one_tensor(name=""), "name is empty"),
        (one_tensor(name="x" * 513), "more than 512"),
        (one_tensor(name="a\x1b[2Jb"), "control characters"),
        (one_tensor(shape=[1] * 9), "more than 8"),
        (one_tensor(shape=[0]), "not 1 to"),
        (one_tensor(shape=[1 << 63]), "not 1 to"),
        (one_tensor(shape=[1 << 30, 1 << 30]), "elements in tensor t"),
        (tpb.Schema(fragments=[tpb.FragmentSpec(name="f", tensors=[tpb.TensorSpec(name="t")] * 2)]), "named twice"),
        (
            tpb.Schema(
                fragments=[tpb.FragmentSpec(name="f", tensors=[tpb.TensorSpec(name=str(i), shape=[1 << 40]) for i in range(2)])]
            ),
            "elements in a schema",
        ),
    ],
)
def test_a_wrong_schema_is_refused(message: tpb.Schema, reason: str) -> None:
    assert reason in expect_refusal(schema_from_pb, message)


# ---- control -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        msg.Hello(run_id=RUN, schema_hash=SCHEMA.schema_hash, software="edit 0.1"),
        msg.Hello(run_id=RUN),
        msg.Hello(run_id=RUN, configuration=3),
        msg.Hello(run_id=RUN, schema_hash=SCHEMA.schema_hash, rank=3, ranks=4),
        HEARTBEAT,
        dataclasses.replace(HEARTBEAT, state=msg.PeerState.STARTING, digest="", loss=math.inf),
        dataclasses.replace(HEARTBEAT, serving=msg.Serving("[::1]:7801", "t-1")),
        msg.Goodbye("stopped by the user"),
        msg.Consent("a" * 64, "b" * 64, b"key", b"s" * 64),
        msg.Consent("a" * 64, "", b"key", b"s" * 64),
        msg.Consent("a" * 64, "", b"key", b"s" * 64, msg.DataStatement("notes", "c" * 64, "DUA-17")),
    ],
)
def test_what_a_peer_says_survives(value: msg.Hello | msg.Heartbeat | msg.Goodbye | msg.Consent) -> None:
    raw = peer_message_to_pb(value).SerializeToString()
    assert peer_message_from_pb(parse(cpb.PeerMessage, raw)) == value  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value",
    [
        msg.Welcome(run_id=RUN, peer_id="alice", config_json='{"name": "run"}', outer_step=7, first_round_id=9),
        msg.Welcome(run_id=RUN, peer_id="alice", config_json="{}", configuration=2, changes=(CHANGE,)),
        VIEW,
        *(dataclasses.replace(VIEW, phase=phase, resync="digest differs", last_committed=True) for phase in msg.RunPhase),
        msg.Expel(True, "key lost"),
    ],
)
def test_what_the_coordinator_says_survives(value: msg.Welcome | msg.View | msg.Expel) -> None:
    raw = coordinator_message_to_pb(value).SerializeToString()
    assert coordinator_message_from_pb(parse(cpb.CoordinatorMessage, raw)) == value  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"config_digest": "A" * 64}, "config_digest"),
        ({"config_digest": ""}, "config_digest"),
        ({"policy_digest": "b" * 63}, "policy_digest"),
        ({"public_key": b"k" * 257}, "a key of 257"),
        ({"signature": b"s" * 63}, "a signature of 63 bytes"),
        ({"data_statement": "two\nlines"}, "data_statement holds control characters"),
        ({"data_licence": "x" * 513}, "data_licence has 513 characters"),
        ({"data_manifest": "c" * 63}, "data_manifest"),
    ],
)
def test_a_wrong_consent_is_refused(changes: dict[str, object], reason: str) -> None:
    said = {"config_digest": "a" * 64, "policy_digest": "", "public_key": b"key", "signature": b"s" * 64} | changes
    assert reason in expect_refusal(peer_message_from_pb, cpb.PeerMessage(consent=cpb.Consent(**said)))  # type: ignore[arg-type]


def test_a_heartbeat_without_a_loss_yet_survives_and_its_json_has_null() -> None:
    starting = msg.Heartbeat(state=msg.PeerState.STARTING)
    received = heartbeat_from_pb(heartbeat_to_pb(starting))
    assert math.isnan(received.loss)
    assert json_text(received.as_json()["loss"]) == "null" and received.as_json()["state"] == "starting"


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({f"m{number}": 1.0 for number in range(33)}, "33 metrics, at most 32"),
        ({"a" * 65: 1.0}, "the name of a metric has 65 characters"),
        ({"\x1b[2J": 1.0}, "the name of a metric holds control characters"),
        ({"accuracy": math.inf}, "metric accuracy is inf"),
    ],
)
def test_wrong_metrics_are_refused(metrics: dict[str, float], reason: str) -> None:
    assert reason in expect_refusal(heartbeat_from_pb, heartbeat_to_pb(dataclasses.replace(HEARTBEAT, metrics=metrics)))


def test_own_reasons_are_made_one_bounded_line_before_they_are_sent() -> None:
    sent = coordinator_message_to_pb(msg.Expel(False, "two\nlines \x1b[0m" + "x" * 9000))
    received = coordinator_message_from_pb(sent)
    assert isinstance(received, msg.Expel)
    assert received.reason.startswith("two lines  [0mxxx") and len(received.reason) == limits.MAX_TEXT_CHARS


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"state": 0}, "peer_state 0"),
        ({"state": 77}, "peer_state 77"),
        ({"outer_step": 1 << 60}, "outer_step"),
        ({"digest": DIGEST.upper()}, "not 64 hexadecimal"),
        ({"digest": "0"}, "not 64 hexadecimal"),
        ({"step_s": math.nan}, "step_s"),
        ({"tokens_per_s": -1.0}, "tokens_per_s"),
        ({"bytes_sent": (1 << 64) - 1}, "bytes_sent"),
    ],
)
def test_a_wrong_heartbeat_is_refused(fields: dict[str, Any], reason: str) -> None:
    assert reason in expect_refusal(heartbeat_from_pb, changed(heartbeat_to_pb(HEARTBEAT), **fields))


@pytest.mark.parametrize(
    ("message", "reader", "reason"),
    [
        (cpb.PeerMessage(), peer_message_from_pb, "without content"),
        (cpb.CoordinatorMessage(), coordinator_message_from_pb, "without content"),
        (cpb.Hello(protocol=1, run_id=RUN), hello_from_pb, "speaks protocol 1"),
        (cpb.Hello(protocol=msg.PROTOCOL, run_id="../run"), hello_from_pb, "run_id"),
        (cpb.Hello(protocol=msg.PROTOCOL, run_id=RUN, software="x" * 4097), hello_from_pb, "software"),
        (cpb.Hello(protocol=msg.PROTOCOL, run_id=RUN, rank=1), hello_from_pb, "rank is 1, not 0 to 0"),
        (cpb.Hello(protocol=msg.PROTOCOL, run_id=RUN, rank=4, ranks=4), hello_from_pb, "rank is 4, not 0 to 3"),
        (cpb.Hello(protocol=msg.PROTOCOL, run_id=RUN, ranks=65537), hello_from_pb, "ranks is 65537"),
        (cpb.View(phase=0), view_from_pb, "run_phase 0"),  # type: ignore[arg-type]
        (cpb.Hello(protocol=msg.PROTOCOL, run_id=RUN, configuration=1 << 63), hello_from_pb, "configuration"),
        (cpb.Welcome(run_id=RUN, peer_id="a", changes=[gpb.ConfigChange(number=2)] * 65), welcome_from_pb, "65 changes of the"),
        (cpb.Welcome(run_id=RUN, peer_id="a", changes=[gpb.ConfigChange(number=1)]), welcome_from_pb, "number is 1"),
        (gpb.ProposalReply(configuration=1, approvals=[PB_APPROVAL] * 33), proposal_from_pb, "33 approvals, more than 32"),
        (gpb.ProposalReply(), proposal_from_pb, "configuration is 0"),
        (gpb.ProposalReply(configuration=1, proposed_json=" " * ((1 << 20) + 1)), proposal_from_pb, "proposed_json"),
        (changed(PB_APPROVAL, certificate=b""), approval_from_pb, "an approval has a certificate of 0 and"),
        (changed(PB_APPROVAL, certificate=b"x" * 16_385), approval_from_pb, "an approval has a certificate of 16385 and"),
        (changed(PB_APPROVAL, signature=b"x" * 63), approval_from_pb, "a signature of 63 bytes"),
        (changed(PB_APPROVAL, before_digest="x"), approval_from_pb, "before_digest"),
        (changed(PB_APPROVAL, number=1), approval_from_pb, "number is 1"),
        (cpb.Welcome(run_id=RUN, peer_id="a" * 65), welcome_from_pb, "peer_id"),
        (cpb.Welcome(run_id=RUN, peer_id="a", first_round_id=1 << 63), welcome_from_pb, "first_round_id"),
        (cpb.Welcome(run_id=RUN, peer_id="a", config_json=" " * ((1 << 20) + 1)), welcome_from_pb, "config_json"),
        (cpb.FragmentVerdicts(verdicts=[cpb.PeerVerdict()] * 65537), fragment_verdicts_from_pb, "more than 65536"),
        (
            cpb.FragmentVerdicts(verdicts=[cpb.PeerVerdict(peer_id="a", verdict="ok")] * 2),
            fragment_verdicts_from_pb,
            "two verdicts",
        ),
        (cpb.FragmentVerdicts(clip=1.5), fragment_verdicts_from_pb, "clip"),
        (cpb.FragmentVerdicts(merged_norm=-1), fragment_verdicts_from_pb, "merged_norm"),
        (
            cpb.FragmentVerdicts(verdicts=[cpb.PeerVerdict(peer_id="a", verdict="__class__")]),
            fragment_verdicts_from_pb,
            "verdict '__class__' is not known",
        ),
        (
            cpb.FragmentVerdicts(verdicts=[cpb.PeerVerdict(peer_id="a", verdict="ok", weight=math.nan)]),
            fragment_verdicts_from_pb,
            "weight",
        ),
        (cpb.EvictRequest(peer_id="", reason="x"), evict_request_from_pb, "peer_id"),
    ],
)
def test_wrong_control_messages_are_refused(message: Message, reader: Reader, reason: str) -> None:
    assert reason in expect_refusal(reader, message)


# ---- data ----------------------------------------------------------------------------------------------------------------


def test_a_contribution_header_survives() -> None:
    sent = header()
    received = contribution_header_from_pb(contribution_header_to_pb(sent), SCHEMA)
    assert received == sent


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"run_id": ""}, "run_id"),
        ({"peer_id": "a/b"}, "peer_id"),
        ({"round_id": 0}, "round_id"),
        ({"outer_step": 1 << 49}, "outer_step"),
        ({"fragment_id": 2}, "fragment_id is 2, not 0 to 1"),
        ({"fragment_id": 1 << 16}, "fragment_id"),
        ({"schema_hash": "abc"}, "schema_hash"),
        ({"inner_steps": 0}, "inner_steps"),
        ({"tokens": (1 << 64) - 1}, "tokens"),
        ({"codec": ""}, "codec '' is not NAME"),
        ({"codec": "int3"}, "unknown codec 'int3'"),
        ({"norm": -1.0}, "a norm of -1.0"),
        ({"norm": math.nan}, "a norm of nan"),
        ({"norm": 1.1e21}, "a norm of 1.1e+21"),
        ({"norm": sys.float_info.max}, "a norm of 1.79"),
        ({"numel": 0}, "numel"),
        ({"numel": (1 << 40) + 1}, "numel"),
        ({"total_bytes": 1 << 63}, "total_bytes"),
        ({"total_bytes": 8}, "8 bytes announced"),
        ({"codec": "fp32"}, "fp32 makes 20 of 5"),
        ({"codec": "fp32", "numel": 6, "total_bytes": 24}, "blocks.0 has 5 elements, 6"),
    ],
)
def test_a_wrong_contribution_header_is_refused(fields: dict[str, Any], reason: str) -> None:
    message = changed(contribution_header_to_pb(header()), **fields)
    assert reason in expect_refusal(lambda m: contribution_header_from_pb(m, SCHEMA), message)


def test_the_norm_of_whatever_can_be_finite_is_taken_and_that_of_what_is_not() -> None:
    largest = math.sqrt(torch.finfo(torch.float32).max)  # of what one rank holds
    for norm in (0.0, largest, whole_norm([largest] * limits.MAX_RANKS), math.inf):
        assert contribution_header_from_pb(contribution_header_to_pb(header(norm=norm)), SCHEMA).norm == norm


def test_a_header_of_another_schema_is_left_to_the_caller_who_can_name_the_reason() -> None:
    other = contribution_header_to_pb(header(schema_hash=DIGEST, codec="fp32", numel=7, total_bytes=28, fragment_id=9))
    assert contribution_header_from_pb(other, SCHEMA).schema_hash == DIGEST


SQUARE = tpb.Box(tensor=0, offsets=[0, 0], sizes=[2, 2])
SCALE = tpb.Box(tensor=1)
ROW = tpb.Box(tensor=0, offsets=[1, 0], sizes=[1, 2])


def boxed(*boxes: tpb.Box, **changes: Any) -> dpb.ContributionHeader:
    message = contribution_header_to_pb(header(**changes))
    message.boxes.extend(boxes)
    return message


def test_boxes_that_are_the_whole_fragment_are_the_same_as_none() -> None:
    assert contribution_header_from_pb(boxed(SQUARE, SCALE), SCHEMA) == header()


def test_a_ranks_part_of_a_contribution_survives() -> None:
    sent = header(
        rank=2,
        attempt=1_800_000_000_000 << 20,
        boxes=(Box(0, (1, 0), (1, 2)), Box(1, (), ())),
        codec="fp32",
        numel=3,
        total_bytes=12,
    )
    message = parse(dpb.ContributionHeader, contribution_header_to_pb(sent).SerializeToString())
    received = contribution_header_from_pb(message, SCHEMA)  # type: ignore[arg-type]
    assert received == sent


WRONG_BOXES = [
    ([tpb.Box(tensor=0, offsets=[1, 0], sizes=[2, 2])], "no box at [1, 0] of [2, 2] lies in it"),
    ([tpb.Box(tensor=0, offsets=[0], sizes=[2, 2])], "no box at [0]"),
    ([tpb.Box(tensor=0, offsets=[0, 0], sizes=[0, 2])], "no box at"),
    ([tpb.Box(tensor=0, offsets=[(1 << 64) - 1, 0], sizes=[1, 1])], "no box at"),
    ([tpb.Box(tensor=0, offsets=[0, 0], sizes=[1 << 63, 1 << 63])], "no box at"),
    ([tpb.Box(tensor=2)], "tensor is 2, not 0 to 1"),
    ([tpb.Box(tensor=(1 << 32) - 1)], "not 0 to 1"),
    ([ROW, SQUARE], "two shards overlap"),
    ([SCALE, SCALE], "two shards overlap"),
    ([ROW] * 17, "17 boxes of tensor blocks.0.weight, more than 16"),
    ([tpb.Box(tensor=0, offsets=[0] * 9, sizes=[1, 1])], "9 offsets of a box of fragment blocks.0, more than 8"),
    ([tpb.Box(tensor=0, offsets=[0, 0], sizes=[1] * 100_000)], "100000 sizes of a box of fragment blocks.0, more than 8"),
]


@pytest.mark.parametrize(("boxes", "reason"), WRONG_BOXES)
def test_wrong_boxes_are_refused_wherever_they_stand(boxes: list[tpb.Box], reason: str) -> None:
    update = dpb.UpdateRequest(run_id=RUN, outer_step=1, held=[dpb.FragmentBoxes(fragment_id=1, boxes=boxes)])
    snapshot = dpb.SnapshotRequest(run_id=RUN, fragment_id=1, boxes=boxes)
    assert reason in expect_refusal(lambda m: contribution_header_from_pb(m, SCHEMA), boxed(*boxes))
    assert reason in expect_refusal(lambda m: update_request_from_pb(m, SCHEMA), update)
    assert reason in expect_refusal(lambda m: snapshot_request_from_pb(m, SCHEMA), snapshot)


def test_boxes_in_a_great_many_pieces_are_refused() -> None:
    """Where a codec's blocks lie in them is counted piece by piece. A column of a large embedding is within the bound."""
    tall = Schema(
        tuple(
            FragmentSpec(fragment_id=i, name=f"w{i}", tensors=(TensorSpec(name=f"w{i}", shape=(1 << 19, 4)),)) for i in range(5)
        )
    )
    column, other = (tpb.Box(tensor=0, offsets=[0, i], sizes=[1 << 19, 1]) for i in (0, 2))

    def request(*boxes: tpb.Box, fragments: int) -> dpb.UpdateRequest:
        held = [dpb.FragmentBoxes(fragment_id=i, boxes=boxes) for i in range(fragments)]
        return dpb.UpdateRequest(run_id=RUN, outer_step=1, held=held)

    def parsed(message: dpb.UpdateRequest) -> msg.UpdateRequest:
        return update_request_from_pb(message, tall)

    assert parsed(request(column, fragments=4)).shards is not None
    one = expect_refusal(parsed, request(column, other, fragments=1))
    assert one == "boxes of fragment w0 in 1048576 pieces, more than 524288"
    assert expect_refusal(parsed, request(column, fragments=5)) == "boxes of all fragments in 2621440 pieces, more than 2097152"


def test_a_part_has_the_size_of_its_boxes() -> None:
    reason = expect_refusal(lambda m: contribution_header_from_pb(m, SCHEMA), boxed(ROW))
    assert reason == "fragment blocks.0 has 2 elements in those boxes, 5 were announced"


SIGNED = {"payload_blake3": b"h" * 32, "public_key": b"k" * 91, "signature": b"s" * 64}


def test_a_signed_contribution_header_survives() -> None:
    sent = header(**SIGNED)
    assert contribution_header_from_pb(contribution_header_to_pb(sent), SCHEMA) == sent


@pytest.mark.parametrize(
    "wrong",
    [
        {"payload_blake3": b""},
        {"payload_blake3": b"h" * 31},
        {"public_key": b""},
        {"public_key": b"k" * 257},
        {"signature": b"s" * 65},
    ],
)
def test_a_contribution_is_signed_wholly_or_not_at_all(wrong: dict[str, bytes]) -> None:
    message = changed(contribution_header_to_pb(header()), **(SIGNED | wrong))
    assert "a signed contribution with a hash of" in expect_refusal(lambda m: contribution_header_from_pb(m, SCHEMA), message)


@pytest.mark.parametrize(("fields", "reason"), [({"rank": 65536}, "rank is 65536"), ({"attempt": 1 << 63}, "attempt")])
def test_ranks_and_attempts_are_bounded(fields: dict[str, Any], reason: str) -> None:
    message = changed(contribution_header_to_pb(header()), **fields)
    assert reason in expect_refusal(lambda m: contribution_header_from_pb(m, SCHEMA), message)


def test_boxes_of_a_header_of_another_schema_are_not_looked_at() -> None:
    other = boxed(tpb.Box(tensor=99), schema_hash=DIGEST)
    assert contribution_header_from_pb(other, SCHEMA).boxes is None


def test_a_commit_survives_as_manifest_and_bytes() -> None:
    sent = commit()
    message = parse(dpb.UpdateManifest, update_manifest_to_pb(sent).SerializeToString())
    manifest = update_manifest_from_pb(message, SCHEMA, 4)  # type: ignore[arg-type]
    assert [part.total_bytes for part in manifest.fragments] == [30, 0]
    payloads = [fragment.payload.data if fragment.payload else None for fragment in sent.fragments]
    assert commit_from_parts(manifest, payloads) == sent
    for wrong in ([None, None], [bytes(29), None], [bytes(30), b""], [bytes(30)]):
        with pytest.raises(RemoteProtocolError):
            commit_from_parts(manifest, wrong)


def held(*parts: tuple[Box, ...] | None) -> tuple[Shard, ...]:
    return tuple(Shard(fragment, boxes) for fragment, boxes in zip(SCHEMA.fragments, parts, strict=True))


def test_the_update_of_some_fragments_cut_to_what_a_rank_holds_survives() -> None:
    shards = held((Box(0, (1, 0), (2, 3)),), ())
    both = commit()
    cut = EncodedTensor("bf16", 6, bytes(range(6, 18)))
    nothing = dataclasses.replace(both.fragments[1], payload=EncodedTensor("int8", 0, b""))
    sent = dataclasses.replace(both, fragments=(dataclasses.replace(both.fragments[0], payload=cut), nothing))
    message = update_manifest_to_pb(sent)
    manifest = update_manifest_from_pb(message, SCHEMA, 4, shards=shards)
    assert [part.total_bytes for part in manifest.fragments] == [12, 0]
    assert commit_from_parts(manifest, [cut.data, None]) == sent, "None: nothing was sent, which is no rollback"
    assert "6 were announced" in expect_refusal(lambda m: update_manifest_from_pb(m, SCHEMA, 4), message)
    other = held((Box(0, (1, 0), (1, 3)),), ())
    reason = expect_refusal(lambda m: update_manifest_from_pb(m, SCHEMA, 4, shards=other), message)
    assert reason == "fragment embed has 3 elements in those boxes, 6 were announced"
    second = update_manifest_to_pb(dataclasses.replace(both, fragments=both.fragments[1:]))
    assert update_manifest_from_pb(second, SCHEMA, 4, due=(1,)).fragments[0].commit == both.fragments[1]
    for due, reason in (((0,), "fragment 1 where 0 is due"), (None, "1 fragments, 2 are exchanged"), ((), "0 are exchanged")):
        assert reason in expect_refusal(lambda m, due=due: update_manifest_from_pb(m, SCHEMA, 4, due=due), second)


def test_what_a_rank_holds_survives_in_a_request_for_an_update() -> None:
    shards = held(None, (Box(0, (1, 0), (1, 2)),))
    sent = update_request_to_pb(msg.UpdateRequest(RUN, 4, shards))
    received = update_request_from_pb(parse(dpb.UpdateRequest, sent.SerializeToString()), SCHEMA)  # type: ignore[arg-type]
    assert received.shards is not None
    assert [shard.boxes for shard in received.shards] == [shard.boxes for shard in shards]
    nothing = update_request_from_pb(update_request_to_pb(msg.UpdateRequest(RUN, 4, held(None, ()))), SCHEMA)
    assert nothing.shards is not None and [shard.numel for shard in nothing.shards] == [15, 0]
    everything = update_request_to_pb(msg.UpdateRequest(RUN, 4, held(None, None)))
    assert update_request_from_pb(everything, SCHEMA) == msg.UpdateRequest(RUN, 4)


@pytest.mark.parametrize(
    ("fragment_ids", "reason"),
    [
        ([2], "fragment_id is 2"),
        ([1, 0], "fragment 0 is named after fragment 1"),
        ([0, 0], "after"),
        ([0, 1, 0], "more than 2"),
    ],
)
def test_a_request_names_each_fragment_once_and_in_order(fragment_ids: list[int], reason: str) -> None:
    parts = [dpb.FragmentBoxes(fragment_id=i) for i in fragment_ids]
    message = dpb.UpdateRequest(run_id=RUN, outer_step=1, held=parts)
    assert reason in expect_refusal(lambda m: update_request_from_pb(m, SCHEMA), message)


def wrong_manifest(change: Callable[[dpb.UpdateManifest], object]) -> dpb.UpdateManifest:
    message = update_manifest_to_pb(commit())
    change(message)
    return message


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: setattr(m, "outer_step", 5), "outer step 5 where 4"),
        (lambda m: setattr(m, "digest", ""), "digest"),
        (lambda m: setattr(m, "reason", "a\rb"), "reason"),
        (lambda m: setattr(m, "key", bytes(31)), "a key of 31 bytes; 32 are due, or none"),
        (lambda m: m.fragments.pop(), "1 fragments, 2 are exchanged"),
        (lambda m: m.fragments.add(), "3 fragments, 2 are exchanged"),
        (lambda m: m.fragments.reverse(), "fragment 1 where 0 is due"),
        (lambda m: setattr(m.fragments[0].verdicts, "fragment_id", 1), "fragment 0 where 0 is due"),
        (lambda m: setattr(m.fragments[0], "rollback", True), "rolled back and yet has bytes"),
        (lambda m: setattr(m.fragments[0], "total_bytes", 1 << 62), "bytes announced"),
        (lambda m: setattr(m.fragments[0], "numel", 16), "has 15 elements"),
        (lambda m: setattr(m.fragments[1], "rollback", False), "codec '' is not NAME"),
    ],
)
def test_a_wrong_update_manifest_is_refused(change: Callable[[dpb.UpdateManifest], object], reason: str) -> None:
    assert reason in expect_refusal(lambda m: update_manifest_from_pb(m, SCHEMA, 4), wrong_manifest(change))


def test_a_snapshot_manifest_survives_and_another_model_is_named() -> None:
    hashes = (bytes(32), b"\1" * 32)
    sent = msg.SnapshotManifest(outer_step=0, digest=DIGEST, schema=SCHEMA, fragment_hash=hashes, run_outer_step=3)
    message = snapshot_manifest_to_pb(sent)
    assert snapshot_manifest_from_pb(message, SCHEMA) == snapshot_manifest_from_pb(message) == sent
    other = Schema((*SCHEMA.fragments[:1], dataclasses.replace(SCHEMA.fragments[1], name="blocks.1")))
    assert "blocks.1" in expect_refusal(lambda m: snapshot_manifest_from_pb(m, other), message)
    del message.fragment_hash[1]
    assert "one BLAKE3 per fragment" in expect_refusal(snapshot_manifest_from_pb, message)
    message.fragment_hash.append(bytes(31))
    assert "one BLAKE3 per fragment" in expect_refusal(snapshot_manifest_from_pb, message)


def test_the_donors_of_a_snapshot_survive_and_are_bounded() -> None:
    donors = (msg.Donor("b", msg.Serving("host:1", "word")), msg.Donor("c", msg.Serving("[::1]:65535", "w.2")))
    hashes = (bytes(32), b"\1" * 32)
    sent = msg.SnapshotManifest(outer_step=0, digest=DIGEST, schema=SCHEMA, fragment_hash=hashes, donors=donors)
    message = snapshot_manifest_to_pb(sent)
    assert snapshot_manifest_from_pb(message) == sent
    for address in ("", "host", "host:0", "dns:///host:1", "unix:/tmp/s", "a b:1"):
        message.donors[1].serving.address = address
        assert "is not HOST:PORT" in expect_refusal(snapshot_manifest_from_pb, message)
    message.donors[1].serving.address = "host:1"
    message.donors[1].serving.ticket = "x" * 65
    assert "ticket" in expect_refusal(snapshot_manifest_from_pb, message)
    del message.donors[1]
    message.donors.extend([message.donors[0]] * limits.MAX_DONORS)
    assert "9 donors, more than 8" in expect_refusal(snapshot_manifest_from_pb, message)


def test_requests_survive_and_are_bounded() -> None:
    update = msg.UpdateRequest(RUN, 4)
    assert update_request_from_pb(update_request_to_pb(update), SCHEMA) == update
    found = msg.FoundHeader(run_id=RUN, schema_hash=SCHEMA.schema_hash, digest=DIGEST)
    assert found_header_from_pb(found_header_to_pb(found)) == found
    wanted = msg.SnapshotRequest(run_id=RUN, outer_step=4, fragment_id=1, offset=20)
    sent = snapshot_request_to_pb(wanted)
    assert snapshot_request_from_pb(sent, SCHEMA) == wanted
    for fields in ({"offset": 21}, {"fragment_id": 2}, {"run_id": "a b"}):
        expect_refusal(lambda m: snapshot_request_from_pb(m, SCHEMA), changed(sent, **fields))
    told = dataclasses.replace(wanted, ticket="word")
    assert snapshot_request_from_pb(snapshot_request_to_pb(told), SCHEMA) == told
    assert "ticket" in expect_refusal(lambda m: snapshot_request_from_pb(m, SCHEMA), changed(sent, ticket="a b"))
    part = dataclasses.replace(wanted, boxes=(Box(0, (0, 1), (2, 1)),), offset=8)
    sent = snapshot_request_to_pb(part)
    assert snapshot_request_from_pb(sent, SCHEMA) == part
    assert "offset is 9" in expect_refusal(lambda m: snapshot_request_from_pb(m, SCHEMA), changed(sent, offset=9))
    wrong = dpb.UpdateRequest(run_id=RUN, outer_step=0)
    assert "outer_step" in expect_refusal(lambda m: update_request_from_pb(m, SCHEMA), wrong)
    assert received_from_pb(dpb.ProbeReply(received_bytes=5), 5) == msg.Received(5, False)
    expect_refusal(lambda m: received_from_pb(m, 5), dpb.ContributionReceipt(received_bytes=6))


@pytest.mark.parametrize("buffers", [False, True])
def test_a_fragment_of_buffers_says_so_on_the_wire(buffers: bool) -> None:
    tensors = (TensorSpec(name="a.b", shape=(2,)),)
    schema = Schema((FragmentSpec(fragment_id=0, name="a", tensors=tensors, buffers=buffers),))
    assert schema_from_pb(parse(tpb.Schema, schema_to_pb(schema).SerializeToString())) == schema  # type: ignore[arg-type]
