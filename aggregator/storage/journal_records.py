"""The journal's records as bytes: framing, checksums, and the merged fragment inside. The rules are in `storage.journal`.

    magic b"EdJ1" | u32 length of the JSON header | u64 length of the body | u32 crc32 of all but itself | header | body

All numbers are little-endian. The body of a fragment is its merged pseudo-gradient, raw fp32, followed by what was injected
with it, if anything was.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edit.durable_files import check_format
from edit.errors import LocalProtocolError, StorageError
from edit.merging.injection import Injection
from edit.merging.merge import Merged
from edit.merging.penalty import NormStatistics
from edit.plain_text import parse_json
from edit.records import PeerVerdict, Verdict

__all__ = [
    "BadRecord",
    "Buffer",
    "Record",
    "body_of",
    "fragment_header",
    "frame",
    "good_record_after",
    "merged_of",
    "number",
    "records",
    "verdicts_from",
    "verdicts_written",
]

MAGIC = b"EdJ1"
_PREFIX = struct.Struct("<4sIQI")
_BEFORE_CRC = struct.calcsize("<4sIQ")
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Record:
    """One whole record, at bytes `offset` to `end` of its file."""

    offset: int
    end: int
    header: dict[str, Any]
    body: bytearray


class BadRecord(Exception):
    """The bytes at `offset` are not a record."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(reason)
        self.offset = offset


def records(path: Path) -> Iterator[Record]:
    """Yield the records of a file from its start.

    Raises BadRecord where they end before the file does, FormatError for records of another layout, StorageError.
    """
    try:
        with path.open("rb") as file:
            begins = file.read(len(MAGIC))
            if begins[:3] == MAGIC[:3] and begins[3:].isdigit():
                check_format(path, int(begins[3:]), int(MAGIC[3:]))
            yield from _records(file, os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise StorageError(f"{path}: cannot be read ({error.strerror})") from error


def _records(file: BufferedReader, size: int) -> Iterator[Record]:
    offset = 0
    while offset < size:
        record = _read_record(file, offset, size)
        yield record
        offset = record.end


def _read_record(file: BufferedReader, offset: int, size: int) -> Record:
    file.seek(offset)
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        raise BadRecord(offset, "the record is cut short")
    magic, header_bytes, body_bytes, crc = _PREFIX.unpack(prefix)
    end = offset + _PREFIX.size + header_bytes + body_bytes
    if magic != MAGIC:
        raise BadRecord(offset, "no record begins here")
    if end > size:
        raise BadRecord(offset, "the record is cut short")
    header, body = file.read(header_bytes), bytearray(body_bytes)
    file.readinto(body)
    if zlib.crc32(body, zlib.crc32(header, zlib.crc32(prefix[:_BEFORE_CRC]))) != crc:
        raise BadRecord(offset, "wrong checksum")
    return Record(offset, end, _header(offset, header), body)


def _header(offset: int, text: bytes) -> dict[str, Any]:
    try:
        header = parse_json(text)
    except ValueError as error:
        raise BadRecord(offset, "the header is not JSON") from error
    if not isinstance(header, dict):
        raise BadRecord(offset, "the header is not an object")
    return header


def good_record_after(path: Path, offset: int) -> bool:
    """Return whether a whole record lies behind `offset`: then the bad one there was not torn, but damaged."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        while (offset := data.find(MAGIC, offset + 1)) >= 0:
            try:
                _read_record(file, offset, len(data))
            except BadRecord:
                continue
            return True
    return False


def frame(header: Mapping[str, object], body: Buffer) -> tuple[bytes, Buffer]:
    """Return one record, in two pieces, so that a large body is not copied."""
    text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    start = struct.pack("<4sIQ", MAGIC, len(text), len(body))
    crc = zlib.crc32(body, zlib.crc32(text, zlib.crc32(start)))
    return start + struct.pack("<I", crc) + text, body


def fragment_header(round_id: int, outer_step: int, merged: Merged, injection: Injection | None) -> dict[str, object]:
    """Return the JSON part of a merged fragment; floats survive to the bit."""
    return {
        "kind": "fragment",
        "round_id": round_id,
        "outer_step": outer_step,
        "fragment_id": merged.fragment_id,
        "rollback": merged.merged is None,
        "injected": injection is not None and merged.fragment_id in injection.fragments,
        "replaces": injection is not None and injection.replaces,
        "verdicts": verdicts_written(merged.verdicts),
        "statistics": {peer_id: statistics.to_json() for peer_id, statistics in merged.statistics.items()},
        "merged_norm": number(merged.merged_norm),
        "clip": number(merged.clip),
    }


def merged_of(path: Path, record: Record) -> tuple[Merged, Tensor | None]:
    """Return the merged fragment in a record and what was injected with it, to the bit. Raises StorageError."""
    try:
        return _merged(record)
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(f"{path}: the record at byte {record.offset} is not a fragment ({error!r})") from error


def _merged(record: Record) -> tuple[Merged, Tensor | None]:
    header = record.header
    vectors = _vectors(record.body, (not header["rollback"]) + header["injected"])
    merged = Merged(
        fragment_id=header["fragment_id"],
        merged=None if header["rollback"] else next(vectors),
        verdicts=verdicts_from(header["verdicts"]),
        statistics={peer_id: NormStatistics.from_json(written) for peer_id, written in header["statistics"].items()},
        merged_norm=float(header["merged_norm"]),
        clip=float(header["clip"]),
    )
    return merged, next(vectors, None)


def verdicts_written(verdicts: Iterable[PeerVerdict]) -> list[list[object]]:
    """Return verdicts as JSON values."""
    return [[v.peer_id, v.verdict.value, number(v.norm), number(v.weight), v.staleness] for v in verdicts]


def verdicts_from(written: Iterable[Any]) -> tuple[PeerVerdict, ...]:
    """Return the verdicts that `verdicts_written` gave. Raises TypeError or ValueError for anything else."""
    return tuple(
        PeerVerdict(peer_id=peer_id, verdict=Verdict(verdict), norm=float(norm), weight=float(weight), staleness=int(staleness))
        for peer_id, verdict, norm, weight, staleness in written
    )


def number(value: float) -> float | str:
    """Return a float as a JSON value; NaN and infinity, which JSON lacks, as text."""
    return value if math.isfinite(value) else str(value)


def _vectors(body: bytearray, count: int) -> Iterator[Tensor]:
    """Yield the equally long vectors in the body of a fragment; they share its memory."""
    if count == 0:
        return
    vector = torch.frombuffer(body, dtype=torch.float32)
    yield from vector.view(count, -1)


def body_of(merged: Merged, injection: Injection | None) -> Buffer:
    """Return the raw part of a merged fragment: fp32; empty for a rollback. Copied only when something was injected with it."""
    injected = injection.fragments.get(merged.fragment_id) if injection is not None else None
    vectors = [vector for vector in (merged.merged, injected) if vector is not None]
    if sys.byteorder != "little" or any(vector.dtype is not torch.float32 or vector.dim() != 1 for vector in vectors):
        raise LocalProtocolError("journal: a merged fragment must be one flat fp32 tensor of a little-endian machine")
    if not vectors:
        return b""
    return (torch.cat(vectors) if len(vectors) > 1 else vectors[0]).detach().contiguous().numpy().view("uint8").data
