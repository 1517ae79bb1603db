"""When a peer exchanges: counted in optimizer steps, decided at their boundary, once per round.

Owns: the counters of inner steps and tokens, and which work stands behind a contribution. Sans-IO: it is told what happened and
answers; no clock, no model. Must not know: parameters, carriers, what a round is.
"""

from __future__ import annotations

from dataclasses import dataclass

from edit.errors import ConfigError, LocalProtocolError

__all__ = ["PATTERNS", "SyncSchedule", "Work", "due", "fragments_due"]

PATTERNS = ("sequential", "strided")


def due(steps: int, every: int) -> bool:
    """Whether a contribution is due after `steps` inner steps since the last one."""
    return steps >= every


def fragments_due(outer_step: int, fragments: int, groups: int, pattern: str) -> tuple[int, ...]:
    """The fragment ids that the advance FROM `outer_step` exchanges: group `outer_step mod groups`, ascending.

    Streaming DiLoCo (arXiv 2501.18512, section 2.2): P groups, each exchanged every H steps, H / P steps after the one before.
    sequential: neighbouring fragments form a group; strided: every P-th fragment. One group: all fragments, each outer step.
    Raises ConfigError when there are more groups than fragments.
    """
    if not 1 <= groups <= fragments:
        raise ConfigError(f"sync.groups = {groups}: the model has {fragments} fragments, so at most {fragments} groups")
    group = outer_step % groups
    if pattern == "strided":
        return tuple(range(group, fragments, groups))
    return tuple(i for i in range(fragments) if i * groups // fragments == group)


@dataclass(frozen=True, slots=True)
class Work:
    """The inner steps and tokens behind a pseudo-gradient."""

    inner_steps: int = 0
    tokens: int = 0


class SyncSchedule:
    """Counts one peer's inner steps and says when to exchange.

    Two counts differ after a lost round: `round_inner_steps` starts again with every contribution (so the next attempt comes
    `every` steps later), `work` keeps what no commit has merged yet (so the next contribution is weighted by all of it).
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._inner_steps = 0
        self._round_inner_steps = 0
        self._work = Work()

    @property
    def inner_steps(self) -> int:
        """All optimizer steps counted so far."""
        return self._inner_steps

    @property
    def round_inner_steps(self) -> int:
        """Optimizer steps since the last contribution."""
        return self._round_inner_steps

    @property
    def work(self) -> Work:
        """What stands behind the present difference between outer and local parameters."""
        return self._work

    @property
    def due(self) -> bool:
        """Whether to contribute now, provided that nothing is pending."""
        return due(self._round_inner_steps, self._every)

    @property
    def at_boundary(self) -> bool:
        """Whether just now a multiple of `every` is full: the moment to wait for an outcome that is still open."""
        return self._round_inner_steps > 0 and self._round_inner_steps % self._every == 0

    def count_step(self) -> None:
        """One optimizer step was taken."""
        self._inner_steps += 1
        self._round_inner_steps += 1
        self._work = Work(self._work.inner_steps + 1, self._work.tokens)

    def count_tokens(self, tokens: int) -> None:
        """So many tokens were trained on."""
        if tokens < 0:
            raise LocalProtocolError(f"count_tokens({tokens}): tokens cannot be negative")
        self._work = Work(self._work.inner_steps, self._work.tokens + tokens)

    def contributed(self) -> Work:
        """A contribution goes out; returns the work behind it."""
        self._round_inner_steps = 0
        return self._work

    def merged(self, work: Work) -> None:
        """A commit took (or threw away) that contribution: what remains is the work done since."""
        self._work = Work(self._work.inner_steps - work.inner_steps, self._work.tokens - work.tokens)
