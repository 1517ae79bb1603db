"""Weights & Biases, offline unless `--tracker-option wandb.mode=online`: `wandb sync` uploads the folder later.

The id of its run follows from the run and the member, so a restart goes on with it. Nothing of the machine is recorded:
no code, console, packages or load.
"""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Any

import wandb

from edit.trackers.base import TrackedRun, Values, no_other_options

__all__ = ["make"]


class _Wandb:
    def __init__(self, run: TrackedRun) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        options = run.options
        quiet = wandb.Settings(
            x_save_requirements=False,
            console="off",
            save_code=False,
            disable_git=True,
            disable_code=True,
            silent=True,
            x_disable_stats=True,
            x_disable_meta=True,
        )
        self._run: Any = wandb.init(
            project=str(options.get("project", run.run_name)),
            entity=str(options["entity"]) if "entity" in options else None,
            name=run.member,
            group=run.run_id,
            id=_id(run),
            dir=str(run.folder),
            mode=str(options.get("mode", "offline")),
            resume="allow",
            config=dict(run.settings),
            settings=quiet,
        )

    def log(self, step: int, values: Values) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _id(run: TrackedRun) -> str:
    """Return what only this member of this run has, in the characters and the length that an id may have."""
    tail = sha256(f"{run.run_id}/{run.member}".encode()).hexdigest()[:12]
    return re.sub(r"[^A-Za-z0-9_-]", "-", f"{run.run_id}-{run.member}")[:100] + "-" + tail


def make(run: TrackedRun) -> _Wandb:
    """Return a tracker that writes a run of Weights & Biases."""
    no_other_options(run, "mode", "project", "entity")
    return _Wandb(run)
