"""Carries out the show's cues on the real processes, and checks that the coordinator comes back with the same outer parameters.

Owns: what is said about each cue, the digests before and after the coordinator's death. Must not know: when a cue is due.
"""

from __future__ import annotations

from edit.lab.demo.daemons import DemoDaemons
from edit.lab.demo.fault_schedule import Cue, FaultSchedule, Part
from edit.lab.demo.recorder import Recorder
from edit.lab.demo.results import Restart
from edit.lab.observations import Status
from edit.lab.programs import COORDINATOR

__all__ = ["FaultRunner"]


class FaultRunner:
    """`act(now)` several times a second. restart: what the coordinator's restart showed, once it has."""

    def __init__(self, show: FaultSchedule, crew: DemoDaemons, recorder: Recorder) -> None:
        self._show, self._crew, self._recorder = show, crew, recorder
        self._committed: dict[int, str] | None = None
        self._awaited = False
        self.restart: Restart | None = None

    def act(self, now: float) -> None:
        """Do what is due at the outer step that the board shows."""
        board = self._recorder.board
        training = [row.peer_id for row in board.peers.values() if row.state in ("training", "exchanging")]
        for cue in self._show.due(board.outer_step, training, now):
            if cue.part is Part.KILL:
                self._kill(cue)
            else:
                self._start_again(cue)

    def _kill(self, cue: Cue) -> None:
        pid = self._crew.kill(cue.name)
        if cue.name in self._recorder.board.peers:
            self._recorder.board.peers[cue.name].state = "killed"
        self._recorder.event(f"SIGKILL to {cue.name} (process {pid}), as a power cut would", "fault")
        if cue.name == COORDINATOR:
            self._recorder.poll()  # what it still committed
            self._committed = dict(self._recorder.board.digests)

    def _start_again(self, cue: Cue) -> None:
        self._crew.start(cue.name)
        if cue.name == COORDINATOR:
            self._awaited = True
            self._recorder.event("coordinator started again; the peers reconnect by themselves")
        else:
            self._recorder.event(f"{cue.name} started again with nothing but its certificate")

    def seen(self, status: Status) -> None:
        """The coordinator answered. The first answer after its restart is compared with what it had committed before."""
        if not self._awaited or self._committed is None or not status.digest:
            return
        self._awaited = False
        before = self._committed.get(status.outer_step)
        if before is None:  # it has already committed something new: too late to compare
            self._recorder.event(f"coordinator is back and already at outer step {status.outer_step}", "good")
            return
        self.restart = Restart(status.outer_step, before, status.digest)
        same = f"{status.digest[:12]} as before the kill" if self.restart.equal else "NOT the one from before the kill"
        text = f"coordinator is back at outer step {status.outer_step}, digest {same}"
        self._recorder.event(text, "good" if self.restart.equal else "bad")
