"""A peer's own data: files become one row of tokens, and the row becomes batches; also the loss on held-out data.

Text is read as bytes, a token is a byte; the files of a folder, and the texts of a JSONL file, are joined by byte 0, which no
text contains. Every pass over
the data visits all its windows once, in an order that is computed from the seed and not stored, so a position is two integers.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3
from torch import Tensor, nn

from edit.errors import ConfigError
from edit.plain_text import parse_json, printable

__all__ = ["SEPARATOR", "Batches", "Tokens", "check_field", "evaluate", "open_tokens", "permute", "stream_seed"]

SEPARATOR = 0
CHECKED_BYTES = 1 << 30  # of a token file, before training
_PIECE_BYTES = 1 << 20
_SNIFF_BYTES = 8192
_JSONL = ".jsonl"
_MASK = (1 << 64) - 1
_U64 = np.uint64
_log = logging.getLogger("peers")


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """A row of token ids, in memory or memory-mapped."""

    array: npt.NDArray[np.unsignedinteger]
    origin: str
    vocabulary: int

    def __len__(self) -> int:
        return int(self.array.shape[0])

    def windows(self, starts: npt.NDArray[np.int64], length: int) -> Tensor:
        """Return `length` tokens from each start: (len(starts), length) int64. Raises ConfigError for an id out of range."""
        rows = self.array[starts[:, None] + np.arange(length)]
        if self.array.itemsize > 1 and int(rows.max()) >= self.vocabulary:
            row, column = np.argwhere(rows >= self.vocabulary)[0]
            self._refuse(starts[row] + column)
        return torch.from_numpy(rows.astype(np.int64))

    def check(self) -> None:
        """Look at the ids, at no more than CHECKED_BYTES of them. Raises ConfigError for an id out of range."""
        if self.array.itemsize == 1:
            return
        pieces, piece = CHECKED_BYTES // _PIECE_BYTES, _PIECE_BYTES // self.array.itemsize
        count = -(-len(self) // piece)
        for number in range(count) if count <= pieces else np.linspace(0, count - 1, pieces, dtype=np.int64):
            ids = self.array[int(number) * piece : (int(number) + 1) * piece]
            if int(np.max(ids)) >= self.vocabulary:
                self._refuse(int(number) * piece + int(np.argmax(ids >= self.vocabulary)))

    def _refuse(self, place: int) -> NoReturn:
        raise ConfigError(f"{self.origin}: token {place} has id {self.array[place]}, model.vocabulary is {self.vocabulary}")


def open_tokens(path: Path, *, context: int, vocabulary: int, field: str | None = None) -> Tokens:
    """Open a text file, a folder of text (recursive, sorted), or a token file: little-endian uint16 `.bin`, uint32 `.u32.bin`.

    A file `.jsonl`, also in a folder, has an object in each line, whose text is in `field`. Files are memory-mapped; a folder
    and a JSONL file are read into memory. Of a token file CHECKED_BYTES are looked at here, spread over it, and all ids as they
    are drawn. Hidden, empty, binary and unreadable files of a folder are skipped, counted and logged.

    Raises ConfigError when the path is missing, unreadable, empty, not text, or shorter than one context and its last target,
    when a JSONL file has no such field, and for an id that the vocabulary has not.
    """
    try:
        if path.is_dir():
            array = _read_folder(path, field)
        elif path.suffix == _JSONL:
            array = np.frombuffer(_read_jsonl(path, field), dtype=np.uint8)
        elif field is not None:
            raise ConfigError(f"{path}: --field {field} is for .jsonl files; leave it out")
        else:
            array = _map_file(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give a text file, a folder of text or a .bin") from error
    if array.itemsize == 1 and vocabulary < 256:
        raise ConfigError(f"{path}: text is read as bytes and needs model.vocabulary >= 256, the run has {vocabulary}")
    if len(array) < context + 1:
        raise ConfigError(
            f"{path}: {len(array)} tokens are less than one context and its last target ({context} + 1); give more"
        )
    tokens = Tokens(array, str(path), vocabulary)
    tokens.check()
    return tokens


def check_field(path: Path, field: str | None) -> None:
    """Raise ConfigError where --field does not fit a file, by its first line: before anybody is waited for."""
    if path.suffix != _JSONL:
        if field is not None and path.is_file():
            raise ConfigError(f"{path}: --field {field} is for .jsonl files; leave it out")
        return
    try:
        next(_texts(path, field), None)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error


def _read_jsonl(path: Path, field: str | None) -> bytes:
    """Return the texts in `field` of all lines. Raises ConfigError, which names the line, and the fields that are there."""
    joined = bytes((SEPARATOR,)).join(_texts(path, field))
    if not joined:
        raise ConfigError(f"{path}: is empty")
    return joined


def _texts(path: Path, field: str | None) -> Iterator[bytes]:
    """Yield the text in `field` of each line. Raises as `_read_jsonl`."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = parse_json(line)
            except ValueError as error:
                raise ConfigError(f"{path}: line {number} is not JSON ({error})") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{path}: line {number} is no object with fields, but {type(row).__name__}")
            text = row.get(field) if field is not None else None
            if not isinstance(text, str):
                found = (
                    ", ".join(printable(key)[:40] for key, value in list(row.items())[:16] if isinstance(value, str)) or "none"
                )
                which = (
                    f"no text in the field {field}" if field is not None else "fields, and one of them must be named: --field"
                )
                raise ConfigError(f"{path}: line {number} has {which} (fields with text: {found})")
            yield text.encode("utf-8", "surrogatepass").replace(b"\0", b"")


def _map_file(path: Path) -> npt.NDArray[np.unsignedinteger]:
    size = path.stat().st_size
    if size == 0:
        raise ConfigError(f"{path}: is empty")
    if path.suffix != ".bin":
        if _is_binary(path):
            raise ConfigError(f"{path}: is not text (it contains a zero byte); name a token file *.bin or *.u32.bin")
        return np.memmap(path, dtype=np.uint8, mode="r")
    dtype = np.dtype("<u4" if path.name.endswith(".u32.bin") else "<u2")
    if size % dtype.itemsize:
        raise ConfigError(f"{path}: {size} bytes are no whole number of {dtype.name} tokens (*.bin uint16, *.u32.bin uint32)")
    return np.memmap(path, dtype=dtype, mode="r")


def _read_folder(folder: Path, field: str | None) -> npt.NDArray[np.unsignedinteger]:
    skipped: Counter[str] = Counter()
    joined, named = bytearray(), field is None
    for path in _files(folder, skipped):
        if path.suffix == _JSONL and path.is_file() and path.stat().st_size:
            text, named = bytes((SEPARATOR,)).join(_texts(path, field)), True
            reason = "" if text else "empty"
        else:
            text, reason = _read_text(path)
        if reason:
            skipped[reason] += 1
            continue
        if joined:
            joined.append(SEPARATOR)
        joined += text
    left_out = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
    if not joined:
        raise ConfigError(f"{folder}: contains no text ({left_out or 'no files'})")
    if not named:
        raise ConfigError(f"{folder}: --field {field} is for .jsonl files, and here is none; leave it out")
    if left_out:
        _log.info("%s: left out: %s", folder, left_out)
    return np.frombuffer(joined, dtype=np.uint8)


def _files(folder: Path, skipped: Counter[str]) -> Iterator[Path]:
    def unreadable(_: OSError) -> None:
        skipped["unreadable"] += 1

    for root, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        skipped["hidden"] += sum(name.startswith(".") for name in names)
        yield from (Path(root, name) for name in sorted(names) if not name.startswith("."))
    skipped += Counter()  # drops the zero counts


def _read_text(path: Path) -> tuple[bytes, str]:
    """Return the file's bytes, or the reason why it is skipped."""
    try:
        if not path.is_file():
            return b"", "not a file"
        if _is_binary(path):
            return b"", "binary"
        text = path.read_bytes()
    except OSError:
        return b"", "unreadable"
    return (text, "") if text else (b"", "empty")


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return SEPARATOR in file.read(_SNIFF_BYTES)


def stream_seed(run_seed: int, peer_id: str) -> int:
    """Return the seed of a peer's window order: the same for the same peer and run, different for peers with equal data."""
    return int.from_bytes(hashlib.sha256(f"{run_seed}/{peer_id}".encode()).digest()[:8], "big")


def permute(indices: npt.NDArray[np.uint64], size: int, key: int) -> npt.NDArray[np.uint64]:
    """Return where a pseudo-random permutation of range(size), given by `key`, sends each index.

    A four-round Feistel network over the next power of four, cycle-walked back into range (Black and Rogaway 2002): nothing is
    stored, whatever the size.
    """
    half = _U64((max(size - 1, 1).bit_length() + 1) // 2)
    low = _U64((1 << int(half)) - 1)
    out = indices.copy()
    outside = np.ones(len(out), dtype=bool)
    while outside.any():
        left, right = out[outside] >> half, out[outside] & low
        for turn in range(4):
            left, right = right, left ^ (_mix(right + _U64(_hash(key, turn))) & low)
        out[outside] = (left << half) | right
        outside = out >= size
    return out


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014), wrapping modulo 2^64."""
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))


def _hash(*numbers: int) -> int:
    digest = hashlib.sha256(b"".join((number & _MASK).to_bytes(8, "big") for number in numbers)).digest()
    return int.from_bytes(digest[:8], "big")


class Batches:
    """Endless iterator of (tokens, targets), both (batch_size, context) int64 on the CPU, targets one token ahead.

    Each pass cuts the row into adjacent windows from an offset of its own and visits all of them once. The order follows from
    the seed, the data's length and the context alone; a batch may run over the end of a pass.
    """

    def __init__(self, source: Tokens, context: int, batch_size: int, seed: int) -> None:
        if len(source) < context + 1:
            raise ConfigError(
                f"{source.origin}: {len(source)} tokens are less than one context and its last target ({context} + 1)"
            )
        self._source = source
        self._sample = _sample_of(source.array)
        self._context = context
        self._batch_size = batch_size
        self._seed = seed
        self._pass = 0
        self._index = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        rows = self._source.windows(self._starts(self._batch_size), self._context + 1)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    @property
    def examples(self) -> int:
        """The number of examples of context + 1 tokens that the row is cut into, from its beginning, without an overlap."""
        return len(self._source) // (self._context + 1)

    def example(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return (tokens, targets) of these examples, both (len(numbers), context) int64 on the CPU. No position changes."""
        rows = self._source.windows(np.array(numbers, dtype=np.int64) * (self._context + 1), self._context + 1)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def _starts(self, count: int) -> npt.NDArray[np.int64]:
        """Return the next `count` window starts and advance the position."""
        parts = []
        while count:
            offset, size = self._plan()
            take = min(count, size - self._index)
            indices = np.arange(self._index, self._index + take, dtype=np.uint64)
            order = permute(indices, size, _hash(self._seed, self._pass, 1))
            parts.append(order.astype(np.int64) * self._context + offset)
            count -= take
            self._index += take
            if self._index == size:
                self._pass, self._index = self._pass + 1, 0
        return np.concatenate(parts)

    def _plan(self) -> tuple[int, int]:
        """Return the offset and the number of windows of the current pass."""
        room = len(self._source) - self._context  # possible starts
        offset = _hash(self._seed, self._pass, 0) % min(room, self._context)
        return offset, (len(self._source) - 1 - offset) // self._context

    def state(self) -> dict[str, int]:
        """Return the position, and what it is a position in, as plain integers."""
        return {**self._identity(), "pass": self._pass, "index": self._index}

    def load(self, state: Mapping[str, Any], *, new_data: bool = False) -> None:
        """Load a position. Raises ConfigError, and changes nothing, when it belongs to other data or settings.

        new_data: if the data is another one, begin at its start instead.
        """
        if (plugin := state.get("plugin")) is not None:
            if not new_data:
                raise ConfigError(
                    f"{self._source.origin}: the data has changed since the checkpoint ({plugin} then): give --data {plugin}, "
                    "or --new-data, which begins at its start and keeps the model and the optimizer's state"
                )
            _log.info("%s: other data than the checkpoint's (%s): from its start", self._source.origin, plugin)
            return
        here = self._identity()
        saved = {"sample": here["sample"], **state}  # an older checkpoint has none
        then, now = saved.get("tokens"), here["tokens"]
        if then is not None and (then, saved["sample"]) != (now, here["sample"]):
            change = f"{then} tokens then, {now} now" if then != now else f"other {now} tokens then"
            if new_data and {**saved, "tokens": now, "sample": here["sample"]}.items() >= here.items():
                _log.info("%s: other data than the checkpoint's (%s): from its start", self._source.origin, change)
                self._pass, self._index = 0, 0
                return
            raise ConfigError(
                f"{self._source.origin}: the data has changed since the checkpoint ({change}): restore the earlier data; or "
                "add --new-data to begin at the start of the new data, with the model and the optimizer's state of "
                "the checkpoint"
            )
        for key, value in here.items():
            if saved.get(key) != value:
                raise ConfigError(
                    f"{self._source.origin}: saved data position has {key} = {saved.get(key)}, here it is {value}"
                )
        before = self._pass, self._index
        self._pass, self._index = state.get("pass", -1), state.get("index", -1)
        if self._pass < 0 or not 0 <= self._index < self._plan()[1]:
            self._pass, self._index = before
            raise ConfigError(f"{self._source.origin}: saved data position is damaged: {dict(state)}")

    @property
    def fingerprint(self) -> str:
        """Return the length and a hash of the first and last windows: enough to tell another file or another version."""
        return f"{len(self._source)} tokens, {self._sample:012x}"

    def _identity(self) -> dict[str, int]:
        return {"seed": self._seed, "tokens": len(self._source), "context": self._context, "sample": self._sample}


def _sample_of(array: npt.NDArray[np.unsignedinteger]) -> int:
    """Return 48 bits of a hash of the first and last tokens."""
    edge = 1 << 16
    return int(blake3(array[:edge].tobytes()).update(array[-edge:].tobytes()).hexdigest()[:12], 16)


@torch.no_grad()
def evaluate(model: nn.Module, tokens: Tokens, context: int, max_batches: int, batch_size: int = 16) -> float:
    """Return the mean loss in nats per token over at most max_batches * batch_size windows spread evenly over the row.

    The windows do not overlap and depend on no seed, so values of different models compare. The training flag is restored.
    """
    device = next(model.parameters()).device
    available = (len(tokens) - 1) // context
    count = min(available, max_batches * batch_size)
    starts = np.arange(count, dtype=np.int64) * available // count * context
    training = model.training
    model.eval()
    total = 0.0
    try:
        for part in np.array_split(starts, -(-count // batch_size)):
            rows = tokens.windows(part, context + 1).to(device)
            total += float(model(rows[:, :-1], rows[:, 1:])) * len(part)
    finally:
        model.train(training)
    return total / count
