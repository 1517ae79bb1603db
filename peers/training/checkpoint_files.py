"""A peer's checkpoints on disk: written in the background while training continues, complete or absent, the last few kept.

Each checkpoint is a folder with one safetensors file of each rank, its boxes of the tensors by name, and `peer.json`
(`peers.training.checkpoint_manifest`), which says what lies where and names every file with its length and BLAKE3. It is
written as `.partial-N`, made durable, then renamed to `checkpoint-N`; N only grows. All ranks of a replica write into the same
folder, so on several machines it must be a shared one. Any number of ranks reads it; each reads only the boxes that it holds.

Folders are 0700 and files 0600; what others can write, or what belongs to another user, is refused. Nothing in it is code.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

import torch
import torch.distributed as dist
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from edit.codecs.base import new_vector
from edit.durable_files import rename, write_atomic_with, write_json
from edit.errors import ConfigError, FormatError, StorageError
from edit.fragments.shards import Box
from edit.plain_text import parse_json
from edit.replica.layout import held_box, local_of
from edit.replica.ranks import ALONE, Ranks
from peers.training.checkpoint_manifest import (
    DTYPES,
    FORMAT,
    MANIFEST,
    Manifest,
    StoredTensor,
    parse,
    read,
    refuse_shared,
    shard_name,
)
from peers.training.sharding import COLLECTIVE_TIMEOUT

__all__ = ["Checkpoints", "Owner", "Saved", "last_checkpoint", "last_scalars"]

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_PIECE_BYTES = 1 << 20  # of a file that is read to be hashed
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


def last_scalars(folder: Path) -> dict[str, Any] | None:
    """Return what the newest checkpoint says of itself, whether or not its files are whole; None where that cannot be read."""
    try:
        numbers = [int(match[1]) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
        return read(_path_of(folder, max(numbers))).scalars if numbers else None
    except (OSError, StorageError, FormatError):
        return None


def last_checkpoint(folder: Path) -> Saved:
    """Return the newest checkpoint in a peer's folder, whosever it is; its files are whole.

    Raises StorageError when there is none or it is damaged, FormatError when it is of another format.
    """
    try:
        numbers = [int(match[1]) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    except OSError as error:
        raise StorageError(f"{folder}: cannot be read ({error.strerror})") from error
    if not numbers:
        raise StorageError(f"{folder}: has no checkpoint")
    path = _path_of(folder, max(numbers))
    manifest = _verified(path)
    return Saved(path, manifest.ranks, manifest.scalars)


class Checkpoints:
    """One replica's checkpoints in `folder`; every rank makes one, with the same arguments, and calls the same methods.

    keep: how many whole ones stay; clock: monotonic seconds. Making it removes what an earlier life left unfinished. Raises
    ConfigError when the folder cannot be used, StorageError when it belongs to another user or others can write to it.
    """

    def __init__(
        self, folder: Path, owner: Owner, keep: int, ranks: Ranks = ALONE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder = folder
        self._owner = owner
        self._keep = keep
        self._ranks = ranks
        # what the saving threads of the ranks agree on, while the main threads talk over the other group
        self._writers = ranks
        if ranks.size > 1:
            group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
            self._writers = Ranks(ranks.rank, ranks.size, group)
        self._next = ranks.lead(self._tidy)
        self._thread = ThreadPoolExecutor(1, "checkpoint")  # a save that has begun is completed, also when the process ends
        self._saving: Future[None] | None = None  # the last save
        self._clock, self._began = clock, 0.0
        self.seconds = 0.0  # that the last save took, from its beginning until it was whole

    @property
    def idle(self) -> bool:
        """Whether no save is in progress at this rank. Raises what ended a save, unless the disk did."""
        if self._saving is not None and self._saving.done():
            self.wait()
        return self._saving is None

    def wait(self) -> None:
        """Wait until no save is in progress at this rank. Raises as `idle`."""
        if self._saving is not None:
            self._saving.result()
            self._saving = None

    def save(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any], constant: Collection[str] = ()) -> None:
        """Copy the tensors to the CPU, then write in the background. Call it when all ranks are idle.

        tensors: each rank's own; a DTensor is written once, in shards, and a name that several ranks have must mean the same.
        constant: the names of those that nobody writes into any more; they are held instead of copied.
        scalars: values that JSON can hold, of rank 0. When the disk refuses, that is logged and leaves the earlier checkpoints;
        training goes on with those. Anything else is raised where the main thread looks next: `idle`, `wait` or `save`.
        """
        self.wait()
        self._began = self._clock()
        number, self._next = self._next, self._next + 1
        text = json.dumps({"ranks": self._ranks.size, "scalars": scalars})
        held = [_held(name, tensor, self._ranks.rank, constant=name in constant) for name, tensor in tensors.items()]
        self._saving = self._thread.submit(self._write, held, number, text)

    def set_aside(self) -> None:
        """Rename all checkpoints so that they are never loaded; they are not removed. Raises StorageError."""
        self._ranks.lead(self._set_aside)

    def newest(self) -> Saved | None:
        """Return the newest complete checkpoint, which rank 0 looks for, or None. Damaged ones are skipped and logged.

        Raises ConfigError when it belongs to another run, peer or model, StorageError when others can write to it, FormatError
        when it is of another format.
        """
        return self._ranks.lead(self._newest)

    def load(self, saved: Saved, target: Callable[[str, torch.Size, torch.dtype], Tensor | None]) -> dict[str, Tensor]:
        """Return the tensors by name. target: gives a tensor to load into (a DTensor: this rank's shard), or None to skip.

        A tensor may lie on any device and in any layout; only what overlaps its own box is read. Shape and dtype must be those
        that were saved. Raises StorageError, at every rank, when the files do not hold what they should.
        """
        stored = self._ranks.together(lambda: read(saved.path)).tensors
        tensors: dict[str, Tensor] = {}
        for name, kept in stored.items():
            into = target(name, torch.Size(kept.shape), DTYPES[kept.dtype])
            if into is not None:
                tensors[name] = into
        self._ranks.together(lambda: _fill(saved.path, stored, tensors, self._ranks.rank))
        return tensors

    # ---- at rank 0 -------------------------------------------------------------------------------------------------------

    def _tidy(self) -> int:
        """Create the folder, remove unfinished checkpoints, return the next number."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            refuse_shared(self._folder)
            for partial in self._folder.glob(".partial-*"):
                _log.info("%s: unfinished, removed", partial)
                shutil.rmtree(partial)
            return max(self._numbers(), default=0) + 1
        except OSError as error:
            raise ConfigError(f"--checkpoints {self._folder}: cannot be used ({error.strerror})") from error

    def _set_aside(self) -> None:
        for number in self._numbers():
            path = self._path(number)
            aside = path.with_name(f"ignored-{number:08d}-{time.time_ns()}")
            try:
                path.rename(aside)
            except OSError as error:
                raise StorageError(f"{path}: cannot be moved aside ({error.strerror})") from error
            _log.info("%s: moved aside as %s", path, aside.name)

    def _numbers(self) -> list[int]:
        found = (_NAME.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def _path(self, number: int) -> Path:
        return _path_of(self._folder, number)

    def _newest(self) -> Saved | None:
        for number in self._numbers():
            path = self._path(number)
            _refuse_foreign(path)
            try:
                manifest = _verified(path)
            except StorageError as error:
                _log.warning("%s; trying the checkpoint before it", error)
                continue
            self._check_owner(path, manifest.owner)
            return Saved(path, manifest.ranks, manifest.scalars)
        return None

    def _check_owner(self, path: Path, theirs: Mapping[str, str]) -> None:
        for key, mine in asdict(self._owner).items():
            if theirs.get(key) == mine:
                continue
            if key == "schema_hash":  # the run's, since a checkpoint is only of a run that was joined
                raise ConfigError(
                    f"another model: this peer has joined the run with other tensors, as {path} says; set [model] of run.toml, "
                    "the plug-in or the code back. --fresh does not help: the run has those tensors, too"
                )
            raise ConfigError(
                f"{path}: belongs to another {_WORDS[key]} ({theirs.get(key)}, not {mine}); "
                "give another folder with --checkpoints, or --fresh to move it aside"
            )

    # ---- on the saving thread --------------------------------------------------------------------------------------------

    def _write(self, held: list[_Held], number: int, text: str) -> None:
        """Write this rank's file; when all ranks have, rank 0 completes the checkpoint."""
        partial = self._folder / f".partial-{number:08d}"
        try:
            plans = self._writers.collect([part.plan for part in held])
            shares, rank = _shares(plans), self._ranks.rank
            table = _table(plans, shares)
            mine = {
                part.plan.name: part.local
                for part in held
                if part.plan.box is not None and shares[part.plan.name][part.plan.box] == rank
            }
            files = self._writers.collect(self._writers.together(lambda: self._write_shard(partial, mine)))
            if self._ranks.leads:
                self._publish(partial, number, {**parse_json(text), "files": dict(files), "tensors": table})
        except (StorageError, OSError) as error:  # training continues with the checkpoints there are
            _log.warning("checkpoint %d was not written: %s", number, error)
            if self._ranks.leads:
                shutil.rmtree(partial, ignore_errors=True)
        finally:
            self.seconds = self._clock() - self._began

    def _write_shard(self, partial: Path, tensors: dict[str, Tensor]) -> tuple[str, tuple[int, str]]:
        """Write a file, durably; return its name, length and digest. Raises StorageError."""
        path = partial / shard_name(self._ranks.rank)
        try:
            partial.mkdir(mode=0o700, exist_ok=True)
            write_atomic_with(path, lambda new: save_file(tensors, new), mode=0o600, failures=(SafetensorError, ValueError))
            return path.name, _measure(path)
        except OSError as error:
            raise StorageError(f"{path}: cannot be written ({error.strerror})") from error

    def _publish(self, partial: Path, number: int, values: Mapping[str, Any]) -> None:
        values = {"owner": asdict(self._owner), **values}
        parse(parse_json(json.dumps(values)))  # what cannot be read must not replace what can
        write_json(partial / MANIFEST, values, version=FORMAT, mode=0o600)
        rename(partial, self._path(number))
        for old in self._numbers()[self._keep :]:
            shutil.rmtree(self._path(old))


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a rank holds of a tensor."""

    name: str
    # A key of DTYPES, or torch's name of what cannot be saved.
    dtype: str
    # Of the full tensor.
    shape: tuple[int, ...]
    # None: nothing of it.
    box: Box | None


@dataclass(frozen=True, slots=True)
class _Held:
    """What this rank holds of a tensor, on the CPU: a copy, or the tensor itself where that is constant."""

    plan: _Plan
    local: Tensor


def _held(name: str, tensor: Tensor, rank: int, *, constant: bool) -> _Held:
    with torch.no_grad():
        local, box = local_of(tensor).detach(), held_box(0, tensor, name, rank)
        if constant and local.device.type == "cpu" and local.is_contiguous():
            copy = local
        else:
            copy = new_vector(local.numel(), local.dtype).view(local.shape).copy_(local)
    code = _CODES.get(tensor.dtype, str(tensor.dtype))
    return _Held(_Plan(name, code, tuple(tensor.shape), box if copy.numel() else None), copy)


def _shares(plans: list[list[_Plan]]) -> dict[str, dict[Box, int]]:
    """Return by tensor which rank writes which box: of equal boxes the lowest rank that holds one. plans: by rank."""
    shares: dict[str, dict[Box, int]] = {}
    for rank, held in enumerate(plans):
        for plan in held:
            boxes = shares.setdefault(plan.name, {})
            if plan.box is not None:
                boxes.setdefault(plan.box, rank)
    return shares


def _table(plans: list[list[_Plan]], shares: Mapping[str, Mapping[Box, int]]) -> dict[str, Any]:
    """Return the metadata's entry of each tensor. plans: by rank. Raises StorageError when one cannot be saved."""
    table: dict[str, Any] = {}
    for plan in (plan for held in plans for plan in held):
        if plan.dtype not in DTYPES:
            raise StorageError(f"tensor {plan.name}: {plan.dtype} cannot be saved")
        entry = {
            "dtype": plan.dtype,
            "shape": list(plan.shape),
            "boxes": [[shard_name(rank), list(box.offsets), list(box.sizes)] for box, rank in shares[plan.name].items()],
        }
        if table.setdefault(plan.name, entry) != entry:
            raise StorageError(f"tensor {plan.name}: the ranks of this replica have it in different shapes or dtypes")
    return table


_WORDS = {"run_id": "run", "peer_id": "peer"}


def _refuse_foreign(path: Path) -> None:
    """Raise StorageError if a checkpoint is not a folder of our own, or others can write to it or to a file in it."""
    if path.is_symlink():
        raise StorageError(f"{path}: is a link, not a checkpoint; remove it")
    try:
        refuse_shared(path)
        for file in path.iterdir():
            if not file.is_symlink():
                refuse_shared(file)
    except OSError as error:
        raise StorageError(f"{error.filename}: cannot be read ({error.strerror})") from error


def _path_of(folder: Path, number: int) -> Path:
    return folder / f"checkpoint-{number:08d}"


def _verified(path: Path) -> Manifest:
    """Return the checkpoint's metadata after checking every file. Raises StorageError that names what is missing or damaged."""
    manifest = read(path)
    try:
        for name, (length, digest) in manifest.files.items():
            if not S_ISREG((path / name).lstat().st_mode):
                raise StorageError(f"{path / name}: not a regular file")
            size, found = _measure(path / name)
            if size != length:
                raise StorageError(f"{path / name}: {size} bytes of {length}; truncated")
            if found != digest:
                raise StorageError(f"{path / name}: damaged")
    except OSError as error:
        raise StorageError(f"{error.filename}: cannot be read ({error.strerror})") from error
    return manifest


def _measure(path: Path) -> tuple[int, str]:
    """Return length in bytes and BLAKE3 of a file. Read and not mapped: its pages would count as memory of this process."""
    hashed, length, piece = blake3(), 0, memoryview(bytearray(_PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while read := file.readinto(piece):
            hashed.update(piece[:read])
            length += read
    return length, hashed.hexdigest()


def _fill(folder: Path, stored: Mapping[str, StoredTensor], tensors: Mapping[str, Tensor], rank: int) -> None:
    """Read into each tensor what this rank holds of it. Raises StorageError that names the file."""
    with contextlib.ExitStack() as stack, torch.no_grad():
        opened: dict[str, Any] = {}
        for name, into in tensors.items():
            kept = stored[name]
            if (tuple(into.shape), into.dtype) != (kept.shape, DTYPES[kept.dtype]):
                raise StorageError(
                    f"{folder / MANIFEST}: tensor {name} is {list(kept.shape)} {DTYPES[kept.dtype]}, "
                    f"here it is {list(into.shape)} {into.dtype}"
                )
            own, local = held_box(0, into, name, rank), local_of(into)
            if own is None or local.numel() == 0:
                continue
            for file, box in kept.boxes:
                if not box.overlaps(own):
                    continue
                try:
                    if file not in opened:
                        opened[file] = stack.enter_context(safe_open(folder / file, framework="pt"))
                    _copy(opened[file], name, kept.dtype, box, own, local)
                except OSError as error:
                    raise StorageError(f"{folder / file}: cannot be read ({error.strerror or error})") from error
                except (SafetensorError, ValueError) as error:
                    raise StorageError(f"{folder / file}: damaged ({str(error).splitlines()[0]})") from error


def _copy(file: Any, name: str, dtype: str, box: Box, own: Box, local: Tensor) -> None:
    """Copy the overlap of a stored box and this rank's own into `local`. Raises SafetensorError, ValueError."""
    part = file.get_slice(name)
    found = tuple(part.get_shape()), part.get_dtype()
    if found != (box.sizes, dtype):
        raise ValueError(f"tensor {name} is {list(found[0])} {found[1]}, not {list(box.sizes)} {dtype}")
    inside: list[slice] = []  # the overlap in the stored box
    for dimension, (theirs, size, mine, width) in enumerate(zip(box.offsets, box.sizes, own.offsets, own.sizes, strict=True)):
        start, end = max(theirs, mine), min(theirs + size, mine + width)
        inside.append(slice(start - theirs, end - theirs))
        local = local.narrow(dimension, start - mine, end - start)
    whole = all(each == slice(0, size) for each, size in zip(inside, box.sizes, strict=True))
    local.copy_(file.get_tensor(name) if whole else part[tuple(inside)])
