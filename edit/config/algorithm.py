"""The settings of the algorithm itself: when a peer exchanges, what a merge and the outer step compute, when a round closes."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated

from edit.config.codec import LOCAL, SPARSE, CodecConfig
from edit.config.plugins import OneOfOrEntry
from edit.config.validation import Between, Matches, OneOf, Positive, check_bounds, require, within

__all__ = [
    "GossipConfig",
    "OuterConfig",
    "PenaltyConfig",
    "RoundsConfig",
    "SyncConfig",
    "check_together",
]

_MOST_STEPS = 1 << 32  # H
_MOST_MILESTONES = 1000


def _is_a_line(text: str) -> bool:
    return len(text) <= 300 and text.isprintable()


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncConfig:
    """The section [sync]: when fragments are exchanged and how an update is applied."""

    # H: inner steps between two exchanges of the same fragment. With schedule = "time" it only tells the learning rate's
    # schedule how many inner steps an outer step counts as. EDiT's paper uses 128.
    every: Annotated[int, Between(1, _MOST_STEPS)] = 128
    # H that changes during the run: pairs of an outer step and the H from there on, as in [[100, 32], [400, 128]]; until the
    # first one it is `every`. With every = 1 peers average at every inner step at first (Post Local SGD, arXiv 1808.07217; the
    # warm-up of EDiT's paper).
    milestones: tuple[tuple[int, int], ...] = ()
    # The run ends after this many outer steps, or earlier by `tokens`.
    outer_steps: Annotated[int, Between(1, 1 << 40)] = 1000
    # P of Streaming DiLoCo (arXiv 2501.18512): an outer step exchanges one of P groups of fragments, every H / P inner steps.
    groups: Annotated[int, Between(1, 1 << 20)] = 1
    # Which fragments form a group: `sequential`: neighbours; `strided`: every P-th.
    pattern: Annotated[str, OneOf("sequential", "strided")] = "strided"
    # How training waits for an update. `blocking`: at the exchange; `forward`: for a layer's update just before that layer's
    # next forward; `delayed`: not at all, the update is applied `delay` inner steps later; `eager`: as `delayed`, and meanwhile
    # training goes on from an estimate of the update.
    mode: Annotated[str, OneOf("blocking", "forward", "delayed", "eager")] = "blocking"
    # Inner steps from a contribution to its update, with mode `delayed` or `eager`.
    delay: Annotated[int, Between(1, 1 << 32)] = 1
    # With `delayed`, what becomes of the progress made meanwhile. `replay`: it is added to the new outer parameters; `replace`:
    # it is dropped, so delay must be below H; `lerp`: the local parameters become alpha * local + (1 - alpha) * outer.
    mix: Annotated[str, OneOf("replay", "replace", "lerp")] = "replay"
    # The share of the local parameters that is kept with mix = "lerp".
    alpha: Annotated[float, Between(0, 1)] = 0.5
    # Never train on without an outcome, even when the coordinator is away: slower after faults, but an interrupted run ends
    # with the same bits as one that was not interrupted.
    strict: bool = False
    # `steps`: a peer contributes every H / P inner steps. `time` (A-EDiT, arXiv 2412.07210): at the first inner step at which
    # `time_s` / P seconds have passed since the last outcome was applied.
    schedule: Annotated[str, OneOf("steps", "time")] = "steps"
    # Seconds of the peer's own clock between two exchanges of the same fragment, with schedule = "time".
    time_s: Annotated[float, Between(1e-3, 1e7)] = 600.0
    # Scale each peer's H by its measured speed, so that all contribute together (arXiv 2401.09135, section 5).
    dylu: bool = False
    # The run ends once this many tokens are merged; 0: only outer_steps counts.
    tokens: Annotated[int, Between(0, 1 << 62)] = 0

    def __post_init__(self) -> None:
        check_bounds("sync.", self)
        require(not (self.dylu and self.schedule == "time"), "sync.dylu", True, 'has no effect with sync.schedule = "time"')
        require(self.every % self.groups == 0, "sync.groups", self.groups, f"must divide sync.every ({self.every})")
        require(self.mode != "eager" or self.groups == 1, "sync.groups", self.groups, 'must be 1 with sync.mode = "eager"')
        if self.mode in ("delayed", "eager"):
            require(
                self.delay <= self.interval,
                "sync.delay",
                self.delay,
                f"must not exceed sync.every / sync.groups ({self.interval}): one contribution is on its way at a time",
            )
            self._check_dropped(self.every, "sync.delay", self.delay)
        if self.milestones:
            self._check_milestones()

    def _check_dropped(self, every: int, key: str, said: object) -> None:
        """Raise ConfigError where all that a peer has done is dropped just before it contributes, with that H."""
        if self.mode != "delayed" or self.groups > 1 or not (self.mix == "replace" or (self.mix == "lerp" and self.alpha == 0)):
            return
        drops = 'sync.mix = "replace"' if self.mix == "replace" else 'sync.mix = "lerp" and sync.alpha = 0'
        rule = f"H ({every}) must be above sync.delay ({self.delay}) with {drops}, or nothing is left to contribute"
        require(self.delay < every, key, said, rule)
        rule = f"must be false with {drops}: a slow peer's H may fall to sync.delay, and nothing is left to contribute"
        require(not self.dylu, "sync.dylu", True, rule)

    def _check_milestones(self) -> None:
        """Raise ConfigError where H cannot change as `milestones` says, or not with the other settings."""
        key, before, now = "sync.milestones", 0, self.every
        within(f"{key} (their number)", len(self.milestones), 0, _MOST_MILESTONES)
        for outer_step, every in self.milestones:
            said = f"[{outer_step}, {every}]"
            rule = (
                f"must name outer steps that rise, from 1 to below sync.outer_steps ({self.outer_steps}), or it has no effect"
            )
            require(before < outer_step < self.outer_steps, key, said, rule)
            require(1 <= every <= _MOST_STEPS, key, said, f"H must be between 1 and {_MOST_STEPS}")
            require(every != now, key, said, f"H is {now} before, so it has no effect")
            rule = f"H must be a multiple of sync.groups ({self.groups}), and so must the outer step"
            require(every % self.groups == 0 and outer_step % self.groups == 0, key, said, rule)
            rule = f"sync.delay ({self.delay}) must not exceed H / sync.groups ({every // self.groups})"
            require(self.mode != "delayed" or self.delay <= every // self.groups, key, said, rule)
            self._check_dropped(every, key, said)
            before, now = outer_step, every
        of_time = 'with sync.schedule = "time", where no H says when peers exchange'
        require(self.schedule == "steps", key, self.milestones, f"must be absent {of_time}")
        require(not self.dylu, "sync.dylu", True, f"cannot be kept with {key}: H is then each peer's own")
        rule = f"must not be eager with {key}: the last outer step is expected again, of as many inner steps"
        require(self.mode != "eager", "sync.mode", self.mode, rule)

    def every_at(self, outer_step: int) -> int:
        """Return H as it is in force for the advance from this outer step."""
        passed = bisect_right(self.milestones, outer_step, key=lambda milestone: milestone[0])
        return self.milestones[passed - 1][1] if passed else self.every

    def interval_at(self, outer_step: int) -> int:
        """Return the inner steps of the advance from this outer step: H / P."""
        return self.every_at(outer_step) // self.groups

    def inner_steps_before(self, outer_step: int) -> int:
        """Return the inner steps that a peer takes in a run until it is at this outer step, when it misses none."""
        steps, begins, interval = 0, 0, self.interval
        for milestone, every in self.milestones:
            if milestone >= outer_step:
                break
            steps += (milestone - begins) * interval
            begins, interval = milestone, every // self.groups
        return steps + (outer_step - begins) * interval

    def least_interval(self, first: int, last: int) -> int:
        """Return the smallest of `interval_at` from the outer step `first` to `last`, both included."""
        between = [every // self.groups for outer_step, every in self.milestones if first < outer_step <= last]
        return min([self.interval_at(first), *between])

    def is_first_with_another(self, outer_step: int) -> bool:
        """Return whether the fragments due at this outer step are exchanged for the first time since H changed."""
        return any(milestone <= outer_step < milestone + self.groups for milestone, _ in self.milestones)

    @property
    def stretches(self) -> Sequence[tuple[int, int]]:
        """(outer steps, H) of each stretch of the run in which H stays as it is; the first stretch comes first."""
        begins = (0, *(outer_step for outer_step, _ in self.milestones))
        ends = (*begins[1:], self.outer_steps)
        return [(end - begin, self.every_at(begin)) for begin, end in zip(begins, ends, strict=True)]

    def usual_every(self, first: int = 0) -> int:
        """Return the H of most outer steps but the first ones, so many; of two that have as many, the smaller one."""
        lengths, begins = Counter[int](), 0
        for outer_steps, every in self.stretches:
            lengths[every] += max(0, outer_steps - max(0, first - begins))
            begins += outer_steps
        return min(lengths, key=lambda every: (-lengths[every], every))

    @property
    def interval(self) -> int:
        """Inner steps between the run's first outer steps: H / P. `interval_at` has those of any."""
        return self.every // self.groups

    @property
    def overlap(self) -> int:
        """Inner steps that a peer trains on after it began to contribute, before it waits for the update."""
        return self.delay if self.mode in ("delayed", "eager") else 0

    @property
    def interval_s(self) -> float:
        """Seconds from an applied outcome to the next contribution, with schedule = "time"."""
        return self.time_s / self.groups


@dataclass(frozen=True, slots=True, kw_only=True)
class PenaltyConfig:
    """The section [penalty]: the EDiT pseudo-gradient penalty (arXiv 2412.07210, section 3.3), with a detector that recovers.

    The defaults of alpha, delta, temperature and clip are the paper's. benchmarks/penalty.py compares the detectors.
    """

    # Judge contributions, and weigh them by their norms. false: a mean by `weighting` of all that are finite, without a clip,
    # as in DiLoCo.
    enabled: bool = True
    # `level`: the logarithm of a norm, less that of its steps, is judged; with three or more contributions, relative to the
    # round's median; trends are followed, and a level that is held is learned (`edit.merging.detector`). `edit`: the paper's
    # rule, which judges the norm by accepted norms only, so that a lasting rise is rejected for ever. `entry:NAME`: a plug-in
    # (docs/plugins.md).
    detector: Annotated[str, OneOfOrEntry("level", "edit")] = "level"
    # Options for a detector that is a plug-in.
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    # Rate of the moving statistics of a peer's norms.
    alpha: Annotated[float, Between(1e-6, 1)] = 0.02
    # Standard deviations above its mean from which a norm is anomalous; with `level`: above its forecast, and more while few
    # norms are known.
    delta: Annotated[float, Positive()] = 3.0
    # W: the number of norms of a peer that must be seen before one of them can be anomalous; the authors' code waits for 120.
    observations: Annotated[int, Between(1, 1 << 30)] = 10
    # The power p of the inner steps that a norm is expected to grow by: 0.5 for a random walk's, 1 for a straight one's.
    step_power: Annotated[float, Between(0, 1)] = 0.5
    # Anomalous contributions of a peer in a row, alike within a factor of 2, after which their level is its new usual one.
    relearn: Annotated[int, Between(1, 100)] = 3
    # With three or more contributions, a norm (per steps) this many times the round's median is anomalous from the first round
    # on, and is never learned.
    max_ratio: Annotated[float, Between(1, 1e6)] = 10.0
    # T: the temperature of the softmax over -G / T that gives the weights.
    temperature: Annotated[float, Positive()] = 1.0
    # phi: the largest norm of a merged fragment; 0: no clipping.
    clip: Annotated[float, Between(0, 1e12)] = 10.0
    # The G that enters the softmax. `raw`: the norm; `per_sqrt_step`: norm / sqrt(inner steps); `relative`: norm / median of
    # the round.
    norm: Annotated[str, OneOf("raw", "per_sqrt_step", "relative")] = "relative"
    # A norm below this share of the round's largest accepted one (with `edit`: of the median of three or more) is a free
    # rider's and gets weight 0, and so do zeros; 0: no such verdict.
    idle_ratio: Annotated[float, Between(0, 0.5)] = 0.01
    # No share exceeds max_share / M of M accepted contributions; what is cut is spread over the others. Arrivals are exempt.
    max_share: Annotated[float, Between(1, 1e6)] = 1.5
    # With the penalty off: `uniform`, `tokens`, or `tokens2_per_step` (tokens^2 / inner steps, arXiv 2604.21428).
    weighting: Annotated[str, OneOf("uniform", "tokens", "tokens2_per_step")] = "uniform"
    # A contribution that is s outer steps old has its weight multiplied by (1 + s) ** -staleness (arXiv 1903.03934); the
    # weights are then normalised again. With rounds.max_staleness above 0.
    staleness: Annotated[float, Between(0, 10)] = 0.5
    # The same exponent with rounds.merging = "arrivals", where the weights are not normalised again. 0, because each arrival
    # of M peers is M - 1 outer steps old, and damping all of them cost loss in each setting measured (docs/measurements.md).
    damping: Annotated[float, Between(0, 10)] = 0.0

    def __post_init__(self) -> None:
        check_bounds("penalty.", self)


def _ascend(numbers: tuple[int, ...]) -> bool:
    return len(numbers) <= 1000 and all(0 < a < b for a, b in pairwise((*numbers, 1 << 40)))


def _plain(value: int | tuple[int, ...]) -> int | list[int]:
    """Return the value as run.toml has it."""
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterConfig:
    """The section [outer]: the outer optimizer, and how contributions become the one pseudo-gradient it is given.

    EDiT's paper uses lr 0.8 and momentum 0.85, DiLoCo's 0.7 and 0.9. Short runs want a small momentum or none
    (docs/outer-settings.md).
    """

    # `mean`: all contributions become one pseudo-gradient, which moves the outer parameters that all peers share. `gossip`:
    # every peer has outer parameters of its own, and takes each outer step with one other peer; the section [gossip] has its
    # settings, this one no others. For a swarm, and for a run within one process (`edit.local.LocalGossip`).
    algorithm: Annotated[str, OneOf("mean", "gossip")] = "mean"
    # Who chooses `optimizer`, `lr` and `momentum`. `manual`: they are as written; `auto`: they follow from the number of outer
    # steps and H (`edit.config.auto`), when run.toml is read. A run.toml that says nothing of the optimizer in [outer] has
    # `auto`, unless rounds.merging is "arrivals"; one that does has `manual`.
    preset: Annotated[str, OneOf("manual", "auto")] = "manual"
    # What `auto` chose, and why. It is not to be written: founding a swarm writes it beside what was chosen, into the run.toml
    # that all members get, and `auto` then chooses no more.
    chosen: Annotated[str, Matches(_is_a_line, "must be a line of at most 300 characters")] = ""
    # The outer optimizer. co2: heavy-ball momentum (arXiv 2401.16265). delayed_nesterov: for rounds.merging = "arrivals".
    # `entry:NAME`: a plug-in (docs/plugins.md).
    optimizer: Annotated[str, OneOfOrEntry("sgd", "nesterov", "co2", "adam", "yogi", "delayed_nesterov")] = "nesterov"
    # Options for an optimizer that is a plug-in.
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    # nu: the outer learning rate.
    lr: Annotated[float, Positive()] = 0.8
    # mu: the momentum of nesterov, co2 and delayed_nesterov.
    momentum: Annotated[float, Between(0, 0.9999)] = 0.85
    # Outer steps of a fragment in which the momentum of nesterov and co2 rises linearly from 0 to `momentum`; one that is
    # rolled back counts, too. 0: it is `momentum` from the first on.
    momentum_warmup: Annotated[int, Between(0, 1 << 40)] = 0
    # Outer steps of a fragment, counted from 0, before which the momentum of nesterov and co2 is set to zero; its warm-up
    # begins anew there. One that is rolled back counts, too.
    momentum_restarts: Annotated[tuple[int, ...], Matches(_ascend, "must be at most 1000 numbers from 1 on, ascending")] = ()
    # The first outer steps of the run that take the mean as it is: lr 1 and no momentum. With sync.every = 1 meanwhile it is a
    # warm-up with averages at every inner step. For sgd and nesterov, and not with rounds.merging = "arrivals".
    mean_steps: Annotated[int, Between(0, 1 << 40)] = 0
    # rho: the correlation of successive pseudo-gradients at the H of most outer steps (those of mean_steps left out), for
    # nesterov. Above 0, the learning rate follows H: it is `lr` at that H, and at another one such that the step along what
    # successive pseudo-gradients share keeps its ratio to one of them (`edit.config.in_force.rate_factor`). 0: the learning
    # rate is `lr` whatever H is.
    correlation: Annotated[float, Between(0, 0.999)] = 0.0
    # co2's staleness gap penalty: what the pseudo-gradient is divided by before it enters the momentum.
    gap_penalty: Annotated[float, Between(1, 1e6)] = 1.0
    # co2's outer momentum clipping: the largest magnitude of an element of the momentum; 0: no clipping.
    momentum_clip: Annotated[float, Between(0, 1e6)] = 0.0
    # First beta of adam and yogi (arXiv 2003.00295).
    beta1: Annotated[float, Between(0, 0.9999)] = 0.9
    # Second beta of adam and yogi.
    beta2: Annotated[float, Between(0, 0.99999)] = 0.99
    # Epsilon of adam and yogi.
    eps: Annotated[float, Positive()] = 1e-3
    # N of delayed_nesterov (arXiv 2401.09135): its momentum moves at every N-th outer step; the number of peers fits.
    period: Annotated[int, Between(1, 1 << 20)] = 4
    # The share of the momentum that delayed_nesterov applies at the outer steps between, at most 1 / N.
    c: float = 0.0
    # `mean`, or `rda` (arXiv 2604.21428): the mean of the contributions' directions, with the mean of their lengths.
    # A fragment whose name begins with "embedding", as builtin:gpt has one, keeps the mean, because rows of rare words have no
    # direction. The embeddings of other models have other names, and get no exception.
    direction: Annotated[str, OneOf("mean", "rda")] = "mean"
    # `none`, or `heloco` (arXiv 2606.00271): what goes against the momentum is shrunk or turned towards it, tensor by tensor.
    correct: Annotated[str, OneOf("none", "heloco")] = "none"
    # How weighted contributions are combined: `mean`, or `entry:NAME`, a plug-in.
    merger: Annotated[str, OneOfOrEntry("mean")] = "mean"
    # Options for a merger that is a plug-in.
    merger_options: Mapping[str, str | int | float | bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_bounds("outer.", self)
        require(0 <= self.c * self.period <= 1, "outer.c", self.c, f"must be between 0 and 1 / outer.period ({self.period})")
        for name, value, off in self.planned_momentum:
            if value == off:
                continue
            rule = f'must be {_plain(off)} with outer.preset = "auto", which chooses the momentum by the run\'s length'
            require(self.preset != "auto", f"outer.{name}", _plain(value), rule)
            rule = f'must be {_plain(off)} with outer.correct = "heloco", which compares with the momentum'
            require(self.correct != "heloco", f"outer.{name}", _plain(value), rule)
        if self.mean_steps:
            rule = "must be 0 with outer.mean_steps above 0, which begin without momentum"
            require(self.momentum_warmup == 0, "outer.momentum_warmup", self.momentum_warmup, rule)
            rule = 'must be 0 with outer.correct = "heloco", which compares with the momentum'
            require(self.correct != "heloco", "outer.mean_steps", self.mean_steps, rule)
        if self.correct == "heloco":
            rule = 'must be one of nesterov, delayed_nesterov with outer.correct = "heloco", which compares with the momentum'
            require(self.optimizer in ("nesterov", "delayed_nesterov"), "outer.optimizer", self.optimizer, rule)

    @property
    def changes(self) -> bool:
        """Whether the learning rate or the momentum is another one at some outer step (`edit.config.in_force`)."""
        return bool(self.mean_steps or self.momentum_warmup or self.correlation)

    @property
    def planned_momentum(self) -> tuple[tuple[str, int | tuple[int, ...], int | tuple[int, ...]], ...]:
        """(name, value, value that means nothing) of the settings by which the momentum follows the outer step's number."""
        return ("momentum_warmup", self.momentum_warmup, 0), ("momentum_restarts", self.momentum_restarts, ())

    def momentum_at(self, exchange: int) -> float:
        """Return the momentum in force at a fragment's exchange number 0, 1, ... of the run."""
        since = exchange - max((each for each in self.momentum_restarts if each <= exchange), default=0)
        return self.momentum * (since / self.momentum_warmup) if since < self.momentum_warmup else self.momentum


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipConfig:
    """The section [gossip]: an outer step of two peers, with outer.algorithm = "gossip" (NoLoCo, arXiv 2506.10911).

    The defaults of lr and momentum are those of the paper (section 4; it exchanges every 50 inner steps). The default of mixing
    is that of its authors' code.
    """

    # beta: how far the outer parameters follow the pair's mean pseudo-gradient.
    lr: Annotated[float, Positive()] = 0.7
    # alpha: the momentum of each peer's own outer parameters.
    momentum: Annotated[float, Between(0, 0.9999)] = 0.5
    # gamma: how fast the outer parameters of a pair approach their mean.
    mixing: Annotated[float, Positive()] = 0.7
    # The codec of the outer parameters that a peer sends. Smaller ones would need a base that both peers share.
    codec: Annotated[str, OneOf("bf16", "fp32")] = "bf16"
    # Outer steps after which all peers' outer parameters become their mean. 0: only at the end of the run.
    settle_every: Annotated[int, Between(0, 1 << 40)] = 0
    # In a swarm: seconds that a peer waits for its partner before it takes the step alone, and for all others at a settling,
    # where the outer parameters of each must come within as long, of k that come together within k times as long.
    deadline_s: Annotated[float, Between(0.1, 1e6)] = 60.0

    def __post_init__(self) -> None:
        check_bounds("gossip.", self)
        most = 2 * (1 - self.momentum * self.momentum)
        rule = f"must be below 2 (1 - gossip.momentum^2) = {most:g}, or the peers drift apart without bound"
        require(self.mixing < most, "gossip.mixing", self.mixing, rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsConfig:
    """The section [rounds]: when a round opens and closes."""

    # Live peers that the first round waits for before it opens; with gossip in a swarm, the first swap.
    start_peers: Annotated[int, Between(1, 1 << 20)] = 1
    # The number of contributions without which a round never commits.
    quorum: Annotated[int, Between(1, 1 << 20)] = 1
    # The shortest deadline of a round, in seconds.
    floor_s: Annotated[float, Positive()] = 5.0
    # The longest deadline of a round, in seconds.
    ceiling_s: Annotated[float, Positive()] = 600.0
    # k of median + k * MAD: when a peer is overdue by its own measured times.
    spread: Annotated[float, Between(0, 1000)] = 6.0
    # How long a round waits for the missing peers once it has a quorum. `times`: for each until it is overdue, then grace_s
    # longer; `slack`: for grace_s, or for as long as the waiting costs nothing, because the peers that have contributed still
    # train during the exchange (sync.delay).
    wait: Annotated[str, OneOf("times", "slack")] = "times"
    # How much longer a round waits once the quorum is in, in seconds (see `wait`).
    grace_s: Annotated[float, Between(0, 1e6)] = 2.0
    # `rounds`: as above; `arrivals`: each contribution is merged as soon as it is complete, nobody is waited for, and the
    # settings above have no effect.
    merging: Annotated[str, OneOf("rounds", "arrivals")] = "rounds"
    # A contribution computed against outer step s is merged at outer step t as long as t - s does not exceed this, and refused
    # after that. 0: it counts in its own round only; work that misses the round is part of the peer's next contribution.
    max_staleness: Annotated[int, Between(0, 1 << 20)] = 0

    def __post_init__(self) -> None:
        check_bounds("rounds.", self)
        require(
            self.floor_s <= self.ceiling_s,
            "rounds.floor_s",
            self.floor_s,
            f"must not exceed rounds.ceiling_s ({self.ceiling_s})",
        )
        if self.merging == "arrivals":
            rule = 'must be at least 1 with rounds.merging = "arrivals", or only one peer at a time could contribute'
            require(self.max_staleness >= 1, "rounds.max_staleness", self.max_staleness, rule)


def check_together(sync: SyncConfig, rounds: RoundsConfig, outer: OuterConfig, codec: CodecConfig) -> None:
    """Raise ConfigError where these sections contradict each other.

    `eager` estimates an outer step from this peer's own contribution, so the step must be linear in the merged
    pseudo-gradient and the contribution part of it. A contribution that counts later finds its own fragments due only where
    all of them always are. `strict` promises the same bits after an interruption, so nothing may depend on how long
    something took.
    """
    sparse = " or ".join(SPARSE)
    if outer.algorithm == "gossip":
        with_gossip = 'with outer.algorithm = "gossip"'
        rule = f"must be rounds {with_gossip}: there is nobody whom all contributions arrive at"
        require(rounds.merging == "rounds", "rounds.merging", rounds.merging, rule)
        rule = f"must be 0 {with_gossip}: two peers swap at the same outer step, or not at all"
        require(rounds.max_staleness == 0, "rounds.max_staleness", rounds.max_staleness, rule)
        rule = f"must not be eager {with_gossip}: a step follows the partner's parameters, which cannot be estimated"
        require(sync.mode != "eager", "sync.mode", sync.mode, rule)
        rule = f"cannot be kept {with_gossip}: a peer whose partner is away goes on alone"
        require(not sync.strict, "sync.strict", sync.strict, rule)
        rule = f"must be false {with_gossip}: nobody compares the speed of all peers"
        require(not sync.dylu, "sync.dylu", sync.dylu, rule)
        rule = f"must be 0 {with_gossip}: nobody counts the tokens of all peers"
        require(sync.tokens == 0, "sync.tokens", sync.tokens, rule)
    if sync.mode == "eager":
        with_eager = 'with sync.mode = "eager"'
        optimizers = ("sgd", "nesterov")
        rule = f"must be one of {', '.join(optimizers)} {with_eager}"
        require(outer.optimizer in optimizers, "outer.optimizer", outer.optimizer, rule)
        require(outer.direction == "mean", "outer.direction", outer.direction, f"must be mean {with_eager}")
        require(outer.correct == "none", "outer.correct", outer.correct, f"must be none {with_eager}")
        for name, value, off in outer.planned_momentum:
            rule = f"must be {_plain(off)} {with_eager}: the last outer step is expected again, with the same momentum"
            require(value == off, f"outer.{name}", _plain(value), rule)
        rule = f"must be 0 {with_eager}: the last outer step is expected again, with the same momentum"
        require(outer.mean_steps == 0, "outer.mean_steps", outer.mean_steps, rule)
        require(rounds.max_staleness == 0, "rounds.max_staleness", rounds.max_staleness, f"must be 0 {with_eager}")
        for direction, choice in (("up", codec.uplink), ("down", codec.downlink)):
            rule = (
                f"must not be {sparse} {with_eager}, nor in codec.fragments: the next step moves other elements than the last"
            )
            require(choice.names.isdisjoint(SPARSE), f"codec.{direction}", str(choice.default), rule)
        rule = f"must not be {LOCAL} {with_eager}: local parameters that are an estimate of theta have no room for a residual"
        require(codec.up_residual != LOCAL, "codec.up_residual", codec.up_residual, rule)
    if sync.milestones:
        with_milestones = "with sync.milestones"
        rule = f"must be mean {with_milestones}: two peers that swap would have to be at the same outer step"
        require(outer.algorithm == "mean", "outer.algorithm", outer.algorithm, rule)
        rule = f"must be 0 {with_milestones}: a contribution that comes late would be of another H"
        require(rounds.max_staleness == 0, "rounds.max_staleness", rounds.max_staleness, rule)
    rule = "must be 0 without sync.milestones: it has no effect while H stays as it is"
    require(not outer.correlation or bool(sync.milestones), "outer.correlation", outer.correlation, rule)
    rule = f"must be below sync.outer_steps ({sync.outer_steps}), and a multiple of sync.groups ({sync.groups})"
    fits = outer.mean_steps < sync.outer_steps and outer.mean_steps % sync.groups == 0
    require(not outer.mean_steps or fits, "outer.mean_steps", outer.mean_steps, rule)
    rule = 'must be 0 with rounds.merging = "arrivals": there is no mean of peers that arrive one by one'
    require(not outer.mean_steps or rounds.merging == "rounds", "outer.mean_steps", outer.mean_steps, rule)
    if sync.mode == "delayed" and sync.mix == "lerp":
        rule = f'must not be {LOCAL} with sync.mix = "lerp": of what the codec left out only a share would be kept'
        require(codec.up_residual != LOCAL, "codec.up_residual", codec.up_residual, rule)
    if outer.correct == "heloco":
        rule = f'must not be {sparse} with outer.correct = "heloco", nor in codec.fragments: few elements have no direction'
        require(codec.uplink.names.isdisjoint(SPARSE), "codec.up", codec.up, rule)
    if rounds.max_staleness:
        rule = "must be 1 with rounds.max_staleness above 0: a later outer step would exchange other fragments"
        require(sync.groups == 1, "sync.groups", sync.groups, rule)
    for applies, because in (
        (sync.schedule == "time", 'sync.schedule = "time"'),
        (sync.dylu, "sync.dylu = true"),
        (rounds.merging == "arrivals", 'rounds.merging = "arrivals"'),
        (rounds.max_staleness > 0, "rounds.max_staleness above 0"),
    ):
        require(not (sync.strict and applies), "sync.strict", True, f"cannot be kept with {because}: leave it out")
