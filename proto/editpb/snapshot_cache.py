"""Snapshots that are being read: theta of a past outer step stays until nobody has asked for it for KEPT_S seconds.

Nobody writes into the tensors while they are referenced, so keeping a snapshot means keeping references. `now` is monotonic
seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from edit.errors import GoneError
from editpb.messages import SnapshotManifest

__all__ = ["KEPT_S", "SnapshotCache"]

KEPT_S = 60.0  # seconds after it was last asked for


@dataclass(frozen=True, slots=True)
class _Kept:
    manifest: SnapshotManifest
    fragments: tuple[Tensor, ...]
    until: float  # monotonic seconds


class SnapshotCache:
    """The snapshots that can be read now, by outer step."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def known(self, outer_step: int, now: float) -> SnapshotManifest | None:
        """Return the manifest of this outer step, if it is kept, and keep it for longer. Forgets what nobody has read."""
        self.forget_unread(now)
        kept = self._kept.get(outer_step)
        return self.put(kept.manifest, kept.fragments, now) if kept is not None else None

    @property
    def steps(self) -> list[int]:
        """The outer steps that are kept, ascending."""
        return sorted(self._kept)

    def forget(self, outer_step: int) -> None:
        """Keep this one no longer; who is in the middle of a fragment reads it to its end."""
        self._kept.pop(outer_step, None)

    def forget_unread(self, now: float) -> None:
        """Keep no longer what nobody has asked for lately."""
        self._kept = {step: kept for step, kept in self._kept.items() if kept.until > now}

    def put(self, manifest: SnapshotManifest, fragments: tuple[Tensor, ...], now: float) -> SnapshotManifest:
        """Keep a snapshot, and return its manifest."""
        self._kept[manifest.outer_step] = _Kept(manifest, fragments, now + KEPT_S)
        return manifest

    def take(self, outer_step: int, fragment_id: int, now: float) -> Tensor:
        """Return one fragment, flat fp32, and keep the snapshot for longer. Raises GoneError when it is no longer kept."""
        kept = self._kept.get(outer_step)
        if kept is None or kept.until <= now:
            raise GoneError(f"the snapshot of outer step {outer_step} is not kept; describe a new one")
        self._kept[outer_step] = replace(kept, until=now + KEPT_S)
        return kept.fragments[fragment_id]
