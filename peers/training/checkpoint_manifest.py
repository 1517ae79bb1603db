"""The metadata of a peer's checkpoint, `peer.json`: what it holds and where, as JSON, checked before anything is used.

    {"format": 3, "owner": {...}, "ranks": 2, "scalars": {...},
     "files": {"rank-00000.safetensors": [length, BLAKE3], ...},
     "tensors": {"model/a": {"dtype": "F32", "shape": [3, 4], "boxes": [["rank-00000.safetensors", [0, 0], [2, 4]], ...]}}}

Each rank writes one safetensors file, which holds its box of a tensor under the tensor's name. Nothing here is code, and
nothing names a path: a file is one of the ranks' names. What is read is bounded by the files' lengths, so that an edited
table takes no more memory than the folder takes on disk. Format 1 was torch.distributed.checkpoint's, whose metadata is a
pickle; it is refused unread. Format 2 had the states of several aggregators under another name.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

from edit.durable_files import read_json
from edit.errors import FormatError, StorageError
from edit.fragments.schema import FragmentSpec, TensorSpec
from edit.fragments.shards import Box, partition_fault

__all__ = ["DTYPES", "FORMAT", "MANIFEST", "Manifest", "StoredTensor", "parse", "read", "refuse_shared", "shard_name"]

FORMAT = 3
MANIFEST = "peer.json"
_PICKLE = ".metadata"  # of torch.distributed.checkpoint
_MAX_BYTES = 256 << 20  # of the metadata: more than a million boxes
_MAX_RANKS = 100_000
_MAX_DIMENSIONS = 8
_MAX_NUMEL = 1 << 60
_SHARD = re.compile(r"rank-(\d{5})\.safetensors", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}")

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""What may be stored, by safetensors' names."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One full tensor of a checkpoint."""

    # A key of DTYPES.
    dtype: str
    # Of the full tensor; () for a scalar.
    shape: tuple[int, ...]
    # Which file holds which box; the boxes partition the tensor.
    boxes: tuple[tuple[str, Box], ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The checked content of `peer.json`."""

    # Whose checkpoint it is, field by field.
    owner: dict[str, str]
    # How many ranks wrote it.
    ranks: int
    # What the caller of `save` gave; its content is the caller's to check.
    scalars: dict[str, Any]
    # By name: length in bytes and BLAKE3.
    files: dict[str, tuple[int, str]]
    # By name.
    tensors: dict[str, StoredTensor]


def shard_name(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def refuse_shared(path: Path) -> None:
    """Raise StorageError, one line with the mend, if the file or folder belongs to another user or others can write to it.

    Raises OSError when it is not there.
    """
    found = path.stat()
    if found.st_uid != os.geteuid():
        raise StorageError(
            f"{path}: belongs to user {found.st_uid}, not to this process's ({os.geteuid()}); "
            "change its owner (chown), or give another folder with --checkpoints"
        )
    if found.st_mode & 0o022:
        mode = 700 if stat.S_ISDIR(found.st_mode) else 600
        raise StorageError(f"{path}: others can write to it (mode {found.st_mode & 0o7777:04o}); run: chmod {mode} {path}")


def read(folder: Path) -> Manifest:
    """Return a checkpoint's metadata, checked. Raises StorageError that names the fault, FormatError for another format."""
    path = folder / MANIFEST
    try:
        if (folder / _PICKLE).exists():
            raise FormatError("format 1")
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise ValueError(f"{size} bytes; the most is {_MAX_BYTES}")
        return parse(read_json(path, version=FORMAT))
    except FormatError as error:
        if "format 1" not in str(error):
            raise
        raise FormatError(
            f"{path}: format 1 (torch.distributed.checkpoint), this software reads format {FORMAT} (safetensors and JSON); "
            "--fresh moves it aside"
        ) from None
    except OSError as error:
        raise StorageError(f"{path}: cannot be read ({error.strerror})") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise StorageError(f"{path}: damaged (no JSON that can be read)") from error
    except ValueError as error:
        raise StorageError(f"{path}: damaged ({error})") from error


def parse(values: Mapping[str, Any]) -> Manifest:
    """Return the checked content. Raises ValueError that names the field."""
    owner, scalars = _mapping(values.get("owner"), "owner"), _mapping(values.get("scalars"), "scalars")
    if not all(isinstance(word, str) for word in owner.values()):
        raise ValueError("owner: not all are words")
    ranks = values.get("ranks")
    if not _is_count(ranks) or not 1 <= ranks <= _MAX_RANKS:
        raise ValueError(f"ranks: {_short(ranks)} is not a number of ranks")
    files = {name: _file(name, entry, ranks) for name, entry in _mapping(values.get("files"), "files").items()}
    tensors = {name: _tensor(name, entry, files) for name, entry in _mapping(values.get("tensors"), "tensors").items()}
    needed = dict.fromkeys(files, 0)
    for tensor in tensors.values():
        for file, box in tensor.boxes:
            needed[file] += box.numel * DTYPES[tensor.dtype].itemsize
    for file, (length, _) in files.items():
        if needed[file] > length:
            raise ValueError(f"file {file}: its boxes take {needed[file]} bytes, it has {length}")
    return Manifest(owner, ranks, scalars, files, tensors)


def _file(name: str, entry: Any, ranks: int) -> tuple[int, str]:
    match = _SHARD.fullmatch(name)
    if match is None or int(match[1]) >= ranks:
        raise ValueError(f"file {_short(name)}: no name of a file of {ranks} ranks")
    if not isinstance(entry, list) or len(entry) != 2 or not _is_count(entry[0]):
        raise ValueError(f"file {name}: {_short(entry)} is no length and digest")
    if not isinstance(entry[1], str) or not _DIGEST.fullmatch(entry[1]):
        raise ValueError(f"file {name}: {_short(entry[1])} is no digest")
    return entry[0], entry[1]


def _tensor(name: str, entry: Any, files: Mapping[str, Any]) -> StoredTensor:
    what = f"tensor {_short(name)}"
    values = _mapping(entry, what)
    dtype, shape = values.get("dtype"), values.get("shape")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{what}: dtype {_short(dtype)} is not known")
    if not _is_shape(shape) or math.prod(shape) > _MAX_NUMEL:
        raise ValueError(f"{what}: shape {_short(shape)} is not that of a tensor")
    boxes = values.get("boxes")
    if not isinstance(boxes, list):
        raise ValueError(f"{what}: boxes {_short(boxes)} is not a list")
    found: dict[str, Box] = {}
    for box in boxes:
        if not isinstance(box, list) or len(box) != 3 or not _is_shape(box[1]) or not _is_shape(box[2]):
            raise ValueError(f"{what}: {_short(box)} is no box")
        file = box[0]
        if not isinstance(file, str) or file not in files:
            raise ValueError(f"{what}: file {_short(file)} is not one of the checkpoint's")
        if file in found:
            raise ValueError(f"{what}: file {file} is named twice")
        found[file] = Box(0, tuple(box[1]), tuple(box[2]))
    spec = FragmentSpec(fragment_id=0, name=name, tensors=(TensorSpec(name=_short(name), shape=tuple(shape)),))
    if fault := partition_fault(spec, [list(found.values())]):
        raise ValueError(fault)
    return StoredTensor(dtype, tuple(shape), tuple(found.items()))


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what}: {_short(value)} is not a JSON object")
    return value


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= _MAX_NUMEL


def _is_shape(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and len(value) <= _MAX_DIMENSIONS and all(map(_is_count, value))


def _short(value: Any) -> str:
    """Return a value for a line of an error: printable, and not long."""
    text = value if isinstance(value, str) and value.isprintable() else ascii(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
