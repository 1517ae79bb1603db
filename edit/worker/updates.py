"""What comes back from the run, as this replica can use it: the updates of a commit, its verdicts on this peer, snapshots.

Every wait ends at all ranks or at none; what a commit must be to follow on theta is checked here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

from edit.collective import Collective
from edit.errors import RemoteProtocolError, TransportError
from edit.records import Commit, Committed, FragmentCommit, Here, RolledBack, Update, Verdict
from edit.replica.replica import Outer, Replica

__all__ = ["Updates", "without_payloads"]


class Updates:
    """The receiving side of one exchange.

    due: the fragments that the advance from an outer step exchanges; strict: ask for a snapshot until there is one.
    """

    def __init__(
        self, replica: Replica, collective: Collective, due: Callable[[int], tuple[int, ...]], *, strict: bool
    ) -> None:
        self._replica = replica
        self._collective = collective
        self._due = due
        self._strict = strict
        # Why nothing came, the last time.
        self.failure = ""

    def of(self, outcome: Committed) -> dict[int, Update]:
        """Return the updates of the commit that follows on theta, by fragment, here or still on their way.

        Raises RemoteProtocolError when it does not follow, or is not about the fragments that are due.
        """
        commit, outer_step = outcome.commit, self._replica.outer_step
        if commit.outer_step != outer_step + 1:
            raise RemoteProtocolError(f"commit to outer step {commit.outer_step} cannot follow {outer_step}")
        due = self._due(outer_step)
        if tuple(part.fragment_id for part in commit.fragments) != due:
            raise RemoteProtocolError(f"commit to outer step {commit.outer_step} is not about fragments {list(due)}, in order")
        return dict(zip(due, outcome.updates or map(_update, commit.fragments), strict=True))

    def wait(self, update: Update) -> Here | RolledBack:
        """Return the update once every rank has its own. Raises TransportError, RemoteProtocolError at all ranks if at one."""
        if isinstance(update, Here | RolledBack):
            return update
        return Here(self._replica.layout.ranks.together(update.wait))

    def all_of(self, outcome: Committed, without: Collection[int]) -> dict[int, Here | RolledBack] | None:
        """Return all updates of a commit but some; None when the carrier is cut off before all are here. Raises as `of`."""
        try:
            return {i: self.wait(update) for i, update in self.of(outcome).items() if i not in without}
        except TransportError as error:
            self.failure = str(error)
            return None

    def verdict(self, part: FragmentCommit) -> Verdict | None:
        """Return the verdict on this peer's contribution to the fragment; None: it did not take part."""
        mine = part.verdict_of(self._collective.peer_id)
        return mine.verdict if mine else None

    def snapshot(self) -> Outer | None:
        """Return the run's outer parameters, of one outer step at all ranks; None when cut off, unless strict."""
        ranks = self._replica.layout.ranks
        while True:
            try:
                snapshot = ranks.together(self._collective.snapshot)
            except TransportError as error:
                if self._strict:
                    continue
                self.failure = f"no snapshot: {error}"
                return None
            if len(set(ranks.collect((snapshot.outer_step, snapshot.digest)))) == 1:
                return self._replica.verified(snapshot)


def _update(part: FragmentCommit) -> Here | RolledBack:
    return RolledBack() if part.payload is None else Here(part.payload)


def without_payloads(commit: Commit) -> Commit:
    """Return the commit for showing: the payloads are as large as the model."""
    return dataclasses.replace(commit, fragments=tuple(dataclasses.replace(part, payload=None) for part in commit.fragments))
