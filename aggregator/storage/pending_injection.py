"""What a run above has brought and no commit holds yet: on disk before it is promised, in memory until it is in.

A restart finds the file. If the journal has the commit that brought the injection, it was computed for a state that is no
longer there, and is dropped. So is what a region brought that was evicted since, or has another key: the file says who it was.

    FOLDER/injection/step-00000005.safetensors   of outer step 5 of the run above, in the form of a checkpoint
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path

from aggregator.storage import checkpoint
from edit.errors import RemoteProtocolError, StorageError
from edit.fragments.digest import digest
from edit.fragments.schema import Schema
from edit.merging.injection import Injected, Injection, check_content

__all__ = ["Injections", "Promised", "Sender", "check_bytes"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sender:
    """A region, and the key (`public_hash`) of the machine that spoke for it."""

    name: str
    key: str


@dataclass(frozen=True, slots=True)
class Promised:
    """An injection that is on disk. sender: None: an older version wrote the file, and did not say who brought it."""

    injection: Injection
    sender: Sender | None


class Injections:
    """One run's injections. `save` runs in the worker thread, `recover` before everything else, the rest on the loop."""

    def __init__(self, folder: Path) -> None:
        self.pending: Promised | None = None  # what the next commit brings
        self._folder = folder / "injection"

    def recover(self, injected: Injected | None) -> None:
        """Take up what was promised before a restart. injected: what of the run above the recovered state has."""
        if (path := checkpoint.latest(self._folder)) is None:
            return
        try:
            promised = _read(path)
        except StorageError as error:
            _log.warning("%s; the regional aggregator will send it again", error)
            return
        self.pending = promised if promised.injection.base == injected else None

    def save(self, injection: Injection, sender: Sender) -> None:
        """Write it; it is on disk when this returns. Raises StorageError."""
        tensors = {f"injection.{i}": part for i, part in injection.fragments.items()}
        metadata = {
            "outer_step": injection.brings.upper_step,
            "brings": injection.brings.to_json(),
            "base": injection.base.to_json() if injection.base is not None else None,
            "replaces": injection.replaces,
            "sender": [sender.name, sender.key],
        }
        checkpoint.save(self._folder, tensors, metadata, keep=1)

    def committed(self, injected: Injected | None) -> None:
        """Drop what was computed for another state than a commit that is on disk. injected: what of the run above it has."""
        if self.pending is not None and self.pending.injection.base != injected:
            self.drop()

    def drop(self, reason: str = "") -> None:
        """Bring nothing with the next commit. A file that cannot be removed is dropped again after a restart.

        reason: why what was promised is lost, for the log; '': nothing is.
        """
        dropped, self.pending = self.pending, None
        if dropped is None:
            return
        brings = dropped.injection.brings
        if reason:
            _log.info("outer step %d of run %s does not come in: %s", brings.upper_step, brings.run_id, reason)
        with contextlib.suppress(OSError):
            checkpoint.path_of(self._folder, brings.upper_step).unlink()


def check_bytes(injection: Injection, schema: Schema, claimed_digest: str) -> None:
    """Raise RemoteProtocolError unless the tensors fit the model and have the digest that was announced."""
    check_content(injection, schema)
    if digest([injection.fragments[i] for i in sorted(injection.fragments)]) != claimed_digest:
        raise RemoteProtocolError("an injection does not have the digest it claims")


def _read(path: Path) -> Promised:
    """Read an injection from its file. Raises StorageError."""
    tensors, metadata = checkpoint.load(path)
    try:
        brings = Injected.from_json(metadata["brings"])
        if brings is None:
            raise ValueError("it brings nothing")
        injection = Injection(
            brings=brings,
            base=Injected.from_json(metadata["base"]),
            replaces=bool(metadata["replaces"]),
            fragments={int(name.removeprefix("injection.")): tensor for name, tensor in tensors.items()},
        )
        name, key = metadata.get("sender") or ("", "")
        return Promised(injection, Sender(str(name), str(key)) if name else None)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise StorageError(f"{path}: is no injection ({error!r})") from error
