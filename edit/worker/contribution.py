"""Makes one contribution: pseudo-gradient, error feedback, this rank's share of it; and where training goes on from.

The same contribution can be made again to the bit, from what a checkpoint keeps of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from edit.codecs.error_feedback import ErrorFeedback, Vector
from edit.collective import Collective
from edit.errors import LocalProtocolError
from edit.merging.norms import clip_to, norm_of_pieces, whole_norm
from edit.records import Contribution, EncodedTensor
from edit.replica.flat import is_finite
from edit.replica.replica import Replica
from edit.worker.config import WorkerConfig
from edit.worker.estimator import Estimator
from edit.worker.exchange import Pending
from edit.worker.masked import GridStaging

__all__ = ["ContributionMaker", "SentTensors"]


@dataclass(slots=True)
class SentTensors:
    """What is kept of the pending contribution, by fragment; nothing where nothing is pending."""

    # The local parameters from which training went on after sending, once it goes on before the outcome.
    sent_from: dict[int, Tensor] = field(default_factory=dict)
    # Until then: which version of the local parameters it was (`Replica.version`).
    versions: dict[int, int] = field(default_factory=dict)
    # The pseudo-gradients, where they are needed again (eager).
    deltas: dict[int, Tensor] = field(default_factory=dict)
    # What was sent, to send the same once more (strict).
    payloads: dict[int, EncodedTensor] = field(default_factory=dict)


class ContributionMaker:
    """Makes and sends the contributions of one replica to one aggregator.

    Args:
        replica: the outer and the local parameters of this rank.
        feedback: encodes, and keeps what the codec leaves out.
        collective: what the contributions are sent over.
        config: `sync.overlap`, `sync.strict` count here.
        estimator: None unless training goes on from an estimate of the update (eager).
        grid: puts contributions on the grid of their round; None: they are not masked.
        clip: the largest norm of a contribution, over all ranks; 0: any.
    """

    def __init__(
        self,
        replica: Replica,
        feedback: ErrorFeedback,
        collective: Collective,
        config: WorkerConfig,
        estimator: Estimator | None,
        grid: GridStaging | None = None,
        clip: float = 0.0,
    ) -> None:
        self._replica = replica
        self._feedback = feedback
        self._collective = collective
        self._config = config
        self._estimator = estimator
        self._grid = grid
        self._clip = clip

    def _own_delta(self, sent: SentTensors, i: int) -> Vector | None:
        """Return this rank's part of the pseudo-gradient of fragment i once more, if its residual takes it.

        As long as theta is what it was computed against.

        Raises LocalProtocolError when the local parameters that it was computed from are gone.
        """
        if not self._feedback.needs_delta(i):
            return None
        if i in sent.deltas:
            return self._replica.layout.own(i, sent.deltas[i])
        if i not in sent.sent_from and self._replica.version(i) != sent.versions[i]:
            name = self._replica.schema.fragments[i].name
            raise LocalProtocolError(
                f"the parameters of {name} changed after optimizer.step() had contributed them; only_steps_write says no"
            )
        return self._own_pseudo_gradient(i, sent.sent_from.get(i))

    def commit_residual(self, sent: SentTensors, i: int) -> Iterator[slice]:
        """Adopt the residual of fragment i: its contribution is merged. Before theta or the local parameters move.

        Yields each part of them that it has done with; iterate to the end.
        """
        if not self._replica.layout.owned[i].numel or (self._grid is not None and i not in self._grid.plans):
            return iter(())
        transfers = self._replica.transfers
        with transfers.beside():
            written = self._feedback.commit_parts(i, self._own_delta(sent, i))
        return transfers.each_beside(written)

    def keep_residual(self, sent: SentTensors, i: int) -> None:
        """Compute now the residual that fragment i would leave: theta is about to move while its contribution stays pending."""
        if self._replica.layout.owned[i].numel and (delta := self._own_delta(sent, i)) is not None:
            self._keep(i, delta)

    def _keep(self, i: int, own: Vector) -> None:
        if self._grid is not None and i not in self._grid.plans:
            return
        with self._replica.transfers.beside():
            self._feedback.keep(i, own)

    def _own_pseudo_gradient(self, i: int, local: Tensor | None = None) -> Vector:
        # Norms, which a grid and a clip need, are added up in the order of the CPU's parts.
        return self._replica.own_pseudo_gradient(i, local, anywhere=self._grid is None and not self._clip)

    def contribute(self, pending: Pending, sent: SentTensors, *, send: bool) -> None:
        """Stage every fragment of a contribution, send it, and put the local parameters where training goes on from.

        Args:
            pending: which fragments, computed against which outer step, from how many inner steps and tokens.
            sent: filled with what has to be kept of the contribution until its outcome is applied.
            send: False stages it only: a replay of what was sent before the process was restarted.

        Raises what `Collective.contribute` raises.
        """
        self._shorten(pending.fragments, self._own_pseudo_gradient)
        for i in pending.fragments:
            if self._estimator is not None:
                delta = self._replica.pseudo_gradient(i)
                self._stage(pending, sent, i, self._replica.layout.own(i, delta), send)
                self._go_on_from_estimate(self._estimator, sent, i, delta)
                continue
            own = self._own_pseudo_gradient(i)
            self._stage(pending, sent, i, own, send)
            self._stay(sent, i, own)

    def contribute_again(self, pending: Pending, sent: SentTensors, *, send: bool) -> None:
        """Make the same contribution from what is left of it in a checkpoint; the local parameters stay.

        Args and errors as of `contribute`; `sent` is what the checkpoint kept.
        """
        layout = self._replica.layout

        def own_of(i: int) -> Vector:
            if i in sent.deltas:
                return layout.own(i, sent.deltas[i])
            return self._own_pseudo_gradient(i, sent.sent_from.get(i))

        if layout.ranks.all([not self._feedback.scales])[0]:  # it was short enough, or made before there was a bound
            self._shorten(pending.missing, own_of)
        for i in pending.missing:
            own = own_of(i)
            self._stage(pending, sent, i, own, send)
            if i not in sent.sent_from:
                self._stay(sent, i, own)

    def send_again(self, pending: Pending, sent: SentTensors) -> None:
        """Send the same bytes once more. Raises what `Collective.contribute` raises."""
        for i, payload in sent.payloads.items():
            self._send(pending, i, payload)

    def keep_local(self, pending: Pending, sent: SentTensors) -> None:
        """Keep the local parameters as they were sent, in `sent`, because training goes on before the outcome is known."""
        for i in pending.missing:
            if i not in sent.sent_from:
                sent.sent_from[i] = self._replica.local_fragment(i)

    def _stay(self, sent: SentTensors, i: int, own: Vector) -> None:
        """Training goes on from the local parameters as they are. own: as it was staged."""
        if self._config.sync.overlap:
            sent.sent_from[i] = self._replica.local_fragment(i)
            return
        sent.versions[i] = self._replica.version(i)
        # They stay until the outcome: in every loop, or only if no one else writes to them.
        if not self._config.only_steps_write and self._replica.layout.owned[i].numel:
            self._keep(i, own)

    def _shorten(self, fragments: Sequence[int], own_of: Callable[[int], Vector]) -> None:
        """Let what is staged of these fragments next be no longer, all together, than `clip`. All ranks call it."""
        if not self._clip:
            return
        layout, norms = self._replica.layout, []
        for i in fragments:
            own = own_of(i)
            self._feedback.rescale(i, 1.0)
            norms.append(norm_of_pieces(own.numel(), self._feedback.owed(i, own)) if own.numel() else 0.0)
        norm = whole_norm(each for rank in layout.ranks.collect(norms) for each in rank)
        for i in (each for each in fragments if layout.owned[each].numel):
            self._feedback.rescale(i, clip_to(norm, self._clip))

    def _stage(self, pending: Pending, sent: SentTensors, i: int, own: Vector, send: bool) -> None:
        norm: float | None = None
        if self._grid is not None and not send and i not in self._grid.plans:
            return  # made before this process began, on a grid that is gone with its round: what it left out is lost
        if self._grid is not None:
            payload, norm = self._grid.stage(i, own)
        if self._replica.layout.owned[i].numel == 0:
            return
        if self._grid is None:
            with self._replica.transfers.beside():
                payload = self._feedback.stage(i, own)
        if self._config.sync.strict:
            sent.payloads[i] = payload
        if send:
            self._send(pending, i, payload, norm)

    def _send(self, pending: Pending, i: int, payload: EncodedTensor, norm: float | None = None) -> None:
        owned = self._replica.layout.owned[i]
        self._collective.contribute(
            Contribution(
                outer_step=pending.began,
                fragment_id=i,
                inner_steps=pending.work.inner_steps,
                tokens=pending.work.tokens,
                payload=payload,
                boxes=None if owned.is_whole else owned.boxes,
                norm=norm,
            )
        )

    def _go_on_from_estimate(self, estimator: Estimator, sent: SentTensors, i: int, delta: Tensor) -> None:
        replica = self._replica
        buffers = replica.layout.schema.fragments[i].buffers  # no outer optimizer moves them
        estimate = None if buffers else estimator.estimate(i, replica.theta(i), delta)
        if estimate is not None and replica.layout.ranks.all([is_finite(estimate)])[0]:
            replica.load_local(i, estimate)
        sent.deltas[i] = delta
        sent.sent_from[i] = replica.local_fragment(i)
