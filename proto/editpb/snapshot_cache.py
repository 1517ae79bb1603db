"""Snapshots that are being read: theta of a past outer step stays until nobody has asked for it for a while.

Owns: how long. A commit replaces tensors and never writes into them, so keeping a snapshot means keeping references. Must not
know: connections, the clock (`now`, monotonic seconds, is an argument).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from edit.errors import GoneError
from editpb.messages import SnapshotManifest

__all__ = ["KEPT_S", "SnapshotCache"]

KEPT_S = 60.0  # after it was last asked for


@dataclass(frozen=True, slots=True)
class _Kept:
    manifest: SnapshotManifest
    fragments: tuple[Tensor, ...]
    until: float


class SnapshotCache:
    """The snapshots that may be read now, by outer step."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def known(self, outer_step: int, now: float) -> SnapshotManifest | None:
        """The manifest of this step, if it is here; it then stays for another while. Forgets what nobody reads."""
        self._kept = {step: kept for step, kept in self._kept.items() if kept.until > now}
        kept = self._kept.get(outer_step)
        return self.put(kept.manifest, kept.fragments, now) if kept is not None else None

    def put(self, manifest: SnapshotManifest, fragments: tuple[Tensor, ...], now: float) -> SnapshotManifest:
        """Keep a snapshot; returns its manifest."""
        self._kept[manifest.outer_step] = _Kept(manifest, fragments, now + KEPT_S)
        return manifest

    def take(self, outer_step: int, fragment_id: int, now: float) -> Tensor:
        """One fragment, flat fp32. Raises GoneError."""
        kept = self._kept.get(outer_step)
        if kept is None or kept.until <= now:
            raise GoneError(f"the snapshot of outer step {outer_step} is not kept; describe a new one")
        self._kept[outer_step] = replace(kept, until=now + KEPT_S)
        return kept.fragments[fragment_id]
