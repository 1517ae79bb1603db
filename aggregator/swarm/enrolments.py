"""Which keys count for an owner's update: the record's, and while an outer step is on its way also those of just before.

As soon as the record says that a peer has another key, or is evicted, an owner drops what it sent before; but a round that is
merging then is merged with it. Such an update is to the outer step after the record's, under the grant of that record: no later
one has the old key. So each member remembers of each change the key of before, and where the parts stood.

It is kept in memory. After a start, and under another leader, a member may have missed a change: until the next outer step it
cannot tell about any other key. Then it does not hold the update, and blames nobody: under another grant the outer step is
merged again, with the keys of now.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from edit.council.record import Record, Update
from edit.errors import GoneError, StaleError
from edit.trust.signatures import key_hash

__all__ = ["Enrolments", "UnclearKeyError", "present_key"]

_Place = tuple[tuple[int, int], ...]  # of each part: its grant, its outer step


class UnclearKeyError(StaleError):
    """A key may have counted when an owner merged, and that cannot be told here, nor later."""


@dataclass(frozen=True, slots=True)
class Enrolments:
    """What one member knows, as of a record. Immutable, so other threads may read it.

    Args:
        record: the newest that is known here.
    """

    record: Record
    _begun: _Place = ()  # what was before this is not known
    _changed: Mapping[str, tuple[str, _Place]] = field(default_factory=dict)  # by peer: the key of before, and when

    @classmethod
    def of(cls, record: Record) -> Enrolments:
        """Return what is known of the first record that a member has."""
        return cls(record, _place(record))

    def taking(self, record: Record) -> Enrolments:
        """Return what is known after a further record."""
        before, place = self.record, _place(record)
        begun = self._begun if (record.lineage, record.term) == (before.lineage, before.term) else place
        changed = {
            peer_id: (key, place)
            for peer_id in record.enrolled
            if (key := present_key(before, peer_id)) != present_key(record, peer_id)
        }
        return Enrolments(record, begun, {**self._changed, **changed})

    def counts(self, peer_id: str, key: bytes, update: Update) -> bool:
        """Return whether an owner may have merged what is signed with this key, for an update that is not agreed on.

        Raises GoneError: the peer's enrolment is not known here yet; UnclearKeyError.
        """
        if peer_id not in self.record.enrolled:
            raise GoneError(f"the enrolment of {peer_id} is not known here")
        found = key_hash(key)
        if found == present_key(self.record, peer_id):
            return True
        last, since = self._changed.get(peer_id, ("", self._begun))
        changes = _is_on_its_way(update, since)
        if changes and found == last:
            return True
        if changes or _is_on_its_way(update, self._begun):
            raise UnclearKeyError(f"whether this key of {peer_id} counted when the owner merged is not known here")
        return False


def present_key(record: Record | None, peer_id: str) -> str:
    """Return the key (SHA-256) that counts; '': the peer is not enrolled, only looks on, or is evicted."""
    enrolled = record.enrolled.get(peer_id) if record is not None else None
    return "" if record is None or enrolled is None or enrolled.observer or peer_id in record.evicted else enrolled.key


def _place(record: Record) -> _Place:
    return tuple((part.grant, part.outer_step) for part in record.parts)


def _is_on_its_way(update: Update, place: _Place) -> bool:
    """Whether an update may have been merged before its owner knew a record in which the parts stood here."""
    grant, outer_step = place[update.part]
    return update.grant <= grant and update.outer_step <= outer_step + 1
