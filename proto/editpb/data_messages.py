"""Converts the messages of data.proto to and from records. Bounds and validates everything that arrives.

`x_to_pb(record)` never fails; `x_from_pb(message)` raises RemoteProtocolError with one line, and nothing else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import pairwise

from edit.fragments.schema import FragmentSpec, Schema
from edit.fragments.shards import Shard
from edit.records import MOST_SCORE, Commit, EncodedTensor, FragmentCommit
from edit.trust.checkpoints import ED25519_BYTES, MOST_NOTE_BYTES
from edit.trust.merkle import HASH_BYTES
from edit.trust.signatures import MOST_KEY_BYTES, SIGNATURE_BYTES
from editpb import data_pb2 as dpb
from editpb import limits as lim
from editpb import messages as msg
from editpb import tensors_pb2 as tpb
from editpb.control_messages import serving_from_pb, serving_to_pb
from editpb.limits import check_digest, check_id, check_text, fail, one_line, within
from editpb.status_messages import fragment_verdicts_from_pb, fragment_verdicts_to_pb
from editpb.tensor_messages import (
    boxes_to_pb,
    check_encoded_size,
    codec_from_pb,
    schema_from_pb,
    schema_to_pb,
    shard_from_pb,
)
from editpb.transport.sealing import KEY_BYTES

__all__ = [
    "commit_from_parts",
    "contribution_header_from_pb",
    "contribution_header_to_pb",
    "contribution_request_from_pb",
    "contribution_request_to_pb",
    "found_header_from_pb",
    "found_header_to_pb",
    "receipt_from_pb",
    "receipt_to_pb",
    "received_from_pb",
    "scores_from_pb",
    "scores_to_pb",
    "snapshot_manifest_from_pb",
    "snapshot_manifest_to_pb",
    "snapshot_request_from_pb",
    "snapshot_request_to_pb",
    "update_manifest_from_pb",
    "update_manifest_to_pb",
    "update_request_from_pb",
    "update_request_to_pb",
]


def contribution_header_to_pb(header: msg.ContributionHeader) -> dpb.ContributionHeader:
    """Encode the header of a contribution, or of one rank's shard of it."""
    return dpb.ContributionHeader(
        run_id=header.run_id,
        round_id=header.round_id,
        outer_step=header.outer_step,
        peer_id=header.peer_id,
        fragment_id=header.fragment_id,
        schema_hash=header.schema_hash,
        inner_steps=header.inner_steps,
        tokens=header.tokens,
        codec=header.codec,
        numel=header.numel,
        total_bytes=header.total_bytes,
        rank=header.rank,
        attempt=header.attempt,
        boxes=boxes_to_pb(header.boxes or ()),
        payload_blake3=header.payload_blake3,
        public_key=header.public_key,
        signature=header.signature,
        norm=header.norm,
        seen=_seen_to_pb(header.seen) if header.seen is not None else None,
    )


def _seen_to_pb(seen: msg.SeenHead) -> dpb.SeenHead:
    return dpb.SeenHead(size=seen.size, root=seen.root, signature=seen.signature)


def contribution_header_from_pb(message: dpb.ContributionHeader, schema: Schema) -> msg.ContributionHeader:
    """Decode the header of a contribution, or of one rank's shard of it.

    schema: the run's. Sizes and boxes are checked against it when the header names the same schema_hash. Otherwise boxes is
    None and the caller refuses the header, with a better reason than a wrong size.
    """
    header = msg.ContributionHeader(
        run_id=check_id("run_id", message.run_id),
        round_id=within("round_id", message.round_id, 1, lim.MAX_COUNT),
        outer_step=within("outer_step", message.outer_step, 0, lim.MAX_STEP),
        peer_id=check_id("peer_id", message.peer_id),
        fragment_id=within("fragment_id", message.fragment_id, 0, lim.MAX_FRAGMENTS - 1),
        schema_hash=check_digest("schema_hash", message.schema_hash),
        inner_steps=within("inner_steps", message.inner_steps, 1, lim.MAX_STEP),
        tokens=within("tokens", message.tokens, 0, lim.MAX_COUNT),
        codec=codec_from_pb(message.codec),
        numel=within("numel", message.numel, 1, lim.MAX_NUMEL),
        total_bytes=within("total_bytes", message.total_bytes, 1, lim.MAX_BYTES),
        rank=within("rank", message.rank, 0, lim.MAX_RANKS - 1),
        attempt=within("attempt", message.attempt, 0, lim.MAX_COUNT),
        norm=_norm(message.norm) if message.HasField("norm") else None,
        payload_blake3=message.payload_blake3,
        public_key=message.public_key,
        signature=message.signature,
        seen=_seen_from_pb(message.seen) if message.HasField("seen") else None,
    )
    _check_signed(header)
    check_encoded_size(header.codec, header.numel, header.total_bytes, f"fragment {header.fragment_id}")
    if header.schema_hash != schema.schema_hash:
        return header
    shard = _shard_of(_fragment_of(schema, header.fragment_id), message.boxes)
    _check_numel(shard, shard.numel, header.numel)
    return header if shard.is_whole else dataclasses.replace(header, boxes=shard.boxes)


def _norm(claimed: float) -> float:
    if not (0 <= claimed <= lim.MAX_NORM or claimed == math.inf):
        fail(f"a norm of {claimed}")
    return claimed


def _check_signed(header: msg.ContributionHeader) -> None:
    """Whether it is the peer's signature is not known here."""
    sizes = len(header.payload_blake3), len(header.public_key), len(header.signature)
    if sizes != (0, 0, 0) and not (sizes[0] == 32 and 0 < sizes[1] <= MOST_KEY_BYTES and sizes[2] == SIGNATURE_BYTES):
        fail(f"a signed contribution with a hash of {sizes[0]} bytes, a key of {sizes[1]} and a signature of {sizes[2]}")
    if header.seen is not None and not header.signature:
        fail("a contribution that is not signed names a head of the audit log")


def _seen_from_pb(message: dpb.SeenHead) -> msg.SeenHead:
    if (len(message.root), len(message.signature)) != (HASH_BYTES, ED25519_BYTES):
        fail(f"a head of the audit log with a root of {len(message.root)} bytes and a signature of {len(message.signature)}")
    return msg.SeenHead(within("seen.size", message.size, 1, lim.MAX_COUNT), message.root, message.signature)


def _fragment_of(schema: Schema, fragment_id: int) -> FragmentSpec:
    return schema.fragments[within("fragment_id", fragment_id, 0, len(schema.fragments) - 1)]


def _shard_of(fragment: FragmentSpec, boxes: Sequence[tpb.Box]) -> Shard:
    """Decode boxes where none means the whole fragment."""
    return shard_from_pb(boxes, fragment) if boxes else Shard(fragment)


def _check_numel(shard: Shard, expected: int, announced: int) -> None:
    if announced != expected:
        where = "" if shard.is_whole else " in those boxes"
        fail(f"fragment {shard.fragment.name} has {expected} elements{where}, {announced} were announced")


def received_from_pb(message: dpb.ProbeReply | dpb.ContributionReceipt | dpb.FoundReply, total_bytes: int) -> msg.Received:
    """Decode how much of a contribution, or of the founder's parameters, of `total_bytes` the aggregator holds."""
    received = within("received_bytes", message.received_bytes, 0, total_bytes)
    return msg.Received(received, message.complete)


def update_request_to_pb(request: msg.UpdateRequest) -> dpb.UpdateRequest:
    """Encode the request for an update, or for what of it concerns this rank."""
    held = [
        dpb.FragmentBoxes(fragment_id=shard.fragment.fragment_id, boxes=boxes_to_pb(shard.boxes))
        for shard in request.shards or ()
        if not shard.is_whole
    ]
    return dpb.UpdateRequest(
        run_id=request.run_id,
        outer_step=request.outer_step,
        held=held,
        offset=request.offset,
        limit=request.limit,
        digest=request.digest,
        round_id=request.round_id,
        seen_size=request.seen_size,
        seen=_seen_to_pb(request.seen) if request.seen is not None else None,
    )


def update_request_from_pb(message: dpb.UpdateRequest, schema: Schema) -> msg.UpdateRequest:
    """Decode the request for an update. shards is None when everything is wanted."""
    lim.at_most("fragments with boxes", message.held, len(schema.fragments))
    held: dict[int, Shard] = {}
    for one in message.held:
        fragment = _fragment_of(schema, one.fragment_id)
        if held and fragment.fragment_id <= max(held):
            fail(f"fragment {one.fragment_id} is named after fragment {max(held)}")
        held[fragment.fragment_id] = shard_from_pb(one.boxes, fragment)
    if (pieces := sum(shard.run_count for shard in held.values())) > lim.MAX_RUNS_OF_REQUEST:
        fail(f"boxes of all fragments in {pieces} pieces, more than {lim.MAX_RUNS_OF_REQUEST}")
    shards = tuple(held.get(fragment.fragment_id) or Shard(fragment) for fragment in schema.fragments)
    return msg.UpdateRequest(
        check_id("run_id", message.run_id),
        within("outer_step", message.outer_step, 1, lim.MAX_STEP),
        None if all(shard.is_whole for shard in shards) else shards,
        within("offset", message.offset, 0, lim.MAX_COUNT),
        within("limit", message.limit, 0, lim.MAX_COUNT),
        check_digest("digest", message.digest, empty=message.offset == 0 or message.round_id > 0),
        within("round_id", message.round_id, 0, lim.MAX_COUNT),
        within("seen_size", message.seen_size, 0, lim.MAX_COUNT) if message.HasField("seen_size") else None,
        _seen_from_pb(message.seen) if message.HasField("seen") else None,
    )


def update_manifest_to_pb(
    commit: Commit, shards: Sequence[Shard] | None = None, key: bytes = b"", receipt: msg.LogReceipt | None = None
) -> dpb.UpdateManifest:
    """Encode a commit without the bytes of its payloads; they follow in the same order.

    shards: those of the request, one per fragment of the schema: the payloads are announced as they will be cut to them.
    key: opens what was sent ahead. receipt: of the commit, where the run keeps an audit log and one is wanted.
    """
    return dpb.UpdateManifest(
        outer_step=commit.outer_step,
        round_id=commit.round_id,
        digest=commit.digest,
        reason=one_line(commit.reason),
        fragments=[
            _fragment_update_to_pb(fragment, shards[fragment.fragment_id] if shards is not None else None)
            for fragment in commit.fragments
        ],
        key=key,
        receipt=receipt_to_pb(receipt) if receipt is not None else None,
    )


def receipt_to_pb(receipt: msg.LogReceipt) -> dpb.LogReceipt:
    """Encode that a commit stands in the audit log."""
    return dpb.LogReceipt(
        entry=receipt.entry,
        index=receipt.index,
        inclusion=receipt.inclusion,
        checkpoint=receipt.checkpoint,
        consistency=receipt.consistency,
        seen=[dpb.SeenProof(size=size, consistency=proof) for size, proof in sorted(receipt.seen.items())],
    )


def receipt_from_pb(message: dpb.LogReceipt) -> msg.LogReceipt:
    """Decode that a commit stands in the audit log. `editpb.receipts` checks whether it does."""
    if len(message.entry) > lim.MAX_ENTRY_BYTES:
        fail(f"an entry of {len(message.entry)} bytes, more than {lim.MAX_ENTRY_BYTES}")
    if len(message.checkpoint) > MOST_NOTE_BYTES:
        fail(f"a checkpoint of {len(message.checkpoint)} characters, more than {MOST_NOTE_BYTES}")
    lim.at_most("proofs of heads", message.seen, lim.MAX_SEEN_PROOFS)
    return msg.LogReceipt(
        entry=message.entry,
        index=within("index", message.index, 0, lim.MAX_COUNT),
        inclusion=_proof(message.inclusion),
        checkpoint=message.checkpoint,
        consistency=_proof(message.consistency),
        seen={within("seen.size", one.size, 1, lim.MAX_COUNT): _proof(one.consistency) for one in message.seen},
    )


def _proof(hashes: Sequence[bytes]) -> tuple[bytes, ...]:
    lim.at_most("hashes of a proof", hashes, lim.MAX_PROOF_HASHES)
    if any(len(each) != HASH_BYTES for each in hashes):
        fail(f"a proof has a hash that is not of {HASH_BYTES} bytes")
    return tuple(hashes)


def _fragment_update_to_pb(fragment: FragmentCommit, shard: Shard | None) -> dpb.FragmentUpdate:
    verdicts, payload = fragment_verdicts_to_pb(fragment), fragment.payload
    if payload is None:
        return dpb.FragmentUpdate(fragment_id=fragment.fragment_id, rollback=True, verdicts=verdicts)
    from edit.codecs import codec  # imports torch, which who only asks for a status does without

    numel = payload.numel if shard is None else codec(payload.codec).cut_numel(shard)
    return dpb.FragmentUpdate(
        fragment_id=fragment.fragment_id,
        codec=payload.codec,
        numel=numel,
        total_bytes=codec(payload.codec).encoded_size(numel),
        verdicts=verdicts,
    )


def update_manifest_from_pb(
    message: dpb.UpdateManifest,
    schema: Schema,
    outer_step: int,
    *,
    due: Sequence[int] | None = None,
    shards: Sequence[Shard] | None = None,
) -> msg.UpdateManifest:
    """Decode what the update to `outer_step` (the one asked for) consists of.

    due: the fragments that this outer step exchanges, ascending (`edit.fragments.groups.fragments_due`); None: all of `schema`.
    shards: those of the request, one per fragment of the schema; None: everything.
    """
    if message.outer_step != outer_step:
        fail(f"an update to outer step {message.outer_step} where {outer_step} was asked for")
    expected = [Shard(f) for f in schema.fragments] if shards is None else list(shards)
    wanted = expected if due is None else [expected[i] for i in due]
    if len(message.fragments) != len(wanted):
        fail(f"an update of {len(message.fragments)} fragments, {len(wanted)} are exchanged")
    return msg.UpdateManifest(
        outer_step=within("outer_step", message.outer_step, 1, lim.MAX_STEP),
        round_id=within("round_id", message.round_id, 1, lim.MAX_COUNT),
        digest=check_digest("digest", message.digest),
        reason=check_text("reason", message.reason),
        fragments=tuple(_fragment_update_from_pb(m, r) for m, r in zip(message.fragments, wanted, strict=True)),
        key=_key(message.key),
    )


def _key(key: bytes) -> bytes:
    if len(key) not in (0, KEY_BYTES):
        fail(f"a key of {len(key)} bytes; {KEY_BYTES} are due, or none")
    return key


def _fragment_update_from_pb(message: dpb.FragmentUpdate, shard: Shard) -> msg.FragmentUpdate:
    commit, fragment = fragment_verdicts_from_pb(message.verdicts), shard.fragment
    if not message.fragment_id == commit.fragment_id == fragment.fragment_id:
        fail(f"an update names fragment {message.fragment_id} where {fragment.fragment_id} is due")
    if message.rollback:
        if message.codec or message.numel or message.total_bytes:
            fail(f"fragment {fragment.name} was rolled back and yet has bytes")
        return msg.FragmentUpdate(commit=commit, codec=None, numel=0, total_bytes=0)
    from edit.codecs import codec

    name = codec_from_pb(message.codec)
    expected = codec(name).cut_numel(shard)
    _check_numel(shard, expected, message.numel)
    total = check_encoded_size(name, message.numel, message.total_bytes, f"fragment {fragment.name}")
    return msg.FragmentUpdate(commit=commit, codec=name, numel=message.numel, total_bytes=total)


def commit_from_parts(manifest: msg.UpdateManifest, payloads: Sequence[bytes | bytearray | memoryview | None]) -> Commit:
    """Build the commit from its manifest and the bytes of every fragment, in order.

    None stands for a fragment that was rolled back or of which this rank holds nothing.
    """
    if len(payloads) != len(manifest.fragments):
        fail(f"{len(payloads)} payloads for {len(manifest.fragments)} fragments")
    return Commit(
        outer_step=manifest.outer_step,
        round_id=manifest.round_id,
        digest=manifest.digest,
        reason=manifest.reason,
        fragments=tuple(_with_payload(u, data) for u, data in zip(manifest.fragments, payloads, strict=True)),
    )


def _with_payload(update: msg.FragmentUpdate, data: bytes | bytearray | memoryview | None) -> FragmentCommit:
    if update.codec is None and data is None:
        return update.commit
    data = b"" if data is None and not update.total_bytes else data
    if update.codec is None or data is None or memoryview(data).nbytes != update.total_bytes:
        got = "no" if data is None else memoryview(data).nbytes
        fail(f"fragment {update.commit.fragment_id}: {got} bytes where {update.total_bytes} were announced")
    return dataclasses.replace(update.commit, payload=EncodedTensor(update.codec, update.numel, data))


def snapshot_manifest_to_pb(manifest: msg.SnapshotManifest) -> dpb.SnapshotManifest:
    """Encode what a snapshot consists of."""
    return dpb.SnapshotManifest(
        outer_step=manifest.outer_step,
        digest=manifest.digest,
        schema=schema_to_pb(manifest.schema),
        fragment_hash=manifest.fragment_hash,
        donors=[dpb.Donor(peer_id=donor.peer_id, serving=serving_to_pb(donor.serving)) for donor in manifest.donors],
        run_outer_step=manifest.run_outer_step,
    )


def snapshot_manifest_from_pb(message: dpb.SnapshotManifest, schema: Schema | None = None) -> msg.SnapshotManifest:
    """Decode what a snapshot consists of. schema: this side's own, when it has one; another one is an error."""
    theirs = schema_from_pb(message.schema)
    if schema is not None and (difference := theirs.first_difference(schema)) is not None:
        fail(f"a snapshot of another model: {one_line(difference)}")
    if len(message.fragment_hash) != len(theirs.fragments) or any(len(sha) != 32 for sha in message.fragment_hash):
        fail("a snapshot needs one BLAKE3 per fragment")
    lim.at_most("donors", message.donors, lim.MAX_DONORS)
    return msg.SnapshotManifest(
        outer_step=within("outer_step", message.outer_step, 0, lim.MAX_STEP),
        digest=check_digest("digest", message.digest),
        schema=theirs,
        fragment_hash=tuple(message.fragment_hash),
        donors=tuple(msg.Donor(check_id("peer_id", donor.peer_id), serving_from_pb(donor.serving)) for donor in message.donors),
        run_outer_step=within("run_outer_step", message.run_outer_step, 0, lim.MAX_STEP),
    )


def snapshot_request_to_pb(request: msg.SnapshotRequest) -> dpb.SnapshotRequest:
    """Encode the request for fragments of a snapshot."""
    following = [
        dpb.SnapshotPart(fragment_id=shard.fragment.fragment_id, boxes=boxes_to_pb(() if shard.is_whole else shard.boxes))
        for shard in request.following
    ]
    return dpb.SnapshotRequest(
        run_id=request.run_id,
        outer_step=request.outer_step,
        fragment_id=request.fragment_id,
        offset=request.offset,
        boxes=boxes_to_pb(request.boxes or ()),
        ticket=request.ticket,
        limit=request.limit,
        following=following,
    )


def snapshot_request_from_pb(message: dpb.SnapshotRequest, schema: Schema) -> msg.SnapshotRequest:
    """Decode the request for fragments of a snapshot, or boxes of them. offset: within the fp32 bytes of the first."""
    shard = _shard_of(_fragment_of(schema, message.fragment_id), message.boxes)
    lim.at_most("following fragments", message.following, lim.MAX_FOLLOWING)
    following = tuple(_shard_of(_fragment_of(schema, part.fragment_id), part.boxes) for part in message.following)
    for before, after in pairwise((shard, *following)):
        if after.fragment.fragment_id <= before.fragment.fragment_id:
            fail(f"fragment {after.fragment.fragment_id} is named after fragment {before.fragment.fragment_id}")
    return msg.SnapshotRequest(
        run_id=check_id("run_id", message.run_id),
        outer_step=within("outer_step", message.outer_step, 0, lim.MAX_STEP),
        fragment_id=shard.fragment.fragment_id,
        offset=within("offset", message.offset, 0, 4 * shard.numel),
        boxes=None if shard.is_whole else shard.boxes,
        ticket=check_id("ticket", message.ticket) if message.ticket else "",
        limit=within("limit", message.limit, 0, lim.MAX_COUNT),
        following=following,
    )


def contribution_request_to_pb(wanted: msg.ContributionRequest) -> dpb.ContributionRequest:
    """Encode the request for a shard of what was merged."""
    return dpb.ContributionRequest(
        run_id=wanted.run_id,
        outer_step=wanted.outer_step,
        peer_id=wanted.peer_id,
        fragment_id=wanted.fragment_id,
        rank=wanted.rank,
        offset=wanted.offset,
        limit=wanted.limit,
    )


def contribution_request_from_pb(message: dpb.ContributionRequest) -> msg.ContributionRequest:
    """Decode the request for a shard of what was merged; whether there is such a shard is not known here."""
    return msg.ContributionRequest(
        run_id=check_id("run_id", message.run_id),
        outer_step=within("outer_step", message.outer_step, 1, lim.MAX_STEP),
        peer_id=check_id("peer_id", message.peer_id),
        fragment_id=within("fragment_id", message.fragment_id, 0, lim.MAX_FRAGMENTS - 1),
        rank=within("rank", message.rank, 0, lim.MAX_RANKS - 1),
        offset=within("offset", message.offset, 0, lim.MAX_BYTES),
        limit=within("limit", message.limit, 0, lim.MAX_COUNT),
    )


def scores_to_pb(report: msg.ScoreReport) -> dpb.Scores:
    """Encode what a scorer says."""
    each = [dpb.PeerScore(peer_id=peer_id, score=value) for peer_id, value in sorted(report.scores.items())]
    return dpb.Scores(
        run_id=report.run_id,
        outer_step=report.outer_step,
        scores=each,
        public_key=report.public_key,
        signature=report.signature,
    )


def scores_from_pb(message: dpb.Scores) -> msg.ScoreReport:
    """Decode what a scorer says: a finite score of each peer, in bounds. Whether it is signed is not looked at."""
    lim.at_most("scores", message.scores, lim.MAX_VERDICTS)
    scores: dict[str, float] = {}
    for each in message.scores:
        peer_id = check_id("peer_id", each.peer_id)
        if peer_id in scores:
            fail(f"{peer_id} is scored twice")
        if not abs(each.score) <= MOST_SCORE:  # nor is NaN
            fail(f"the score of {peer_id} is {each.score}, not -1 to 1")
        scores[peer_id] = each.score
    sizes = len(message.public_key), len(message.signature)
    if sizes != (0, 0) and not (0 < sizes[0] <= MOST_KEY_BYTES and sizes[1] == SIGNATURE_BYTES):
        fail(f"scores have a key of {sizes[0]} and a signature of {sizes[1]} bytes")
    return msg.ScoreReport(
        run_id=check_id("run_id", message.run_id),
        outer_step=within("outer_step", message.outer_step, 1, lim.MAX_STEP),
        scores=scores,
        public_key=message.public_key,
        signature=message.signature,
    )


def found_header_to_pb(header: msg.FoundHeader) -> dpb.FoundHeader:
    """Encode the founder's announcement of its parameters."""
    return dpb.FoundHeader(run_id=header.run_id, schema_hash=header.schema_hash, digest=header.digest)


def found_header_from_pb(message: dpb.FoundHeader) -> msg.FoundHeader:
    """Decode the founder's announcement of its parameters."""
    return msg.FoundHeader(
        run_id=check_id("run_id", message.run_id),
        schema_hash=check_digest("schema_hash", message.schema_hash),
        digest=check_digest("digest", message.digest),
    )
