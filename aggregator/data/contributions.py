"""The contributions that the aggregator holds: one per peer, each fragment in the parts that its ranks send.

Owns: which parts belong together, how much of a contribution is here, when its bytes are let go. Must not know: how long one is
held and when it is merged (the round machine says that), gRPC, threads.
"""

from __future__ import annotations

from collections.abc import Collection

from aggregator.data.sharded_fragment import ShardedFragment
from aggregator.storage.upload_buffer import Upload, UploadBuffer
from edit.codecs import codec
from edit.errors import StaleError
from edit.fragments.schema import Schema
from edit.merging.merge import Measured
from editpb.messages import ContributionHeader

__all__ = ["Contribution", "Contributions"]


class Contribution:
    """One peer's. due: the fragments it consists of."""

    def __init__(self, header: ContributionHeader, schema: Schema, due: Collection[int], intake: UploadBuffer) -> None:
        self.round_id, self.outer_step = header.round_id, header.outer_step
        self.total_bytes = sum(codec(header.codec).encoded_size(schema.fragments[i].numel) for i in due)
        self._schema, self._intake = schema, intake
        self._parts: dict[int, ShardedFragment] = {}

    @property
    def received_bytes(self) -> int:
        """Of all its fragments, so far."""
        return sum(parts.received_bytes for parts in self._parts.values())

    def parts(self, fragment_id: int) -> ShardedFragment:
        """Of one fragment."""
        if fragment_id not in self._parts:
            self._parts[fragment_id] = ShardedFragment(self._schema.fragments[fragment_id], self._intake)
        return self._parts[fragment_id]

    def whole(self, fragment_id: int, outer_step: int) -> Measured:
        """One fragment of it, to be merged into the advance from `outer_step`. Raises LocalProtocolError before it is in."""
        return self._parts[fragment_id].contribution(outer_step - self.outer_step)

    def drop(self, reason: str) -> None:
        """Let go of its bytes; whoever still sends some is told the reason."""
        for parts in self._parts.values():
            parts.drop(reason)


class Contributions:
    """See the module's text."""

    def __init__(self, schema: Schema, intake: UploadBuffer) -> None:
        self._schema, self._intake = schema, intake
        self._of: dict[str, Contribution] = {}

    def get(self, peer_id: str) -> Contribution | None:
        """What is held of this peer."""
        return self._of.get(peer_id)

    def declare(self, header: ContributionHeader, due: Collection[int]) -> Upload | None:
        """A header that the round machine takes: the upload for the bytes of its part; None: see `ShardedFragment.declare`.

        It replaces another contribution of this peer. Raises as `ShardedFragment.declare`.
        """
        known = self._of.get(header.peer_id)
        if known is None or (known.round_id, known.outer_step) != (header.round_id, header.outer_step):
            self.drop(header.peer_id, "a newer contribution of this peer has come")
            known = self._of[header.peer_id] = Contribution(header, self._schema, due, self._intake)
        return known.parts(header.fragment_id).declare(header)

    def of(self, header: ContributionHeader) -> Contribution:
        """The one that this header belongs to. Raises StaleError when it is held no longer."""
        known = self._of.get(header.peer_id)
        if known is None or (known.round_id, known.outer_step) != (header.round_id, header.outer_step):
            raise StaleError(f"round {header.round_id} is over, and so is this contribution to it")
        return known

    def drop(self, peer_id: str, reason: str) -> None:
        """Hold nothing of this peer any more."""
        if (known := self._of.pop(peer_id, None)) is not None:
            known.drop(reason)

    def keep(self, peers: Collection[str], reason: str) -> None:
        """Drop the contributions of all others."""
        for peer_id in self._of.keys() - set(peers):
            self.drop(peer_id, reason)
