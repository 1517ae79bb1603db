"""How long a round waits for each peer: from its own measured times, phase by phase, never from a fixed timeout.

Owns: the formula below. Must not know: the clock, rounds, quorum, why a time is long, how the last 16 times of each peer and
phase are kept (`edit.rounds.recent_times`).

    allowed(phase) = median + spread * max(MAD, median / 10)
    expected_s(peer) = clamp(allowed(download) + allowed(compute) + allowed(upload), floor, ceiling)
                     = ceiling before 3 measurements of compute and upload; never less than one inner step

A download that was never measured counts as 0: then it is part of what was measured as compute. Constant times have a MAD of 0;
the tenth of the median keeps a margin for them (fixed timeouts are wrong both ways).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from edit.config.run import RoundsConfig
from edit.errors import LocalProtocolError
from edit.rounds.recent_times import RecentTimes

__all__ = ["FEWEST", "MEASURED", "Deadlines", "PeerPhase"]

FEWEST = 3  # measurements before a peer's own times count
SMALLEST_SPREAD = 0.1  # of the median
MANY = 16  # peers to compute for at once; of fewer it is faster one by one


class PeerPhase(Enum):
    """What a peer does in a round, in this order."""

    __hash__ = object.__hash__  # an Enum's own takes longer than what is done with it, some millions of times a simulation

    DOWNLOAD = "download"  # from the commit until it reports the new outer step
    COMPUTE = "compute"  # until the first byte of its contribution
    UPLOAD = "upload"  # until the last one
    WAITING = "waiting"  # for the outcome; not measured: it is ours


MEASURED = (PeerPhase.DOWNLOAD, PeerPhase.COMPUTE, PeerPhase.UPLOAD)


class Deadlines:
    """Measured seconds per peer and phase, and what follows from them. `config`: floor_s, ceiling_s and spread are used."""

    def __init__(self, config: RoundsConfig) -> None:
        self._config = config
        self._windows = {phase: RecentTimes() for phase in PeerPhase}
        self._step_s: dict[str, float] = {}

    def record(self, peer_id: str, phase: PeerPhase, seconds: float) -> None:
        """Add one measurement; seconds: finite and not negative, or LocalProtocolError."""
        if not 0 <= seconds < math.inf:
            raise LocalProtocolError(f"measured {phase.value} time of {peer_id} is {seconds} s")
        self._windows[phase].add(peer_id, seconds)

    def at_least(self, peer_id: str, step_s: float) -> None:
        """This peer's inner step takes so many seconds: no deadline is shorter, whatever the ceiling."""
        if step_s != self._step_s.get(peer_id, 0.0):
            self._step_s[peer_id] = step_s

    def step_s(self, peer_id: str) -> float:
        """Seconds per inner step as the peer says; 0 before it does."""
        return self._step_s.get(peer_id, 0.0)

    def measured(self, peer_id: str) -> bool:
        """Whether the peer's own times count already."""
        return all(self._windows[phase].count(peer_id) >= FEWEST for phase in (PeerPhase.COMPUTE, PeerPhase.UPLOAD))

    def allowed_s(self, peer_id: str, phase: PeerPhase) -> float:
        """Seconds that this phase of the peer may take; 0 before any measurement."""
        times = self._windows[phase].of(peer_id)
        return self._allowed(times) if times else 0.0

    def expected_s(self, peer_id: str) -> float:
        """Seconds from a round's opening after which this peer is overdue."""
        config, allowed = self._config, self._config.ceiling_s
        if self.measured(peer_id):
            whole = sum(self.allowed_s(peer_id, phase) for phase in MEASURED)
            allowed = min(max(whole, config.floor_s), config.ceiling_s)
        return max(allowed, self._step_s.get(peer_id, 0.0))

    def expected_of(self, peers: Collection[str]) -> dict[str, float]:
        """`expected_s` of each of them; of thousands in a fraction of the time."""
        if len(peers) < MANY:
            return {peer_id: self.expected_s(peer_id) for peer_id in peers}
        config, order = self._config, list(peers)
        windows = {phase: self._windows[phase].of_all(order) for phase in MEASURED}
        measured = np.minimum(windows[PeerPhase.COMPUTE][1], windows[PeerPhase.UPLOAD][1]) >= FEWEST
        download, compute, upload = (_allowed_each(*windows[phase], config.spread) for phase in MEASURED)
        allowed = np.minimum(np.maximum(download + compute + upload, config.floor_s), config.ceiling_s)
        expected = dict(zip(order, np.where(measured, allowed, config.ceiling_s).tolist(), strict=True))
        for peer_id in self._step_s.keys() & expected.keys():
            expected[peer_id] = max(expected[peer_id], self._step_s[peer_id])
        return expected

    def to_json(self) -> str:
        """The measurements, for a restart."""
        windows = self._windows.items()
        return json.dumps([[peer_id, phase.value, times] for phase, of in windows for peer_id, times in of.items()])

    def load(self, text: str) -> None:
        """Take what `to_json` gave. Raises ValueError when it is damaged; then nothing is taken."""
        windows = {phase: RecentTimes() for phase in PeerPhase}
        try:
            for peer_id, phase, times in json.loads(text):
                if not all(isinstance(time, int | float) and math.isfinite(time) and time >= 0 for time in times):
                    raise ValueError(f"times of {peer_id} are not seconds")
                for time in times:
                    windows[PeerPhase(phase)].add(str(peer_id), time)
        except TypeError as error:
            raise ValueError(str(error)) from error
        self._windows = windows

    def _allowed(self, times: Collection[float]) -> float:
        middle = _median(times)
        deviation = _median([abs(time - middle) for time in times])
        return middle + self._config.spread * max(deviation, SMALLEST_SPREAD * middle)


def _median(times: Collection[float]) -> float:
    """As statistics.median, which takes several times as long for a few numbers."""
    ordered = sorted(times)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _allowed_each(times: NDArray[np.float64], counts: NDArray[np.int64], spread: float) -> NDArray[np.float64]:
    """`Deadlines._allowed` of each row, with the same operations in the same order; 0 of none. See `RecentTimes.of_all`."""
    middle = _median_each(times, counts)
    deviation = _median_each(np.abs(times - middle[:, None]), counts)
    return np.where(counts, middle + spread * np.maximum(deviation, SMALLEST_SPREAD * middle), 0.0)


def _median_each(times: NDArray[np.float64], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """`_median` of the first so many of each row when it is sorted, as it then is; 0 of none."""
    times.sort(axis=1)
    rows, half = np.arange(len(times)), counts // 2
    return np.where(counts, (times[rows, np.maximum((counts - 1) // 2, 0)] + times[rows, half]) / 2, 0.0)
