"""A peer of two ranks in the run of a scripted coordinator: threads, each with an I/O thread, a connection and a session."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.fragments.shards import Box, Shard
from edit.records import Contribution, Snapshot
from edit.replica.ranks import Ranks
from editpb.identity import Identity
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.collective import HubCollective
from peers.carriers.hub.uplink import Stage, as_it_is
from peers.carriers.io_thread import IoThread
from tests.support.encoded import encode
from tests.support.fake_coordinator import RUN_ID, FakeCoordinator
from tests.support.fake_run import config, vectors
from tests.support.thread_ranks import at_every_rank

# Three fragments of a matrix each; rank 0 has the first rows, rank 1 the others. Of the last one rank 1 holds nothing.
ROWS, COLUMNS = (6, 9, 1), 4
SIZES = tuple(rows * COLUMNS for rows in ROWS)
SCHEMA = Schema(
    tuple(
        FragmentSpec(fragment_id=i, name=f"f{i}", tensors=(TensorSpec(name=f"f{i}.weight", shape=(rows, COLUMNS)),))
        for i, rows in enumerate(ROWS)
    )
)

T = TypeVar("T")


def shards(rank: int) -> list[Shard]:
    def boxes(rows: int) -> list[Box]:
        split = -(-rows // 2)
        first, last = ((0, split), (split, rows))[rank]
        return [Box(0, (first, 0), (last - first, COLUMNS))] if last > first else []

    return [Shard(fragment, boxes(rows)) for fragment, rows in zip(SCHEMA.fragments, ROWS, strict=True)]


@dataclass
class Rank:
    ranks: Ranks
    io: IoThread
    collective: HubCollective
    shards: Sequence[Shard]
    gate: threading.Barrier

    def join(self) -> Snapshot:
        return self.collective.join(SCHEMA, lambda: vectors(SIZES, 0), self.shards)

    def contribute(self, deltas: Sequence[Tensor], outer_step: int = 0) -> None:
        for i, shard in enumerate(self.shards):
            if shard.numel:
                payload = encode("fp32", shard.take(deltas[i]))
                boxes = None if shard.is_whole else shard.boxes
                self.collective.contribute(
                    Contribution(outer_step=outer_step, fragment_id=i, inner_steps=5, tokens=50, payload=payload, boxes=boxes)
                )

    def await_link(self, up: bool) -> None:
        """Wait until this rank hears the coordinator, or no longer hears it."""
        assert self.io.wait(lambda: self.collective.connected is up or None, timeout=10) is not None

    def only(self, rank: int, call: Callable[[], object]) -> None:
        """Let one rank do something while the others wait."""
        self.gate.wait()
        if self.ranks.rank == rank:
            call()
        self.gate.wait()


def with_two_ranks(
    work: Callable[[FakeCoordinator, Rank], T],
    *,
    founded: bool = True,
    mode: str = "blocking",
    join: bool = True,
    max_staleness: int = 0,
    stage: Stage = as_it_is,
) -> list[T]:
    """What `work` returns at each rank of a peer in the run of a scripted coordinator."""
    gate = threading.Barrier(2, timeout=30)
    with FakeCoordinator(
        config(max_staleness=max_staleness, mode=mode), SCHEMA, vectors(SIZES, 0) if founded else None
    ) as fake:

        def one(ranks: Ranks) -> T:
            with IoThread() as io:
                channels, identity = Channels([f"127.0.0.1:{fake.port}"]), Identity(RUN_ID, "peer", "a")
                collective = HubCollective(io, channels, identity, ranks=ranks, stage=stage, draw=lambda: 0.0)
                rank = Rank(ranks, io, collective, shards(ranks.rank), gate)
                try:
                    if join:
                        rank.join()
                    return work(fake, rank)
                except BaseException:
                    gate.abort()
                    raise
                finally:
                    collective.close()

        return at_every_rank(2, one)
