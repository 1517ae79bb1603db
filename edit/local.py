"""A run inside one process: `LocalRun` merges once every peer has contributed, `LocalCollective` is one peer's side of it.

Owns: the in-process carrier for tests, simulation and first experiments: the same OuterState, the same answers as the gRPC one.
Each simulated rank of a sharded replica has a LocalCollective of its own, of the same peer. Single-threaded: interleave the
loops of peers and ranks step by step. Must not know: models, optimizers, time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from edit.codecs import codec
from edit.config.run import RunConfig
from edit.errors import LocalProtocolError, RefusedError
from edit.fragments.schema import Schema
from edit.fragments.shards import Box, Shard, partition_fault
from edit.merging.injection import Injection, check_content, check_order, check_run
from edit.merging.merge import Measured, ShardPayload, measure
from edit.merging.norms import whole_norm
from edit.merging.outer_state import OuterState
from edit.records import (
    Aborted,
    Commit,
    Committed,
    Contribution,
    Evicted,
    Finished,
    FragmentCommit,
    NeedsSnapshot,
    Outcome,
    Snapshot,
)

__all__ = ["LocalCollective", "LocalRun"]


@dataclass(slots=True)
class _Arrived:
    """What is there of one peer's contribution to one fragment: parts and their norms by boxes, so that a retry replaces."""

    outer_step: int
    inner_steps: int
    tokens: int
    parts: dict[tuple[Box, ...], tuple[ShardPayload, float]] = field(default_factory=dict)
    complete: bool = False

    def measured(self, peer_id: str, outer_step: int) -> Measured:
        norm, parts = whole_norm(norm for _, norm in self.parts.values()), tuple(part for part, _ in self.parts.values())
        return Measured(peer_id, self.inner_steps, self.tokens, norm, parts, outer_step - self.outer_step)


class LocalRun:
    """One run with a fixed list of peers.

    theta: the initial outer parameters, one flat fp32 tensor per fragment; without it the first to join founds the run.
    Commits when all peers that have not left have contributed every fragment that is due, or at `close`; where arrivals are
    merged, with each contribution. One that is in when its round closes without it counts later, as long as it is not too
    stale. Keeps `config.kept_updates` commits for those that missed one; is finished after `config.sync.outer_steps`,
    or once `config.sync.tokens` are merged (with groups counted where group 0 is).
    """

    def __init__(self, config: RunConfig, peers: Sequence[str], theta: Sequence[Tensor] | None = None) -> None:
        if not peers or len(set(peers)) != len(peers):
            raise LocalProtocolError(f"LocalRun needs distinct peers, not {list(peers)}")
        self._config = config
        self._named = tuple(peers)
        self._present = set(peers)
        self._theta = theta
        self._schema: Schema | None = None
        self._state: OuterState | None = None
        self._arrived: dict[int, dict[str, _Arrived]] = {}
        self._commits: deque[Commit] = deque(maxlen=config.kept_updates)
        self._lost: dict[str, tuple[int, str]] = {}
        self._evicted: dict[str, str] = {}
        self._injection: Injection | None = None
        self._round_id = 1
        self._losses = 0
        self._tokens = 0

    @property
    def state(self) -> OuterState:
        """The outer state. Raises LocalProtocolError before the first peer has joined."""
        if self._state is None:
            raise LocalProtocolError("the run has no outer parameters before its first peer joins")
        return self._state

    @property
    def round_id(self) -> int:
        """The open round."""
        return self._round_id

    @property
    def losses(self) -> int:
        """How often contributions were lost or refused so far."""
        return self._losses

    @property
    def finished(self) -> bool:
        """Whether the last outer step is committed, or the last token merged."""
        sync = self._config.sync
        if self._state is None:
            return False
        return self._state.outer_step >= sync.outer_steps or 0 < sync.tokens <= self._tokens

    @property
    def complete(self) -> tuple[str, ...]:
        """Whose contribution to the open round is in, all of it."""
        if self._state is None:
            return ()
        due = [self._arrived.get(i, {}) for i in self._state.due]
        return tuple(peer for peer in self._named if all(peer in part and part[peer].complete for part in due))

    def collective(self, peer_id: str) -> LocalCollective:
        """The side of one rank of one of the peers named at construction."""
        if peer_id not in self._named:
            raise LocalProtocolError(f"peer {peer_id} is not one of {', '.join(self._named)}")
        return LocalCollective(self, peer_id)

    def join(self, peer_id: str, schema: Schema, found: Callable[[], Sequence[Tensor]]) -> Snapshot:
        """See `Collective.join`. A peer that left comes back by joining again. Raises RefusedError, also after an eviction."""
        if peer_id in self._evicted:
            raise RefusedError(f"peer {peer_id} was evicted: {self._evicted[peer_id]}")
        if self._schema is not None and (difference := self._schema.first_difference(schema)):
            raise RefusedError(f"peer {peer_id} has another model: {difference}")
        if self._state is None:
            theta = self._theta if self._theta is not None else found()
            self._state = OuterState(schema, self._config, [fragment.clone() for fragment in theta])
            self._schema = schema
        self._discard(peer_id)
        self._present.add(peer_id)
        return self.snapshot()

    def snapshot(self) -> Snapshot:
        """theta at the last commit."""
        return Snapshot(self.state.outer_step, self.state.digest, tuple(self.state.theta))

    def leave(self, peer_id: str) -> None:
        """Go on without this peer; its part of the open round is dropped. Commits when it was the last one missing."""
        self._present.discard(peer_id)
        self._discard(peer_id)
        self._commit_when_complete()

    def evict(self, peer_id: str, reason: str) -> None:
        """As `leave`, for good: the peer's next question is answered with Evicted."""
        self._evicted[peer_id] = reason
        self.leave(peer_id)

    def abort(self, reason: str) -> None:
        """Lose the open round, and what is in of it: every rank of whoever has contributed is answered with Aborted, once."""
        self._refuse({peer_id for arrived in self._arrived.values() for peer_id in arrived}, reason)
        self._round_id += 1

    def close(self, reason: str) -> None:
        """Commit the open round with what is complete, as a deadline would. Raises LocalProtocolError when nothing is."""
        if not self.complete:
            raise LocalProtocolError(f"round {self._round_id} cannot be closed: no contribution is complete")
        self._commit(reason)

    def inject(self, injection: Injection) -> None:
        """Take what a regional aggregator brings; it is in with the next commit. Raises as `edit.merging.injection` says."""
        state = self.state
        check_run(self._config)
        check_order(injection.brings, injection.base, injection.replaces, state.injected, state.outer_step)
        check_content(injection, state.schema)
        self._injection = injection

    def contribute(self, peer_id: str, contribution: Contribution) -> bool:
        """Take in one fragment or one rank's part of it. False: dropped, being too stale, or of a peer that left."""
        state, fragment_id = self.state, contribution.fragment_id
        due = state.due if contribution.outer_step == state.outer_step else range(len(state.theta))
        if contribution.outer_step > state.outer_step or fragment_id not in due:
            raise LocalProtocolError(
                f"peer {peer_id} contributed fragment {fragment_id} for outer step {contribution.outer_step}; "
                f"the run is at outer step {state.outer_step}, fragments {list(state.due)} are due"
            )
        if self.finished or peer_id not in self._present:
            return False
        if self._too_stale(contribution.outer_step):
            if self._config.rounds.max_staleness:
                self._refuse([peer_id], self._reason(contribution.outer_step))
            return False
        self._take_in(peer_id, contribution, Shard(state.schema.fragments[fragment_id], contribution.boxes))
        self._commit_when_complete()
        return True

    def _too_stale(self, outer_step: int) -> bool:
        return self.state.outer_step - outer_step > self._config.rounds.max_staleness

    def _take_in(self, peer_id: str, contribution: Contribution, shard: Shard) -> None:
        fragment, payload = shard.fragment, contribution.payload
        if payload.numel != shard.numel:
            raise LocalProtocolError(f"peer {peer_id}, fragment {fragment.name}: {payload.numel} elements for {shard.numel}")
        peers = self._arrived.setdefault(fragment.fragment_id, {})
        arrived = peers.get(peer_id)
        work = contribution.outer_step, contribution.inner_steps, contribution.tokens
        if arrived is None or (arrived.outer_step, arrived.inner_steps, arrived.tokens) != work:
            arrived = peers[peer_id] = _Arrived(*work)  # the work differs: a new attempt
        arrived.parts[shard.boxes] = (ShardPayload(shard, payload), measure(payload))
        if sum(part.shard.numel for part, _ in arrived.parts.values()) >= fragment.numel:
            if fault := partition_fault(fragment, list(arrived.parts)):
                raise LocalProtocolError(f"peer {peer_id}: {fault}")
            arrived.complete = True

    def outcome(self, peer_id: str, outer_step: int, *, block: bool, since: int) -> Outcome | None:
        """See `Collective.outcome`. since: losses before so many are no news.

        Raises LocalProtocolError where a single thread would wait for ever.
        """
        state = self.state
        if peer_id in self._evicted:
            return Evicted(self._evicted[peer_id])
        if outer_step > state.outer_step:
            raise LocalProtocolError(f"peer {peer_id} asks about outer step {outer_step}, the run is at {state.outer_step}")
        if outer_step < state.outer_step:
            kept = next((commit for commit in self._commits if commit.outer_step == outer_step + 1), None)
            if kept is None:
                return NeedsSnapshot(f"the update from outer step {outer_step} is no longer kept")
            return Committed(kept, carried=self._carries(peer_id, kept))
        if self.finished:
            return Finished(state.outer_step)
        if peer_id in self._lost and self._lost[peer_id][0] >= since:
            return Aborted(self._lost[peer_id][1])
        if block:
            raise LocalProtocolError(
                f"peer {peer_id} waits for the round at outer step {outer_step}, but {', '.join(self._missing())} must "
                "contribute first: interleave the peers' loops step by step, or call LocalRun.leave()"
            )
        return None

    def _carries(self, peer_id: str, commit: Commit) -> bool:
        """Whether a contribution that this commit could have merged is merged later, or still may be."""
        if _takes_part(peer_id, commit):
            return False
        later = any(_takes_part(peer_id, other) for other in self._commits if other.outer_step > commit.outer_step)
        return later or any(peer_id in arrived for arrived in self._arrived.values())

    def _missing(self) -> list[str]:
        complete = self.complete
        return [peer_id for peer_id in self._named if peer_id in self._present and peer_id not in complete]

    def _discard(self, peer_id: str) -> None:
        for arrived in self._arrived.values():
            arrived.pop(peer_id, None)
        self._lost.pop(peer_id, None)

    def _refuse(self, peers: Iterable[str], reason: str) -> None:
        for peer_id in peers:
            self._discard(peer_id)
            self._lost[peer_id] = self._losses, reason
        self._losses += 1

    def _commit_when_complete(self) -> None:
        if self._state is None or not self.complete:
            return
        if self._config.rounds.merging == "arrivals":
            self._commit(f"{', '.join(self.complete)} arrived")
        elif not self._missing():
            self._commit(f"all {len(self._present)} peers are in")

    def _commit(self, reason: str) -> None:
        state, complete = self.state, self.complete
        ready = {i: {peer_id: self._arrived[i].pop(peer_id) for peer_id in complete} for i in state.due}
        if 0 in state.due:
            self._tokens += sum(one.tokens for one in ready[0].values())
        merged = [
            state.reduce(i, [one.measured(peer_id, state.outer_step) for peer_id, one in ready[i].items()]) for i in state.due
        ]
        injection, self._injection = self._injection, None
        staged = [state.stage(one, injection) for one in merged]
        self._commits.append(state.commit(self._round_id, reason, staged))
        self._round_id += 1
        self._forget(complete)

    def _forget(self, merged: Sequence[str]) -> None:
        """After a commit: older news, and contributions that no later commit may merge."""
        if self._config.rounds.max_staleness == 0:
            self._arrived.clear()  # each is answered with the commit that it is no part of
            self._lost.clear()
            return
        for peer_id in merged:
            self._lost.pop(peer_id, None)
        steps = {peer_id: one.outer_step for arrived in self._arrived.values() for peer_id, one in arrived.items()}
        for peer_id, outer_step in steps.items():
            if self._too_stale(outer_step):
                self._refuse([peer_id], self._reason(outer_step))

    def _reason(self, outer_step: int) -> str:
        return f"computed against outer step {outer_step}, too stale at {self.state.outer_step}"


def _takes_part(peer_id: str, commit: Commit) -> bool:
    return any(part.verdict_of(peer_id) is not None for part in commit.fragments)


class LocalCollective:
    """The side of one peer, or of one rank of a peer, of a `LocalRun`; a `Collective`."""

    def __init__(self, run: LocalRun, peer_id: str) -> None:
        self._run = run
        self._peer_id = peer_id
        self._shards: tuple[Shard, ...] | None = None
        self._told = 0  # losses before so many need no answer any more

    @property
    def peer_id(self) -> str:
        """This peer's identity in verdicts."""
        return self._peer_id

    def join(self, schema: Schema, found: Callable[[], Sequence[Tensor]], shards: Sequence[Shard] | None = None) -> Snapshot:
        """See `Collective.join`; the first to join founds the run, so let a replica's rank 0 join before its others."""
        snapshot = self._run.join(self._peer_id, schema, found)
        self._shards = None if shards is None else tuple(shards)
        self._told = self._run.losses
        return self._cut_snapshot(snapshot)

    def contribute(self, contribution: Contribution) -> None:
        """Hand over one fragment or part of it; the last missing one commits the round."""
        losses = self._run.losses
        if self._run.contribute(self._peer_id, contribution):
            self._told = losses

    def outcome(self, outer_step: int, *, block: bool) -> Outcome | None:
        """See `Collective.outcome`."""
        outcome = self._run.outcome(self._peer_id, outer_step, block=block, since=self._told)
        match outcome:
            case Aborted():
                self._told = self._run.losses
            case Committed(commit):
                return replace(outcome, commit=self._cut_commit(commit))
        return outcome

    def snapshot(self) -> Snapshot:
        """theta at the last commit, of this rank's shards."""
        return self._cut_snapshot(self._run.snapshot())

    def _cut_snapshot(self, snapshot: Snapshot) -> Snapshot:
        if self._shards is None:
            return snapshot
        parts = zip(self._shards, snapshot.fragments, strict=True)
        return replace(snapshot, fragments=tuple(shard.take(theta) for shard, theta in parts))

    def _cut_commit(self, commit: Commit) -> Commit:
        if self._shards is None:
            return commit
        return replace(commit, fragments=tuple(_cut(part, self._shards[part.fragment_id]) for part in commit.fragments))


def _cut(fragment: FragmentCommit, shard: Shard) -> FragmentCommit:
    """What of a committed fragment a rank gets that holds this shard of it."""
    if (payload := fragment.payload) is None:
        return fragment
    return replace(fragment, payload=codec(payload.codec).cut(payload, shard))
