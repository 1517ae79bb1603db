"""The ledger of a privacy budget: what was spent, on disk before anything that depends on it leaves.

Steps are reserved before they are taken, many at once. A kill therefore leaves steps counted that were never taken, and those
that are taken again are counted again: the ledger says too much, never too little. Nothing in it is removed or changed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

from edit.durable_files import lock_file, sync
from edit.errors import ConfigError, StorageError
from edit.plain_text import parse_json
from edit.trust.privacy import MOST_STEPS, Spent

__all__ = ["PrivacyLedger"]

_log = logging.getLogger(__name__)
_MOST_BYTES = 64 << 20
_DAMAGED = (ValueError, TypeError, KeyError, OverflowError)  # what a line raises that is no entry


class PrivacyLedger:
    """A file of JSON lines, each of them steps that were reserved. One process at a time writes it.

    Args:
        path: of the file; made, with its first line, where it is not there.
        unit: of what the steps are counted: privacy.unit, or "organisation".
        tokens: in each example, as `model.context` counts them; 0: not known.

    A last line that a kill cut short was never counted on: it is removed, with a warning. One that lacks nothing but its end of
    line counts. Raises StorageError for any other damage, and where the disk refuses, or has no locks; ConfigError where
    another process writes it, and where it has steps on other units, or on examples of another length: those of now may be
    several of then, or lie in several, so the steps do not add up. A reservation that says no unit (of older software) has that
    of the first line; one that says no length is taken to be of the present one.
    """

    def __init__(self, path: Path, unit: str = "sequence", tokens: int = 0) -> None:
        self._path, self._failed = path, False
        self._unit, self._tokens = unit, tokens
        self._first = _line({"format": 1, "unit": unit})
        there = path.exists()
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise StorageError(f"{path}: cannot be opened ({error.strerror})") from error
        try:
            self._lock()
            if there and os.fstat(self._descriptor).st_size == 0:
                _log.warning("%s: is empty, and begins as a new ledger; if it is a copy, stop, and copy it again", path)
            self._spent: dict[tuple[str, float, float], int] = self._read()
            if os.fstat(self._descriptor).st_size == 0:
                self._append(self._first)
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
        line: dict[str, object] = {
            "unit": self._unit,
            **({"tokens": self._tokens} if self._tokens else {}),
            "sampling": spent.sampling,
            "rate": spent.rate.hex(),
            "noise_multiplier": spent.noise_multiplier.hex(),
            "count": spent.count,
        }
        self._append(_line(line))
        key = spent.sampling, spent.rate, spent.noise_multiplier
        self._spent[key] = self._spent.get(key, 0) + spent.count

    def _append(self, data: bytes) -> None:
        rest = memoryview(data)
        if self._failed:
            raise StorageError(f"{self._path}: a write failed before; it must be opened again")
        end = os.fstat(self._descriptor).st_size
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            os.fsync(self._descriptor)
        except OSError as error:
            self._failed = True  # what is behind half a line could not be read
            with contextlib.suppress(OSError):  # nothing is used of it, so it does not count, however often it is tried
                os.ftruncate(self._descriptor, end)
            raise StorageError(f"{self._path}: cannot be written ({error.strerror}); no step is taken without it") from error

    def _lock(self) -> None:
        if not lock_file(self._descriptor, self._path):
            raise ConfigError(f"{self._path}: another process counts its steps in it; end that one first")

    def _read(self) -> dict[tuple[str, float, float], int]:
        """Return what is in the file; leave the position at its end, behind the last whole line."""
        if os.fstat(self._descriptor).st_size > _MOST_BYTES:
            raise StorageError(f"{self._path}: damaged (above {_MOST_BYTES} bytes)")
        with open(self._descriptor, "rb", closefd=False) as file:
            data = file.read()
        os.lseek(self._descriptor, 0, os.SEEK_END)
        spent: dict[tuple[str, float, float], int] = defaultdict(int)
        lines = data.split(b"\n")
        tail, self._unit_of_first = lines.pop(), self._unit
        for number, line in enumerate(lines, start=1):
            try:
                self._take(number, line, spent)
            except _DAMAGED as error:
                raise self._damaged(number, error) from error
        if tail:
            self._end(len(lines) + 1, tail, spent)
        return dict(spent)

    def _end(self, number: int, tail: bytes, spent: dict[tuple[str, float, float], int]) -> None:
        """Count a last line that has no end, and end it; or cut it off, where it is less than a line."""
        try:
            self._take(number, tail, spent)
        except _DAMAGED as error:
            if number == 1 and not self._first.startswith(tail):
                raise self._damaged(number, error) from error
        else:
            self._append(b"\n")
            return
        _log.warning(
            "%s: line %d, the last, was cut short, and is removed. A kill does that while it is written, and nothing is lost; "
            "if the file is a copy, stop, and copy it again",
            self._path,
            number,
        )
        size = os.fstat(self._descriptor).st_size - len(tail)  # `reserve` did not return
        os.ftruncate(self._descriptor, size)
        os.lseek(self._descriptor, size, os.SEEK_SET)

    def _damaged(self, number: int, error: Exception) -> StorageError:
        return StorageError(f"{self._path}: line {number} is damaged ({error}); what was spent is not known: restore the file")

    def _take(self, number: int, line: bytes, spent: dict[tuple[str, float, float], int]) -> None:
        """Add what a line says to `spent`. Raises one of _DAMAGED, and adds nothing."""
        values = parse_json(line)
        if number == 1:
            _check_first(values)
            self._unit_of_first = _text(values.get("unit", self._unit))
        else:
            count = _count(values)
            self._refuse_other(_text(values.get("unit", self._unit_of_first)), _length(values.get("tokens", self._tokens)))
            spent[str(values["sampling"]), _number(values["rate"]), _number(values["noise_multiplier"])] += count

    def _refuse_other(self, unit: str, tokens: int) -> None:
        if (unit, tokens) != (self._unit, self._tokens):
            raise ConfigError(
                f"{self._path}: its steps count for each {_example(unit, tokens)}, and now they would for each "
                f"{_example(self._unit, self._tokens)}: they do not add up. Restore the ledger, or privacy.unit and "
                "model.context as they were then; or train on other data, with another ledger"
            )


def _example(unit: str, tokens: int) -> str:
    return f"{unit} of {tokens} tokens" if tokens else unit


def _line(values: dict[str, object]) -> bytes:
    return json.dumps(values).encode() + b"\n"


def _check_first(values: Any) -> None:
    if not isinstance(values, dict) or values.get("format") != 1:
        raise ValueError("not the first line of a ledger of format 1")


def _text(value: Any) -> str:
    if type(value) is not str or not value.isidentifier():
        raise ValueError("no unit")
    return value


def _length(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError("no number of tokens")
    return value


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
