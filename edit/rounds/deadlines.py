"""How long a round waits for each peer: from the peer's own measured times, phase by phase, never from a fixed timeout.

    allowed(phase) = median + spread * max(MAD, median / 10)            of the last 16 measurements of that phase
    expected_s(peer) = clamp(allowed(download) + allowed(compute) + allowed(upload), floor, ceiling)
                     = ceiling before 3 measurements of compute and upload; never less than one inner step (step_s)
    step_s(peer)     = what the peer claims; above the ceiling only as far as was measured here, at most twice the ceiling

What a peer claims of its inner steps may not hold a round up: what was measured here is the time from the peer's last sign of
a finished exchange to its next contribution, divided by the inner steps behind that contribution, as far as they are believed
(`edit.rounds.work_claims`). Who stays away and then says one step measures a long one: hence the last bound.

Where H changes during the run (sync.milestones), times of compute are kept as those of the run's first H, and `pace`, the H in
force as a multiple of that one, is what they are multiplied by: else the first round of a larger H would close without anybody.

Where batches may double from one exchange to the next (inner.batch_growth), allowed(compute) begins not with the median, but
with twice the last measurement, if that is more: else a peer would be overdue once its batch is doubled, and many rounds after.

MAD is the median absolute deviation from the median. A download that was never measured counts as 0: then it is part of what
was measured as compute. Constant times have a MAD of 0; the tenth of the median keeps a margin for them.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict, deque
from enum import Enum
from functools import partial
from statistics import median

from edit.config.run import RoundsConfig
from edit.errors import LocalProtocolError
from edit.plain_text import parse_json

__all__ = ["FEWEST", "MEASURED", "WINDOW", "Deadlines", "PeerPhase"]

FEWEST = 3  # measurements before a peer's own times count
SMALLEST_SPREAD = 0.1  # of the median
_MOST_CEILINGS = 2.0  # that one inner step may hold a round up
_STEPS = "step"  # the seconds per inner step in `to_json`
WINDOW = 16  # measurements kept per peer and phase


class PeerPhase(Enum):
    """What a peer does in a round, in this order."""

    DOWNLOAD = "download"  # from the commit until it reports the new outer step
    COMPUTE = "compute"  # until the first byte of its contribution
    UPLOAD = "upload"  # until the last one
    WAITING = "waiting"  # for the outcome; not measured: it is not the peer's time


MEASURED = (PeerPhase.DOWNLOAD, PeerPhase.COMPUTE, PeerPhase.UPLOAD)
_Windows = dict[PeerPhase, defaultdict[str, deque[float]]]


class Deadlines:
    """The last measured times of each peer and phase, and what follows from them. config: floor_s, ceiling_s, spread."""

    def __init__(self, config: RoundsConfig) -> None:
        self._config = config
        self._windows = _no_measurements()
        self._claimed_s: dict[str, float] = {}  # seconds per inner step, as each peer says
        self._steps_s: defaultdict[str, deque[float]] = _windows()  # the same, as measured here
        # How many times the inner steps of the run's first H a peer now computes.
        self.pace = 1.0
        # Whether its inner steps may take twice as long as those before.
        self.may_double = False

    def record(self, peer_id: str, phase: PeerPhase, seconds: float) -> None:
        """Add one measurement; seconds: finite and not negative, or LocalProtocolError."""
        if not 0 <= seconds < math.inf:
            raise LocalProtocolError(f"measured {phase.value} time of {peer_id} is {seconds} s")
        self._windows[phase][peer_id].append(seconds / self._pace_of(phase))

    def claim(self, peer_id: str, step_s: float) -> None:
        """Take the seconds per inner step that this peer claims; 0: it does not know them."""
        self._claimed_s[peer_id] = step_s

    def record_step(self, peer_id: str, step_s: float) -> None:
        """Add one measurement of the peer's seconds per inner step; step_s: finite and not negative, or LocalProtocolError."""
        if not 0 <= step_s < math.inf:
            raise LocalProtocolError(f"measured step of {peer_id} is {step_s} s")
        self._steps_s[peer_id].append(step_s)

    def measured_step_s(self, peer_id: str) -> float:
        """Return the seconds per inner step as they were measured here (the median); 0 before any measurement."""
        return median(self._steps_s[peer_id]) if peer_id in self._steps_s else 0.0

    def step_s(self, peer_id: str) -> float:
        """Return the seconds per inner step that are believed: the claim, bounded as the module's text says."""
        claimed, ceiling = self._claimed_s.get(peer_id, 0.0), self._config.ceiling_s
        if claimed <= ceiling:
            return claimed
        return max(ceiling, min(claimed, self.measured_step_s(peer_id), _MOST_CEILINGS * ceiling))

    def measured(self, peer_id: str) -> bool:
        """Return whether the peer's own times count already."""
        windows = self._windows
        return all(len(windows[phase].get(peer_id, ())) >= FEWEST for phase in (PeerPhase.COMPUTE, PeerPhase.UPLOAD))

    def allowed_s(self, peer_id: str, phase: PeerPhase) -> float:
        """Return the seconds that this phase of the peer may take; 0 before any measurement."""
        times = self._windows[phase].get(peer_id)
        if not times:
            return 0.0
        pace = self._pace_of(phase)
        middle = pace * median(times)
        deviation = median([abs(pace * time - middle) for time in times])
        if self.may_double and phase is PeerPhase.COMPUTE:
            middle = max(middle, 2 * pace * times[-1])
        return middle + self._config.spread * max(deviation, SMALLEST_SPREAD * middle)

    def _pace_of(self, phase: PeerPhase) -> float:
        return self.pace if phase is PeerPhase.COMPUTE else 1.0

    def expected_s(self, peer_id: str) -> float:
        """Return the seconds from a round's opening after which this peer is overdue."""
        config, expected = self._config, self._config.ceiling_s
        if self.measured(peer_id):
            whole = sum(self.allowed_s(peer_id, phase) for phase in MEASURED)
            expected = min(max(whole, config.floor_s), config.ceiling_s)
        return max(expected, self.step_s(peer_id))

    def to_json(self) -> str:
        """Return the measurements as text, for a restart."""
        named = [(phase.value, of) for phase, of in self._windows.items()] + [(_STEPS, self._steps_s)]
        return json.dumps([[peer_id, name, [*times]] for name, of in named for peer_id, times in of.items()])

    def load(self, text: str) -> None:
        """Take what `to_json` gave. Raises ValueError when it is damaged; then nothing is taken."""
        windows, steps_s = _no_measurements(), _windows()
        try:
            for peer_id, phase, times in parse_json(text):
                if not all(isinstance(time, int | float) and math.isfinite(time) and time >= 0 for time in times):
                    raise ValueError(f"times of {peer_id} are not seconds")
                of = steps_s if phase == _STEPS else windows[PeerPhase(phase)]
                of[str(peer_id)].extend(float(time) for time in times)
        except TypeError as error:
            raise ValueError(str(error)) from error
        self._windows, self._steps_s = windows, steps_s


def _no_measurements() -> _Windows:
    return {phase: _windows() for phase in PeerPhase}


def _windows() -> defaultdict[str, deque[float]]:
    return defaultdict(partial(deque, maxlen=WINDOW))
