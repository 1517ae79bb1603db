"""Gathers the metrics lines of all processes, and the lab's own, into one RunState and one metrics.jsonl."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from edit.lab.demo.event_messages import EventMessages
from edit.lab.demo.swarm import SwarmRounds
from edit.lab.tail import JsonLines
from edit.plain_text import json_text
from edit.view.state import RunState

__all__ = ["LONE", "Recorder"]

LONE = "lone"


class Recorder:
    """Context manager over the merged file. Every line in it names its source.

    unix: the clock, seconds since 1970. rounds: of a swarm, whose parts have rounds of their own.
    """

    def __init__(self, state: RunState, merged: Path, unix: Callable[[], float], rounds: SwarmRounds | None = None) -> None:
        self.state, self._merged, self._unix, self._rounds = state, merged, unix, rounds
        self._parts: dict[str, int] = {}
        self._messages = EventMessages()
        self._sources: dict[str, JsonLines] = {}
        self._begun: dict[str, float] = {}
        self._file: IO[str] | None = None

    def __enter__(self) -> Recorder:
        self._file = self._merged.open("a", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def follow(self, source: str, path: Path) -> None:
        """Read `path` at every poll, under the name `source`."""
        self._sources[source] = JsonLines(path)
        self._begun[source] = self._unix()

    def follow_part(self, source: str, part: int, path: Path) -> None:
        """Read what a member of a swarm writes while it owns a part."""
        self._parts[f"{source}, part {part}"] = part
        self.follow(f"{source}, part {part}", path)

    def now(self) -> float:
        """Return the time, unix seconds."""
        return self._unix()

    def poll(self) -> None:
        """Apply every line that was finished since the last call."""
        for source, lines in self._sources.items():
            for record in lines.read():
                for translated in self._translate(source, record):
                    self._take(source, translated)

    def rest(self) -> None:
        """Apply what of a swarm's outer steps is not complete, and will not be."""
        for record in self._rounds.rest() if self._rounds is not None else ():
            self._take("lab", record)

    def member(self, peer_id: str, state: str, reason: str) -> None:
        """Add that a member's state has changed."""
        self._take("lab", {"kind": "member", "t": self._unix(), "peer_id": peer_id, "state": state, "reason": reason})

    def event(self, text: str, tone: str = "info") -> None:
        """Add a message of the lab. tone: see `Event`."""
        self._take("lab", {"kind": "event", "t": self._unix(), "text": text, "tone": tone})

    def validation(self, who: str, step: int, loss: float) -> None:
        """Add a held-out loss after `step` inner steps."""
        self._take("lab", {"kind": "validation", "t": self._unix(), "who": who, "step": step, "loss": loss})

    def _take(self, source: str, record: Mapping[str, Any]) -> None:
        self.state.apply(record)
        if self._file is not None:
            self._file.write(json_text({"source": source, **record}) + "\n")
            self._file.flush()
        for event in self._messages.events_of(record, self.state):
            self._take("lab", {"kind": "event", "t": event.t, "text": event.text, "tone": event.tone})

    def _translate(self, source: str, record: dict[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Add what a line lacks: a peer's own lines do not name it, and the lone peer counts seconds from its start."""
        if source in self.state.peers:
            yield {**record, "peer_id": source}
        elif self._rounds is not None and source in self._parts:
            yield from self._rounds.take(self._parts[source], record)
        elif source != LONE:
            yield record
        elif "validation_loss" in record:
            loss = record["validation_loss"]
            yield {"kind": "validation", "who": LONE, "t": self._unix(), "step": record.get("step"), "loss": loss}
        else:
            yield {**record, "kind": LONE, "t": self._begun[source] + float(record.get("t") or 0.0)}
