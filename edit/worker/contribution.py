"""Puts one contribution together: pseudo-gradient, error feedback, this rank's part of it; and where training goes on from.

Owns: what a contribution holds, and that the same one can be made again to the bit. Must not know: outcomes, when it is due.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edit.codecs.error_feedback import ErrorFeedback
from edit.collective import Collective
from edit.records import Contribution, EncodedTensor
from edit.replica.replica import Replica
from edit.worker.config import WorkerConfig
from edit.worker.estimator import Estimator
from edit.worker.pending import Pending

__all__ = ["ContributionMaker"]


class ContributionMaker:
    """The sending side of one exchange. estimator: None unless training goes on from an estimate (eager)."""

    def __init__(
        self,
        replica: Replica,
        feedback: ErrorFeedback,
        collective: Collective,
        config: WorkerConfig,
        estimator: Estimator | None,
    ) -> None:
        self._replica = replica
        self._feedback = feedback
        self._collective = collective
        self._config = config
        self._estimator = estimator

    def contribute(self, pending: Pending, *, send: bool) -> None:
        """Stage every fragment of the contribution and send it; then training goes on, from an estimate where there is one."""
        for i in pending.fragments:
            delta = self._replica.pseudo_gradient(i)
            self._stage(pending, i, delta, send)
            if self._estimator is not None:
                self._go_on_from_estimate(self._estimator, pending, i, delta)
            elif self._config.sync.overlap:
                pending.sent_from[i] = self._replica.local_fragment(i)

    def contribute_again(self, pending: Pending, *, send: bool) -> None:
        """The same contribution from what is left of it in a checkpoint; the local parameters stay."""
        for i in pending.missing:
            delta = pending.deltas[i] if i in pending.deltas else self._replica.pseudo_gradient(i, pending.sent_from.get(i))
            self._stage(pending, i, delta, send)
            if self._config.sync.overlap and i not in pending.sent_from:
                pending.sent_from[i] = self._replica.local_fragment(i)

    def send_again(self, pending: Pending) -> None:
        """The same bytes once more."""
        for i, payload in pending.payloads.items():
            self._send(pending, i, payload)

    def _stage(self, pending: Pending, i: int, delta: Tensor, send: bool) -> None:
        layout = self._replica.layout
        if layout.owned[i].numel == 0:
            return
        payload = self._feedback.stage(i, layout.own(i, delta))
        if self._config.sync.strict:
            pending.payloads[i] = payload
        if send:
            self._send(pending, i, payload)

    def _send(self, pending: Pending, i: int, payload: EncodedTensor) -> None:
        owned = self._replica.layout.owned[i]
        self._collective.contribute(
            Contribution(
                outer_step=pending.began,
                fragment_id=i,
                inner_steps=pending.work.inner_steps,
                tokens=pending.work.tokens,
                payload=payload,
                boxes=None if owned.is_whole else owned.boxes,
            )
        )

    def _go_on_from_estimate(self, estimator: Estimator, pending: Pending, i: int, delta: Tensor) -> None:
        replica = self._replica
        estimate = estimator.estimate(i, replica.outer.fragments[i], delta)
        if estimate is not None and replica.layout.ranks.all([bool(torch.isfinite(estimate).all())])[0]:
            replica.load_local(i, estimate)
        pending.deltas[i] = delta
        pending.sent_from[i] = replica.local_fragment(i)
