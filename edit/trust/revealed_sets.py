"""Which sums a peer helped to open: the rule against differences of sums, and its file.

The difference of two sums of the same vectors is a sum of the peers in which the sets differ. A round that is tried again opens
another sum of one outer step, so a peer reveals for a set only if it differs from each earlier one of that outer step by
nobody, or by enough peers on each side.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from edit.durable_files import read_json, write_json
from edit.errors import StorageError

__all__ = ["RevealedSets"]

_VERSION = 1
_STEPS = 4  # outer steps that are kept; a peer reveals nothing for one that is older
_SETS = 16  # of one outer step


class RevealedSets:
    """The sets of peers that this peer revealed for, by outer step. Refuses what is older than what it keeps."""

    def __init__(self, sets: Mapping[int, Collection[Collection[str]]] | None = None) -> None:
        self._sets = {step: [frozenset(each) for each in of_step] for step, of_step in (sets or {}).items()}
        self._oldest = min(self._sets, default=0) if len(self._sets) >= _STEPS else 0

    @classmethod
    def read(cls, path: Path) -> RevealedSets:
        """Return what `write` wrote, or an empty one when there is no such file. Raises StorageError when it is damaged:
        without it nobody knows what may be revealed."""
        if not path.exists():
            return cls()
        try:
            found = read_json(path, version=_VERSION)["revealed"]
            return cls({int(step): [[str(peer) for peer in each] for each in sets] for step, sets in found.items()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StorageError(f"{path} is damaged: it says which masked sums this peer helped to open") from error

    def write(self, path: Path) -> None:
        """Replace the file; it is on disk when this returns."""
        sets = {str(step): [sorted(each) for each in sets] for step, sets in self._sets.items()}
        write_json(path, {"revealed": sets}, version=_VERSION, mode=0o600)

    def why_not(self, outer_step: int, survivors: Collection[str], min_peers: int) -> str:
        """Return why this peer must not reveal for this set, "" when it may."""
        wanted = frozenset(survivors)
        if outer_step < self._oldest:
            return f"outer step {outer_step} is too old: what was revealed for it is no longer kept"
        earlier = self._sets.get(outer_step, [])
        for other in earlier:
            for few in (wanted - other, other - wanted):
                if 0 < len(few) < min_peers:
                    return (
                        f"an earlier sum of outer step {outer_step} and this one differ by {', '.join(sorted(few))}: "
                        f"the difference would be a sum of {len(few)}, at least {min_peers} are asked for"
                    )
        if wanted not in earlier and len(earlier) >= _SETS:
            return f"{_SETS} sums of outer step {outer_step} were opened already"
        return ""

    def with_set(self, outer_step: int, survivors: Collection[str]) -> RevealedSets:
        """Return these sets and this one. The outer steps before the last four are forgotten, and refused from then on."""
        sets = {step: list(each) for step, each in self._sets.items()}
        if frozenset(survivors) not in sets.setdefault(outer_step, []):
            sets[outer_step].append(frozenset(survivors))
        kept = sorted(sets)[-_STEPS:]
        return RevealedSets({step: sets[step] for step in kept})
