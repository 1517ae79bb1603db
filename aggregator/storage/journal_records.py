"""The journal's records as bytes: framing, checksums, and the merged fragment inside. The rules are in `storage.journal`.

    magic b"EdJ1" | u32 length of the JSON header | u64 length of the body | u32 crc32 of all but itself | header | body

All numbers are little-endian. The body of a fragment is its merged pseudo-gradient, encoded; then what that leaves out, as it
is stored (`edit.codecs.residuals`), if it is kept; then what was injected with it, raw fp32, if anything was. Until format 3
the merged pseudo-gradient is raw fp32 and leaves nothing out.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edit.codecs import codec
from edit.codecs.residuals import Residual
from edit.durable_files import check_format
from edit.errors import EditError, StorageError
from edit.merging.injection import Injection
from edit.merging.outer_state import MergeRecord
from edit.merging.penalty import NormStatistics
from edit.plain_text import parse_json
from edit.records import EncodedTensor, PeerVerdict, Verdict

__all__ = [
    "BadRecord",
    "Buffer",
    "Record",
    "body_of",
    "fragment_header",
    "fragment_of",
    "frame",
    "good_record_after",
    "number",
    "outlines",
    "records",
    "verdicts_from",
    "verdicts_written",
]

MAGIC = b"EdJ1"
_PREFIX = struct.Struct("<4sIQI")
_BEFORE_CRC = struct.calcsize("<4sIQ")
_BLOCK_BYTES = 1 << 20  # that are read at a time where a record is looked for
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Record:
    """One whole record, at bytes `offset` to `end` of its file."""

    offset: int
    end: int
    header: dict[str, Any]
    body: Buffer


class BadRecord(Exception):
    """The bytes at `offset` are not a record."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(reason)
        self.offset = offset


def records(path: Path, offset: int = 0) -> Iterator[Record]:
    """Yield the records of a file from its start, or from that of another record.

    Raises BadRecord where they end before the file does, FormatError for records of another layout, StorageError.
    """
    try:
        with path.open("rb") as file:
            begins = file.read(len(MAGIC))
            if begins[:3] == MAGIC[:3] and begins[3:].isdigit():
                check_format(path, int(begins[3:]), int(MAGIC[3:]))
            yield from _records(file, offset, os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise StorageError(f"{path}: cannot be read ({error.strerror})") from error


def _records(file: BufferedReader, offset: int, size: int) -> Iterator[Record]:
    while offset < size:
        record = _read_record(file, offset, size)
        yield record
        offset = record.end


def outlines(path: Path) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Yield of each record of a file its header, and where its body begins and ends. Bodies are not read, nor checked.

    Raises BadRecord, OSError.
    """
    with path.open("rb") as file:
        offset, size = 0, os.fstat(file.fileno()).st_size
        while offset < size:
            file.seek(offset)
            prefix = file.read(_PREFIX.size)
            if len(prefix) < _PREFIX.size:
                raise BadRecord(offset, "the record is cut short")
            magic, header_bytes, body_bytes, _ = _PREFIX.unpack(prefix)
            begin = offset + _PREFIX.size + header_bytes
            if magic != MAGIC or begin + body_bytes > size:
                raise BadRecord(offset, "no whole record begins here")
            yield _header(offset, file.read(header_bytes)), begin, begin + body_bytes
            offset = begin + body_bytes


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


def good_record_after(path: Path, offset: int, size: int) -> bool:
    """Return whether a whole record lies behind `offset` in the first `size` bytes: then the bad one is damaged, not torn.

    Another process may append to the file and cut it off meanwhile: so it is read, not mapped. Raises StorageError.
    """
    begin = offset + 1
    try:
        with path.open("rb") as file:
            while begin < size:
                file.seek(begin)
                block = file.read(min(_BLOCK_BYTES, size - begin))
                if len(block) < len(MAGIC):
                    break
                found = -1
                while (found := block.find(MAGIC, found + 1)) >= 0:
                    try:
                        _read_record(file, begin + found, size)
                    except BadRecord:
                        continue
                    return True
                begin += len(block) - len(MAGIC) + 1  # the next block may begin in the middle of one
    except OSError as error:
        raise StorageError(f"{path}: cannot be read ({error.strerror})") from error
    return False


def frame(header: Mapping[str, object], *body: Buffer) -> list[Buffer]:
    """Return one record piece by piece, so that a large body is not copied."""
    text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    start = struct.pack("<4sIQ", MAGIC, len(text), sum(memoryview(part).nbytes for part in body))
    crc = zlib.crc32(text, zlib.crc32(start))
    for part in body:
        crc = zlib.crc32(part, crc)
    return [start + struct.pack("<I", crc) + text, *body]


def fragment_header(round_id: int, record: MergeRecord, injection: Injection | None) -> dict[str, object]:
    """Return the JSON part of a merged fragment; floats survive to the bit."""
    payload, residual = record.payload, record.residual
    return {
        "kind": "fragment",
        "round_id": round_id,
        "outer_step": record.outer_step + 1,
        "fragment_id": record.fragment_id,
        "encoded": [payload.codec, payload.numel] if payload is not None else None,
        "residual": residual.form if residual is not None else None,
        "injected": injection is not None and record.fragment_id in injection.fragments,
        "replaces": injection is not None and injection.replaces,
        "verdicts": verdicts_written(record.verdicts),
        "statistics": {peer_id: statistics.to_json() for peer_id, statistics in record.statistics.items()},
        "merged_norm": number(record.merged_norm),
        "clip": number(record.clip),
    }


def body_of(record: MergeRecord, injection: Injection | None) -> list[Buffer]:
    """Return the raw part of a merged fragment, piece by piece, nothing of it copied."""
    injected = injection.fragments.get(record.fragment_id) if injection is not None else None
    vectors = [record.residual.tensor if record.residual is not None else None, injected]
    whole: list[Buffer] = [
        vector.detach().contiguous().view(torch.uint8).numpy().data for vector in vectors if vector is not None
    ]
    return [record.payload.data, *whole] if record.payload is not None else whole


def fragment_of(path: Path, record: Record) -> tuple[MergeRecord, Tensor | None]:
    """Return the merged fragment in a record and what was injected with it, to the bit. Raises StorageError."""
    try:
        return _fragment(record)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, EditError) as error:
        raise StorageError(f"{path}: the record at byte {record.offset} is not a fragment ({error!r})") from error


def _fragment(record: Record) -> tuple[MergeRecord, Tensor | None]:
    header, rest = record.header, memoryview(record.body)
    payload, residual, injected = None, None, None
    if "rollback" in header:  # until format 3
        vectors = (not header["rollback"]) + header["injected"]
        encoded = None if header["rollback"] else ["fp32", len(rest) // 4 // vectors]
    else:
        encoded = header["encoded"]
    if encoded is not None:
        name, numel = str(encoded[0]), int(encoded[1])
        size = codec(name).encoded_size(numel)
        payload, rest = EncodedTensor(name, numel, rest[:size]), rest[size:]
        if (form := header.get("residual")) is not None:
            kept = Residual(numel, form)
            kept.tensor.view(torch.uint8).numpy().data[:] = rest[: kept.nbytes]
            residual, rest = kept, rest[kept.nbytes :]
    if header["injected"]:
        injected, rest = torch.frombuffer(rest, dtype=torch.float32), rest[len(rest) :]
    if len(rest):
        raise ValueError(f"{len(rest)} bytes are left over")
    fragment = MergeRecord(
        outer_step=header["outer_step"] - 1,
        fragment_id=header["fragment_id"],
        payload=payload,
        residual=residual,
        verdicts=verdicts_from(header["verdicts"]),
        statistics={
            peer_id: NormStatistics.from_json(written, strict=False) for peer_id, written in header["statistics"].items()
        },
        merged_norm=float(header["merged_norm"]),
        clip=float(header["clip"]),
    )
    return fragment, injected


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
