"""What the parts of one model are together, where several aggregators have a part each; with one aggregator: that one.

Owns: how parts are shown, the digest of the whole, the form of their common state, and the check that a run is founded with the
parameters of one model. Must not know: hooks, carriers, when a part exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from edit.errors import ConfigError, RefusedError, StorageError
from edit.fragments.digest import combine
from edit.records import Snapshot
from edit.replica.replica import Replica
from edit.worker.exchange import Exchange

__all__ = ["AggregatorShare", "digest_of", "founding", "joined_state", "refuse_small_parts", "separate_states", "shown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatorShare:
    """Where the fragments of one aggregator stand at this peer. outer_step, digest: of their outer parameters;
    round_inner_steps: since their last contribution; pending: whether one waits for its outcome; finished: whether their run is
    over; reason: why the last attempt ended as it did."""

    outer_step: int
    digest: str
    round_inner_steps: int
    pending: bool
    finished: bool
    reason: str


def shown(exchange: Exchange) -> AggregatorShare:
    """The part that this exchange is of, as it stands."""
    outer = exchange.replica.outer
    return AggregatorShare(
        outer_step=outer.outer_step,
        digest=outer.digest,
        round_inner_steps=exchange.schedule.round_inner_steps,
        pending=exchange.pending is not None,
        finished=exchange.finished,
        reason=exchange.last_reason,
    )


def digest_of(exchanges: Sequence[Exchange]) -> str:
    """Of theta, all parts one after the other: what one aggregator would have, when all are at the same outer step."""
    outers = [exchange.replica.outer for exchange in exchanges]
    return outers[0].digest if len(outers) == 1 else combine(one for outer in outers for one in outer.hashes)


def refuse_small_parts(replicas: Sequence[Replica], groups: int) -> None:
    """Raise ConfigError when a part has too few fragments to be exchanged in groups."""
    for number, replica in enumerate(replicas):
        count = len(replica.schema.fragments)
        if len(replicas) > 1 and count < groups:
            raise ConfigError(
                f"sync.groups = {groups}: aggregator {number} of {len(replicas)} has only {count} of the model's fragments; "
                "let fewer aggregators share them, or set fewer groups"
            )


# Founding.


def founding(replicas: Sequence[Replica], snapshots: Sequence[Snapshot]) -> Callable[[], Sequence[Tensor]]:
    """What gives the initial fragments of the next part. snapshots: of the parts joined before it, nothing of them loaded yet.

    Each aggregator chooses its founder, so two peers may found parts of one run: only if they have the same model, to the bit.
    It raises ConfigError where this one's is another, RefusedError where the run is past its founding.
    """
    number = len(snapshots)

    def found() -> Sequence[Tensor]:
        for replica, snapshot in zip(replicas, snapshots, strict=False):
            if snapshot.outer_step > 0:
                raise RefusedError(
                    f"aggregator {number} has no parameters, but others of the run are at outer step {snapshot.outer_step}: "
                    "its state folder is a new one; restore the old one"
                )
            same = all(torch.equal(replica.local_fragment(i), theta) for i, theta in enumerate(snapshot.fragments))
            if not replica.layout.ranks.all([same])[0]:
                raise ConfigError(
                    f"aggregator {number} asks this peer for initial parameters, but another peer has founded the run with "
                    "other ones: start that peer first, or give this one the same --model-folder"
                )
        return replicas[number].founding()

    return found


# Checkpoints.


def joined_state(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The states of all parts as one: tensors of a kind together, the scalars of each part in a list."""
    if len(states) == 1:
        return dict(states[0])
    kinds = dict.fromkeys(kind for state in states for kind in state if kind != "scalars")
    tensors = {kind: {n: t for state in states for n, t in state.get(kind, {}).items()} for kind in kinds}
    return {**tensors, "scalars": {"parts": [state["scalars"] for state in states]}}


def separate_states(state: Mapping[str, Any], count: int) -> list[Mapping[str, Any]]:
    """What `joined_state` was made of; each with the tensors of all. Raises StorageError for another number of parts."""
    if count == 1:
        return [state]
    scalars = state.get("scalars")
    parts = scalars.get("parts") if isinstance(scalars, Mapping) else None
    if not isinstance(parts, Sequence) or len(parts) != count:
        raise StorageError(f"checkpoint: it is not of a run with {count} aggregators")
    return [{**state, "scalars": part} for part in parts]
