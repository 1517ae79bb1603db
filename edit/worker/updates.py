"""What comes back from the run, as this replica can use it: the updates of a commit, its verdicts on this peer, snapshots.

Owns: the waits for them, at all ranks or at none, and what a commit must be to follow on theta. Must not know: what is pending,
what becomes of the local parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from edit.collective import Collective
from edit.errors import RemoteProtocolError, TransportError
from edit.fragments.groups import fragments_due
from edit.records import Commit, Committed, EncodedTensor, FragmentCommit, Verdict
from edit.replica.replica import Outer, Replica
from edit.worker.config import WorkerConfig
from edit.worker.pending import Waiting

__all__ = ["Updates", "without_payloads"]


class Updates:
    """The receiving side of one exchange. failure: why nothing came, the last time.

    Raises ConfigError when the model has fewer fragments than the run has groups.
    """

    def __init__(self, replica: Replica, collective: Collective, config: WorkerConfig) -> None:
        self._replica = replica
        self._collective = collective
        self._config = config
        self.failure = ""
        self.due(0)

    def due(self, outer_step: int) -> tuple[int, ...]:
        """The fragments that the advance from `outer_step` exchanges."""
        return fragments_due(
            outer_step, len(self._replica.schema.fragments), self._config.sync.groups, self._config.sync.pattern
        )

    def waiting(self, outcome: Committed) -> dict[int, Waiting]:
        """The updates of the commit that follows on theta, by fragment, here or still on their way.

        Raises RemoteProtocolError when it does not follow, or is not about the fragments that are due.
        """
        commit, outer_step = outcome.commit, self._replica.outer.outer_step
        if commit.outer_step != outer_step + 1:
            raise RemoteProtocolError(f"commit to outer step {commit.outer_step} cannot follow {outer_step}")
        due = self.due(outer_step)
        if tuple(part.fragment_id for part in commit.fragments) != due:
            raise RemoteProtocolError(f"commit to outer step {commit.outer_step} is not about fragments {list(due)}, in order")
        arriving = outcome.arriving or (None,) * len(due)
        return {
            part.fragment_id: part.payload if coming is None else coming
            for part, coming in zip(commit.fragments, arriving, strict=True)
        }

    def wait(self, update: Waiting) -> EncodedTensor | None:
        """The update, once every rank has its own. Raises TransportError, RemoteProtocolError at all ranks if at one."""
        if update is None or isinstance(update, EncodedTensor):
            return update
        return self._replica.layout.ranks.together(update.wait)

    def updates(self, outcome: Committed, without: Collection[int]) -> dict[int, EncodedTensor | None] | None:
        """All updates of a commit but some; None when the carrier is cut off before all are here. Raises as `waiting`."""
        try:
            return {i: self.wait(update) for i, update in self.waiting(outcome).items() if i not in without}
        except TransportError as error:
            self.failure = str(error)
            return None

    def verdict(self, part: FragmentCommit) -> Verdict | None:
        """On this peer's contribution to the fragment; None: it did not take part."""
        mine = part.verdict_of(self._collective.peer_id)
        return mine.verdict if mine else None

    def takes_part(self, commit: Commit) -> bool:
        """Whether this peer contributed to the commit."""
        return any(self.verdict(part) for part in commit.fragments)

    def snapshot(self) -> Outer | None:
        """The run's outer parameters, of one and the same outer step at all ranks; None when cut off, unless strict: then it
        asks until it has them."""
        ranks = self._replica.layout.ranks
        while True:
            try:
                snapshot = ranks.together(self._collective.snapshot)
            except TransportError as error:
                if self._config.sync.strict:
                    continue
                self.failure = f"no snapshot: {error}"
                return None
            if len(set(ranks.collect((snapshot.outer_step, snapshot.digest)))) == 1:
                return self._replica.verified(snapshot)


def without_payloads(commit: Commit) -> Commit:
    """For showing: the payloads are as large as the model."""
    return dataclasses.replace(commit, fragments=tuple(dataclasses.replace(part, payload=None) for part in commit.fragments))
