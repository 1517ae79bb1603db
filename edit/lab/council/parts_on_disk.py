"""The parts of a small model at members that keep them in real folders, as a swarm's hosts do: journals, checkpoints, digests.

The merges are the project's own (`OuterState.reduce`, `record`); the contributions are drawn from a seed.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from aggregator.storage.journal import Disk
from aggregator.storage.store import Store
from aggregator.swarm.member_folder import MemberFolder
from aggregator.swarm.replication import PartReplica
from edit.codecs import codec
from edit.config.run import RunConfig
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.merging.merge import Measured, measure
from edit.merging.outer_state import MergeRecord, OuterState
from edit.records import Commit

__all__ = ["Killed", "MemberDisk", "merged_round", "outer_state", "small_run"]

RUN = "run"
SIZES = (5, 300)  # elements of the fragments of each part
CODECS = (("fp32", "fp32"), ("bf16", "bf16"), ("int8", "bf16"), ("int8", "int8"))  # down, record


class Killed(BaseException):
    """The process was killed in the middle of a write."""


def small_run(random: Random) -> RunConfig:
    """Draw a run's settings."""
    down, record = random.choice(CODECS)
    values: dict[str, Any] = {
        "codec": {"up": "fp32", "down": down, "record": record},
        "storage": {"checkpoint_every": random.choice((1, 3, 1000)), "keep_updates": random.choice((1, 4))},
        "outer": {"optimizer": "nesterov"},
    }
    return RunConfig.from_mapping(values)


def outer_state(config: RunConfig, part: int) -> OuterState:
    """Return the founding state of a part."""
    fragments = (
        FragmentSpec(fragment_id=i, name=f"layer{i}", tensors=(TensorSpec(name=f"part{part}.layer{i}", shape=(size,)),))
        for i, size in enumerate(SIZES)
    )
    generator = torch.Generator().manual_seed(part)
    return OuterState(Schema(tuple(fragments)), config, [torch.randn(size, generator=generator) for size in SIZES])


def merged_round(outer: OuterState, peers: int, seed: int) -> list[MergeRecord]:
    """Return what a round of so many contributions is merged to, drawn from a seed; nothing is changed."""
    generator, records = torch.Generator().manual_seed(seed), []
    for fragment in outer.schema.fragments:
        payloads = [codec("fp32").encode(torch.randn(fragment.numel, generator=generator), fragment) for _ in range(peers)]
        measured = [Measured(f"m{i}", 4, 10, measure(payload), payload) for i, payload in enumerate(payloads)]
        records.append(outer.record(outer.reduce(fragment.fragment_id, measured)))
    return records


class MemberDisk:
    """The folder of one member. A kill leaves what was synced, and of what was only written some bytes."""

    replica = PartReplica

    def __init__(self, folder: Path, config: RunConfig, random: Random) -> None:
        self.killed_after: int | None = None  # this many more bytes are written to a journal
        self._folder, self._config, self._random = folder, config, random
        self._writing = threading.Lock()  # a part's own thread appends while another begins a segment
        self._synced: dict[int, int] = {}  # bytes, by inode
        self._stores: list[Store] = []

    def open(self, parts: int, on_commit: Callable[[int, Commit], None]) -> list[PartReplica]:
        """Return the parts as a process that starts finds them. on_commit: is told the part of each outer step, too."""
        self.killed_after, replicas = None, list[PartReplica]()
        disk = Disk(write=self._write, fsync=self._sync)
        self._folder.mkdir(parents=True, exist_ok=True)
        for part in range(parts):
            self._stores.append(Store(MemberFolder(self._folder).part(part), self._config, RUN, disk))
            replicas.append(self.replica(RUN, part, self._config, self._stores[-1], partial(on_commit, part)))
        return replicas

    def settle(self) -> None:
        """Wait until all is written that was begun. Raises Killed."""
        for store in self._stores:
            store.committed(0)

    def crash(self) -> None:
        """Lose what was not synced."""
        for store in self._stores:
            store.close()
        self._stores.clear()
        for path in self._folder.glob("*/*.journal"):
            found = path.stat()
            synced = min(self._synced.get(found.st_ino, 0), found.st_size)
            os.truncate(path, self._random.randint(synced, found.st_size))

    def wipe(self) -> None:
        """Lose all of it."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, descriptor: int, data: memoryview) -> int:
        with self._writing:
            if self.killed_after is None:
                return os.write(descriptor, data)
            written = os.write(descriptor, data[: self.killed_after])
            self.killed_after -= written
            if not self.killed_after:
                raise Killed
            return written

    def _sync(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        self._synced[found.st_ino] = found.st_size
