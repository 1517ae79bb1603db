"""When parameters are evaluated on held-out text, and how long that may take.

Owns: the curve of the outer parameters' loss, the final comparison. Must not know: processes, screens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edit.errors import TransportError
from edit.fragments.schema import Schema
from edit.lab.demo.evaluate import Evaluator
from edit.lab.demo.recorder import LONE, Recorder
from edit.lab.demo.results import Losses
from edit.records import Snapshot

__all__ = ["FINAL_BATCHES", "TRACK_BATCHES", "Measurer", "SnapshotSource"]

TRACK_BATCHES = 6
FINAL_BATCHES = 48


class SnapshotSource(Protocol):
    """Where the newest outer parameters come from; None: not now."""

    def snapshot(self, schema: Schema) -> Snapshot | None: ...


@dataclass(slots=True)
class Measurer:
    """`track` often; it evaluates `points` times or somewhat more in a run."""

    evaluator: Evaluator
    recorder: Recorder
    points: int = 12
    next_step: int = 0

    def initial(self) -> None:
        """The first point of the curve."""
        self.recorder.validation("outer", 0, self.evaluator.initial(TRACK_BATCHES))
        self.next_step = 1

    def track(self, source: SnapshotSource) -> None:
        """Evaluate the newest outer parameters if enough outer steps were committed since the last time."""
        board = self.recorder.board
        if not self.next_step <= board.outer_step < board.outer_steps:
            return
        snapshot = source.snapshot(self.evaluator.schema)
        if snapshot is not None:
            self._point(snapshot)
            self.next_step = snapshot.outer_step + max(1, board.outer_steps // self.points)

    def _point(self, snapshot: Snapshot) -> None:
        loss = self.evaluator.of_fragments(snapshot.fragments, TRACK_BATCHES)
        self.recorder.validation("outer", snapshot.outer_step * self.recorder.board.sync_every, loss)

    def final(self, source: SnapshotSource, lone: Path, batches: int) -> tuple[Losses, Snapshot]:
        """The comparison, from more windows than the curve. Raises TransportError when the coordinator gives no snapshot."""
        snapshot = source.snapshot(self.evaluator.schema)
        if snapshot is None:
            raise TransportError("the coordinator gave no snapshot of the final outer parameters; see logs/coordinator.log")
        self._point(snapshot)
        if lone.exists():
            steps = max((point.step for point in self.recorder.board.lone), default=0)
            self.recorder.validation(LONE, steps, self.evaluator.of_file(lone, TRACK_BATCHES))
        losses = Losses(
            initial=self.evaluator.initial(batches),
            outer=self.evaluator.of_fragments(snapshot.fragments, batches),
            lone=self.evaluator.of_file(lone, batches) if lone.exists() else None,
            windows=self.evaluator.windows(batches),
        )
        return losses, snapshot
