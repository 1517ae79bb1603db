"""What was seen of a run from outside, in order: commits, reported digests, incidents, memory. Times are unix seconds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edit.lab.chaos.faults import Fault, Kind
from edit.lab.processes import COORDINATOR

__all__ = ["Accusation", "Claim", "Commit", "Files", "History", "Incident", "Memory", "Recovered"]

_REFUSED = re.compile(r"refused: ([^;)]*)")  # of a round's reason: whose bytes were bad
_IN_ORDER = {"invited", "starting", "training", "exchanging", "lost", "left"}  # states of a member in good standing

LINE_STEPS = 10  # a peer's metrics file has a line at every tenth inner step


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit, from a line of the coordinator's metrics."""

    opened: float  # when its round was opened
    t: float  # when it was committed
    outer_step: int
    round_id: int
    digest: str
    weights: Mapping[str, float]  # by peer, the largest over the fragments


@dataclass(frozen=True, slots=True)
class Claim:
    """A report that the outer parameters of `who` at `outer_step` have this digest."""

    t: float
    who: str
    life: int  # which of its processes, from 0
    outer_step: int
    digest: str
    own: bool  # from its own file, in order; else from the coordinator's, where a late one may be of an earlier life


@dataclass(frozen=True, slots=True)
class Recovered:
    """What the folder of a coordinator held when it was killed, or at the end of the run."""

    t: float
    outer_step: int
    digest: str
    finite: bool = True  # every value of theta


@dataclass(frozen=True, slots=True)
class Memory:
    """A sample of the coordinator's resident memory."""

    t: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Files:
    """A sample of the sizes of what the coordinator writes."""

    t: float
    log_bytes: int
    state_bytes: int  # its folder, without the metrics


@dataclass(frozen=True, slots=True)
class Accusation:
    """The coordinator says that an honest peer misbehaved."""

    t: float
    who: str
    text: str


@dataclass(slots=True)
class Incident:
    """A fault that was injected."""

    fault: Fault
    began: float
    ended: float | None = None  # when it was repaired; None before

    def __str__(self) -> str:
        return str(self.fault)


@dataclass(slots=True)
class _Steps:
    """Inner steps of one life of a peer, from its file."""

    last: int = 0
    lines: int = 0
    restarts: int = 0  # without a new life: its torchrun has restarted the ranks
    killed: bool = False

    def add(self, step: int) -> None:
        """Add a line."""
        self.restarts += step <= self.last
        self.last, self.lines = step, self.lines + 1

    @property
    def made(self) -> int:
        """About: the most that its lines stand for and, if it was killed, the most that came after the last."""
        return LINE_STEPS * self.lines + (LINE_STEPS - 1 if self.killed else 0)


@dataclass(slots=True)
class History:
    """Everything seen so far."""

    peers: tuple[str, ...]
    step_tokens: int  # tokens of one inner step
    hostile: tuple[str, ...] = ()
    tokens: int = 0  # merged so far, from the coordinator's status
    answered: float | None = None  # when the coordinator last told its status
    commits: list[Commit] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    recovered: list[Recovered] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    files: list[Files] = field(default_factory=list)
    accusations: list[Accusation] = field(default_factory=list)
    aborted: int = 0
    lives: dict[str, int] = field(default_factory=dict)  # the number of each one's present process, from 0
    _steps: dict[tuple[str, int], _Steps] = field(default_factory=dict)
    _said: dict[str, tuple[int, int, str, bool]] = field(default_factory=dict)

    def started(self, who: str) -> None:
        """Note that a new process of this name was started."""
        self.lives[who] = self.lives.get(who, -1) + 1

    def was_killed(self, who: str) -> None:
        """Note that its process was killed."""
        if (steps := self._steps.get((who, self.life(who)))) is not None:
            steps.killed = True

    def life(self, who: str) -> int:
        return self.lives.get(who, 0)

    def take(self, source: str, line: Mapping[str, Any]) -> None:
        """Add one line of the metrics file of `source`, the coordinator or a peer. Other kinds of lines are ignored."""
        match line.get("kind"):
            case "round":
                self._round(line)
            case "outer":
                self._claim(source, line, own=True)
            case "peer" if line.get("digest"):
                self._claim(str(line["peer_id"]), line, own=False)
            case "member" if line["state"] not in _IN_ORDER:
                self._accuse(float(line["t"]), str(line["peer_id"]), f"{line['state']} ({line['reason']})")
            case "step" if source != COORDINATOR:
                self._step(source, int(line["step"]))

    def _round(self, line: Mapping[str, Any]) -> None:
        for refused in _REFUSED.findall(str(line.get("reason", ""))):
            for name in refused.split(", "):
                self._accuse(float(line["t"]), name.removesuffix(" in part"), f"refused in round {line['round_id']}")
        if not line["committed"]:
            self.aborted += 1
            return
        weights: dict[str, float] = {}
        for fragment in line["verdicts"]:
            for peer, (_, _, weight) in fragment["peers"].items():
                weights[peer] = max(weights.get(peer, 0.0), float(weight))
        t, seconds = float(line["t"]), float(line["seconds"])
        self.commits.append(Commit(t - seconds, t, line["outer_step"], line["round_id"], line["digest"], weights))

    def _accuse(self, t: float, who: str, text: str) -> None:
        if who in self.peers:
            self.accusations.append(Accusation(t, who, text))

    def _claim(self, who: str, line: Mapping[str, Any], own: bool) -> None:
        self.digest_reported(who, float(line["t"]), int(line["outer_step"]), str(line["digest"]), own)

    def digest_reported(self, who: str, t: float, outer_step: int, digest: str, own: bool = True) -> None:
        """Add a claim, unless it repeats the last one of `who`."""
        said = (self.life(who), outer_step, digest, own)
        if self._said.get(who) != said:
            self._said[who] = said
            self.claims.append(Claim(t, who, *said))

    def _step(self, who: str, step: int) -> None:
        self._steps.setdefault((who, self.life(who)), _Steps()).add(step)

    # ---- derived values -------------------------------------------------------------------------------------------------

    @property
    def inner_steps_made(self) -> int:
        """Of all lives of all peers, about: those after the last line of a life that was not killed are left out."""
        return sum(steps.made for steps in self._steps.values())

    @property
    def inner_steps_at_most(self) -> int:
        """Never fewer than were made: each line stands for the steps since the one before, and every process, even one without
        a line, may have made more steps after its last."""
        lines = sum(steps.lines for steps in self._steps.values())
        processes = sum(self.life(peer) + 1 for peer in self.peers) + sum(steps.restarts for steps in self._steps.values())
        return LINE_STEPS * lines + (LINE_STEPS - 1) * processes

    @property
    def inner_steps_counted(self) -> int:
        """Those whose tokens were merged with a weight."""
        return self.tokens // self.step_tokens

    @property
    def participation(self) -> float:
        """The mean number of honest peers with a weight in a commit."""
        counted = sum(commit.weights.get(peer, 0.0) > 0 for commit in self.commits for peer in self.peers)
        return counted / len(self.commits) if self.commits else 0.0

    def commit_after(self, t: float, peer: str | None = None) -> Commit | None:
        """Return the first commit after `t`; with `peer`, the first in which it has a weight."""
        later = (commit for commit in self.commits if commit.t > t)
        return next((commit for commit in later if peer is None or commit.weights.get(peer, 0.0) > 0), None)

    def returned(self, incident: Incident) -> Commit | None:
        """Return the first commit after the repair in which the target has a weight.

        The round that was open when a peer was killed does not count: it may contain what the peer sent before.
        """
        if incident.ended is None:
            return None
        since = incident.began if incident.fault.kind.kills else 0.0
        peer, later = incident.fault.target, (commit for commit in self.commits if commit.t > (incident.ended or 0.0))
        return next((commit for commit in later if commit.opened > since and commit.weights.get(peer, 0.0) > 0), None)

    def incidents_of(self, kind: Kind) -> list[Incident]:
        return [incident for incident in self.incidents if incident.fault.kind is kind]
