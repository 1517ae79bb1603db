"""What was seen of a swarm under faults, and what must hold. Times are unix seconds.

one digest        every part has one digest at every outer step, whoever reports it, in whichever way
committed once    an owner's lines have one round for each outer step of a part
never backwards   no process goes back to an earlier outer step of a part
nothing is lost   some member's folder always names the latest outer step of each part that anybody reported
it advances       while at most `spare` members are out, each part takes another outer step within a bound
all come back     and a member that was disturbed takes one within a bound
bounded           logs grow slowly, memory is flat
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from edit.lab.chaos.invariants import Violation

__all__ = ["SwarmBounds", "SwarmHistory"]

_LOG_RATE = 2000.0  # bytes per second and member
_LOG_S = 60.0  # over so long
_FLAT = 1.3  # the largest memory of a host in the last third of the run, relative to that in the middle third
_FEW = 60  # with fewer samples in a third, memory is not judged


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmBounds:
    """How long things may take, and how many members may be out without holding up the others."""

    advance_s: float
    return_s: float
    spare: int


@dataclass(slots=True)
class SwarmHistory:
    """Everything seen so far. A member is called by its slot, whatever name it has at the time."""

    members: tuple[str, ...]
    parts: int
    digests: dict[tuple[int, int], tuple[str, str]] = field(default_factory=dict)  # by part and step: digest, who said so
    rounds: dict[tuple[int, int], int] = field(default_factory=dict)  # by part and step
    reached: dict[int, int] = field(default_factory=dict)  # the latest outer step by part
    advanced: dict[int, float] = field(default_factory=dict)  # when it came
    stepped: dict[str, float] = field(default_factory=dict)  # when a member last took an outer step
    out: dict[str, float] = field(default_factory=dict)  # members that are disturbed, or not back yet: since when
    repaired: dict[str, float] = field(default_factory=dict)  # when the disturbance of one that is out ended
    missed: dict[str, dict[int, int]] = field(default_factory=dict)  # what `reached` was then: only a later step counts
    lives: dict[str, int] = field(default_factory=dict)
    memory: list[int] = field(default_factory=list)  # of the largest host
    logs: deque[tuple[float, int]] = field(default_factory=deque)  # of the last minute: when, bytes of all
    reports: int = 0
    aborted: int = 0
    recovery_s: list[float] = field(default_factory=list)  # from a repair to the member's next outer step
    pauses_s: list[float] = field(default_factory=list)  # between two outer steps of a part, the longest of each fault
    _at: dict[tuple[str, int, int], int] = field(default_factory=dict)  # by member, life and part
    _calm: float = 0.0  # since when no more than `spare` members have been out

    def started(self, who: str) -> None:
        """Note that a new process of this member was started."""
        self.lives[who] = self.lives.get(who, -1) + 1

    def disturbed(self, who: str, t: float) -> None:
        """Note that a fault hits this member."""
        self.out[who] = t
        self.repaired.pop(who, None)

    def repair(self, who: str, t: float) -> None:
        """Note that its fault has ended."""
        self.repaired[who], self.missed[who] = t, dict(self.reached)

    def peer_line(self, who: str, line: Mapping[str, Any]) -> Iterator[Violation]:
        """Take a line of a peer's own metrics."""
        if line.get("kind") != "outer":
            return
        part, step, t = int(line["aggregator"]), int(line["outer_step"]), float(line["t"])
        key = (who, self.lives.get(who, 0), part)
        if step < self._at.get(key, 0):
            text = f"{who} went from outer step {self._at[key]} of part {part} back to {step}"
            yield Violation("the outer step never decreases", t, text, (who,))
        if step > self._at.get(key, -1):
            self._step(who, part, step, t)
        self._at[key] = max(self._at.get(key, 0), step)
        yield from self._digest(who, part, step, str(line["digest"]), t)

    def owner_line(self, who: str, part: int, line: Mapping[str, Any]) -> Iterator[Violation]:
        """Take a line that a member wrote as the owner of a part."""
        if line.get("kind") != "round":
            return
        if not line["committed"]:
            self.aborted += 1
            return
        step, round_id, t = int(line["outer_step"]), int(line["round_id"]), float(line["t"])
        if self.rounds.setdefault((part, step), round_id) != round_id:
            text = f"outer step {step} of part {part} is round {self.rounds[part, step]} and, at {who}, round {round_id}"
            yield Violation("every outer step is committed once", t, text, (who,))
        yield from self._digest(who, part, step, str(line["digest"]), t)

    def _digest(self, who: str, part: int, step: int, digest: str, t: float) -> Iterator[Violation]:
        self.reports += 1
        known, first = self.digests.setdefault((part, step), (digest, who))
        if known != digest:
            text = f"part {part} at outer step {step} is {known[:12]} at {first} and {digest[:12]} at {who}"
            yield Violation("digests are equal", t, text, (first, who))
        if step > self.reached.get(part, 0):
            if part in self.advanced:
                self.pauses_s.append(t - self.advanced[part])
            self.reached[part], self.advanced[part] = step, t

    def _step(self, who: str, part: int, step: int, t: float) -> None:
        self.stepped[who] = max(t, self.stepped.get(who, 0.0))
        if who in self.repaired and step > self.missed[who].get(part, 0):
            self.recovery_s.append(t - self.repaired.pop(who))
            self.out.pop(who, None)

    def records(self, steps: Mapping[int, int], t: float) -> Iterator[Violation]:
        """Take the latest outer step of each part that any folder names, read after all that was reported before."""
        for part, reported in self.reached.items():
            if steps.get(part, 0) < reported:
                text = f"outer step {reported} of part {part} was reported, and the folders name {steps.get(part, 0)}"
                yield Violation("no commit is lost", t, text, self.members)

    def sizes(self, t: float, log_bytes: int, memory_bytes: int) -> Iterator[Violation]:
        """Take the size of all logs, and of the largest host's memory."""
        self.memory.append(memory_bytes)
        self.logs.append((t, log_bytes))
        while t - self.logs[0][0] > _LOG_S:
            self.logs.popleft()
        if (grown := log_bytes - self.logs[0][1]) > _LOG_RATE * _LOG_S * len(self.members):
            yield Violation("logs grow slowly", t, f"they grew by {grown / 1e3:.0f} kB in a minute", self.members)

    def late(self, bounds: SwarmBounds, now: float) -> Iterator[Violation]:
        """Yield what should have happened by now."""
        if len(self.out) > bounds.spare:
            self._calm = now
        for part in range(self.parts):
            if now > (due := max(self.advanced.get(part, 0.0), self._calm) + bounds.advance_s):
                text = f"part {part} took no outer step within {bounds.advance_s:.0f} s; out: {', '.join(self.out) or 'nobody'}"
                yield Violation("the swarm advances", due, text, self.members)
        for who, t in self.repaired.items():
            if now > (due := max(t, self._calm) + bounds.return_s):
                text = f"{who} took no outer step within {bounds.return_s:.0f} s of its repair"
                yield Violation("a disturbed member comes back", due, text, (who,))

    def at_end(self, now: float) -> Iterator[Violation]:
        """Yield what is broken once all has ended."""
        third = len(self.memory) // 3
        if third < _FEW:
            return
        middle, last = max(self.memory[third : 2 * third]), max(self.memory[2 * third :])
        if last > _FLAT * middle:
            text = f"the largest host grew from {middle / 1e6:.0f} MB (middle third) to {last / 1e6:.0f} MB (last third)"
            yield Violation("memory is flat", now, text, self.members)
