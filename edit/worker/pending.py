"""What a worker remembers of a contribution whose outcome is not known, and of a commit whose updates are still arriving.

Owns: these values. Must not know: who asks for the outcome, when it is applied.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from edit.records import Arriving, Committed, EncodedTensor
from edit.worker.schedule import Work

__all__ = ["PartialCommit", "Pending", "Waiting"]

Waiting = EncodedTensor | Arriving | None  # an update: here, still on its way, or a rollback


@dataclass(slots=True, kw_only=True)
class Pending:
    """One contribution. outer_step: theta's when it was made; began: where its work began, which is what it names, the same
    or earlier. fragments: those it exchanges, ascending.

    sent_from: by fragment, the local parameters from which training went on after sending, once it goes on before the outcome;
    deltas: the pseudo-gradients themselves, where they are needed again (eager); payloads: what was sent, to send the same once
    more (strict). applied: the fragments whose update is applied already. outcome_overdue: training goes on without an
    outcome longer than planned (cut off, or sent late), so the outcome is asked for after every step.
    """

    outer_step: int
    began: int
    fragments: tuple[int, ...]
    work: Work
    sent_from: dict[int, Tensor] = field(default_factory=dict)
    deltas: dict[int, Tensor] = field(default_factory=dict)
    payloads: dict[int, EncodedTensor] = field(default_factory=dict)
    applied: set[int] = field(default_factory=set)
    outcome_overdue: bool = False

    @property
    def missing(self) -> list[int]:
        """The fragments whose update is not applied yet."""
        return [i for i in self.fragments if i not in self.applied]


@dataclass(slots=True)
class PartialCommit:
    """A commit that is being applied fragment by fragment. waiting: the updates to come, by fragment."""

    outcome: Committed
    waiting: dict[int, Waiting]
