"""One training of a framework, attached to a run: what the callbacks of all frameworks do alike.

The worker from the framework's first step to its last; which optimizer is hooked; when the model shows the outer parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Literal

from torch import nn
from torch.optim import Optimizer

from edit.collective import Collective, CompositeCollective
from edit.errors import ConfigError
from edit.replica.ranks import Ranks
from edit.worker.log_values import log_values
from edit.worker.unwrap import innermost_optimizers
from edit.worker.worker import EditWorker, WorkerConfig

__all__ = ["ONE_TRAINING", "Attachment"]

# Why a callback that has trained cannot train again.
ONE_TRAINING = (
    "EditCallback: has trained already; one training per callback and per peers.connect: leave that, connect again, and make a "
    "new callback"
)


class Attachment:
    """Trains a framework's model in a run, from construction until `leave` or `abandon`.

    All processes of a torch.distributed world are ranks of one replica, sharded or not; the collective must be of the same.

    Args:
        model: the module that the framework trains.
        optimizer: a torch optimizer, however the framework has wrapped it. The innermost one is hooked, so that a step which
            the wrapper leaves out (gradient accumulation, an overflow) does not count.
        collective: the run.
        config, leave: as of `EditWorker`.
        evaluate_outer: `show_outer` will be called.

    Raises ConfigError when what is wrapped is no torch optimizer, when the outer parameters are to be shown and an evaluation
    calls the optimizer, which writes to them (`eval`, `train`), and as `EditWorker`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        collective: Collective | CompositeCollective,
        config: WorkerConfig,
        leave: Literal["outer", "local"],
        *,
        evaluate_outer: bool = False,
    ) -> None:
        if evaluate_outer:
            _refuse_switched(innermost_optimizers(optimizer))
        self._config, self._collective = config, collective
        self._inside, self._shown = ExitStack(), ExitStack()
        self._showing = False
        self._ranks = Ranks.world()
        self.worker = self._inside.enter_context(EditWorker(model, optimizer, collective, config, self._ranks, leave=leave))

    def before_forward(self) -> None:
        """Take an outcome that is there, as the worker does by itself before a forward of the whole model.

        For frameworks that call only parts of the model. Raises the EditError of the collective.
        """
        if self._config.sync.mode == "blocking":  # with `forward` the parts have hooks of their own, else nothing waits
            self.take_fresh_outcome()

    def count_tokens(self, tokens: int) -> None:
        """Add the tokens that this process has trained on; every process of the replica calls it equally often."""
        self.worker.count_tokens(sum(self._ranks.collect(tokens)))

    def log(self) -> dict[str, float | str]:
        """Return what the framework's own log says of the exchange, by name.

        See `edit.worker.log_values`.
        """
        return log_values(self.worker, self._collective.peer_id, self._collective)

    @property
    def showing(self) -> bool:
        """Return whether the model holds the outer parameters now."""
        return self._showing

    def show_outer(self) -> None:
        """Put the outer parameters into the model until `hide_outer`; take a fresh outcome first, as a forward would.

        Raises the EditError of the collective.
        """
        if not self._showing:
            self.take_fresh_outcome()
            self._shown.enter_context(self.worker.outer_parameters())
            self._showing = True

    def take_fresh_outcome(self) -> None:
        """Take an outcome that the next forward would wait for; before other parameters are put into the model.

        Raises the EditError of the collective.
        """
        if not self._showing and not self._config.sync.overlap and self.worker.pending and self.worker.round_inner_steps == 0:
            self.worker.synchronize()

    def hide_outer(self) -> None:
        """Put the local parameters back, to the bit; do nothing when they are there."""
        self._showing = False
        self._shown.close()

    def leave(self) -> None:
        """Wait for the last outcome and leave the run. Raises the EditError of the collective."""
        self.hide_outer()
        self._inside.close()

    def abandon(self, error: BaseException) -> None:
        """Leave the run as after `error`: remove the hooks, and wait for no outcome."""
        self._showing = False
        for entered in (self._shown, self._inside):
            entered.__exit__(type(error), error, error.__traceback__)


def _refuse_switched(optimizers: Sequence[Optimizer]) -> None:
    """Raise ConfigError for an optimizer that puts other parameters into the model to evaluate with (schedule-free)."""
    for optimizer in optimizers:
        if callable(getattr(optimizer, "eval", None)) and callable(getattr(optimizer, "train", None)):
            raise ConfigError(
                f"evaluate_outer = True: {type(optimizer).__name__} has an eval() and a train(), which write the parameters; "
                "an evaluation would move the outer ones, and training go on from others: set evaluate_outer = False"
            )
