"""What a tracker is made from, and what it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from edit.errors import ConfigError

__all__ = ["TrackedRun", "Tracker", "Values", "no_other_options"]

Values = Mapping[str, float | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """What a tracker is made from. The same run_id and member after a restart: it goes on with what it wrote before."""

    run_id: str
    run_name: str
    member: str  # the peer's name, or "coordinator"
    folder: Path  # for this tracker's files, or whatever else it keeps; it may not be there yet
    first_step: int  # of the values that come first; what was written of it and later steps before is superseded
    settings: Mapping[str, Any] = field(default_factory=dict)  # the run's, by section
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)  # --tracker-option of this tracker


class Tracker(Protocol):
    """Writes down values. Its thread is its own: it may wait. After it has raised it is closed, and made again later, with
    the step then; ConfigError and ImportError are final.
    """

    def log(self, step: int, values: Values) -> None:
        """Write values, by name. step: never falls; at a peer inner steps, at a coordinator outer steps."""
        ...

    def close(self) -> None:
        """Complete what was written."""
        ...


def no_other_options(run: TrackedRun, *known: str) -> None:
    """Raise ConfigError for an option of this tracker that it does not know."""
    if unknown := sorted(set(run.options) - set(known)):
        raise ConfigError(f"--tracker-option {unknown[0]}: unknown; there is {', '.join(known) or 'none'}")
