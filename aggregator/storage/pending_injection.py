"""What the regional aggregator has brought and no commit holds yet: on disk before it is promised, in memory until it is in.

Owns: the one that comes in with the next commit, and its file. A restart finds it there, unless its commit is in the journal
already: then it is for something that is no longer so, and is dropped. Must not know: rounds, gRPC, how it is applied.

    FOLDER/injection/step-00000005.safetensors   of outer step 5 of the run above; a checkpoint's form
    (`aggregator.storage.checkpoint`)
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from aggregator.storage import checkpoint
from edit.errors import RemoteProtocolError, StorageError
from edit.fragments.digest import digest
from edit.fragments.schema import Schema
from edit.merging.injection import Injected, Injection, check_content

__all__ = ["Injections", "check_bytes"]

_log = logging.getLogger(__name__)


class Injections:
    """One run's. `save` runs in the worker thread, `recover` before anything else does; the rest on the event loop."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "injection"
        self._pending: Injection | None = None

    @property
    def pending(self) -> Injection | None:
        """What the next commit brings."""
        return self._pending

    def recover(self, injected: Injected | None) -> None:
        """Take up what was promised before a restart. injected: what the recovered state has."""
        if (path := checkpoint.latest(self._folder)) is None:
            return
        try:
            promised = _read(path)
        except StorageError as error:
            _log.warning("%s; the regional aggregator will send it again", error)
            return
        self._pending = promised if promised.base == injected else None

    def save(self, injection: Injection) -> None:
        """On disk when this returns. Raises StorageError."""
        tensors = {f"injection.{i}": part for i, part in injection.fragments.items()}
        metadata = {
            "outer_step": injection.brings.upper_step,
            "brings": injection.brings.to_json(),
            "base": injection.base.to_json() if injection.base is not None else None,
            "replaces": injection.replaces,
        }
        checkpoint.save(self._folder, tensors, metadata, keep=1)

    def promise(self, injection: Injection) -> None:
        """The next commit brings it, instead of one that was promised before."""
        self._pending = injection

    def committed(self, injected: Injected | None) -> None:
        """A commit is on disk, and has `injected`: what was computed for something else will not be merged."""
        if self._pending is None or self._pending.base == injected:
            return
        self._pending = None
        if (path := checkpoint.latest(self._folder)) is not None:
            with contextlib.suppress(OSError):
                path.unlink()


def check_bytes(injection: Injection, schema: Schema, claimed_digest: str) -> None:
    """Whether the tensors are what was announced, and fit. Raises RemoteProtocolError."""
    check_content(injection, schema)
    if digest([injection.fragments[i] for i in sorted(injection.fragments)]) != claimed_digest:
        raise RemoteProtocolError("an injection does not have the digest it claims")


def _read(path: Path) -> Injection:
    """Raises StorageError."""
    tensors, metadata = checkpoint.load(path)
    try:
        brings = Injected.from_json(metadata["brings"])
        if brings is None:
            raise ValueError("it brings nothing")
        return Injection(
            brings=brings,
            base=Injected.from_json(metadata["base"]),
            replaces=bool(metadata["replaces"]),
            fragments={int(name.removeprefix("injection.")): tensor for name, tensor in tensors.items()},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(f"{path}: is no injection ({error!r})") from error
