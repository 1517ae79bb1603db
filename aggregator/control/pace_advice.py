"""What the members' reports and the settings mean together: each peer's pace, and what cannot work; said once in the log.

Owns: what was said already. Decides nothing itself (`aggregator.control.pacing`). Must not know: views, connections, rounds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from aggregator.control.membership import Member
from aggregator.control.pacing import dylu_steps, fastest, impossible, too_slow
from edit.config.run import RunConfig

__all__ = ["PaceAdvice"]

_log = logging.getLogger(__name__)


class PaceAdvice:
    """reason: why no round can ever commit, or ''."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._slow: set[str] = set()
        self._fastest_s = 0.0
        self.reason = ""

    def look(self, members: Iterable[Member], outer_step: int | None, joined: int) -> None:
        """Take the moment: everybody ever seen, the run's outer step (None: it has no parameters yet, so peers are still to
        come), how many peers have certificates that count."""
        self._fastest_s = fastest(one.heartbeat.step_s for one in members if one.live and one.heartbeat is not None)
        reason = impossible(self._config.rounds, outer_step, joined) if outer_step is not None else ""
        if reason and reason != self.reason:
            _log.warning("%s", reason)
        self.reason = reason

    def inner_steps(self, member: Member | None) -> int:
        """DyLU: how many this member is to take until its next contribution; 0: as configured."""
        if not self._config.sync.dylu or member is None or member.heartbeat is None:
            return 0
        return dylu_steps(self._config.sync.interval, member.heartbeat.step_s, self._fastest_s)

    def hear(self, peer_id: str, step_s: float) -> None:
        """What this member measured does not fit into the longest deadline: said once of each member."""
        if peer_id not in self._slow and (warning := too_slow(self._config, step_s)):
            self._slow.add(peer_id)
            _log.warning("%s: %s", peer_id, warning)
