"""The ledger of a privacy budget: what was spent, on disk before anything that depends on it leaves.

Steps are reserved before they are taken, many at once. A kill therefore leaves steps counted that were never taken, and those
that are taken again are counted again: the ledger says too much, never too little. Nothing in it is removed or changed.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

from edit.durable_files import sync
from edit.errors import ConfigError, StorageError
from edit.plain_text import parse_json
from edit.trust.privacy import MOST_STEPS, Spent

__all__ = ["PrivacyLedger"]

_MOST_BYTES = 64 << 20


class PrivacyLedger:
    """A file of JSON lines, each of them steps that were reserved. One process at a time writes it.

    Args:
        path: of the file; made, with its first line, where it is not there.
        unit: what a row of the data is, for who reads the file.

    A line that a kill cut short was never counted on: it is removed. Raises StorageError for any other damage, and where
    the disk refuses; ConfigError where another process writes it.
    """

    def __init__(self, path: Path, unit: str = "sequence") -> None:
        self._path, self._failed = path, False
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise StorageError(f"{path}: cannot be opened ({error.strerror})") from error
        try:
            self._lock()
            self._spent: dict[tuple[str, float, float], int] = self._read()
            if os.fstat(self._descriptor).st_size == 0:
                self._append({"format": 1, "unit": unit})
                sync(path.parent)
        except BaseException:
            os.close(self._descriptor)
            raise

    def close(self) -> None:
        """Close the file; nothing is left to be written."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @property
    def path(self) -> Path:
        """Where it is."""
        return self._path

    @property
    def spent(self) -> tuple[Spent, ...]:
        """Return all that was reserved, of any start, by kind."""
        return tuple(
            Spent(sampling=sampling, rate=rate, noise_multiplier=noise, count=count)
            for (sampling, rate, noise), count in sorted(self._spent.items())
        )

    @property
    def count(self) -> int:
        """The number of all steps, passes and attempts."""
        return sum(self._spent.values())

    def reserve(self, spent: Spent) -> None:
        """Count it, on disk when this returns. Raises StorageError: it must not be used then, and may be counted yet."""
        if not 0 < spent.count <= MOST_STEPS:
            raise ValueError(f"{spent.count} steps")
        line = {
            "sampling": spent.sampling,
            "rate": spent.rate.hex(),
            "noise_multiplier": spent.noise_multiplier.hex(),
            "count": spent.count,
        }
        self._append(line)
        key = spent.sampling, spent.rate, spent.noise_multiplier
        self._spent[key] = self._spent.get(key, 0) + spent.count

    def _append(self, line: dict[str, object]) -> None:
        rest = memoryview(json.dumps(line).encode() + b"\n")
        if self._failed:
            raise StorageError(f"{self._path}: a write failed before; it must be opened again")
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            os.fsync(self._descriptor)
        except OSError as error:
            self._failed = True  # what is behind half a line could not be read
            raise StorageError(f"{self._path}: cannot be written ({error.strerror}); no step is taken without it") from error

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{self._path}: another process counts its steps in it; end that one first") from None

    def _read(self) -> dict[tuple[str, float, float], int]:
        """Return what is in the file; leave the position at its end, behind the last whole line."""
        if os.fstat(self._descriptor).st_size > _MOST_BYTES:
            raise StorageError(f"{self._path}: damaged (above {_MOST_BYTES} bytes)")
        with open(self._descriptor, "rb", closefd=False) as file:
            data = file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):  # a write that a kill cut short: `reserve` did not return
            os.ftruncate(self._descriptor, whole)
        os.lseek(self._descriptor, whole, os.SEEK_SET)
        spent: dict[tuple[str, float, float], int] = defaultdict(int)
        for number, line in enumerate(data[:whole].splitlines(), start=1):
            try:
                values = parse_json(line)
                if number == 1:
                    _check_first(values)
                    continue
                spent[str(values["sampling"]), _number(values["rate"]), _number(values["noise_multiplier"])] += _count(values)
            except (ValueError, TypeError, KeyError, OverflowError) as error:
                raise StorageError(
                    f"{self._path}: line {number} is damaged ({error}); what was spent is not known: restore the file"
                ) from error
        return dict(spent)


def _check_first(values: Any) -> None:
    if not isinstance(values, dict) or values.get("format") != 1:
        raise ValueError("not the first line of a ledger of format 1")


def _number(text: Any) -> float:
    value = float.fromhex(text)
    if not 0 < value < 1e12:
        raise ValueError(f"{text} is no rate or multiplier")
    return value


def _count(values: Any) -> int:
    count = values["count"]
    if values["sampling"] not in ("poisson", "shuffle", "all") or type(count) is not int or not 0 < count <= MOST_STEPS:
        raise ValueError("no number of steps")
    return count
