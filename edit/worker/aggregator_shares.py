"""What the exchanges of one worker with all aggregators of its run do as one; mostly there is one.

Each aggregator has a share of the fragments, which advances on its own and keeps its own outer step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from edit.collective import Collective
from edit.errors import ConfigError, RefusedError, StorageError
from edit.records import Snapshot
from edit.replica.replica import Replica
from edit.worker.apply import ShareExchange
from edit.worker.checkpoint import Checkpoint, KnownParameters, go_on, refuse_other_run, start, state_of

__all__ = ["AggregatorShare", "Joined", "begin_all", "join_all", "joint_state", "refuse_small_shares", "separate_states"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatorShare:
    """Where the fragments of one aggregator stand at this peer."""

    # The outer step of their outer parameters, and the digest of those.
    outer_step: int
    digest: str
    # Optimizer steps since their last contribution.
    round_inner_steps: int
    # Whether a contribution waits for its outcome.
    pending: bool
    # Whether their run is over.
    finished: bool
    # Why the last attempt ended as it did.
    reason: str

    @classmethod
    def of(cls, each: ShareExchange) -> AggregatorShare:
        """Return how the exchange with one aggregator stands."""
        exchange, replica = each.exchange, each.replica
        return cls(
            outer_step=replica.outer_step,
            digest=replica.digest,
            round_inner_steps=exchange.schedule.round_inner_steps,
            pending=exchange.pending is not None,
            finished=exchange.finished,
            reason=exchange.last_reason,
        )


@dataclass(frozen=True, slots=True)
class Joined:
    """What an aggregator's run is at. by_updates: whether the checkpoint gets there by updates rather than by the snapshot."""

    snapshot: Snapshot
    by_updates: bool


def join_all(
    exchanges: Sequence[ShareExchange],
    collectives: Sequence[Collective],
    checkpoints: Sequence[Checkpoint],
    reached: int = 0,
) -> list[Joined]:
    """Enter the run at every aggregator. The model is not changed: that does `begin_all`.

    reached: the largest outer step that an aggregator has said. Raises ConfigError as `refuse_other_run`.
    """
    replicas = [each.replica for each in exchanges]
    snapshots: list[Snapshot] = []
    joined: list[Joined] = []
    for number, (each, collective) in enumerate(zip(exchanges, collectives, strict=True)):
        replica, known = each.replica, KnownParameters(each, checkpoints[number] if checkpoints else None)
        shards = replica.layout.held if replica.layout.ranks.size > 1 else None
        snapshot = collective.join(replica.schema, _founding(replicas, snapshots, reached), shards, known.lacks)
        snapshots.append(known.complete(snapshot))
        joined.append(Joined(snapshots[-1], known.by_updates))
    for each, checkpoint, snapshot in zip(exchanges, checkpoints, snapshots, strict=False):
        refuse_other_run(each, checkpoint, snapshot)
    return joined


def begin_all(exchanges: Sequence[ShareExchange], checkpoints: Sequence[Checkpoint], joined: Sequence[Joined]) -> None:
    """Begin from each aggregator's parameters or, with checkpoints, go on from them. joined: what `join_all` returned."""
    for number, (each, at) in enumerate(zip(exchanges, joined, strict=True)):
        exactly = False
        if checkpoints:
            exactly = go_on(each, checkpoints[number], at.snapshot, by_updates=at.by_updates)
        else:
            start(each, at.snapshot)
        each.begin(anew=not exactly)


def joint_state(exchanges: Sequence[ShareExchange]) -> dict[str, Any]:
    """Return the state of all shares as one: tensors of a kind together, the scalars of each share in a list."""
    states = [state_of(each) for each in exchanges]
    if len(states) == 1:
        return states[0]
    kinds = dict.fromkeys(kind for state in states for kind in state if kind != "scalars")
    tensors = {kind: {n: t for state in states for n, t in state.get(kind, {}).items()} for kind in kinds}
    return {**tensors, "scalars": {"shares": [state["scalars"] for state in states]}}


def separate_states(state: Mapping[str, Any], count: int) -> list[Mapping[str, Any]]:
    """Return each share's state, with the tensors of all. Raises StorageError for another number of aggregators."""
    if count == 1:
        return [state]
    scalars = state.get("scalars")
    shares = scalars.get("shares") if isinstance(scalars, Mapping) else None
    if not isinstance(shares, Sequence) or len(shares) != count:
        raise StorageError(f"checkpoint: it is not of a run with {count} aggregators")
    return [{**state, "scalars": share} for share in shares]


def refuse_small_shares(replicas: Sequence[Replica], groups: int) -> None:
    """Raise ConfigError when an aggregator has too few fragments to be exchanged in groups."""
    for number, replica in enumerate(replicas):
        count = len(replica.schema.fragments)
        if len(replicas) > 1 and count < groups:
            raise ConfigError(
                f"sync.groups = {groups}: aggregator {number} of {len(replicas)} has only {count} of the model's fragments; "
                "let fewer aggregators share them, or set fewer groups"
            )


def _founding(replicas: Sequence[Replica], snapshots: Sequence[Snapshot], reached: int) -> Callable[[], Sequence[Tensor]]:
    """Return what gives the initial fragments of the next share.

    snapshots: of the shares joined before it, not loaded yet. reached: the largest outer step that any aggregator has said.

    Each aggregator chooses its founder, so two peers may found shares of one run: only if they have the same model, to the bit.
    It raises ConfigError where this one's is another, RefusedError where the run is past its founding.
    """
    number = len(snapshots)

    def found() -> Sequence[Tensor]:
        if (latest := max([reached, *(snapshot.outer_step for snapshot in snapshots)])) > 0:
            raise RefusedError(
                f"aggregator {number} has no parameters, but others of the run are at outer step {latest}: its state folder is "
                "a new one; restore the old one"
            )
        for replica, snapshot in zip(replicas, snapshots, strict=False):
            same = all(torch.equal(replica.local_fragment(i), theta) for i, theta in enumerate(snapshot.fragments))
            if not replica.layout.ranks.all([same])[0]:
                raise ConfigError(
                    f"aggregator {number} asks this peer for initial parameters, but another peer has founded the run with "
                    "other ones: start that peer first, or give this one the same --model-folder"
                )
        return replicas[number].founding()

    return found
