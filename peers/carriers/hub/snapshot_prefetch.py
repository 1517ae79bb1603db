"""A run's snapshot that is fetched while this peer still builds its model and reads its checkpoint.

Owns: the one transfer, begun before the schema is known here, and whether what came is of use. Must not know: why it is begun.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging

from edit.errors import EditError
from edit.fragments.schema import Schema
from edit.fragments.shards import Shard
from edit.records import Snapshot
from edit.replica.ranks import Ranks
from peers.carriers.hub.data_calls import DataPlane
from peers.carriers.io_thread import IoThread

__all__ = ["SnapshotPrefetch"]

_log = logging.getLogger(__name__)


class SnapshotPrefetch:
    """Of a peer of one rank, which holds everything: what the ranks of a larger one hold, only their model can tell. What does
    not work out is fetched anew when it is needed."""

    def __init__(self, bridge: IoThread, data: DataPlane, ranks: Ranks) -> None:
        self._bridge, self._data, self._alone = bridge, data, ranks.size == 1
        self._coming: concurrent.futures.Future[tuple[Schema, Snapshot]] | None = None

    def begin(self) -> None:
        """Begin to fetch from a run that has parameters; a rank among several does not."""
        if self._alone:
            self._coming = self._bridge.begin(self._fetch())

    async def of(self, schema: Schema) -> Snapshot | None:
        """What was begun, once it is here (loop's thread); None: nothing was, or it came to nothing. It is given once."""
        coming, self._coming = self._coming, None
        if coming is None:
            return None
        try:
            theirs, snapshot = await asyncio.wrap_future(coming)
        except EditError as error:
            _log.info("the snapshot that was fetched ahead: %s", error)
            return None
        return snapshot if theirs.schema_hash == schema.schema_hash else None

    async def _fetch(self) -> tuple[Schema, Snapshot]:
        manifest = await self._data.describe(None, _once)
        shards = [Shard(fragment) for fragment in manifest.schema.fragments]
        return manifest.schema, await self._data.snapshot(manifest, shards, _once)


def _once() -> bool:
    """Nothing is tried again."""
    return False
