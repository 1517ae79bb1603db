"""What a value from the wire may be: all bounds, and the checks. A violation is a RemoteProtocolError of one line."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sized
from typing import NoReturn

from edit.config.codec import MAX_SPEC_CHARS
from edit.errors import RemoteProtocolError
from edit.plain_text import printable
from edit.records import MAX_METRIC_CHARS, MAX_METRICS

__all__ = [
    "CHUNK_BYTES",
    "MAX_APPROVALS",
    "MAX_AUDIT_FILES",
    "MAX_BOXES_PER_TENSOR",
    "MAX_BYTES",
    "MAX_CHANGES",
    "MAX_CHUNK_BYTES",
    "MAX_CONFIG_CHARS",
    "MAX_CONTROL_BYTES",
    "MAX_COUNT",
    "MAX_DATA_CHARS",
    "MAX_DIMS",
    "MAX_DONORS",
    "MAX_ENTRY_BYTES",
    "MAX_FOLLOWING",
    "MAX_FRAGMENTS",
    "MAX_LOG_KEY_CHARS",
    "MAX_NAME_CHARS",
    "MAX_NORM",
    "MAX_NUMEL",
    "MAX_PROOF_HASHES",
    "MAX_RANKS",
    "MAX_READ_S",
    "MAX_RUNS",
    "MAX_RUNS_OF_REQUEST",
    "MAX_SECONDS",
    "MAX_SEEN_OF_PEER",
    "MAX_SEEN_PROOFS",
    "MAX_SHOWN",
    "MAX_STEP",
    "MAX_STEP_S",
    "MAX_TENSORS",
    "MAX_TEXT_CHARS",
    "MAX_TOKENS_PER_S",
    "MAX_UNIX",
    "MAX_VERDICTS",
    "MIN_RATE",
    "MIN_STEP_S",
    "at_most",
    "check_codec_text",
    "check_digest",
    "check_id",
    "check_measured",
    "check_metrics",
    "check_name",
    "check_number",
    "check_share",
    "check_text",
    "fail",
    "is_id",
    "one_line",
    "within",
]

MAX_FRAGMENTS = 1 << 16
MAX_TENSORS = 1 << 17  # of a whole schema; the largest published mixtures of experts have 100,000
MAX_NAME_CHARS = 512
MAX_DIMS = 8
MAX_NUMEL = 1 << 40  # of a whole schema, and so of every fragment and tensor
MAX_BOXES_PER_TENSOR = 16  # of one rank; FSDP and tensor parallelism make one, strided shards a few
MAX_RUNS = 1 << 19  # contiguous runs of a rank's part of a fragment: a column of a matrix is as many as it has rows
MAX_RUNS_OF_REQUEST = 1 << 21  # of all fragments
MAX_RANKS = 1 << 9  # of one replica
MAX_NORM = 1e21  # of one replica's fragment, where it is finite: its squares are added up in fp32, at each of MAX_RANKS
MAX_CHUNK_BYTES = 4 << 20
CHUNK_BYTES = 1 << 20  # of a chunk that is sent here
MAX_BYTES = 1 << 43  # of one encoded fragment; no codec needs 8 bytes per element
MAX_TEXT_CHARS = 4096
MAX_DATA_CHARS = 512  # of what a site says of its data, and of its licence
MAX_CONTROL_BYTES = 32 << 10  # of a peer's message on Attend, except a schema that it was asked for
MAX_CONFIG_CHARS = 1 << 20
MAX_READ_S = 600.0  # deadline of a call that reads a snapshot; a reader that needs longer goes on from where it was
MAX_DONORS = 8  # named for one snapshot
MAX_FOLLOWING = 256  # fragments that one call asks for after its first
MAX_VERDICTS = 1 << 16  # peers in one round
MAX_ENTRY_BYTES = 4 << 20  # of a commit in the audit log; 64 peers of 8 ranks with 12 fragments have 2 MB
MAX_PROOF_HASHES = 64  # of a proof in the log's tree: as many as one of 2^63 leaves has
MAX_SEEN_PROOFS = 1 << 10  # in one receipt; peers that take part have seen heads of a few sizes
MAX_SEEN_OF_PEER = MAX_SEEN_PROOFS // 4  # heads in one contribution: each rank has seen one, or two, mostly those of the others
MAX_LOG_KEY_CHARS = 256
MAX_AUDIT_FILES = 1 << 17  # that an auditor fetches at a time: one of each fragment of a commit, and few others
MAX_CHANGES = 64  # of the configuration, that a peer is told of at a time
MAX_APPROVALS = 32  # of one change: as many as there may be approvers
MAX_STEP = 1 << 48  # outer and inner steps
MAX_COUNT = (1 << 63) - 1  # round ids, counters of bytes and tokens
MIN_STEP_S, MAX_STEP_S = 1e-6, 1e6  # seconds of an inner step, where they are known
MIN_RATE, MAX_TOKENS_PER_S = 1e-6, 1e12  # tokens per second, where they are known
MAX_UNIX = 253_402_300_799.0  # seconds since 1970: the end of the year 9999, as a certificate may say
MAX_SECONDS = 1e30  # until something that a status foretells
MAX_SHOWN = 1e100  # of a curve: no float32 goes as far, and sums and squares of such numbers are finite

_ID = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,64}")  # "." and ".." are folders, and ids name folders
_DIGEST = re.compile(r"[0-9a-f]{64}")
_CODEC = re.compile(r"(?:entry:[A-Za-z_][A-Za-z0-9_]*|[a-z0-9]+)(:[a-z]+=[0-9.]+(,[a-z]+=[0-9.]+)*)?")


def fail(reason: str) -> NoReturn:
    """Raise RemoteProtocolError(reason)."""
    raise RemoteProtocolError(reason)


def is_id(text: str) -> bool:
    """Return whether `text` may be a run_id, peer_id or role: 1 to 64 of letters, digits, '.', '_', '-'; not '.' or '..'."""
    return _ID.fullmatch(text) is not None


def one_line(text: str, limit: int = MAX_TEXT_CHARS) -> str:
    """Return `text` as it may be sent or shown: control characters as spaces, at most `limit` characters."""
    return printable(text[:limit])


def check_id(field: str, text: str) -> str:
    """Return `text` when it is an identifier (see `is_id`)."""
    if not is_id(text):
        fail(f"{field} {_short(text)} is not 1 to 64 of letters, digits, '.', '_', '-', or is '.' or '..'")
    return text


def check_digest(field: str, text: str, *, empty: bool = False) -> str:
    """Return `text` when it is 64 lower-case hexadecimal digits, or empty where `empty` allows it."""
    if not (_DIGEST.fullmatch(text) or (empty and not text)):
        fail(f"{field} {_short(text)} is not 64 hexadecimal digits")
    return text


def check_codec_text(text: str) -> str:
    """Return `text` when it has the form of a codec: NAME or NAME:OPTION=NUMBER,... in few characters of a small alphabet."""
    if len(text) > MAX_SPEC_CHARS or not _CODEC.fullmatch(text):
        fail(f"codec {_short(text)} is not NAME or NAME:OPTION=NUMBER,... of at most {MAX_SPEC_CHARS} characters")
    return text


def check_text(field: str, text: str, limit: int = MAX_TEXT_CHARS) -> str:
    """Return `text` when it is one printable line of at most `limit` characters."""
    if len(text) > limit:
        fail(f"{field} has {len(text)} characters, more than {limit}")
    if not text.isprintable():
        fail(f"{field} holds control characters")
    return text


def check_name(field: str, text: str) -> str:
    """Return `text` when it may name a tensor or a fragment."""
    if not text:
        fail(f"{field} is empty")
    return check_text(field, text, MAX_NAME_CHARS)


def check_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return a peer's own metrics: not too many, each with a printable name and a finite value."""
    if len(metrics) > MAX_METRICS:
        fail(f"{len(metrics)} metrics, at most {MAX_METRICS}")
    for name, value in metrics.items():
        check_text("the name of a metric", name, MAX_METRIC_CHARS)
        if not math.isfinite(value):
            fail(f"metric {name} is {value}")
    return dict(metrics)


def within(field: str, value: int, low: int, high: int) -> int:
    """Return `value` when low <= value <= high."""
    if not low <= value <= high:
        fail(f"{field} is {value}, not {low} to {high}")
    return value


def at_most(field: str, values: Sized, limit: int) -> None:
    """Check the number of values, before anything is made of them."""
    if len(values) > limit:
        fail(f"{len(values)} {field}, more than {limit}")


def check_measured(field: str, value: float, low: float, high: float) -> float:
    """Return `value` when it is 0 (not measured yet) or low <= value <= high."""
    if not (value == 0 or low <= value <= high):
        fail(f"{field} is {value}, neither 0 (not measured) nor {low:g} to {high:g}")
    return value


def check_number(field: str, value: float, low: float, high: float) -> float:
    """Return `value` when low <= value <= high; so it is finite."""
    if not low <= value <= high:
        fail(f"{field} is {value}, not {low:g} to {high:g}")
    return value


def check_share(field: str, value: float) -> float:
    """Return `value` when it lies between 0 and 1."""
    if not 0 <= value <= 1:
        fail(f"{field} is {value}, not 0 to 1")
    return value


def _short(text: str) -> str:
    return repr(text if len(text) <= 64 else f"{text[:61]}...")
