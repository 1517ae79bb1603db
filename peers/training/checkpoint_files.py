"""A peer's checkpoints on disk: written in the background while training continues, complete or absent, the last few kept.

Each checkpoint is a folder with the files of torch.distributed.checkpoint and `peer.json`, which names every file with its
length and BLAKE3. It is written as `.partial-N`, made durable, then renamed to `checkpoint-N`; N only grows. All ranks of a
replica write into the same folder, so on several machines it must be a shared one.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from blake3 import blake3
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor

from edit.durable_files import read_json, rename, write_json
from edit.errors import ConfigError, StorageError
from edit.replica.ranks import ALONE, Ranks
from peers.training.sharding import COLLECTIVE_TIMEOUT

__all__ = ["Checkpoints", "Owner", "Saved"]

FORMAT = 1
_MANIFEST = "peer.json"
_NAME = re.compile(r"checkpoint-(\d{8,})")
_log = logging.getLogger("peers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The owner of a checkpoint; one of another owner is refused."""

    run_id: str
    peer_id: str
    schema_hash: str


@dataclass(frozen=True, slots=True)
class Saved:
    """A whole checkpoint. ranks: of the replica that wrote it; scalars: what `save` was given."""

    path: Path
    ranks: int
    scalars: dict[str, Any]


class Checkpoints:
    """One replica's checkpoints in `folder`; every rank makes one, with the same arguments, and calls the same methods.

    keep: how many whole ones stay; clock: monotonic seconds. Making it removes what an earlier life left unfinished. Raises
    ConfigError when the folder cannot be used.
    """

    def __init__(
        self, folder: Path, owner: Owner, keep: int, ranks: Ranks = ALONE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        # said by torch at each save of a single process, from its own thread
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        self._folder = folder
        self._owner = owner
        self._keep = keep
        self._ranks = ranks
        self._group = None if ranks.size == 1 else dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        self._next = ranks.lead(self._tidy)
        self._saved = threading.Event()
        self._saved.set()
        self._clock, self._began = clock, 0.0
        self.seconds = 0.0  # that the last save took, from its beginning until it was whole

    @property
    def idle(self) -> bool:
        """Whether no save is in progress at this rank."""
        return self._saved.is_set()

    def wait(self) -> None:
        """Wait until no save is in progress at this rank."""
        self._saved.wait()

    def save(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """Copy the tensors to the CPU, then write in the background. Call it when all ranks are idle.

        tensors: each rank's own; a DTensor is written once, in shards, and a name that several ranks have must mean the same.
        scalars: values that JSON can hold, of rank 0. A failure is logged and leaves the earlier checkpoints.
        """
        self.wait()
        self._began = self._clock()
        number, self._next = self._next, self._next + 1
        partial = self._folder / f".partial-{number:08d}"
        text = json.dumps({"ranks": self._ranks.size, "scalars": scalars})
        self._saved.clear()
        try:
            written = async_save(
                dict(tensors),
                storage_writer=FileSystemWriter(partial),
                process_group=self._group,
                async_stager=_Copies(),
                no_dist=self._group is None,
            )
        except BaseException:
            self._saved.set()
            raise
        cast("Future[Metadata]", written).add_done_callback(lambda done: self._finish_save(done, partial, number, text))

    def set_aside(self) -> None:
        """Rename all checkpoints so that they are never loaded; they are not removed."""
        self._ranks.lead(self._set_aside)

    def newest(self) -> Saved | None:
        """Return the newest complete checkpoint, which rank 0 looks for, or None. Damaged ones are skipped and logged.

        Raises ConfigError when it belongs to another run, peer or model.
        """
        return self._ranks.lead(self._newest)

    def load(self, saved: Saved, target: Callable[[str, torch.Size, torch.dtype], Tensor | None]) -> dict[str, Tensor]:
        """Return the tensors by name. target: gives a tensor to load into (a DTensor: this rank's shard), or None to skip.

        Raises StorageError when the files do not hold what they should.
        """
        reader = FileSystemReader(saved.path)
        known = reader.read_metadata().state_dict_metadata
        tensors: dict[str, Tensor] = {}
        for name, kept in known.items():
            assert isinstance(kept, TensorStorageMetadata)  # only tensors are saved
            into = target(name, kept.size, kept.properties.dtype)
            if into is not None:
                tensors[name] = into
        try:
            load(tensors, storage_reader=reader, process_group=self._group, no_dist=self._group is None)
        except (CheckpointException, ValueError, RuntimeError) as error:
            raise StorageError(f"{saved.path}: cannot be loaded ({str(error).splitlines()[0]})") from error
        return tensors

    # ---- at rank 0 -------------------------------------------------------------------------------------------------------

    def _tidy(self) -> int:
        """Create the folder, remove unfinished checkpoints, return the next number."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for partial in self._folder.glob(".partial-*"):
                _log.info("%s: unfinished, removed", partial)
                shutil.rmtree(partial)
        except OSError as error:
            raise ConfigError(f"--checkpoints {self._folder}: cannot be used ({error.strerror})") from error
        return max(self._numbers(), default=0) + 1

    def _set_aside(self) -> None:
        for number in self._numbers():
            path = self._path(number)
            aside = path.with_name(f"ignored-{number:08d}-{time.time_ns()}")
            path.rename(aside)
            _log.info("%s: moved aside as %s", path, aside.name)

    def _numbers(self) -> list[int]:
        found = (_NAME.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def _path(self, number: int) -> Path:
        return self._folder / f"checkpoint-{number:08d}"

    def _newest(self) -> Saved | None:
        for number in self._numbers():
            path = self._path(number)
            try:
                manifest = _verified(path)
            except StorageError as error:
                _log.warning("%s; trying the checkpoint before it", error)
                continue
            self._check_owner(path, manifest["owner"])
            return Saved(path, manifest["ranks"], manifest["scalars"])
        return None

    def _check_owner(self, path: Path, theirs: Mapping[str, str]) -> None:
        for key, mine in asdict(self._owner).items():
            if theirs.get(key) != mine:
                raise ConfigError(
                    f"{path}: belongs to another {_WORDS[key]} ({theirs.get(key)}, not {mine}); "
                    "give another folder with --checkpoints, or --fresh to move it aside"
                )

    # ---- on the saving thread --------------------------------------------------------------------------------------------

    def _finish_save(self, written: Future[Metadata], partial: Path, number: int, text: str) -> None:
        """Called when all ranks have written, or one failed: rank 0 completes the checkpoint."""
        try:
            written.result()
            if self._ranks.leads:
                self._publish(partial, number, json.loads(text))
        except (Exception, CheckpointException) as error:  # training continues with the checkpoints there are
            why = str(error).strip().splitlines()  # torch's is a traceback: its last line says what
            _log.warning("checkpoint %d was not written: %s", number, why[-1] if why else type(error).__name__)
            if self._ranks.leads:
                shutil.rmtree(partial, ignore_errors=True)
        finally:
            self.seconds = self._clock() - self._began
            self._saved.set()

    def _publish(self, partial: Path, number: int, values: Mapping[str, Any]) -> None:
        files = {path.name: _measure(path) for path in sorted(partial.iterdir())}
        write_json(partial / _MANIFEST, {"owner": asdict(self._owner), **values, "files": files}, version=FORMAT)
        rename(partial, self._path(number))
        for old in self._numbers()[self._keep :]:
            shutil.rmtree(self._path(old))


class _Copies(AsyncStager):
    """Gives `async_save` copies on the CPU, made before it returns, so that training can continue."""

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: _copied(tensor) for name, tensor in state_dict.items()}

    def synchronize_staging(self) -> None:
        """Do nothing: `stage` is synchronous."""

    def close(self) -> None:
        """Do nothing."""


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU. A DTensor keeps its mesh and placements."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().to("cpu", copy=True)
    return DTensor(tensor.to_local().detach().to("cpu", copy=True), tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]


_WORDS = {"run_id": "run", "peer_id": "peer", "schema_hash": "model"}


def _verified(path: Path) -> dict[str, Any]:
    """Return the checkpoint's manifest after checking every file. Raises StorageError that names what is missing or damaged."""
    try:
        manifest = read_json(path / _MANIFEST, version=FORMAT)
        if not all(isinstance(manifest[key], dict) for key in ("owner", "scalars", "files")):
            raise ValueError("not what `_publish` wrote")
        for name, expected in manifest["files"].items():
            size, digest = _measure(path / name)
            if size != expected[0]:
                raise StorageError(f"{path / name}: {size} bytes of {expected[0]}; truncated")
            if digest != expected[1]:
                raise StorageError(f"{path / name}: damaged")
    except OSError as error:
        raise StorageError(f"{error.filename}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise StorageError(f"{path / _MANIFEST}: damaged") from error
    return manifest


def _measure(path: Path) -> tuple[int, str]:
    """Return length in bytes and BLAKE3 of a file."""
    size = path.stat().st_size
    return size, blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest() if size else ""
