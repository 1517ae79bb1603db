"""What the lab sees of a run: points of a loss curve, and the coordinator's answers."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Point", "Status"]


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a curve. step: inner steps; t: unix seconds."""

    t: float
    step: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The coordinator as it answered last. deadline_s: until the open round's deadline; None: no round is open."""

    phase: str
    outer_step: int
    digest: str
    parameters: int
    deadline_s: float | None
    arrived: int
    expected: int
    memory_bytes: int
    tokens: int = 0
