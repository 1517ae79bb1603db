"""A carrier that brings what a joining peer says it lacks, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from edit.collective import Collective
from edit.fragments.digest import fragment_hash
from edit.fragments.schema import Schema
from edit.fragments.shards import Shard
from edit.records import Contribution, DescribedSnapshot, Lacks, Outcome, Progress, Snapshot


@dataclass
class SparingCollective:
    """In front of one of a run in this process, at an unsharded peer."""

    inner: Collective
    # The fragments that were fetched on joining, and where this peer said that it begins (None: where the run is).
    fetched: list[int] = field(default_factory=list)
    begins_at: int | None = None
    # How many whole snapshots were taken after that.
    snapshots: int = 0

    @property
    def peer_id(self) -> str:
        return self.inner.peer_id

    def join(
        self,
        schema: Schema,
        found: Callable[[], Sequence[Tensor]],
        shards: Sequence[Shard] | None = None,
        lacks: Lacks | None = None,
    ) -> Snapshot:
        assert lacks is not None
        run = self.inner.join(schema, found, shards)
        hashes = tuple(map(fragment_hash, run.fragments))
        lacking = lacks(DescribedSnapshot(run.outer_step, run.digest, hashes, run.run_outer_step))
        self.fetched, self.begins_at = sorted(lacking.fragments), lacking.begins_at
        kept = (part if i in self.fetched else torch.empty(0) for i, part in enumerate(run.fragments))
        return replace(run, fragments=tuple(kept))

    def contribute(self, contribution: Contribution) -> None:
        self.inner.contribute(contribution)

    def outcome(self, outer_step: int, *, block: bool) -> Outcome | None:
        return self.inner.outcome(outer_step, block=block)

    def snapshot(self) -> Snapshot:
        self.snapshots += 1
        return self.inner.snapshot()

    def report(self, progress: Progress) -> None:
        self.inner.report(progress)
