"""What was seen of a run from outside, in order: commits, claims about digests, faults, memory.

Owns: the facts and how lines of metrics files become facts. Must not know: which of them are wrong (`invariants`), processes.
Times are unix seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edit.lab.chaos.faults import Fault, Kind
from edit.lab.processes import COORDINATOR

__all__ = ["Blow", "Claim", "Commit", "History", "Memory", "Recovered"]

LINE_STEPS = 10  # a peer's metrics file has a line at every tenth inner step


@dataclass(frozen=True, slots=True)
class Commit:
    """A line of the coordinator's metrics: outer step `outer_step` was committed. weights: by peer, the largest it had.

    opened: when its round was; t: when it was committed.
    """

    opened: float
    t: float
    outer_step: int
    round_id: int
    digest: str
    weights: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Claim:
    """`who` said that its outer parameters of `outer_step` have this digest. life: which of its processes, from 0.

    own: in its own words, which are in order; else in the coordinator's, who may hear the last ones of a life in the next.
    """

    t: float
    who: str
    life: int
    outer_step: int
    digest: str
    own: bool


@dataclass(frozen=True, slots=True)
class Recovered:
    """What the folder of a dead coordinator held, read before the next one was started."""

    t: float
    outer_step: int
    digest: str


@dataclass(frozen=True, slots=True)
class Memory:
    """The coordinator's resident size."""

    t: float
    bytes: int


@dataclass(slots=True)
class Blow:
    """A fault that was really done. began: unix seconds; ended: when it was repaired, None as long as it is not."""

    fault: Fault
    began: float
    ended: float | None = None

    def __str__(self) -> str:
        return str(self.fault)


@dataclass(slots=True)
class _Steps:
    """Inner steps of one life of a peer, as far as its file tells."""

    first: int
    last: int
    killed: bool = False

    @property
    def made(self) -> int:
        """Never too few: before the first line and, if it was killed, after the last there may have been more."""
        return self.last - self.first + LINE_STEPS + (LINE_STEPS - 1 if self.killed else 0)


@dataclass(slots=True)
class History:
    """Everything seen so far.

    peers: who takes part; step_tokens: behind one inner step; tokens: merged so far, as the coordinator says.
    """

    peers: tuple[str, ...]
    step_tokens: int
    tokens: int = 0
    commits: list[Commit] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    blows: list[Blow] = field(default_factory=list)
    recovered: list[Recovered] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    aborted: int = 0
    lives: dict[str, int] = field(default_factory=dict)
    _steps: dict[tuple[str, int], _Steps] = field(default_factory=dict)
    _said: dict[str, tuple[int, int, str, bool]] = field(default_factory=dict)

    def started(self, who: str) -> None:
        """A new process of this name runs from here on."""
        self.lives[who] = self.lives.get(who, -1) + 1

    def was_killed(self, who: str) -> None:
        """Its process died in the middle of whatever it did."""
        if (steps := self._steps.get((who, self.life(who)))) is not None:
            steps.killed = True

    def life(self, who: str) -> int:
        return self.lives.get(who, 0)

    def take(self, source: str, line: Mapping[str, Any]) -> None:
        """One line of the metrics file of `source`, the coordinator or a peer. Other kinds of lines mean nothing here."""
        match line.get("kind"):
            case "round":
                self._round(line)
            case "outer":
                self._claim(source, line, own=True)
            case "peer" if line.get("digest"):
                self._claim(str(line["peer_id"]), line, own=False)
            case "step" if source != COORDINATOR:
                self._step(source, int(line["step"]))

    def _round(self, line: Mapping[str, Any]) -> None:
        if not line["committed"]:
            self.aborted += 1
            return
        weights: dict[str, float] = {}
        for fragment in line["verdicts"]:
            for peer, (_, _, weight) in fragment["peers"].items():
                weights[peer] = max(weights.get(peer, 0.0), float(weight))
        t, seconds = float(line["t"]), float(line["seconds"])
        self.commits.append(Commit(t - seconds, t, line["outer_step"], line["round_id"], line["digest"], weights))

    def _claim(self, who: str, line: Mapping[str, Any], own: bool) -> None:
        self.told(who, float(line["t"]), int(line["outer_step"]), str(line["digest"]), own)

    def told(self, who: str, t: float, outer_step: int, digest: str, own: bool = True) -> None:
        """Somebody says what it has; saying the same again is nothing new."""
        said = (self.life(who), outer_step, digest, own)
        if self._said.get(who) != said:
            self._said[who] = said
            self.claims.append(Claim(t, who, *said))

    def _step(self, who: str, step: int) -> None:
        seen = self._steps.setdefault((who, self.life(who)), _Steps(step, step))
        seen.last = max(seen.last, step)

    # ---- what follows from it -------------------------------------------------------------------------------------------

    @property
    def inner_steps_made(self) -> int:
        """By all lives of all peers; rather too many than too few."""
        return sum(steps.made for steps in self._steps.values())

    @property
    def inner_steps_counted(self) -> int:
        """Behind what was merged with a weight."""
        return self.tokens // self.step_tokens

    @property
    def participation(self) -> float:
        """Peers with a weight per commit, on average."""
        counted = sum(weight > 0 for commit in self.commits for weight in commit.weights.values())
        return counted / len(self.commits) if self.commits else 0.0

    def commit_after(self, t: float, peer: str | None = None) -> Commit | None:
        """The first commit after `t`; with `peer`, the first in which it has a weight."""
        later = (commit for commit in self.commits if commit.t > t)
        return next((commit for commit in later if peer is None or commit.weights.get(peer, 0.0) > 0), None)

    def returned(self, blow: Blow) -> Commit | None:
        """The first commit with the peer that was struck, after the repair. What it had sent before it died may still be in
        that of the round that was open then, which does not count."""
        if blow.ended is None:
            return None
        since = blow.began if blow.fault.kind.kills else 0.0
        peer, later = blow.fault.target, (commit for commit in self.commits if commit.t > (blow.ended or 0.0))
        return next((commit for commit in later if commit.opened > since and commit.weights.get(peer, 0.0) > 0), None)

    def blows_of(self, kind: Kind) -> list[Blow]:
        return [blow for blow in self.blows if blow.fault.kind is kind]
