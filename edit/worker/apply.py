"""Carries out what an `Exchange` decides: on theta, the local parameters, the residuals and the inner optimizer.

They move together, on a commit, and only then. A commit is applied all at once or, lazily, fragment by fragment as each is
needed: then the outer step and the digest advance with the last one. Every verb is called by all ranks of a replica together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from torch import Tensor
from torch.optim import Optimizer

from edit.codecs.error_feedback import ErrorFeedback
from edit.collective import Collective
from edit.errors import ConfigError, LocalProtocolError, TransportError
from edit.fragments.digest import combine
from edit.records import Commit, Committed, FragmentCommit, Here, RolledBack, Update, Verdict
from edit.replica.replica import Progress, Replica
from edit.worker.config import WorkerConfig
from edit.worker.contribution import ContributionMaker, SentTensors
from edit.worker.estimator import Estimator, LastStepEstimator
from edit.worker.exchange import (
    WRONG_DIGEST,
    Action,
    Advanced,
    Answer,
    Apply,
    ApplyLazily,
    Ask,
    Contribute,
    Exchange,
    Failed,
    GiveUp,
    KeepLocal,
    Moved,
    Pending,
    ReadClock,
    SendAgain,
    Steps,
    TakeSnapshot,
)
from edit.worker.local_buffers import LocalBuffers
from edit.worker.local_progress import kept, scrub, trains, unmerged, unsent
from edit.worker.masked import GridStaging, PlansRounds
from edit.worker.undone_merges import UndoneMerges
from edit.worker.updates import Updates, without_payloads

__all__ = ["ShareExchange"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(slots=True)
class _PartialCommit:
    """A commit that is being applied fragment by fragment."""

    answer: Advanced
    commit: Commit
    # The updates that are not applied yet, by fragment.
    waiting: dict[int, Update]


class ShareExchange:
    """The exchange of one replica with one aggregator. clock: monotonic seconds. alone: whether there is no other aggregator.
    buffers: of the model. clip: as `ContributionMaker`'s. optimizers: of the model; may grow.

    Raises ConfigError when the model has fewer fragments than the run has groups.
    """

    def __init__(
        self,
        replica: Replica,
        collective: Collective,
        optimizers: Collection[Optimizer],
        config: WorkerConfig,
        clock: Callable[[], float],
        *,
        alone: bool,
        buffers: LocalBuffers,
        clip: float = 0.0,
    ) -> None:
        sync = config.sync
        self.replica = replica
        self.config = config
        self.exchange = Exchange(sync, config.rounds.max_staleness, len(replica.schema.fragments), alone=alone)
        self.feedback = ErrorFeedback(config.codec.uplink, replica.layout.owned, changing=config.masked)
        # Puts contributions on the grid of their round; None: they are not masked.
        self.grid = GridStaging(replica, self.feedback, config.penalty) if config.masked else None
        self.estimator: Estimator | None = LastStepEstimator(config.outer) if sync.mode == "eager" else None
        self.undone_merges = UndoneMerges(replica, optimizers)
        # What is kept of the pending contribution.
        self.sent = SentTensors()
        # The commit applied last, without its payloads.
        self.last_commit: Commit | None = None
        self._maker = ContributionMaker(replica, self.feedback, collective, config, self.estimator, self.grid, clip)
        self._updates = Updates(replica, collective, self.exchange.due, strict=sync.strict)
        self._collective = collective
        self._optimizers = optimizers
        self._buffers = buffers
        self._clock = clock
        self._nonfinite: set[int] = set()  # the fragments of which the last contribution had NaN or Inf
        self._said = False  # whether it was said that cleaning the optimizers does not help
        self._answered: Committed | None = None  # the commit that the last question was answered with, until it is applied
        self._partial: _PartialCommit | None = None
        self._unchecked = False  # whether a commit was applied lazily and theta's digest not compared since
        # Whether theta, the residuals and the local parameters are being moved, or that was broken off, as by Ctrl-C: then they
        # do not belong together any more.
        self.half_moved = False

    # What EditWorker calls.

    def begin(self, *, anew: bool = True) -> None:
        """Training begins, anew from theta or exactly from a checkpoint."""
        self.run(self.exchange.begin(self.replica.outer_step, anew=anew))

    def keep_local(self) -> None:
        """Keep the local parameters as they were sent, while a contribution is pending: what follows is then kept with them.

        Raises ConfigError as `take`.
        """
        if self.exchange.pending is not None:
            self._refuse_written()
            self._maker.keep_local(self.exchange.pending, self.sent)

    def take(self, *, lazily: bool = False) -> None:
        """Take a fresh outcome, see `Exchange.take`. Raises ConfigError, at every rank, where it would undo a write."""
        # Not while updates are applied one by one: ranks may come here differently often, each module before its forward.
        if self._partial is None:
            self._refuse_written()
        self.run(self.exchange.take(lazily=lazily))

    def before_step(self) -> None:
        """An optimizer step is about to be taken: apply what waits for a forward. Raises ConfigError as `take`."""
        self.take()
        self.apply_rest()
        if self._unchecked:
            self._check_applied()
            self.run(self.exchange.catch_up())

    def synchronize(self, *, block: bool = True) -> bool:
        """Take the pending outcome, waiting for it if `block`, and every commit already known. False while there is none.

        Raises ConfigError as `take`.
        """
        exchange = self.exchange
        pending, outer_step = exchange.pending, exchange.outer_step
        if pending is None:
            self._check_applied()
            return self.run(exchange.catch_up())
        if self._partial is not None:
            self.before_step()
        else:
            self._refuse_written()
            self.run(exchange.resolve(block=block))
        return exchange.pending is not pending or exchange.outer_step > outer_step

    def leave(self) -> None:
        """Wait for the pending outcome and apply it, but contribute no more. What the loop wrote since it was sent stays."""
        written = {i: self.replica.local_fragment(i) for i in self._written()}
        self.sent.versions.update((i, self.replica.version(i)) for i in written)
        if self._partial is not None:
            self.before_step()
        self.run(self.exchange.leave())
        self._check_applied()
        for i, local in written.items():
            self.replica.load_local(i, local)

    def apply_fragments(self, fragments: Iterable[int]) -> None:
        """Apply the updates of these fragments, as far as they still wait; returns when they are in. Raises ConfigError as
        `take`."""
        if (partial := self._partial) is None or not (waiting := [i for i in fragments if i in partial.waiting]):
            return
        self._refuse_written(waiting)
        for i in waiting:
            if self._partial is not None and i in self._partial.waiting:
                self._apply_one(self._partial, i)

    def apply_rest(self) -> None:
        """Apply all updates that still wait for a forward. Raises ConfigError as `take`."""
        if self._partial is not None:
            self.replica.transfers.mark_changing()  # a backward may still read what no module's own forward announced
            self.apply_fragments(tuple(self._partial.waiting))

    def _refuse_written(self, among: Iterable[int] | None = None) -> None:
        """Raise ConfigError, at every rank, where something wrote to parameters after they were sent and nothing kept them;
        with `only_steps_write` LocalProtocolError.

        among: the fragments looked at; None: all that are on their way.
        """
        if (pending := self.exchange.pending) is None:
            return
        looked_at = [i for i in (pending.missing if among is None else among) if i not in self.sent.sent_from]

        def look() -> None:
            if written := [self.replica.schema.fragments[i].name for i in self._written() if i in looked_at]:
                names = ", ".join(written[:3])
                if self.config.only_steps_write:
                    raise LocalProtocolError(
                        f"the parameters of {names} changed after optimizer.step() had contributed them; "
                        "only_steps_write says no"
                    )
                raise ConfigError(
                    f"the parameters of {names} were written after the optimizer.step() that contributed them: the outcome "
                    "would undo that; call worker.synchronize() between optimizer.step() and the write, also where a forward "
                    "writes (of an EditCallback: callback.worker.synchronize(); it stands before callbacks that swap in other "
                    "parameters); register a step hook that writes before the EditWorker is entered"
                )

        if looked_at:
            self.replica.layout.ranks.together(look)

    def _written(self) -> list[int]:
        """Return the fragments on their way that something wrote to since they were sent; not those that are kept as they were
        sent, nor buffers, which a forward writes and which become theta's."""
        missing = self.exchange.pending.missing if self.exchange.pending is not None else []
        fragments, sent, version = self.replica.schema.fragments, self.sent, self.replica.version
        unkept = (i for i in missing if i not in sent.sent_from and not fragments[i].buffers)
        return [i for i in unkept if version(i) != sent.versions.get(i, version(i))]

    def run(self, steps: Steps[_T]) -> _T:
        """Carry out one verb of the exchange, action by action."""
        result: Any = None
        while True:
            try:
                action = steps.send(result)
            except StopIteration as end:
                returned: _T = end.value
                return returned
            result = self._carry_out(action)

    # One action.

    def _carry_out(self, action: Action) -> Answer | Moved | Failed | float:
        match action:
            case Ask(outer_step, block):
                return self._ask(outer_step, block)
            case Apply(_, pending, carried):
                return self._apply(self._take_answer(), pending, carried)
            case ApplyLazily(answer):
                outcome = self._take_answer()
                self._partial = _PartialCommit(answer, outcome.commit, self._updates.of(outcome))
                self.replica.transfers.mark_unchanged()
            case TakeSnapshot(pending, reason):
                return self._take_snapshot(pending, reason)
            case Contribute(pending, send, again):
                if self.grid is not None and send and (failed := self._plan(self.grid, pending)) is not None:
                    return failed
                make = self._maker.contribute_again if again else self._maker.contribute
                make(pending, self.sent, send=send)
            case SendAgain(pending):
                self._maker.send_again(pending, self.sent)
            case GiveUp(pending, aborted):
                self._give_up(pending, aborted)
            case KeepLocal(pending):
                self._maker.keep_local(pending, self.sent)
            case ReadClock():
                return self.replica.layout.ranks.lead(self._clock)
        return None

    def _plan(self, grid: GridStaging, pending: Pending) -> Failed | None:
        """Learn the plan of the round that the contribution goes to; Failed: there is none."""
        plans = cast(PlansRounds, self._collective).plan(pending.outer_step)
        if plans is None:
            return Failed("there is no masked round to contribute to")
        grid.begin(plans)
        return None

    def _ask(self, outer_step: int, block: bool) -> Answer:
        outcome = self._collective.outcome(outer_step, block=block)
        if not isinstance(outcome, Committed):
            return outcome
        self._answered, commit = outcome, outcome.commit
        verdicts = [mine.verdict for part in commit.fragments if (mine := part.verdict_of(self._collective.peer_id))]
        return Advanced(
            commit.outer_step,
            bool(verdicts),
            outcome.carried,
            commit.reason,
            outcome.inner_steps,
            refused=bool(verdicts) and Verdict.OK not in verdicts,
        )

    def _take_answer(self) -> Committed:
        """Return the commit of the last answer, and keep it no longer: its payloads are as large as the model.

        Where it found NaN or Inf in the contribution, clean the local buffers: before any forward that applies it reads them.
        """
        answered, self._answered = self._answered, None
        assert answered is not None
        if any(self._updates.verdict(part) is Verdict.NONFINITE for part in answered.commit.fragments):
            self._buffers.restore()
        return answered

    def _apply(self, outcome: Committed, pending: Pending | None, carried: bool) -> Moved | Failed:
        steps = self._updates.all_of(outcome, pending.applied if pending else ())
        if steps is None:
            return Failed(self._updates.failure)
        commit, replica = outcome.commit, self.replica
        verdicts = {part.fragment_id: self._updates.verdict(part) if pending else None for part in commit.fragments}

        def progress(i: int) -> Tensor | float | None:
            return self._kept(i, verdicts.get(i), pending)

        hashes = replica.hashes_after(steps)
        if combine(hashes) != commit.digest:
            if carried:
                return Failed(WRONG_DIGEST, wrong_digest=True)
            if (target := self._updates.snapshot()) is None:
                return Failed(f"{WRONG_DIGEST}; {self._updates.failure}")
            self.half_moved = True
            for part in commit.fragments:
                if (step := steps.get(part.fragment_id)) is not None:
                    for _ in self._take_verdict(part, verdicts[part.fragment_id], step):
                        pass
            replica.move(target, progress)
            if self.estimator is not None:  # a snapshot may be further: that was not this commit's step alone
                self.estimator.forget()
            self.half_moved = False
            reason = WRONG_DIGEST
        else:
            self._apply_all(commit, steps, hashes, progress, verdicts, pending if carried else None)
            reason = commit.reason
        self.last_commit = without_payloads(commit)
        if not carried:
            self.sent = SentTensors()
        return Moved(replica.outer_step, reason)

    def _apply_all(
        self,
        commit: Commit,
        steps: Mapping[int, Here | RolledBack],
        hashes: Sequence[bytes],
        progress: Progress,
        verdicts: Mapping[int, Verdict | None],
        carried: Pending | None,
    ) -> None:
        """Apply the updates, one fragment after the other: nothing can fail any more. carried: stays pending."""
        replica, sent = self.replica, self.sent
        moved: dict[int, Tensor] = {}
        self.half_moved = True
        for part in commit.fragments:
            i = part.fragment_id
            if (step := steps.get(i)) is None:
                continue
            residual = self._take_verdict(part, verdicts[i], step) if carried is None else ()
            if carried is not None and i in carried.missing:
                self._maker.keep_residual(sent, i)
            shifts = carried is not None and i in sent.sent_from
            before = replica.outer.fragments[i] if shifts or self.estimator is not None else None
            replica.apply_fragment(i, step, progress, hashes[i], residual)
            if before is None:
                continue
            after = replica.theta(i)
            if self.estimator is not None and isinstance(step, Here):
                moved[i] = before - after
            if shifts:
                sent.sent_from[i] = (sent.sent_from[i] - before).add_(after)
        replica.applied(commit.outer_step)
        if self.estimator is not None:
            self.estimator.committed(commit, self._collective.peer_id, moved, sent.deltas)
        self.half_moved = False

    def _take_verdict(self, part: FragmentCommit, verdict: Verdict | None, step: Here | RolledBack) -> Iterable[slice]:
        """Adopt or forget the residual of a fragment; clean the inner optimizer's state after a contribution with NaN or Inf.

        Before theta and the local parameters move: yields each part that may move, and is to be iterated to its end.
        verdict: None where the contribution is not part of the commit, nor will be of another. step: of a fragment that was
        rolled back no contribution is merged, not even a good one; where it is what a region injected, the commit says so.
        """
        i = part.fragment_id
        if verdict not in (Verdict.NONFINITE, None):
            self._nonfinite.discard(i)
        if verdict is Verdict.OK and isinstance(step, Here) and part.counts(self._collective.peer_id):
            return self._maker.commit_residual(self.sent, i)
        self.feedback.rollback(i)
        if verdict is Verdict.NONFINITE:
            self._scrub(i)
        return ()

    def _scrub(self, i: int) -> None:
        """Clean the optimizers' state of fragment i. Where that did not help the last time, say once who may keep NaN."""
        parameters = self.replica.parameters(i)
        trainers = [each for each in self._optimizers if trains(each, parameters)]
        for optimizer in trainers:
            scrub(optimizer, parameters)
        if trainers and i in self._nonfinite and not self._said:  # no optimizer has a fragment of buffers
            self._said = True
            _log.warning(
                "two contributions in a row have NaN or Inf (%s): if the loss is finite, %s keeps NaN beside tensors, lists "
                "and tables in its state, where nothing cleans it: leave, and enter an EditWorker with a new optimizer",
                self.replica.schema.fragments[i].name,
                " or ".join(sorted({type(each).__name__ for each in trainers})),
            )
        self._nonfinite.add(i)

    def _kept(self, i: int, verdict: Verdict | None, pending: Pending | None) -> Tensor | float | None:
        """Return what fragment i keeps after `_take_verdict` of the same verdict, see `edit.worker.local_progress`."""
        progress = kept(self.config.sync, self.replica, i, verdict, pending, self.sent)
        owed = self.feedback.step_ahead(i) if verdict is Verdict.OK else None
        if owed is None:
            return progress
        held = self.replica.layout.disown(i, owed)
        assert not isinstance(progress, float)  # a share of what is local (lerp): `check_together` lets no residual be there
        if progress is None:
            return held.neg_()
        with self.replica.transfers.beside():
            return progress.sub_(held.to(progress.device, non_blocking=True))

    def _take_snapshot(self, pending: Pending | None, reason: str) -> Moved | Failed:
        if (target := self._updates.snapshot()) is None:
            return Failed(f"{reason}; {self._updates.failure}")
        self.half_moved = True
        self.replica.move(target, lambda i: unsent(self.replica, i, pending, self.sent))
        if self.estimator is not None:
            self.estimator.forget()
        self.half_moved = False
        return Moved(target.outer_step, reason)

    def _give_up(self, pending: Pending, aborted: bool) -> None:
        sent, self.sent = self.sent, SentTensors()
        if self._partial is not None:
            self._end_partial()
        for i in pending.missing:
            self.feedback.rollback(i)
        if aborted and sent.deltas:
            self.replica.reload(lambda i: unmerged(self.replica, i, sent), pending.fragments)

    # A commit that is applied lazily.

    def _apply_one(self, partial: _PartialCommit, i: int) -> None:
        pending = self.exchange.pending
        assert pending is not None
        try:
            step = self._updates.wait(partial.waiting[i])
        except TransportError as error:
            self._end_partial()
            self.run(self.exchange.interrupted(str(error)))
            return
        part = next(part for part in partial.commit.fragments if part.fragment_id == i)
        verdict = self._updates.verdict(part)
        self.half_moved = True
        residual = self._take_verdict(part, verdict, step)
        self.replica.apply_fragment(i, step, lambda i: self._kept(i, verdict, pending), before=residual)
        del partial.waiting[i]
        pending.applied.add(i)
        self.half_moved = False
        if not partial.waiting:
            self._end_partial()
            self.replica.applied(partial.commit.outer_step)
            self.run(self.exchange.applied(partial.answer))
            self.sent = SentTensors()
            self.last_commit = without_payloads(partial.commit)
            self._unchecked = True

    def _end_partial(self) -> None:
        self._partial = None
        self.replica.transfers.mark_changing()

    def _check_applied(self) -> None:
        """Take a snapshot where what was applied is not what the run has; not in a forward, which has used it.

        While the carrier is cut off, that is tried again each time.
        """
        if not self._unchecked:
            return
        last, replica = self.last_commit, self.replica
        wrong = last is not None and replica.outer_step == last.outer_step and replica.digest != last.digest
        self._unchecked = wrong and not self.run(self.exchange.take_snapshot(WRONG_DIGEST))
