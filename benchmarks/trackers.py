"""Try the trackers with their real packages: two processes' worth of values each, the second going on with the first's run.

    python benchmarks/trackers.py tensorboard wandb mlflow trackio

Needs their extras. Prints what each has afterwards, and fails when a value is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edit.trackers import TrackerChoice

CLOSE_S = 60.0
_BLOCK = 1 << 15
STEPS = (10, 20, 30)  # of the first process; the second goes on from 40


def read_tensorboard(folder: Path) -> list[int]:
    """Return the steps that its event files have."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (run,) = folder.glob("*/*")
    events: Any = EventAccumulator(str(run)).Reload()
    return [event.step for event in events.Scalars("loss")]


def read_wandb(folder: Path) -> list[int]:
    """Return the steps that its offline files have: a header of 7 bytes, then a log as LevelDB's, with records of protobuf."""
    from wandb.proto import wandb_internal_pb2

    steps = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        data, at, whole = file.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if (room := _BLOCK - at % _BLOCK) < 7:
                at += room
                continue
            _, size, kind = struct.unpack_from("<IHB", data, at)
            whole += data[at + 7 : at + 7 + size]
            at += 7 + size
            if kind in (1, 4):  # whole, or the last part
                record: Any = wandb_internal_pb2.Record()
                record.ParseFromString(whole)
                whole = b""
                if any("loss" in (item.key, *item.nested_key) for item in record.history.item):
                    steps.append(int(record.history.step.num))
    return steps


def read_mlflow(folder: Path) -> list[int]:
    """Return the steps that its file has."""
    from mlflow.tracking import MlflowClient

    client: Any = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("tiny").experiment_id])
    assert len(runs) == 1, f"{len(runs)} runs"
    return [metric.step for metric in client.get_metric_history(runs[0].info.run_id, "loss")]


def read_trackio(folder: Path) -> list[int]:
    """Return the steps that its store has."""
    from trackio.sqlite_storage import SQLiteStorage

    rows: Any = SQLiteStorage.get_logs("tiny", "run-1 a")
    return [row["step"] for row in rows if "loss" in row]


READ: dict[str, Callable[[Path], list[int]]] = {
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "mlflow": read_mlflow,
    "trackio": read_trackio,
}


def main() -> None:
    """Try each that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trackers", nargs="+", choices=sorted(READ))
    names = parser.parse_args().trackers
    logging.basicConfig(level=logging.WARNING)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        os.environ["TRACKIO_DIR"] = str(folder / "trackio")
        for tracker in names:
            choice = TrackerChoice.of([tracker], [], frozenset())
            for first in (0, STEPS[-1]):
                with contextlib.redirect_stdout(sys.stderr):
                    trackers = choice.open("run-1", "tiny", "a", folder, {"sync": {"every": 10}, "seed": 3})
                    for step in STEPS:
                        trackers.log(first + step, {"loss": 1 / step, "edit/verdict": "ok"})
                    trackers.close(CLOSE_S)
            found = READ[tracker](folder / tracker)
            expected = [*STEPS, *(STEPS[-1] + step for step in STEPS)]
            print(f"{tracker}: steps {found}", flush=True)
            if found != expected:
                raise SystemExit(f"{tracker}: expected {expected}")


if __name__ == "__main__":
    main()
