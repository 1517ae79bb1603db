"""The inner steps of one simulated peer: those made, the phase of training that is under way, and those that the run has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from edit.lab.simulation.accounting import Share
from edit.lab.simulation.pace import Pace

__all__ = ["Training", "Work"]


class Training:
    """`trained`: inner steps of all lives. A phase is so many steps in a row."""

    __slots__ = ("_begin", "_end", "_pace", "_steps", "trained")

    def __init__(self, pace: Pace) -> None:
        self.trained = 0
        self._pace = pace
        self._begin = self._end = 0.0
        self._steps = 0  # of the phase; 0: none is under way

    def begin(self, steps: int, now: float) -> float:
        """A phase begins; when it will end."""
        self._begin, self._steps = now, steps
        self._end = self._pace.finish(steps, now)
        return self._end

    def so_far(self, now: float) -> tuple[int, float]:
        """Whole inner steps, and seconds, of the present phase."""
        steps, begin, end = self._steps, self._begin, self._end
        if not steps:
            return 0, 0.0
        return (steps if now >= end else int(steps * (now - begin) / (end - begin))), now - begin

    def end(self, now: float) -> tuple[int, float]:
        """The phase is over: its `so_far`, counted."""
        steps, seconds = self.so_far(now)
        self.trained += steps
        self._steps = 0
        return steps, seconds

    def cut_short(self, when: float, now: float) -> float | None:
        """End the phase at the first step boundary from `when` on; None: it ends no later than that as it is."""
        if not self._steps:
            return None
        per_step = (self._end - self._begin) / self._steps
        fewer = max(1, -int((self._begin - when) // per_step))
        if fewer >= self._steps:
            return None
        self._steps, self._end = fewer, max(self._begin + fewer * per_step, now)
        return self._end


class Work:
    """By fragment: the peer's inner steps that are not to be brought any more, and from which outer step the rest began."""

    __slots__ = ("_based", "_known")

    def __init__(self, fragments: int) -> None:
        self._known, self._based = [0] * fragments, [0] * fragments

    def shares(self, fragments: Sequence[int], trained: int) -> list[tuple[int, Share]]:
        """What a contribution brings, made after so many inner steps."""
        return [(i, Share(self._known[i], trained, self._based[i])) for i in fragments]

    def merged(self, shares: Iterable[tuple[int, Share]], trained: int, outer_step: int, *, dropped: bool = False) -> None:
        """The commit TO `outer_step` has these; training has gone on to `trained` since, from the step before, if at all.

        dropped: what was done since is dropped.
        """
        for i, share in shares:
            self._known[i] = trained if dropped else share.until
            self._based[i] = outer_step if trained == self._known[i] else outer_step - 1

    def in_doubt(self, shares: Iterable[tuple[int, Share]], outer_step: int | None = None) -> None:
        """Nobody can tell whether the run has these: never bring them again. outer_step: of the snapshot that was taken."""
        for i, share in shares:
            self._known[i] = share.until
            if outer_step is not None:
                self._based[i] = outer_step

    def lose(self, steps: int, trained: int) -> None:
        """The last inner steps are lost with the process."""
        self._known = [min(trained, known + steps) for known in self._known]

    def begin_anew(self, trained: int, outer_step: int) -> None:
        """Nothing is left to bring; what comes begins from a snapshot."""
        self._known = [trained] * len(self._known)
        self._based = [outer_step] * len(self._based)
