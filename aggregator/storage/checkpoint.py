"""Checkpoints of the outer state: written whole or not at all, verified when read, with the journal segments that follow them.

    FOLDER/step-00000020.safetensors   tensors; in the metadata of safetensors: format, JSON metadata, BLAKE3 over both
    FOLDER/step-00000020.journal       the journal segment with the commits after step 20
    FOLDER/step-00000020.updates       the last published updates, the one to step 20 included

A damaged checkpoint is renamed to *.damaged, and the one before it, with all segments since, takes its place. Segments are kept
as long as the oldest kept checkpoint, so that this loses nothing. Where contributions are kept, so are the checkpoint and the
segments that a replay of the oldest of them begins with. A checkpoint of another format is not damaged: FormatError.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from edit.durable_files import check_format, make_folder, names_in, write_atomic_with
from edit.errors import LocalProtocolError, StorageError
from edit.plain_text import parse_json

__all__ = ["Recovered", "latest", "load", "path_of", "recover", "replayed_from", "save", "segment_of", "segments", "updates_of"]

# 2: norm statistics of the detector "level", and the slots of buffers are gone; 3: its forecasts; 4: residuals in bf16, int8
FORMAT = 4
OLDER = (3,)  # that can be read
Write = Callable[[dict[str, Tensor], Path, dict[str, str]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """Where a restart begins."""

    path: Path
    outer_step: int
    tensors: dict[str, Tensor]
    metadata: dict[str, Any]
    segments: tuple[tuple[int, Path], ...]  # (base outer step, path) in order, to be replayed onto the tensors
    at_least: int  # an outer step that was committed for certain, so the replay must reach it
    notes: tuple[str, ...]  # what was passed over and why, one line each


def path_of(folder: Path, outer_step: int) -> Path:
    """Return the path of the checkpoint of this outer step."""
    return folder / f"step-{outer_step:08d}.safetensors"


def segment_of(folder: Path, outer_step: int) -> Path:
    """Return the path of the journal segment with the commits after this outer step."""
    return folder / f"step-{outer_step:08d}.journal"


def segments(folder: Path) -> list[tuple[int, Path]]:
    """Return the journal segments that there are, with the outer steps that they follow, in order."""
    return [(base, segment_of(folder, base)) for base in _steps(folder, ".journal")]


def updates_of(folder: Path, outer_step: int) -> Path:
    """Return the path of the published updates that belong to this checkpoint."""
    return folder / f"step-{outer_step:08d}.updates"


def save(
    folder: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, Any],
    *,
    keep: int,
    replayable: int = 0,
    write: Write = save_file,
) -> Path:
    """Write the checkpoint of metadata["outer_step"], durably, then remove what is older than the `keep` newest.

    replayable: keep also what a replay of so many last outer steps reads, however close together the newest checkpoints are:
    each stop of a run adds one. write: safetensors' `save_file`, or what a test has in its place. Raises StorageError: the
    folder is as before.
    """
    path = path_of(folder, _step(metadata))
    whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(metadata, sort_keys=True)
    about = {"format": str(FORMAT), "edit": text, "blake3": _checksum(whole, text)}
    make_folder(folder)
    _remove_temporary(folder)
    write_atomic_with(path, lambda temporary: write(whole, temporary, about), failures=(SafetensorError,))
    _remove_old(folder, keep, replayable)
    return path


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and metadata of one checkpoint, verified. Raises StorageError, FormatError; both name the file."""
    try:
        with safe_open(path, framework="pt") as file:
            written = file.metadata() or {}
            text = written["edit"]
            check_format(path, int(written.get("format", "1")), FORMAT, OLDER)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        if written["blake3"] != _checksum(tensors, text):
            raise StorageError(f"{path}: damaged (wrong checksum)")
        return tensors, parse_json(text)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise StorageError(f"{path}: damaged or not a checkpoint ({_said(error)})") from error


def latest(folder: Path) -> Path | None:
    """Return the newest checkpoint by name, verified or not; None when there is none."""
    steps = _steps(folder, ".safetensors")
    return path_of(folder, steps[-1]) if steps else None


def recover(folder: Path, *, tidy: bool = True, at: int | None = None) -> Recovered | None:
    """Return the newest checkpoint that is not damaged, and what is to be replayed onto it; None when the folder holds none.

    tidy: remove half-written files and rename damaged checkpoints; False for a reader beside a running coordinator. at: an
    outer step that the checkpoint must not be after, and that is to be replayed to. Raises StorageError when all checkpoints
    are damaged, or are later, FormatError.
    """
    if tidy:
        _remove_temporary(folder)
    steps = _steps(folder, ".safetensors")
    seen = [*steps, *_steps(folder, ".journal"), *_steps(folder, ".safetensors.damaged")]
    notes: list[str] = []
    if at is not None and steps:
        if at < steps[0]:
            raise StorageError(
                f"{folder}: the parameters of outer step {at} are kept no longer; the oldest checkpoint is of {steps[0]}"
            )
        steps, seen = [step for step in steps if step <= at], [at]
    for step in reversed(steps):
        path = path_of(folder, step)
        try:
            tensors, metadata = load(path)
            if metadata.get("outer_step") != step:
                raise StorageError(f"{path}: holds outer step {metadata.get('outer_step')}; was it renamed?")
        except StorageError as error:
            notes.append(str(error))
            continue
        if tidy:
            _set_aside(folder, [later for later in steps if later > step])
        return Recovered(
            path=path,
            outer_step=step,
            tensors=tensors,
            metadata=metadata,
            segments=tuple((base, path) for base, path in segments(folder) if step <= base and (at is None or base < at)),
            at_least=max(seen),
            notes=tuple(notes),
        )
    if seen:
        raise StorageError("; ".join(notes) or f"{folder}: a journal without the checkpoint before it; restore it from a copy")
    return None


def replayed_from(folder: Path, at: int) -> list[Path]:
    """Return the files that a recovery of this outer step reads: the newest checkpoint up to it, and the journal after that.

    Raises StorageError where no checkpoint so old is kept.
    """
    steps = [step for step in _steps(folder, ".safetensors") if step <= at]
    if not steps:
        raise StorageError(f"{folder}: has no checkpoint of outer step {at} or before")
    return [path_of(folder, steps[-1]), *(path for base, path in segments(folder) if steps[-1] <= base < at)]


def _step(metadata: Mapping[str, Any]) -> int:
    step = metadata.get("outer_step")
    if not isinstance(step, int) or step < 0:
        raise LocalProtocolError(f"checkpoint: metadata has outer_step {step!r}")
    return step


def _steps(folder: Path, suffix: str) -> list[int]:
    """Return the outer steps of the files step-N<suffix>, ascending. Raises StorageError."""
    names = (name for name in names_in(folder) if name.startswith("step-") and name.endswith(suffix))
    numbers = (name.removeprefix("step-").removesuffix(suffix) for name in names)
    return sorted(int(number) for number in numbers if number.isdigit())


def _remove_old(folder: Path, keep: int, replayable: int) -> None:
    """Remove what `save` does not keep; what cannot be removed now is removed after the next one."""
    with contextlib.suppress(OSError, StorageError):
        steps = _steps(folder, ".safetensors")
        oldest = steps[-keep:][0]
        if replayable:
            before = [step for step in steps if step <= steps[-1] - replayable]
            oldest = min(oldest, (before or steps[:1])[-1])
        for suffix in (".safetensors", ".journal", ".updates", ".safetensors.damaged"):
            for step in _steps(folder, suffix):
                if step < oldest:
                    (folder / f"step-{step:08d}{suffix}").unlink()


def _set_aside(folder: Path, steps: list[int]) -> None:
    """Rename damaged checkpoints, so that they do not count among those that are kept."""
    for path in (path_of(folder, step) for step in steps):
        try:
            path.rename(path.with_name(path.name + ".damaged"))
        except OSError as error:
            raise StorageError(f"{path}: cannot be renamed ({error.strerror})") from error


def _remove_temporary(folder: Path) -> None:
    """Remove half-written files of a process that was killed."""
    with contextlib.suppress(OSError):
        for path in folder.glob(".step-*.tmp"):
            path.unlink()


def _checksum(tensors: Mapping[str, Tensor], text: str) -> str:
    """Return BLAKE3 over the metadata and every tensor's name, type, shape and bytes, in order of names."""
    digest = blake3(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)  # numpy has no bf16
    return digest.hexdigest()


def _said(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error) or repr(error)
