"""When the coordinator of a finished run ends: once nobody needs the last outer step from it any more. Sans-IO.

The run is finished, and                            it ends
--------------------------------------------------  ---------------------------------------------
every peer has said goodbye                         at once, where all peers are known; `TOLD_S` after it finished,
                                                    where somebody looks on (`status --watch`, `watch`, a page)
some have not, and nobody attends                   `ABSENT_S` after it finished, or after the last one broke off
some attend                                         `LONGEST_S` after it finished: a stream that never ends holds nothing up

A further aggregator is not told who was enrolled: peers that have not been there yet may still come, so it waits as for one
that has not said goodbye.
"""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["ABSENT_S", "LONGEST_S", "LOOKS_ON_S", "TOLD_S", "Farewell"]

ABSENT_S = 60.0  # for a peer that was killed, or cut off, to come back for the last outer step
LONGEST_S = 3600.0  # for slow links, and for peers whose other aggregators have rounds left
TOLD_S = 3.0  # for who looks on every 2 s to see that the run has finished
LOOKS_ON_S = 5.0  # who asked so recently how the run stands


class Farewell:
    """Watches a run end. Call `over` again and again."""

    def __init__(self) -> None:
        self._finished_at: float | None = None
        self._alone_since = 0.0

    def over(
        self, now: float, *, finished: bool, attending: bool, missing: Collection[str], knows_all: bool, looked_at: float
    ) -> str:
        """Return why the coordinator may end now, or ''.

        Args:
            now: monotonic seconds.
            finished: whether the run is; it may go on again (`resume` after `drain`).
            attending: whether any rank attends.
            missing: the members, not evicted, that have not said goodbye.
            knows_all: whether there can be no other members.
            looked_at: when somebody asked last how the run stands.
        """
        if not finished:
            self._finished_at = None
            return ""
        if self._finished_at is None:
            self._finished_at = self._alone_since = now
        if attending:
            self._alone_since = now
        elif knows_all and not missing:
            told = now - looked_at >= LOOKS_ON_S or now - self._finished_at >= TOLD_S
            return "every peer has left" if told else ""
        if now - self._alone_since >= ABSENT_S:
            without = f", without a goodbye from {', '.join(sorted(missing)[:8])}" if missing else ""
            return f"nobody was here for {ABSENT_S:.0f} s{without}"
        return f"{LONGEST_S:.0f} s have passed since, and some still attend" if now - self._finished_at >= LONGEST_S else ""
