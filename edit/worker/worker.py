"""`EditWorker`: hooks a user's own optimizer and model, so that a plain PyTorch loop trains with the other peers.

Owns: when a peer acts. After an optimizer step at which the schedule says so: catch up, contribute. Before the next forward (or
optimizer step), or after so many more steps, as the mode says: take the outcome, once. Rules:

- Nothing but an optimizer step starts an exchange; forwards, evaluation, checkpointing and state_dict() never do (T5 to T8).
- Theta, local parameters and residuals move together, on a commit, and only then (`edit.worker.exchange`).
- While a contribution is FRESH the next forward waits for its outcome (`blocking`, `forward`). It becomes OVERLAPPED when
  training goes on without one: as planned (`delayed`, `eager`), or because the carrier is cut off (it is in doubt), or it was
  sent again after coming too late. Then it is asked for after optimizer steps, and the progress made since sending is replayed.

Where a run has several aggregators, each fragment belongs to one of them (`edit.fragments.assignment`), and a worker has
one exchange with each. They advance on their own, but contribute at the same optimizer step: one that had no outcome for a
while (its aggregator was away) waits for the others' next contribution. Else two peers could wait for each other, at one
aggregator each.

Must not know: how a carrier works, what a merge computes, any clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from edit.codecs.error_feedback import ErrorFeedback
from edit.collective import Collective
from edit.errors import LocalProtocolError
from edit.fragments.schema import Schema
from edit.records import Commit, Snapshot
from edit.replica.layout import is_sharded
from edit.replica.ranks import ALONE, Ranks
from edit.replica.replica import Outer, Replica
from edit.worker.aggregator_shares import (
    AggregatorShare,
    digest_of,
    founding,
    joined_state,
    refuse_small_parts,
    separate_states,
    shown,
)
from edit.worker.checkpoint import Checkpoint, go_on, goes_forward, skeleton, start, state_of
from edit.worker.config import WorkerConfig
from edit.worker.exchange import Exchange

__all__ = ["EditWorker", "WorkerConfig"]


class EditWorker:
    """Trains `model` with the other peers of `collective`, from inside the user's own loop.

    A context manager: entering joins the run and loads its outer parameters into the model (they replace the model's own,
    unless this peer founds the run, or `load_state_dict` came before); leaving waits for the last outcome and removes every
    hook. In between, loop as always: only `optimizer.step()` counts, however many backwards stand behind it. After leaving, the
    model holds the local parameters. Frozen parameters are not exchanged, buffers as the configuration says. A compiled model
    takes the outcome before its next optimizer step.

    A model sharded over the ranks of a torchrun job (`fully_shard`, `parallelize_module`; call them before) is one peer: every
    rank makes the same calls. ranks: of this replica; None: all of torch.distributed's when the model is sharded, else alone.
    clock: monotonic seconds in float64, read only where the run's schedule is by time, at rank 0; None: the system's.
    collective: where the run has several aggregators, one for each, in their order.

    Raises EvictedError out of the loop's own forward or step when the operator evicted this peer, RefusedError on entering
    when the model does not fit the run, ConfigError when the ranks do not fit together.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        collective: Collective | Sequence[Collective],
        config: WorkerConfig,
        ranks: Ranks | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._collectives = tuple(collective) if isinstance(collective, Sequence) else (collective,)
        self._config = config
        self._ranks = ranks if ranks is not None else Ranks.world() if is_sharded(model) else ALONE
        self._clock = clock if clock is not None else time.monotonic
        self._entered: tuple[Exchange, ...] = ()
        self._checkpoints: tuple[Checkpoint, ...] = ()
        self._hooks: list[RemovableHandle] = []
        self._update_points: list[dict[nn.Module, tuple[int, ...]]] = []  # by exchange
        self._swapped = False

    def __enter__(self) -> Self:
        if self._hooks:
            raise LocalProtocolError("this EditWorker is already entered")
        with _outside_autograd():
            replicas = self._new_replicas()
            self._entered = tuple(
                Exchange(replica, collective, self._optimizer, self._config, self._clock)
                for replica, collective in zip(replicas, self._collectives, strict=True)
            )
            self._start(self._join(replicas))
        forward = self._config.sync.mode == "forward"
        self._update_points = [replica.modules.update_points() if forward else {} for replica in replicas]
        modules = dict.fromkeys([self._model, *(module for update_points in self._update_points for module in update_points)])
        self._hooks = [
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_step_post_hook(self._after_step),
            *(module.register_forward_pre_hook(self._before_forward, prepend=True) for module in modules),
        ]
        return self

    def _join(self, replicas: Sequence[Replica]) -> list[Snapshot]:
        snapshots: list[Snapshot] = []
        for replica, collective in zip(replicas, self._collectives, strict=True):
            shards = replica.layout.held if self._ranks.size > 1 else None
            snapshots.append(collective.join(replica.schema, founding(replicas, snapshots), shards))
        return snapshots

    def _start(self, snapshots: Sequence[Snapshot]) -> None:
        checkpoints, self._checkpoints = self._checkpoints, ()
        for number, (exchange, snapshot) in enumerate(zip(self._entered, snapshots, strict=True)):
            if checkpoints:
                go_on(exchange, checkpoints[number], snapshot)
            else:
                start(exchange, snapshot)
            exchange.begin()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                with _outside_autograd():
                    for exchange in self._exchanges:
                        exchange.leave()
        finally:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
            for exchange in self._exchanges:
                exchange.drop_pending()

    def _new_replicas(self) -> list[Replica]:
        self._ranks.same("the worker's configuration", self._config)
        count = len(self._collectives)
        replicas = [Replica(self._model, self._ranks, self._config.buffers, (number, count)) for number in range(count)]
        refuse_small_parts(replicas, self._config.sync.groups)
        if self._config.sync.mode == "forward":
            replicas[0].modules.refuse_prefetch()
        return replicas

    # What the user sees.

    @property
    def outer_step(self) -> int:
        """The committed outer step of theta; of several parts, that of the furthest."""
        return max(exchange.outer_step for exchange in self._exchanges)

    @property
    def digest(self) -> str:
        """Digest of theta; equal on all peers at the same outer step (of all parts)."""
        return digest_of(self._exchanges)

    @property
    def parts(self) -> tuple[AggregatorShare, ...]:
        """Where the fragments of each aggregator stand, by aggregator; before entering none."""
        return tuple(map(shown, self._entered))

    def outer_of(self, part: int = 0) -> tuple[Schema, Outer]:
        """theta of one aggregator's fragments as this rank holds it, and which they are. What was returned once stays as it is:
        later commits replace it."""
        replica = self._exchanges[part].replica
        return replica.schema, replica.outer

    @property
    def finished(self) -> bool:
        """Whether the run has reached its last outer step; optimizer steps then no longer lead to contributions."""
        return bool(self._entered) and all(exchange.finished for exchange in self._entered)

    @property
    def inner_steps(self) -> int:
        """Optimizer steps since entering, and those before the checkpoint that was loaded."""
        return self._entered[0].schedule.inner_steps if self._entered else 0

    @property
    def round_inner_steps(self) -> int:
        """Optimizer steps since the last contribution."""
        return min((exchange.schedule.round_inner_steps for exchange in self._entered), default=0)

    @property
    def pending(self) -> bool:
        """Whether a contribution waits for its outcome."""
        return any(exchange.pending is not None for exchange in self._entered)

    @property
    def last_commit(self) -> Commit | None:
        """The commit applied last, with every peer's verdicts, without its payloads; None before the first."""
        return self._furthest.last_commit if self._entered else None

    @property
    def last_reason(self) -> str:
        """Why the last attempt ended as it did: the commit's reason, or why a round was lost or a snapshot taken."""
        return self._furthest.last_reason if self._entered else ""

    def count_tokens(self, tokens: int) -> None:
        """Add to the tokens behind the next contribution (they weigh it when the run says `weighting = "tokens"`).

        They are the whole replica's, so every rank adds the same.
        """
        for exchange in self._exchanges:
            exchange.schedule.count_tokens(tokens)

    def synchronize(self, *, block: bool = True) -> bool:
        """Wait for the pending outcome and apply it, and every commit already known. False when the carrier is cut off.

        block: False applies what is known and does not wait; an outcome that is still open is asked for after later steps.
        """
        self._require_local("synchronize()")
        with _outside_autograd():
            known = [exchange.synchronize(block=block) for exchange in self._exchanges]
        return all(known)

    @contextmanager
    def outer_parameters(self) -> Iterator[nn.Module]:
        """The model with theta in it, for evaluating or saving; afterwards the local parameters are back to the bit.

        No exchange and no waiting inside; an optimizer step inside is a LocalProtocolError.
        """
        self._require_local("outer_parameters()")
        with _outside_autograd():
            kept = [exchange.replica.load_outer() for exchange in self._exchanges]
        self._swapped = True
        try:
            yield self._model
        finally:
            self._swapped = False
            with _outside_autograd():
                for exchange, copies in zip(self._exchanges, kept, strict=True):
                    exchange.replica.restore(copies)

    def outer_state_dict(self) -> dict[str, Tensor]:
        """theta by tensor name: fp32 CPU copies in full shape of all that is exchanged (nothing frozen).

        In a replica of several ranks all of them call it; rank 0 gets the tensors, the others an empty dictionary.
        """
        with _outside_autograd():
            states = [exchange.replica.outer_state_dict() for exchange in self._exchanges]
        return {name: theta for state in states for name, theta in state.items()}

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """What this worker needs to go on, for torch.distributed.checkpoint; see `edit.worker.checkpoint`. Changes nothing
        (T8).

        The model's and the optimizer's own state are the caller's. The tensors are shared, not copied: do not write into them.
        All ranks call it together.
        """
        with _outside_autograd():
            return joined_state([state_of(exchange) for exchange in self._exchanges])

    def empty_state(self, kinds: Collection[str]) -> dict[str, dict[str, Tensor]]:
        """Tensors laid out as the model is, for torch.distributed.checkpoint to load into; kinds: keys of `state_dict`, but for
        "scalars". Before entering."""
        with _outside_autograd():
            skeletons = [skeleton(replica, kinds) for replica in self._new_replicas()]
        return {kind: {name: empty for each in skeletons for name, empty in each[kind].items()} for kind in kinds}

    def goes_forward(self, scalars: Mapping[str, Any], run_step: int) -> bool:
        """Whether a worker with this state ("scalars" of it) begins with the run's parameters in a run that has reached this
        outer step: then "scalars" are all that `load_state_dict` needs, and the model's local parameters do not matter.

        Raises StorageError when they are damaged.
        """
        parts = separate_states({"scalars": scalars}, len(self._collectives))
        return all(goes_forward(self._config, part["scalars"], run_step) for part in parts)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, on any layout of ranks; before entering, with the model's local parameters loaded.

        Only "scalars", without tensors: see `goes_forward`. Raises StorageError when it does not fit the model or is damaged.
        """
        if self._hooks:
            raise LocalProtocolError("load_state_dict() after entering: load before `with EditWorker(...)`")
        with _outside_autograd():
            replicas = self._new_replicas()
            states = separate_states(state, len(replicas))
            self._checkpoints = tuple(map(Checkpoint.read, replicas, states))

    # The hooks.

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or self._swapped:
            return
        for exchange, update_points in zip(self._exchanges, self._update_points, strict=True):
            if exchange.pending is not None:
                with _outside_autograd():
                    exchange.take(lazily=self._config.sync.mode == "forward")
                    exchange.apply_fragment(update_points.get(module, ()))

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._require_local("optimizer.step()")
        with _outside_autograd():
            for exchange in self._exchanges:
                exchange.settle()

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with _outside_autograd():
            ready = [exchange.stepped() for exchange in self._exchanges]
            if not all(ready):
                return
            contributed = [exchange.contribute_if_due() for exchange in self._exchanges]
            if any(contributed):
                self._rest()

    def _rest(self) -> None:
        """What others still train along with, though its own run is over, goes back to theta with their contributions."""
        for replica in (exchange.replica for exchange in self._exchanges if exchange.finished):
            replica.move(replica.outer, lambda _: None)

    @property
    def _replica(self) -> Replica:
        return self._exchanges[0].replica

    @property
    def _feedback(self) -> ErrorFeedback:
        return self._exchanges[0].feedback

    @property
    def _furthest(self) -> Exchange:
        return max(self._entered, key=lambda exchange: exchange.outer_step)

    @property
    def _exchanges(self) -> tuple[Exchange, ...]:
        if not self._entered:
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
