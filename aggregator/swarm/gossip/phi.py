"""One member's outer parameters: as an outer state that is published and journalled, whose steps are swaps.

    the engine      reduces its one peer's contribution: it is kept (`Phi.reduce`)
    append_commit   the swap is made, and its steps are journalled as the records of the round (`PhiStore`)
    commit          the steps are taken

So a restart replays the steps that were taken, bit for bit, and a kill before the commit is on disk leaves nothing of it. A
record has the step of a fragment, in fp32; among the statistics of norms those of the distances have the name ''.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from aggregator.storage.store import Store
from edit.config.run import RunConfig
from edit.errors import LocalProtocolError, RefusedError, StorageError
from edit.fragments.schema import Schema
from edit.merging.gossip import GossipState, Judged, Offer, Staged
from edit.merging.injection import Injected, Injection
from edit.merging.merge import Measured, Merged
from edit.merging.outer_state import Each, MergeRecord, OuterState
from edit.merging.outer_state import Staged as StagedUpdate
from edit.merging.trust import Trust
from edit.records import Commit, EncodedTensor, FragmentCommit, PeerVerdict, Verdict

__all__ = ["Calendar", "Met", "Phi", "PhiStore"]

_DISTANCES = ""  # no peer is called so


@dataclass(frozen=True, slots=True)
class Calendar:
    """Which outer steps are swaps, and which settlings. A settling counts as an outer step, and the last one is a settling."""

    every: int  # swaps between two settlings; 0: only the last outer step is one
    outer_steps: int

    @classmethod
    def of(cls, config: RunConfig) -> Calendar:
        """Read the settings."""
        return cls(config.gossip.settle_every, config.sync.outer_steps)

    def settles(self, outer_step: int) -> bool:
        """Return whether the step from here is a settling."""
        regular = self.every > 0 and (outer_step + 1) % (self.every + 1) == 0
        return outer_step + 1 == self.outer_steps or (regular and outer_step < self.outer_steps)

    def settled(self, number: int) -> int:
        """Return the outer step to which the settling of this number leads, counted from 1; 0 for 0."""
        return min(number * (self.every + 1), self.outer_steps) if self.every else number and self.outer_steps

    @property
    def settlings(self) -> int:
        """How many there are in all."""
        return -(-self.outer_steps // (self.every + 1)) if self.every else 1


@dataclass(frozen=True, slots=True)
class Met:
    """What came of a swap, or why there was none."""

    partner: str  # '': it was drawn without one
    reason: str  # of the commit, in words
    together: frozenset[int] = frozenset()  # the fragments of which the step is taken together
    offers: Mapping[int, Offer] = field(default_factory=dict)  # the partner's, of those fragments at least
    judged: Mapping[int, Judged] = field(default_factory=dict)
    in_doubt: bool = False  # the partner may have taken together what is taken alone here


class Phi(OuterState):
    """See above. What `OuterState` keeps is kept in a `GossipState`.

    Args:
        settlings: that led here.
    """

    def __init__(self, state: GossipState, settlings: int) -> None:
        self.schema, self.config = state.schema, state.config
        self.state, self.settlings, self.residual_form = state, settlings, "fp32"
        self._own: dict[int, Measured] = {}
        self._decided: tuple[Sequence[Staged], str] | None = None

    @classmethod
    def begun(cls, peer_id: str, schema: Schema, config: RunConfig, settlings: int, theta: Sequence[Tensor]) -> Phi:
        """Return one that begins with what all settled on last, or with the run's first parameters."""
        phi = cls(GossipState(peer_id, schema, config, theta), 0)
        if settlings:
            phi.settle(settlings, theta)
        return phi

    def settle(self, number: int, theta: Sequence[Tensor], *, early: bool = False) -> None:
        """Take what all settled on. The momentum stays, unless this member has missed steps before it.

        early: the run was drained: this member goes no further, and the settling is its next outer step whichever that is;
        where it has missed one before, too, the next after that.
        """
        calendar = Calendar.of(self.config)
        after = calendar.settled(number - 1) + 1 if early else calendar.settled(number)
        if self.settlings + 1 == number and (early or self.outer_step + 1 == after):
            self.state.take(theta)
        else:
            self.state.begin_at(after - number, theta, [0.0] * len(theta))
        self.settlings = number

    @property
    def outer_step(self) -> int:
        """Swaps and settlings."""
        return self.state.outer_step + self.settlings

    @property
    def injected(self) -> Injected | None:
        """See `OuterState`."""
        return None

    @property
    def due(self) -> tuple[int, ...]:
        """See `OuterState`."""
        return self.state.due

    @property
    def theta(self) -> list[Tensor]:
        """See `OuterState`."""
        return list(self.state.theta)

    @property
    def digest(self) -> str:
        """See `OuterState`."""
        return self.state.digest

    @property
    def fragment_hashes(self) -> tuple[bytes, ...]:
        """See `OuterState`."""
        return self.state.fragment_hashes

    # -- a round of one peer -----------------------------------------------------------------------------------------------

    def reduce(self, fragment_id: int, contributions: Sequence[Measured]) -> Merged:
        """Keep the one contribution, until the swap. Raises RefusedError for a peer of several ranks."""
        (one,) = contributions
        if isinstance(one.payload, tuple):
            raise RefusedError("with gossip a peer is one rank")
        found = one.payload if isinstance(one.payload, EncodedTensor) else one.payload()
        kept = EncodedTensor(found.codec, found.numel, bytearray(found.data))  # the upload's memory is used again
        self._own[fragment_id] = replace(one, payload=kept)
        said = PeerVerdict(peer_id=one.peer_id, verdict=Verdict.OK, norm=one.norm, weight=1.0)
        return Merged(fragment_id, None, (said,), {}, one.norm, 1.0)

    def record(self, merged: Merged) -> MergeRecord:
        """Return what stands for the contribution until the commit."""
        return MergeRecord(
            outer_step=self.outer_step,
            fragment_id=merged.fragment_id,
            payload=None,
            residual=None,
            verdicts=merged.verdicts,
            statistics={},
            merged_norm=merged.merged_norm,
            clip=1.0,
        )

    def stage(self, record: MergeRecord, injection: Injection | None = None) -> StagedUpdate:
        """Return that nothing is known of the step before the swap."""
        return StagedUpdate(None, self.fragment_hashes[record.fragment_id], merges=False, largest=0.0)

    def stage_plugins(
        self, records: Sequence[MergeRecord], injection: Injection | None, staged: Mapping[int, StagedUpdate]
    ) -> Mapping[int, StagedUpdate]:
        """Return `staged`: a swap has no plug-in but its penalty, which judges before the commit is durable."""
        return staged

    def update_bytes(self, fragment_id: int) -> int:
        """See `OuterState`."""
        return 4 * self.schema.fragments[fragment_id].numel

    def offers(self) -> dict[int, Offer]:
        """Return what this peer brings to a swap. Raises LocalProtocolError unless all of it is reduced."""
        if tuple(sorted(self._own)) != self.due:
            raise LocalProtocolError(f"a swap with fragments {sorted(self._own)}, not {list(self.due)}")
        return {i: Offer(self._own[i], self.state.offered(i)) for i in self.due}

    def decide(self, own: Mapping[int, Offer], met: Met) -> list[MergeRecord]:
        """Compute the step, which the next `commit` takes, and return it as it is journalled."""
        steps = []
        for i, offer in own.items():
            step = self.state.stage(i, offer, met.offers[i] if i in met.together else None, met.judged.get(i))
            if met.partner and i not in met.judged:
                step = step.beside(PeerVerdict(peer_id=met.partner, verdict=Verdict.UNPAIRED, norm=0.0, weight=0.0))
            steps.append(step)
        self._decided = steps, met.reason
        return [self._written(step) for step in steps]

    def _written(self, step: Staged) -> MergeRecord:
        commit, statistics = step.commit, dict(step.statistics)
        if step.distances is not None:
            statistics[_DISTANCES] = step.distances
        return MergeRecord(
            outer_step=self.outer_step,
            fragment_id=commit.fragment_id,
            payload=commit.payload,
            residual=None,
            verdicts=commit.verdicts,
            statistics=statistics,
            merged_norm=commit.merged_norm,
            clip=commit.clip,
        )

    def _read(self, record: MergeRecord) -> Staged:
        statistics = dict(record.statistics)
        distances = statistics.pop(_DISTANCES, None)
        commit = FragmentCommit(
            fragment_id=record.fragment_id,
            payload=record.payload,
            verdicts=record.verdicts,
            merged_norm=record.merged_norm,
            clip=record.clip,
        )
        return self.state.again(commit, statistics, distances)

    def commit(
        self,
        round_id: int,
        reason: str,
        records: list[MergeRecord],
        injection: Injection | None = None,
        staged: Mapping[int, StagedUpdate] | None = None,
        trust: Mapping[str, Trust] | None = None,
        each: Each = map,
    ) -> Commit:
        """Take what was decided; at a restart, what the records say."""
        decided, self._decided, self._own = self._decided, None, {}
        steps, why = decided if decided is not None else ([self._read(record) for record in records], reason)
        commit = self.state.commit(steps, why)
        return replace(commit, outer_step=self.outer_step, round_id=round_id)

    # -- on disk -----------------------------------------------------------------------------------------------------------

    def to_tensors(self) -> dict[str, Tensor]:
        """See `GossipState`."""
        return self.state.to_tensors()

    def metadata(self) -> dict[str, Any]:
        """See `GossipState`."""
        return self.state.metadata() | {"outer_step": self.outer_step, "settlings": self.settlings}

    @classmethod
    def restore(cls, schema: Schema, config: RunConfig, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> Self:
        """See `GossipState`."""
        try:
            settlings = int(metadata["settlings"])
            of_state = {**metadata, "outer_step": int(metadata["outer_step"]) - settlings}
        except (KeyError, TypeError, ValueError) as error:
            raise StorageError(f"checkpoint: what is kept of the settlings is damaged ({error!r})") from error
        return cls(GossipState.restore(schema, config, tensors, of_state), settlings)


class PhiStore(Store):
    """The folder of a `Phi`. Its commit waits for the swap.

    Args:
        swap: begins one; is given how many came before and this peer's offers, in the engine's worker thread.
    """

    def __init__(
        self, folder: Path, config: RunConfig, run_id: str, swap: Callable[[int, Mapping[int, Offer]], Future[Met]]
    ) -> None:
        super().__init__(folder, config, run_id, restore=Phi.restore)
        self._swap, self._swapping, self._over = swap, Future[Met](), ""
        self.phi: Phi | None = None  # what is recovered, or founded

    def begin_fragment(self, round_id: int, record: MergeRecord, injection: Injection | None = None) -> Future[None]:
        """Write nothing before the swap."""
        if injection is not None:
            raise RefusedError("a region's run cannot be a swarm")
        written: Future[None] = Future()
        written.set_result(None)
        return written

    def append_commit(
        self,
        round_id: int,
        outer_step: int,
        reason: str,
        tokens: int = 0,
        injected: Injected | None = None,
        base: str = "",
        audit: str = "",
        inner_steps: int = 0,
        trust: Mapping[str, Trust] | None = None,
        fragments: Collection[int] | None = None,
    ) -> None:
        """Swap, then write the steps and the commit. Raises RefusedError when the engine ends meanwhile, StorageError."""
        phi = self.phi
        assert phi is not None
        if Calendar.of(phi.config).settles(phi.outer_step):
            raise RefusedError("all settle first")
        own = phi.offers()
        self._swapping = self._swap(phi.state.outer_step, own)
        if self._over:
            self._swapping.cancel()
        try:
            met = self._swapping.result()
        except CancelledError:
            raise RefusedError(self._over or "the host ends") from None
        for record in phi.decide(own, met):
            super().begin_fragment(round_id, record).result()
        super().append_commit(round_id, outer_step, met.reason, tokens, injected, base)

    def forget(self) -> None:
        """Remove what is on disk: else a later start would go on from it, as from the newest. Raises StorageError."""
        self._close_journal()
        try:
            for file in self._folder.glob("step-*"):
                file.unlink()
        except OSError as error:
            raise StorageError(f"{self._folder}: cannot be written ({error.strerror})") from error

    def end(self, reason: str) -> None:
        """Give up the swap, and each that is begun later."""
        self._over = reason
        self._swapping.cancel()
