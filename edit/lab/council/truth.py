"""What must hold: seen from outside, at every moment of a simulated swarm. See the invariants of `edit.council.machine`."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Collection

from edit.council.record import PartState, Record, Stamp

__all__ = ["Broken", "Truth"]


class Broken(Exception):
    """Something that must hold does not."""


class Truth:
    """All that was ever committed, and by whom.

    Args:
        founded: the first record.
        holders: the names whose disk has what a record names of a part; and those whose disk was lost.
    """

    def __init__(self, founded: Record, holders: Callable[[Record, int], Collection[str]]) -> None:
        self._holders = holders
        self._records = {founded.stamp: founded}
        self._stamps = [founded.stamp]
        self._digests: dict[tuple[int, int, int], str] = {}  # by lineage, part, outer step
        self._leaders: dict[tuple[int, int], str] = {}  # by lineage, term
        self._served: dict[tuple[int, int, int], tuple[str, int]] = {}  # by lineage, part, grant
        self.commits = 0  # outer steps, of all parts

    @property
    def newest(self) -> Record:
        """The newest committed record."""
        return self._records[self._stamps[-1]]

    def leads(self, name: str, stamp: Stamp) -> None:
        """One leader per term: who says that it leads, with a record of this stamp."""
        other = self._leaders.setdefault((stamp.lineage, stamp.term), name)
        if other != name:
            raise Broken(f"{other} and {name} lead in term {stamp.term}")

    def serves(self, name: str, process: int, record: Record, part: int, grant: int) -> None:
        """One process per grant (I4)."""
        other = self._served.setdefault((record.lineage, part, grant), (name, process))
        if other != (name, process):
            raise Broken(f"{other} and {(name, process)} serve part {part} with grant {grant}")

    def state(self, lineage: int, part: int, state: PartState) -> None:
        """One digest per lineage, part and outer step (I1)."""
        other = self._digests.setdefault((lineage, part, state.outer_step), state.digest)
        if other != state.digest:
            raise Broken(f"outer step {state.outer_step} of part {part} is {other[:8]} and {state.digest[:8]}")

    def committed(self, record: Record) -> None:
        """Note a record that some member takes for committed."""
        known = self._records.get(record.stamp)
        if known is not None:
            if known != record:
                raise Broken(f"two records {record.stamp} are committed")
            return
        place = bisect(self._stamps, record.stamp)
        before = self._records[self._stamps[place - 1]]
        self._check_order(before, record)
        for later in self._stamps[place : place + 1]:
            self._check_order(record, self._records[later])
        newest = place == len(self._stamps)
        self._stamps.insert(place, record.stamp)
        self._records[record.stamp] = record
        for i, part in enumerate(record.parts):
            self.state(record.lineage, i, PartState(part.outer_step, part.digest))
            if newest and not record.agreed({*self._holders(record, i)}):
                raise Broken(f"{record.stamp} names outer step {part.outer_step} of part {i}, and no quorum holds it (I2)")
            self.commits += newest * (part.outer_step - before.parts[i].outer_step)

    def _check_order(self, earlier: Record, later: Record) -> None:
        for i, (old, new) in enumerate(zip(earlier.parts, later.parts, strict=True)):
            if new.outer_step < old.outer_step or new.grant < old.grant:
                raise Broken(f"{later.stamp} goes back behind {earlier.stamp}: part {i} (I4, I5)")
