"""TensorBoard: event files in the tracker's folder. `tensorboard --logdir FOLDER` shows them.

Values of a step that was written before a restart are superseded (`purge_step`).
"""

from __future__ import annotations

import json

from torch.utils.tensorboard import SummaryWriter

from edit.trackers.base import TrackedRun, Values, no_other_options

__all__ = ["make"]


class _TensorBoard:
    def __init__(self, run: TrackedRun) -> None:
        folder = run.folder / run.run_id / run.member
        self._writer = SummaryWriter(str(folder), purge_step=run.first_step)
        settings = "```json\n" + json.dumps(run.settings, indent=2) + "\n```"
        self._writer.add_text("settings", settings, run.first_step)
        self._words: dict[str, str] = {}  # written last

    def log(self, step: int, values: Values) -> None:
        for name, value in values.items():
            if not isinstance(value, str):
                self._writer.add_scalar(name, value, step)
            elif self._words.get(name) != value:
                self._words[name] = value
                self._writer.add_text(name, value, step)

    def close(self) -> None:
        self._writer.close()


def make(run: TrackedRun) -> _TensorBoard:
    """Return a tracker that writes event files."""
    no_other_options(run)
    return _TensorBoard(run)
