"""Weights & Biases, offline unless `--tracker-option wandb.mode=online`: `wandb sync` uploads the folder later.

The id of its run follows from the run and the member, so a restart goes on with it. Nothing of the machine is recorded:
no code, console, packages or load. Offline nothing is sent: the package's own reports of errors and use are off unless
WANDB_ERROR_REPORTING says otherwise.
"""

from __future__ import annotations

import os
import re
from hashlib import sha256
from inspect import signature
from typing import Any

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # else it reports to its makers, also offline

import wandb

from edit.errors import ConfigError
from edit.trackers.base import TrackedRun, Values, no_other_options

__all__ = ["make"]

_NEWER: dict[str, Any] = {"x_transaction_log_flush_interval": 1.0}  # seconds; settings that not every version has


class _Wandb:
    def __init__(self, run: TrackedRun) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        options = run.options
        mode = str(options.get("mode", "offline"))
        if mode not in ("offline", "disabled") and not _logged_in():
            raise ConfigError(f"wandb.mode={mode}, but nobody is logged in: run `wandb login`, or set WANDB_API_KEY")
        quiet = wandb.Settings(
            x_save_requirements=False,
            console="off",
            save_code=False,
            disable_git=True,
            disable_code=True,
            silent=True,
            x_disable_stats=True,
            x_disable_meta=True,
            **{key: value for key, value in _NEWER.items() if key in getattr(wandb.Settings, "model_fields", ())},
        )
        self._run: Any = wandb.init(
            project=str(options.get("project", run.run_name)),
            entity=str(options["entity"]) if "entity" in options else None,
            name=run.member,
            group=run.run_id,
            id=_id(run),
            dir=str(run.folder),
            mode=mode,
            resume="allow",
            config=dict(run.settings),
            settings=quiet,
        )

    def log(self, step: int, values: Values) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        try:
            self._run.finish()
        except Exception:  # the package's own process is gone, and wandb.init would go on asking that one
            wandb.teardown(1)
            raise


def _logged_in() -> bool:
    """Return whether there is a key. `wandb.init` would ask for one on a terminal, as older versions, which cannot tell, do."""
    return "prompt" not in signature(wandb.login).parameters or bool(wandb.login(prompt=False, verify=False))


def _id(run: TrackedRun) -> str:
    """Return what only this member of this run has, in the characters and the length that an id may have."""
    tail = sha256(f"{run.run_id}/{run.member}".encode()).hexdigest()[:12]
    return re.sub(r"[^A-Za-z0-9_-]", "-", f"{run.run_id}-{run.member}")[:100] + "-" + tail


def make(run: TrackedRun) -> _Wandb:
    """Return a tracker that writes a run of Weights & Biases."""
    no_other_options(run, "mode", "project", "entity")
    return _Wandb(run)
