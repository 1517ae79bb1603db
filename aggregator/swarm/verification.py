"""An owner's update, computed once more from the contributions that its peers signed.

Who verifies a part gets the owner's update, and what it was merged from: each shard's header as the peer signed it, its bytes,
and the inner steps and tokens that the owner counts for it. It holds the update only if the merge, by the same code, has the
same manifest and the same bytes. What is checked of a contribution, before memory is taken for it:

 1. Its peer has signed it, with a key that counts for this update (`aggregator.swarm.enrolments`). An enrolment may reach the
    owner before it reaches this member: then the contributions are asked for again.
 2. It is to the update's round and outer step, of this model, and the part's codec: a signature is of one round, and no round
    id comes twice, so none can be used again.
 3. One of each peer and fragment, in shards that cover the fragment once; the bytes have the hash that was signed.
 4. What is counted for it lies between what `edit.rounds.work_claims` grants to everybody and what the peer claims.
 5. Each fragment has at least as many contributions as the quorum.

Not seen from here: a contribution that the owner says never came. It is missing in the verdicts, which `status` shows.

The merge also depends on what the records' codec left out before (`OuterState`, "unrecorded"). Under each grant that begins
with nothing, at the owner and at those who verify; and as an update counts only when all of them hold it, they have the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from aggregator.data.contributions import Contributions, ShardUpload
from aggregator.storage.upload_buffer import UploadBuffer
from aggregator.swarm.engine import first_round_id
from edit.config.run import RunConfig
from edit.council.record import Update
from edit.errors import EditError, RemoteProtocolError, StaleError, StorageError
from edit.fragments.schema import Schema
from edit.merging.merge import Measured, measure
from edit.rounds.work_claims import UsualWork, Work
from editpb.council_messages import MergedContribution
from editpb.messages import ContributionHeader
from editpb.signed_contributions import check_payload, check_signature

__all__ = ["Contributed", "Verification"]

_SHARE = 4  # of storage.buffer_bytes, for what is verified; the rest lies in files


@dataclass(frozen=True, slots=True)
class Contributed:
    """What an update was merged from, checked. tokens: that count for it."""

    fragments: Mapping[int, tuple[Measured, ...]]
    round_id: int
    tokens: Mapping[int, Mapping[str, int]]  # by fragment and peer
    signatures: Mapping[tuple[int, str, int], bytes]  # of each shard, by fragment, peer and rank


class Verification:
    """One update's contributions, on their way in. Used on the event loop, but for `contributed`. `close` it at the end.

    Args:
        schema: of the part.
        due: the fragments of the update.
        digest: of the configuration (`editpb.signed_contributions.config_digest`).
        counts: says whether a peer's key counts for it, as `Enrolments.counts`.
        folder: for what is not kept in memory.
        files: the host's file thread.
    """

    def __init__(
        self,
        run_id: str,
        config: RunConfig,
        schema: Schema,
        due: Collection[int],
        update: Update,
        digest: str,
        counts: Callable[[str, bytes], bool],
        folder: Path,
        files: Executor,
    ) -> None:
        self._run_id, self._schema, self._due, self._update = run_id, schema, due, update
        self._digest, self._counts = digest, counts
        self._usual, self._quorum = UsualWork.of(config), config.rounds.quorum
        self._uploads = UploadBuffer(config.storage.buffer_bytes // _SHARE, folder, files)
        self._contributions = Contributions(schema, config.codec.uplink, self._uploads)
        self._round_id = 0
        self._shards: list[ShardUpload] = []
        self._work: dict[tuple[int, str], Work] = {}

    def declare(self, merged: MergedContribution) -> ShardUpload:
        """Return the upload for the bytes of a shard.

        Raises RemoteProtocolError, which says whose it is; OutdatedError for a key that this member's record does not have: the
        peer's enrolment may be on its way here. Of these UnclearKeyError: whether it counted cannot be told.
        """
        header, work = merged.header, merged.work
        who = f"contribution of {header.peer_id} to fragment {header.fragment_id}"
        if (header.run_id, header.outer_step, header.schema_hash) != (
            self._run_id,
            self._update.outer_step - 1,
            self._schema.schema_hash,
        ):
            raise RemoteProtocolError(f"{who} is not to outer step {self._update.outer_step} of this part")
        if header.fragment_id not in self._due:
            raise RemoteProtocolError(f"{who}: the fragment is not due")
        if header.round_id not in range(first_round_id(self._update.grant), first_round_id(self._update.grant + 1)):
            raise RemoteProtocolError(f"{who} is to round {header.round_id}, which is of another grant")
        if self._round_id not in (0, header.round_id):
            raise RemoteProtocolError(f"{who} is to round {header.round_id}, others are to {self._round_id}")
        check_signature(header, self._digest)
        if not self._counts(header.peer_id, header.public_key):
            raise StaleError(f"{who} is signed with a key that {header.peer_id} is not enrolled for")
        self._check_work(who, header, work)
        if self._work.setdefault((header.fragment_id, header.peer_id), work) != work:
            raise RemoteProtocolError(f"{who}: its shards count differently")
        self._round_id = header.round_id
        shard = self._contributions.declare(header, self._due)
        if shard is None or any(shard is known for known in self._shards):
            raise RemoteProtocolError(f"{who} is there twice")
        self._shards.append(shard)
        return shard

    def _check_work(self, who: str, header: ContributionHeader, work: Work) -> None:
        """Rule 4."""
        usual, outer_step = self._usual, header.outer_step
        granted = usual.slack * usual.sync.interval_at(outer_step) * (usual.groups + 1)
        most = usual.most_inner_steps(header.inner_steps, outer_step, outer_step)
        least = max(usual.least(0, outer_step), min(header.inner_steps, granted))
        if not least <= work.inner_steps <= most:
            raise RemoteProtocolError(f"{who}: {header.inner_steps} inner steps count as {work.inner_steps}")
        least = min(header.tokens, usual.most_tokens(work.inner_steps))
        if not least <= work.tokens <= header.tokens:
            raise RemoteProtocolError(f"{who}: {header.tokens} tokens count as {work.tokens}")

    def contributed(self) -> Contributed:
        """Measure all shards, in a thread that may take long; return what is to be merged. Raises RemoteProtocolError."""
        for shard in self._shards:
            if not shard.upload.complete:
                raise RemoteProtocolError(f"a contribution of {shard.header.peer_id} is not whole")
            encoded = shard.read()
            check_payload(shard.header, encoded.data)
            self._contributions.fragment_of(shard).measured(shard, measure(encoded))
        fragments: dict[int, list[Measured]] = {i: [] for i in self._due}
        for (fragment_id, peer_id), work in self._work.items():
            held = self._contributions.of_peer(peer_id)
            try:
                if held is None:
                    raise RemoteProtocolError("it is gone")
                whole = held.whole(fragment_id, self._update.outer_step - 1)
            except StorageError:  # of the disk here
                raise
            except EditError as error:
                raise RemoteProtocolError(f"the contribution of {peer_id} to fragment {fragment_id} is not whole") from error
            counted = Measured(
                peer_id=peer_id, inner_steps=work.inner_steps, tokens=work.tokens, norm=whole.norm, payload=whole.payload
            )
            fragments[fragment_id].append(counted)
        for fragment_id, found in fragments.items():
            if len(found) < self._quorum:
                raise RemoteProtocolError(f"fragment {fragment_id}: {len(found)} contributions, the quorum is {self._quorum}")
        tokens = {i: {one.peer_id: one.tokens for one in found} for i, found in fragments.items()}
        headers = [shard.header for shard in self._shards]
        signatures = {(each.fragment_id, each.peer_id, each.rank): each.signature for each in headers}
        return Contributed({i: tuple(found) for i, found in fragments.items()}, self._round_id, tokens, signatures)

    def close(self) -> None:
        """Let go of all bytes."""
        self._contributions.keep((), "it is verified")
