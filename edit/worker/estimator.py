"""Eager updates (arXiv 2502.12996): go on at once from an estimate of the outer step, until the true one is known.

The step is estimated as the last one, with this peer's own share in it replaced by its fresh pseudo-gradient:
theta_hat = theta - s_last - c beta w (Delta - Delta_last), with w this peer's weight in that commit, beta the factor of that
merge's clip (`penalty.clip`), and c how far an outer step follows a change of the merged pseudo-gradient: nu for SGD,
nu (1 + mu) for Nesterov. A fragment that was rolled back has no share of anybody: its last step is the one before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from edit.config.algorithm import OuterConfig
from edit.records import Commit, Verdict

__all__ = ["Estimator", "LastStepEstimator"]


class Estimator(Protocol):
    """Estimates theta after the next outer step.

    Each tensor is the flat fp32 vector, shape (elements that this rank holds,), of one fragment.
    """

    def estimate(self, fragment_id: int, theta: Tensor, delta: Tensor) -> Tensor | None:
        """Return theta_hat, a new vector; None when there is not enough to go by.

        Args:
            theta: the outer parameters of this fragment, at the outer step that `delta` was computed against.
            delta: this peer's pseudo-gradient, as long as theta.
        """
        ...

    def committed(self, commit: Commit, peer_id: str, moved: Mapping[int, Tensor], deltas: Mapping[int, Tensor]) -> None:
        """Learn from a commit.

        Args:
            commit: with the weight that this peer's contribution to each fragment got.
            peer_id: this peer's.
            moved: theta before the commit minus theta after it, by fragment_id; of every fragment that is not rolled back.
            deltas: the pseudo-gradients that this peer contributed to it, by fragment_id; empty when it did not.
        """
        ...

    def forget(self) -> None:
        """Forget what was learned, because theta has moved otherwise than by one commit (a snapshot)."""
        ...

    def state(self) -> tuple[dict[str, dict[int, Tensor]], dict[str, Any]]:
        """Return what is kept, for a checkpoint.

        Tensors by kind (of `edit.worker.checkpoint.KINDS`) and fragment_id; values that JSON has.
        """
        ...

    def load(self, vectors: Mapping[str, Mapping[int, Tensor]], scalars: Mapping[str, Any]) -> None:
        """Go on from what `state` returned. Raises KeyError, TypeError or ValueError when it is damaged."""
        ...


@dataclass(frozen=True, slots=True)
class _Last:
    """One fragment's last outer step."""

    # theta before minus theta after.
    step: Tensor
    # This peer's pseudo-gradient in it, if any, and its weight, times the factor of the clip.
    delta: Tensor | None
    weight: float


class LastStepEstimator:
    """Expects the last step again, with this peer's share in it replaced (`sync.mode = "eager"`; arXiv 2502.12996).

    Args:
        outer: the outer optimizer, SGD or Nesterov (`edit.config.algorithm.check_together` allows no other with eager).
    """

    def __init__(self, outer: OuterConfig) -> None:
        self._follows = outer.lr * (1 + outer.momentum) if outer.optimizer == "nesterov" else outer.lr
        self._last: dict[int, _Last] = {}

    def estimate(self, fragment_id: int, theta: Tensor, delta: Tensor) -> Tensor | None:
        """Return theta_hat; None for a fragment that no commit has moved yet."""
        last = self._last.get(fragment_id)
        if last is None:
            return None
        estimate = theta - last.step
        if last.weight and last.delta is not None:
            estimate.sub_((delta - last.delta).mul_(self._follows * last.weight))
        return estimate

    def committed(self, commit: Commit, peer_id: str, moved: Mapping[int, Tensor], deltas: Mapping[int, Tensor]) -> None:
        """Keep the step of each fragment that has moved, and this peer's part in it."""
        for part in commit.fragments:
            i, mine = part.fragment_id, part.verdict_of(peer_id)
            if i not in moved:
                continue
            weight = mine.weight * part.clip if mine is not None and mine.verdict is Verdict.OK else 0.0
            self._last[i] = _Last(moved[i], deltas.get(i), weight)

    def forget(self) -> None:
        """Forget the last step."""
        self._last.clear()

    def state(self) -> tuple[dict[str, dict[int, Tensor]], dict[str, Any]]:
        """Return the last steps, what this peer contributed to them, and its weights."""
        last = self._last
        sent = {i: one.delta for i, one in last.items() if one.delta is not None}
        return {"last_step": {i: one.step for i, one in last.items()}, "last_sent": sent}, {
            "weights": {str(i): one.weight for i, one in last.items()}
        }

    def load(self, vectors: Mapping[str, Mapping[int, Tensor]], scalars: Mapping[str, Any]) -> None:
        """Go on from what `state` returned. Raises KeyError, TypeError or ValueError when it is damaged."""
        sent, weights = vectors.get("last_sent", {}), scalars.get("weights", {})
        steps = vectors.get("last_step", {})
        self._last = {i: _Last(step, sent.get(i), float(weights[str(i)])) for i, step in steps.items()}
