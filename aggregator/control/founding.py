"""The founding: which peer sends the run's first parameters, and what is taken from it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from aggregator.control.attendance import Attendances
from aggregator.storage.store import Store
from aggregator.worker_thread import Background
from edit.config.run import RunConfig
from edit.errors import RefusedError, RemoteProtocolError
from edit.fragments.schema import Schema
from edit.merging.outer_state import OuterState
from editpb.messages import FoundHeader

__all__ = ["Founding"]


class Founding:
    """Chooses the founder among the members that attend: the first one, and when it leaves the first by peer_id."""

    def __init__(self, config: RunConfig, store: Store, background: Background, attendances: Attendances) -> None:
        self.founder: str | None = None
        self._config, self._store, self._background, self._attendances = config, store, background, attendances

    def attended(self, peer_id: str) -> None:
        """A member attends a run without parameters."""
        if self.founder is None:
            self.founder = peer_id

    def left(self, peer_id: str) -> None:
        """A member no longer attends."""
        if self.founder == peer_id:
            self.founder = min(self._attendances.members(), default=None)

    def check(self, peer_id: str, header: FoundHeader) -> Schema:
        """Return the schema that the founder announced. Raises RefusedError for another peer, RemoteProtocolError."""
        attendance = self._attendances.get(peer_id)
        if self.founder != peer_id or attendance is None:
            raise RefusedError(f"the founder is {self.founder}, not {peer_id}")
        if attendance.schema.schema_hash != header.schema_hash:
            raise RemoteProtocolError("founding with another schema than the one announced")
        return attendance.schema

    async def take(self, schema: Schema, theta: Sequence[Tensor], claimed_digest: str) -> OuterState:
        """Return outer step 0 with these parameters; it is on disk. Raises RemoteProtocolError, StorageError."""

        def work() -> OuterState:
            if not all(bool(fragment.isfinite().all()) for fragment in theta):
                raise RemoteProtocolError("the founder's parameters are not finite")
            outer = OuterState(schema, self._config, theta)
            if outer.digest != claimed_digest:
                raise RemoteProtocolError("the founder's parameters do not have the digest it claims")
            self._store.found(outer)
            return outer

        return await self._background.in_worker(work)
