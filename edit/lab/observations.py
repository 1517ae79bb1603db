"""Values that the lab reads from a run: points of a loss curve, and the coordinator's status."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Point", "Status"]


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a loss curve."""

    t: float  # unix seconds
    step: int  # inner steps
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The coordinator's last answer."""

    phase: str
    outer_step: int
    digest: str
    parameters: int
    deadline_s: float | None  # until the open round's deadline; None: no round is open
    arrived: int  # contributions in the open round
    expected: int
    memory_bytes: int  # the coordinator's peak
    tokens: int = 0
