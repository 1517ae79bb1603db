"""A run inside one process: `LocalRun` merges once every peer has contributed, `LocalCollective` is one peer's side of it.

Owns: the in-process carrier for tests, simulation and first experiments: the same OuterState, the same answers as the gRPC one.
Each simulated rank of a sharded replica has a LocalCollective of its own, of the same peer. Single-threaded: interleave the
loops of peers and ranks step by step. Must not know: models, optimizers, time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from edit.boxes import Box, Region, partition_fault
from edit.codecs import cut
from edit.config import RunConfig
from edit.errors import LocalProtocolError, RefusedError
from edit.merge import Measured, Part, measure, whole_norm
from edit.outer_state import OuterState
from edit.records import Aborted, Behind, Commit, Committed, Contribution, Evicted, Finished, Outcome, Snapshot
from edit.schema import Schema

__all__ = ["LocalCollective", "LocalRun"]


@dataclass(slots=True)
class _Arrived:
    """What is there of one peer's contribution to one fragment: parts and their norms by boxes, so that a retry replaces."""

    inner_steps: int
    tokens: int
    parts: dict[tuple[Box, ...], tuple[Part, float]] = field(default_factory=dict)
    complete: bool = False

    def measured(self, peer_id: str) -> Measured:
        norm = whole_norm(norm for _, norm in self.parts.values())
        return Measured(peer_id, self.inner_steps, self.tokens, norm, tuple(part for part, _ in self.parts.values()))


class LocalRun:
    """One run with a fixed list of peers.

    theta: the initial outer parameters, one flat fp32 tensor per fragment; without it the first to join founds the run.
    Commits when all peers that have not left have contributed every fragment that is due; keeps `config.storage.keep_updates`
    commits for those that missed one; is finished after `config.sync.outer_steps`.
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
        self._commits: deque[Commit] = deque(maxlen=config.storage.keep_updates)
        self._lost: dict[str, tuple[int, str]] = {}
        self._evicted: dict[str, str] = {}
        self._round_id = 1

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
    def finished(self) -> bool:
        """Whether the last outer step is committed."""
        return self._state is not None and self._state.outer_step >= self._config.sync.outer_steps

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
        """Lose the open round: every rank of whoever has contributed to it is answered with Aborted, once."""
        self._lost |= {peer_id: (self._round_id, reason) for arrived in self._arrived.values() for peer_id in arrived}
        self._arrived.clear()
        self._round_id += 1

    def contribute(self, peer_id: str, contribution: Contribution) -> None:
        """Take in one fragment or one rank's part of it. One for an earlier outer step, or of a peer that left, is dropped."""
        state, fragment_id = self.state, contribution.fragment_id
        due = state.due if contribution.outer_step == state.outer_step else range(len(state.theta))
        if contribution.outer_step > state.outer_step or fragment_id not in due:
            raise LocalProtocolError(
                f"peer {peer_id} contributed fragment {fragment_id} for outer step {contribution.outer_step}; "
                f"the run is at outer step {state.outer_step}, fragments {list(state.due)} are due"
            )
        if contribution.outer_step < state.outer_step or peer_id not in self._present or self.finished:
            return
        self._take_in(peer_id, contribution, Region(state.schema.fragments[fragment_id], contribution.boxes))
        self._commit_when_complete()

    def _take_in(self, peer_id: str, contribution: Contribution, region: Region) -> None:
        fragment, payload = region.fragment, contribution.payload
        if payload.numel != region.numel:
            raise LocalProtocolError(f"peer {peer_id}, fragment {fragment.name}: {payload.numel} elements for {region.numel}")
        peers = self._arrived.setdefault(fragment.fragment_id, {})
        arrived = peers.get(peer_id)
        if arrived is None or (arrived.inner_steps, arrived.tokens) != (contribution.inner_steps, contribution.tokens):
            arrived = peers[peer_id] = _Arrived(contribution.inner_steps, contribution.tokens)  # work differs: a new attempt
        arrived.parts[region.boxes] = (Part(region, payload), measure(payload))
        if sum(part.region.numel for part, _ in arrived.parts.values()) >= fragment.numel:
            if fault := partition_fault(fragment, list(arrived.parts)):
                raise LocalProtocolError(f"peer {peer_id}: {fault}")
            arrived.complete = True

    def outcome(self, peer_id: str, outer_step: int, *, block: bool, since: int) -> Outcome | None:
        """See `Collective.outcome`. since: aborted rounds before it are no news.

        Raises LocalProtocolError where a single thread would wait for ever.
        """
        state = self.state
        if peer_id in self._evicted:
            return Evicted(self._evicted[peer_id])
        if outer_step > state.outer_step:
            raise LocalProtocolError(f"peer {peer_id} asks about outer step {outer_step}, the run is at {state.outer_step}")
        if outer_step < state.outer_step:
            kept = next((commit for commit in self._commits if commit.outer_step == outer_step + 1), None)
            return Committed(kept) if kept else Behind(f"the update from outer step {outer_step} is no longer kept")
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

    def _missing(self) -> list[str]:
        due = [self._arrived.get(i, {}) for i in self.state.due]
        complete = {peer_id for peer_id in self._present if all(peer_id in part and part[peer_id].complete for part in due)}
        return [peer_id for peer_id in self._named if peer_id in self._present - complete]

    def _discard(self, peer_id: str) -> None:
        for arrived in self._arrived.values():
            arrived.pop(peer_id, None)
        self._lost.pop(peer_id, None)

    def _commit_when_complete(self) -> None:
        if self._state is None or not self._present or self._missing():
            return
        arrived, self._arrived = self._arrived, {}
        self._lost.clear()
        staged = [
            self._state.stage(
                self._state.reduce(i, [one.measured(peer_id) for peer_id, one in arrived[i].items() if one.complete])
            )
            for i in self._state.due
        ]
        reason = f"all {len(self._present)} peers are in"
        self._commits.append(self._state.commit(self._round_id, reason, staged))
        self._round_id += 1


class LocalCollective:
    """The side of one peer, or of one rank of a peer, of a `LocalRun`; a `Collective`."""

    def __init__(self, run: LocalRun, peer_id: str) -> None:
        self._run = run
        self._peer_id = peer_id
        self._regions: tuple[Region, ...] | None = None
        self._told = 0  # rounds before this one need no answer any more

    @property
    def peer_id(self) -> str:
        """This peer's identity in verdicts."""
        return self._peer_id

    def join(self, schema: Schema, found: Callable[[], Sequence[Tensor]], regions: Sequence[Region] | None = None) -> Snapshot:
        """See `Collective.join`; the first to join founds the run, so let a replica's rank 0 join before its others."""
        snapshot = self._run.join(self._peer_id, schema, found)
        self._regions = None if regions is None else tuple(regions)
        self._told = self._run.round_id
        return self._cut_snapshot(snapshot)

    def contribute(self, contribution: Contribution) -> None:
        """Hand over one fragment or part of it; the last missing one commits the round."""
        self._told = self._run.round_id
        self._run.contribute(self._peer_id, contribution)

    def outcome(self, outer_step: int, *, block: bool) -> Outcome | None:
        """See `Collective.outcome`."""
        outcome = self._run.outcome(self._peer_id, outer_step, block=block, since=self._told)
        match outcome:
            case Aborted():
                self._told = self._run.round_id
            case Committed(commit):
                return Committed(self._cut_commit(commit))
        return outcome

    def snapshot(self) -> Snapshot:
        """theta at the last commit, of this rank's regions."""
        return self._cut_snapshot(self._run.snapshot())

    def _cut_snapshot(self, snapshot: Snapshot) -> Snapshot:
        if self._regions is None:
            return snapshot
        parts = zip(self._regions, snapshot.fragments, strict=True)
        return replace(snapshot, fragments=tuple(region.take(theta) for region, theta in parts))

    def _cut_commit(self, commit: Commit) -> Commit:
        if self._regions is None:
            return commit
        parts = [(fragment, self._regions[fragment.fragment_id]) for fragment in commit.fragments]
        return replace(
            commit,
            fragments=tuple(
                fragment if fragment.payload is None else replace(fragment, payload=cut(fragment.payload, region))
                for fragment, region in parts
            ),
        )
