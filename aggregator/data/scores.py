"""What scorers say of the contributions to the last outer step, until the next commit takes it.

1. A report is of the last committed outer step, and of peers whose contributions are in that commit. One of another outer step
   is late, or is of none: StaleError.
2. A scorer reports once of each outer step. The same report again changes nothing; another one is refused.
3. A commit takes what is there when it begins, and waits for nobody. What comes later is late.
4. The report of a scorer that was evicted, or has another key, is withdrawn, unless a commit has taken it already.

Runs on the event loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from edit.errors import RefusedError, RemoteProtocolError, StaleError
from edit.merging.trust import agreed
from edit.records import Commit

__all__ = ["Scores"]


class Scores:
    """The reports of one run. last: the last commit; None: there is none, or it is kept no longer."""

    def __init__(self, last: Commit | None) -> None:
        self._reports: dict[str, Mapping[str, float]] = {}  # by scorer
        self._being_logged: set[str] = set()
        self._outer_step, self._peers = 0, frozenset[str]()
        self._committing = False
        if last is not None:
            self.committed(last)

    @contextlib.contextmanager
    def report(self, scorer: str, outer_step: int, scores: Mapping[str, float]) -> Iterator[bool]:
        """Take a report; what the block does, comes before it counts. The block is given whether the report is a new one.

        Raises StaleError (rule 1), RefusedError (rule 2), RemoteProtocolError for peers that are not in the commit.
        """
        self._check_step(outer_step)
        if strangers := sorted(scores.keys() - self._peers):
            raise RemoteProtocolError(f"scores of {strangers[0]}, who is not in the commit to outer step {outer_step}")
        known = self._reports.get(scorer)
        if scorer in self._being_logged or (known is not None and dict(known) != dict(scores)):
            raise RefusedError(f"{scorer} has scored outer step {outer_step} already")
        self._being_logged.add(scorer)
        try:
            yield known is None
        finally:
            self._being_logged.discard(scorer)
        self._check_step(outer_step)
        self._reports[scorer] = dict(scores)

    def _check_step(self, outer_step: int) -> None:
        if outer_step != self._outer_step:
            raise StaleError(f"scores of outer step {outer_step}; the last one is {self._outer_step}, and only that is scored")
        if self._committing:
            raise StaleError(f"scores of outer step {outer_step} come too late: the next one is being committed")

    def withdraw(self, scorer: str) -> None:
        """Forget what was reported (rule 4)."""
        self._reports.pop(scorer, None)

    def begin_commit(self) -> tuple[tuple[str, ...], dict[str, float]]:
        """Return who has reported, and what they say together; from now on reports are late."""
        self._committing = True
        return tuple(sorted(self._reports)), agreed([self._reports[scorer] for scorer in sorted(self._reports)])

    def undo_commit(self) -> None:
        """The commit came to nothing."""
        self._committing = False

    def committed(self, commit: Commit) -> None:
        """Go on with the reports of another outer step."""
        self._committing = False
        self._reports = {}
        self._outer_step = commit.outer_step
        self._peers = frozenset(said.peer_id for fragment in commit.fragments for said in fragment.verdicts)
