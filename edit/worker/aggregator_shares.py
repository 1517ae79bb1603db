"""The exchanges of one worker with all aggregators of its run, each with its share of the fragments; mostly there is one.

Each share advances on its own and keeps its own outer step, but all contribute at the same optimizer step: one that had no
outcome for a while (its aggregator was away) waits for the others' next contribution. Else two peers could wait for each other,
at one aggregator each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from edit.collective import Collective
from edit.errors import ConfigError, LocalProtocolError, RefusedError, StorageError
from edit.fragments.digest import combine
from edit.records import Commit, Snapshot
from edit.replica.replica import Replica
from edit.worker.apply import ShareExchange
from edit.worker.checkpoint import Checkpoint, go_on, start, state_of

__all__ = ["AggregatorShare", "AggregatorShares", "refuse_small_shares", "separate_states"]


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


class AggregatorShares:
    """What `EditWorker` asks and tells; every verb is for all shares.

    exchanges: one for each aggregator; none before entering.
    """

    def __init__(self, exchanges: Sequence[ShareExchange] = ()) -> None:
        self._each = tuple(exchanges)

    @property
    def entered(self) -> tuple[ShareExchange, ...]:
        """The exchange with each aggregator. Raises LocalProtocolError before entering."""
        if not self._each:
            raise LocalProtocolError("enter the EditWorker first: with EditWorker(...) as worker:")
        return self._each

    # Entering and leaving.

    def join(self, collectives: Sequence[Collective], checkpoints: Sequence[Checkpoint]) -> None:
        """Enter the run at every aggregator, then begin from its parameters or, with checkpoints, go on from them."""
        replicas = [each.replica for each in self.entered]
        snapshots: list[Snapshot] = []
        for replica, collective in zip(replicas, collectives, strict=True):
            shards = replica.layout.held if replica.layout.ranks.size > 1 else None
            snapshots.append(collective.join(replica.schema, _founding(replicas, snapshots), shards))
        for number, (each, snapshot) in enumerate(zip(self.entered, snapshots, strict=True)):
            if checkpoints:
                go_on(each, checkpoints[number], snapshot)
            else:
                start(each, snapshot)
            each.begin()

    def leave(self) -> None:
        """Wait for every pending outcome and apply it, but contribute no more."""
        for each in self.entered:
            each.leave()

    def drop_pending(self) -> None:
        """Give up every pending contribution; residuals stay as before."""
        for each in self.entered:
            each.run(each.exchange.drop_pending())

    # While training.

    def before_forward(self, fragments: Sequence[Iterable[int]], *, lazily: bool) -> None:
        """A forward is about to need these fragments, by share: take fresh outcomes, and apply what waits for them."""
        for each, needed in zip(self.entered, fragments, strict=True):
            if each.exchange.pending is not None:
                each.run(each.exchange.take(lazily=lazily))
                each.apply_fragments(needed)

    def before_step(self) -> None:
        """An optimizer step is about to be taken: apply what waits for a forward."""
        for each in self.entered:
            each.before_step()

    def before_other_step(self) -> None:
        """Another optimizer is about to change the parameters: keep them as they were sent, so that its change is not lost."""
        for each in self.entered:
            each.keep_local()

    def after_step(self) -> None:
        """An optimizer step was taken: look for outcomes; contribute once every share is ready.

        Raises ConfigError, at every rank, for a parameter that was unfrozen after entering.
        """
        ready = [each.run(each.exchange.stepped()) for each in self.entered]
        if all(ready):
            if not self.finished:
                self.entered[0].replica.refuse_unfrozen()
            contributed = [each.run(each.exchange.contribute_if_due()) for each in self.entered]
            if any(contributed):
                self._reset_finished()

    def _reset_finished(self) -> None:
        """Move the share of a finished run back to theta: its parameters are still trained along with the others'."""
        for replica in (each.replica for each in self.entered if each.exchange.finished):
            replica.move(replica.outer, lambda _: None)

    def synchronize(self, *, block: bool) -> bool:
        """Take every pending outcome and every commit already known. False when one of them is not to be had."""
        known = [each.synchronize(block=block) for each in self.entered]
        return all(known)

    def count_tokens(self, tokens: int) -> None:
        """Add to the tokens behind the next contribution of each share."""
        for each in self.entered:
            each.exchange.schedule.count_tokens(tokens)

    # How they stand.

    @property
    def outer_step(self) -> int:
        """The outer step of the share that is furthest."""
        return max(each.replica.outer.outer_step for each in self.entered)

    @property
    def digest(self) -> str:
        """The digest of theta, all shares in one: what one aggregator would have, when all are at the same outer step."""
        outers = [each.replica.outer for each in self.entered]
        return outers[0].digest if len(outers) == 1 else combine(one for outer in outers for one in outer.hashes)

    @property
    def shown(self) -> tuple[AggregatorShare, ...]:
        """Each share as it stands; none before entering."""
        return tuple(map(_shown, self._each))

    @property
    def finished(self) -> bool:
        """Whether every share's run is over; before entering False."""
        return bool(self._each) and all(each.exchange.finished for each in self._each)

    @property
    def inner_steps(self) -> int:
        """Optimizer steps counted."""
        return self._each[0].exchange.schedule.inner_steps if self._each else 0

    @property
    def round_inner_steps(self) -> int:
        """Optimizer steps since the last contribution of any share."""
        return min((each.exchange.schedule.round_inner_steps for each in self._each), default=0)

    @property
    def pending(self) -> bool:
        """Whether a contribution waits for its outcome."""
        return any(each.exchange.pending is not None for each in self._each)

    @property
    def last_commit(self) -> Commit | None:
        """The last commit of the share that is furthest."""
        return self._furthest.last_commit if self._each else None

    @property
    def last_reason(self) -> str:
        """Why the last attempt of the share that is furthest ended as it did."""
        return self._furthest.exchange.last_reason if self._each else ""

    @property
    def _furthest(self) -> ShareExchange:
        return max(self._each, key=lambda each: each.replica.outer.outer_step)

    # theta in the model, and as tensors.

    def load_outer(self) -> list[list[list[Tensor]]]:
        """Put theta into the model; return exact copies of the local parameters for `restore`."""
        return [each.replica.load_outer() for each in self.entered]

    def restore(self, kept: Sequence[Sequence[Sequence[Tensor]]]) -> None:
        """Undo `load_outer`, to the bit."""
        for each, copies in zip(self.entered, kept, strict=True):
            each.replica.restore(copies)

    def outer_state_dict(self) -> dict[str, Tensor]:
        """Return theta by tensor name, in full shape, at rank 0."""
        return {name: theta for each in self.entered for name, theta in each.replica.outer_state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all shares as one: tensors of a kind together, the scalars of each share in a list."""
        states = [state_of(each) for each in self.entered]
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


def _shown(each: ShareExchange) -> AggregatorShare:
    exchange, outer = each.exchange, each.replica.outer
    return AggregatorShare(
        outer_step=outer.outer_step,
        digest=outer.digest,
        round_inner_steps=exchange.schedule.round_inner_steps,
        pending=exchange.pending is not None,
        finished=exchange.finished,
        reason=exchange.last_reason,
    )


def _founding(replicas: Sequence[Replica], snapshots: Sequence[Snapshot]) -> Callable[[], Sequence[Tensor]]:
    """Return what gives the initial fragments of the next share. snapshots: of the shares joined before it, not loaded yet.

    Each aggregator chooses its founder, so two peers may found shares of one run: only if they have the same model, to the bit.
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
