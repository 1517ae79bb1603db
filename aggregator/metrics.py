"""What the coordinator tells people: metrics.jsonl, one JSON object per line, and the recent rounds in memory.

Owns: the lines' fields. Must not know: how decisions are made. A disk that refuses a line never stops the run:
the first refusal is logged, later lines are tried again.
"""

from __future__ import annotations

import json
import logging
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from edit.records import FragmentCommit

__all__ = ["MetricsLog", "RoundReport"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """One closed round, without tensors.

    bytes_in: payloads received; bytes_out: what one peer downloads; seconds: from open to close; fragments: verdicts, empty
    when the round was lost; carried: whose contributions went on into the next round.
    """

    round_id: int
    outer_step: int
    committed: bool
    reason: str
    seconds: float
    bytes_in: int
    bytes_out: int
    missing: tuple[str, ...]
    digest: str
    fragments: tuple[FragmentCommit, ...]
    carried: tuple[str, ...] = ()

    def as_json(self) -> dict[str, object]:
        return {
            "round_id": self.round_id,
            "outer_step": self.outer_step,
            "committed": self.committed,
            "reason": self.reason,
            "seconds": round(self.seconds, 4),
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "missing": list(self.missing),
            "carried": list(self.carried),
            "digest": self.digest,
            "verdicts": [_verdicts(fragment) for fragment in self.fragments],
        }


def _verdicts(fragment: FragmentCommit) -> dict[str, object]:
    return {
        "fragment_id": fragment.fragment_id,
        "merged_norm": _number(fragment.merged_norm),
        "clip": _number(fragment.clip),
        "peers": {v.peer_id: [v.verdict.value, _number(v.norm), _number(v.weight)] for v in fragment.verdicts},
        "staleness": {v.peer_id: v.staleness for v in fragment.verdicts if v.staleness},
    }


def _number(value: float) -> float | None:
    """JSON has no NaN: a non-finite number is null."""
    return value if math.isfinite(value) else None


class MetricsLog:
    """Appends lines to `path` (None: keeps nothing on disk) and holds the last `keep` round reports."""

    def __init__(self, path: Path | None, keep: int = 200) -> None:
        self._path = path
        self._complained = False
        self.rounds: deque[RoundReport] = deque(maxlen=keep)

    def round_closed(self, report: RoundReport, unix: float) -> None:
        self.rounds.append(report)
        self.line("round", unix, report.as_json())

    def line(self, kind: str, unix: float, fields: Mapping[str, object]) -> None:
        """Append one line; `unix`: seconds since 1970."""
        if self._path is None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind, "t": round(unix, 3), **fields}) + "\n")
        except OSError as error:
            if not self._complained:
                _log.warning("metrics: %s cannot be written (%s); the run goes on without", self._path, error.strerror)
            self._complained = True
