"""Which sums a peer helped to open: the rule against differences of sums, and its file.

A linear combination of sums of the same vectors is the same in all peers that no sum tells apart: those that are in the same
sums. A round that is tried again opens another sum of one outer step, so a peer reveals for a set only if none of the groups
that its sums of that outer step tell apart is small, and all of these sums are of one plan: a plan decides by how much each
vector counts.

A vector of which a sum was opened is in no sum of a later outer step: see `opened`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from edit.durable_files import read_json, write_json
from edit.errors import StorageError

__all__ = ["RevealedSets"]

_VERSION = 1
_STEPS = 4  # outer steps that are kept; a peer reveals nothing for one that is older
_SETS = 16  # of one outer step


class RevealedSets:
    """The sets of peers that this peer revealed for, by outer step. Refuses what is older than what it keeps.

    sets: by outer step. plans: the digest of the plan of an outer step's sums; one that is not there may be any.
    """

    def __init__(
        self, sets: Mapping[int, Collection[Collection[str]]] | None = None, plans: Mapping[int, bytes] | None = None
    ) -> None:
        self._plans = dict(plans or {})
        self._sets = {step: [frozenset(each) for each in of_step] for step, of_step in (sets or {}).items()}
        self._oldest = min(self._sets, default=0) if len(self._sets) >= _STEPS else 0

    @classmethod
    def read(cls, path: Path) -> RevealedSets:
        """Return what `write` wrote, or an empty one when there is no such file. Raises StorageError when it is damaged:
        without it nobody knows what may be revealed."""
        if not path.exists():
            return cls()
        try:
            found = read_json(path, version=_VERSION)
            sets = {int(step): [[str(peer) for peer in each] for each in sets] for step, sets in found["revealed"].items()}
            return cls(sets, {int(step): bytes.fromhex(plan) for step, plan in found.get("plans", {}).items()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StorageError(f"{path} is damaged: it says which masked sums this peer helped to open") from error

    def write(self, path: Path) -> None:
        """Replace the file; it is on disk when this returns."""
        sets = {str(step): [sorted(each) for each in sets] for step, sets in self._sets.items()}
        plans = {str(step): plan.hex() for step, plan in self._plans.items()}
        write_json(path, {"revealed": sets, "plans": plans}, version=_VERSION, mode=0o600)

    def why_not(self, outer_step: int, survivors: Collection[str], min_peers: int, plan: bytes) -> str:
        """Return why this peer must not reveal for this set, "" when it may. plan: the digest of the round's plan."""
        wanted = frozenset(survivors)
        if outer_step < self._oldest:
            return (
                f"outer step {outer_step} is too old: what was revealed for it is no longer kept. If the run goes on from an "
                "older copy, move revealed.json away and start this peer again"
            )
        earlier = self._sets.get(outer_step, [])
        if earlier and self._plans.get(outer_step, plan) != plan:
            return f"a sum of outer step {outer_step} was opened under another plan"
        if wanted in earlier:
            return ""
        for group in _told_apart([*earlier, wanted]):
            if len(group) < min_peers:
                return (
                    f"earlier sums of outer step {outer_step} and this one tell {', '.join(group)} apart from the others: "
                    f"the difference would be a sum of {len(group)}, at least {min_peers} are asked for"
                )
        if len(earlier) >= _SETS:
            return f"{_SETS} sums of outer step {outer_step} were opened already"
        return ""

    def opened(self, outer_step: int) -> bool:
        """Whether this peer helped to open a sum with its contribution to the advance from `outer_step`, or may have.

        If the commit does not have it, what it contributed must not go out again: the difference of that sum and a later one
        could be this contribution alone.
        """
        return outer_step < self._oldest or outer_step in self._sets

    def with_set(self, outer_step: int, survivors: Collection[str], plan: bytes) -> RevealedSets:
        """Return these sets and this one. The outer steps before the last four are forgotten, and refused from then on."""
        sets = {step: list(each) for step, each in self._sets.items()}
        if frozenset(survivors) not in sets.setdefault(outer_step, []):
            sets[outer_step].append(frozenset(survivors))
        kept = sorted(sets)[-_STEPS:]
        plans = {outer_step: plan, **self._plans}
        return RevealedSets({step: sets[step] for step in kept}, {step: plans[step] for step in kept if step in plans})


def _told_apart(sets: Sequence[frozenset[str]]) -> list[list[str]]:
    """Return the groups of peers that are in the same ones of these sets, ascending."""
    groups: dict[tuple[bool, ...], list[str]] = {}
    for peer in sorted(frozenset().union(*sets)):
        groups.setdefault(tuple(peer in each for each in sets), []).append(peer)
    return list(groups.values())
