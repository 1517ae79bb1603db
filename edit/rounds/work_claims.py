"""How much work a contribution counts for. What a peer says of its inner steps and tokens is a claim, and nobody can check it.

    inner steps counted = max(least, min(claimed, most))
    least = H / P with schedule = "steps" and without DyLU: nobody contributes earlier; else 1
    most  = slack * H / P * (max(P, rounds) + 1) + 4 * away / step
    tokens counted = min(claimed, inner steps counted * max(4 * usual, growth * configured))

rounds: so many were closed since this peer last began a contribution to these fragments that was merged; merging by arrivals
only those that were aborted, because nobody waits for the others. Where H changes during the run (sync.milestones), H is the
one in force, but for each of those rounds the one of its outer step, and in `least` the smallest since then; the round that
merged the last contribution counts with the present one: so after H has shrunk, nobody's work counts as much as before. away:
for so many seconds since then the peer was not here: it may have trained on. step: its seconds per inner step as measured here
(`edit.rounds.deadlines`), but no less than a sixteenth of what the others take; a peer that was never measured gets nothing
for its absence. slack: 16 with schedule = "time", where only H says how many steps an outer step counts as; 4 where a
contribution may outlive its round, and training goes on meanwhile. configured: tokens of an inner step by run.toml. usual:
that, or the lower median of what the peers last said, if that is more: a user's own loop may have other batches than run.toml
says, and a region counts the tokens of all its peers. growth: how many times its batch a peer may train with
(inner.batch_growth).

A claim out of bounds is bounded, not refused: work of an honest peer would be lost, and its numbers can be unusual for reasons
that are not known here. So one contribution counts for a few others at most in a weight, in the tokens of the run, in the
detector's level and in the pace of DyLU, whatever it says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median, median_low
from typing import NamedTuple

from edit.config.run import RunConfig, SyncConfig
from edit.rounds.deadlines import Deadlines

__all__ = ["UsualWork", "Work", "WorkBounds", "WorkClaims"]

_PER_STEP = 4  # times the usual tokens
_FASTER = 4  # a peer may train so many times faster while it is away: what was measured has waits in it
_LIKE_OTHERS = 16  # times faster than the others' median, at most
_SLACK_BY_TIME, _SLACK_CARRIED = 16, 4


class Work(NamedTuple):
    """What is behind a contribution."""

    inner_steps: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UsualWork:
    """What the configuration says of it."""

    sync: SyncConfig  # H and P
    at_any_step: bool  # whether a peer may contribute before H / P inner steps
    slack: int
    step_tokens: int  # of one replica, before its batch has grown
    arrivals: bool  # whether contributions are merged as they arrive
    growth: int = 1  # how many times as large a replica's batch may become

    @classmethod
    def of(cls, config: RunConfig) -> UsualWork:
        """Return it for a run's configuration."""
        sync, inner, rounds = config.sync, config.inner, config.rounds
        by_time = sync.schedule == "time"
        return cls(
            sync=sync,
            at_any_step=by_time or sync.dylu,
            slack=_SLACK_BY_TIME if by_time else _SLACK_CARRIED if rounds.max_staleness else 1,
            step_tokens=inner.batch_size * inner.accumulation * config.model.context,
            arrivals=rounds.merging == "arrivals",
            growth=inner.batch_growth,
        )

    def least(self, first: int, outer_step: int) -> int:
        """Return the fewest inner steps of a contribution to `outer_step` by a peer that was at the outer step `first`."""
        return 1 if self.at_any_step else self.sync.least_interval(first, outer_step)

    def most_inner_steps(self, claimed: int, first: int, last: int) -> int:
        """Return the most that a claim may count for, of a contribution to the outer step `first`, begun by the one `last`."""
        changes = (outer_step for outer_step, _ in self.sync.milestones if first < outer_step <= last)
        return max(claimed, *(self.least(outer_step, outer_step) for outer_step in (first, *changes)))

    def most_tokens(self, inner_steps: int, usual: float | None = None) -> int:
        """Return how many tokens so many inner steps count for. usual: of one; None: as configured."""
        per_step = max(_PER_STEP * (self.step_tokens if usual is None else usual), self.growth * self.step_tokens)
        return int(inner_steps * per_step)

    @property
    def groups(self) -> int:
        """P."""
        return self.sync.groups


class Since(NamedTuple):
    """A point in the run, for one peer."""

    steps: int  # H / P of every round that was closed before, added up
    away_s: float  # of the peer, before
    outer_step: int  # the one to be advanced from
    repeated: int = 0  # H / P of a round that is in `steps`, and counts with the present H instead


@dataclass(frozen=True, slots=True)
class WorkBounds:
    """The inner steps that one contribution may count for, decided when it begins; and what was known then."""

    least: int
    most: int
    since: Since  # when it began
    interval: int  # H / P of its outer step

    def inner_steps(self, claimed: int) -> int:
        """Return how many of them count."""
        return max(self.least, min(claimed, self.most))


class WorkClaims:
    """What is known here of the peers' work.

    idle_s: the coordinator stood still for so long before it started; peers may have trained on. outer_step: of the run now.
    """

    def __init__(self, usual: UsualWork, deadlines: Deadlines, idle_s: float = 0.0, outer_step: int = 0) -> None:
        self._usual, self._deadlines, self._idle_s = usual, deadlines, idle_s
        self._outer_step = outer_step
        self._steps = 0  # H / P of every closed round, added up, as far as they count
        self._away_s: dict[str, float] = {}
        self._gone_at: dict[str, float] = {}
        self._since: dict[tuple[str, int], Since] = {}  # by peer and group: when its work began
        self._joined: dict[str, Since] = {}  # when the peer came here for the first time
        self._per_step: dict[str, float] = {}  # tokens of an inner step, as each peer said last

    @property
    def pace(self) -> float:
        """H of the outer step that is to be advanced from, as a multiple of the run's first one."""
        return self._usual.sync.interval_at(self._outer_step) / self._usual.sync.interval

    def appeared(self, peer_id: str, now: float) -> None:
        """The peer is here, and was not before."""
        if peer_id not in self._joined:
            known = self._deadlines.measured_step_s(peer_id) > 0  # from before the coordinator stood still
            self._away_s[peer_id] = self._idle_s if known else 0.0
            self._joined[peer_id] = Since(self._steps, 0.0, self._outer_step)
        elif (gone_at := self._gone_at.pop(peer_id, None)) is not None:
            self._away_s[peer_id] += now - gone_at

    def lost(self, peer_id: str, now: float) -> None:
        """The peer is not here any more."""
        if peer_id in self._joined:
            self._gone_at.setdefault(peer_id, now)

    def closed(self, *, committed: bool) -> None:
        """A round is over; with `committed` the run advances by an outer step."""
        if not (committed and self._usual.arrivals):
            self._steps += self._usual.sync.interval_at(self._outer_step)
        self._outer_step += committed

    def bounds(self, peer_id: str, group: int) -> WorkBounds:
        """Return what a contribution that begins now may count for. group: the first fragment that it exchanges."""
        usual, now = self._usual, Since(self._steps, self._away_s.get(peer_id, 0.0), self._outer_step)
        interval = usual.sync.interval_at(now.outer_step)
        since = self._since.get((peer_id, group)) or self._joined.get(peer_id) or Since(now.steps, 0.0, now.outer_step)
        passed = now.steps - since.steps
        if 0 < since.repeated <= passed:
            passed += interval - since.repeated
        most = usual.slack * (max(usual.groups * interval, passed) + interval)
        most += self._while_away(peer_id, now.away_s - since.away_s)
        return WorkBounds(usual.least(since.outer_step, now.outer_step), most, now, interval)

    def merged(self, peer_id: str, group: int, bounds: WorkBounds) -> None:
        """This peer's contribution became part of a commit: what it trains since it began is the next one's work."""
        self._since[peer_id, group] = bounds.since._replace(repeated=0 if self._usual.arrivals else bounds.interval)

    def counted(self, claims: Mapping[str, Work], bounds: Mapping[str, WorkBounds]) -> dict[str, Work]:
        """Return what the contributions of one round to one fragment count for. claims, bounds: by peer_id."""
        steps = {peer_id: bounds[peer_id].inner_steps(claim.inner_steps) for peer_id, claim in claims.items()}
        self._per_step |= {peer_id: claim.tokens / steps[peer_id] for peer_id, claim in claims.items()}
        usual = float(self._usual.step_tokens)
        if len(self._per_step) > 1:
            usual = max(usual, median_low(self._per_step.values()))
        most = {peer_id: self._usual.most_tokens(steps[peer_id], usual) for peer_id in claims}
        return {peer_id: Work(steps[peer_id], min(claim.tokens, most[peer_id])) for peer_id, claim in claims.items()}

    def _while_away(self, peer_id: str, away_s: float) -> int:
        step_s = self._deadlines.measured_step_s(peer_id)
        if not (away_s > 0 and step_s > 0):
            return 0
        others = [seconds for other in self._joined if other != peer_id and (seconds := self._deadlines.measured_step_s(other))]
        return int(_FASTER * away_s / max(step_s, median(others) / _LIKE_OTHERS if others else 0.0))
