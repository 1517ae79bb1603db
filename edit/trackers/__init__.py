"""Trackers of experiments: TensorBoard, Weights & Biases, MLflow, Trackio, and plug-ins of `edit.trackers`.

Owns: what a tracker is given, the four built-in ones, and the thread that each has for itself. Each package is imported where
it is named, and by nothing else here. Who logs says what, and when: `peers.training.loop`, `aggregator.tracking`.

Reading order: base, background, choose; then each tracker's own file.
"""

from edit.trackers.background import Trackers
from edit.trackers.base import TrackedRun, Tracker
from edit.trackers.choose import TrackerChoice

__all__ = ["TrackedRun", "Tracker", "TrackerChoice", "Trackers"]
