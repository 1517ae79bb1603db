"""A run inside one process: `LocalRun` is the coordinator and the outer state, `LocalCollective` is one peer's side of it.
With gossip there is neither, and `LocalGossip` brings the peers' states together in pairs.

For tests and first experiments: the same `RoundMachine`, the same OuterState and the same answers as over gRPC. Each rank of a
simulated sharded replica has a LocalCollective of its own, of the same peer. Single-threaded: interleave the loops of peers and
ranks step by step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from edit.codecs import codec
from edit.config.run import RunConfig
from edit.config.validation import require
from edit.errors import LocalProtocolError, RefusedError
from edit.fragments.groups import fragments_due
from edit.fragments.schema import Schema
from edit.fragments.shards import Box, Shard, partition_fault
from edit.merging.gossip import GossipState, Judged, Offer, pairs, settle, settling
from edit.merging.injection import Injection, check_content, check_order, check_run
from edit.merging.masked import JudgedClaims, merge_nothing, sum_of
from edit.merging.merge import Measured, Merged, ShardPayload, decoded, measure
from edit.merging.mergers import Admission, admission, screen
from edit.merging.norms import whole_norm
from edit.merging.outer_state import MergeRecord, OuterState
from edit.merging.robust_merger import Chosen
from edit.merging.trust import after_scores
from edit.records import (
    Aborted,
    Commit,
    Committed,
    Contribution,
    Evicted,
    Finished,
    FragmentCommit,
    Lacks,
    NeedsSnapshot,
    Outcome,
    PeerVerdict,
    Progress,
    Snapshot,
    Verdict,
)
from edit.rounds import events, swap
from edit.rounds.events import Phase
from edit.rounds.machine import RoundMachine
from edit.trust.mask_plan import FragmentPlan
from edit.trust.mask_roster import threshold_of
from edit.trust.masking import Opening

__all__ = ["LocalCollective", "LocalGossip", "LocalRun", "Scorer"]

# What a scorer says of the contributions to an outer step, by peer_id: of theta before it, one flat fp32 tensor per fragment,
# and of each peer what it sent of each fragment, by fragment_id. See `edit.merging.trust.scores`.
Scorer = Callable[[Sequence[Tensor], Iterable[tuple[str, Mapping[int, Tensor]]]], Mapping[str, float]]

NOW = 0.0  # the machine's clock stands still: no peer is ever overdue, and an open round waits for every peer that joins


@dataclass(slots=True)
class _Fragment:
    """What is there of one fragment of a contribution."""

    inner_steps: int
    tokens: int
    claimed: float | None = None  # with masks: the norm over the whole replica, as every rank says
    parts: dict[tuple[Box, ...], tuple[ShardPayload, float]] = field(default_factory=dict)  # with norms; a retry replaces
    complete: bool = False

    def measured(self, peer_id: str, staleness: int) -> Measured:
        norm, parts = whole_norm(norm for _, norm in self.parts.values()), tuple(part for part, _ in self.parts.values())
        norm = norm if self.claimed is None else self.claimed
        return Measured(peer_id, self.inner_steps, self.tokens, norm, parts, staleness)


@dataclass(slots=True)
class _Contribution:
    """What is there of one peer's contribution."""

    round_id: int  # the round that was open when it began
    outer_step: int
    fragments: dict[int, _Fragment] = field(default_factory=dict)

    def is_redone(self, contribution: Contribution) -> bool:
        """Whether the work in a fragment is not the same as before, so that this is a new attempt and no retry."""
        known, now = self.fragments.get(contribution.fragment_id), (contribution.inner_steps, contribution.tokens)
        return known is not None and (known.inner_steps, known.tokens) != now

    def take_in(self, peer_id: str, contribution: Contribution, shard: Shard) -> None:
        """Add one rank's part of a fragment. Raises LocalProtocolError when the parts are no partition of it."""
        spec, payload = shard.fragment, contribution.payload
        new = _Fragment(contribution.inner_steps, contribution.tokens, contribution.norm)
        fragment = self.fragments.setdefault(spec.fragment_id, new)
        norm = measure(payload) if contribution.norm is None else 0.0
        fragment.parts[shard.boxes] = (ShardPayload(shard, payload), norm)
        if sum(part.shard.numel for part, _ in fragment.parts.values()) >= spec.numel:
            if fault := partition_fault(spec, list(fragment.parts)):
                raise LocalProtocolError(f"peer {peer_id}: {fault}")
            fragment.complete = True


@dataclass(slots=True)
class _Round:
    """What the open round has reduced so far."""

    records: list[MergeRecord] = field(default_factory=list)
    merged: set[str] = field(default_factory=set)  # the peers in it
    tokens: int = 0
    judged: JudgedClaims | None = None  # with masks, once the collection is closed
    chosen: Chosen | None = None  # with robust.scope = "model", likewise


class LocalRun:
    """One run with a fixed list of peers, all of which it waits for.

    A round commits when all peers that have not left have contributed every fragment that is due, or at `close`; where arrivals
    are merged, with each contribution. Only whole contributions are merged. One that misses the close of its round counts in a
    later one, as long as it is not too stale. The run is finished after `config.sync.outer_steps`, or once `config.sync.tokens`
    are merged (with groups they are counted where group 0 is).

    With secagg.enabled contributions are integers on the grid of their outer step, and their sum is merged, as over gRPC; there
    is nobody to hide them from, so the masks, which cancel, are left out.

    Args:
        config: the run's settings. `rounds.merging` and `rounds.max_staleness` count; quorum and times have no effect.
            `kept_updates` commits are kept for peers that missed one.
        peers: the names of all peers.
        theta: the initial outer parameters, one flat fp32 tensor per fragment; without it the first to join founds the run.
        policy: what may be merged; None: as the configuration says.
        scorer: with robust.trust = "loss", is asked after each outer step; what it says counts from the next but one on, as
            over gRPC. `functools.partial(edit.merging.trust.scores, loss=...)` is one. None: nobody scores.
    """

    def __init__(
        self,
        config: RunConfig,
        peers: Sequence[str],
        theta: Sequence[Tensor] | None = None,
        policy: Admission | None = None,
        scorer: Scorer | None = None,
    ) -> None:
        if not peers or len(set(peers)) != len(peers):
            raise LocalProtocolError(f"LocalRun needs distinct peers, not {list(peers)}")
        rule = "needs a coordinator, which counts what is spent; there is none in one process"
        require(not config.privacy.of_organisations, "privacy.level", config.privacy.level, rule)
        rule = "must be loss where a scorer is given"
        require(scorer is None or config.robust.scored, "robust.trust", config.robust.trust, rule)
        self._scorer = scorer
        self._scores: Mapping[str, float] = {}  # of the last outer step; they count with the next commit
        self._config = config
        self._policy = policy or admission(config)
        self._named = tuple(peers)
        self._present = set(peers)
        self._theta = theta
        self._state: OuterState | None = None
        self._machine: RoundMachine | None = None  # with the state
        self._held: dict[str, _Contribution] = {}
        self._round = _Round()
        self._commits: deque[Commit] = deque(maxlen=config.kept_updates)
        self._lost: dict[str, tuple[int, str]] = {}  # whose contribution was lost: `losses` then, and the reason
        self._evicted: dict[str, str] = {}
        self._injection: Injection | None = None
        self._losses = 0

    @property
    def state(self) -> OuterState:
        """The outer state. Raises LocalProtocolError before the first peer has joined."""
        if self._state is None:
            raise LocalProtocolError("the run has no outer parameters before its first peer joins")
        return self._state

    @property
    def round_id(self) -> int:
        """The open round; 0 when none is open."""
        return self._machine.round_id if self._machine is not None else 0

    @property
    def config(self) -> RunConfig:
        """The settings that it was made with."""
        return self._config

    @property
    def losses(self) -> int:
        """How often contributions were lost or refused so far."""
        return self._losses

    @property
    def tokens(self) -> int:
        """Tokens merged so far."""
        return self._machine.tokens if self._machine is not None else 0

    @property
    def finished(self) -> bool:
        """Whether the last outer step is committed, or the last token merged."""
        return self._machine is not None and self._machine.phase is Phase.FINISHED

    @property
    def complete(self) -> tuple[str, ...]:
        """Whose contribution to the open round is in, all of it."""
        arrived = self._machine.arrived if self._machine is not None else frozenset[str]()
        return tuple(peer_id for peer_id in self._named if peer_id in arrived)

    def collective(self, peer_id: str) -> LocalCollective:
        """Return the side of one rank of one of the peers named at construction."""
        if peer_id not in self._named:
            raise LocalProtocolError(f"peer {peer_id} is not one of {', '.join(self._named)}")
        return LocalCollective(self, peer_id)

    # -- members -----------------------------------------------------------------------------------------------------------

    def join(self, peer_id: str, schema: Schema, found: Callable[[], Sequence[Tensor]]) -> Snapshot:
        """See `Collective.join`. A peer that left comes back by joining again. Raises RefusedError, also after an eviction."""
        if peer_id in self._evicted:
            raise RefusedError(f"peer {peer_id} was evicted: {self._evicted[peer_id]}")
        if self._state is not None and (difference := self._state.schema.first_difference(schema)):
            raise RefusedError(f"peer {peer_id} has another model: {difference}")
        self._present.add(peer_id)
        if self._state is None:
            theta = self._theta if self._theta is not None else found()
            self._found(OuterState(schema, self._config, [fragment.clone() for fragment in theta]))
        self._discard(peer_id)
        self._feed(events.MemberReady(peer_id, self.state.outer_step))
        return self.snapshot()

    def _found(self, state: OuterState) -> None:
        sync, fragments = self._config.sync, len(state.schema.fragments)
        self._state = state
        self._machine = RoundMachine(
            replace(self._config.rounds, start_peers=1, quorum=1, wait="times"),
            due=lambda step: fragments_due(step, fragments, sync.groups, sync.pattern),
            outer_step=state.outer_step,
            outer_steps=sync.outer_steps,
            first_round_id=1,
            stop_tokens=sync.tokens,
            backs_off=False,
            whole=self._config.robust.of_model,
        )
        for event in self._all_ready():
            self._feed(event)

    def _all_ready(self) -> list[events.Event]:
        """Every peer that has not left is waited for, whatever it has done so far."""
        step = self.state.outer_step
        return [events.MemberReady(peer_id, step) for peer_id in self._named if peer_id in self._present]

    def snapshot(self, peer_id: str = "") -> Snapshot:
        """theta at the last commit, the same for every peer."""
        return Snapshot(self.state.outer_step, self.state.digest, tuple(self.state.theta))

    def leave(self, peer_id: str) -> None:
        """Go on without this peer; its part of the open round is dropped. Commits when it was the last one missing."""
        self._present.discard(peer_id)
        self._discard(peer_id)
        self._feed(events.MemberLost(peer_id, "left"))

    def evict(self, peer_id: str, reason: str) -> None:
        """As `leave`, for good: the peer's next question is answered with Evicted."""
        self._evicted[peer_id] = reason
        self.leave(peer_id)

    # -- rounds ------------------------------------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """Lose the open round, and what is in of it: every rank of a peer that has contributed gets Aborted, once."""
        for peer_id in tuple(self._held):
            self._feed(events.Withdrawn(peer_id))
        self._feed(events.RoundFailed(self.round_id, reason))

    def close(self, reason: str) -> None:
        """Commit the open round with what is complete, as a deadline would. Raises LocalProtocolError when nothing is."""
        if not self.complete:
            raise LocalProtocolError(f"round {self.round_id} cannot be closed: no contribution is complete")
        self._feed(events.Close(reason))

    def inject(self, injection: Injection) -> None:
        """Take what a regional aggregator brings; it is in with the next commit. Raises as `edit.merging.injection` says."""
        state = self.state
        check_run(self._config)
        check_order(injection.brings, injection.base, injection.replaces, state.injected, state.outer_step)
        check_content(injection, state.schema)
        self._injection = injection

    def contribute(self, peer_id: str, contribution: Contribution) -> bool:
        """Take in one fragment or one rank's part of it. False: dropped, being too stale, or of a peer that left.

        Raises LocalProtocolError for a fragment that is not due or does not fit the schema.
        """
        state, fragment_id, outer_step = self.state, contribution.fragment_id, contribution.outer_step
        due = state.due if outer_step == state.outer_step else range(len(state.theta))
        if outer_step > state.outer_step or fragment_id not in due:
            raise LocalProtocolError(
                f"peer {peer_id} contributed fragment {fragment_id} for outer step {outer_step}; "
                f"the run is at outer step {state.outer_step}, fragments {list(state.due)} are due"
            )
        shard = Shard(state.schema.fragments[fragment_id], contribution.boxes)
        if contribution.payload.numel != shard.numel:
            found = f"{contribution.payload.numel} elements for {shard.numel}"
            raise LocalProtocolError(f"peer {peer_id}, fragment {shard.fragment.name}: {found}")
        if self.finished or peer_id not in self._present:
            return False
        held = self._held.get(peer_id)
        if held is not None and held.outer_step == outer_step and held.is_redone(contribution):
            self._drop(peer_id)
            held = None
        if held is None or held.outer_step != outer_step:
            held = _Contribution(self.round_id, outer_step)
        if refused := self._feed(events.Offered(peer_id, held.round_id, outer_step, fragment_id)):
            if self._config.rounds.max_staleness:  # else a commit is the answer
                self._tell([peer_id], refused.reason)
            return False
        self._held[peer_id] = held
        held.take_in(peer_id, contribution, shard)
        if all(i in held.fragments and held.fragments[i].complete for i in state.due):
            for i in state.due:
                self._feed(events.Arrived(peer_id, held.round_id, i))
        return True

    def plan(self, outer_step: int) -> tuple[FragmentPlan, ...] | None:
        """Return the grid of a masked contribution to the advance from `outer_step`; None unless the run is there."""
        state = self.state
        return tuple(map(state.plan, state.due)) if outer_step == state.outer_step and not self.finished else None

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
            missing = [peer for peer in self._named if peer in self._present and peer not in self.complete]
            raise LocalProtocolError(
                f"peer {peer_id} waits for the round at outer step {outer_step}, but {', '.join(missing)} must "
                "contribute first: interleave the peers' loops step by step, or call LocalRun.leave()"
            )
        return None

    def _carries(self, peer_id: str, commit: Commit) -> bool:
        """Whether a contribution that this commit could have merged is merged later, or still may be."""
        if commit.has(peer_id):
            return False
        later = any(other.has(peer_id) for other in self._commits if other.outer_step > commit.outer_step)
        return later or peer_id in self._held

    # -- carrying out ------------------------------------------------------------------------------------------------------

    def _feed(self, event: events.Event) -> events.Refused | None:
        """Hand an event to the round machine, carry out the effects and hand it their results; return the refusal of `event`.

        What fails loses the round, and is raised.
        """
        refusal: events.Refused | None = None
        pending = deque([event])
        while pending and self._machine is not None:
            fed = pending.popleft()
            for effect in self._machine.handle(fed, NOW):
                match effect:
                    case events.Refused() if isinstance(fed, events.Offered | events.Arrived):
                        refusal = effect
                    case events.Refused():
                        del self._held[effect.peer_id]
                        self._tell([effect.peer_id], effect.reason)
                    case events.RoundOpened():
                        self._round = _Round()
                    case events.Reduce() | events.Commit():
                        try:
                            pending.append(self._reduce(effect) if isinstance(effect, events.Reduce) else self._commit(effect))
                        except Exception as error:
                            self._feed(events.RoundFailed(effect.round_id, f"{type(error).__name__}: {error}"))
                            raise
                    case events.RoundClosed():
                        self._close_round(effect)
                        pending.extend(self._all_ready())
                    case events.RunFinished():
                        pass
        return refusal

    def _reduce(self, effect: events.Reduce) -> events.Reduced:
        state, fragment_id = self.state, effect.fragment_id
        held = [(peer_id, self._held[peer_id]) for peer_id in effect.peers]
        measured = [one.fragments[fragment_id].measured(peer_id, state.outer_step - one.outer_step) for peer_id, one in held]
        screened = screen(self._policy, state.schema.fragments[fragment_id], measured)
        if self._config.robust.of_model:
            merged = state.reduce_chosen(fragment_id, measured, self._choose(effect.peers))
        else:
            merged = screened.and_rejected(self._merge(effect, screened.admitted))
        self._round.records.append(state.record(merged))
        self._round.merged.update(effect.peers)
        if fragment_id == 0:
            self._round.tokens = sum(one.tokens for one in screened.admitted)
        return events.Reduced(effect.round_id, fragment_id)

    def _merge(self, effect: events.Reduce, measured: Sequence[Measured]) -> Merged:
        state, i = self.state, effect.fragment_id
        if not self._config.secagg.enabled:
            return state.reduce(i, measured)
        if self._round.judged is None:
            self._round.judged = state.judge_claims({j: self._claims(effect.peers, j) for j in state.due})
        judged, plan = self._round.judged, state.plan(i)
        if judged.shortage(self._least_sum(len(effect.peers))):
            return merge_nothing(i, measured, judged)
        inside = [one for one in measured if one.peer_id in judged.survivors]
        total = sum_of(state.schema.fragments[i], plan, inside)
        Opening.check(total.words, total.lanes, i)
        return state.reduce_sum(plan, total, measured, judged, judged.survivors)

    def _least_sum(self, peers: int) -> int:
        """Return how many of these peers a masked sum has at least, as if they were all who shared keys."""
        return max(self._config.secagg.min_peers, self._config.rounds.quorum, threshold_of(peers))

    def _choose(self, peers: Sequence[str]) -> Chosen:
        """Weigh what these peers have contributed, as a whole; once in a round."""
        state, current = self.state, self._round
        if current.chosen is None:
            held = [(peer_id, self._held[peer_id]) for peer_id in peers]
            sent = {
                i: [one.fragments[i].measured(name, state.outer_step - one.outer_step) for name, one in held] for i in state.due
            }
            rejected = {
                verdict.peer_id
                for i, each in sent.items()
                for verdict in screen(self._policy, state.schema.fragments[i], each).rejected
            }
            current.chosen = state.choose(sent, rejected)
        return current.chosen

    def _claims(self, peers: Iterable[str], fragment_id: int) -> list[Measured]:
        return [self._held[peer_id].fragments[fragment_id].measured(peer_id, 0) for peer_id in peers]

    def _commit(self, effect: events.Commit) -> events.CommitSucceeded:
        state, scorer = self.state, self._scorer
        trust = after_scores(state.trust, self._scores) if self._scores else None
        scored = scorer(state.theta, self._sent(state.due)) if scorer is not None else {}
        records, injection = self._round.records, self._injection
        self._commits.append(state.commit(effect.round_id, effect.reason, records, injection, None, trust))
        self._injection, self._scores = None, scored
        return events.CommitSucceeded(effect.round_id, self._round.tokens)

    def _sent(self, due: Sequence[int]) -> Iterator[tuple[str, Mapping[int, Tensor]]]:
        """Yield what each peer has sent of these fragments for the open round, decoded."""
        schema = self.state.schema
        for peer_id in sorted(self._round.merged):
            fragments = self._held[peer_id].fragments
            yield peer_id, {i: decoded(schema.fragments[i], fragments[i].measured(peer_id, 0)) for i in due}

    def _close_round(self, effect: events.RoundClosed) -> None:
        """Keep what is carried over. Peers whose contribution is lost with an aborted round are notified."""
        gone = self._held.keys() - effect.carried
        for peer_id in gone:
            del self._held[peer_id]
        if not effect.committed:
            self._tell(gone, effect.reason)
            return
        for peer_id in self._round.merged if self._config.rounds.max_staleness else list(self._lost):
            self._lost.pop(peer_id, None)  # older news

    def _tell(self, peers: Iterable[str], reason: str) -> None:
        """Answer each rank of these peers with Aborted, once: their contributions are lost."""
        for peer_id in peers:
            self._lost[peer_id] = self._losses, reason
        self._losses += 1

    def _drop(self, peer_id: str) -> None:
        if self._held.pop(peer_id, None) is not None:
            self._feed(events.Withdrawn(peer_id))

    def _discard(self, peer_id: str) -> None:
        """The peer starts again, or has left: forget its contribution, and the news for it."""
        self._drop(peer_id)
        self._lost.pop(peer_id, None)


class LocalGossip:
    """A run with `outer.algorithm = "gossip"`: every named peer has a `GossipState`, and meets one other at each outer step.

    A peer's step is committed once its partner's contribution to the same outer step is complete; without a partner at once.
    Pairs are drawn from those who are present when the first contribution to an outer step is complete. Peers need not be at
    the same outer step, except where all settle: after each `gossip.settle_every` outer steps and at the end of the run. There
    each takes the common model as a snapshot. The run is finished after `config.sync.outer_steps`.

    Args:
        config: the run's settings. The last `kept_updates` commits of each peer are kept.
        peers: the names of all peers.
        theta: the initial outer parameters, one flat fp32 tensor per fragment; without it the first to join founds the run.
    """

    def __init__(self, config: RunConfig, peers: Sequence[str], theta: Sequence[Tensor] | None = None) -> None:
        if not peers or len(set(peers)) != len(peers):
            raise LocalProtocolError(f"LocalGossip needs distinct peers, not {list(peers)}")
        rule = "must be gossip in a LocalGossip; a LocalRun is for the other"
        require(config.outer.algorithm == "gossip", "outer.algorithm", config.outer.algorithm, rule)
        self._config = config
        self._named = tuple(peers)
        self._present = set(peers)
        self._theta = theta
        self._states: dict[str, GossipState] = {}
        self._held: dict[str, _Contribution] = {}
        self._commits: dict[str, deque[Commit]] = {peer_id: deque(maxlen=config.kept_updates) for peer_id in peers}
        self._drawn: dict[int, dict[str, str | None]] = {}  # by outer step, as `pairs`
        self._settled = 0  # the outer step at which all settled last
        self._common: OuterState | None = None  # the last model that was common to all; with the first state
        self._resync: set[str] = set()  # who has not taken that yet
        # Swaps of fragments that were taken together, and those that were not although both were there.
        self.swapped = 0
        self.refused = 0
        # Contributions whose partner went away or did not come.
        self.unpaired = 0
        # Bytes that each peer has sent to its partners: contributions and outer parameters.
        self.sent = dict.fromkeys(peers, 0)

    @property
    def states(self) -> dict[str, GossipState]:
        """The state of each peer that has joined, by peer_id."""
        return dict(self._states)

    @property
    def config(self) -> RunConfig:
        """The settings that it was made with."""
        return self._config

    @property
    def losses(self) -> int:
        """0: a contribution is never lost, for a peer without a partner goes alone."""
        return 0

    @property
    def finished(self) -> bool:
        """Whether all who are present have taken the last outer step, and have settled."""
        return self._settled == self._config.sync.outer_steps

    def collective(self, peer_id: str) -> LocalCollective:
        """Return the side of one rank of one of the peers named at construction."""
        if peer_id not in self._named:
            raise LocalProtocolError(f"peer {peer_id} is not one of {', '.join(self._named)}")
        return LocalCollective(self, peer_id)

    def join(self, peer_id: str, schema: Schema, found: Callable[[], Sequence[Tensor]]) -> Snapshot:
        """See `Collective.join`. One that comes later, or back, begins where the furthest peer is that is present."""
        if self._states:
            some = next(iter(self._states.values()))
            if difference := some.schema.first_difference(schema):
                raise RefusedError(f"peer {peer_id} has another model: {difference}")
        elif self._theta is None:
            self._theta = [fragment.clone() for fragment in found()]
        assert self._theta is not None
        if self._common is None:
            self._common = OuterState(schema, settling(self._config), [fragment.clone() for fragment in self._theta])
        others = [self._states[name] for name in sorted(self._present & self._states.keys() - {peer_id})]
        donor = max(others, key=lambda state: state.outer_step, default=None)
        state = self._states.get(peer_id)
        if state is None:
            state = self._states[peer_id] = GossipState(peer_id, schema, self._config, self._theta)
        if donor is not None and donor.outer_step > state.outer_step:
            state.join(donor)
            self._commits[peer_id].clear()
        self._present.add(peer_id)
        self._held.pop(peer_id, None)
        self._advance()
        return self.snapshot(peer_id)

    def snapshot(self, peer_id: str) -> Snapshot:
        """This peer's outer parameters, as they are now."""
        state = self._states[peer_id]
        self._resync.discard(peer_id)
        return Snapshot(state.outer_step, state.digest, tuple(part.clone() for part in state.theta))

    def leave(self, peer_id: str) -> None:
        """Go on without this peer. Whoever is drawn with it goes alone."""
        self._present.discard(peer_id)
        self._held.pop(peer_id, None)
        self._advance()

    def close(self, peer_id: str) -> None:
        """Let this peer go alone, as at a deadline. Raises LocalProtocolError where its contribution is not complete."""
        if not self._is_complete(peer_id):
            raise LocalProtocolError(f"peer {peer_id} has no complete contribution to go on alone with")
        partner = self._partner(peer_id)
        self._alone(peer_id, partner, "did not answer")
        self._advance()

    def contribute(self, peer_id: str, contribution: Contribution) -> bool:
        """Take in one fragment or one rank's part of it. False: dropped, being of a peer that left or has yet to settle.

        Raises LocalProtocolError for a fragment that is not due, another outer step or what does not fit the schema.
        """
        state, fragment_id = self._states[peer_id], contribution.fragment_id
        if contribution.outer_step != state.outer_step or fragment_id not in state.due:
            raise LocalProtocolError(
                f"peer {peer_id} contributed fragment {fragment_id} for outer step {contribution.outer_step}; "
                f"it is at outer step {state.outer_step}, fragments {list(state.due)} are due"
            )
        shard = Shard(state.schema.fragments[fragment_id], contribution.boxes)
        if contribution.payload.numel != shard.numel:
            found = f"{contribution.payload.numel} elements for {shard.numel}"
            raise LocalProtocolError(f"peer {peer_id}, fragment {shard.fragment.name}: {found}")
        if peer_id not in self._present or peer_id in self._resync or self._waits_to_settle(state):
            return False
        held = self._held.setdefault(peer_id, _Contribution(0, state.outer_step))
        if held.is_redone(contribution):
            held = self._held[peer_id] = _Contribution(0, state.outer_step)
        held.take_in(peer_id, contribution, shard)
        self._advance()
        return True

    def outcome(self, peer_id: str, outer_step: int, *, block: bool, since: int) -> Outcome | None:
        """See `Collective.outcome`. Raises LocalProtocolError where a single thread would wait for ever."""
        state = self._states[peer_id]
        if outer_step > state.outer_step:
            raise LocalProtocolError(f"peer {peer_id} asks about outer step {outer_step}, it is at {state.outer_step}")
        if not self._waits_to_settle(state):
            if outer_step < state.outer_step:
                kept = next((one for one in self._commits[peer_id] if one.outer_step == outer_step + 1), None)
                reason = f"the update from outer step {outer_step} is no longer kept"
                return NeedsSnapshot(reason) if kept is None else Committed(kept)
            if peer_id in self._resync:
                return NeedsSnapshot("all peers have settled on one model")
            if state.outer_step == self._config.sync.outer_steps:
                return Finished(state.outer_step)
        if block:
            if self._waits_to_settle(state):
                behind = [name for name in self._named if name in self._present and self._outer_step(name) < state.outer_step]
            else:
                behind = [self._partner(peer_id) or peer_id] if self._is_complete(peer_id) else [peer_id]
            raise LocalProtocolError(
                f"peer {peer_id} waits at outer step {outer_step}, but {', '.join(behind)} must contribute first: interleave "
                "the peers' loops step by step, or call LocalGossip.leave() or close()"
            )
        return None

    # -- swaps -------------------------------------------------------------------------------------------------------------

    def _is_complete(self, peer_id: str) -> bool:
        """Whether all of this peer's contribution is in and waits for its partner."""
        held, state = self._held.get(peer_id), self._states.get(peer_id)
        if held is None or state is None:
            return False
        return all(i in held.fragments and held.fragments[i].complete for i in state.due)

    def _partner(self, peer_id: str) -> str | None:
        outer_step = self._states[peer_id].outer_step
        if outer_step not in self._drawn:
            least = min(state.outer_step for name, state in self._states.items() if name in self._present)
            self._drawn = {step: drawn for step, drawn in self._drawn.items() if step >= least}
            self._drawn[outer_step] = pairs(self._config.seed, outer_step, self._present)
        return self._drawn[outer_step].get(peer_id)

    def _advance(self) -> None:
        """Take every step that can be taken, and settle where all are there."""
        for peer_id in self._named:
            if not self._is_complete(peer_id):
                continue
            partner = self._partner(peer_id)
            if partner is None:
                self._alone(peer_id, None, "drawn without a partner")
            elif partner not in self._present or self._outer_step(partner) > self._outer_step(peer_id):
                self._alone(peer_id, partner, "has left" if partner not in self._present else "went on alone")
            elif self._is_complete(partner) and self._outer_step(partner) == self._outer_step(peer_id):
                self._swap(peer_id, partner)
        self._settle()

    def _outer_step(self, peer_id: str) -> int:
        return self._states[peer_id].outer_step if peer_id in self._states else 0

    def _offers(self, peer_id: str) -> dict[int, Offer]:
        state, held = self._states[peer_id], self._held.pop(peer_id)
        return {i: Offer(held.fragments[i].measured(peer_id, 0), state.offered(i)) for i in state.due}

    def _alone(self, peer_id: str, partner: str | None, reason: str) -> None:
        state, offers = self._states[peer_id], self._offers(peer_id)
        staged = [state.stage(i, offer) for i, offer in offers.items()]
        if partner is not None:
            self.unpaired += 1
            missing = PeerVerdict(peer_id=partner, verdict=Verdict.UNPAIRED, norm=0.0, weight=0.0)
            staged = [one.beside(missing) for one in staged]
            reason = f"alone: {partner} {reason}"
        self._commits[peer_id].append(state.commit(staged, reason))

    def _swap(self, one: str, other: str) -> None:
        offers = {peer_id: self._offers(peer_id) for peer_id in (one, other)}
        for peer_id, fragments in offers.items():
            self.sent[peer_id] += sum(offer.nbytes for offer in fragments.values())
        partners, judged, decided = {one: other, other: one}, dict[str, dict[int, Judged]](), dict[str, swap.Decided]()
        sides = {peer_id: swap.Swap(fragments) for peer_id, fragments in offers.items()}
        events = deque[tuple[str, swap.Event]]((peer_id, swap.Came(i)) for peer_id in sides for i in offers[partners[peer_id]])
        while events:
            peer_id, event = events.popleft()
            state, partner = self._states[peer_id], partners[peer_id]
            for effect in sides[peer_id].handle(event):
                match effect:
                    case swap.Judge():
                        said = {i: state.judge(i, own, offers[partner][i]) for i, own in offers[peer_id].items()}
                        judged[peer_id] = said
                        events.append((peer_id, swap.Judged(frozenset(i for i, each in said.items() if each.good))))
                    case swap.SendHave(good):
                        events.append((partner, swap.Have(good)))
                    case swap.Decided():
                        decided[peer_id] = effect
        for peer_id, partner in partners.items():
            state, together = self._states[peer_id], decided[peer_id].together
            staged = [
                state.stage(i, own, offers[partner][i] if i in together else None, judged[peer_id][i])
                for i, own in offers[peer_id].items()
            ]
            self._commits[peer_id].append(state.commit(staged, f"paired with {partner}"))
        self.swapped += len(decided[one].together)
        self.refused += len(offers[one]) - len(decided[one].together)

    # -- settling ----------------------------------------------------------------------------------------------------------

    def _settles_at(self, outer_step: int) -> bool:
        every = self._config.gossip.settle_every
        return outer_step > 0 and (outer_step == self._config.sync.outer_steps or (every > 0 and outer_step % every == 0))

    def _waits_to_settle(self, state: GossipState) -> bool:
        return self._settles_at(state.outer_step) and state.outer_step > self._settled

    def _settle(self) -> None:
        states = {name: self._states[name] for name in self._named if name in self._present and name in self._states}
        steps = {state.outer_step for state in states.values()}
        if len(steps) != 1 or states.keys() != self._present or not self._waits_to_settle(next(iter(states.values()))):
            return
        assert self._common is not None
        records = settle(self._common, {name: state.theta for name, state in states.items()})
        self._common.commit(self._settled + 1, "settled", records)
        for state in states.values():
            state.take(self._common.theta)
        self._settled, self._resync = steps.pop(), set(states)


class _Run(Protocol):
    """What `LocalCollective` uses of a run."""

    @property
    def config(self) -> RunConfig: ...
    @property
    def losses(self) -> int: ...
    def join(self, peer_id: str, schema: Schema, found: Callable[[], Sequence[Tensor]]) -> Snapshot: ...
    def contribute(self, peer_id: str, contribution: Contribution) -> bool: ...
    def outcome(self, peer_id: str, outer_step: int, *, block: bool, since: int) -> Outcome | None: ...
    def snapshot(self, peer_id: str) -> Snapshot: ...


class LocalCollective:
    """The side of one peer, or of one rank of a peer, of a `LocalRun` or a `LocalGossip`; a `Collective`."""

    def __init__(self, run: _Run, peer_id: str) -> None:
        self._run = run
        self._peer_id = peer_id
        self._shards: tuple[Shard, ...] | None = None
        self._told = 0  # losses before so many need no answer any more
        self.reported: Progress | None = None  # what this peer has told of itself

    @property
    def peer_id(self) -> str:
        """This peer's identity in verdicts."""
        return self._peer_id

    @property
    def config(self) -> RunConfig:
        """The run's configuration."""
        return self._run.config

    def join(
        self,
        schema: Schema,
        found: Callable[[], Sequence[Tensor]],
        shards: Sequence[Shard] | None = None,
        lacks: Lacks | None = None,
    ) -> Snapshot:
        """See `Collective.join`; the first to join founds the run, so let a replica's rank 0 join before its others."""
        snapshot = self._run.join(self._peer_id, schema, found)
        self._shards = None if shards is None else tuple(shards)
        self._told = self._run.losses
        return self._cut_snapshot(snapshot)

    def plan(self, outer_step: int) -> tuple[FragmentPlan, ...] | None:
        """See `edit.worker.masked.PlansRounds.plan`. Raises LocalProtocolError where no masks are used."""
        if not isinstance(self._run, LocalRun):
            raise LocalProtocolError("a gossiping peer masks nothing")
        return self._run.plan(outer_step)

    def contribute(self, contribution: Contribution) -> None:
        """Hand over one fragment or part of it; the last missing one commits the round.

        Raises LocalProtocolError, besides what the run does, for numbers that an aggregator would refuse.
        """
        _check_numbers(contribution)
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

    def report(self, progress: Progress) -> None:
        """See `Collective.report`."""
        self.reported = progress

    def snapshot(self) -> Snapshot:
        """theta at the last commit, of this rank's shards."""
        return self._cut_snapshot(self._run.snapshot(self._peer_id))

    def _cut_snapshot(self, snapshot: Snapshot) -> Snapshot:
        if self._shards is None:
            return snapshot
        parts = zip(self._shards, snapshot.fragments, strict=True)
        return replace(snapshot, fragments=tuple(shard.take(theta) for shard, theta in parts))

    def _cut_commit(self, commit: Commit) -> Commit:
        if self._shards is None:
            return commit
        return replace(commit, fragments=tuple(_cut(part, self._shards[part.fragment_id]) for part in commit.fragments))


def _check_numbers(contribution: Contribution) -> None:
    inner_steps, tokens, norm = contribution.inner_steps, contribution.tokens, contribution.norm
    if inner_steps < 1 or tokens < 0 or not (norm is None or norm >= 0):
        said = f"{inner_steps} inner steps, {tokens} tokens and a norm of {norm}"
        raise LocalProtocolError(f"fragment {contribution.fragment_id}: a contribution of {said}")


def _cut(fragment: FragmentCommit, shard: Shard) -> FragmentCommit:
    """What of a committed fragment a rank gets that holds this shard of it."""
    if (payload := fragment.payload) is None:
        return fragment
    return replace(fragment, payload=codec(payload.codec).cut(payload, shard))
