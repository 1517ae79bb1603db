"""A part's store as its owner's engine has it: a round becomes an outer step when the members agree that it does.

The engine is the coordinator's (`aggregator.data.round_runner`). It journals fragments, commits, applies and publishes as ever,
in its worker thread; but its commit waits here, between

    append_commit   the round is proposed; it returns when the council names it as the outer step: it is then on the disks of a
                    quorum, this one included. Raises UndecidedError when the grant ends first: the round is held, and may yet
                    become the outer step, which `PartReplica.adopt` then takes without the engine
    applied         the engine has moved the outer state

What ends the wait: `take`, once the update is agreed on; or `end`, once another member owns the part, or the host stops. The
council gives an owner that is not heard, or whose disk fails, another grant. Without a quorum nobody commits, and this waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock

from aggregator.storage.kept_contributions import UndecidedError
from aggregator.storage.store import Entries, Store
from edit.config.run import RunConfig
from edit.council.record import Update
from edit.errors import LocalProtocolError, RefusedError
from edit.merging.injection import Injected, Injection
from edit.merging.outer_state import MergeRecord, OuterState
from edit.merging.trust import Trust
from edit.records import Commit

__all__ = ["EngineStore", "Proposal"]

APPLIES_WITHIN_S = 600.0  # an engine that has not then has a bug


@dataclass(frozen=True, slots=True)
class Proposal:
    """A merged round, to be offered to the members. tokens: merged with it. audit: its entry in the audit log, if any."""

    round_id: int
    reason: str
    tokens: int
    records: tuple[MergeRecord, ...]
    audit: str = ""


class EngineStore(Store):
    """See above. `end` it before another one is made of the same part.

    Args:
        store: the part's; all that stays is there.
        folder, config, run_id: as the store's.
        propose: takes each merged round, in the engine's worker thread.
        entries: makes the entries of the audit log; None: there is none.
    """

    def __init__(
        self,
        store: Store,
        folder: Path,
        config: RunConfig,
        run_id: str,
        propose: Callable[[Proposal], None],
        entries: Entries | None = None,
    ) -> None:
        super().__init__(folder, config, run_id, kept=store.kept)
        self.tokens, self._entries = store.tokens, entries
        self._store, self._propose = store, propose
        self._merged: dict[int, MergeRecord] = {}  # of the round under way, by fragment_id
        self._merged_round = 0
        self._lock = Lock()  # what follows is of two threads
        self._ended = ""  # why
        self._agreed: Future[Update] | None = None
        self._applied: Future[None] | None = None
        self._update: Update | None = None

    # -- the engine, in its worker thread ----------------------------------------------------------------------------------

    @property
    def entries(self) -> Entries | None:
        """See `Store`."""
        return self._entries

    @property
    def oldest_update(self) -> int:
        """See `Store`."""
        return self._store.oldest_update

    def update(self, outer_step: int) -> Commit | None:
        """See `Store`."""
        return self._store.update(outer_step)

    def begin_fragment(self, round_id: int, record: MergeRecord, injection: Injection | None = None) -> Future[None]:
        """Keep the fragment for the proposal: it is written when the round is held."""
        if injection is not None:
            raise RefusedError("a region's run cannot be a swarm")
        with self._lock:
            self.check_open(round_id)
            if round_id != self._merged_round:
                self._merged.clear()
            self._merged_round, self._merged[record.fragment_id] = round_id, record
        written: Future[None] = Future()
        written.set_result(None)
        return written

    def append_commit(
        self,
        round_id: int,
        outer_step: int,
        reason: str,
        tokens: int = 0,
        injected: Injected | None = None,
        base: str = "",
        audit: str = "",
        inner_steps: int = 0,
        trust: Mapping[str, Trust] | None = None,
        fragments: Collection[int] | None = None,
    ) -> None:
        """Propose the round, and wait until it is the outer step.

        Raises UndecidedError when the grant ends first, RefusedError when it will not be the outer step.
        """
        if round_id != self._merged_round or not self._merged or self._merged.keys() != set(fragments or self._merged):
            raise LocalProtocolError(f"a commit of round {round_id} without its fragments")
        records, self._merged = tuple(self._merged[i] for i in sorted(self._merged)), {}
        agreed: Future[Update] = Future()
        with self._lock:
            if self._ended:
                raise RefusedError(self._ended)
            self._agreed = agreed
        self._propose(Proposal(round_id, reason, tokens, records, audit))
        self._update = agreed.result()

    def applied(self, commit: Commit) -> None:
        """See `Store`."""
        assert self._update is not None and self._applied is not None
        self._store.adopted(commit, asdict(self._update))
        self.tokens = self._store.tokens
        self._applied.set_result(None)

    def checkpoint(self, outer: OuterState) -> None:
        """The replica writes them, before anything else is held."""

    # -- the host ----------------------------------------------------------------------------------------------------------

    def take(self, update: Update) -> bool:
        """Let the engine apply the update that it proposed, and wait until it has; return False when it waits for nothing.

        Raises LocalProtocolError when it has not within 10 minutes.
        """
        with self._lock:
            agreed, self._agreed = self._agreed, None
            if agreed is None:
                return False
            applied = self._applied = Future()
        agreed.set_result(update)
        try:
            applied.result(timeout=APPLIES_WITHIN_S)
        except TimeoutError as error:
            raise LocalProtocolError(
                f"the engine of part {update.part} has not applied outer step {update.outer_step}"
            ) from error
        return True

    def end(self, reason: str) -> None:
        """Let the engine wait no longer for what is proposed, and refuse whatever it proposes later."""
        with self._lock:
            self._ended = reason
        self._raise(UndecidedError(reason))

    def refuse(self, reason: str) -> None:
        """Refuse what is proposed: nobody else has heard of it."""
        self._raise(RefusedError(reason))

    def _raise(self, error: RefusedError) -> None:
        with self._lock:
            agreed, self._agreed = self._agreed, None
        if agreed is not None:
            agreed.set_exception(error)
