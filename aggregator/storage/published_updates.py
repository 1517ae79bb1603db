"""Published updates on disk, beside the checkpoint of the outer step that the last of them leads to.

A journal that is replayed from that checkpoint gives the updates after it: together they are what a restarted coordinator can
still publish. The records are the journal's (`aggregator.storage.journal_records`): one for each update, followed by one for
each of its fragments, whose body is the payload as it was published.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from aggregator.storage.journal_records import (
    BadRecord,
    Buffer,
    Record,
    frame,
    number,
    records,
    verdicts_from,
    verdicts_written,
)
from edit.durable_files import check_format, write_atomic_with
from edit.errors import StorageError
from edit.records import Commit, EncodedTensor, FragmentCommit

__all__ = ["load", "save"]

FORMAT = 1


def save(path: Path, commits: Sequence[Commit]) -> None:
    """Replace the file by these updates, oldest first, durably. Raises StorageError: the file is as before."""

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            for header, body in _written(commits):
                for part in frame(header, body):
                    file.write(part)

    write_atomic_with(path, write)


def load(path: Path, outer_step: int) -> list[Commit]:
    """Return the updates in the file, oldest first, one for each outer step up to `outer_step`.

    Raises StorageError for damage, FormatError.
    """
    try:
        commits = list(_read(path))
    except (BadRecord, KeyError, TypeError, ValueError, StopIteration) as error:
        raise StorageError(f"{path}: damaged ({error})") from error
    steps = [commit.outer_step for commit in commits]
    if not steps or steps != list(range(outer_step + 1 - len(steps), outer_step + 1)):
        raise StorageError(f"{path}: damaged (holds the updates to {steps}, and belongs to outer step {outer_step})")
    return commits


def _written(commits: Sequence[Commit]) -> Iterator[tuple[dict[str, object], Buffer]]:
    for commit in commits:
        yield (
            {
                "kind": "update",
                "format": FORMAT,
                "outer_step": commit.outer_step,
                "round_id": commit.round_id,
                "digest": commit.digest,
                "reason": commit.reason,
                "fragments": len(commit.fragments),
            },
            b"",
        )
        for fragment in commit.fragments:
            yield _header(fragment), fragment.payload.data if fragment.payload is not None else b""


def _header(fragment: FragmentCommit) -> dict[str, object]:
    payload = fragment.payload
    return {
        "kind": "payload",
        "fragment_id": fragment.fragment_id,
        "encoded": [payload.codec, payload.numel] if payload is not None else None,
        "verdicts": verdicts_written(fragment.verdicts),
        "merged_norm": number(fragment.merged_norm),
        "clip": number(fragment.clip),
    }


def _read(path: Path) -> Iterator[Commit]:
    all_records = records(path)
    for record in all_records:
        header = record.header
        check_format(path, header.get("format", 1), FORMAT)
        yield Commit(
            outer_step=header["outer_step"],
            round_id=header["round_id"],
            digest=header["digest"],
            reason=header["reason"],
            fragments=tuple(_fragment(next(all_records)) for _ in range(header["fragments"])),
        )


def _fragment(record: Record) -> FragmentCommit:
    header: dict[str, Any] = record.header
    encoded = header["encoded"]
    return FragmentCommit(
        fragment_id=header["fragment_id"],
        payload=EncodedTensor(encoded[0], encoded[1], bytes(record.body)) if encoded is not None else None,
        verdicts=verdicts_from(header["verdicts"]),
        merged_norm=float(header["merged_norm"]),
        clip=float(header["clip"]),
    )
