"""Eager updates (arXiv 2502.12996): go on at once from an estimate of the outer step, until the true one is known.

The step is estimated as the last one, with this peer's own share in it replaced by its fresh pseudo-gradient:
theta_hat = theta - s_last - c w (Delta - Delta_last), with w this peer's weight in that commit and c how far an outer step
follows a change of the merged pseudo-gradient: nu for SGD, nu (1 + mu) for Nesterov.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from edit.config.run import OuterConfig
from edit.records import Commit, Verdict

__all__ = ["Estimator", "Last"]


@dataclass(frozen=True, slots=True)
class Last:
    """One fragment's last outer step, s = theta before - theta after; this peer's part in it: pseudo-gradient and weight."""

    step: Tensor
    delta: Tensor | None
    weight: float


class Estimator:
    """The last commit, by fragment. Nothing for a fragment that no commit has moved yet."""

    def __init__(self, outer: OuterConfig) -> None:
        self._follows = outer.lr * (1 + outer.momentum) if outer.optimizer == "nesterov" else outer.lr
        self.last: dict[int, Last] = {}

    def estimate(self, fragment_id: int, theta: Tensor, delta: Tensor) -> Tensor | None:
        """theta_hat, a new vector; None without a last step."""
        last = self.last.get(fragment_id)
        if last is None:
            return None
        estimate = theta - last.step
        if last.weight and last.delta is not None:
            estimate.sub_((delta - last.delta).mul_(self._follows * last.weight))
        return estimate

    def committed(self, commit: Commit, peer_id: str, moved: Mapping[int, Tensor], deltas: Mapping[int, Tensor]) -> None:
        """moved: by fragment, how far the commit has moved theta; deltas: what this peer contributed to it, if anything."""
        for part in commit.fragments:
            i, mine = part.fragment_id, part.verdict_of(peer_id)
            weight = mine.weight if mine is not None and mine.verdict is Verdict.OK else 0.0
            self.last[i] = Last(moved[i], deltas.get(i), weight)

    def forget(self) -> None:
        """theta has moved otherwise than by one commit: there is nothing to estimate from until the next."""
        self.last.clear()
