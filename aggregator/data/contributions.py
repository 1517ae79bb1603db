"""What the aggregator holds of each peer: its contribution, each fragment in the shards that the peer's ranks send.

The round machine decides which contribution of a peer is taken, how long it is held and when it is merged. Rules of a fragment

 1. A shard belongs to an attempt of its replica. A newer attempt replaces the shards of older ones, as long as the fragment is
    not whole; then the fragment stays as it is, whatever comes. A shard of an older attempt is stale.
 2. inner_steps, tokens and a claimed norm are the replica's: ranks that differ are the peer's fault, and so is a rank that
    declares its shard anew with other values.
 3. Whole: every shard is in and measured, and they cover each element once. More elements than the fragment has, or as many
    with two of them the same, is the peer's fault, found when the shard is declared, before memory is taken for it. Fewer: the
    round ends without this peer's fragment.
 4. Once it is merged its bytes are gone; the fragment stays whole.
 5. What is known of the shards, beside their bytes, is bounded over the whole contribution: MAX_PIECES, and one more for every
    ELEMENTS_OF_PIECE elements. A piece is an eighth of a shard, or a box.
 6. With an audit log, the shards of a contribution name at most MAX_SEEN_OF_PEER heads of it: the receipt of a commit has a
    proof for each, and the number of these is bounded over all peers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields, replace

from aggregator.storage.upload_buffer import Upload, UploadBuffer
from edit.codecs import Codec
from edit.codecs.error_feedback import codec_of
from edit.config.codec import CodecChoice
from edit.errors import LocalProtocolError, RemoteProtocolError, StaleError
from edit.fragments.schema import FragmentSpec, Schema
from edit.fragments.shards import Cover, Shard
from edit.merging.merge import Measured, ShardPayload
from edit.merging.norms import whole_norm
from edit.records import EncodedTensor, round_number
from editpb.limits import MAX_SEEN_OF_PEER
from editpb.messages import ContributionHeader

MAX_PIECES = 1 << 17  # about 32 MB
ELEMENTS_OF_PIECE = 64

__all__ = ["Contribution", "Contributions", "ShardUpload", "ShardedFragment"]


@dataclass(slots=True, eq=False)
class ShardUpload:
    """One rank's shard of a fragment, on its way in."""

    header: ContributionHeader
    shard: Shard
    upload: Upload
    norm: float | None = None  # None until it is in and measured
    merged: bool = False  # its bytes are gone; a second stream of the same may still be sending them

    def read(self) -> EncodedTensor:
        """The shard as it was sent. Raises as `Upload.payload`."""
        return EncodedTensor(self.header.codec, self.header.numel, self.upload.payload())


class ShardedFragment:
    """One fragment of one contribution; the module's text has the rules."""

    def __init__(self, fragment: FragmentSpec, uploads: UploadBuffer) -> None:
        self._fragment, self._uploads = fragment, uploads
        self._attempt = -1
        self._shards: dict[int, ShardUpload] = {}  # by rank
        self._cover = Cover(fragment)  # of the declared shards
        self._awaited = 0  # declared shards that are not measured yet
        self._whole: Measured | None = None
        self.pieces = 0  # of the declared shards, see `_pieces`
        self.seen: set[int] = set()  # sizes of the heads of the audit log that they name

    @property
    def received_bytes(self) -> int:
        """Of all shards, so far."""
        return sum(shard.upload.received_bytes for shard in self._shards.values())

    @property
    def shards(self) -> tuple[ShardUpload, ...]:
        """All that are declared, by rank."""
        return tuple(self._shards[rank] for rank in sorted(self._shards))

    def knows(self, rank: int) -> bool:
        """Return whether this rank has declared its shard."""
        return rank in self._shards

    def declare(self, header: ContributionHeader) -> ShardUpload | None:
        """Return the upload for this shard, the one that is there on a retry; None: the fragment is whole, send no bytes.

        Raises StaleError for an older attempt (rule 1), RemoteProtocolError (rules 2 and 3).
        """
        if header.attempt > self._attempt:
            if self._whole is not None:
                return None
            self.drop("a newer attempt of this replica has come")
            self._cover, self._awaited, self._attempt = Cover(self._fragment), 0, header.attempt
            self.pieces, self.seen = 0, set()
        elif header.attempt < self._attempt:
            raise StaleError(f"{_who(header)}: a newer attempt of this replica has come")
        known = self._shards.get(header.rank)
        if known is None:
            shard = Shard(self._fragment, header.boxes)
            self._check_fits(header, shard)
            known = self._shards[header.rank] = self._open(header, shard)
            self._cover.add(shard.boxes)
            self._awaited += 1
            self.pieces += _pieces(header)
            if header.seen is not None:
                self.seen.add(header.seen.size)
        elif known.header != header:
            raise RemoteProtocolError(f"{_who(header)} was declared with another {_difference(known.header, header)} before")
        elif known.merged:
            return None
        elif known.upload.dropped:  # the disk refused it
            known = self._shards[header.rank] = self._open(header, known.shard)
        return known

    def check_current(self, shard: ShardUpload) -> None:
        """Raise StaleError when the shard was replaced."""
        if self._shards.get(shard.header.rank) is not shard:
            raise StaleError(f"{_who(shard.header)}: a newer attempt of this replica has come")

    def measured(self, shard: ShardUpload, norm: float) -> bool:
        """Take the norm of a shard that is in; return whether this made the fragment whole. Raises as `check_current`."""
        self.check_current(shard)
        if shard.norm is not None:
            return False
        shard.norm = norm
        self._awaited -= 1
        if self._awaited or self._cover.numel < self._fragment.numel:
            return False
        ordered = [self._shards[rank] for rank in sorted(self._shards)]
        norms, claimed = [one.norm for one in ordered if one.norm is not None], shard.header.norm
        self._whole = Measured(
            peer_id=shard.header.peer_id,
            inner_steps=shard.header.inner_steps,
            tokens=shard.header.tokens,
            norm=claimed if claimed is not None else whole_norm(norms) if len(norms) > 1 else norms[0],
            payload=shard.read if shard.shard.is_whole else tuple(ShardPayload(one.shard, one.read) for one in ordered),
        )
        return True

    def whole(self, staleness: int = 0) -> Measured:
        """Return all of it, to be merged; staleness: in outer steps. Raises LocalProtocolError before it is whole."""
        if self._whole is None:
            raise LocalProtocolError(f"fragment {self._fragment.fragment_id}: a contribution that is not whole")
        return replace(self._whole, staleness=staleness)

    def merged(self) -> None:
        """Let go of the bytes; the fragment is whole for whoever sends it again."""
        for shard in self._shards.values():
            shard.merged = True
            shard.upload.drop("it is merged")

    def drop(self, reason: str) -> None:
        """Let go of all bytes; who reads them keeps them until it is done."""
        for shard in self._shards.values():
            shard.upload.drop(reason)
        self._shards.clear()

    def _open(self, header: ContributionHeader, shard: Shard) -> ShardUpload:
        return ShardUpload(header, shard, self._uploads.open(_who(header), header.total_bytes))

    def _check_fits(self, header: ContributionHeader, shard: Shard) -> None:
        if other := next((known.header for known in self._shards.values()), None):
            for field in ("inner_steps", "tokens", "norm"):
                mine, theirs = getattr(header, field), getattr(other, field)
                if mine != theirs:
                    raise RemoteProtocolError(f"{_who(header)} says {field} = {mine}, rank {other.rank} says {theirs}")
        covered = self._cover.numel + shard.numel
        if covered > self._fragment.numel:
            alone = "; this rank sends all of it, as if it were the only one" if shard.is_whole else ""
            raise RemoteProtocolError(
                f"{_who(header)}: the ranks' shards overlap: {covered} elements, the fragment has {self._fragment.numel}{alone}"
            )
        if covered == self._fragment.numel:
            self._cover.add(shard.boxes)
            fault = self._cover.fault()
            self._cover.remove(shard.boxes)
            if fault:
                raise RemoteProtocolError(f"{_who(header)}: {fault}")


class Contribution:
    """One peer's contribution.

    Args:
        header: of any of its shards.
        codecs: the run's for contributions, by fragment.
        due: the fragments that it consists of.
    """

    def __init__(
        self,
        header: ContributionHeader,
        schema: Schema,
        codecs: Callable[[int], Codec],
        due: Collection[int],
        uploads: UploadBuffer,
    ) -> None:
        self.round_id, self.outer_step = header.round_id, header.outer_step
        self.fragments = {i: ShardedFragment(schema.fragments[i], uploads) for i in due}
        self.total_bytes = sum(codecs(i).encoded_size(schema.fragments[i].numel) for i in due)  # of a peer that is not sharded
        self._most_pieces = MAX_PIECES + sum(schema.fragments[i].numel for i in due) // ELEMENTS_OF_PIECE

    @property
    def received_bytes(self) -> int:
        """Of all its fragments, so far."""
        return sum(fragment.received_bytes for fragment in self.fragments.values())

    def declare(self, header: ContributionHeader) -> ShardUpload | None:
        """Return the upload for a shard; None as `ShardedFragment.declare`, whose errors it raises.

        RemoteProtocolError also for what rules 5 and 6 forbid.
        """
        fragment = self.fragments[header.fragment_id]
        pieces = sum(each.pieces for each in self.fragments.values()) + _pieces(header)
        if pieces > self._most_pieces and not fragment.knows(header.rank):
            raise RemoteProtocolError(f"{_who(header)}: the ranks' shards are too many and too small to be kept")
        if header.seen is not None and header.seen.size not in fragment.seen:
            seen = {header.seen.size}.union(*(each.seen for each in self.fragments.values()))
            if len(seen) > MAX_SEEN_OF_PEER:
                raise RemoteProtocolError(f"{_who(header)}: names too many heads of the audit log, with those of other shards")
        return fragment.declare(header)

    def whole(self, fragment_id: int, outer_step: int) -> Measured:
        """Return one fragment, to be merged into the advance from `outer_step`. Raises LocalProtocolError before it is in."""
        return self.fragments[fragment_id].whole(outer_step - self.outer_step)

    def drop(self, reason: str) -> None:
        """Free its bytes; a stream that still sends some gets the reason."""
        for fragment in self.fragments.values():
            fragment.drop(reason)


class Contributions:
    """The contribution that is held of each peer.

    Args:
        codecs: the run's for contributions; or, with masks, returns the codec of a fragment in the round that is open.
    """

    def __init__(self, schema: Schema, codecs: CodecChoice | Callable[[int], Codec], uploads: UploadBuffer) -> None:
        self._schema, self._uploads = schema, uploads
        self._codec_of: Callable[[int], Codec] = (
            tuple(codec_of(fragment, codecs) for fragment in schema.fragments).__getitem__
            if isinstance(codecs, CodecChoice)
            else codecs
        )
        self._held: dict[str, Contribution] = {}  # by peer_id

    def of_peer(self, peer_id: str) -> Contribution | None:
        """Return what is held of this peer."""
        return self._held.get(peer_id)

    def find(self, header: ContributionHeader) -> Contribution | None:
        """Return the contribution that this header belongs to: of this peer, this round, computed against this outer step."""
        held = self._held.get(header.peer_id)
        return held if held and (held.round_id, held.outer_step) == (header.round_id, header.outer_step) else None

    def declare(self, header: ContributionHeader, due: Collection[int]) -> ShardUpload | None:
        """Return the upload for a header that the round machine took; it may begin a contribution in place of an older one.

        due: the fragments that the contribution consists of. Returns and raises as `ShardedFragment.declare`; another codec
        than the run's is the peer's fault.
        """
        if header.codec != (expected := self._codec_of(header.fragment_id).name):
            raise RemoteProtocolError(f"{_who(header)} is encoded as {header.codec}, the run takes {expected}")
        contribution = self.find(header)
        if contribution is None:
            self.drop(header.peer_id, "a newer contribution of this peer has come")
            contribution = self._held[header.peer_id] = Contribution(header, self._schema, self._codec_of, due, self._uploads)
        return contribution.declare(header)

    def fragment_of(self, shard: ShardUpload) -> ShardedFragment:
        """Return the fragment that this shard is part of. Raises StaleError when it no longer is."""
        contribution = self.find(shard.header)
        if contribution is None:
            raise StaleError(f"round {round_number(shard.header.round_id)} is over, and so is this contribution to it")
        fragment = contribution.fragments[shard.header.fragment_id]
        fragment.check_current(shard)
        return fragment

    def shards(self, fragment_id: int, peer_id: str) -> tuple[ShardUpload, ...]:
        """Return what the ranks of a peer have sent of a fragment, by rank; nothing of a peer of whom nothing is held."""
        held = self._held.get(peer_id)
        return held.fragments[fragment_id].shards if held is not None and fragment_id in held.fragments else ()

    def merged(self, fragment_id: int, peers: Iterable[str]) -> None:
        """A fragment of these peers is merged: its bytes are needed no more."""
        for peer_id in peers:
            if (held := self._held.get(peer_id)) is not None:
                held.fragments[fragment_id].merged()

    def drop(self, peer_id: str, reason: str) -> None:
        """Hold nothing of this peer any more."""
        if (held := self._held.pop(peer_id, None)) is not None:
            held.drop(reason)

    def keep(self, peers: Collection[str], reason: str) -> None:
        """Drop the contributions of all others."""
        for peer_id in self._held.keys() - set(peers):
            self.drop(peer_id, reason)


def _pieces(header: ContributionHeader) -> int:
    """Return what a declared shard takes in memory, in units of about 250 bytes: itself and its boxes."""
    return 8 + len(header.boxes or ())


def _who(header: ContributionHeader) -> str:
    number = round_number(header.round_id)
    return f"contribution of {header.peer_id} to round {number}, fragment {header.fragment_id}, rank {header.rank}"


def _difference(one: ContributionHeader, other: ContributionHeader) -> str:
    """The first field in which they differ."""
    return next(field.name for field in fields(one) if getattr(one, field.name) != getattr(other, field.name))
