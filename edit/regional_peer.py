"""A whole run as one peer of the run above it: the peer that stands for a region.

The outer parameters that a run below moves are the local parameters of an ordinary `EditWorker` of the run above. With L the
outer parameters below and P this peer's:

- a commit below moves P by what that commit moved L, less what was injected with it: P - L stays;
- a commit above moves P as it moves any peer's local parameters: onto the new theta, with the progress that is not in it yet;
- P - L, the `remaining`, is what is injected below; once it is in, nothing remains, and P is L to the bit.

A run below in which nothing was ever injected takes the parameters of the run above whole, and what it did before is given up:
a fresh run never becomes the model. No carrier, file or clock is known here.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from edit.codecs import decode
from edit.collective import Collective
from edit.config.run import PrivacyConfig, RunConfig
from edit.errors import ConfigError, RefusedError
from edit.fragments.groups import fragments_due
from edit.fragments.schema import Schema, plan_fragments
from edit.fragments.shards import Shard
from edit.merging.injection import Injected, Injection, check_run
from edit.records import Committed, Contribution, Lacks, Outcome, Progress, Snapshot
from edit.replica.flat import flatten, load_fragment
from edit.replica.ranks import ALONE
from edit.trust.mask_plan import FragmentPlan
from edit.worker.masked import PlansRounds
from edit.worker.worker import EditWorker, WorkerConfig

__all__ = ["Below", "Memory", "OuterModule", "Owed", "RegionalPeer", "Sent"]


@dataclass(frozen=True, slots=True)
class Below:
    """The run below at a committed outer step. tokens: merged so far; injected: what of the run above is in theta."""

    outer_step: int
    tokens: int
    injected: Injected | None
    theta: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Sent:
    """What was contributed last: P, against outer step `upper_step` above, with the run below at `lower_step`."""

    upper_step: int
    lower_step: int
    parameters: tuple[Tensor, ...]
    # What the run below had merged then; None: not known.
    lower_tokens: int | None = None
    # The tokens that the contribution said.
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Owed:
    """What the codec has left out of contributions up to the outer step `upper_step` above, which merged the last of them."""

    upper_step: int
    # By fragment, see `EditWorker.residuals`.
    residuals: Mapping[int, Tensor]


class Memory(Protocol):
    """What outlasts this process. Without it only what cannot be told from the two runs is lost."""

    def sent(self) -> Sent | None:
        """What was kept last; None when there is nothing, or nothing that can be trusted."""
        ...

    def keep(self, sent: Sent) -> None:
        """Remember what is about to be contributed, instead of what was before."""
        ...

    def owed(self) -> Owed | None:
        """As `sent`."""
        ...

    def keep_owed(self, owed: Owed) -> None:
        """Remember what is owed now, instead of what was before."""
        ...


@dataclass(slots=True)
class _Passed:
    """What the outer steps above did, from one that the run below has to the present one, by fragment."""

    # What they subtracted from theta.
    moved: dict[int, Tensor]
    # As much of that as came before the last contribution.
    moved_before: dict[int, Tensor]
    # From which outer steps on a contribution of this peer was merged.
    merged: dict[int, list[int]]


@dataclass(frozen=True, slots=True)
class _Early:
    """A contribution of an earlier life of this peer that may be merged yet, though nobody waits for its outcome."""

    sent: Sent
    # The work in it that is in P, by fragment.
    work: dict[int, Tensor]


class OuterModule(nn.Module):
    """The tensors of a schema as parameters, in its order and under its names.

    Raises ConfigError when they would be grouped otherwise: then the schema is not of a model's parameters alone.
    """

    def __init__(self, schema: Schema) -> None:
        super().__init__()
        self._named = {
            tensor.name: nn.Parameter(torch.zeros(tensor.shape, dtype=torch.float32, device="cpu"))
            for fragment in schema.fragments
            for tensor in fragment.tensors
        }
        if (difference := schema.first_difference(plan_fragments(self.named_parameters()))) is not None:
            raise ConfigError(f"the model below cannot be a peer of a run above: {difference}")

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As `torch.nn.Module.named_parameters`; names with dots need no submodules."""
        return iter(self._named.items())


class _Still(Optimizer):
    """An optimizer whose step moves nothing: the run below has moved the parameters. Its hooks are what counts."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Nothing."""


class RegionalPeer:
    """One region's peer of the run above. A context manager: entering joins that run, leaving waits for its last outcome.

    schema, below: of the run below as it stands; collective: of the run above; upper, lower: their configurations; run_id: of
    the run above; memory: of earlier lives of this peer. Call `moved` when the run below has committed, `catch_up` now
    and then, neither of which waits for the run above; bring what `injection` gives below. Raises ConfigError, RefusedError
    when the two runs do not fit together.
    """

    def __init__(
        self,
        schema: Schema,
        below: Below,
        collective: Collective,
        upper: RunConfig,
        lower: RunConfig,
        run_id: str,
        memory: Memory | None = None,
    ) -> None:
        self._upper = upper
        self.adopt(lower)
        self._below = below
        if below.injected is not None and below.injected.run_id != run_id:  # before this run learns anything of the site's
            raise RefusedError(f"the run below follows run {below.injected.run_id}, not {run_id}; begin a new one below it")
        self._collective = _Noting(collective, self._keep, self._resolved, self._check_may_found)
        self._run_id = run_id
        self._memory = memory
        self._model = OuterModule(schema)
        named = dict(self._model.named_parameters())
        self._parameters = [[named[tensor.name] for tensor in fragment.tensors] for fragment in schema.fragments]
        self._remaining: list[Tensor | None] = [None for _ in schema.fragments]
        self._optimizer = _Still(self._model.parameters())
        settings = WorkerConfig.of(
            dataclasses.replace(upper, sync=dataclasses.replace(upper.sync, mode="blocking", strict=False))
        )  # it never trains ahead of itself
        self.worker = EditWorker(self._model, self._optimizer, self._collective, settings, ALONE, leave="local")
        self._fresh = False  # nothing of the run above is below yet, and it has another model than that
        # Outer steps below: up to which its work is in theta above or given up, and up to which it is contributed.
        self._since = self._contributed = below.outer_step
        self._merged = (0, 0)  # an outer step above, and up to which one below it has the work
        self._early: _Early | None = None
        self._seen = (-1, "")
        self._sent: dict[Injected, Injection] = {}  # what may come in, oldest first
        self._stack = contextlib.ExitStack()
        self._load()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.worker)
            self._seen = self._place
            self._rejoin()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._collective.waits = True
        self._stack.__exit__(kind, error, trace)
        self._look()

    def adopt(self, lower: RunConfig) -> None:
        """The run below has this configuration from now on. Raises ConfigError, RefusedError when it does not fit."""
        _check_fit(self._upper, lower)
        self.interval = lower.sync.interval  # inner steps of one commit below
        self._commits = self._upper.sync.interval // self.interval  # below, until a contribution is due
        self._usual_tokens = self.interval * lower.inner.batch_size * lower.inner.accumulation * lower.model.context

    @property
    def finished(self) -> bool:
        """Whether the run above has ended."""
        return self.worker.finished

    @property
    def fresh(self) -> bool:
        """Whether the run below is still to take the parameters of the run above, and its own work counts for nothing."""
        return self._fresh

    @property
    def below(self) -> Below:
        """The run below as it was last seen."""
        return self._below

    def moved(self, below: Below) -> None:
        """The run below has committed, once or more. Raises RefusedError when it went back, or somebody else injects there."""
        if below.outer_step <= self._below.outer_step:
            raise RefusedError(f"the run below went from outer step {self._below.outer_step} back to {below.outer_step}")
        applied = self._applied(below.injected)
        self.catch_up()  # before P moves, so that what is on its way is told from what comes after it
        before, self._below = self._below, below
        if self._fresh and applied is None:
            self._remaining = self._beyond(below.theta)
            return
        fresh, self._fresh = self._fresh, False
        came = {} if applied is None else applied.fragments
        self._remaining = self._beyond([came[i] for i in range(len(came))]) if fresh else self._less(came)
        self._load()
        if not fresh:
            self._count(below.outer_step - before.outer_step, max(0, below.tokens - before.tokens))

    def _applied(self, injected: Injected | None) -> Injection | None:
        """What of the injections made is in since the run below was last seen."""
        if injected is None or injected == self._below.injected:
            return None
        if (applied := self._sent.get(injected)) is None:
            raise RefusedError("somebody else injects into the run below; it can have one regional aggregator")
        self._sent.clear()
        return applied

    def catch_up(self) -> bool:
        """Apply what is known of the run above, without waiting. False while an outcome is open, or the carrier is cut off."""
        done = self.worker.synchronize(block=False)
        self._look()
        return done

    def injection(self, accepted: Injected | None = None) -> Injection | None:
        """What the run below does not have yet of the run above; None when it has all.

        accepted: what the run below says it has taken, and has not in its parameters yet. Before it has taken the last one, no
        newer one is made, so that at most two are kept, whichever of them it has in the end.
        """
        injected, outer_step = self._below.injected, self.worker.outer_step
        if injected is not None and injected.upper_step >= outer_step:
            return None
        if self._sent and (last := next(reversed(self._sent))) != accepted:
            return self._sent[last]
        brings = Injected(self._run_id, outer_step, self._since)
        if brings not in self._sent:
            self._sent = {one: self._sent[one] for one in self._sent if one == accepted}
            parts = self._whole() if self._fresh else self._remaining
            fragments = {i: part for i, part in enumerate(parts) if part is not None}
            self._sent[brings] = Injection(brings=brings, base=injected, replaces=self._fresh, fragments=fragments)
        return self._sent[brings]

    # ---- joining -----------------------------------------------------------------------------------------------------------

    def _rejoin(self) -> None:
        """Bring P, and what remains, to where they were, now that the run above is joined and P is its theta."""
        below, injected = self._below, self._below.injected
        if injected is None:
            self._remaining = self._beyond(below.theta)
            self._fresh = any(part is not None for part in self._remaining)
            return
        self._check_follows(injected)
        sent = self._sent_since(injected.upper_step)
        passed, above = self._passed(injected.upper_step, sent), self._whole()  # P is theta yet
        self._owe(passed)
        if sent is not None:
            self._early = self._early_of(sent, passed)
        if sent is not None and self._repeats(sent):
            self._repeat(sent, injected, passed)
        else:
            self._go_on(sent, injected, passed)
            if self._early is not None and self._early.sent.lower_step > below.outer_step:
                theta = above  # an older copy of the run below was restored: of the work P has what is there
                for i in self._early.work:
                    self._early.work[i] = flatten(self._parameters[i]) - theta[i]

    def _check_may_found(self) -> None:
        if (injected := self._below.injected) is not None:
            raise RefusedError(
                f"the run below has outer step {injected.upper_step} of the run above, which has no parameters now: begin a "
                "new run below it"
            )

    def _check_follows(self, injected: Injected) -> None:
        if injected.upper_step > self.worker.outer_step:
            raise RefusedError(
                f"the run below has outer step {injected.upper_step} of the run above, which is at {self.worker.outer_step}: "
                "an older state of it was restored; begin a new run below it"
            )

    def _sent_since(self, outer_step: int) -> Sent | None:
        """What was contributed last, if that was to `outer_step` or later, and fits."""
        sent = self._memory.sent() if self._memory is not None else None
        if sent is None or not outer_step <= sent.upper_step <= self.worker.outer_step:
            return None
        return sent if [part.shape for part in sent.parameters] == [part.shape for part in self._whole()] else None

    def _passed(self, outer_step: int, sent: Sent | None) -> _Passed | None:
        """What the run above did since `outer_step`; None: it is not kept any more."""
        passed, mine = _Passed({}, {}, {}), self._collective.peer_id
        for step in range(outer_step, self.worker.outer_step):
            outcome = self._collective.outcome(step, block=False)
            if not isinstance(outcome, Committed):
                return None
            if sent is not None and step == sent.upper_step:
                passed.moved_before = dict(passed.moved)
            for part in outcome.commit.fragments:
                i = part.fragment_id
                if part.verdict_of(mine) is not None:
                    passed.merged.setdefault(i, []).append(step)
                if part.payload is not None:
                    moved = decode(part.payload)
                    passed.moved[i] = passed.moved[i] + moved if i in passed.moved else moved
        return passed

    def _repeats(self, sent: Sent) -> bool:
        """Whether a round above is open to what was contributed last, and all the work in it is still below."""
        return sent.upper_step == self.worker.outer_step and sent.lower_step <= self._below.outer_step

    def _may_come(self, outer_step: int) -> bool:
        """Whether the run above may merge what an earlier life contributed to `outer_step`, and does not take it once more.

        It carries contributions over, or opens a masked sum, for which this life has no keys.
        """
        staleness = self._upper.rounds.max_staleness
        return (staleness > 0 or self._upper.secagg.enabled) and self.worker.outer_step - outer_step <= staleness

    def _early_of(self, sent: Sent, passed: _Passed | None) -> _Early | None:
        """What was contributed last, if it may be merged yet, with its work as far as P is to have it. P is theta."""
        late = sent.upper_step < self.worker.outer_step
        if not self._may_come(sent.upper_step) or (late and passed is None):
            return None  # `_go_on` gives up what is not known
        passed = passed or _Passed({}, {}, {})
        if any(step >= sent.upper_step for steps in passed.merged.values() for step in steps):
            return None
        theta, work = self._whole(), dict[int, Tensor]()
        for i in fragments_due(sent.upper_step, len(theta), self._upper.sync.groups, self._upper.sync.pattern):
            work[i] = sent.parameters[i] - theta[i]
            if i in passed.merged and not self._repeats(sent):
                work[i].zero_()  # `_go_on` gives it up
            elif late and i in passed.moved:
                before = passed.moved_before.get(i)
                work[i] -= passed.moved[i] if before is None else passed.moved[i] - before
        return _Early(sent, work)

    def _owe(self, passed: _Passed | None) -> None:
        """Go on with what the codec left out, unless it is not known whether a later contribution had that."""
        owed = self._memory.owed() if self._memory is not None else None
        if owed is None or passed is None or owed.upper_step > self.worker.outer_step:
            return
        if all(step < owed.upper_step for steps in passed.merged.values() for step in steps):
            self.worker.load_residuals(owed.residuals)

    def _repeat(self, sent: Sent, injected: Injected, passed: _Passed | None) -> None:
        """As `_rejoin`, where the run above may hold what was contributed: it keeps that, so the same is contributed once more.

        What was done below since goes on top.
        """
        now, then = self._below, list(self._below.theta)
        for i, part in enumerate(sent.parameters):
            load_fragment(part, self._parameters[i])
            if passed is not None and i not in passed.merged:  # else what was done since is not known, and given up
                then[i] = part + passed.moved[i] if i in passed.moved else part
        self._below = Below(sent.lower_step, self._tokens_at(sent), injected, tuple(then))
        self._since = injected.lower_step
        self._remaining = self._beyond(then)
        commits = sent.lower_step - injected.lower_step
        tokens = sent.tokens if sent.lower_tokens is not None else self._share(commits)
        self._count(max(commits, self._commits), tokens)  # it is due, even if it was made after fewer inner steps (sync.dylu)
        if now.outer_step > sent.lower_step:
            self.moved(now)

    def _go_on(self, sent: Sent | None, injected: Injected, passed: _Passed | None) -> None:
        """As `_rejoin`, where the run above holds nothing of this peer.

        A fragment of which nothing was merged since keeps all that is in L. Of one that was merged, what was done below since
        goes on top of theta; where that is not known, all of it is given up. Work may be lost here, never counted twice.
        """
        below = self._below
        self._remaining = self._beyond(below.theta)
        since = injected.lower_step if passed is not None and not passed.merged else below.outer_step
        for i, theta in enumerate(self._whole()):
            if passed is not None and i not in passed.merged:
                self._remaining[i] = torch.neg(passed.moved[i]) if i in passed.moved else None
            elif sent is not None and (
                sent.upper_step == injected.upper_step if passed is None else passed.merged[i] == [sent.upper_step]
            ):
                # What came from above before is in what was sent, but not in L.
                before = passed.moved_before.get(i) if passed is not None else None
                had = sent.parameters[i] if before is None else sent.parameters[i] + before
                self._remaining[i] = None if torch.equal(theta, had) else theta - had
                since = min(sent.lower_step, below.outer_step)
        self._load()
        self._since = self._contributed = since
        self._count(below.outer_step - since, self._tokens_since(since, sent))

    def _tokens_at(self, sent: Sent) -> int:
        """What the run below had merged when this was contributed."""
        return self._share(sent.lower_step) if sent.lower_tokens is None else min(sent.lower_tokens, self._below.tokens)

    def _tokens_since(self, lower_step: int, sent: Sent | None) -> int:
        """What the run below has merged since that outer step, as far as is known; else its share of all."""
        below = self._below
        if sent is None or sent.lower_tokens is None or not lower_step <= sent.lower_step <= below.outer_step:
            return self._share(below.outer_step - lower_step)
        return below.tokens - self._tokens_at(sent) + (sent.tokens if lower_step < sent.lower_step else 0)

    def _share(self, commits: int) -> int:
        """The tokens of so many commits below, if all had as many."""
        return self._below.tokens * commits // max(1, self._below.outer_step)

    def _keep(self, contribution: Contribution) -> None:
        """P is about to be contributed."""
        below = self._below
        self._contributed = below.outer_step
        if self._memory is not None:
            whole = tuple(self._whole())
            self._memory.keep(Sent(self.worker.outer_step, below.outer_step, whole, below.tokens, contribution.tokens))

    def _resolved(self, outer_step: int, fragments: Collection[int] | None) -> None:
        """The run above has what was contributed of these fragments in this outer step, or it is given up there. None: of all.

        Before P moves. Where no contribution waits for it, it is one of an earlier life: its work leaves P, and what the codec
        owed then, which was sent with it, is owed no more.
        """
        early, self._early = self._early, None
        if self.worker.pending:
            self._merged = outer_step, self._contributed
        elif early is not None and (fragments is not None or self._may_come(early.sent.upper_step)):
            gone = early.work.keys() if fragments is None else early.work.keys() & fragments
            for i in gone:
                now = flatten(self._parameters[i]) - early.work[i]
                self._remaining[i] = now - self._below.theta[i]
                load_fragment(now, self._parameters[i])
            self.worker.load_residuals({i: owed for i, owed in self.worker.residuals.items() if i not in gone})
            self._merged = outer_step, max(self._since, min(early.sent.lower_step, self._below.outer_step))

    # ---- P and L -----------------------------------------------------------------------------------------------------------

    def _whole(self) -> list[Tensor]:
        """P, a copy."""
        return [flatten(parameters) for parameters in self._parameters]

    def _expected(self, i: int) -> Tensor:
        """P as it is unless the worker has moved it."""
        part, theta = self._remaining[i], self._below.theta[i]
        return theta if part is None else theta + part

    def _load(self) -> None:
        for i, parameters in enumerate(self._parameters):
            load_fragment(self._expected(i), parameters)

    def _beyond(self, parts: Sequence[Tensor]) -> list[Tensor | None]:
        """P less these; None where that is nothing."""
        return [None if torch.equal(own, part) else own - part for own, part in zip(self._whole(), parts, strict=True)]

    def _less(self, came: Mapping[int, Tensor]) -> list[Tensor | None]:
        """What remains once these are in."""
        return [
            None if part is None or part is came.get(i) else part - came[i] if i in came else part
            for i, part in enumerate(self._remaining)
        ]

    @property
    def _place(self) -> tuple[int, str]:
        return self.worker.outer_step, self.worker.digest

    def _look(self) -> None:
        """If the run above has moved P: what remains is the difference now."""
        if self._place == self._seen:
            return
        (before, _), self._seen = self._seen, self._place
        outer_step, lower_step = self._merged
        if before < outer_step <= self.worker.outer_step:
            self._since = lower_step
            if self._memory is not None:
                self._memory.keep_owed(Owed(outer_step, self.worker.residuals))
        for i, parameters in enumerate(self._parameters):
            now = flatten(parameters)
            if not torch.equal(now, self._expected(i)):
                self._remaining[i] = now - self._below.theta[i]

    def _count(self, commits: int, tokens: int) -> None:
        """So many commits below are behind P: all of their inner steps count, before any of it is contributed."""
        if self._upper.privacy.of_organisations:  # what was merged below depends on its data, and members see the number
            tokens = commits * self._usual_tokens
        self.worker.count_tokens(tokens)
        if steps := commits * self.interval:
            self.worker.count_steps(steps - 1)
            self._optimizer.step()
        self._look()


class _Noting:
    """A `Collective` that does as `collective`. It calls `note` before each contribution it is given, once, and `resolved` with
    the outer step of each commit with this peer and the fragments in which it has a verdict, and of each snapshot and None,
    before they are applied, and `founds` before this peer founds the run. It waits for no outcome unless `waits` is set:
    whoever asks for one has a run below to look at."""

    waits = False

    def __init__(
        self,
        collective: Collective,
        note: Callable[[Contribution], None],
        resolved: Callable[[int, Collection[int] | None], None],
        founds: Callable[[], None],
    ) -> None:
        self._collective, self._note, self._resolved, self._founds = collective, note, resolved, founds
        self._given: set[tuple[int, int]] = set()  # outer step and fragment, of the present contribution

    @property
    def peer_id(self) -> str:
        return self._collective.peer_id

    def join(
        self,
        schema: Schema,
        found: Callable[[], Sequence[Tensor]],
        shards: Sequence[Shard] | None = None,
        lacks: Lacks | None = None,
    ) -> Snapshot:
        def founded() -> Sequence[Tensor]:
            self._founds()
            return found()

        return self._collective.join(schema, founded, shards, lacks)

    def plan(self, outer_step: int) -> tuple[FragmentPlan, ...] | None:
        return cast("PlansRounds", self._collective).plan(outer_step)

    def contribute(self, contribution: Contribution) -> None:
        key = contribution.outer_step, contribution.fragment_id
        if key in self._given or all(outer_step != key[0] for outer_step, _ in self._given):
            self._given.clear()  # another contribution than the last
            self._note(contribution)
        self._given.add(key)
        self._collective.contribute(contribution)

    def outcome(self, outer_step: int, *, block: bool) -> Outcome | None:
        outcome = self._collective.outcome(outer_step, block=block and self.waits)
        if isinstance(outcome, Committed):
            parts = outcome.commit.fragments
            if mine := {part.fragment_id for part in parts if part.verdict_of(self.peer_id) is not None}:
                self._resolved(outcome.commit.outer_step, mine)
        return outcome

    def snapshot(self) -> Snapshot:
        snapshot = self._collective.snapshot()
        self._resolved(snapshot.outer_step, None)
        return snapshot

    def report(self, progress: Progress) -> None:
        """Leave it out: the region tells of itself."""


def _check_fit(upper: RunConfig, lower: RunConfig) -> None:
    check_run(lower)
    if upper.privacy.of_examples and not lower.privacy.of_examples:
        raise ConfigError(
            'privacy.level: the run above asks for "example", and the peers of the run below add no noise; set it there'
        )
    if upper.privacy.of_examples:
        _check_bound(upper.privacy, lower.privacy)
        if lower.model.context != upper.model.context:  # shorter examples are protected less, and others lie in several
            raise ConfigError(
                f"model.context: the run above protects examples of {upper.model.context} tokens, the run below of "
                f"{lower.model.context}; set {upper.model.context} there"
            )
    for which, run in (("above", upper), ("below", lower)):
        if run.sync.milestones:
            raise ConfigError(
                f"sync.milestones: the run {which} changes H, but a region takes as many steps between two exchanges as "
                "before; remove it there"
            )
    if upper.sync.schedule == "time":
        raise ConfigError(
            'sync.schedule = "time": the run above exchanges by time, a region when the run below commits; set "steps" there'
        )
    if upper.sync.interval % lower.sync.interval:
        raise ConfigError(
            f"the run above exchanges every {upper.sync.interval} inner steps, the run below every {lower.sync.interval}: "
            "sync.every of the run above must be a multiple"
        )


def _check_bound(above: PrivacyConfig, below: PrivacyConfig) -> None:
    """Raise ConfigError unless the peers below keep to the bound that the run above says of its peers."""
    if below.unit != above.unit:
        raise ConfigError(
            f'privacy.unit: the run above protects each {above.unit}, the run below each {below.unit}; set "{above.unit}" there'
        )
    for name in ("epsilon_max", "delta"):
        most, found = getattr(above, name), getattr(below, name)
        if found > most:
            raise ConfigError(
                f"privacy.{name}: the run above asks for at most {most:g}, the run below has {found:g}; lower it there"
            )
