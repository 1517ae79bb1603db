"""Trackio: into its own local store, which `trackio show` shows; with `--tracker-option trackio.space=NAME` to a Space.

Where the store lies is TRACKIO_DIR's to say. A restart goes on with the run of the same name.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import trackio

from edit.trackers.base import TrackedRun, Values, no_other_options

__all__ = ["make"]


class _Trackio:
    def __init__(self, run: TrackedRun) -> None:
        self._run: Any = trackio.init(
            project=str(run.options.get("project", run.run_name)),
            name=f"{run.run_id} {run.member}",
            group=run.run_id,
            space_id=str(run.options["space"]) if "space" in run.options else None,
            config=dict(run.settings),
            resume="allow",
            embed=False,
            **{name: False for name in ("auto_log_gpu", "auto_log_cpu") if name in signature(trackio.init).parameters},
        )

    def log(self, step: int, values: Values) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def make(run: TrackedRun) -> _Trackio:
    """Return a tracker that writes a run of Trackio."""
    no_other_options(run, "project", "space")
    return _Trackio(run)
