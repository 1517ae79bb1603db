"""What a verdict means for what this peer keeps of its contribution: the residual, and the inner optimizer's state.

Owns: that rule. Must not know: outcomes, theta, the local parameters.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer

from edit.codecs.error_feedback import ErrorFeedback
from edit.records import Verdict
from edit.replica.layout import local_of
from edit.replica.replica import Replica

__all__ = ["Settlement"]


class Settlement:
    """Of one worker's contributions, fragment by fragment."""

    def __init__(self, replica: Replica, feedback: ErrorFeedback, optimizer: Optimizer) -> None:
        self._replica = replica
        self._feedback = feedback
        self._optimizer = optimizer

    def settle(self, i: int, verdict: Verdict | None) -> None:
        """The verdict on fragment i is known; None: it is not part of the commit and never will be of another."""
        if verdict is Verdict.OK:
            if self._replica.layout.owned[i].numel:
                self._feedback.commit(i)
            return
        self._feedback.rollback(i)
        if verdict is Verdict.NONFINITE:
            _scrub(self._optimizer, self._replica.parameters(i))

    def give_up(self, fragments: Iterable[int]) -> None:
        """These will not be settled: residuals stay as they were before."""
        for i in fragments:
            self._feedback.rollback(i)


def _scrub(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Set NaN and Inf in the inner optimizer's state of these parameters to 0, or they would come back with the next step."""
    for parameter in parameters:
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor) and value.is_floating_point():
                local_of(value).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
