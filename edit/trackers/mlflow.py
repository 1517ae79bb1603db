"""MLflow: into a file of SQLite in the tracker's folder, or with `--tracker-option mlflow.uri=URI` to a tracking server.

A restart goes on with the run that has this run and member in its tags. MLflow's own telemetry is off unless
MLFLOW_DISABLE_TELEMETRY says otherwise.
"""

from __future__ import annotations

import json
import os
import time
from importlib.util import find_spec
from typing import Any

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # else it sends what is used of it to its makers

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from edit.errors import ConfigError
from edit.trackers.base import TrackedRun, Values, no_other_options

__all__ = ["make"]

_TEXT = 500  # characters of a parameter that every store takes


class _Mlflow:
    def __init__(self, run: TrackedRun) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        if "uri" not in run.options and find_spec("sqlalchemy") is None:
            raise ConfigError(
                "--tracker mlflow: needs the whole of MLflow for a file of its own, not mlflow-skinny; or give uri"
            )
        self._client: Any = MlflowClient(str(run.options.get("uri", f"sqlite:///{run.folder.resolve()}/mlflow.db")))
        experiment = self._experiment(str(run.options.get("experiment", run.run_name)))
        mark = {"edit.run_id": run.run_id, "edit.member": run.member}
        where = " and ".join(f"tags.`{key}` = '{value}'" for key, value in mark.items())
        found = self._client.search_runs([experiment], where, max_results=1)
        if found:
            self._run_id = found[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            self._run_id = self._client.create_run(experiment, tags=mark, run_name=f"{run.run_id} {run.member}").info.run_id
            flat = [
                Param(f"{section}.{key}" if isinstance(values, dict) else section, json.dumps(value)[:_TEXT])
                for section, values in run.settings.items()
                for key, value in (values.items() if isinstance(values, dict) else [("", values)])
            ]
            for start in range(0, len(flat), 100):
                self._client.log_batch(self._run_id, params=flat[start : start + 100])

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found is not None else self._client.create_experiment(name))

    def log(self, step: int, values: Values) -> None:
        now = int(time.time() * 1000)
        metrics = [Metric(name, float(value), now, step) for name, value in values.items() if not isinstance(value, str)]
        tags = [RunTag(name, value) for name, value in values.items() if isinstance(value, str)]
        self._client.log_batch(self._run_id, metrics=metrics, tags=tags)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def make(run: TrackedRun) -> _Mlflow:
    """Return a tracker that writes a run of MLflow."""
    no_other_options(run, "uri", "experiment")
    return _Mlflow(run)
