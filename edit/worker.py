"""`EditWorker`: hooks a user's own optimizer and model, so that a plain PyTorch loop trains with the other peers.

Owns: the order of a peer's actions. After an optimizer step at which the schedule says so: catch up, stage every fragment's
pseudo-gradient, contribute. Before the next forward (or optimizer step): take the outcome, once. Rules:

- Nothing but an optimizer step starts an exchange; forwards, evaluation, checkpointing and state_dict() never do (T5 to T8).
- Theta, local parameters and residuals move together, on a commit, and only then.
- A contribution is pending until its outcome is known. While it is FRESH the next forward waits for the outcome. It becomes
  OVERLAPPED when training goes on without one: the carrier is cut off (it is in doubt), or it was sent again after coming too
  late. Then the outcome is asked for after every optimizer step, and the progress made since sending is replayed.

Must not know: how a carrier works, what a merge computes, any clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from edit.codecs import codec_names
from edit.collective import Collective
from edit.errors import ConfigError, EvictedError, LocalProtocolError, TransportError
from edit.feedback import ErrorFeedback
from edit.records import Aborted, Behind, Commit, Committed, Contribution, Evicted, Finished, Snapshot, Verdict
from edit.replica import Replica, verified
from edit.schedule import SyncSchedule, Work

__all__ = ["EditWorker", "WorkerConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """sync_every: H, the optimizer steps between contributions; codec: of the contributions, by name (see `codec_names`)."""

    sync_every: int = 128
    codec: str = "int8"

    def __post_init__(self) -> None:
        if self.sync_every < 1:
            raise ConfigError(f"sync_every = {self.sync_every!r}: must be at least 1")
        if self.codec not in codec_names():
            raise ConfigError(f"codec = {self.codec!r}: must be one of {', '.join(codec_names())}")


@dataclass(slots=True)
class _Pending:
    """A contribution whose outcome is not known. sent_from: the local parameters at sending, kept once it is overlapped."""

    outer_step: int
    work: Work
    sent_from: list[Tensor] | None = None


class EditWorker:
    """Trains `model` with the other peers of `collective`, from inside the user's own loop.

    A context manager: entering joins the run and loads its outer parameters into the model (they replace the model's own,
    unless this peer founds the run); leaving waits for the last outcome and removes every hook. In between, loop as always:
    only `optimizer.step()` counts, however many backwards stand behind it. After leaving, the model holds the local parameters.
    Buffers and frozen parameters are not exchanged. A compiled model takes the outcome before its next optimizer step.

    Raises EvictedError out of the loop's own forward or step when the operator evicted this peer, RefusedError on entering
    when the model does not fit the run.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, collective: Collective, config: WorkerConfig) -> None:
        self._model = model
        self._optimizer = optimizer
        self._collective = collective
        self._config = config
        self._schedule = SyncSchedule(config.sync_every)
        self._entered: tuple[Replica, ErrorFeedback] | None = None
        self._hooks: list[RemovableHandle] = []
        self._pending: _Pending | None = None
        self._swapped = False
        self._finished = False
        self._last_commit: Commit | None = None
        self._last_reason = ""

    def __enter__(self) -> Self:
        if self._hooks:
            raise LocalProtocolError("this EditWorker is already entered")
        replica = Replica(self._model)
        replica.start(self._collective.join(replica.schema, replica.local))
        feedback = ErrorFeedback(self._config.codec, [fragment.numel for fragment in replica.schema.fragments])
        self._entered = (replica, feedback)
        self._schedule = SyncSchedule(self._config.sync_every)
        self._pending, self._finished = None, False
        self._catch_up()
        self._hooks = [
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_step_post_hook(self._after_step),
            self._model.register_forward_pre_hook(self._before_forward, prepend=True),
        ]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None and self._pending is not None:
                self._resolve(block=True, again=False)
        finally:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
            self._drop_pending()

    # What the user sees.

    @property
    def outer_step(self) -> int:
        """The committed outer step of theta."""
        return self._replica.outer.outer_step

    @property
    def digest(self) -> str:
        """Digest of theta; equal on all peers at the same outer step."""
        return self._replica.outer.digest

    @property
    def finished(self) -> bool:
        """Whether the run has reached its last outer step; optimizer steps then no longer lead to contributions."""
        return self._finished

    @property
    def inner_steps(self) -> int:
        """Optimizer steps since entering."""
        return self._schedule.inner_steps

    @property
    def round_inner_steps(self) -> int:
        """Optimizer steps since the last contribution."""
        return self._schedule.round_inner_steps

    @property
    def pending(self) -> bool:
        """Whether a contribution waits for its outcome."""
        return self._pending is not None

    @property
    def last_commit(self) -> Commit | None:
        """The commit applied last, with every peer's verdicts; None before the first."""
        return self._last_commit

    @property
    def last_reason(self) -> str:
        """Why the last attempt ended as it did: the commit's reason, or why a round was lost or a snapshot taken."""
        return self._last_reason

    def count_tokens(self, tokens: int) -> None:
        """Add to the tokens behind the next contribution (they weigh it when the run says `weighting = "tokens"`)."""
        self._schedule.count_tokens(tokens)

    def synchronize(self) -> bool:
        """Wait for the pending outcome and apply it, and every commit already known. False when the carrier is cut off."""
        self._require_local("synchronize()")
        pending = self._pending
        with _outside_autograd():
            if pending is None:
                return self._catch_up()
            self._resolve(block=True)
        return self._pending is not pending

    @contextmanager
    def outer_parameters(self) -> Iterator[nn.Module]:
        """The model with theta in it, for evaluating or saving; afterwards the local parameters are back to the bit.

        No exchange and no waiting inside; an optimizer step inside is a LocalProtocolError.
        """
        self._require_local("outer_parameters()")
        with _outside_autograd():
            kept = self._replica.load_outer()
        self._swapped = True
        try:
            yield self._model
        finally:
            self._swapped = False
            with _outside_autograd():
                self._replica.restore(kept)

    def outer_state_dict(self) -> dict[str, Tensor]:
        """theta by parameter name: fp32 CPU copies of all exchanged parameters (no buffers, nothing frozen)."""
        return self._replica.outer_state_dict()

    # The hooks.

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or self._swapped:
            return
        self._take_outcome()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._require_local("optimizer.step()")
        self._take_outcome()

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._schedule.count_step()
        if self._finished:
            return
        with _outside_autograd():
            if self._pending is not None:
                self._resolve(block=self._schedule.at_boundary)
            if self._pending is None and self._schedule.due and self._catch_up() and not self._finished:
                self._contribute()

    def _take_outcome(self) -> None:
        """Wait for a fresh contribution's outcome. For an overlapped one nothing happens here."""
        if self._pending is not None and self._pending.sent_from is None:
            with _outside_autograd():
                self._resolve(block=True)

    # The exchange.

    def _contribute(self) -> None:
        replica, feedback = self._replica, self._feedback
        outer_step, work = self.outer_step, self._schedule.contributed()
        self._pending = _Pending(outer_step, work)
        for fragment in replica.schema.fragments:
            fragment_id = fragment.fragment_id
            self._collective.contribute(
                Contribution(
                    outer_step=outer_step,
                    fragment_id=fragment_id,
                    inner_steps=work.inner_steps,
                    tokens=work.tokens,
                    payload=feedback.stage(fragment_id, replica.pseudo_gradient(fragment_id)),
                )
            )

    def _resolve(self, *, block: bool, again: bool = True) -> None:
        """Ask for the pending contribution's outcome and act on it; without one it stays pending and overlaps with training.

        again: contribute again at once to the outer step now open, should this contribution have come too late.
        """
        pending = self._pending
        assert pending is not None
        match self._collective.outcome(pending.outer_step, block=block):
            case Committed(commit):
                settled = self._advance(commit, pending)
                if settled and self._catch_up() and again and not self._finished and not self._takes_part(commit):
                    self._contribute()
                    self._overlap()
                    return
            case Aborted(reason):
                self._drop_pending()
                settled, self._last_reason = True, reason
            case Behind(reason):
                settled = self._heal(reason)
            case Finished(outer_step):
                self._finish(outer_step)
                settled = True
            case Evicted(reason):
                self._evicted(reason)
            case None:
                settled = False
        if not settled:
            self._overlap()

    def _catch_up(self) -> bool:
        """Apply the commits already known, with replay. False when this peer cannot get to the run's outer step for now."""
        while not self._finished:
            match self._collective.outcome(self.outer_step, block=False):
                case Committed(commit):
                    if not self._advance(commit, None):
                        return False
                case Behind(reason):
                    return self._heal(reason)
                case Finished(outer_step):
                    self._finish(outer_step)
                case Evicted(reason):
                    self._evicted(reason)
                case Aborted() | None:
                    break
        return True

    def _overlap(self) -> None:
        """Training goes on before the outcome: keep the local parameters as they were sent."""
        if self._pending is not None and self._pending.sent_from is None:
            self._pending.sent_from = self._replica.local()

    # Moving on.

    def _advance(self, commit: Commit, pending: _Pending | None) -> bool:
        """Apply one commit. False (and nothing is changed) when its digest cannot be reached and no snapshot either."""
        target: Snapshot | None = self._replica.after(commit)
        self._last_reason = commit.reason
        if target is None or target.digest != commit.digest:
            self._last_reason = (
                f"theta after outer step {commit.outer_step} has another digest than the run's; taking a snapshot"
            )
            target = self._fetch()
            if target is None:
                return False
        verdicts = [self._verdict(commit, i) if pending else None for i in range(len(commit.fragments))]
        sent_from = pending.sent_from if pending else None
        self._replica.move(target, lambda i: self._kept_progress(i, verdicts[i], sent_from))
        for i, verdict in enumerate(verdicts):
            self._settle_fragment(i, verdict)
        if pending is not None and any(verdicts):
            self._schedule.merged(pending.work)
        self._pending = None
        self._last_commit = commit
        return True

    def _kept_progress(self, i: int, verdict: Verdict | None, sent_from: list[Tensor] | None) -> Tensor | None:
        if verdict is None:
            return self._replica.progress(i)
        if verdict is Verdict.OK and sent_from is not None:
            return self._replica.progress_since(i, sent_from[i])
        return None

    def _settle_fragment(self, i: int, verdict: Verdict | None) -> None:
        if verdict is Verdict.OK:
            self._feedback.commit(i)
            return
        self._feedback.rollback(i)
        if verdict is Verdict.NONFINITE:
            _scrub(self._optimizer, self._replica.parameters(i))

    def _verdict(self, commit: Commit, fragment_id: int) -> Verdict | None:
        mine = commit.fragments[fragment_id].verdict_of(self._collective.peer_id)
        return mine.verdict if mine else None

    def _takes_part(self, commit: Commit) -> bool:
        return any(self._verdict(commit, i) for i in range(len(commit.fragments)))

    def _heal(self, reason: str) -> bool:
        """Take a snapshot and replay the local progress onto it. False (and nothing is changed) when the carrier is cut off.

        Whether a pending contribution is in the snapshot cannot be known, so only what was done since sending it is replayed:
        work may be lost here, never counted twice.
        """
        self._last_reason = reason
        snapshot = self._fetch()
        if snapshot is None:
            return False
        self._replica.move(snapshot, self._unsent_progress)
        if self._pending is not None:
            self._schedule.merged(self._pending.work)
        self._drop_pending()
        return True

    def _unsent_progress(self, i: int) -> Tensor | None:
        if self._pending is None:
            return self._replica.progress(i)
        sent_from = self._pending.sent_from
        return None if sent_from is None else self._replica.progress_since(i, sent_from[i])

    def _fetch(self) -> Snapshot | None:
        try:
            return verified(self._collective.snapshot(), self._replica.schema)
        except TransportError:
            return None

    def _finish(self, outer_step: int) -> None:
        self._finished = True
        if outer_step == self.outer_step or not self._heal(f"the run finished at outer step {outer_step}"):
            self._drop_pending()

    def _evicted(self, reason: str) -> None:
        self._drop_pending()
        raise EvictedError(reason)

    def _drop_pending(self) -> None:
        if self._pending is not None:
            for fragment in self._replica.schema.fragments:
                self._feedback.rollback(fragment.fragment_id)
        self._pending = None

    @property
    def _replica(self) -> Replica:
        return self._inside()[0]

    @property
    def _feedback(self) -> ErrorFeedback:
        return self._inside()[1]

    def _inside(self) -> tuple[Replica, ErrorFeedback]:
        if self._entered is None:
            raise LocalProtocolError("enter the EditWorker first: with EditWorker(...) as worker:")
        return self._entered

    def _require_local(self, call: str) -> None:
        if self._swapped:
            raise LocalProtocolError(f"{call} inside outer_parameters(): the model holds the outer parameters there")


@contextmanager
def _outside_autograd() -> Iterator[None]:
    """No graph, and no inference tensors even when the user evaluates under torch.inference_mode()."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _scrub(optimizer: Optimizer, parameters: Any) -> None:
    """Set NaN and Inf in the inner optimizer's state of these parameters to 0, or they would come back with the next step."""
    for parameter in parameters:
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor) and value.is_floating_point():
                value.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
