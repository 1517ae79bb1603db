"""The end of a chaos run with `--forked`: two coordinators serve one run, and both sides must find out.

The coordinator's folder is copied while it is down, and the copy is served, too: what a thief of the folder does, or an
operator who puts back a backup while the old machine goes on. Half of the peers are connected to the copy. Both coordinators
go on from the same outer step, each with commits of its own. When each has merged all its peers once more, those of the copy
are connected to the first coordinator again. What must hold: each of them stops by itself with exit code 3, with both heads of
the audit log in its home, no contribution of theirs is merged again, and the coordinator warns its operator.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from edit.lab.chaos.history import History
from edit.lab.chaos.invariants import Violation
from edit.lab.chaos.options import SHARDED, ChaosOptions
from edit.lab.chaos.testbed import COPY, Testbed
from edit.lab.observer import Observer
from edit.lab.processes import COORDINATOR
from edit.lab.tail import JsonLines
from peers.carriers.hub.kept_receipts import FAULT

__all__ = ["Fork", "ForkResult"]

_WARNING = "two of them serve this run"
_STOPPED = 3  # the exit code of a peer that does not go on
_POLL_S = 0.1


@dataclass(slots=True)
class ForkResult:
    """What came of it."""

    moved: tuple[str, ...]  # the peers that were connected to the copy
    merged: dict[str, int] = field(default_factory=dict)  # outer steps that each side made while they were apart
    found_after_s: dict[str, float] = field(
        default_factory=dict
    )  # by name, from when they were connected to the coordinator again
    found_after_steps: int | None = None  # outer steps that the coordinator made until all of them had found out
    ended: dict[str, int] = field(default_factory=dict)  # exit codes of those that were moved


class Fork:
    """Call `run` once, when every process of `testbed` has ended. fail: raises for a violation."""

    def __init__(
        self,
        options: ChaosOptions,
        testbed: Testbed,
        observer: Observer,
        fail: Callable[[Violation], None],
        say: Callable[[str], None],
        unix: Callable[[], float] = time.time,
    ) -> None:
        plain = [name for name in options.peer_ids if name != SHARDED]
        moved = tuple(plain[len(plain) // 2 :])
        self._options, self._testbed, self._observer = options, testbed, observer
        self._fail, self._say, self._unix = fail, say, unix
        self._sides = {COORDINATOR: tuple(name for name in options.peer_ids if name not in moved), COPY: moved}
        self._history = {side: History(peers, options.step_tokens) for side, peers in self._sides.items()}
        self._lines: dict[str, JsonLines] = {}
        self.result = ForkResult(moved)

    def run(self) -> ForkResult:
        """Fork the coordinator, connect the peers to the first again, and wait until they and it have found out."""
        moved, bounds = self._sides[COPY], self._options.bounds
        self._say(f"two coordinators serve the run now; {', '.join(moved)} are connected to the copy")
        since = self._unix()
        self._testbed.fork()
        self._lines = {side: JsonLines(self._testbed.metrics(side)) for side in self._sides}
        for name in self._options.peer_ids:
            if name in moved:
                self._testbed.route(name, COPY)
            self._testbed.start(name)
        self._until(lambda: all(self._all_in(side, since) for side in self._sides), self._options.begin_s, "both sides go on")
        self.result.merged = {
            side: sum(commit.t > since for commit in history.commits) for side, history in self._history.items()
        }
        self._say(f"{', '.join(moved)} are connected to the coordinator again")
        back = self._unix()
        at = self._history[COORDINATOR].commits[-1].outer_step
        for name in moved:
            self._testbed.route(name, COORDINATOR)
        self._until(lambda: len(self.result.found_after_s) == len(moved) + 1, bounds.return_s, "both sides find the fork", back)
        self.result.found_after_steps = self._history[COORDINATOR].commits[-1].outer_step - at
        self._say(f"found after {max(self.result.found_after_s.values()):.1f} s, {self.result.found_after_steps} outer steps")
        self._until(lambda: len(self.result.ended) == len(moved), bounds.return_s, "a peer that has found a fork stops", back)
        return self.result

    def _all_in(self, side: str, since: float) -> bool:
        return all(self._history[side].commit_after(since, name) is not None for name in self._sides[side])

    def _until(self, done: Callable[[], bool], bound_s: float, what: str, back: float | None = None) -> None:
        """Poll until it is done; back: since when the peers of the copy are with the coordinator."""
        began = self._unix()
        while not done():
            if self._unix() > began + bound_s:
                missing = {*self._sides[COPY], COORDINATOR} - set(self.result.found_after_s)
                text = f"not within {bound_s:.0f} s" + (f"; not found by {', '.join(sorted(missing))}" if back else "")
                self._fail(Violation(what, self._unix(), text, tuple(self._options.peer_ids)))
            self._poll(back)
            time.sleep(_POLL_S)

    def _poll(self, back: float | None) -> None:
        for side, lines in self._lines.items():
            for line in lines.read():
                self._history[side].take(COORDINATOR, line)
        for end in self._testbed.unexpected_ends():
            if back is None or end.name not in self._sides[COPY] or end.returncode != _STOPPED or not self._proof(end.name):
                self._fail(Violation("no process ends by itself", self._unix(), str(end), (end.name, COORDINATOR)))
            self.result.ended[end.name] = end.returncode
        if back is None:
            return
        for name in self._sides[COPY]:
            if self._proof(name):
                self._found(name, back)
            if (commit := self._history[COORDINATOR].commit_after(back, name)) is not None:
                text = f"{name} is in outer step {commit.outer_step}"
                self._fail(Violation("nothing of a forked run is merged", commit.t, text, (name, COORDINATOR)))
        if any(_WARNING in warning for warning in self._observer.warnings()):
            self._found(COORDINATOR, back)

    def _proof(self, name: str) -> bool:
        return (self._testbed.folder.home(name) / FAULT).is_file()

    def _found(self, who: str, back: float) -> None:
        if who not in self.result.found_after_s:
            self.result.found_after_s[who] = round(self._unix() - back, 2)
            self._say(f"{who} has found the fork")
