"""An update that comes ahead of its commit, sealed: what becomes of its bytes when the manifest is here, or is another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import pytest
from blake3 import blake3

from edit.config.codec import CodecChoice
from edit.errors import RemoteProtocolError
from edit.fragments.shards import Box, Shard
from edit.records import Commit, EncodedTensor, FragmentCommit
from editpb import data_pb2
from editpb.data_messages import update_manifest_to_pb
from editpb.messages import SeenHead, UpdateManifest
from editpb.receipts import NOTHING_SEEN, Head, ReceiptFault
from editpb.transport.chunk_frames import update_frames, update_part
from editpb.transport.sealing import Seal, new_key
from peers.carriers.hub.assemblies import UpdateAssembly
from tests.support.encoded import encode
from tests.support.fake_run import schema_of, vectors

SIZES = (24, 40, 600)
SCHEMA, ROUND, RUN = schema_of(SIZES), 7, "run"
WHOLE = [Shard(fragment) for fragment in SCHEMA.fragments]
PAYLOADS = [encode("fp32", vector) for vector in vectors(SIZES, 1)]
AHEAD = data_pb2.UpdatePart(ahead=data_pb2.UpdateAhead())


def assembly(choice: str = "fp32", shards: Sequence[Shard] = WHOLE) -> UpdateAssembly:
    return UpdateAssembly(SCHEMA, 3, (0, 1, 2), shards, round_id=ROUND, choice=CodecChoice(choice))


def manifest(key: bytes, payloads: Sequence[EncodedTensor | None] = PAYLOADS, round_id: int = ROUND) -> data_pb2.UpdatePart:
    fragments = tuple(
        FragmentCommit(fragment_id=i, payload=payload, verdicts=(), merged_norm=1.0, clip=1.0)
        for i, payload in enumerate(payloads)
    )
    commit = Commit(outer_step=3, round_id=round_id, digest="0" * 64, reason="all in", fragments=fragments)
    return data_pb2.UpdatePart(manifest=update_manifest_to_pb(commit, key=key))


def send(into: UpdateAssembly, fragment_id: int, start: int, stop: int, key: bytes = b"") -> None:
    data = memoryview(PAYLOADS[fragment_id].data).cast("B")[:stop]
    seal = Seal(key, WHOLE[fragment_id], start) if key else None
    for frame in update_frames(fragment_id, data, start=start, seal=seal):
        into.take(update_part(frame))


def ahead(into: UpdateAssembly, key: bytes, sent: int) -> None:
    """The first `sent` bytes of the update, in calls of 37 bytes."""
    sizes = [4 * size for size in SIZES]
    while into.received < sent:
        request = into.request(RUN, into.received, 37)
        assert (request.round_id, request.offset, request.digest) == (ROUND, into.received, "")
        assert not into.take(AHEAD)
        i, before = 0, 0
        while before + sizes[i] <= into.received:
            before += sizes[i]
            i += 1
        start = into.received - before
        send(into, i, start, min(start + 37, sizes[i], sent - before), key)


def begin(into: UpdateAssembly, first: data_pb2.UpdatePart) -> bool:
    """A call that goes on from what is here."""
    into.request(RUN, into.received, 1 << 20)
    return into.take(first)


def plain(into: UpdateAssembly) -> None:
    """All bytes that are missing."""
    for i, size in enumerate(SIZES):
        before = 4 * sum(SIZES[:i])
        if (start := max(0, into.received - before)) < 4 * size:
            send(into, i, start, 4 * size)


@pytest.mark.parametrize("sent", [1, 96, 97, 255, 256, 1000, 4 * sum(SIZES)])
def test_what_came_ahead_is_opened_by_the_manifest_and_the_rest_follows(sent: int) -> None:
    update, key = assembly(), new_key()
    ahead(update, key, sent)
    assert (update.manifest, update.total_bytes, update.complete) == (None, None, False)
    assert update.request(RUN, sent, 100).round_id == ROUND
    assert begin(update, manifest(key))
    assert update.received == sent
    plain(update)
    assert [bytes(part.payload.data) for part in update.finish().fragments] == [bytes(one.data) for one in PAYLOADS]
    assert update.request(RUN, sent, 100).digest == "0" * 64


def test_nothing_of_it_is_a_payload_before_it_is_opened() -> None:
    update, key = assembly(), new_key()
    ahead(update, key, 4 * SIZES[0])
    begin(update, manifest(key))
    assert update.payload(0) is None
    assert update.open_one() and not update.open_one()
    payload = update.payload(0)
    assert payload is not None and bytes(payload.data) == bytes(PAYLOADS[0].data)


def test_a_stream_that_ends_with_all_bytes_sealed_has_ended_too_early() -> None:
    """It came where updates are plain: the reader opens nothing there."""
    update, key = assembly(), new_key()
    ahead(update, key, 4 * sum(SIZES))
    begin(update, manifest(key))
    with pytest.raises(RemoteProtocolError, match="comes sealed"):
        update.refuse_end()


class LoggedBytes:
    """Takes any receipt; by the log the update has these bytes."""

    head = Head(5, bytes(32))

    def seen(self) -> SeenHead:
        return SeenHead(5, bytes(32), bytes(64))

    def __init__(self, *payloads: bytes) -> None:
        self.asked, self._payloads = NOTHING_SEEN, payloads

    def accept(self, manifest: UpdateManifest, message: data_pb2.LogReceipt | None, asked: Head) -> Mapping[int, str | None]:
        self.asked = asked
        return {i: blake3(data).hexdigest() for i, data in enumerate(self._payloads)}

    def fault(self, manifest: UpdateManifest, why: str) -> NoReturn:
        raise ReceiptFault(f"outer step {manifest.outer_step}: {why}")


def audited(*payloads: bytes, shards: Sequence[Shard] = WHOLE) -> UpdateAssembly:
    receipts = LoggedBytes(*payloads)
    return UpdateAssembly(SCHEMA, 3, (0, 1, 2), shards, round_id=ROUND, choice=CodecChoice("fp32"), receipts=receipts)


@pytest.mark.parametrize("sent", [0, 97, 4 * sum(SIZES)])
@pytest.mark.parametrize("wrong", [None, 0, 1, 2])
def test_the_bytes_are_those_that_the_audit_log_names(sent: int, wrong: int | None) -> None:
    logged = [bytes(one.data) if i != wrong else b"other" for i, one in enumerate(PAYLOADS)]
    update, key = audited(*logged), new_key()
    asks = update.request(RUN, 0, 100)
    assert asks.seen_size == 5 and asks.seen == SeenHead(5, bytes(32), bytes(64))

    def receive() -> None:
        ahead(update, key, sent)
        begin(update, manifest(key if sent else b""))
        while update.open_one():
            pass
        plain(update)

    if wrong is None:
        receive()
        assert [bytes(part.payload.data) for part in update.finish().fragments] == logged
        return
    with pytest.raises(ReceiptFault, match=f"outer step 3: the bytes of fragment {wrong} are not those of the log"):
        receive()


def test_without_the_key_all_of_it_comes_anew() -> None:
    """The commit is another round's, or another process of the coordinator made the update."""
    update = assembly()
    ahead(update, new_key(), 200)
    begin(update, manifest(b"", round_id=ROUND + 1))
    assert update.received == 0
    plain(update)
    assert [bytes(part.payload.data) for part in update.finish().fragments] == [bytes(one.data) for one in PAYLOADS]


def test_a_fragment_that_is_rolled_back_ends_what_comes_ahead() -> None:
    update, key = assembly(), new_key()
    ahead(update, key, 4 * SIZES[0])
    begin(update, manifest(key, [PAYLOADS[0], None, PAYLOADS[2]]))
    send(update, 2, 0, 4 * SIZES[2])
    commit = update.finish()
    assert [part.payload is None for part in commit.fragments] == [False, True, False]
    assert bytes(commit.fragments[0].payload.data) == bytes(PAYLOADS[0].data)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda key: manifest(key, [encode("bf16", vector) for vector in vectors(SIZES, 1)]),
        lambda key: manifest(key, [None, *PAYLOADS[1:]]),
        lambda key: manifest(key, round_id=ROUND + 1),
    ],
    ids=["another codec", "rolled back", "another round"],
)
def test_a_key_for_something_else_is_refused_and_the_next_call_asks_for_what_is_committed(wrong: object) -> None:
    update, key = assembly(), new_key()
    ahead(update, key, 100)
    with pytest.raises(RemoteProtocolError, match="what came ahead of the commit is of another update"):
        begin(update, wrong(key))  # type: ignore[operator]
    assert update.received == 0
    assert update.request(RUN, 0, 100).round_id == 0


def test_who_has_not_asked_for_it_takes_nothing_ahead() -> None:
    update = UpdateAssembly(SCHEMA, 3, (0, 1, 2), WHOLE)
    with pytest.raises(RemoteProtocolError, match="does not begin with its manifest"):
        begin(update, AHEAD)


def test_no_more_is_taken_than_the_configured_codec_makes() -> None:
    update = assembly("int8")
    begin(update, AHEAD)
    with pytest.raises(RemoteProtocolError, match="more than the announced 28 bytes"):
        send(update, 0, 0, 96, new_key())


def test_no_two_shards_share_a_keystream() -> None:
    key, zeros = new_key(), bytes(64)
    boxes = [Box(0, (0,), (3,)), Box(0, (3,), (2,))]
    shards = [*WHOLE, *(Shard(SCHEMA.fragments[0], one) for one in (boxes[:1], boxes[1:], boxes, boxes[::-1]))]
    assert len({Seal(key, shard)(zeros) for shard in shards}) == len(shards)
    assert Seal(key, WHOLE[0])(zeros) != Seal(new_key(), WHOLE[0])(zeros)
    assert all(Seal(key, WHOLE[0], start)(zeros[start:]) == Seal(key, WHOLE[0])(zeros)[start:] for start in range(64))
