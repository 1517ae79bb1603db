"""`EditWorker`: hooks a user's own optimizer and model, so that a plain PyTorch loop trains with the other peers.

Owns: when a peer acts. After an optimizer step at which the schedule says so: catch up, contribute. Before the next forward (or
optimizer step), or after so many more steps, as the mode says: take the outcome, once. Rules:

- Nothing but an optimizer step starts an exchange; forwards, evaluation, checkpointing and state_dict() never do (T5 to T8).
- Theta, local parameters and residuals move together, on a commit, and only then (`edit.exchange`).
- While a contribution is FRESH the next forward waits for its outcome (`blocking`, `forward`). It becomes OVERLAPPED when
  training goes on without one: as planned (`delayed`, `eager`), or because the carrier is cut off (it is in doubt), or it was
  sent again after coming too late. Then it is asked for after optimizer steps, and the progress made since sending is replayed.

Must not know: how a carrier works, what a merge computes, any clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from edit.collective import Collective
from edit.errors import LocalProtocolError
from edit.exchange import Exchange
from edit.feedback import ErrorFeedback
from edit.layout import is_sharded
from edit.ranks import ALONE, Ranks
from edit.records import Commit
from edit.replica import Replica
from edit.resume import Checkpoint, go_on, skeleton, start, state_of
from edit.worker_config import WorkerConfig

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

    Raises EvictedError out of the loop's own forward or step when the operator evicted this peer, RefusedError on entering
    when the model does not fit the run, ConfigError when the ranks do not fit together.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        collective: Collective,
        config: WorkerConfig,
        ranks: Ranks | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._collective = collective
        self._config = config
        self._ranks = ranks if ranks is not None else Ranks.world() if is_sharded(model) else ALONE
        self._clock = clock if clock is not None else time.monotonic
        self._entered: Exchange | None = None
        self._checkpoint: Checkpoint | None = None
        self._hooks: list[RemovableHandle] = []
        self._sites: dict[nn.Module, tuple[int, ...]] = {}
        self._swapped = False

    def __enter__(self) -> Self:
        if self._hooks:
            raise LocalProtocolError("this EditWorker is already entered")
        with _outside_autograd():
            replica = self._new_replica()
            exchange = Exchange(replica, self._collective, self._optimizer, self._config, self._clock)
            regions = replica.layout.held if self._ranks.size > 1 else None
            snapshot = self._collective.join(replica.schema, replica.founding, regions)
            self._entered = exchange
            checkpoint, self._checkpoint = self._checkpoint, None
            if checkpoint is None:
                start(exchange, snapshot)
            else:
                go_on(exchange, checkpoint, snapshot)
            exchange.begin()
        self._sites = replica.engine.sites() if self._config.mode == "forward" else {}
        modules = dict.fromkeys([self._model, *self._sites])
        self._hooks = [
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_step_post_hook(self._after_step),
            *(module.register_forward_pre_hook(self._before_forward, prepend=True) for module in modules),
        ]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                with _outside_autograd():
                    self._exchange.leave()
        finally:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
            self._exchange.drop_pending()

    def _new_replica(self) -> Replica:
        self._ranks.same("the worker's configuration", self._config)
        replica = Replica(self._model, self._ranks, self._config.buffers)
        if self._config.mode == "forward":
            replica.engine.refuse_prefetch()
        return replica

    # What the user sees.

    @property
    def outer_step(self) -> int:
        """The committed outer step of theta."""
        return self._exchange.outer_step

    @property
    def digest(self) -> str:
        """Digest of theta; equal on all peers at the same outer step."""
        return self._replica.outer.digest

    @property
    def finished(self) -> bool:
        """Whether the run has reached its last outer step; optimizer steps then no longer lead to contributions."""
        return self._entered is not None and self._entered.finished

    @property
    def inner_steps(self) -> int:
        """Optimizer steps since entering, and those before the checkpoint that was loaded."""
        return self._entered.schedule.inner_steps if self._entered else 0

    @property
    def round_inner_steps(self) -> int:
        """Optimizer steps since the last contribution."""
        return self._entered.schedule.round_inner_steps if self._entered else 0

    @property
    def pending(self) -> bool:
        """Whether a contribution waits for its outcome."""
        return self._entered is not None and self._entered.pending is not None

    @property
    def last_commit(self) -> Commit | None:
        """The commit applied last, with every peer's verdicts, without its payloads; None before the first."""
        return self._entered.last_commit if self._entered else None

    @property
    def last_reason(self) -> str:
        """Why the last attempt ended as it did: the commit's reason, or why a round was lost or a snapshot taken."""
        return self._entered.last_reason if self._entered else ""

    def count_tokens(self, tokens: int) -> None:
        """Add to the tokens behind the next contribution (they weigh it when the run says `weighting = "tokens"`).

        They are the whole replica's, so every rank adds the same.
        """
        self._exchange.schedule.count_tokens(tokens)

    def synchronize(self, *, block: bool = True) -> bool:
        """Wait for the pending outcome and apply it, and every commit already known. False when the carrier is cut off.

        block: False applies what is known and does not wait; an outcome that is still open is asked for after later steps.
        """
        self._require_local("synchronize()")
        with _outside_autograd():
            return self._exchange.synchronize(block=block)

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
        """theta by tensor name: fp32 CPU copies in full shape of all that is exchanged (nothing frozen).

        In a replica of several ranks all of them call it; rank 0 gets the tensors, the others an empty dictionary.
        """
        with _outside_autograd():
            return self._replica.outer_state_dict()

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """What this worker needs to go on, for torch.distributed.checkpoint; see `edit.resume`. Changes nothing (T8).

        The model's and the optimizer's own state are the caller's. The tensors are shared, not copied: do not write into them.
        All ranks call it together.
        """
        with _outside_autograd():
            return state_of(self._exchange)

    def empty_state(self, kinds: Collection[str]) -> dict[str, dict[str, Tensor]]:
        """Zeros laid out as the model is, for torch.distributed.checkpoint to load into; kinds: keys of `state_dict`, but for
        "scalars". Before entering."""
        with _outside_autograd():
            return skeleton(self._new_replica(), kinds)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, on any layout of ranks; before entering, with the model's local parameters loaded.

        Raises StorageError when it does not fit the model or is damaged.
        """
        if self._hooks:
            raise LocalProtocolError("load_state_dict() after entering: load before `with EditWorker(...)`")
        with _outside_autograd():
            self._checkpoint = Checkpoint.read(self._new_replica(), state)

    # The hooks.

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or self._swapped:
            return
        exchange = self._exchange
        if exchange.pending is not None:
            with _outside_autograd():
                exchange.take(lazily=self._config.mode == "forward")
                exchange.land(self._sites.get(module, ()))

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._require_local("optimizer.step()")
        with _outside_autograd():
            self._exchange.settle()

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with _outside_autograd():
            self._exchange.stepped()

    @property
    def _replica(self) -> Replica:
        return self._exchange.replica

    @property
    def _feedback(self) -> ErrorFeedback:
        return self._exchange.feedback

    @property
    def _exchange(self) -> Exchange:
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
