"""What is particular to a demo without a coordinator: rounds of several parts put together, and what changes among the
members.

Each part of the model has rounds of its own, at its owner. The screen and the report show outer steps: one row for a step of
all parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from edit.view.observations import SwarmStatus
from edit.view.state import Event

__all__ = ["SwarmRounds", "changes"]

Record = Mapping[str, Any]


class SwarmRounds:
    """Put the rounds of all parts together."""

    def __init__(self, parts: int) -> None:
        self._parts = parts
        self._open: dict[int, dict[int, Record]] = {}  # by outer step and part
        self._done = 0  # the last outer step that was put together
        self.last: dict[int, float] = {}  # when each part was last committed, unix seconds

    def take(self, part: int, record: Record) -> list[Record]:
        """Take one line of a part's owner; return the lines that follow for the whole model, in order."""
        if record.get("kind") != "round":
            return [] if record.get("kind") == "member" else [{**record, "part": part}]  # how members are, all say together
        if not record["committed"]:
            return [{**record, "reason": f"part {part}: {record['reason']}"}]
        step = int(record["outer_step"])
        self.last[part] = max(self.last.get(part, 0.0), float(record["t"]))
        if step <= self._done:
            return []
        self._open.setdefault(step, {})[part] = record
        return list(self._whole(step)) if len(self._open[step]) == self._parts else []

    def rest(self) -> list[Record]:
        """Return the outer steps that lack a part: its owner was killed between the commit and the line that says so."""
        return list(self._whole(max(self._open, default=0)))

    def _whole(self, until: int) -> Iterator[Record]:
        for step in sorted(each for each in self._open if each <= until):
            yield self._together(step, self._open.pop(step))
            self._done = step

    @staticmethod
    def _together(step: int, parts: Mapping[int, Record]) -> Record:
        lines = [parts[part] for part in sorted(parts)]
        reasons = dict.fromkeys(str(line["reason"]) for line in lines)
        return {
            "kind": "round",
            "t": max(float(line["t"]) for line in lines),
            "round_id": step,
            "outer_step": step,
            "committed": True,
            "reason": "; ".join(reasons),
            "seconds": max(float(line["seconds"]) for line in lines),
            "bytes_in": sum(int(line["bytes_in"]) for line in lines),
            "bytes_out": sum(int(line["bytes_out"]) for line in lines),
            "digest": "",
            "digests": {str(part): str(parts[part]["digest"]) for part in sorted(parts)},
            "verdicts": [fragment for line in lines for fragment in line["verdicts"]],
        }


def changes(before: SwarmStatus | None, now: SwarmStatus, t: float) -> Iterator[Event]:
    """Yield what has changed among the members since the first outer step, in plain words. t: unix seconds.

    Before that, parts only spread over the members that come.
    """
    if before is None or not all(before.steps):
        return
    if now.leader and before.leader != now.leader:
        instead = f" instead of {before.leader}" if before.leader else ""
        yield Event(t, f"{now.leader} leads{instead}: {now.quorum}", "info")
    if before.has_quorum and not now.has_quorum:
        yield Event(t, f"no quorum ({now.quorum}): all train on, and nothing is committed", "bad")
    moved: dict[tuple[str, str], list[int]] = {}
    for part, (old, new) in enumerate(zip(before.owners, now.owners, strict=True)):
        if old != new:
            moved.setdefault((old, new), []).append(part)
    for (old, new), parts in moved.items():
        what = f"part {parts[0]}" if len(parts) == 1 else f"parts {', '.join(map(str, parts))}"
        yield Event(t, f"{new} owns {what} now, before it was {old}", "info")
