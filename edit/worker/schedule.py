"""When a peer exchanges: counted in optimizer steps or in seconds, decided at a step's boundary, once per round.

Sans-IO: it is told what happened and when, and answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edit.errors import LocalProtocolError, StorageError

__all__ = ["SyncSchedule", "Work"]


@dataclass(frozen=True, slots=True)
class Work:
    """The inner steps and tokens behind a pseudo-gradient."""

    inner_steps: int = 0
    tokens: int = 0


class SyncSchedule:
    """Counts one peer's inner steps and says when to exchange. every: inner steps from one contribution to the next.

    Two counts differ: `round_inner_steps` starts again with every contribution, whatever becomes of it (so the next attempt
    comes `every` steps later); `work`, kept for each of `groups` groups of fragments, is what no commit has merged yet (so a
    contribution is weighted by all steps since its own group was merged, after a lost round and with streaming fragments).

    interval_s: None, or seconds after which to contribute instead (A-EDiT), whatever the number of steps. `now`: of one
    monotonic clock in float64 seconds; means nothing without interval_s. The deadline is counted from the COMPLETION of the
    last exchange (`completed`): counted from when the peer arrived at it, a fast peer's idle time would grow with every round.
    """

    def __init__(self, every: int, groups: int = 1, interval_s: float | None = None) -> None:
        self._every = every
        self._interval_s = interval_s
        self._deadline = self._wait_again = float("-inf")
        self._inner_steps = 0
        self._round_inner_steps = 0
        self._work = [Work()] * groups

    @property
    def every(self) -> int:
        """Inner steps from one contribution to the next."""
        return self._every

    @property
    def inner_steps(self) -> int:
        """All optimizer steps counted so far."""
        return self._inner_steps

    @property
    def round_inner_steps(self) -> int:
        """Optimizer steps since the last contribution."""
        return self._round_inner_steps

    def work(self, group: int = 0) -> Work:
        """What stands behind the present difference between outer and local parameters of that group."""
        return self._work[group]

    def due(self, now: float = 0.0) -> bool:
        """Whether to contribute now, provided that nothing is pending."""
        if self._interval_s is None:
            return self._round_inner_steps >= self._every
        return self._round_inner_steps > 0 and now >= self._deadline

    def at_boundary(self, now: float = 0.0) -> bool:
        """Whether just now a multiple of `every`, or of interval_s, is full: the moment to wait for an outcome that is open."""
        if self._interval_s is None:
            return self._round_inner_steps > 0 and self._round_inner_steps % self._every == 0
        return self.due(now) and now >= self._wait_again

    def waited(self, now: float) -> None:
        """An outcome was waited for and did not come: the next moment to wait for it is interval_s later."""
        if self._interval_s is not None:
            self._wait_again = now + self._interval_s

    def adopt(self, every: int) -> None:
        """From now on contribute every so many inner steps (DyLU, or H that changes during the run)."""
        self._every = every

    def completed(self, now: float) -> None:
        """An exchange is over, or training begins: the next one is due interval_s later."""
        if self._interval_s is not None:
            self._deadline = now + self._interval_s

    def count_steps(self, steps: int = 1) -> None:
        """So many optimizer steps were taken."""
        self._inner_steps += steps
        self._round_inner_steps += steps
        self._work = [Work(work.inner_steps + steps, work.tokens) for work in self._work]

    def count_tokens(self, tokens: int) -> None:
        """So many tokens were trained on."""
        if tokens < 0:
            raise LocalProtocolError(f"count_tokens({tokens}): tokens cannot be negative")
        self._work = [Work(work.inner_steps, work.tokens + tokens) for work in self._work]

    def contributed(self, group: int = 0, now: float = 0.0) -> Work:
        """A contribution of that group goes out; returns the work behind it."""
        self._round_inner_steps = 0
        self.completed(now)  # without an outcome, the next moment to wait for it; with one, counted from now
        return self._work[group]

    def merged(self, work: Work, group: int = 0) -> None:
        """A commit took (or threw away) that contribution: what remains is the work done since."""
        before = self._work[group]
        self._work[group] = Work(before.inner_steps - work.inner_steps, before.tokens - work.tokens)

    def dropped(self, group: int = 0) -> None:
        """The work of that group is dropped, also what was done since a contribution.

        Where nothing is left for the next contribution it comes half of `every` steps from now, or later: with a few steps
        behind it it would count as idle, or as much as those of others.
        """
        self._work[group] = Work()
        if len(self._work) == 1:
            self._round_inner_steps = min(self._round_inner_steps, self._every // 2)

    def abandoned(self) -> None:
        """The work that no commit has merged is dropped, and the count towards the next contribution starts again."""
        self._round_inner_steps = 0
        self._work = [Work()] * len(self._work)

    def state(self) -> dict[str, Any]:
        """The counters, JSON-able, for a checkpoint."""
        return {
            "every": self._every,
            "inner_steps": self._inner_steps,
            "round_inner_steps": self._round_inner_steps,
            "work": [[work.inner_steps, work.tokens] for work in self._work],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Count on from what `state` gave. Raises StorageError when that does not fit."""
        try:
            counters = int(state["inner_steps"]), int(state["round_inner_steps"])
            work = [Work(int(steps), int(tokens)) for steps, tokens in state["work"]]
        except (KeyError, TypeError, ValueError) as error:
            raise StorageError(f"checkpoint: the counters of inner steps are damaged ({error})") from error
        if len(work) != len(self._work):
            raise StorageError(f"checkpoint: written with {len(work)} groups of fragments, this run has {len(self._work)}")
        self._inner_steps, self._round_inner_steps = counters
        self._work = work
